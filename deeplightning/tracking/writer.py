"""The only thread that talks to the store during a run: entries go into a queue; training never waits for it.

What waits is written together, once in an interval. A server that dies, or a locked database, therefore costs training
nothing: entries stay in the queue, in order, and are written when it is back, at the latest within the bounded wait at
the end of a stage. What a process leaves unwritten, killed or not, is in its journal.
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
from itertools import islice

from deeplightning.tracking.journal import Entry, Journal, gather
from deeplightning.tracking.store import Store
from deeplightning.tracking.tracker import Point, Tracker

log = logging.getLogger("deeplightning.tracking")

FLUSH_SECONDS = 1.0
"""Seconds that an entry may wait for more: a transaction costs 0.3 CPU-ms directly, 7 over HTTP (2026)."""
BATCH = 1000
"""The most entries that are written together."""
MAX_POINTS = 200_000
"""Points kept in memory while the store does not answer (some 30 MB); beyond it the oldest stay in the journal only."""
DRAIN_SECONDS = 10.0
"""How long the end of a stage waits for the store; `DEEPLIGHTNING_TRACKING_DRAIN` overrides it."""
MAX_PAUSE_SECONDS = 30.0
"""The longest pause between two attempts at a store that does not answer."""


@dataclass(frozen=True)
class Job:
    """Something to do at the store besides writing entries: `what` names it in a warning."""

    what: str
    do: Callable[[], object]


class Writer:
    """Writes one run.

    Args:
        tracker: of the store.
        store: where the run is.
        run_id: the run.
        sample: called now and then for points of its own (the machine's load), or None.
        sample_seconds: the pause between two samples.
    """

    def __init__(
        self,
        tracker: Tracker,
        store: Store,
        run_id: str,
        sample: Callable[[], list[Entry]] | None = None,
        sample_seconds: float = 10.0,
        journal: Journal | None = None,
    ):
        self._tracker, self._store, self._run_id, self._shown = tracker, store, run_id, store.shown
        self._sample, self._sample_seconds = sample, sample_seconds
        self._queue: deque[Entry | Job] = deque()
        self._points = 0  # in the queue
        self._journal = journal
        self._no_journal = False  # it was tried, and reported
        self._change = threading.Condition()
        self._stopping = False
        self._stops = 0  # calls of `stop` that wait: what another thread says meanwhile does not call them off
        self._ended = True  # set under the lock, so an entry never goes to a thread that is just leaving
        self._oldest = 0.0  # when the first of the waiting entries came
        self._failures = self._dropped = 0
        self._in_vain = False  # whether the store was waited for, and nothing was written since
        self._retry_at = 0.0
        self._sampled_at = self._sample_at = 0.0
        self._thread = threading.Thread()
        with self._change:
            self._start()

    def say(self, entry: Entry) -> None:
        """Queue an entry; it is in the journal at once, and in the store within about a second."""
        with self._change:
            self._start()
            self._append(entry)

    def do(self, what: str, do: Callable[[], object], entry: Entry | None = None) -> None:
        """Queue a job, done when what was queued before it is written; `entry` says it to the journal, if that can."""
        with self._change:
            self._start()
            if entry is not None:
                self._note(entry)
            self._queued(Job(what, do))

    def waiting(self) -> list[Point]:
        """The points that may not be in the store yet."""
        with self._change:
            return gather([entry for entry in self._queue if not isinstance(entry, Job)]).points

    def stop(self) -> bool:
        """Take a last sample, write everything, end the thread; the next entry starts it again.

        Returns:
            Whether the store took everything in time; if not, a warning says so, and the thread keeps trying.
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
            self._retry_at = 0.0  # whatever the pause was, ask again now
            thread = self._thread
            self._stops += 1
            self._change.notify_all()
            try:
                done = self._change.wait_for(lambda: self._ended or self._thread is not thread, seconds)
            finally:
                self._stops -= 1
            if not done:
                self._in_vain = True
            points = self._points
            others = sum(isinstance(entry, Job) or entry[0] != "points" for entry in self._queue)
            kept = self._journal
        if done:
            thread.join()
        elif not was_in_vain:
            log.warning(
                "%d points and %d other entries could not be written to %s in %g seconds. It is tried on until the "
                "process ends; %s.",
                *(points, others, self._shown, seconds),
                f"what remains is kept in {kept.path} and written by the next run there, or by: {self._to_sync()}"
                if kept is not None
                else "what remains is lost, since there is no journal",
            )
        return done

    def _to_sync(self) -> str:
        return f"deeplightning runs --sync --tracking-uri '{self._shown}'"

    def _start(self) -> None:
        """Have the thread running, and a journal."""
        if not self._ended and (self._stops or not self._stopping):
            return
        self._stopping = False
        self._sampled_at = time.monotonic()
        self._sample_at = self._sampled_at + min(1.0, self._sample_seconds)
        if self._journal is None and not self._no_journal:
            try:
                self._journal = Journal(self._store, self._run_id)
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no home to keep it in
                self._without_journal(error)
        if self._ended:
            self._ended = False
            self._thread = threading.Thread(target=self._run, name="deeplightning-tracking", daemon=True)
            self._thread.start()

    def _without_journal(self, error: Exception) -> None:
        self._no_journal = True
        log.warning("No journal of the run is kept, so a kill may cost its last second: %s", error)

    def _note(self, entry: Entry) -> None:
        if self._journal is not None:
            try:
                self._journal.append(entry)
            except OSError as error:
                self._journal.end(keep=True)
                self._journal = None
                self._without_journal(error)

    def _append(self, entry: Entry) -> None:
        self._note(entry)
        if entry[0] == "points":
            self._points += len(entry[3])
        self._queued(entry)
        while self._points > MAX_POINTS:
            self._drop_oldest()

    def _queued(self, entry: Entry | Job) -> None:
        """Puts an entry in. The first wakes the thread, which then sleeps until it is time; later ones do not."""
        self._queue.append(entry)
        if len(self._queue) == 1:
            self._oldest = time.monotonic()
            self._change.notify_all()

    def _drop_oldest(self) -> None:
        oldest = next(entry for entry in self._queue if not isinstance(entry, Job) and entry[0] == "points")
        self._queue.remove(oldest)
        self._points -= len(oldest[3])
        self._dropped += len(oldest[3])
        if self._dropped == len(oldest[3]):
            log.warning(
                "%s has not answered for too long: the oldest points are %s from now on.",
                *(self._shown, "dropped" if self._journal is None else f"only in {self._journal.path}"),
            )

    def _take_sample(self) -> None:
        if self._sample is not None:
            try:
                for entry in self._sample():
                    self._append(entry)
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
                    self._end_journal()
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

    def _end_journal(self) -> None:
        if self._journal is not None:
            # What was dropped from memory is in there alone.
            self._journal.end(keep=self._dropped > 0)
            if self._dropped:
                log.warning(
                    "%d points are only in %s; the next run there writes them, or: %s",
                    *(self._dropped, self._journal.path, self._to_sync()),
                )
            self._journal, self._dropped = None, 0

    def _pause(self, now: float) -> float | None:
        """Seconds until there is something to do; None: until something comes."""
        until = []
        if self._sample is not None:
            until.append(self._sample_at)
        if self._queue and self._failures:
            until.append(self._retry_at)
        elif self._queue and self._stopping:
            return 0.0
        elif self._queue:
            until.append(self._oldest + FLUSH_SECONDS)
        return max(0.0, min(until) - now) if until and min(until) < math.inf else None

    def _head(self) -> list[Entry] | Job:
        """The next job, or the next entries up to a job."""
        if isinstance(self._queue[0], Job):
            return self._queue[0]
        entries: list[Entry] = []
        for entry in islice(self._queue, BATCH):
            if isinstance(entry, Job):
                break
            entries.append(entry)
        return entries

    def _write(self, head: list[Entry] | Job) -> Exception | None:
        """Writes what is at the head of the queue; returns why it is to be tried again, if it is."""
        try:
            if isinstance(head, Job):
                head.do()
            else:
                self._tracker.log_batch(self._run_id, gather(head))
        except Exception as error:  # the store's own
            if self._tracker.is_transient(error):
                return error
            return self._write_parts(head, error)
        return None

    def _write_parts(self, head: list[Entry] | Job, error: Exception) -> Exception | None:
        """After a refusal: what of it the store takes nevertheless, so that a parameter costs no point."""
        if isinstance(head, Job):
            log.warning("Not tracked in %s: %s (%s)", self._shown, head.what, _first_line(error))
            return None
        for part in gather(head).parts():
            try:
                self._tracker.log_batch(self._run_id, part)
            except Exception as refused:
                if self._tracker.is_transient(refused):
                    return refused
                log.warning("Not tracked in %s: %s (%s)", self._shown, part.words(), _first_line(refused))
        return None

    def _settle(self, head: list[Entry] | Job, error: Exception | None) -> None:
        """Take what was written, or can never be, off the queue; otherwise plan the next attempt."""
        if error is not None:
            self._failures += 1
            longest = 1.0 if self._stopping else MAX_PAUSE_SECONDS
            self._retry_at = time.monotonic() + min(longest, 2.0 ** min(self._failures - 1, 10))
            if self._failures == 1:
                log.warning(
                    "%s does not take what is logged (%s). The run continues; entries are kept and written once it "
                    "does.",
                    *(self._shown, _first_line(error)),
                )
            return
        if self._failures:
            log.warning("%s takes what is logged again.", self._shown)
        self._failures = 0
        self._in_vain = False
        # The oldest may have been dropped meanwhile, so what was written is found again by identity.
        written = {id(head)} if isinstance(head, Job) else {id(entry) for entry in head}
        while self._queue and id(self._queue[0]) in written:
            entry = self._queue.popleft()
            if not isinstance(entry, Job) and entry[0] == "points":
                self._points -= len(entry[3])
        if self._queue:
            is_all = not isinstance(head, Job) and len(head) < BATCH and not isinstance(self._queue[0], Job)
            self._oldest = time.monotonic() if is_all else 0.0  # 0: continues at once
        elif self._journal is not None and not self._dropped:
            self._journal.forget()


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n[SQL")[0].split())[:200] or type(error).__name__
