"""The thread that sends what a run logs to its tracking store; training never waits for it.

What is logged is in the run's `metrics.jsonl` before training continues. The thread sends it at most every second with
MLflow's client, which it imports after the first training step. A server or a database that is away delays the thread
only; what is not sent when the process ends is sent by the next command on the store.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.tracking.claims import Claim, take_over
from deeplightning.tracking.entities import SYSTEM
from deeplightning.tracking.metrics_file import Line, MetricsFile, points_line, safe_position
from deeplightning.tracking.mlflow_store import NO_FORK
from deeplightning.tracking.store import Store, first_line, ignore_mlflow_warnings

if TYPE_CHECKING:
    from deeplightning.tracking.client import Client
    from deeplightning.tracking.delivery import Delivery

log = logging.getLogger("deeplightning.tracking")

FLUSH_SECONDS = 1.0
"""How long a line waits for more: a transaction costs about 7 CPU-ms."""
QUIET_SECONDS = 10.0
"""How long the thread waits for the first point of a training before it imports MLflow."""
DRAIN_SECONDS = 10.0
"""How long the end of a stage waits for the store; `DEEPLIGHTNING_TRACKING_DRAIN` overrides it."""
MAX_PAUSE_SECONDS = 30.0
"""The longest pause between two attempts at a store that does not answer."""
MAX_HELD_LINES = 100_000
"""Lines that are kept in memory while the disk does not take them."""

Sample = tuple[int, int, dict[str, float]]
"""The load of the machine: milliseconds since 1970, the second of the run, and values by their names."""


class Sender:
    """Send one run.

    Args:
        store: where the run is, or is to be made.
        metrics: the run's `metrics.jsonl`.
        client: of the store, if it is open already.
        afterwards: called once in the thread when the store has taken something.
        sample: called in the thread now and then, after the first attempt to send, for points of its own (the machine's
            load).
        sample_seconds: the pause between two samples.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        metrics: Path,
        client: "Client | None" = None,
        afterwards: Callable[[], None] = lambda: None,
        sample: Callable[[], Sample] | None = None,
        sample_seconds: float = 10.0,
    ):
        self._store, self._run_id, self._metrics, self._client = store, run_id, metrics, client
        self._afterwards = afterwards
        self._delivery: Delivery | None = None
        self._begins_again = False  # from a safe position: another process has ended while it was sending
        self._sample, self._sample_seconds = sample, sample_seconds
        self._file: MetricsFile | None = None
        self._claim: Claim | None = None
        self._held: list[Line] = []  # that the disk has not taken
        self._is_reported = False  # that it does not
        self._change = threading.Condition()
        self._is_ready = client is not None
        self._is_opening = not self._is_ready
        self._stopping = False
        self._stops = 0  # calls of `stop` that wait: what another thread logs meanwhile does not call them off
        self._ended = True  # set under the lock, so a line never goes to a thread that is just leaving
        self._due = math.inf  # when to send what waits; inf: nothing does
        self._failures = 0
        self._in_vain = False  # whether the store was waited for, and nothing was sent since
        self._quiet_until = self._sampled_at = self._sample_at = 0.0
        self._thread = threading.Thread()
        ignore_mlflow_warnings()
        with self._change:
            self._start()

    def say(self, line: Line) -> None:
        """Append a line to the file, before this returns, and send it within about a second."""
        with self._change:
            self._start()
            self._append(line)
            if "values" in line and not self._is_ready:  # training has begun
                self._is_ready, self._due = True, math.inf
            self._plan()

    def _plan(self) -> None:
        """Plan an attempt to send, unless one is planned. It also sends what is logged before it begins."""
        if self._due == math.inf:  # wakes the thread, which then sleeps until it is time
            soon = time.monotonic() + FLUSH_SECONDS if self._is_ready else self._quiet_until
            self._due = 0.0 if self._stopping else soon
            self._change.notify_all()

    def make_run(self) -> None:
        """Wait until the store has all that was logged, or does not answer."""
        with self._change:
            self._is_ready = True
            if self._due < math.inf and self._failures == 0:
                self._due = 0.0
                self._change.notify_all()
                self._change.wait_for(lambda: self._due == math.inf or self._failures > 0)

    def stop(self) -> None:
        """Take a last sample, send everything, end the thread; the next line starts it again. If the store does not
        take everything in time, log a warning; the thread keeps trying."""
        with self._change:
            if self._ended:
                return
            self._stopping = True
            # The load of less than a second is noise, so a short stage has no last sample.
            is_long = time.monotonic() - self._sampled_at >= min(1.0, self._sample_seconds)
            self._sample_at = 0.0 if is_long else math.inf
            seconds = float(os.environ.get("DEEPLIGHTNING_TRACKING_DRAIN") or DRAIN_SECONDS)
            if was_in_vain := self._in_vain:
                seconds = min(1.0, seconds)  # asked again, but not waited for at each later stage, too
            if self._due < math.inf:
                self._due = 0.0  # whatever the pause was, ask again now
            thread = self._thread

            def has_ended() -> bool:
                return self._ended or self._thread is not thread

            self._stops += 1
            self._change.notify_all()
            try:
                # The import of MLflow, and the opening of a local store, are no waiting for the store.
                while not (done := self._change.wait_for(has_ended, seconds)) and self._is_opening:
                    pass
            finally:
                self._stops -= 1
            self._in_vain = self._in_vain or not done
        if done:
            thread.join()
        elif not was_in_vain:
            log.warning(
                "The rest of %s could not be sent to %s in %g seconds. Sending continues until the process ends; what "
                "remains is sent by the next run there, or by: deeplightning runs --sync --tracking-uri '%s'",
                *(self._metrics, self._store.shown, seconds, self._store.shown),
            )

    def _start(self) -> None:
        """Start the thread, and claim the run, unless that was done."""
        if not self._ended and (self._stops or not self._stopping):
            return
        self._stopping = False
        self._sampled_at = time.monotonic()
        self._quiet_until = self._sampled_at + QUIET_SECONDS
        self._sample_at = self._sampled_at + min(1.0, self._sample_seconds)
        if self._claim is None:
            try:
                self._claim = Claim(self._store, self._run_id, self._metrics)
                self._begins_again |= take_over(self._store, self._run_id)
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
                log.warning("The run is not claimed, so a kill may cost its last second: %s", error)
        if self._ended:
            self._ended = False
            self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
            self._thread.start()

    def _append(self, line: Line) -> None:
        """Append a line; keep it in memory while the disk does not take it, and warn once."""
        self._held.append(line)
        try:
            if self._file is None:
                self._file = MetricsFile(self._metrics)
            while self._held:
                self._file.append(self._held[0])
                del self._held[0]
        except OSError as error:
            del self._held[:-MAX_HELD_LINES]
            if not self._is_reported:
                self._is_reported = True
                log.warning("%s is not written completely: %s", self._metrics, error)

    def _take_sample(self) -> None:
        assert self._sample is not None
        line = None
        try:
            with NO_FORK:  # the first one imports
                line = points_line(*self._sample())
        except Exception as error:  # the load of a machine is not worth a run
            log.warning("No system metrics: %s", error)
            self._sample = None
        with self._change:
            if line is not None:
                self._append(line)
                self._plan()
            self._sampled_at = time.monotonic()
            self._sample_at = math.inf if self._stopping else self._sampled_at + self._sample_seconds

    def _run(self) -> None:
        while True:
            with self._change:
                now, takes_samples = time.monotonic(), self._sample is not None and not self._is_opening
                sample_at = self._sample_at if takes_samples else math.inf
                if sample_at > now:
                    if self._stopping and self._due == math.inf:
                        self._end()
                        return
                    if (pause := min(self._due, sample_at) - now) > 0:
                        self._change.wait(min(pause, threading.TIMEOUT_MAX))
                        continue
                until, held = self._file.size if self._file is not None else 0, list(self._held)
            if sample_at <= now:
                self._take_sample()
                continue
            error = None
            try:
                if self._delivery is None:
                    with NO_FORK:  # it imports
                        from deeplightning.tracking.delivery import Delivery
                    self._delivery = Delivery(self._store, self._run_id, self._metrics, self._client)
                delivery = self._delivery
                if self._begins_again:
                    delivery.position, self._begins_again = safe_position(self._metrics), False
                delivery.send(until)
                delivery.deliver([(None, line) for line in held])
                afterwards, self._afterwards = self._afterwards, lambda: None
                afterwards()
            except Exception as raised:  # the store's own
                error = raised
            with self._change:
                self._note(until, held, error)

    def _end(self) -> None:
        """Let go of the files: all is sent."""
        if self._claim is not None:
            self._claim.close()
        if self._file is not None:
            self._file.close()
        self._claim = self._file = None
        self._ended = True
        self._change.notify_all()

    def _note(self, until: int, held: list[Line], error: Exception | None) -> None:
        """Forget what was sent, or plan the next attempt."""
        self._is_opening = False
        if error is not None:
            self._failures += 1
            longest = 1.0 if self._stopping else MAX_PAUSE_SECONDS
            self._due = time.monotonic() + min(longest, 2.0 ** min(self._failures - 1, 10))
            if self._failures == 1:
                log.warning(
                    "%s does not accept what is logged (%s). The run continues; the records are kept and sent later.",
                    *(self._store.shown, first_line(error)),
                )
                self._change.notify_all()
            return
        if self._failures:
            log.warning("%s accepts what is logged again.", self._store.shown)
        self._failures, self._in_vain, self._is_ready = 0, False, True
        sent = {id(line) for line in held}  # of which the file may have some by now
        self._held = [line for line in self._held if id(line) not in sent]
        self._due = math.inf
        if self._held or (self._file is not None and self._file.size > until):
            self._plan()
        self._change.notify_all()


def sampler(started: int) -> Callable[[], Sample]:
    """Return a function that measures CPU and memory, GPUs of NVIDIA with the package nvidia-ml-py, and those of AMD.

    It does so by MLflow's monitors, which its first call imports: MLflow's public way has a thread that writes past the
    run's file.

    Args:
        started: start of the run in milliseconds since 1970. The step of a point is the second of the run, so that a
            continued run continues where it was.
    """
    monitors: list[Any] = []

    def sample() -> Sample:
        if not monitors:
            from mlflow.system_metrics.metrics import cpu_monitor, gpu_monitor, rocm_monitor

            monitors.append(cpu_monitor.CPUMonitor())
            for kind in (gpu_monitor.GPUMonitor, rocm_monitor.ROCMMonitor):
                with contextlib.suppress(Exception):  # there is no such GPU, or what reads it is not installed or fails
                    monitors.append(kind())
        now, points = time.time_ns() // 1_000_000, dict[str, float]()
        for monitor in monitors:
            monitor.clear_metrics()
            monitor.collect_metrics()
            points |= {f"{SYSTEM}{name}": value for name, value in monitor.aggregate_metrics().items()}
        return now, max(0, now - started) // 1000, points

    return sample
