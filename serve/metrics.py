"""Count requests in memory that the server's processes share, and format the counts for Prometheus.

Each process adds to its own row, only in its event loop, so no lock is needed; `/metrics` gives the sum of the rows.
The counts of a process remain when it ends.
"""

import itertools
import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from prometheus_client import Metric

MAX_PROCESSES = 128
"""Maximum number of workers of two models: both run while one replaces the other."""

STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 421, 429, 431, 499, 500, 501, 503, 504, 505)
"""Statuses with their own counters; 499: the client disconnected before the answer."""

ROUTES = ("/predict", "/", "/docs", "/health", "/ready", "/info", "/samples", "/metrics", "/openapi.json")
"""Paths with their own counters. Other paths are counted together, so a client cannot create labels."""

MAX_LABEL_CHARACTERS = 100
"""Maximum length of a label's value, in characters."""

SECONDS_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

HISTOGRAMS = {
    "queue_seconds": (SECONDS_BOUNDS, "Time that a request's pictures waited for a thread and for the model."),
    "decode_seconds": (SECONDS_BOUNDS, "Time to read a request's pictures from its body, decode and resize them."),
    "forward_seconds": (SECONDS_BOUNDS, "Time of the forward pass that a request was part of."),
    "http_seconds": (SECONDS_BOUNDS, "Rest of the time that a request took: reading, parsing, writing."),
    "batch_size": (SIZE_BOUNDS, "Pictures in the forward pass that a request was part of."),
}

_STATUS = {status: number for number, status in enumerate(STATUSES)}
_ROUTE = {route: number for number, route in enumerate(ROUTES)}
_OTHER_STATUS, _OTHER_ROUTE = len(STATUSES), len(ROUTES)
_CELL = len(SECONDS_BOUNDS) + 2  # size of a histogram of seconds: its buckets, the overflow bucket, and the sum
_WAITING = (len(ROUTES) + 1) * (len(STATUSES) + 1) * _CELL
"""Column of the queue length, after a histogram for each route and status."""


class Metrics:
    """Rows of numbers, shared with processes that are forked later. `row` is the row of this process."""

    def __init__(self) -> None:
        self._columns: list[tuple[int, tuple[float, ...]]] = []
        width = _WAITING + 1
        for bounds, _ in HISTOGRAMS.values():
            self._columns.append((width, bounds))
            width += len(bounds) + 2  # the overflow bucket, and the sum
        self._width = width
        self._memory = mmap.mmap(-1, 8 * width * MAX_PROCESSES)
        self._numbers = memoryview(self._memory).cast("d")
        self.row = 0

    def count(self, path: str, status: int, seconds: float) -> None:
        """Count a response, and how long the request took."""
        numbers, route = self._numbers, _ROUTE.get(path, _OTHER_ROUTE)
        cell = self._start + (route * (_OTHER_STATUS + 1) + _STATUS.get(status, _OTHER_STATUS)) * _CELL
        numbers[cell + bisect_left(SECONDS_BOUNDS, seconds)] += 1
        numbers[cell + _CELL - 1] += seconds

    def observe(self, values: Iterable[float]) -> None:
        """Add a value to each histogram, in the order of `HISTOGRAMS`."""
        numbers, start = self._numbers, self._start
        for value, (column, bounds) in zip(values, self._columns, strict=True):
            numbers[start + column + bisect_left(bounds, value)] += 1
            numbers[start + column + len(bounds) + 1] += value

    def queue(self, length: int, row: int | None = None) -> None:
        """Set the number of requests that wait in this process, or in the process of `row`."""
        self._numbers[(self.row if row is None else row) * self._width + _WAITING] = length

    def text(self, model: Mapping[str, str]) -> bytes:
        """Return all metrics in Prometheus' text format 0.0.4; `model` has the labels `run`, `task` and `precision`."""
        from prometheus_client import generate_latest  # imported lazily: it takes 0.1 s

        return generate_latest(SimpleNamespace(collect=lambda: self.collect(model)))

    def collect(self, model: Mapping[str, str]) -> "Iterator[Metric]":
        """Yield the metric families of the client library."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        sums: list[float] = np.frombuffer(self._memory).reshape(MAX_PROCESSES, self._width).sum(0).tolist()
        numbers, names = [sums[n : n + _CELL] for n in range(0, _WAITING, _CELL)], [*map(str, STATUSES), "other"]
        requests = CounterMetricFamily("deeplightning_requests", "Responses by HTTP status.", labels=["status"])
        for number, status in enumerate(names):
            requests.add_metric([status], sum(sum(cell[:-1]) for cell in numbers[number :: len(names)]))
        yield requests
        duration = HistogramMetricFamily(
            "deeplightning_http_request_duration_seconds",
            "Time from the end of a request's head to its answer, by route and HTTP status.",
            labels=["route", "status"],
        )
        for cell, (route, status) in zip(numbers, itertools.product((*ROUTES, "other"), names), strict=True):
            if any(cell):  # most of the other combinations cannot occur
                duration.add_metric([route, status], *_histogram(cell, SECONDS_BOUNDS))
        yield duration
        yield GaugeMetricFamily("deeplightning_queue_length", "Requests that wait for the model.", sums[_WAITING])
        for (name, (_, description)), (column, bounds) in zip(HISTOGRAMS.items(), self._columns, strict=True):
            histogram = HistogramMetricFamily(f"deeplightning_{name}", description)
            histogram.add_metric([], *_histogram(sums[column : column + len(bounds) + 2], bounds))
            yield histogram
        info = GaugeMetricFamily("deeplightning_model_info", "The model that answers; always 1.", labels=[*model])
        info.add_metric([value[:MAX_LABEL_CHARACTERS] for value in model.values()], 1)
        yield info

    @property
    def _start(self) -> int:
        return self.row * self._width


def _histogram(cell: Sequence[float], bounds: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """Return the cumulative buckets and the sum."""
    return [*zip((*map(str, bounds), "+Inf"), itertools.accumulate(cell[:-1]), strict=True)], cell[-1]
