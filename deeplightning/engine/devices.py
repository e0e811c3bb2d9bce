"""What this machine computes on, told without importing torch, which costs a second and more."""

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def cuda_devices() -> int:
    """The number of CUDA devices that torch sees: none if its build knows no CUDA; the variable CUDA_VISIBLE_DEVICES
    counts."""
    built_for = _built_for()
    if "torch" in sys.modules or built_for is None:
        import torch

        return torch.cuda.device_count()
    return _visible(_driver_count(), os.environ.get("CUDA_VISIBLE_DEVICES")) if built_for == "cuda" else 0


def _built_for() -> str | None:
    """`cuda` or `cpu`, by the text of torch's version file; None where only torch itself can tell."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path((spec.submodule_search_locations or [""])[0], "version.py").read_text() if spec else ""
    except OSError:
        return None
    built = dict(re.findall(r"^(cuda|hip)(?:\s*:[^=\n]*)?\s*=\s*(.*)$", text, re.MULTILINE))
    if "cuda" not in built or built.get("hip", "None") != "None":
        return None
    return "cpu" if built["cuda"] == "None" else "cuda"


def _driver_count() -> int:
    """What NVIDIA's management library counts, as torch itself asks it (`torch.cuda._device_count_nvml`, 2.15)."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _visible(count: int, words: str | None) -> int:
    """How many of `count` devices a value of CUDA_VISIBLE_DEVICES leaves: those before the first that is not there."""
    if words is None:
        return count
    seen: list[str] = []
    for word in (w.strip() for w in words.split(",")):
        is_there = word.isdigit() and int(word) < count
        if not (is_there or re.match("GPU-|MIG-", word)) or word in seen:
            break
        seen.append(word)
    return len(seen) if count else 0


def cpu_computes_bf16() -> bool:
    """Whether the CPU has instructions for numbers of bf16; yes where its flags are not told, as outside Linux."""
    try:
        flags = set(CPU_INFO.read_text().split())
    except OSError:
        return True
    return bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
