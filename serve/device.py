"""Resolve `serve.device` to the devices that answer, or explain what is missing.

auto: every usable GPU, else the CPU; cpu; cuda: every GPU; cuda:N: the GPU with this number. Nothing here initializes
CUDA in this process: its workers are forked, and CUDA does not survive that.
"""

import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass

from serve.cuda import Probed, has_driver, probe

PACKAGE = "onnxruntime-gpu[cuda,cudnn]"
"""ONNX Runtime for NVIDIA GPUs, with the CUDA libraries that it needs."""

MEMORY_SHARE = 0.9
"""Fraction of a GPU's free memory that a model's arena may take; the rest is for CUDA itself and cuDNN."""

LANES = 2
"""Concurrent forward passes on a GPU: one computes while the next batch is assembled and copied."""

_WORD = re.compile(r"auto|cpu|cuda(?::(\d{1,3}))?")


class DeviceError(Exception):
    """Raised if the requested device cannot be used; the message says why and what to do."""

    exit_code = 3


class OptionError(Exception):
    """Raised if a setting cannot be used; the message says why and what to do."""

    exit_code = 2


@dataclass(frozen=True)
class Device:
    """The CPU or a GPU.

    Attributes:
        index: index among the GPUs that CUDA sees; None: the CPU.
        name: name of the hardware.
        free: free memory of the GPU at the start, in bytes.
    """

    index: int | None = None
    name: str = "CPU"
    free: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.index is not None

    def __str__(self) -> str:
        return "cpu" if self.index is None else f"cuda:{self.index}"


CPU = Device()


@dataclass(frozen=True)
class Choice:
    """The devices that answer.

    Attributes:
        devices: GPUs, with one process each, or the CPU alone.
        reason: why `auto` has fallen back to the CPU, if it has.
        may_fall_back: whether the CPU answers if a GPU cannot load the model.
    """

    devices: tuple[Device, ...]
    reason: str | None = None
    may_fall_back: bool = False


def is_device_word(text: str) -> bool:
    """Return whether `text` is a valid `serve.device`."""
    return _WORD.fullmatch(text) is not None


def settled_device(precision: str, device: str, tensorrt: bool) -> str:
    """Return the value of `serve.device` for a precision: int8 is served on the CPU.

    Raises:
        OptionError: two options contradict each other.
    """
    if precision == "int8":
        if device.startswith("cuda"):
            raise OptionError(
                f"--precision int8 does not go with --device {device}: the int8 model is made for CPUs; "
                "use --precision fp16, or --device cpu."
            )
        device = "cpu"
    if device == "cpu" and precision == "fp16":
        raise OptionError(
            "--precision fp16 does not go with --device cpu: a CPU computes in 32 bits faster; "
            "use --precision fp32 or int8, or --device cuda."
        )
    if device == "cpu" and tensorrt:
        raise OptionError("--tensorrt is for GPUs, and the CPU answers; leave it out, or use --device cuda.")
    return device


@dataclass(frozen=True)
class Runtime:
    """A library that runs networks.

    Attributes:
        name: name of the package.
        lacks: returns why it cannot use a GPU, or None if it can.
        cuda: returns the CUDA version that it is built for, such as 13.0, or "" if unknown.
    """

    name: str
    lacks: Callable[[], str | None]
    cuda: Callable[[], str]


def choose_devices(
    word: str, runtime: Runtime, find: Callable[[], Probed] = probe, may_have_gpu: Callable[[], bool] = has_driver
) -> Choice:
    """Resolve `serve.device` on this machine.

    Args:
        word: value of `serve.device`.
        runtime: library that runs the model.
        find: finds the GPUs, as `serve.cuda.probe` does; called only if the runtime can use a GPU.
        may_have_gpu: returns whether there is a driver; without one, `auto` recommends no package for GPUs.

    Raises:
        DeviceError: a requested GPU cannot be used.
    """
    match = _WORD.fullmatch(word)
    assert match is not None, "it was checked with is_device_word"
    if word == "cpu":
        return Choice((CPU,))
    reason = runtime.lacks()
    if word == "auto" and reason is not None and not may_have_gpu():
        return Choice((CPU,), "this machine has no NVIDIA driver")
    found = find() if reason is None else {}
    reason = reason or found.get("fault") or _too_old(runtime, found)
    if reason is None:
        gpus = [Device(n, gpu["name"], gpu.get("free", 0)) for n, gpu in enumerate(found["gpus"])]
        faults = {n: gpu["fault"] for n, gpu in enumerate(found["gpus"]) if "fault" in gpu}
        if match[1] is not None:
            gpus = _numbered(gpus, int(match[1]))
        usable = tuple(gpu for gpu in gpus if gpu.index not in faults)
        if usable and (word == "auto" or len(usable) == len(gpus)):
            return Choice(usable, may_fall_back=word == "auto")
        reason = _unusable(gpus, faults) if gpus else "there is no GPU; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    if word == "auto":
        return Choice((CPU,), reason)
    raise DeviceError(f"serve.device is {word}: {reason}.")


def _too_old(runtime: Runtime, found: Probed) -> str | None:
    """Return why the driver is too old for the runtime, or None. A driver supports its own major version of CUDA and
    older ones."""
    needed, driver = runtime.cuda(), found["driver"]
    if not needed or int(needed.partition(".")[0]) <= int(driver.partition(".")[0]):
        return None
    return (
        f"NVIDIA's driver supports CUDA {driver}, and {runtime.name} is built for CUDA {needed}; "
        f"update the driver, or install {runtime.name} for CUDA {driver.partition('.')[0]}"
    )


def _numbered(gpus: list[Device], number: int) -> list[Device]:
    if number >= len(gpus):
        listed = ", ".join(f"{gpu} ({gpu.name})" for gpu in gpus) or "none"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f", by CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
        raise DeviceError(f"serve.device is cuda:{number}, and the GPUs that are visible here are {listed}{seen}.")
    return [gpus[number]]


def _unusable(gpus: list[Device], faults: dict[int, str]) -> str:
    reasons = [f"{gpu} ({gpu.name}) cannot be used: {faults[gpu.index]}" for gpu in gpus if gpu.index in faults]
    free = [str(gpu) for gpu in gpus if gpu.index not in faults]
    remedy = f"use serve.device={free[0]}" if free else "end what uses it (`nvidia-smi` lists the processes)"
    return f"{'; '.join(reasons)}; {remedy}"


# ---- ONNX Runtime


def onnxruntime_lacks() -> str | None:
    """Return why the installed ONNX Runtime cannot use a GPU, with the command that fixes it, or None if it can."""
    names = ("onnxruntime", "onnxruntime-gpu")
    installed = [name for name in names if any(importlib.metadata.distributions(name=name))]
    if len(installed) == 2:
        return (
            "onnxruntime and onnxruntime-gpu are both installed, and each overwrites the files of the other; "
            f"keep one: {_command('uninstall', *installed)} && {_command('install', PACKAGE)}"
        )
    from serve.private import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return None
    return (
        "the onnxruntime that is installed is built for the CPU; the extra `gpu` is the one for GPUs, and replaces it: "
        f"{_command('uninstall', 'onnxruntime')} && {_command('install', PACKAGE)}"
    )


def _onnxruntime_cuda() -> str:
    from serve.private import onnxruntime

    return getattr(onnxruntime, "cuda_version", None) or ""


ONNX_RUNTIME = Runtime("onnxruntime-gpu", onnxruntime_lacks, _onnxruntime_cuda)


def _command(verb: str, *packages: str) -> str:
    """Return the command that installs or removes packages in this environment; a uv environment may have no pip."""
    python, quoted = shlex.quote(sys.executable), shlex.join(packages)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip {verb} --python {python} {quoted}"
    yes = " --yes" if verb == "uninstall" else ""
    return f"{python} -m pip {verb}{yes} {quoted}"
