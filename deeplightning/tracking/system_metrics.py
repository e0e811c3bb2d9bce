"""The load of the machine as points of a run, measured by MLflow's own monitors of system metrics."""

import time
from collections.abc import Callable

from deeplightning.private.mlflow import load_monitors
from deeplightning.tracking.entities import SYSTEM

Sample = tuple[int, int, dict[str, float]]
"""Milliseconds since 1970, the second of the run, and values by their names."""


def sampler(started: int) -> Callable[[], Sample]:
    """Return a function that measures CPU and memory, GPUs of NVIDIA with the package nvidia-ml-py, and those of AMD.
    Imports MLflow.

    Args:
        started: start of the run in milliseconds since 1970. The step of a point is the second of the run, so that a
            continued run continues where it was.
    """
    monitors = load_monitors()

    def sample() -> Sample:
        now, points = time.time_ns() // 1_000_000, dict[str, float]()
        for monitor in monitors:
            monitor.clear_metrics()
            monitor.collect_metrics()
            points |= {f"{SYSTEM}{name}": value for name, value in monitor.aggregate_metrics().items()}
        return now, max(0, now - started) // 1000, points

    return sample
