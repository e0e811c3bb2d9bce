"""Supervision of the processes of a launch: which failed first, which is gone, and where each one hangs.

The processes of a machine share a folder. The first process that fails records its cause there; errors that follow
from it (closed connections, timeouts) are not reported. A thread in each process polls, because the main thread may be
blocked in a collective operation, where it notices neither a signal nor the end of another process.
"""

import atexit
import contextlib
import dataclasses
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from deeplightning.process import failure
from deeplightning.process.failure import Cause, RankError, is_lost
from deeplightning.process.shared_folder import is_rank_alive, lock_folder, members, was_lost
from deeplightning.process.streams import INTERRUPTED, Interrupted, is_unhandled
from deeplightning.process.terminal import say
from deeplightning.runfolder import RunFolder
from deeplightning.words import first_line

POLL_SECONDS = 0.25
EXIT_SECONDS = 3.0  # in which a process exits by itself after another one failed
SHUTDOWN_SECONDS = 30.0  # for the end of a run, including the tracker's last writes
BATCH_SECONDS = 30.0  # from a signal to the end of the batch
_TIMED_OUT = re.compile(r"[Tt]im(?:ed out|eout)\D{0,40}?(\d+) ?(?:ms|milliseconds)")
_CLOSED = "Application timeout caused pair closure"  # gloo's message for other operations than the timed-out one


class Ranks:
    """Supervises this process as one of the processes of its launch.

    Args:
        rank: of this process.
        folder: shared with the other processes on this machine.
        parent: the process that started this one, if one of our launches did; this process ends with it.
        parent_reports: whether the parent reports a lost process; it may restart all of them.
        expected: the number of processes that will enter the folder, if no parent created it.

    Attributes:
        children: processes that this one started, in order of rank; the first has the next rank.
        redact: removes secrets from messages.
        end_run: ends a run whose main thread is blocked.
        timeout: the time limit of collective operations in seconds; None: torch's.
    """

    def __init__(
        self, rank: int, folder: Path, parent: int | None = None, parent_reports: bool = False, expected: int = 0
    ):
        self.expected = expected
        self.folder, self.parent, self.parent_reports, self.pid = folder, parent, parent_reports, os.getpid()
        self.children: list[subprocess.Popen[bytes]] = []
        self.redact: Callable[[str], str] = str
        self.end_run: Callable[[BaseException], None] | None = None
        self.timeout: float | None = None
        self._main = threading.main_thread().ident
        self._deadline: float | None = None  # when to end this process, if its main thread has not done so
        self._is_ending = False  # whether the main thread is ending the process
        self._signal: int | None = None
        self._signalled = 0.0
        self._pipe: tuple[int, int] | None = None
        self.rank = rank
        atexit.register(self.leave)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def rank(self) -> int:
        """The rank of this process; it may be corrected after the start."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        former, self._rank = getattr(self, "_rank", rank), rank
        with contextlib.suppress(OSError):  # the folder is gone, which the watching thread notices
            (self.folder / f"{former}.pid").unlink(missing_ok=True)
            (self.folder / f"{rank}.pid").write_text(str(self.pid))

    # ---- causes

    def first(self) -> Cause | None:
        """Return the failure cause of the launch; None if nothing failed."""
        return failure.first_cause(self.folder)

    def record_cause(self, cause: Cause) -> bool:
        """Record a failure cause as the first one, unless another process has recorded one."""
        redacted = dataclasses.replace(cause, reason=self.redact(cause.reason))
        return failure.record_cause(self.folder, redacted, self.rank)

    def write_run_folder(self, run: Path) -> None:
        """Write the path of the run's folder for the process that started this one."""
        with contextlib.suppress(OSError):
            (self.folder / "run").write_text(str(run))

    def resume_hint(self) -> str:
        """Return the end of an error message, which names the checkpoint from which the run can resume."""
        try:
            run = RunFolder((self.folder / "run").read_text())
        except OSError:
            return ""
        return failure.resume_hint(failure.latest_checkpoint(run))

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error to report: the given one if it is the first cause, else a RankError with that cause."""
        self._is_ending, self._deadline = True, time.monotonic() + SHUTDOWN_SECONDS
        if is_lost(error):
            return RankError(self._cause_of_loss(error))
        code = failure.exit_code_of(error)
        if code in INTERRUPTED.values():
            self._deadline = None  # saving the checkpoint may take long; a second signal ends it
        mine = self.record_cause(Cause(self.rank, failure.reason_of(error), code))
        first = None if mine or code in INTERRUPTED.values() else self.first()
        return error if first is None else RankError(first)

    def final_cause(self, error: BaseException, reason: str, exit_code: int) -> tuple[Cause, bool]:
        """Return the first cause at the end of this process, and whether this process should report it."""
        if is_lost(error):
            error = self.cause_of(error)
        cause = error.cause if isinstance(error, RankError) else Cause(self.rank, reason, exit_code)
        if cause.rank == self.rank:
            self.record_cause(cause)
        self.end_children(SHUTDOWN_SECONDS / 3)  # the end of this process is limited as well
        cause = self.first() or cause
        return cause, self._may_report(cause)

    def _may_report(self, cause: Cause) -> bool:
        """Return whether this process should report the cause: its own, or one that its process did not report."""
        if self.parent_reports and cause.lost:
            return False
        reported, until = self.folder / failure.REPORTED, time.monotonic() + EXIT_SECONDS
        waits = cause.rank != self.rank
        while waits and is_rank_alive(self.folder, cause.rank) and not reported.exists() and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 5)
        try:
            os.close(os.open(reported, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:  # the folder is gone, and so are the others
            return cause.rank == self.rank
        return True

    def _wait_for_first(self) -> Cause | None:
        """Return another process's cause; it may be recorded shortly after that process closed its connections."""
        until = time.monotonic() + EXIT_SECONDS
        while (first := self.first()) is None and time.monotonic() < until:
            if (dead := self.failed_child()) is not None:
                time.sleep(POLL_SECONDS)
                self.record_cause(dead)
            time.sleep(POLL_SECONDS / 5)
        return first

    def failed_child(self) -> Cause | None:
        """Return the failure cause of the first child that exited without a report."""
        for number, child in enumerate(self.children, start=self.rank + 1):
            if (code := child.poll()) and was_lost(self.folder, number, code):
                return Cause(number, failure.describe_exit(code), 5, lost=code < 0)
        return None

    def _cause_of_loss(self, error: BaseException) -> Cause:
        """Return the failure cause of a collective operation that raised `error`."""
        line = first_line(error).split(". ")[0]  # the rest of gloo's message is advice
        limit = _TIMED_OUT.search(str(error))
        if limit is None and _CLOSED not in str(error):
            reason = f"a worker was lost: the connection to another process is gone ({line})"
            cause = self._wait_for_first() or Cause(self.rank, reason, 5, lost=True)
            return cause if self.record_cause(cause) else self.first() or cause
        seconds = int(limit[1]) / 1000 if limit else self.timeout  # pair closure may be reported first
        after = f" after {seconds:g} s" if seconds else ""
        cause = Cause(self.rank, f"timed out{after} (engine.params.timeout)", 5, lost=True, hangs=True)
        return cause if self.record_cause(cause) else self.first() or cause

    def report_no_progress(self, seconds: float) -> None:
        """Record that no process made progress, so that all print their position in the code and end."""
        self.record_cause(Cause(self.rank, f"no progress for {seconds:g} s", 5, lost=True, hangs=True))

    # ---- the watching thread

    def _watch(self) -> None:
        while True:
            if self._pipe is None:
                time.sleep(POLL_SECONDS)
            elif select.select([self._pipe[0]], [], [], POLL_SECONDS)[0]:
                self._handle_signals(os.read(self._pipe[0], 512))
            with contextlib.suppress(OSError):  # otherwise a cleaner of /tmp removes it after ten days
                os.utime(self.folder)
            is_orphan = self.parent is not None and os.getppid() != self.parent
            if is_orphan or (self.parent_reports and not self.folder.exists()):  # the parent failed to start them all
                self._exit(5)
            if not self._is_ending:
                self._check_others()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._force_exit()

    def _check_others(self) -> None:
        if self._deadline is not None:
            return
        first = self.first()
        if first is None and (first := self.failed_child()) is not None:
            time.sleep(POLL_SECONDS)  # the child's own report takes precedence
            self.record_cause(first)
        if first is not None:
            self._deadline = time.monotonic() + EXIT_SECONDS
            if first.hangs and (location := location_of(self._main)) is not None:
                say(f"rank {self.rank} is at {location}", err=True)

    def watch_signals(self) -> None:
        """Let the watching thread receive signals, because Python delays handlers while a collective blocks."""
        if self._pipe is None and threading.current_thread() is threading.main_thread():
            pipe = os.pipe()
            os.set_blocking(pipe[1], False)
            signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_ignore_signals)  # otherwise a loader's workers write theirs here
            self._pipe = pipe

    def _handle_signals(self, numbers: bytes) -> None:
        for number in (n for n in numbers if n in INTERRUPTED):
            if self._signal is None:
                self._signal, self._signalled = number, time.monotonic()
                # A parent that is one of the processes reports it.
                more = 0 if self.parent is None or self.parent_reports else 2 * EXIT_SECONDS
                if not self._is_ending:
                    self._deadline = time.monotonic() + (EXIT_SECONDS if is_unhandled(number) else BATCH_SECONDS) + more
            else:
                self._deadline = time.monotonic() + EXIT_SECONDS

    def _force_exit(self) -> None:
        """End this process and its children, whatever the main thread is doing."""
        cause = self.first()
        if cause is None and self._signal is not None:
            name, waited = signal.Signals(self._signal).name, time.monotonic() - self._signalled
            reason = f"interrupted by {name}; the batch was not done after {waited:.0f} s, so nothing more is saved"
            cause = Cause(self.rank, reason, INTERRUPTED[signal.Signals(self._signal)])
        cause = cause or Cause(self.rank, "the end of the run took too long", 5)
        self.record_cause(cause)
        cause = self.first() or cause
        self.end_children(0)
        if self._may_report(cause):
            prefix = f"error [{cause.whose}]" if cause.whose else "error"
            say(f"{prefix}: {self.redact(cause.reason)}", err=True)
        thread = threading.Thread(target=self.end_run, args=(final_error(RankError(cause)),), daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread once exit functions run
            thread.start()
            thread.join(SHUTDOWN_SECONDS)
        self._exit(cause.exit_code)

    # ---- the end

    def end_children(self, seconds: float = SHUTDOWN_SECONDS) -> None:
        """Wait for the child processes; kill those that do not end in time."""
        until = time.monotonic() + seconds
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()

    def leave(self) -> None:
        """Leave the launch; the last process removes the folder unless the parent will read it."""
        if os.getpid() != self.pid:
            return
        self.end_children(EXIT_SECONDS)
        self._wait_for_starting()
        with contextlib.suppress(OSError), lock_folder(self.folder):
            (self.folder / f"{self.rank}.left").touch()
            (self.folder / f"{self.rank}.pid").unlink(missing_ok=True)
            if not members(self.folder) and not (self.parent_reports and os.getppid() == self.parent):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_for_starting(self) -> None:
        """Wait for processes that are still starting: they find the same error, and must see that it was reported."""
        cause, until = self.first(), time.monotonic() + EXIT_SECONDS
        if cause is None or cause.exit_code in INTERRUPTED.values():
            return
        self._is_ending, self._deadline = True, until + EXIT_SECONDS
        while len(list(self.folder.glob("*.came"))) < self.expected and time.monotonic() < until:
            time.sleep(POLL_SECONDS / 5)

    def _exit(self, code: int) -> None:
        import multiprocessing

        for worker in multiprocessing.active_children():
            worker.kill()
        self.leave()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def final_error(error: BaseException) -> BaseException:
    """Return the error to end a run with: `Interrupted` if a signal to another process is the cause."""
    if isinstance(error, RankError) and error.exit_code in INTERRUPTED.values():
        return Interrupted(error.cause.reason.removeprefix("interrupted by "), error.exit_code, at_once=True)
    return error


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def location_of(thread: int | None) -> str | None:
    """Return the `file:line` that a thread of this process executes; None if it waits for other processes."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_stack(frame)]
    # Autograd's engine reduces gradients and waits for them.
    waits = any(f"torch{os.sep}{part}{os.sep}" in frames[-1][0] for part in ("distributed", "autograd"))
    waits = waits or any(f"torch{os.sep}distributed{os.sep}" in name for name, _ in frames[-4:])
    return None if waits else failure.location_in(frames)
