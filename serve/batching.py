"""Batching: threads decode pictures in parallel, and a thread that finds a free lane runs the pictures that wait.

A lane is one forward pass at a time. No thread waits on a timer: a thread that has decoded a request's pictures takes a
free lane and runs all that wait, up to `max_batch` per forward pass, until the queue is empty. A single client never
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

PACE_WEIGHT = 0.1
"""Weight of the newest batch in the running mean of a picture's cost."""


@dataclass(slots=True, eq=False)
class Job:
    """The inputs of one request, and their results.

    Attributes:
        read: returns the encoded pictures, texts, or values of rows and arrays; an exception of it becomes the
            request's error. Called with True, it raises `NotTiny` if reading would take long.
        size: size of the request's body, in bytes.
        finish: called once with the job, in the thread that ended it.
        top_k, accept: number of classes to return, and the Accept header.
        show: whether the answer includes the pictures as they reach the network.
        accepted: time at which the request was accepted (`time.perf_counter`).
        shown: the prepared pictures, uint8 (C, H, W), if `show` is set.
        rows: the model's output for each picture, once the job is done.
        error: why the request failed.
        queued, decoding, forward: seconds spent waiting, decoding, and in the forward pass of the last picture.
        batch: number of pictures in that forward pass.
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
    queued: float = 0.0
    decoding: float = 0.0
    forward: float = 0.0
    batch: int = 0
    _left: int = 0


_Item = tuple[Job, int, np.ndarray]
"""A picture that is ready for the model: its job, its index in the job, and uint8 (C, H, W)."""


class Batcher:
    """Decodes and runs jobs. Its threads start with the first job.

    Args:
        model: the model that answers.
        limits: limits of a request.
        number: number of lanes.
        forward_seconds: duration of a forward pass of one picture.
        threads: number of threads that decode pictures or run the model; None: two for each lane.
    """

    def __init__(
        self,
        model: Model,
        limits: Limits,
        number: int = 1,
        forward_seconds: float = math.inf,
        threads: int | None = None,
    ):
        self.model = model
        self.limits = limits
        self.number = number
        self._most_threads = threads or 2 * number  # one to decode and one to run, for each lane
        self._tiny = forward_seconds < TINY_SECONDS
        self.waiting = 0
        """Requests that are accepted and not yet done."""
        self._pace = 0.0  # seconds that each waiting request adds to the wait of a new one
        self._free = number
        self._ready: deque[_Item] = deque()
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[Job] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._large = threading.BoundedSemaphore(number)
        takes = KINDS[model.task].takes
        self._what = takes.replace("table", "row").capitalize()
        self._takes_text = takes == "text"
        self._prepare = self._decode if takes == "image" else self._read

    def submit(self, job: Job) -> None:
        """Accept a job. It ends with a call of `job.finish`, possibly before this method returns.

        Raises:
            Refusal: the queue is full, or the wait would be too long.
        """
        self.admit()
        with self._lock:
            self.waiting += 1
        if not (self._tiny and job.size <= TINY_BYTES and self._begin(job, TINY_PIXELS)):
            self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        """Pass a job to another thread; start one if needed."""
        with self._lock:
            if len(self._threads) < min(self.waiting, self._most_threads):
                thread = threading.Thread(target=self._work, name=f"pictures-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._inbox.put(job)

    def admit(self) -> None:
        """Check whether a new request would be answered in time.

        Raises:
            Refusal: it would not.
        """
        expected = self.waiting * self._pace
        if self.waiting >= self.limits.max_queue or expected > self.limits.max_wait:
            seconds = max(1, math.ceil(min(expected, self.limits.max_wait)))
            raise Refusal(
                429,
                f"The server is busy: {self.waiting} requests wait. Send this one again in {seconds} s.",
                {"Retry-After": str(seconds)},
            )

    def _work(self) -> None:
        while True:
            self._begin(self._inbox.get())

    def _begin(self, job: Job, max_pixels: int | None = None) -> bool:
        """Decode a request's pictures, and run all that wait if a lane is free. Return False, with nothing done, if a
        picture has more than `max_pixels`."""
        start = time.perf_counter()
        pixels: list[np.ndarray] = []
        try:
            self._check_time(job)
            pictures = job.read(max_pixels is not None)
            if max_pixels is not None and len(pictures) > 1:
                return False
            for number, data in enumerate(pictures):
                pixels.append(self._prepare(job, data, self._place(number, len(pictures)), max_pixels))
                self._check_time(job)  # a request may have many large pictures
        except NotTiny:
            return False
        except Exception as error:  # it must not affect other requests
            self._end(job, error)
            return True
        job.decoding = time.perf_counter() - start
        if job.show:
            job.shown = pixels
        job.rows = [_NO_ROW] * len(pixels)
        job._left = len(pixels)
        with self._lock:
            self._ready.extend((job, number, picture) for number, picture in enumerate(pixels))
            if not self._free:
                return True
            self._free -= 1
        self._run_lane()
        return True

    def _place(self, number: int, total: int) -> str:
        """Return the place of an input in its request, for a message."""
        return f"{self._what} {number + 1} of {total}: " if total > 1 else ""

    def _decode(self, job: Job, data: bytes, place: str, max_pixels: int | None) -> np.ndarray:
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
            if not self._large.acquire(timeout=max(0, job.accepted + self.limits.max_wait - time.perf_counter())):
                raise self._too_late()
            try:
                return self.model.prepare(data, limit, side)
            finally:
                self._large.release()
        except ImageError as error:
            raise Refusal(error.status, f"{place}{error}") from error

    def _read(self, job: Job, data: Any, place: str, max_pixels: int | None) -> np.ndarray:
        """Return the tokens of a text, int64 (L,), a row of a table, float32 (F,), or an array, float32 of its shape.
        If `max_pixels` is set, raise `NotTiny` for a longer text."""
        limit = self.limits.max_text
        if self._takes_text and max_pixels is not None and len(data) > TINY_TEXT_BYTES:
            raise NotTiny
        if self._takes_text and len(data) > limit:
            raise Refusal(
                413, f"{place}The text has {len(data):,} bytes; at most {limit:,} are accepted. Send a shorter one."
            )
        try:
            prepared: np.ndarray = self.model.spec.prepare(data)
            return prepared
        except ValueError as error:
            raise Refusal(getattr(error, "status", 400), f"{place}{error}") from error

    def _run_lane(self) -> None:
        """Run all that wait, then release the lane."""
        while batch := self._take():
            start = time.perf_counter()
            rows = rows_of(self.model, [picture for _, _, picture in batch])
            end = time.perf_counter()
            cost = (end - start) / len(batch) / self.number
            self._pace += PACE_WEIGHT * (cost + batch[0][0].decoding / self.number - self._pace)
            for (job, number, _), row in zip(batch, rows, strict=True):
                job.queued = start - job.accepted - job.decoding
                job.forward = end - start
                job.batch = len(batch)
                if isinstance(row, MemoryError):
                    log_event(f"the memory is too small for a single request: {row}")
                    words = "The model has no memory for this request now; send it again in 1 s."
                    self._end(job, Refusal(503, words, {"Retry-After": "1"}))
                elif isinstance(row, InputError):
                    self._end(job, Refusal(row.status, f"{self._place(number, len(job.rows))}{row}"))
                elif isinstance(row, Exception):
                    self._end(job, row)
                else:
                    self._put(job, number, row)

    def _take(self) -> list[_Item]:
        """Return the next batch; release the lane if it is empty."""
        late: list[Job] = []
        batch: list[_Item] = []
        now = time.perf_counter()
        with self._lock:
            while self._ready and len(batch) < self.limits.max_batch:
                item = self._ready.popleft()
                if item[0].error is not None:
                    continue
                if now - item[0].accepted > self.limits.max_wait and item[0]._left == len(item[0].rows):
                    late.append(item[0])
                else:
                    batch.append(item)
            if not batch:
                self._free += 1
        for job in late:
            self._end(job, self._too_late())
        return batch

    def _check_time(self, job: Job) -> None:
        if time.perf_counter() - job.accepted > self.limits.max_wait:
            raise self._too_late()

    def _too_late(self) -> Refusal:
        return Refusal(
            504,
            f"The request waited longer than {self.limits.max_wait:g} s for the model, and was not run; send it later.",
        )

    def _put(self, job: Job, number: int, row: np.ndarray) -> None:
        with self._lock:
            job.rows[number] = row
            job._left -= 1
            if job._left or job.error is not None:
                return
            self.waiting -= 1
        job.finish(job)

    def _end(self, job: Job, error: Exception) -> None:
        with self._lock:
            if job.error is not None:
                return
            job.error = error
            self.waiting -= 1
        job.finish(job)


class NotTiny(Exception):
    """Raised if a request takes too long to run in the calling thread."""


_NO_ROW = np.empty(0, np.float32)
