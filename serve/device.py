"""The words of `serve.device` become the devices that answer, or one sentence that says what is missing.

auto: every usable GPU, else the CPU; cpu; cuda: every GPU; cuda:N: the GPU with this number. Nothing here touches CUDA
in this process: its workers are forked, and CUDA does not survive that.
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
"""ONNX Runtime for NVIDIA's GPUs, with the libraries of CUDA that it needs."""

MEMORY_SHARE = 0.9
"""The part of a GPU's free memory that a model's arena may take; the rest is for CUDA itself and for cuDNN."""

LANES = 2
"""Forward passes at a time on a GPU: one computes while the next is put together and copied."""

_WORD = re.compile(r"auto|cpu|cuda(?::(\d{1,3}))?")


class DeviceError(Exception):
    """The device that was asked for cannot be used; the message says why and what to do."""

    exit_code = 3


class OptionError(Exception):
    """A setting cannot be used; the message says why and what to do."""

    exit_code = 2


@dataclass(frozen=True)
class Device:
    """Where a model computes.

    Attributes:
        index: the number of a GPU, as CUDA counts those that are visible; None: the CPU.
        name: what the hardware calls itself.
        free: bytes of memory that were free on the GPU at the start.
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
    """What answers.

    Attributes:
        devices: one process for each GPU; or the CPU alone.
        reason: why `auto` has fallen back to the CPU; None: it has not.
        may_fall_back: whether the CPU answers where a GPU cannot load the model.
    """

    devices: tuple[Device, ...]
    reason: str | None = None
    may_fall_back: bool = False


def is_word(text: str) -> bool:
    """Whether `text` names a device."""
    return _WORD.fullmatch(text) is not None


def settled_device(precision: str, device: str, tensorrt: bool) -> str:
    """The device on which a precision is served, as a word of `serve.device`.

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
        name: of the package.
        lacks: says what it lacks for a GPU; None: nothing.
        cuda: gives the version of CUDA that it is built for, such as 13.0; "" where it does not say.
    """

    name: str
    lacks: Callable[[], str | None]
    cuda: Callable[[], str]


def choose_devices(
    word: str,
    runtime: Runtime,
    find: Callable[[], Probed] = probe,
    may_have_gpu: Callable[[], bool] = has_driver,
) -> Choice:
    """The devices that a word means on this machine.

    Args:
        word: of `serve.device`.
        runtime: what answers.
        find: gives what `serve.cuda.probe` gives; called only where the runtime can use a GPU.
        may_have_gpu: whether there is a driver; without one, `auto` recommends no package for GPUs.

    Raises:
        DeviceError: a GPU is asked for and cannot be used.
    """
    match = _WORD.fullmatch(word)
    assert match is not None, "it was checked with is_word"
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
    """A driver runs what is built for its own major version of CUDA, and for older ones."""
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


# ---- what ONNX Runtime lacks


def onnxruntime_lacks() -> str | None:
    """Why ONNX Runtime, as it is installed here, cannot use a GPU, with the command that mends it; None: it can."""
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
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


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _command(verb: str, *packages: str) -> str:
    """The command that installs or removes packages in this environment; one that uv made may have no pip."""
    python, quoted = shlex.quote(sys.executable), shlex.join(packages)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip {verb} --python {python} {quoted}"
    yes = " --yes" if verb == "uninstall" else ""
    return f"{python} -m pip {verb}{yes} {quoted}"
