"""How one process computes: threads, memory, memory formats and the compiler. Results do not change, except that
`channels_last` and another number of threads round differently."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import torch

from deeplightning.config.schema import Engine
from deeplightning.engine.devices import CPU_INFO
from deeplightning.faults import Fault, SetupError

log = logging.getLogger("deeplightning")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_MIB = 2**20


def prepare(engine: Engine) -> None:
    """Configure this process as `engine` requests."""
    if engine.matmul_precision is not None:
        torch.set_float32_matmul_precision(engine.matmul_precision)
    if engine.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(engine.threads)  # for child processes; Lightning reads it too
        torch.set_num_threads(engine.threads)
    if engine.keep_memory:
        keep_memory()


def matmul_hint(engine: Engine, device: torch.device) -> str | None:
    """Return a hint that TF32 would be faster on this GPU, if the run computes in 32 bits and no key decides it."""
    if device.type != "cuda" or engine.matmul_precision is not None or engine.precision not in (32, "32-true"):
        return None
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return None  # TF32 came with NVIDIA's Ampere
    return (
        "engine.matmul_precision=high multiplies matrices in TF32: faster on this GPU, with 10 bits of mantissa for 23"
    )


def keep_memory() -> None:
    """Make glibc's malloc keep up to 1 GiB of freed memory for reuse; do nothing with other allocators.

    A step frees its activations. Memory returned to the system comes back page by page, each with a page fault: 1,340
    per step of a small CNN, a quarter of its time (torch 2.15, glibc 2.36).
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 1024 * _MIB)
        mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)  # glibc's maximum: larger blocks are still returned
        mallopt(_M_TOP_PAD, 64 * _MIB)


def lay_channels_last(task: Any) -> None:
    """Store the weights of a task's convolutions in channels-last format once it has built its networks.

    Convolutions propagate the format to their outputs, so images need not arrive in it.
    """
    build, hooked = task.configure_model, weakref.WeakSet[torch.nn.Module]()

    def configure_model() -> None:  # Lightning calls it before each stage
        build()
        task.to(memory_format=torch.channels_last)
        for module in task.modules():
            if isinstance(module, torch.nn.Conv2d) and module.in_channels == 1 and module not in hooked:
                module.register_forward_pre_hook(_channels_last)
                hooked.add(module)

    task.configure_model = configure_model


def _channels_last(module: torch.nn.Module, inputs: tuple[object, ...]) -> tuple[object, ...]:
    """Give inputs with one channel, (N, 1, H, W), channels-last strides.

    With one channel both formats have the same bytes, and cuDNN would follow the strides: it would give the gradient
    the strides of the other format, which ddp's buckets do not expect.
    """
    pictures, *rest = inputs
    if isinstance(pictures, torch.Tensor) and pictures.ndim == 4 and pictures.shape[1] == 1:
        pictures = pictures.reshape(*pictures.shape[:1], *pictures.shape[2:], 1).permute(0, 3, 1, 2)
    return pictures, *rest


# ---- the compiler of `engine.compile`

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
