"""What a run needs to be understood later: packages, machine, command, commit, user. Never fails, never hangs.

Environment variables are not read into it, since they hold secrets, but for some that decide over numbers.
"""

import getpass
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deeplightning.faults import SetupError
from deeplightning.own_code import SEALED
from deeplightning.process.identity import identity
from deeplightning.runfolder import start_folder

log = logging.getLogger("deeplightning.tracking")

PACKAGES = [
    *("deeplightning", "torch", "torchvision", "triton", "pytorch-lightning", "lightning", "lightning-utilities"),
    *("torchmetrics", "deepspeed", "ray", "submitit", "optuna", "mlflow", "tensorboard", "numpy", "pillow"),
    *("scikit-learn", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime", "safetensors", "flask"),
]

VARIABLES = [
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_SCHEDULE", "PYTHONHASHSEED"),
    *("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "KMP_AFFINITY"),
]
"""Environment variables that decide how many compute, in what order, and how numbers are rounded."""

GIT = "git.json"
"""The file in the folder of a sealed launch with `git_state` as it was when it was submitted."""

SECONDS = 10.0
"""How long a program such as git may take; a repository on a slow network disk is then left out."""

REPRODUCES = "DEEPLIGHTNING_REPRODUCES"
"""The variable that names the run which this one makes again; the tag `reproduces` of this one."""


def describe(redact: Callable[[str], str] = str) -> dict[str, object]:
    """Describe the environment of this process as plain JSON types; unknown values are None.

    Args:
        redact: is applied to every text, to take secrets out.
    """
    import psutil

    directory, launch, torch = None, None, sys.modules.get("torch")
    with suppress(OSError):  # it was deleted
        directory = str(start_folder())
    with suppress(SetupError):
        launch = found.launch if (found := identity()) else None  # shared by its processes, also after a restart
    return redacted(
        {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "launch": launch,
            "directory": directory,
            "host": socket.gethostname(),
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "os": platform.platform(),
            "cpu": _cpu(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": _gpus(),
            "packages": packages(),
            "threads": torch.get_num_threads() if torch is not None else None,
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "git": git_state(),
        },
        redact,
    )


def git_state() -> dict[str, Any] | None:
    """Return commit and branch (None if detached) of a repository, or None without one: that of the working directory;
    where that is in none, the one that this code runs from. A sealed launch keeps those of its sealing."""
    with suppress(KeyError, OSError, ValueError):
        sealed: dict[str, Any] = json.loads(Path(os.environ[SEALED], GIT).read_text())
        return sealed
    commit = ask_git("rev-parse", "--verify", "--quiet", "HEAD")
    branch = ask_git("symbolic-ref", "--quiet", "--short", "HEAD")
    return {"commit": commit, "branch": branch} if commit or branch else None


def ask_git(*arguments: str, folder: Path | None = None) -> str | None:
    """Return a line of git's output, or None if it fails, takes too long or is missing.

    A repository may have come with somebody else's folder, and its settings name programs: ask only what runs none of
    them. Git itself refuses a repository of another user (`safe.directory`).

    Args:
        folder: of the repository; None: the one of `git_state`.
    """
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": SECONDS, "check": True}
    try:
        if folder is None:
            folder, ours = start_folder(), Path(__file__).resolve().parents[2]
            folder = folder if any((top / ".git").exists() for top in (folder, *folder.parents)) else ours
        done = subprocess.run(["git", "-C", str(folder), *arguments], **options)
    except (OSError, subprocess.SubprocessError):  # OSError: also of a working directory that was deleted
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def _cpu() -> dict[str, object]:
    model = ""
    with suppress(OSError, StopIteration):  # macOS has no such file
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model or platform.processor() or platform.machine(), "cores": os.cpu_count(), "usable": usable}


def _gpus() -> list[dict[str, object]]:
    """List the GPUs by nvidia-smi: torch would have to start CUDA in this process, which forbids forking."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.strip()]
        return [{"name": name, "memory_mib": int(memory), "driver": driver} for name, memory, driver in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def packages() -> dict[str, str]:
    """Return the versions of the packages that runs depend on, as far as they are installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def redacted(value: object, redact: Callable[[str], str]) -> Any:
    """Apply `redact` to every text in nested mappings and lists."""
    if isinstance(value, dict):
        return {key: redacted(inner, redact) for key, inner in value.items()}
    if isinstance(value, list):
        return [redacted(inner, redact) for inner in value]
    return redact(value) if isinstance(value, str) else value


def run_tags() -> dict[str, str]:
    """Return the tags that MLflow's client would resolve, without importing it.

    MLflow describes the repository of the started file, which is ours, and its address, perhaps with a password; so git
    is asked here for that of the user.
    """
    git = git_state() or {}
    repository = {f"mlflow.source.git.{name}": git[name] for name in ("commit", "branch") if git.get(name)}
    script = sys.argv[0] if sys.argv and sys.argv[0] else "<console>"
    tags = {"mlflow.user": _user(), "mlflow.source.name": script, "mlflow.source.type": "LOCAL"} | repository
    if given := os.environ.get("MLFLOW_RUN_CONTEXT"):
        try:
            tags |= {str(name): str(value) for name, value in dict(json.loads(given)).items()}
        except (ValueError, TypeError) as error:
            log.warning("The variable MLFLOW_RUN_CONTEXT is not used: it is not a JSON object: %s", error)
    return tags


def _user() -> str:
    """Return the user name for MLflow's servers, else the user of this machine."""
    try:
        return os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    except (ImportError, KeyError, OSError):  # a user whom the machine has no name for
        return "unknown"
