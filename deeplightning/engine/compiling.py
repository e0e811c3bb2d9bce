"""Preparation for `engine.compile`: find a compiler, and set a cache folder for later runs."""

import hashlib
import logging
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from deeplightning.config.schema import Engine
from deeplightning.engine.devices import CPU_INFO
from deeplightning.faults import Fault, SetupError

log = logging.getLogger("deeplightning")

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable for the folder; it also contains Triton's kernels unless `TRITON_CACHE_DIR` is set (torch 2.15)."""


def prepare_to_compile(engine: Engine) -> None:
    """Find the compiler, and set a cache folder that outlives the run.

    torch's default is the system's temporary folder, which a container or a cluster empties. A folder that the user set
    in the environment or in `engine.env` stays. Files are named by content and renamed into place, so any number of
    processes can share the folder.

    Raises:
        SetupError: there is no compiler, or it cannot use the folder that the user set.
    """
    on_gpu = engine.gpus is not None
    if engine.compile == "graphs":  # by CUDA alone
        if not on_gpu:
            log.info("engine.compile=graphs records what a GPU computes: this run has none, and trains eagerly")
        return
    _find_compiler(on_gpu)
    folder, given = cache_folder(), os.environ.get(FOLDER)
    if given is not None:
        if not _takes(given, on_gpu):
            message = f"{FOLDER} is {given!r}, and torch's C++ compiler takes no folder with a space; set another"
            raise SetupError(Fault(message, "engine.compile"))
    elif folder is not None and not _takes(str(folder), on_gpu):
        log.info("%s has a space, which torch's compiler does not take; compiled code goes to torch's folder", folder)
    elif folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.environ[FOLDER] = str(folder)
        except OSError as error:
            log.info("%s: %s; what is compiled goes to torch's own folder", folder, error.strerror)


def _takes(folder: str, on_gpu: bool) -> bool:
    """Return whether the compiler can use the folder: torch 2.15 calls the CPU's without quotes around paths."""
    return on_gpu or not any(character.isspace() for character in folder)


def cache_folder() -> Path | None:
    """Return a folder in the user's cache for compiled code; None for a user without a home. It depends on the versions
    of torch and Python and the kind of CPU, since code for one may not run on another."""
    try:
        top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return top / "deeplightning" / "compiled" / f"torch-{torch.__version__}-python-{python}-{_cpu()}"


def _cpu() -> str:
    """Return a short name for the machine's instruction set."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def _find_compiler(on_gpu: bool) -> None:
    """Raise if no compiler is where torch 2.15 (C++ for CPUs) and Triton 3.9 (C for GPUs) look for one."""
    if sys.platform == "win32":
        return
    variable, language = ("CC", "C") if on_gpu else ("CXX", "C++")
    usual = ["gcc", "clang"] if on_gpu else ["clang++" if sys.platform == "darwin" else "g++"]
    named = os.environ.get(variable, "").split()
    wanted = named[:1] or usual
    if any(map(shutil.which, wanted)):
        return
    why = f"{variable} names {named[0]}, which is not there" if named else f"the PATH has no {' and no '.join(usual)}"
    remedy = f"install one (Debian: apt-get install g++), set {variable} to its name, or set engine.compile=false"
    raise SetupError(Fault(f"no {language} compiler: {why}; {remedy}", "engine.compile"))
