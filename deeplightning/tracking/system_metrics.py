"""The load of the machine as points of a run, measured by MLflow's own monitors of system metrics."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from deeplightning.tracking.entities import SYSTEM

Sample = tuple[int, int, dict[str, float]]
"""Milliseconds since 1970, the second of the run, and values by their names."""


def sampler(started: int) -> Callable[[], Sample]:
    """Return a function that measures CPU and memory, GPUs of NVIDIA with the package nvidia-ml-py, and those of AMD.
    Imports MLflow, whose public way has a thread that writes to the store past the run's file.

    Args:
        started: start of the run in milliseconds since 1970. The step of a point is the second of the run, so that a
            continued run continues where it was.
    """
    from mlflow.system_metrics.metrics import cpu_monitor, gpu_monitor, rocm_monitor

    monitors: list[Any] = [cpu_monitor.CPUMonitor()]
    for kind in (gpu_monitor.GPUMonitor, rocm_monitor.ROCMMonitor):
        with suppress(Exception):  # there is no such GPU, or what reads it is not installed or fails
            monitors.append(kind())

    def sample() -> Sample:
        now, points = time.time_ns() // 1_000_000, dict[str, float]()
        for monitor in monitors:
            monitor.clear_metrics()
            monitor.collect_metrics()
            points |= {f"{SYSTEM}{name}": value for name, value in monitor.aggregate_metrics().items()}
        return now, max(0, now - started) // 1000, points

    return sample
