"""How many processes, and how many forward passes at a time in each: from what a picture costs, measured at the start.

A forward pass lets other threads run, and the work around it does not: Python runs one thread at a time. So one process
keeps every core busy as long as the forward pass is the larger part; where the network is so small that the work around
it is the larger part, several processes share the cores. One is enough for a heavy network, and has it in memory once.
"""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serve.lanes import Model

HELD_SECONDS = 0.0002
"""What one request costs besides the forward pass, with Python's lock held (small pictures, one core, November
2026)."""

ROUNDS = 3


@dataclass(frozen=True)
class Layout:
    """How a server is spread over the cores.

    Attributes:
        processes: workers.
        lanes: forward passes at a time in each.
        forward_ms: what one picture costs, alone, in milliseconds.
    """

    processes: int
    lanes: int
    forward_ms: float

    def __str__(self) -> str:
        return (
            f"{self.processes} process{'es' if self.processes > 1 else ''} with {self.lanes} "
            f"lane{'s' if self.lanes > 1 else ''}, {self.forward_ms:.2f} ms a forward pass"
        )


def choose(model: Model, cores: int | None = None) -> Layout:
    """The layout for a model on this machine, or on `cores` cores."""
    cores = cores or usable_cores()
    seconds = _forward_seconds(model)
    processes = max(1, min(cores, math.ceil(cores * HELD_SECONDS / (HELD_SECONDS + seconds) - 0.25)))
    return Layout(processes, math.ceil(cores / processes), 1e3 * seconds)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and the share that a container grants (cgroup 2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such limit
        return cores


def _forward_seconds(model: Model) -> float:
    """Of one picture, CPU seconds of this thread, the least of a few tries."""
    one: np.ndarray = model.samples[:1]
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        model.predict(one)
        times.append(time.thread_time() - start)
    return min(times)
