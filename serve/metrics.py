"""What the server counts, in memory that its processes share; the Prometheus client library puts it into words.

Each process adds to a row of its own, in its event loop only, so nothing needs a lock; `/metrics` tells the sum of the
rows. A process that ends leaves its counts behind.
"""

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

MAX_PROCESSES = 128
"""Of two models: one may take over from another."""

STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 421, 429, 431, 499, 500, 501, 503, 504)
"""Statuses that are counted by themselves; 499: the client left before the answer."""

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

HISTOGRAMS = {
    "queue_seconds": (SECONDS, "Time that a request's pictures waited for a thread and for the model."),
    "decode_seconds": (SECONDS, "Time to take a request's pictures out of it and to decode and resize them."),
    "forward_seconds": (SECONDS, "Time of the forward pass that a request was part of."),
    "http_seconds": (SECONDS, "Time that a request took besides: reading, parsing, writing."),
    "batch_size": (SIZES, "Pictures in one forward pass, as requests met it."),
}

_OTHER = len(STATUSES)


class Metrics:
    """Rows of numbers, shared by the processes that are forked after it is made. `row` is this process's."""

    def __init__(self) -> None:
        self._places: list[tuple[int, tuple[float, ...]]] = []
        width = len(STATUSES) + 2  # other statuses, and the length of the queue
        for bounds, _ in HISTOGRAMS.values():
            self._places.append((width, bounds))
            width += len(bounds) + 2  # above all bounds, and the sum
        self._width = width
        self._numbers = memoryview(mmap.mmap(-1, 8 * width * MAX_PROCESSES)).cast("d")
        self.row = 0

    def count(self, status: int) -> None:
        """One more response."""
        self._numbers[self._start + (STATUSES.index(status) if status in STATUSES else _OTHER)] += 1

    def observe(self, values: Iterable[float]) -> None:
        """One more value of each histogram, in the order of `HISTOGRAMS`."""
        numbers, start = self._numbers, self._start
        for value, (place, bounds) in zip(values, self._places, strict=True):
            numbers[start + place + bisect_left(bounds, value)] += 1
            numbers[start + place + len(bounds) + 1] += value

    def queue(self, length: int, row: int | None = None) -> None:
        """The number of requests that wait in this process, or in that of `row`."""
        self._numbers[(self.row if row is None else row) * self._width + _OTHER + 1] = length

    def text(self) -> bytes:
        """Everything, as Prometheus reads it (text format 0.0.4)."""
        from prometheus_client import CollectorRegistry, generate_latest  # only now: it takes 0.1 s

        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> "Iterator[Metric]":
        """For the client library."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        sums = [
            sum(self._numbers[row * self._width + column] for row in range(MAX_PROCESSES))
            for column in range(self._width)
        ]
        requests = CounterMetricFamily("deeplightning_requests", "Responses by HTTP status.", labels=["status"])
        for status, number in zip((*STATUSES, "other"), sums, strict=False):
            requests.add_metric([str(status)], number)
        yield requests
        yield GaugeMetricFamily("deeplightning_queue_length", "Requests that wait for the model.", sums[_OTHER + 1])
        for (name, (_, words)), (place, bounds) in zip(HISTOGRAMS.items(), self._places, strict=True):
            histogram = HistogramMetricFamily(f"deeplightning_{name}", words)
            total, buckets = 0.0, []
            for offset, bound in enumerate((*bounds, float("inf"))):
                total += sums[place + offset]
                buckets.append((_bound(bound), total))
            histogram.add_metric([], buckets, sums[place + len(bounds) + 1])
            yield histogram

    @property
    def _start(self) -> int:
        return self.row * self._width


def _bound(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
