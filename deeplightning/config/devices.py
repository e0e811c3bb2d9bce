"""Describe this machine's GPUs, and check `engine.gpus` against them, without importing torch, which takes seconds.

`machine()` describes the GPUs as NVIDIA's management library (NVML) reports them; `engine.gpus` is checked against that
description alone.
"""

import ctypes
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from deeplightning.config.packages import TORCH_BUILD
from deeplightning.config.schema import Engine
from deeplightning.words import first_line

CPU_INFO = Path("/proc/cpuinfo")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance of one.

    Attributes:
        uuid: `GPU-…` or `MIG-…`; empty if only the number of GPUs is known.
        name: the product, such as `NVIDIA H100 80GB HBM3`.
        total: bytes of memory; None if unknown.
    """

    uuid: str = ""
    name: str = ""
    total: int | None = None


@dataclass(frozen=True)
class Machine:
    """Facts about the machine that `engine.gpus` depends on.

    Attributes:
        gpus: all GPUs, in the order of `nvidia-smi`.
        visible: the value of CUDA_VISIBLE_DEVICES; None if it is not set, or torch has already applied it.
        trouble: why the driver does not respond; None if it does.
        supports: the newest CUDA release that the driver supports, such as (13, 0).
        built_for: the CUDA release that torch is built for; None if unknown.
        is_built: whether torch is built for GPUs.
    """

    gpus: tuple[Gpu, ...] = ()
    visible: str | None = None
    trouble: str | None = None
    supports: tuple[int, int] | None = None
    built_for: tuple[int, int] | None = None
    is_built: bool = True

    def visible_gpus(self) -> list[Gpu]:
        """Return the GPUs in CUDA's order: those before the first invalid entry of CUDA_VISIBLE_DEVICES.

        No GPU is visible if an entry occurs twice. This matches `torch.cuda._parse_visible_devices` (2.15).
        """
        if not self.is_built:
            return []
        if self.visible is None:
            return list(self.gpus)
        kind = _id_prefix(self.visible)
        entries = list(takewhile(lambda e: _id_prefix(e) == kind and (kind or _is_index(e)), self.visible.split(",")))
        found = [gpus[0] for gpus in takewhile(lambda gpus: len(gpus) == 1, map(self.matching, entries))]
        return [] if len(set(entries)) < len(entries) or len(set(found)) < len(found) else found

    def matching(self, entry: str) -> list[Gpu]:
        """Return the GPUs that match an index or the beginning of an id; only CUDA can look up a MIG instance."""
        if _is_index(entry):
            return list(self.gpus[int(entry) : int(entry) + 1])
        if _id_prefix(entry) == "MIG-":
            return [Gpu(entry)]
        return [gpu for gpu in self.gpus if gpu.uuid.startswith(entry)] if _id_prefix(entry) else []


def _id_prefix(entry: str) -> str:
    return next((prefix for prefix in ("GPU-", "MIG-") if entry.startswith(prefix)), "")


def _is_index(entry: str) -> bool:
    return entry.isascii() and entry.strip().isdigit()


def machine() -> Machine:
    """Describe this machine from the driver and torch's files; import torch only if they are not enough."""
    release = _torch_cuda_release()
    if release == "cpu":
        return Machine(is_built=False)
    found = None if release is None else _query_nvml()
    if found is None or (not found.gpus and found.trouble is None and _has_cuda()):
        # A build for other GPUs, a Jetson, or a container without NVML
        import torch

        return Machine(gpus=(Gpu(),) * torch.cuda.device_count())
    parts = re.match(r"(\d+)\.(\d+)", release or "")
    built_for = (int(parts[1]), int(parts[2])) if parts else None
    return replace(found, visible=os.environ.get(VISIBLE), built_for=built_for)


def _has_cuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _torch_cuda_release() -> str | None:
    """Return the CUDA release in torch's version file, such as `13.2`, or `cpu`; None if unknown."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path((spec.submodule_search_locations or [""])[0], "version.py").read_text() if spec else ""
    except OSError:
        return None
    built = dict(re.findall(r"^(cuda|hip)(?:\s*:[^=\n]*)?\s*=\s*(.*)$", text, re.MULTILINE))
    if "cuda" not in built or built.get("hip", "None") != "None":
        return None
    return "cpu" if built["cuda"] == "None" else built["cuda"].strip("'\"")


# ---- NVML: https://docs.nvidia.com/deploy/nvml-api/


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _query_nvml() -> Machine:
    """Return what NVML reports: the GPUs, or why they are unknown, and the CUDA release that the driver supports."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Machine()
    if (code := nvml.nvmlInit_v2()) != 0:
        return Machine(trouble=f"the NVIDIA driver does not answer (NVML error {code}); `nvidia-smi` shows why")
    try:
        count, release = ctypes.c_uint(0), ctypes.c_int(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(release))  # 13000 is 13.0
        gpus = tuple(_gpu(nvml, number) for number in range(count.value))
        return Machine(gpus, supports=(release.value // 1000, release.value % 1000 // 10) if release.value else None)
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, number: int) -> Gpu:
    handle, memory = ctypes.c_void_p(), _Memory()
    uuid, name = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
    nvml.nvmlDeviceGetUUID(handle, uuid, 96)
    nvml.nvmlDeviceGetName(handle, name, 96)
    has_memory = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    return Gpu(uuid.value.decode(), name.value.decode(), memory.total if has_memory else None)


def cpu_computes_bf16() -> bool:
    """Return whether the CPU has bf16 instructions; True if its flags are unknown, as outside Linux."""
    try:
        flags = set(CPU_INFO.read_text().split())
    except OSError:
        return True
    return bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


_CPU = "`engine.gpus=null` runs on the CPU"
_BUILD = f"{TORCH_BUILD} installs a build that fits"


def resolve_gpus(engine: Engine, change: Callable[[str, object, str], None]) -> str | None:
    """Resolve `engine.gpus` in place; return a message if the machine lacks something, else None."""
    here = machine()
    if engine.gpus == "auto":
        change("gpus", list(range(len(here.visible_gpus()))) or None, _describe_available(here))
    elif engine.gpus in (0, []):
        change("gpus", None, "no GPU is requested")
    return None if engine.gpus is None else _missing_gpus(engine.gpus, here) or _outdated_driver(here)


def _describe_available(here: Machine) -> str:
    """Describe how many GPUs a process may use, and why not all of the machine's."""
    shown = len(here.visible_gpus()) or "none"
    if not here.is_built:
        return f"this torch is built without CUDA; {_BUILD}"
    if here.visible is not None and len(here.visible_gpus()) < len(here.gpus):
        return f"{VISIBLE}={here.visible} shows {shown} of this machine's {len(here.gpus)}"
    return f"this machine has {shown}" + (f": {here.trouble}" if here.trouble else "")


def _missing_gpus(asked: Any, here: Machine) -> str | None:
    """Return a message if requested GPUs do not exist or are hidden, else None."""
    shown = here.visible_gpus()
    beyond = [str(n) for n in asked if not 0 <= n < len(shown)] if isinstance(asked, list) else []
    if beyond:
        wanted = f"GPU {'index' if len(beyond) == 1 else 'indexes'} {', '.join(beyond)}"
    elif isinstance(asked, int) and asked > len(shown):
        wanted = f"{asked} GPU{'s' * (asked > 1)}"
    else:
        return None
    count_from = ", counted from 0" if beyond and shown else ""
    return f"asks for {wanted}; {_describe_available(here)}{count_from}; {_CPU}, `engine.gpus=auto` uses available GPUs"


def _outdated_driver(here: Machine) -> str | None:
    """Return a message if the driver is too old for this build of torch, else None."""
    if here.supports is None or here.built_for is None or here.supports[0] >= here.built_for[0]:
        return None
    newest, release = (f"{major}.{minor}" for major, minor in (here.supports, here.built_for))
    return (
        f"the driver supports CUDA {newest} at most, and this torch is built for CUDA {release}; update the driver, or "
        f"{_BUILD}, or {_CPU}"
    )


UNUSABLE = (
    "CUDA-capable device(s) is/are busy or unavailable",
    "no kernel image is available for execution on the device",
    "CUDA driver version is insufficient for CUDA runtime version",
    "The NVIDIA driver on your system is too old",
    "invalid device ordinal",
    "no CUDA-capable device is detected",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver on your system",
    "CUDA driver initialization failed",
    "CUDA unknown error",
)
"""Phrases in run-time errors of CUDA 13 and torch 2.15 that the machine causes."""


def unusable(error: BaseException) -> str | None:
    """Return a message with a remedy if an error reports that a GPU of this machine cannot be used, else None."""
    if not isinstance(error, RuntimeError) or not any(words in str(error) for words in UNUSABLE):
        return None
    remedy = f"`nvidia-smi` shows the GPUs, their processes and the driver; {VISIBLE} may hide GPUs; {_BUILD}; {_CPU}"
    return f"{first_line(error)}: {remedy}"
