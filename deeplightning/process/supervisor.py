"""What the processes of one launch know of each other: who failed first, who is gone, who hangs.

On each machine they share a folder. Who fails puts the cause there, if there is none yet: of all that follows from it
(connections closed, waits that end) nothing is told. A thread in each process looks on, because the main thread may be
blocked in a collective, where it heeds neither a signal nor the end of another process.

Torch and Lightning are not imported here: a process takes part from its start, seconds before they are there.
"""

import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

from deeplightning.faults import SetupError, UserError
from deeplightning.own_code import is_theirs, short
from deeplightning.process.identity import ATTEMPT, LAUNCH, place
from deeplightning.process.streams import is_early
from deeplightning.runfolder import RunFolder
from deeplightning.words import first_line

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

FOLDER, PARENT = "DEEPLIGHTNING_RANKS", "DEEPLIGHTNING_RANKS_PARENT"  # told to the processes that a launch starts
AGENT = "DEEPLIGHTNING_RANKS_AGENT"  # told, instead of PARENT, by one that starts all of them, and trains in none
PREFIX = "deeplightning-ranks-"
OLD = 600.0  # seconds after which a folder without a living process is nobody's
LOOK = 0.25  # seconds between two looks at the others
SOON = 3.0  # seconds in which a process ends by itself that has lost another
LATE = 30.0  # seconds that the end of a run may take, its last words to the tracker included
POLITE = 30.0  # seconds from a signal to the end of the batch
INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}

# What gloo, nccl and torch's store say when another process is gone, or does not answer.
_LOST = re.compile(r"gloo/|NCCL|c10d|TCPStore|Connection (closed|reset) by peer|Broken pipe|Socket Timeout|\bstore\b")
_TIMED_OUT = re.compile(r"[Tt]im(?:ed out|eout)\D{0,40}?(\d+) ?(?:ms|milliseconds)")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a launch ends: the first thing that went wrong, in whichever process.

    Attributes:
        rank: of the process.
        reason: what happened there, with file and line of the code.
        exit_code: of the whole launch.
        lost: whether it lies in no code and no data: a process was killed, hangs, or is not to be reached. Started
            again, the same may go well.
    """

    rank: int
    reason: str
    exit_code: int
    lost: bool = False

    @property
    def whose(self) -> str:
        """The process, for a note; a signal is nobody's fault."""
        return "" if self.exit_code in INTERRUPTED.values() else f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.whose}: {self.reason}".removeprefix(": ")


class RankError(UserError):
    """Another process failed, and this one with it."""

    def __init__(self, cause: Cause):
        super().__init__(str(cause))
        self.cause, self.exit_code = cause, cause.exit_code


def is_lost(error: BaseException) -> bool:
    """Whether an error only says that another process is gone or does not answer."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def place_in(frames: Iterable[tuple[str, int]]) -> str | None:
    """`file:line` of the innermost code that is neither a library's nor ours, else of the innermost at all."""
    known = [(name, line) for name, line in frames if name != "<string>"]
    theirs = [frame for frame in known if is_theirs(frame[0])] or known
    return f"{short(theirs[-1][0])}:{theirs[-1][1]}" if theirs else None


def place_of(error: BaseException) -> str | None:
    """Where the code stands that raised an error."""
    return place_in((frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__))


def reason_of(error: BaseException) -> str:
    """An error in a line: its notes where a user can mend it, else type, message and place."""
    if getattr(error, "exit_code", None) is not None:
        return str(error).replace("\n", "; ")
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{words} ({found})" if (found := place_of(error)) else words


def how_it_ended(code: int) -> str:
    """What the exit code of a process that said nothing means."""
    if code >= 0:
        return f"the process ended with exit code {code} and said nothing"
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = {
        int(signal.SIGKILL): "; where nobody did that by hand, the memory was short: the system log says so",
        int(signal.SIGBUS): "; shared memory (/dev/shm) may be too small for the loader's workers",
    }.get(number, "")
    return f"a worker was lost: the process was killed by {name}{hint}"


def newest_of(run: RunFolder | None) -> Path | None:
    """The newest checkpoint of a run that is whole."""
    return next((path for path in run.checkpoints() if zipfile.is_zipfile(path)), None) if run is not None else None


def kept_of(newest: Path | None) -> str:
    """The checkpoint from which a run that lost a process resumes, as the end of a note."""
    if newest is None:
        return "; there is no checkpoint yet"
    return f"; the last checkpoint is {newest}, and train.resume_ckpt=auto resumes from it"


def end_of(rank: int, code: int) -> Cause:
    """What the exit code of a process says that said nothing itself; negative, as of `subprocess`, where a signal has
    killed it."""
    if code < 0 and -code in INTERRUPTED:
        number = signal.Signals(-code)
        return Cause(rank, f"interrupted by {number.name}", INTERRUPTED[number])
    return Cause(rank, how_it_ended(code), code if 0 < code <= 5 else 5, lost=code < 0)


def first_of(folder: Path) -> Cause | None:
    """The first cause of the processes that share a folder, if anything went wrong."""
    try:
        return Cause(**json.loads((folder / "first").read_text()))
    except (OSError, ValueError):
        return None


def claim_in(folder: Path, cause: Cause, by: int | None = None) -> bool:
    """Makes this the first cause, unless there is one; what a process has claimed before, it may say better.

    Args:
        by: the rank of the process that claims it; None: whoever has started them.
    """
    try:
        # A file of its own for each word: whoever reads, reads a whole one, also while it is said better.
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".words", delete=False) as file:
            file.write(json.dumps(dataclasses.asdict(cause)))
        beside = Path(file.name)
        try:
            os.link(beside, folder / "first")
        except FileExistsError:
            if (first := first_of(folder)) is None or first.rank == by:
                beside.replace(folder / "first")  # the same, better known
                return True
            return False
        finally:
            beside.unlink(missing_ok=True)
    except OSError:  # the folder is gone, and the others with it
        pass
    return True


def restarts() -> int:
    """How often the processes of this launch were started before."""
    names = ("TORCHELASTIC_RESTART_COUNT", ATTEMPT, "SLURM_RESTART_COUNT")
    return max((int(word) for name in names if (word := os.environ.get(name, "")).isdecimal()), default=0)


def is_led() -> bool:
    """Whether `deeplightning.launch.Local` has started this process: it may do so again, and has the last
    word."""
    return _here is not None and _here.parent_tells and "TORCHELASTIC_RESTART_COUNT" in os.environ


class Ranks:
    """This process among those of its launch.

    Args:
        rank: its number.
        folder: shared with the others on this machine.
        parent: the process that started it, if that was a launch of ours: without that it ends.
        parent_tells: whether that one tells of a process that is lost; it may start all of them again.
        expected: how many processes are to come to the folder, where nobody has made it for them.

    Attributes:
        children: what this process has started, in the order of their ranks; the first has the next rank.
        end: called with the error when there is no time for the main thread to do it.
        redact: takes secrets out of what is told.
    """

    def __init__(
        self, rank: int, folder: Path, parent: int | None = None, parent_tells: bool = False, expected: int = 0
    ):
        self.expected = expected
        self.folder, self.parent, self.parent_tells, self.pid = folder, parent, parent_tells, os.getpid()
        self.children: list[subprocess.Popen[bytes]] = []
        self.end: Callable[[BaseException], None] = _end or (lambda error: None)
        self.redact = _redact
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
        """The error to go on with: the given one if it is the first cause, else a RankError with that."""
        self._ends, self._until = True, time.monotonic() + LATE
        if is_lost(error):
            return RankError(self._why_lost(error))
        code = getattr(error, "exit_code", 1)
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
        told, until = self.folder / "told", time.monotonic() + SOON
        while cause.rank != self.rank and self._is_there(cause.rank) and not told.exists() and time.monotonic() < until:
            time.sleep(LOOK / 5)
        try:
            os.close(os.open(told, os.O_CREAT | os.O_EXCL))
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
        """Which of the processes that were started here has failed and said nothing."""
        for number, child in enumerate(self.children, start=self.rank + 1):
            if child.poll():
                return Cause(number, how_it_ended(child.returncode), 5, lost=child.returncode < 0)
        return None

    def _why_lost(self, error: BaseException) -> Cause:
        """The cause of a collective that failed."""
        line = first_line(error).split(". ")[0]  # what gloo goes on to say is advice
        if (limit := _TIMED_OUT.search(str(error))) is None:
            reason = f"a worker was lost: the connection to another process is gone ({line})"
            cause = self._wait_for_first() or Cause(self.rank, reason, 5, lost=True)
            return cause if self.claim(cause) else self.first() or cause
        waited = f"waited in vain for {int(limit[1]) / 1000:g} s, as long as engine.params.timeout allows"
        # At once: it closes connections to processes that also wait.
        if not self.claim(Cause(self.rank, waited, 5, lost=True)):
            return self.first() or Cause(self.rank, waited, 5, lost=True)
        told = "; ".join(self._where_others_are()) or f"which process did not answer is not known ({line})"
        cause = Cause(self.rank, f"{waited}: {told}", 5, lost=True)
        self.claim(cause)
        return cause

    def _where_others_are(self) -> list[str]:
        """Of each process that is not itself waiting for others: what it is doing."""
        with contextlib.suppress(OSError):
            (self.folder / "asked").touch()
        others = {int(path.stem) for path in self.folder.glob("*.pid")} - {self.rank}
        until = time.monotonic() + 2 + 4 * LOOK
        told: dict[int, str] = {}
        while len(told) < len(others) and time.monotonic() < until:
            time.sleep(LOOK / 5)
            for rank in others - told.keys():
                with contextlib.suppress(OSError):
                    told[rank] = (self.folder / f"{rank}.where").read_text()
        said = {rank: told.get(rank, "does not answer") for rank in sorted(others)}
        return [f"rank {rank} {words}" for rank, words in said.items() if words != "waits"]

    def stand_still(self, seconds: float) -> None:
        """Ends all processes, because this one has not got on for so long: whichever does not wait for others is named
        with its place in the code. To be called beside the main thread."""
        self._until = time.monotonic() + 2 * SOON  # time to ask the others
        stood = f"no progress for {seconds:g} s"
        if not self.claim(Cause(self.rank, stood, 5, lost=True)):
            return
        own = self._where()
        told = [f"rank {self.rank} {own}"] if own != "waits" else []
        told += self._where_others_are()
        place = "; ".join(told) or "the processes wait for each other"
        self.claim(Cause(self.rank, f"{stood}: {place}", 5, lost=True))

    def _where(self) -> str:
        """What the main thread is doing: `waits` for other processes, or `is at FILE:LINE`."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        frames = [(f.filename, f.lineno or 0) for f in traceback.extract_stack(frame)]
        # Gradients are summed up, and waited for, in autograd's engine.
        waits = any(f"torch{os.sep}{part}{os.sep}" in frames[-1][0] for part in ("distributed", "autograd"))
        waits = waits or any(f"torch{os.sep}distributed{os.sep}" in name for name, _ in frames[-4:])
        return "waits" if waits or self._ends else f"is at {place_in(frames)}"

    def _say_where(self) -> None:
        beside = self.folder / f"{self.rank}.where.new"
        beside.write_text(self._where())
        beside.replace(self.folder / f"{self.rank}.where")

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
                    self._say_where()
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
            print(f"{word}: {self.redact(cause.reason)}", file=sys.stderr, flush=True)
        error = RankError(cause)
        last_words = threading.Thread(target=self.end, args=(error,), daemon=True)
        last_words.start()
        last_words.join(LATE)
        self._exit(cause.exit_code)

    def _is_there(self, rank: int) -> bool:
        try:
            return _is_alive(int((self.folder / f"{rank}.pid").read_text()))
        except (OSError, ValueError):
            return False

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
        with contextlib.suppress(OSError), _alone_in(self.folder):
            (self.folder / f"{self.rank}.pid").unlink(missing_ok=True)
            if not _members(self.folder) and not (self.parent_tells and os.getppid() == self.parent):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_for_late_ones(self) -> None:
        """Each process finds the same fault by itself, and one that is only starting is to see that it has been told:
        the folder stays for some moments."""
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


_here: Ranks | None = None
_end: Callable[[BaseException], None] | None = None
_redact: Callable[[str], str] = str


def prepare(redact: Callable[[str], str], end: Callable[[BaseException], None]) -> None:
    """What a process uses that takes part, or will: how secrets are taken out, and how a run is ended where its main
    thread cannot."""
    global _end, _redact
    _end, _redact = end, redact
    if (found := here()) is not None:
        found.end, found.redact = end, redact


def here() -> Ranks | None:
    """This process among others, if it is one of several."""
    return _here if _here is not None and _here.pid == os.getpid() else None


def follow() -> None:
    """To be called first in every process: one of several takes part from here on.

    One that a launch of ours has started ends with that.
    """
    parent, agent = int(os.environ.get(PARENT, 0)), int(os.environ.get(AGENT, 0))
    try:
        found = place()
    except SetupError:  # the verb will say so, if it needs the others
        return
    if found is None:
        return
    if agent:
        if os.getppid() == agent:
            _take_part(found.rank, Path(os.environ[FOLDER]), agent, parent_tells=True)
        elif not _is_alive(agent):
            os._exit(5)
    elif parent and found.local_rank != 0:
        if os.getppid() == parent:
            _take_part(found.rank, Path(os.environ[FOLDER]), parent)
        elif not _is_alive(parent):
            os._exit(5)
    elif not parent and found.world > 1:
        _take_part(found.rank, _meet(found.rank), expected=found.local_world)


def begin(rank: int, starts_others: bool) -> Ranks:
    """Takes part as the process of this rank, of those that this one will start or that somebody else has started."""
    if (found := here()) is not None:
        found.rank = rank
        return found
    if starts_others:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        os.environ |= {FOLDER: str(folder), PARENT: str(os.getpid())}
    else:
        folder = _meet(rank)
    return _take_part(rank, folder)


def _take_part(
    rank: int, folder: Path, parent: int | None = None, parent_tells: bool = False, expected: int = 0
) -> Ranks:
    global _here
    _here = Ranks(rank, folder, parent, parent_tells, expected)
    _sweep()
    return _here


def meeting_place(environment: Mapping[str, str]) -> Path:
    """The folder of processes that somebody else has started, and that know only the address at which they meet."""
    names = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", LAUNCH, ATTEMPT]
    names += ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
    address = " ".join(environment.get(name, "") for name in names)
    if (found := place(environment)) is not None and found.by == "MPI":
        address += f" {found.address} {found.port}"
    digest = hashlib.sha256(f"{os.getuid()} {address}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"{PREFIX}{digest}"


def _meet(rank: int) -> Path:
    folder = meeting_place(os.environ)
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return Path(tempfile.mkdtemp(prefix=PREFIX))  # somebody else's: this process is on its own
        with contextlib.suppress(FileNotFoundError), _alone_in(folder):  # else the last of the others has removed it
            if not _members(folder):
                for path in folder.iterdir():  # of a launch that was killed whole
                    path.unlink(missing_ok=True)
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
            (folder / f"{os.getpid()}.came").touch()
            return folder


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While this lasts, no other process comes to the folder or leaves it.

    Raises:
        FileNotFoundError: it is gone.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(held), folder.stat()):
            raise FileNotFoundError(folder)
        yield
    finally:
        os.close(held)


def _members(folder: Path) -> list[int]:
    """The processes of a folder that are alive."""
    found: list[int] = []
    for path in folder.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return [pid for pid in found if _is_alive(pid)]


def _sweep() -> None:
    """Removes the folders of launches of which every process was killed, so that none could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            old = time.time() - folder.stat().st_mtime > OLD
            if old and folder.stat().st_uid == os.getuid() and not _members(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # one that nobody has waited for yet has ended all the same
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return pid > 0


def _deafen() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
