"""Batching: threads decode pictures in parallel, and a thread that finds a free lane runs the waiting pictures.

A lane is one forward pass at a time. No thread waits on a timer: a thread that has decoded a request's pictures takes a
free lane and runs all waiting ones, up to `max_batch` per forward pass, until the queue is empty. A single client never
waits for others, and batches grow with the load. Decoding (Pillow) and the forward pass (ONNX Runtime) release the GIL.
Letters: N images, C channels, H height, W width."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from deeplightning.image_spec import ImageError
from deeplightning.kinds import KINDS
from deeplightning.words import InputError
from serve.answers import DEFAULT_TOP_K, rows_of
from serve.limits import Limits, Refusal
from serve.log import log_event
from serve.model import Model

LARGE_PIXELS = 4_000_000
"""Larger pictures are decoded one at a time per lane, since each may take 16 bytes a pixel (Pillow 13, November
2026)."""

TINY_BYTES, TINY_PIXELS, TINY_SECONDS = 16_384, 16_384, 0.0005
"""A request of one small picture for a network faster than this runs at once, in the thread that submits it: passing it
to another thread and back costs 0.1 ms, as much as everything else (28 x 28 pixels, one core, November 2026)."""

TINY_TEXT_BYTES = 300
"""Maximum size of a small text, in bytes."""

COST_WEIGHT = 0.1
"""Weight of the newest batch in the running mean of a picture's cost."""


@dataclass(slots=True, eq=False)
class Job:
    """The inputs of one request, and their results.

    Attributes:
        read: returns the encoded pictures, texts, or values of rows and arrays; its exceptions become the request's
            error. Called with True, it raises `NotTiny` if reading would take long.
        size: size of the request's body, in bytes.
        finish: called once with the job, in the thread that completed it.
        top_k, accept: number of classes to return, and the Accept header.
        show: whether the answer includes the pictures as they reach the network.
        accepted: time at which the request was accepted (`time.perf_counter`).
        shown: the prepared pictures, uint8 (C, H, W), if `show` is set.
        rows: the model's output for each picture, once the job is done.
        error: why the request failed.
        queue_seconds, decode_seconds, forward_seconds: time spent waiting, decoding, and in the forward pass of the
            last picture; batch_size is the number of pictures in that pass.
    """

    read: Callable[[bool], Sequence[Any]]
    size: int
    finish: Callable[["Job"], None]
    top_k: int = DEFAULT_TOP_K
    accept: str = ""
    show: bool = False
    accepted: float = field(default_factory=time.perf_counter)
    shown: Sequence[np.ndarray] = ()
    rows: list[np.ndarray] = field(default_factory=list)
    error: Exception | None = None
    queue_seconds: float = 0.0
    decode_seconds: float = 0.0
    forward_seconds: float = 0.0
    batch_size: int = 0
    _pending_rows: int = 0


_Item = tuple[Job, int, np.ndarray]
"""A picture that is ready for the model: its job, its index in the job, and uint8 (C, H, W)."""


class Batcher:
    """Decodes and runs jobs. Its threads start with the first job.

    Args:
        forward_seconds: duration of a forward pass of one picture.
        threads: number of threads that decode pictures or run the model; None: two for each lane.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        lanes: int = 1,
        forward_seconds: float = math.inf,
        threads: int | None = None,
    ):
        self.model, self.limits, self.lanes = model, limits, lanes
        self._max_threads = threads or 2 * lanes  # one to decode and one to run, for each lane
        self._tiny = forward_seconds < TINY_SECONDS
        self.waiting = 0
        """Accepted requests that are not done."""
        self._request_cost = 0.0  # seconds that each waiting request adds to the wait of a new one
        self._free_lanes = lanes
        self._ready: deque[_Item] = deque()
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[Job] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._large_slots = threading.BoundedSemaphore(lanes)
        takes = KINDS[model.task].takes
        self._input_name = takes.replace("table", "row").capitalize()
        self._takes_text = takes == "text"
        self._prepare = self._prepare_picture if takes == "image" else self._prepare_values

    def submit(self, job: Job) -> None:
        """Accept a job. `job.finish` is called at its end, possibly before this method returns.

        Raises:
            Refusal: the queue is full, or the wait would be too long.
        """
        self.admit()
        with self._lock:
            self.waiting += 1
        if not (self._tiny and job.size <= TINY_BYTES and self._process(job, TINY_PIXELS)):
            self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        """Pass a job to another thread; start one if needed."""
        with self._lock:
            if len(self._threads) < min(self.waiting, self._max_threads):
                thread = threading.Thread(target=self._work, name=f"pictures-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._inbox.put(job)

    def admit(self) -> None:
        """Check whether a new request would be answered in time.

        Raises:
            Refusal: it would not.
        """
        expected = self.waiting * self._request_cost
        if self.waiting >= self.limits.max_queue or expected > self.limits.max_wait:
            seconds = max(1, math.ceil(min(expected, self.limits.max_wait)))
            raise Refusal(
                429,
                f"The server is busy: {self.waiting} requests are waiting. Send this one again in {seconds} s.",
                {"Retry-After": str(seconds)},
            )

    def _work(self) -> None:
        while True:
            self._process(self._inbox.get())

    def _process(self, job: Job, max_pixels: int | None = None) -> bool:
        """Decode a request's pictures, and run all waiting ones if a lane is free. Return False, and do nothing, if one
        has more than `max_pixels`."""
        start = time.perf_counter()
        pixels: list[np.ndarray] = []
        try:
            self._check_time(job)
            pictures = job.read(max_pixels is not None)
            if max_pixels is not None and len(pictures) > 1:
                return False
            for number, data in enumerate(pictures):
                pixels.append(self._prepare(job, data, self._input_label(number, len(pictures)), max_pixels))
                self._check_time(job)  # a request may have many large pictures
        except NotTiny:
            return False
        except Exception as error:  # it must not affect other requests
            self._fail(job, error)
            return True
        job.decode_seconds = time.perf_counter() - start
        if job.show:
            job.shown = pixels
        job.rows = [_NO_ROW] * len(pixels)
        job._pending_rows = len(pixels)
        with self._lock:
            self._ready.extend((job, number, picture) for number, picture in enumerate(pixels))
            if not self._free_lanes:
                return True
            self._free_lanes -= 1
        self._run_lane()
        return True

    def _input_label(self, number: int, total: int) -> str:
        """Return the prefix of a message about an input: its number in the request, or "" if it is the only one."""
        return f"{self._input_name} {number + 1} of {total}: " if total > 1 else ""

    def _prepare_picture(self, job: Job, data: bytes, prefix: str, max_pixels: int | None) -> np.ndarray:
        """Return the prepared picture, uint8 (C, H, W)."""
        limit, side = self.limits.max_pixels, self.limits.max_side
        try:
            try:
                return self.model.prepare(data, min(limit, max_pixels or LARGE_PIXELS), side)
            except ImageError as error:
                if error.status != 413:
                    raise
            if max_pixels is not None:
                raise NotTiny
            if not self._large_slots.acquire(timeout=max(0, job.accepted + self.limits.max_wait - time.perf_counter())):
                raise self._too_late()
            try:
                return self.model.prepare(data, limit, side)
            finally:
                self._large_slots.release()
        except ImageError as error:
            raise Refusal(error.status, f"{prefix}{error}") from error

    def _prepare_values(self, job: Job, data: Any, prefix: str, max_pixels: int | None) -> np.ndarray:
        """Return the tokens of a text, int64 (L,), a row of a table, float32 (F,), or an array, float32 of its shape.
        If `max_pixels` is set, raise `NotTiny` for a longer text."""
        limit = self.limits.max_text
        if self._takes_text and max_pixels is not None and len(data) > TINY_TEXT_BYTES:
            raise NotTiny
        if self._takes_text and len(data) > limit:
            raise Refusal(
                413, f"{prefix}The text has {len(data):,} bytes; at most {limit:,} are accepted. Send a shorter one."
            )
        try:
            prepared: np.ndarray = self.model.spec.prepare(data)
            return prepared
        except ValueError as error:
            raise Refusal(getattr(error, "status", 400), f"{prefix}{error}") from error

    def _run_lane(self) -> None:
        """Run all waiting pictures, then release the lane."""
        while batch := self._next_batch():
            start = time.perf_counter()
            rows = rows_of(self.model, [picture for _, _, picture in batch])
            end = time.perf_counter()
            cost = (end - start) / len(batch) / self.lanes
            self._request_cost += COST_WEIGHT * (cost + batch[0][0].decode_seconds / self.lanes - self._request_cost)
            for (job, number, _), row in zip(batch, rows, strict=True):
                job.queue_seconds = start - job.accepted - job.decode_seconds
                job.forward_seconds = end - start
                job.batch_size = len(batch)
                if isinstance(row, MemoryError):
                    log_event(f"out of memory for a single request: {row}")
                    message = "There is not enough memory for this request now; send it again in 1 s."
                    self._fail(job, Refusal(503, message, {"Retry-After": "1"}))
                elif isinstance(row, InputError):
                    self._fail(job, Refusal(row.status, f"{self._input_label(number, len(job.rows))}{row}"))
                elif isinstance(row, Exception):
                    self._fail(job, row)
                else:
                    self._store_row(job, number, row)

    def _next_batch(self) -> list[_Item]:
        """Return the next batch; release the lane if it is empty."""
        late: list[Job] = []
        batch: list[_Item] = []
        now = time.perf_counter()
        with self._lock:
            while self._ready and len(batch) < self.limits.max_batch:
                item = self._ready.popleft()
                if item[0].error is not None:
                    continue
                if now - item[0].accepted > self.limits.max_wait and item[0]._pending_rows == len(item[0].rows):
                    late.append(item[0])
                else:
                    batch.append(item)
            if not batch:
                self._free_lanes += 1
        for job in late:
            self._fail(job, self._too_late())
        return batch

    def _check_time(self, job: Job) -> None:
        if time.perf_counter() - job.accepted > self.limits.max_wait:
            raise self._too_late()

    def _too_late(self) -> Refusal:
        return Refusal(
            504,
            f"The request waited longer than {self.limits.max_wait:g} s for the model and was dropped; send it later.",
            {"Retry-After": "1"},
        )

    def _store_row(self, job: Job, number: int, row: np.ndarray) -> None:
        with self._lock:
            job.rows[number] = row
            job._pending_rows -= 1
            if job._pending_rows or job.error is not None:
                return
            self.waiting -= 1
        job.finish(job)

    def _fail(self, job: Job, error: Exception) -> None:
        with self._lock:
            if job.error is not None:
                return
            job.error = error
            self.waiting -= 1
        job.finish(job)


class NotTiny(Exception):
    """Raised if a request takes too long to run in the calling thread."""


_NO_ROW = np.empty(0, np.float32)
