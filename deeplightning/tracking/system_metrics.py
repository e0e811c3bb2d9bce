"""The load of the machine as points of a run, under the names that MLflow's own monitors give them."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from deeplightning.tracking.entities import SYSTEM

if TYPE_CHECKING:
    from types import ModuleType


Sample = tuple[int, int, dict[str, float]]
"""Milliseconds since 1970, the second of the run, and values by their names."""


def sampler(started: int) -> Callable[[], Sample] | None:
    """Return a function that reads CPU, memory and, with the package nvidia-ml-py, GPUs; None where psutil is missing.

    Args:
        started: start of the run in milliseconds since 1970. The step of a point is the second of the run, so that a
            continued run continues where it was.
    """
    try:
        import psutil
    except ImportError:
        return None
    read_gpus = _gpus()
    psutil.cpu_percent()  # its first answer means nothing: a CPU is measured since the last question

    def sample() -> Sample:
        now, memory = time.time_ns() // 1_000_000, psutil.virtual_memory()
        load = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
        } | read_gpus()
        points = {f"{SYSTEM}{name}": round(float(value), 1) for name, value in load.items()}
        return now, max(0, now - started) // 1000, points

    return sample


def _gpus() -> Callable[[], dict[str, float]]:
    """Return a function that reads the GPUs; without a GPU or nvidia-ml-py it returns no values."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # also what the driver says in exceptions of its own
        return dict

    def read() -> dict[str, float]:
        load: dict[str, float] = {}
        for index, handle in enumerate(handles):
            for ask in (_memory, _busy, _power):
                with suppress(pynvml.NVMLError):  # not each device knows each of them
                    load |= {f"gpu_{index}_{name}": value for name, value in ask(pynvml, handle).items()}
        return load

    return read


def _memory(nvml: "ModuleType", handle: object) -> dict[str, float]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"memory_usage_percentage": memory.used / memory.total * 100, "memory_usage_megabytes": memory.used / 1e6}


def _busy(nvml: "ModuleType", handle: object) -> dict[str, float]:
    return {"utilization_percentage": nvml.nvmlDeviceGetUtilizationRates(handle).gpu}


def _power(nvml: "ModuleType", handle: object) -> dict[str, float]:
    used, most = nvml.nvmlDeviceGetPowerUsage(handle), nvml.nvmlDeviceGetEnforcedPowerLimit(handle)  # milliwatts
    return {"power_usage_watts": used / 1000, "power_usage_percentage": used / most * 100}
