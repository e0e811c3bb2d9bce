"""What the processes of one launch know of each other: who failed first, who is gone, who hangs.

On each machine they share a folder. Who fails puts the cause there, if there is none yet: of all that follows from it
(connections closed, waits that end) nothing is reported. A thread in each process looks on, because the main thread may
be blocked in a collective, where it heeds neither a signal nor the end of another process.
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
from collections.abc import Callable
from pathlib import Path

from deeplightning.process.failure import (
    INTERRUPTED,
    REPORTED,
    Cause,
    RankError,
    claim_in,
    exit_code_of,
    first_of,
    how_it_ended,
    is_lost,
    kept_of,
    newest_of,
    reason_of,
)
from deeplightning.process.hang_report import LOOK, answer, where_is, where_others_are
from deeplightning.process.shared_folder import alone_in, is_there, members
from deeplightning.process.streams import is_early
from deeplightning.process.terminal import say
from deeplightning.runfolder import RunFolder
from deeplightning.words import first_line

SOON = 3.0  # seconds in which a process ends by itself that has lost another
LATE = 30.0  # seconds that the end of a run may take, its last words to the tracker included
POLITE = 30.0  # seconds from a signal to the end of the batch
_TIMED_OUT = re.compile(r"[Tt]im(?:ed out|eout)\D{0,40}?(\d+) ?(?:ms|milliseconds)")
_CLOSED = "Application timeout caused pair closure"  # gloo, of an operation beside the one that timed out


class Ranks:
    """This process among those of its launch.

    Args:
        rank: its number.
        folder: shared with the others on this machine.
        parent: the process that started it, if that was a launch of ours: without that it ends.
        parent_tells: whether that one tells of a process that is lost; it may start all of them again.
        expected: how many processes are to come to the folder, where nobody has made it for them.
        end: called with the error when there is no time for the main thread to do it.
        redact: takes secrets out of messages.

    Attributes:
        children: what this process has started, in the order of their ranks; the first has the next rank.
    """

    def __init__(
        self,
        rank: int,
        folder: Path,
        parent: int | None,
        parent_tells: bool,
        expected: int,
        end: Callable[[BaseException], None] | None,
        redact: Callable[[str], str],
    ):
        self.expected = expected
        self.folder, self.parent, self.parent_tells, self.pid = folder, parent, parent_tells, os.getpid()
        self.children: list[subprocess.Popen[bytes]] = []
        self.end, self.redact = end, redact
        self._main = threading.main_thread().ident
        self._until: float | None = None  # when this process ends, unless its main thread has done so
        self._ends = False  # the main thread is about it
        self._signal: int | None = None
        self._signalled = 0.0
        self._pipe: tuple[int, int] | None = None
        self.rank = rank
        atexit.register(self.leave)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def rank(self) -> int:
        """Which of all processes this is; what the environment tells at the start may not be the last word."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        former, self._rank = getattr(self, "_rank", rank), rank
        with contextlib.suppress(OSError):  # the folder is gone already: the rest finds out
            (self.folder / f"{former}.pid").unlink(missing_ok=True)
            (self.folder / f"{rank}.pid").write_text(str(self.pid))

    # ---- causes

    def first(self) -> Cause | None:
        """The first cause, if anything went wrong."""
        return first_of(self.folder)

    def claim(self, cause: Cause) -> bool:
        """Makes this the first cause, unless there is another process's."""
        return claim_in(self.folder, dataclasses.replace(cause, reason=self.redact(cause.reason)), self.rank)

    def note_run(self, run: Path) -> None:
        """Tells whoever has started the processes which folder the run has."""
        with contextlib.suppress(OSError):
            (self.folder / "run").write_text(str(run))

    def kept(self) -> str:
        """What the run leaves for one that resumes from it, as the end of a note."""
        try:
            run = RunFolder((self.folder / "run").read_text())
        except OSError:
            return ""
        return kept_of(newest_of(run))

    def cause_of(self, error: BaseException) -> BaseException:
        """The error to report: the given one if it is the first cause, else a RankError with that."""
        self._ends, self._until = True, time.monotonic() + LATE
        if is_lost(error):
            return RankError(self._why_lost(error))
        code = exit_code_of(error)
        if code in INTERRUPTED.values():
            self._until = None  # the checkpoint that is saved now may be large; a second signal ends it
        mine = self.claim(Cause(self.rank, reason_of(error), code))
        first = None if mine or code in INTERRUPTED.values() else self.first()
        return error if first is None else RankError(first)

    def verdict(self, error: BaseException, reason: str, exit_code: int) -> tuple[Cause, bool]:
        """The first cause as it is known at the end of this process, and whether it is this one's to tell."""
        if is_lost(error):
            error = self.cause_of(error)
        cause = error.cause if isinstance(error, RankError) else Cause(self.rank, reason, exit_code)
        if cause.rank == self.rank:
            self.claim(cause)
        self.end_children(LATE / 3)  # this one's own end has its limit as well
        cause = self.first() or cause
        return cause, self._may_tell(cause)

    def _may_tell(self, cause: Cause) -> bool:
        """Whether this process is to tell the cause: its own, or one that the process which failed did not tell."""
        if self.parent_tells and cause.lost:
            return False
        reported, until = self.folder / REPORTED, time.monotonic() + SOON
        while (
            cause.rank != self.rank
            and is_there(self.folder, cause.rank)
            and not reported.exists()
            and time.monotonic() < until
        ):
            time.sleep(LOOK / 5)
        try:
            os.close(os.open(reported, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:  # the folder is gone, and the others with it
            return cause.rank == self.rank
        return True

    def _wait_for_first(self) -> Cause | None:
        """Another process's cause; some moments may pass from the end of its connections to its last word."""
        until = time.monotonic() + SOON
        while (first := self.first()) is None and time.monotonic() < until:
            if (dead := self.dead_child()) is not None:
                time.sleep(LOOK)
                self.claim(dead)
            time.sleep(LOOK / 5)
        return first

    def dead_child(self) -> Cause | None:
        """Which of the processes that were started here has failed without a message."""
        for number, child in enumerate(self.children, start=self.rank + 1):
            if child.poll():
                return Cause(number, how_it_ended(child.returncode), 5, lost=child.returncode < 0)
        return None

    def _why_lost(self, error: BaseException) -> Cause:
        """The cause of failure of a collective operation that raised `error`."""
        line = first_line(error).split(". ")[0]  # what follows in gloo's message is advice
        limit = _TIMED_OUT.search(str(error))
        if limit is None and _CLOSED not in str(error):
            reason = f"a worker was lost: the connection to another process is gone ({line})"
            cause = self._wait_for_first() or Cause(self.rank, reason, 5, lost=True)
            return cause if self.claim(cause) else self.first() or cause
        after = f" after {int(limit[1]) / 1000:g} s" if limit else ""
        waited = f"timed out{after} (engine.params.timeout)"
        # At once: it closes connections to processes that also wait.
        if not self.claim(Cause(self.rank, waited, 5, lost=True)):
            return self.first() or Cause(self.rank, waited, 5, lost=True)
        place = (
            "; ".join(where_others_are(self.folder, self.rank)) or f"which process did not answer is not known ({line})"
        )
        cause = Cause(self.rank, f"{waited}: {place}", 5, lost=True)
        self.claim(cause)
        return cause

    def stand_still(self, seconds: float) -> None:
        """Ends all processes, because this one has not got on for so long: whichever does not wait for others is named
        with its place in the code. To be called beside the main thread."""
        self._until = time.monotonic() + 2 * SOON  # time to ask the others
        stood = f"no progress for {seconds:g} s"
        if not self.claim(Cause(self.rank, stood, 5, lost=True)):
            return
        own = "waits" if self._ends else where_is(self._main)
        places = [f"rank {self.rank} {own}"] if own != "waits" else []
        places += where_others_are(self.folder, self.rank)
        place = "; ".join(places) or "the processes wait for each other"
        self.claim(Cause(self.rank, f"{stood}: {place}", 5, lost=True))

    # ---- the thread that looks on

    def _watch(self) -> None:
        answered = False
        while True:
            if self._pipe is None:
                time.sleep(LOOK)
            elif select.select([self._pipe[0]], [], [], LOOK)[0]:
                self._note_signals(os.read(self._pipe[0], 512))
            if self.parent is not None and os.getppid() != self.parent:
                self._exit(5)
            if self.parent_tells and not self.folder.exists():  # it could not start all of them
                self._exit(5)
            if not answered and (self.folder / "asked").exists():
                answered = True
                with contextlib.suppress(OSError):
                    answer(self.folder, self.rank, "waits" if self._ends else where_is(self._main))
            if not self._ends:
                self._look()
            if self._until is not None and time.monotonic() > self._until:
                self._end_now()

    def _look(self) -> None:
        if self._until is not None:
            return
        first = self.first()
        if first is None and (first := self.dead_child()) is not None:
            time.sleep(LOOK)  # its own last word comes before ours on it
            self.claim(first)
        if first is not None:
            self._until = time.monotonic() + SOON

    def hear_signals(self) -> None:
        """Signals reach the thread as well: Python's handlers wait until the main thread is out of a collective."""
        if self._pipe is None and threading.current_thread() is threading.main_thread():
            pipe = os.pipe()
            os.set_blocking(pipe[1], False)
            signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_deafen)  # a loader's worker would tell its signals here
            self._pipe = pipe

    def _note_signals(self, numbers: bytes) -> None:
        for number in (n for n in numbers if n in INTERRUPTED):
            if self._signal is None:
                self._signal, self._signalled = number, time.monotonic()
                # The process that started this one is to say it, if it is one of them.
                late = 0 if self.parent is None or self.parent_tells else 2 * SOON
                if not self._ends:
                    self._until = time.monotonic() + (SOON if is_early(number) else POLITE) + late
            else:
                self._until = time.monotonic() + SOON

    def _end_now(self) -> None:
        """Ends this process and those it has started, whatever the main thread is doing."""
        cause = self.first()
        if cause is None and self._signal is not None:
            waited = time.monotonic() - self._signalled
            word = signal.Signals(self._signal).name
            reason = f"interrupted by {word}; after {waited:.0f} s the batch was not done, nothing more is saved"
            cause = Cause(self.rank, reason, INTERRUPTED[signal.Signals(self._signal)])
        cause = cause or Cause(self.rank, "the end of the run took too long", 5)
        self.claim(cause)
        cause = self.first() or cause
        self.end_children(0)
        if self._may_tell(cause):
            word = f"error [{cause.whose}]" if cause.whose else "error"
            say(f"{word}: {self.redact(cause.reason)}", err=True)
        error = RankError(cause)
        last_words = threading.Thread(target=self.end, args=(error,), daemon=True)
        last_words.start()
        last_words.join(LATE)
        self._exit(cause.exit_code)

    # ---- the end

    def end_children(self, seconds: float = LATE) -> None:
        """Waits for the processes that were started here; those that do not end in time are killed."""
        until = time.monotonic() + seconds
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()

    def leave(self) -> None:
        """Takes leave of the others; the last one removes the folder, unless whoever has started them will read it."""
        if os.getpid() != self.pid:
            return
        self.end_children(SOON)
        self._wait_for_late_ones()
        with contextlib.suppress(OSError), alone_in(self.folder):
            (self.folder / f"{self.rank}.pid").unlink(missing_ok=True)
            if not members(self.folder) and not (self.parent_tells and os.getppid() == self.parent):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_for_late_ones(self) -> None:
        """Each process finds the same fault by itself, and one that is only starting must see that it was reported: the
        folder stays for some moments."""
        cause, until = self.first(), time.monotonic() + SOON
        if cause is None or cause.exit_code in INTERRUPTED.values():
            return
        self._ends, self._until = True, until + SOON
        while len(list(self.folder.glob("*.came"))) < self.expected and time.monotonic() < until:
            time.sleep(LOOK / 5)

    def _exit(self, code: int) -> None:
        import multiprocessing

        for worker in multiprocessing.active_children():
            worker.kill()
        self.leave()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _deafen() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
