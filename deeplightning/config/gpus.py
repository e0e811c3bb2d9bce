"""Check `engine.gpus` against the machine: whether the GPUs exist, are visible and are supported.

Torch is not imported.
"""

from collections.abc import Callable
from typing import Any

from deeplightning.config import devices
from deeplightning.config.devices import VISIBLE, Machine
from deeplightning.config.packages import TORCH_BUILD
from deeplightning.config.schema import Engine
from deeplightning.words import first_line

_CPU = "`engine.gpus=null` runs on the CPU"
_BUILD = f"{TORCH_BUILD} installs a build that fits"


def resolve_gpus(engine: Engine, change: Callable[[str, object, str], None]) -> str | None:
    """Resolve `engine.gpus` in place; return a message if the machine lacks something, else None."""
    here = devices.machine()
    if engine.gpus == "auto":
        change("gpus", list(range(len(here.visible_gpus()))) or None, _describe_available(here))
    elif engine.gpus in (0, []):
        change("gpus", None, "no GPU is requested")
    if engine.gpus is None:
        return None
    return _missing_gpus(engine.gpus, here) or _outdated_driver(here)


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
