"""Description of this machine's GPUs without importing torch, which takes a second and more.

`machine()` describes the GPUs as NVIDIA's management library (NVML) and the driver report them; `engine.gpus` is
checked against that description alone.
"""

import contextlib
import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

CPU_INFO = Path("/proc/cpuinfo")
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Holder(NamedTuple):
    """A process that uses a GPU.

    Attributes:
        pid: the driver's number for it; in a container this may be the number outside.
        used: bytes of the GPU's memory; None if the driver does not report it.
    """

    pid: int
    used: int | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one in MIG mode.

    Attributes:
        uuid: `GPU-…` or `MIG-…`; empty if only the number of GPUs is known.
        name: the product, such as `NVIDIA H100 80GB HBM3`.
        total, free: bytes of memory; None if the driver does not report it.
        mode: the compute mode: any number of processes, one, or none.
        holders: the processes that use it, if they may be listed.
        instances: of a GPU in MIG mode; None without MIG mode.
    """

    uuid: str = ""
    name: str = ""
    total: int | None = None
    free: int | None = None
    mode: Literal["default", "exclusive", "prohibited"] = "default"
    holders: tuple[Holder, ...] = ()
    instances: tuple["Gpu", ...] | None = None


@dataclass(frozen=True)
class Machine:
    """Facts about the machine that `engine.gpus` depends on.

    Attributes:
        gpus: all GPUs, in the order of `nvidia-smi`.
        visible: the value of CUDA_VISIBLE_DEVICES; None if it is not set, or torch has already applied it.
        by_bus: whether CUDA is certain to number the GPUs in that order.
        trouble: why the driver does not answer, with the remedy.
        driver: its version, such as `580.95.05`.
        supports: the newest CUDA release that it supports, such as (13, 0).
        built_for: the CUDA release that torch is built for; None if unknown.
        is_built: whether torch is built for GPUs.
    """

    gpus: tuple[Gpu, ...] = ()
    visible: str | None = None
    by_bus: bool = True
    trouble: str | None = None
    driver: str | None = None
    supports: tuple[int, int] | None = None
    built_for: tuple[int, int] | None = None
    is_built: bool = True

    def shown(self) -> list[Gpu]:
        """Return the GPUs in CUDA's order: those before the first invalid entry of CUDA_VISIBLE_DEVICES.

        No GPU is shown if an entry occurs twice. This matches `torch.cuda._parse_visible_devices` (2.15).
        """
        if not self.is_built:
            return []
        if self.visible is None:
            return list(self.gpus)
        kind = _kind(self.visible)
        words = list(takewhile(lambda w: _kind(w) == kind and (kind or _is_index(w)), self.visible.split(",")))
        found = [gpus[0] for gpus in takewhile(lambda gpus: len(gpus) == 1, map(self.named, words))]
        return [] if len(set(words)) < len(words) or len(set(found)) < len(found) else found

    def named(self, word: str) -> list[Gpu]:
        """Return the GPUs or MIG instances that match a number or the beginning of an id."""
        if _is_index(word):
            return list(self.gpus[int(word) : int(word) + 1])
        every = [*self.gpus, *(instance for gpu in self.gpus for instance in gpu.instances or ())]
        return [gpu for gpu in every if gpu.uuid.startswith(word)] if _kind(word) else []


def _kind(word: str) -> str:
    return next((kind for kind in ("GPU-", "MIG-") if word.startswith(kind)), "")


def _is_index(word: str) -> bool:
    return word.isascii() and word.strip().isdigit()


def machine() -> Machine:
    """Describe this machine from the driver and torch's files; import torch only if they are not enough."""
    release = _built_for()
    if release == "cpu":
        return Machine(gpus=_described().gpus, visible=os.environ.get(VISIBLE), is_built=False)
    if release is None:
        return _as_torch_counts()
    found = _described()
    if not found.gpus and found.trouble is None and _is_there("libcuda.so.1"):  # Jetson, or a container without NVML
        return _as_torch_counts()
    # CUDA lists the fastest first by default, NVML follows the bus.
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in found.gpus}) < 2
    return replace(found, visible=os.environ.get(VISIBLE), by_bus=by_bus, built_for=_release(release))


def _as_torch_counts() -> Machine:
    import torch

    return Machine(gpus=(Gpu(),) * torch.cuda.device_count())


def has_begun() -> bool:
    """Return whether this process has initialised CUDA, after which CUDA_VISIBLE_DEVICES has no effect.

    The driver is asked: torch records only its own contexts, and `torch.cuda.is_available()` is enough to begin.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0  # 3 if not initialised
    return False


def _built_for() -> str | None:
    """Return the CUDA release in torch's version file, such as `13.2`, or `cpu`; None if the file does not tell."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path((spec.submodule_search_locations or [""])[0], "version.py").read_text() if spec else ""
    except OSError:
        return None
    built = dict(re.findall(r"^(cuda|hip)(?:\s*:[^=\n]*)?\s*=\s*(.*)$", text, re.MULTILINE))
    if "cuda" not in built or built.get("hip", "None") != "None":
        return None
    return "cpu" if built["cuda"] == "None" else built["cuda"].strip("'\"")


def _release(text: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# ---- NVML: https://docs.nvidia.com/deploy/nvml-api/

_TROUBLES = {
    4: "the NVIDIA driver refuses this user; it needs to read /dev/nvidiactl",
    9: "the NVIDIA driver is not loaded; `nvidia-smi` shows the state, `sudo modprobe nvidia` loads it",
    18: "the NVIDIA driver was updated while it was loaded; restart the machine",
}
_MODES: dict[int, Literal["exclusive", "prohibited"]] = {1: "exclusive", 2: "prohibited", 3: "exclusive"}
_UNKNOWN_BYTES = 2**64 - 1  # NVML's value for a process's memory


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), *((n, ctypes.c_uint) for n in ("gi", "ci"))]


class _Nvml:
    """NVML's functions. Each returns a value through a pointer; those that the driver refuses or lacks are skipped."""

    def __init__(self, library: object):
        self._library = library

    def call(self, name: str, *arguments: object) -> int:
        """Call a function; return its return code, or 999 if it does not exist."""
        function = getattr(self._library, name, None)
        return 999 if function is None else function(*arguments)

    def number(self, name: str, *arguments: object) -> int | None:
        value = ctypes.c_uint(0)
        return value.value if self.call(name, *arguments, ctypes.byref(value)) == 0 else None

    def text(self, name: str, *arguments: object) -> str:
        buffer = ctypes.create_string_buffer(96)
        return buffer.value.decode() if self.call(name, *arguments, buffer, 96) == 0 else ""

    def handles(self, count: int, name: str, *arguments: object) -> Iterator[ctypes.c_void_p]:
        for index in range(count):
            handle = ctypes.c_void_p()
            if self.call(name, *arguments, index, ctypes.byref(handle)) == 0:
                yield handle

    def gpu(self, handle: ctypes.c_void_p) -> Gpu:
        memory, pending = _Memory(), ctypes.c_uint(0)
        knows_memory = self.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)) == 0
        mig, instances = ctypes.c_uint(0), None
        if self.call("nvmlDeviceGetMigMode", handle, ctypes.byref(mig), ctypes.byref(pending)) == 0 and mig.value:
            most = self.number("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
            instances = tuple(map(self.gpu, self.handles(most, "nvmlDeviceGetMigDeviceHandleByIndex", handle)))
        return Gpu(
            uuid=self.text("nvmlDeviceGetUUID", handle),
            name=self.text("nvmlDeviceGetName", handle),
            total=memory.total if knows_memory else None,
            free=memory.free if knows_memory else None,
            mode=_MODES.get(self.number("nvmlDeviceGetComputeMode", handle) or 0, "default"),
            holders=tuple(self.holders(handle)),
            instances=instances,
        )

    def holders(self, handle: ctypes.c_void_p) -> Iterator[Holder]:
        count, found = ctypes.c_uint(64), (_Process * 64)()
        for version in ("v3", "v2"):  # with the same layout
            name = f"nvmlDeviceGetComputeRunningProcesses_{version}"
            if self.call(name, handle, ctypes.byref(count), found) == 0:
                for process in found[: count.value]:
                    yield Holder(process.pid, None if process.used == _UNKNOWN_BYTES else process.used)
                return


def _described() -> Machine:
    """Return what NVML reports: the GPUs, why they are unknown, the driver's version, and the CUDA release that it
    supports."""
    try:
        nvml = _Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except OSError:
        return Machine()
    if (code := nvml.call("nvmlInit_v2")) != 0:
        return Machine(trouble=_TROUBLES.get(code, f"the NVIDIA driver does not answer (NVML error {code})"))
    try:
        gpus = tuple(
            map(nvml.gpu, nvml.handles(nvml.number("nvmlDeviceGetCount_v2") or 0, "nvmlDeviceGetHandleByIndex_v2"))
        )
        release = nvml.number("nvmlSystemGetCudaDriverVersion_v2")  # 13000 is 13.0
        supports = (release // 1000, release % 1000 // 10) if release else None
        return Machine(gpus, driver=nvml.text("nvmlSystemGetDriverVersion") or None, supports=supports)
    finally:
        nvml.call("nvmlShutdown")


def cpu_computes_bf16() -> bool:
    """Return whether the CPU has bf16 instructions; True if its flags are unknown, as outside Linux."""
    try:
        flags = set(CPU_INFO.read_text().split())
    except OSError:
        return True
    return bool(flags & {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})
