"""A thread that sends logged data to the tracking store of the run; training never waits for it.

Logged data is in the run's `metrics.jsonl` before training continues. The thread sends it at most once per second with
MLflow's client, which it imports after the first training step. An unavailable server or database delays only the
thread; data that is unsent when the process ends is sent by the next command on the store.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.faults import seconds_of
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
"""Time to collect lines before sending them: a transaction costs about 7 CPU-ms."""
IMPORT_DELAY_SECONDS = 10.0
"""Maximum wait for the first point of a training before the thread imports MLflow."""
DRAIN_SECONDS = 10.0
"""Maximum wait for the store at the end of a stage; `DEEPLIGHTNING_TRACKING_DRAIN` overrides it."""
MAX_PAUSE_SECONDS = 30.0
"""Maximum pause between two attempts if the store does not answer."""
MAX_UNWRITTEN_LINES = 100_000
"""Maximum number of lines in memory while the disk does not accept them."""

Sample = tuple[int, int, dict[str, float]]
"""System metrics: milliseconds since 1970, the second of the run, and values by name."""


class Sender:
    """Sends the data of one run.

    Args:
        store: store of the run, which may not have it yet.
        metrics: the run's `metrics.jsonl`.
        client: client of the store, if there is one.
        afterwards: called in the thread once, after the first data was sent.
        sample: measures system metrics; called in the thread at intervals, after the first attempt to send.
        sample_seconds: interval of samples.
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
        seconds_of("DEEPLIGHTNING_TRACKING_DRAIN", DRAIN_SECONDS)  # a wrong value ends the run before the training
        self._store, self._run_id, self._metrics, self._client = store, run_id, metrics, client
        self._afterwards = afterwards
        self._delivery: Delivery | None = None
        self._resends = False  # from a safe position: another process may have ended while sending
        self._sample, self._sample_seconds = sample, sample_seconds
        self._file: MetricsFile | None = None
        self._claim: Claim | None = None
        self._unwritten: list[Line] = []  # lines that are not on disk yet
        self._disk_error_is_logged = False  # whether a disk error was logged
        self._condition = threading.Condition()
        self._is_ready = client is not None
        self._is_opening = not self._is_ready
        self._stopping = False
        self._waiting_stops = 0  # waiting calls of `stop`, which lines logged by other threads do not cancel
        self._ended = True  # set under the lock, so that no line goes to a thread that is about to end
        self._due = math.inf  # when to send pending data; inf: there is none
        self._failures = 0
        self._timed_out = False  # whether the last wait timed out, and nothing was sent since
        self._import_due = self._sampled_at = self._sample_at = 0.0
        self._thread = threading.Thread()
        ignore_mlflow_warnings()
        with self._condition:
            self._start()

    def log(self, line: Line) -> None:
        """Append a line to the file before returning, and send it within about a second."""
        with self._condition:
            self._start()
            self._append(line)
            if "values" in line and not self._is_ready:  # training has started
                self._is_ready, self._due = True, math.inf
            self._schedule()

    def _schedule(self) -> None:
        """Schedule sending, unless it is scheduled already. It includes lines that are logged until it starts."""
        if self._due == math.inf:  # wakes the thread, which then sleeps until it is time
            due = time.monotonic() + FLUSH_SECONDS if self._is_ready else self._import_due
            self._due = 0.0 if self._stopping else due
            self._condition.notify_all()

    def make_run(self) -> None:
        """Wait until the store has all logged data, or does not answer."""
        with self._condition:
            self._is_ready = True
            if self._due < math.inf and self._failures == 0:
                self._due = 0.0
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._due == math.inf or self._failures > 0)

    def stop(self) -> None:
        """Take a last sample, send everything and end the thread, which the next line restarts. If the store does not
        accept everything in time, log a warning; the thread keeps trying."""
        with self._condition:
            if self._ended:
                return
            self._stopping = True
            # Load measured over less than a second is noise: no last sample for a short stage.
            is_long = time.monotonic() - self._sampled_at >= min(1.0, self._sample_seconds)
            self._sample_at = 0.0 if is_long else math.inf
            seconds = seconds_of("DEEPLIGHTNING_TRACKING_DRAIN", DRAIN_SECONDS)
            if had_timed_out := self._timed_out:
                seconds = min(1.0, seconds)  # try again, but do not wait as long at each later stage
            if self._due < math.inf:
                self._due = 0.0  # try again now, whatever the pause was
            thread = self._thread

            def has_ended() -> bool:
                return self._ended or self._thread is not thread

            self._waiting_stops += 1
            self._condition.notify_all()
            try:
                # Importing MLflow and opening a local store do not count as waiting for the store.
                while not (done := self._condition.wait_for(has_ended, seconds)) and self._is_opening:
                    pass
            finally:
                self._waiting_stops -= 1
            self._timed_out = self._timed_out or not done
        if done:
            thread.join()
        elif not had_timed_out:
            log.warning(
                "The rest of %s could not be sent to %s in %g seconds. Sending continues until the process ends; what "
                "remains is sent by the next run there, or by: deeplightning runs --sync --tracking-uri '%s'",
                *(self._metrics, self._store.shown, seconds, self._store.shown),
            )

    def _start(self) -> None:
        """Start the thread and claim the run, unless that was done."""
        if not self._ended and (self._waiting_stops or not self._stopping):
            return
        self._stopping = False
        self._sampled_at = time.monotonic()
        self._import_due = self._sampled_at + IMPORT_DELAY_SECONDS
        self._sample_at = self._sampled_at + min(1.0, self._sample_seconds)
        if self._claim is None:
            try:
                self._claim = Claim(self._store, self._run_id, self._metrics)
                self._resends |= take_over(self._store, self._run_id)
            except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
                log.warning("The run is not claimed, so a kill may cost its last second: %s", error)
        if self._ended:
            self._ended = False
            self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)
            self._thread.start()

    def _append(self, line: Line) -> None:
        """Append a line to the file. While the disk does not accept it, keep it in memory; warn once."""
        self._unwritten.append(line)
        try:
            if self._file is None:
                self._file = MetricsFile(self._metrics)
            while self._unwritten:
                self._file.append(self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            del self._unwritten[:-MAX_UNWRITTEN_LINES]
            if not self._disk_error_is_logged:
                self._disk_error_is_logged = True
                log.warning("%s is not written completely: %s", self._metrics, error)

    def _take_sample(self) -> None:
        assert self._sample is not None
        line = None
        try:
            with NO_FORK:  # the first call imports modules
                line = points_line(*self._sample())
        except Exception as error:  # not worth failing a run
            log.warning("No system metrics: %s", error)
            self._sample = None
        with self._condition:
            if line is not None:
                self._append(line)
                self._schedule()
            self._sampled_at = time.monotonic()
            self._sample_at = math.inf if self._stopping else self._sampled_at + self._sample_seconds

    def _run(self) -> None:
        while True:
            with self._condition:
                now, takes_samples = time.monotonic(), self._sample is not None and not self._is_opening
                sample_at = self._sample_at if takes_samples else math.inf
                if sample_at > now:
                    if self._stopping and self._due == math.inf:
                        self._close()
                        return
                    if (pause := min(self._due, sample_at) - now) > 0:
                        self._condition.wait(min(pause, threading.TIMEOUT_MAX))
                        continue
                until, unwritten = self._file.size if self._file is not None else 0, list(self._unwritten)
            if sample_at <= now:
                self._take_sample()
                continue
            error = None
            try:
                if self._delivery is None:
                    with NO_FORK:  # this imports modules
                        from deeplightning.tracking.delivery import Delivery
                    self._delivery = Delivery(self._store, self._run_id, self._metrics, self._client)
                delivery = self._delivery
                if self._resends:
                    delivery.position, self._resends = safe_position(self._metrics), False
                delivery.send(until)
                delivery.deliver([(None, line) for line in unwritten])
                afterwards, self._afterwards = self._afterwards, lambda: None
                afterwards()
            except Exception as raised:  # an error of the store
                error = raised
            with self._condition:
                self._finish_attempt(until, unwritten, error)

    def _close(self) -> None:
        """Release the claim and close the file after everything was sent."""
        if self._claim is not None:
            self._claim.close()
        if self._file is not None:
            self._file.close()
        self._claim = self._file = None
        self._ended = True
        self._condition.notify_all()

    def _finish_attempt(self, until: int, unwritten: list[Line], error: Exception | None) -> None:
        """Discard lines that were sent, or schedule the next attempt."""
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
                self._condition.notify_all()
            return
        if self._failures:
            log.warning("%s accepts what is logged again.", self._store.shown)
        self._failures, self._timed_out, self._is_ready = 0, False, True
        sent = {id(line) for line in unwritten}  # the file may have some of them by now
        self._unwritten = [line for line in self._unwritten if id(line) not in sent]
        self._due = math.inf
        if self._unwritten or (self._file is not None and self._file.size > until):
            self._schedule()
        self._condition.notify_all()


def sampler(started: int) -> Callable[[], Sample]:
    """Return a function that measures CPU, memory, NVIDIA GPUs (with the package nvidia-ml-py) and AMD GPUs.

    It uses MLflow's monitors, which its first call imports. MLflow's public API has a thread that bypasses the run's
    file.

    Args:
        started: start of the run in milliseconds since 1970. The step of a point is the second of the run, so that a
            resumed run continues the steps.
    """
    monitors: list[Any] = []

    def sample() -> Sample:
        if not monitors:
            from mlflow.system_metrics.metrics import cpu_monitor, gpu_monitor, rocm_monitor

            monitors.append(cpu_monitor.CPUMonitor())
            for kind in (gpu_monitor.GPUMonitor, rocm_monitor.ROCMMonitor):
                with contextlib.suppress(Exception):  # there is no such GPU, or its library is missing or fails
                    monitors.append(kind())
        now, points = time.time_ns() // 1_000_000, dict[str, float]()
        for monitor in monitors:
            monitor.clear_metrics()
            monitor.collect_metrics()
            points |= {f"{SYSTEM}{name}": value for name, value in monitor.aggregate_metrics().items()}
        return now, max(0, now - started) // 1000, points

    return sample
