"""Resolve `serve.device` to the devices that answer, or explain what is missing.

auto: every usable GPU, else the CPU; cpu; cuda: every GPU; cuda:N: the GPU with this number. Nothing here initializes
CUDA in this process: its workers are forked, and CUDA does not survive that.
"""

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass

from serve.cuda import has_driver, probe

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
        reason: why `auto` fell back to the CPU, if it did.
        may_fall_back: whether the CPU answers if a GPU cannot load the model.
    """

    devices: tuple[Device, ...]
    reason: str | None = None
    may_fall_back: bool = False


def is_device_word(text: str) -> bool:
    """Return whether `text` is a valid `serve.device`."""
    return _WORD.fullmatch(text) is not None


def device_for_precision(precision: str, device: str) -> str:
    """Return the value of `serve.device` for a precision: int8 is served on the CPU.

    Raises:
        OptionError: two options contradict each other.
    """
    if precision not in ("fp32", "int8", "fp16") or not is_device_word(device):
        raise OptionError(f"precision {precision} on {device}: use fp32, int8 or fp16, and auto, cpu, cuda or cuda:N.")
    if precision == "int8" and not device.startswith("cuda"):
        device = "cpu"
    if (precision == "fp16" and device == "cpu") or (precision == "int8" and device != "cpu"):
        raise OptionError(
            f"--precision {precision} cannot be combined with --device {device}: int8 is for the CPU, fp16 for GPUs."
        )
    return device


def choose_devices(word: str, lacks: Callable[[], str | None]) -> Choice:
    """Resolve `serve.device` on this machine.

    Args:
        word: value of `serve.device`.
        lacks: returns why the library that runs the model cannot use a GPU, or None if it can.

    Raises:
        DeviceError: a requested GPU cannot be used.
    """
    match = _WORD.fullmatch(word)
    assert match is not None, "it was checked with is_device_word"
    if word == "cpu":
        return Choice((CPU,))
    gpus = (lacks() if has_driver() else "this machine has no NVIDIA driver") or probe()
    if isinstance(gpus, str):
        reason = gpus
    else:
        devices = [Device(n, gpu["name"], gpu.get("free", 0)) for n, gpu in enumerate(gpus)]
        wanted = devices if match[1] is None else devices[int(match[1]) :][:1]
        usable = [device for device in wanted if "fault" not in gpus[device.index or 0]]
        if usable and (word == "auto" or usable == wanted):
            return Choice(tuple(usable), may_fall_back=word == "auto")
        faults = [f", unusable: {gpu['fault']}" if "fault" in gpu else "" for gpu in gpus]
        listed = [f"{one} ({one.name}{fault})" for one, fault in zip(devices, faults, strict=True)]
        reason = f"the visible GPUs are {', '.join(listed) or 'none'}; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    if word == "auto":
        return Choice((CPU,), reason)
    raise DeviceError(f"serve.device is {word}: {reason}.")


def onnxruntime_lacks() -> str | None:
    """Return why the installed ONNX Runtime cannot use a GPU, and what to do, or None if it can."""
    remedy = f"uninstall onnxruntime and onnxruntime-gpu, then install '{PACKAGE}'"
    if all(any(importlib.metadata.distributions(name=name)) for name in ("onnxruntime", "onnxruntime-gpu")):
        return f"onnxruntime and onnxruntime-gpu are both installed, and overwrite each other's files: {remedy}"
    from serve.private import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return None
    return f"the installed onnxruntime is built for the CPU: {remedy}"
