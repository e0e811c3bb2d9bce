"""What a run needs to be understood later: code, packages, machine, command. Never fails, never hangs.

Environment variables are not read into it, since they hold secrets, but for some that decide over numbers.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deeplightning.config.secret_scan import conceal_diff
from deeplightning.faults import SetupError
from deeplightning.own_code import SEALED
from deeplightning.process.identity import identity
from deeplightning.runfolder import start_folder
from deeplightning.tracking.git import SECONDS, run_git

MAX_DIFF = 2_000_000
"""Bytes kept of a diff."""
MAX_UNTRACKED = 1000
"""Untracked files that are listed."""

PACKAGES = [
    *("deeplightning", "torch", "torchvision", "triton", "pytorch-lightning", "lightning", "lightning-utilities"),
    *(
        "torchmetrics",
        "deepspeed",
        "ray",
        "submitit",
        "optuna",
        "mlflow",
        "tensorboard",
        "numpy",
        "pillow",
    ),
    *("scikit-learn", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime", "safetensors", "flask"),
]

VARIABLES = [
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_SCHEDULE", "PYTHONHASHSEED"),
    *("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "KMP_AFFINITY"),
]
"""Environment variables that decide how many compute, in what order, and how numbers are rounded."""

GIT = "git.json"
"""The file in the folder of a sealed launch with what git printed when it was submitted."""

Ask = Callable[..., str | None]

REPRODUCES = "DEEPLIGHTNING_REPRODUCES"
"""The variable that names the run which this one makes again; the tag `reproduces` of this one."""


def describe(redact: Callable[[str], str] = str) -> dict[str, object]:
    """Describe the environment of this process as plain JSON types; unknown values are None.

    Args:
        redact: is applied to every text, to take secrets out.
    """
    return redacted(
        {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "launch": _launch(),
            "directory": _quietly(lambda: str(start_folder())),
            "host": socket.gethostname(),
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "os": platform.platform(),
            "cpu": _cpu(),
            "memory_gib": _memory(),
            "gpus": _gpus(),
            "packages": packages(),
            "threads": _threads(),
            "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "git": git_state(),
        },
        redact,
    )


def _launch() -> str | None:
    """Return the identifier that the processes of this launch share, also after a restart."""
    try:
        found = identity()
    except SetupError:
        return None
    return found.launch if found else None


def git_answers(redact: Callable[[str], str]) -> dict[str, str | None]:
    """Return git's answers to the queries of `git_diff` and `git_state`, by arguments, without secrets."""
    answers: dict[str, str | None] = {}

    def ask(*arguments: str, limit: int | None = None) -> str | None:
        answer = _ask_sealed(*arguments, limit=limit)
        answers[shlex.join(arguments)] = None if answer is None else conceal_diff(redact(answer))
        return answer

    git_diff(ask=ask)
    git_state(ask)
    return answers


def _ask_sealed(*arguments: str, limit: int | None = None) -> str | None:
    """Return what git printed when this launch was sealed, or else what it prints now."""
    try:
        answers = json.loads(Path(os.environ[SEALED], GIT).read_text())
    except (KeyError, OSError, ValueError):
        return ask_git(*arguments, limit=limit)
    answer: str | None = answers.get(shlex.join(arguments))
    return answer


def git_diff(redact: Callable[[str], str] = str, ask: Ask = _ask_sealed) -> str | None:
    """Return what the repository has beyond its last commit: the diff, then the names of untracked files.

    The repository is the working directory's; where that is in none, the one that this code runs from.

    None where there is nothing to tell: no git, no repository, or a clean one. At most 2 MB of the diff are kept.
    """
    status = ask("status", "--porcelain", "-z", "--untracked-files=normal")
    if not status:
        return None
    has_commit = ask("rev-parse", "--verify", "--quiet", "HEAD") is not None
    arguments = ("HEAD",) if has_commit else ("--cached",)
    diff = ask("diff", "--no-ext-diff", "--no-textconv", "--no-color", *arguments, limit=MAX_DIFF + 1)
    parts = ["# The diff could not be read.\n"] if diff is None else [diff[:MAX_DIFF]]
    if diff is not None and len(diff) > MAX_DIFF:
        parts.append(f"\n# Cut here, after {MAX_DIFF} bytes.\n")
    untracked = [entry[3:] for entry in status.split("\0") if entry.startswith("?? ")]
    if untracked:
        parts.append(f"# Untracked files ({len(untracked)}), without their content:\n")
        parts += [f"#   {name}\n" for name in untracked[:MAX_UNTRACKED]]
    return conceal_diff(redact("".join(parts)))


def git_state(ask: Ask = _ask_sealed) -> dict[str, Any] | None:
    """Return commit, branch (None if detached) and dirtiness of the repository of `git_diff`, or None without one."""
    status = ask("status", "--porcelain=v2", "--branch", "--untracked-files=normal")
    if status is None:
        return None
    lines = status.splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# ") and " " in line[2:])
    commit, branch = head.get("branch.oid"), head.get("branch.head")
    return {
        "commit": None if commit == "(initial)" else commit,
        "branch": None if branch == "(detached)" else branch,
        "dirty": any(not line.startswith("#") for line in lines),
    }


def ask_git(*arguments: str, limit: int | None = None, folder: Path | None = None) -> str | None:
    """Return git's output, at most `limit` bytes, or None if it fails or takes too long.

    Args:
        folder: of the repository; None: the one that `git_diff` speaks of.
    """
    try:
        output = run_git(folder or Path(_directory()), *arguments, limit=limit)
    except OSError:  # the working directory was deleted
        return None
    return None if output is None else output.decode("utf-8", "replace")


def _directory() -> str:
    """Return the working directory if it is inside a repository, else the folder of this code."""
    here = start_folder()
    if any((folder / ".git").exists() for folder in (here, *here.parents)):
        return str(here)
    return str(Path(__file__).resolve().parents[2])


def _cpu() -> dict[str, object]:
    model = None
    if (info := Path("/proc/cpuinfo")).exists():
        lines = (_quietly(info.read_text) or "").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model or platform.processor() or platform.machine(), "cores": os.cpu_count(), "usable": usable}


def _memory() -> float | None:
    try:
        import psutil
    except ImportError:
        return None
    return round(psutil.virtual_memory().total / 2**30, 1)


def _gpus() -> list[dict[str, object]]:
    """List the GPUs by nvidia-smi: torch would have to start CUDA in this process, which forbids forking."""
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        query = [smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS, check=True).stdout
            rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.strip()]
            return [{"name": name, "memory_mib": int(memory), "driver": driver} for name, memory, driver in rows]
        except (OSError, subprocess.SubprocessError, ValueError):
            pass  # a driver that does not answer; torch may still know
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [{"name": gpu.name, "memory_mib": gpu.total_memory // 2**20, "driver": None} for gpu in found]
    return []


def _threads() -> int | None:
    """Return the number of torch's threads in this process, or None if torch is not imported."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else None


def packages() -> dict[str, str]:
    """Return the versions of the packages that runs depend on, as far as they are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def redacted(value: object, redact: Callable[[str], str]) -> Any:
    """Apply `redact` to every text in nested mappings and lists."""
    if isinstance(value, dict):
        return {key: redacted(inner, redact) for key, inner in value.items()}
    if isinstance(value, list):
        return [redacted(inner, redact) for inner in value]
    return redact(value) if isinstance(value, str) else value


def _quietly(function: Callable[[], str]) -> str | None:
    try:
        return function()
    except OSError:
        return None
