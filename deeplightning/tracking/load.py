"""The load of the machine as points of a run, read through MLflow's own monitors."""

import time
from collections.abc import Callable
from contextlib import suppress

from mlflow.entities import Metric


def sampler(started: int) -> Callable[[], list[Metric]] | None:
    """A function that reads CPU, memory and, with the package nvidia-ml-py, GPUs; None where psutil is missing.

    Args:
        started: start of the run in milliseconds since 1970. The step of a point is the second of the run, so that a
            continued run goes on where it was.
    """
    try:
        from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    except ImportError:
        return None
    monitors: list[BaseMetricsMonitor] = [CPUMonitor()]
    with suppress(ImportError, RuntimeError):  # no GPU, or nothing to read it with
        monitors.append(GPUMonitor())

    def sample() -> list[Metric]:
        now = time.time_ns() // 1_000_000
        points = []
        for monitor in monitors:
            monitor.collect_metrics()
            for name, value in monitor.aggregate_metrics().items():
                points.append(Metric(f"system/{name}", float(value), now, max(0, now - started) // 1000))
            monitor.clear_metrics()
        return points

    return sample
