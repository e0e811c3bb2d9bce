"""Describe the environment of a run: packages, machine, command, commit, user. Never fails, never hangs.

Environment variables are not recorded, since they may contain secrets, except some that affect numerical results.
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
"""Environment variables that affect the number of threads, the order of operations and rounding."""

GIT = "git.json"
"""File in the folder of a sealed launch with the `git_state` at the time of submission."""

SECONDS = 10.0
"""Time limit for a program such as git. A repository on a slow network disk is not recorded."""

REPRODUCES = "DEEPLIGHTNING_REPRODUCES"
"""Variable with the run that this run reproduces; it becomes the tag `reproduces`."""


def describe(redact: Callable[[str], str] = str) -> dict[str, object]:
    """Describe the environment of this process as plain JSON types; unknown values are None.

    Args:
        redact: removes secrets; it is applied to every text.
    """
    import psutil

    directory, launch, torch = None, None, sys.modules.get("torch")
    with suppress(OSError):  # it was deleted
        directory = str(start_folder())
    with suppress(SetupError):
        launch = found.launch if (found := identity()) else None  # shared by all its processes, even after a restart
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
    """Return commit and branch (None if detached) of the repository of the working directory, else of the one that this
    code runs from; None if there is none. A sealed launch keeps its state at the time of submission."""
    with suppress(KeyError, OSError, ValueError):
        sealed: dict[str, Any] = json.loads(Path(os.environ[SEALED], GIT).read_text())
        return sealed
    commit = ask_git("rev-parse", "--verify", "--quiet", "HEAD")
    branch = ask_git("symbolic-ref", "--quiet", "--short", "HEAD")
    return {"commit": commit, "branch": branch} if commit or branch else None


def ask_git(*arguments: str, folder: Path | None = None) -> str | None:
    """Return a line of git's output, or None if git fails, takes too long or is missing.

    A repository may come from somebody else, and its settings name programs: use only commands that run none of them.
    Git itself refuses a repository of another user (`safe.directory`).

    Args:
        folder: folder of the repository; None: as in `git_state`.
    """
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": SECONDS, "check": True}
    try:
        if folder is None:
            folder, ours = start_folder(), Path(__file__).resolve().parents[2]
            folder = folder if any((top / ".git").exists() for top in (folder, *folder.parents)) else ours
        done = subprocess.run(["git", "-C", str(folder), *arguments], **options)
    except (OSError, subprocess.SubprocessError):  # OSError: also if the working directory was deleted
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
    """List the GPUs with nvidia-smi: torch would initialize CUDA in this process, which then could not fork."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
        rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.strip()]
        return [{"name": name, "memory_mib": int(memory), "driver": driver} for name, memory, driver in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def packages() -> dict[str, str]:
    """Return the versions of the installed packages that runs depend on."""
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

    MLflow describes the repository of the started file, which is ours, and its address, perhaps with a password. These
    tags describe the user's repository instead.
    """
    git = git_state() or {}
    repository = {f"mlflow.source.git.{name}": git[name] for name in ("commit", "branch") if git.get(name)}
    script = sys.argv[0] if sys.argv and sys.argv[0] else "<console>"
    user = os.environ.get("MLFLOW_TRACKING_USERNAME", "")  # the name on an MLflow server, else on this machine
    with suppress(ImportError, KeyError, OSError):  # a user without a name
        user = user or getpass.getuser()
    tags = {"mlflow.user": user or "unknown", "mlflow.source.name": script, "mlflow.source.type": "LOCAL"} | repository
    if given := os.environ.get("MLFLOW_RUN_CONTEXT"):
        try:
            tags |= {str(name): str(value) for name, value in dict(json.loads(given)).items()}
        except (ValueError, TypeError) as error:
            log.warning("The variable MLFLOW_RUN_CONTEXT is not used: it is not a JSON object: %s", error)
    return tags
