"""The only thread that talks to the store during a run: points and jobs go into a queue; training never waits for it.

A server that dies, or a locked database, therefore costs training nothing: entries stay in the queue, in order, and are
written when it is back, at the latest within the bounded wait at the end of a stage.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mlflow.entities import Metric
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

log = logging.getLogger("deeplightning.tracking")

FLUSH_SECONDS = 1.0
"""How long a point may wait for others: one transaction costs 3.5 ms with one point, 21 ms with 200 (SQLite, 2026)."""
BATCH = 1000
"""Points in one call; the most that MLflow takes."""
MAX_POINTS = 200_000
"""Points kept while the store does not answer (some 60 MB); beyond it the oldest are dropped, and that is said."""
DRAIN_SECONDS = 30.0
"""How long the end of a stage waits for the store; `DEEPLIGHTNING_TRACKING_DRAIN` overrides it."""
MAX_PAUSE_SECONDS = 30.0
"""The longest pause between two attempts at a store that does not answer."""

_TRANSIENT = (
    "TEMPORARILY_UNAVAILABLE",
    "INTERNAL_ERROR",
    "REQUEST_LIMIT_EXCEEDED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "CANCELLED",
)


@dataclass(frozen=True)
class Job:
    """Something to do at the store besides writing points: `what` names it in a warning."""

    what: str
    do: Callable[[], object]


class Writer:
    """Writes one run.

    Args:
        client: MLflow's client.
        run_id: the run.
        shown: the store, for messages.
        sample: called now and then for points of its own (the machine's load), or None.
        sample_seconds: the pause between two samples.
    """

    def __init__(
        self,
        client: MlflowClient,
        run_id: str,
        shown: str,
        sample: Callable[[], list[Metric]] | None = None,
        sample_seconds: float = 10.0,
    ):
        self._client, self._run_id, self._shown = client, run_id, shown
        self._sample, self._sample_seconds = sample, sample_seconds
        self._queue: deque[Metric | Job] = deque()
        self._points = 0  # in the queue
        self._change = threading.Condition()
        self._urgent = self._stopping = False
        self._ended = True  # set under the lock, so an entry never goes to a thread that is just leaving
        self._oldest = 0.0  # when the first of the waiting points came
        self._failures = self._dropped = 0
        self._in_vain = False  # whether the store was waited for, and nothing was written since
        self._retry_at = 0.0
        self._sampled_at = self._sample_at = 0.0
        self._thread = threading.Thread()
        with self._change:
            self._start()

    def add(self, points: list[Metric]) -> None:
        """Queue points; they are written within about a second."""
        with self._change:
            self._start()
            self._append(points)
            self._change.notify_all()

    def put(self, what: str, do: Callable[[], object]) -> None:
        """Queue a job, done as soon as what was queued before it is written."""
        with self._change:
            self._start()
            self._queue.append(Job(what, do))
            self._urgent = True
            self._change.notify_all()

    def waiting(self) -> list[Metric]:
        """The points that may not be in the store yet."""
        with self._change:
            return [entry for entry in self._queue if isinstance(entry, Metric)]

    def flush(self) -> None:
        """Write what waits now, in the background."""
        with self._change:
            self._urgent = bool(self._queue)
            self._change.notify_all()

    def stop(self) -> bool:
        """Take a last sample, write everything, end the thread; the next entry starts it again.

        Returns:
            Whether the store took everything in time; if not, a warning says so, and the thread goes on trying.
        """
        with self._change:
            if self._ended:
                return True
            self._stopping = True
            # The load of less than a second is noise, so a short stage has no last sample.
            self._sample_at = 0.0 if time.monotonic() - self._sampled_at >= 1.0 else math.inf
            seconds = float(os.environ.get("DEEPLIGHTNING_TRACKING_DRAIN") or DRAIN_SECONDS)
            if was_in_vain := self._in_vain:
                seconds = min(1.0, seconds)  # asked again, but not waited for at each later stage, too
            self._urgent = True
            self._retry_at = 0.0  # whatever the pause was, ask again now
            self._change.notify_all()
            if not (done := self._change.wait_for(lambda: self._ended, seconds)):
                self._in_vain = True
            points, others = self._points, len(self._queue) - self._points
        if done:
            self._thread.join()
        elif not was_in_vain:
            log.warning(
                "%d points and %d other entries could not be written to %s in %g seconds; it is tried on until the "
                "process ends.",
                *(points, others, self._shown, seconds),
            )
        return done

    def _start(self) -> None:
        """Have the thread running."""
        if self._stopping or self._ended:
            self._stopping = False
            self._sampled_at = time.monotonic()
            self._sample_at = self._sampled_at + min(1.0, self._sample_seconds)
        if self._ended:
            self._ended = False
            self._thread = threading.Thread(target=self._run, name="deeplightning-tracking", daemon=True)
            self._thread.start()

    def _append(self, points: list[Metric]) -> None:
        if not self._points:
            self._oldest = time.monotonic()
        self._queue.extend(points)
        self._points += len(points)
        while self._points > MAX_POINTS:
            oldest = next(entry for entry in self._queue if isinstance(entry, Metric))
            self._queue.remove(oldest)
            self._points -= 1
            self._dropped += 1
            if self._dropped == 1:
                log.warning("%s has not answered for too long: the oldest points are dropped from now on.", self._shown)

    def _take_sample(self) -> None:
        if self._sample is not None:
            try:
                self._append(self._sample())
            except Exception as error:  # the load of a machine is not worth a run
                log.warning("No more system metrics: %s", error)
                self._sample = None
        self._sampled_at = time.monotonic()
        self._sample_at = math.inf if self._stopping else self._sampled_at + self._sample_seconds

    def _run(self) -> None:
        if self._sample is not None:
            with suppress(Exception):
                self._sample()  # not kept: a CPU is measured since the last time this thread asked
        while True:
            with self._change:
                now = time.monotonic()
                if self._sample is not None and now >= self._sample_at:
                    self._take_sample()
                if self._stopping and not self._queue:
                    self._ended = True
                    self._change.notify_all()
                    return
                if (pause := self._pause(now)) is None or pause > 0:
                    self._change.wait(pause)
                    continue
                head = self._head()
            error = self._write(head)
            with self._change:
                self._settle(head, error)
                self._change.notify_all()

    def _pause(self, now: float) -> float | None:
        """Seconds until there is something to do; None: until something comes."""
        until = []
        if self._sample is not None:
            until.append(self._sample_at)
        if self._queue and self._failures:
            until.append(self._retry_at)
        elif self._queue and (self._urgent or self._points >= BATCH):
            return 0.0
        elif self._queue:
            until.append(self._oldest + FLUSH_SECONDS)
        return max(0.0, min(until) - now) if until and min(until) < math.inf else None

    def _head(self) -> list[Metric] | Job:
        """The next job, or the next points up to a job."""
        if isinstance(self._queue[0], Job):
            return self._queue[0]
        points: list[Metric] = []
        for entry in self._queue:
            if isinstance(entry, Job) or len(points) == BATCH:
                break
            points.append(entry)
        return points

    def _write(self, head: list[Metric] | Job) -> Exception | None:
        try:
            if isinstance(head, Job):
                head.do()
            else:
                self._client.log_batch(self._run_id, metrics=head)
        except Exception as error:
            return error
        return None

    def _settle(self, head: list[Metric] | Job, error: Exception | None) -> None:
        """Take what was written, or can never be, off the queue; otherwise plan the next attempt."""
        if error is not None and _is_transient(error):
            self._failures += 1
            longest = 1.0 if self._stopping else MAX_PAUSE_SECONDS
            self._retry_at = time.monotonic() + min(longest, 2.0 ** min(self._failures - 1, 10))
            if self._failures == 1:
                log.warning(
                    "%s does not take what is logged (%s). The run goes on; entries are kept and written once it does.",
                    *(self._shown, _first_line(error)),
                )
            return
        if error is not None:
            what = head.what if isinstance(head, Job) else f"{len(head)} points"
            log.warning("Not tracked in %s: %s (%s)", self._shown, what, _first_line(error))
        elif self._failures:
            log.warning("%s takes what is logged again.", self._shown)
        self._failures = 0
        self._in_vain = False
        if isinstance(head, Job):
            self._queue.remove(head)
        else:
            # The oldest may have been dropped meanwhile, so what was written is found again by identity.
            written = {id(point) for point in head}
            while self._queue and id(self._queue[0]) in written:
                self._queue.popleft()
                self._points -= 1
            self._oldest = time.monotonic()
        if not self._queue:
            self._urgent = False


def _is_transient(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, MlflowException):
        return error.error_code in _TRANSIENT
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)  # OSError: also the network's


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n[SQL")[0].split())[:200] or type(error).__name__
