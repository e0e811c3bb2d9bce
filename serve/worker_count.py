"""Choose the number of worker processes and of lanes in each, from the cost of a picture measured at the start. Each
GPU gets one process, whose batches grow to the limits of memory and time.

The forward pass releases the GIL, and the work around it does not. While the forward pass dominates, one process keeps
every core busy and holds the model in memory once; otherwise several processes share the cores.
"""

import math
import os
import time
import timeit
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serve.device import CPU, LANES, Device
from serve.metrics import MAX_PROCESSES
from serve.model import Model

FIXED_SECONDS = 0.0002
"""Fixed cost of a request besides the forward pass, under the GIL (small pictures, one core, November 2026)."""

TIMED_PASSES = 3

MAX_WORKERS = MAX_PROCESSES // 2
"""Maximum number of workers of one model."""

BATCH_SECONDS = 0.2
"""Maximum duration of a forward pass on a GPU, since new requests wait for it to end."""


@dataclass(frozen=True)
class Layout:
    """The number of processes and lanes, and their devices.

    Attributes:
        processes: number of workers.
        lanes: concurrent forward passes in each.
        forward_ms: milliseconds of a forward pass of one picture; infinite if the parent cannot measure it.
        devices: device of each process, or the CPU for all.
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
        """Return the device of a process."""
        return self.devices[process if len(self.devices) > 1 else 0]


def choose_layout(model: Model, cores: int | None = None) -> Layout:
    """Return the layout for a model on this machine's CPU, or on `cores` cores."""
    cores = cores or usable_cores()
    seconds = _forward_seconds(model)
    processes = max(1, min(cores, MAX_WORKERS, math.ceil(cores * FIXED_SECONDS / (FIXED_SECONDS + seconds) - 0.25)))
    return Layout(processes, math.ceil(cores / processes), 1e3 * seconds)


def gpu_layout(devices: tuple[Device, ...]) -> Layout:
    """Return a layout with one process for each GPU."""
    return Layout(len(devices), LANES, math.inf, devices)


def largest_batch(model: Model, limit: int, seconds: float = BATCH_SECONDS) -> int:
    """Return the largest batch size from 1 to `limit` that fits into memory and takes at most `seconds`. Sizes are
    tried by doubling. The first pass of each size also selects its algorithms, so that no request waits for that.

    Raises:
        MemoryError: not even one input fits.
    """
    most = 1
    for size in [*(2**power for power in range(limit.bit_length()) if 2**power < limit), limit]:
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
    """Return the number of cores that this process may use, by its affinity and the container's quota (cgroup 2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no quota
        return cores


def _forward_seconds(model: Model) -> float:
    """Return the CPU time of this thread for one picture in seconds, the minimum of `TIMED_PASSES`."""
    one: np.ndarray = model.samples[:1]
    return min(timeit.repeat(lambda: model.predict(one), timer=time.thread_time, repeat=TIMED_PASSES, number=1))
