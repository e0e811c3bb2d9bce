"""How many processes, and how many forward passes at a time in each: from what a picture costs, measured at the start.
GPUs have a process each, whose batches grow to what memory and time allow.

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

from serve.batching import Model
from serve.device import CPU, LANES, Device
from serve.metrics import MAX_PROCESSES

HELD_SECONDS = 0.0002
"""What one request costs besides the forward pass, with Python's lock held (small pictures, one core, November
2026)."""

ROUNDS = 3

MOST_PROCESSES = MAX_PROCESSES // 2
"""Workers of one model."""

BATCH_SECONDS = 0.2
"""How long a forward pass of a GPU may take: whoever comes during one waits for it to end."""


@dataclass(frozen=True)
class Layout:
    """How a server is spread over the cores.

    Attributes:
        processes: workers.
        lanes: forward passes at a time in each.
        forward_ms: what one picture costs, alone, in milliseconds; infinite where the parent cannot measure it.
        devices: where each process computes; or the CPU, for all.
    """

    processes: int
    lanes: int
    forward_ms: float
    devices: tuple[Device, ...] = (CPU,)

    def __str__(self) -> str:
        where = ", ".join(f"{device} ({device.name})" for device in self.devices if device.on_gpu)
        return (
            f"{self.processes} process{'es' if self.processes > 1 else ''} with {self.lanes} "
            f"lane{'s' if self.lanes > 1 else ''}, "
            + (f"on {where}" if where else f"{self.forward_ms:.2f} ms a forward pass")
        )

    def device(self, process: int) -> Device:
        """Where a process computes."""
        return self.devices[process if len(self.devices) > 1 else 0]


def choose(model: Model, cores: int | None = None) -> Layout:
    """The layout for a model on this machine, or on `cores` cores."""
    cores = cores or usable_cores()
    seconds = _forward_seconds(model)
    processes = max(1, min(cores, MOST_PROCESSES, math.ceil(cores * HELD_SECONDS / (HELD_SECONDS + seconds) - 0.25)))
    return Layout(processes, math.ceil(cores / processes), 1e3 * seconds)


def on_gpus(devices: tuple[Device, ...]) -> Layout:
    """One process for each GPU."""
    return Layout(len(devices), LANES, math.inf, devices)


def largest_batch(model: Model, limit: int, seconds: float = BATCH_SECONDS) -> int:
    """Up to `limit`, the largest batch that fits into memory and takes no longer than `seconds`, and at least 1. Sizes
    are tried by doubling; the first pass of each also chooses its algorithms, so that no request waits for that.

    Raises:
        MemoryError: not even one fits.
    """
    sizes = [*(2**power for power in range(limit.bit_length()) if 2**power < limit), limit]
    most = 1
    for size in sizes:
        batch = np.resize(model.samples, (size, *model.samples.shape[1:]))
        try:
            model.predict(batch)
            start = time.perf_counter()
            model.predict(batch)
        except MemoryError:
            if size == 1:
                raise
            break
        if time.perf_counter() - start > seconds:
            break
        most = size
    return most


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
