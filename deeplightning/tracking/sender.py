"""The thread that sends what a run logs to its tracking store; training never waits for it. And the run's artifacts,
which go into its folder at once, or to a server by that thread.

What is logged is in the run's `metrics.jsonl` before training continues. The thread sends it at most every second with
MLflow's client, which it imports after the first training step. A server or a database that is away delays the thread
only; what is not sent when the process ends is sent by the next command on the store.
"""

import contextlib
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deeplightning.runfolder import permissions_of
from deeplightning.tracking.delivery import Delivery, no_fork
from deeplightning.tracking.entities import SYSTEM, inside
from deeplightning.tracking.metrics_file import Line, MetricsFile, points_line, safe_position
from deeplightning.tracking.store import first_line, ignore_mlflow_warnings
from deeplightning.tracking.unsent import Claim, take_over

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
        delivery: of the run.
        afterwards: called once in the thread when the store has taken something.
        make_sample: called once in the thread, after the first attempt to send, which imports MLflow; returns what
            is called now and then for points of its own (the machine's load).
        sample_seconds: the pause between two samples.
    """

    def __init__(
        self,
        delivery: Delivery,
        afterwards: Callable[[], None] = lambda: None,
        make_sample: Callable[[], Callable[[], Sample]] | None = None,
        sample_seconds: float = 10.0,
    ):
        self._delivery, self._afterwards, self._shown = delivery, afterwards, delivery.store.shown
        self._make_sample, self._sample_seconds = make_sample, sample_seconds
        self._sample: Callable[[], Sample] | None = None
        self._file: MetricsFile | None = None
        self._claim: Claim | None = None
        self._held: list[Line] = []  # that the disk has not taken
        self._is_reported = False  # that it does not
        self._change = threading.Condition()
        self._is_ready = delivery.client is not None
        self._is_opening = not self._is_ready
        self._stopping = False
        self._stops = 0  # calls of `stop` that wait: what another thread logs meanwhile does not call them off
        self._ended = True  # set under the lock, so a line never goes to a thread that is just leaving
        self._oldest: float | None = None  # when the first of the lines that wait came
        self._failures = 0
        self._in_vain = False  # whether the store was waited for, and nothing was sent since
        self._retry_at = self._quiet_until = self._sampled_at = self._sample_at = 0.0
        self._thread = threading.Thread()
        ignore_mlflow_warnings()
        with self._change:
            self._start()

    def say(self, line: Line) -> None:
        """Append a line to the file, before this returns, and send it within about a second."""
        with self._change:
            self._start()
            self._append(line)
            is_first_point = not self._is_ready and "values" in line
            self._is_ready = self._is_ready or is_first_point
            if self._oldest is None or is_first_point:  # wakes the thread, which then sleeps until it is time
                self._oldest = time.monotonic()
                self._change.notify_all()

    def make_run(self) -> None:
        """Wait until the store has all that was logged, or does not answer."""
        with self._change:
            self._is_ready = True
            if self._oldest is not None:
                self._oldest = 0.0
                self._change.notify_all()
                self._change.wait_for(lambda: self._oldest is None or self._failures > 0)

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
            self._retry_at = 0.0  # whatever the pause was, ask again now
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
                "The rest of %s could not be sent to %s in %g seconds. It is tried on until the process ends; what "
                "remains is sent by the next run there, or by: deeplightning runs --sync --tracking-uri '%s'",
                *(self._delivery.metrics, self._shown, seconds, self._shown),
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
            store, run_id, metrics = self._delivery.store, self._delivery.run_id, self._delivery.metrics
            try:
                self._claim = Claim(store, run_id, metrics)
                if take_over(store, run_id):
                    self._delivery.position = safe_position(metrics)
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
                self._file = MetricsFile(self._delivery.metrics)
            while self._held:
                self._file.append(self._held[0])
                del self._held[0]
        except OSError as error:
            del self._held[:-MAX_HELD_LINES]
            if not self._is_reported:
                self._is_reported = True
                log.warning("%s is not written, at least in parts: %s", self._delivery.metrics, error)

    def _prepare_sample(self) -> None:
        make, self._make_sample = self._make_sample, None
        if make is not None:
            try:
                with no_fork:
                    self._sample = make()
            except Exception as error:  # the load of a machine is not worth a run
                log.warning("No system metrics: %s", error)

    def _take_sample(self) -> None:
        if self._sample is not None:
            try:
                self._append(points_line(*self._sample()))
                self._oldest = self._oldest or time.monotonic()
            except Exception as error:
                log.warning("No more system metrics: %s", error)
                self._sample = None
        self._sampled_at = time.monotonic()
        self._sample_at = math.inf if self._stopping else self._sampled_at + self._sample_seconds

    def _run(self) -> None:
        while True:
            with self._change:
                now = time.monotonic()
                if self._sample is not None and now >= self._sample_at:
                    self._take_sample()
                if self._stopping and self._oldest is None:
                    self._end()
                    return
                if (pause := self._pause(now)) is None or pause > 0:
                    self._change.wait(pause)
                    continue
                until, held = self._file.size if self._file is not None else 0, list(self._held)
            error = None
            try:
                self._delivery.send(until)
                self._delivery.deliver([(None, line) for line in held])
                afterwards, self._afterwards = self._afterwards, lambda: None
                afterwards()
            except Exception as raised:  # the store's own
                error = raised
            self._prepare_sample()
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

    def _pause(self, now: float) -> float | None:
        """Return the seconds until there is something to do; None: until something comes."""
        until = [self._sample_at] if self._sample is not None else []
        if self._oldest is not None and self._failures:
            until.append(self._retry_at)
        elif self._oldest is not None and self._stopping:
            return 0.0
        elif self._oldest is not None:
            until.append(self._oldest + FLUSH_SECONDS if self._is_ready else self._quiet_until)
        return max(0.0, min(until) - now) if until and min(until) < math.inf else None

    def _note(self, until: int, held: list[Line], error: Exception | None) -> None:
        """Forget what was sent, or plan the next attempt."""
        self._is_opening = False
        if error is not None:
            self._failures += 1
            longest = 1.0 if self._stopping else MAX_PAUSE_SECONDS
            self._retry_at = time.monotonic() + min(longest, 2.0 ** min(self._failures - 1, 10))
            if self._failures == 1:
                log.warning(
                    "%s does not take what is logged (%s). The run continues; it is kept and sent later.",
                    *(self._shown, first_line(error)),
                )
                self._change.notify_all()
            return
        if self._failures:
            log.warning("%s takes what is logged again.", self._shown)
        self._failures, self._in_vain, self._is_ready = 0, False, True
        del self._held[: len(held)]
        has_more = bool(self._held) or (self._file is not None and self._file.size > until)
        self._oldest = time.monotonic() if has_more else None
        self._change.notify_all()


class Artifacts:
    """The artifacts of one run. Where the disk is full, the run loses the artifact and gets a warning.

    Args:
        top: the run's folder.
        sender: sends them to a server that keeps them; None: they stay in the folder.
    """

    def __init__(self, top: Path, sender: Sender | None = None):
        self.top, self._sender = top, sender

    def put(self, source: Path, folder: str | None) -> None:
        """Copy a file or folder, unless it is there already. A server gets it later: it must stay until the run is
        finalized.

        Args:
            source: absolute.
            folder: relative to the artifacts; None: their top.
        """
        place = inside(folder or ".")
        if self._sender is not None:
            to = place / source.name if source.is_dir() else place
            self._sender.say({"artifact": [str(source), None if to == Path() else to.as_posix()]})
            return
        target = self.top / place / source.name
        if target.exists() and target.samefile(source):
            return
        with self._writing(target) as partial:
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, partial)  # with the permissions of the run, not those of the source
                partial.replace(target)

    def save(self, name: str, content: bytes) -> None:
        """Replace a file at once, complete; `name` is relative to the artifacts."""
        target = self.top / inside(name)
        with self._writing(target) as partial:
            partial.write_bytes(content)
            partial.replace(target)
        if self._sender is not None:
            self.put(target, Path(name).parent.as_posix())

    @contextlib.contextmanager
    def _writing(self, target: Path) -> Iterator[Path]:
        try:
            with permissions_of(self.top):
                target.parent.mkdir(parents=True, exist_ok=True)
                yield target.with_name(f".{target.name}.partial")
        except OSError as error:
            log.warning("Not tracked in %s: %s (%s)", self.top, target.name, error)


def sampler(started: int) -> Callable[[], Sample]:
    """Return a function that measures CPU and memory, GPUs of NVIDIA with the package nvidia-ml-py, and those of AMD,
    by MLflow's monitors, which it imports: MLflow's public way has a thread that writes past the run's file.

    Args:
        started: start of the run in milliseconds since 1970. The step of a point is the second of the run, so that a
            continued run continues where it was.
    """
    from mlflow.system_metrics.metrics import cpu_monitor, gpu_monitor, rocm_monitor

    monitors: list[Any] = [cpu_monitor.CPUMonitor()]
    for kind in (gpu_monitor.GPUMonitor, rocm_monitor.ROCMMonitor):
        with contextlib.suppress(Exception):  # there is no such GPU, or what reads it is not installed or fails
            monitors.append(kind())

    def sample() -> Sample:
        now, points = time.time_ns() // 1_000_000, dict[str, float]()
        for monitor in monitors:
            monitor.clear_metrics()
            monitor.collect_metrics()
            points |= {f"{SYSTEM}{name}": value for name, value in monitor.aggregate_metrics().items()}
        return now, max(0, now - started) // 1000, points

    return sample
