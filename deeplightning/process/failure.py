"""The failure cause of a launch: the first error in any process, and the files by which processes share it."""

import dataclasses
import json
import os
import re
import signal
import tempfile
import traceback
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from deeplightning.faults import UserError
from deeplightning.own_code import INSTALLED, OURS, is_user_file, short
from deeplightning.process.streams import INTERRUPTED
from deeplightning.runfolder import RunFolder
from deeplightning.words import first_line

REPORTED = "reported"
"""The file in the launch folder that a process creates when it prints the failure cause; only one process does."""

# Messages of gloo, NCCL and torch's store when another process is gone or does not answer.
_LOST = re.compile(
    r"gloo/|Application timeout caused pair closure|NCCL|c10d|TCPStore|Connection (closed|reset) by peer|Broken pipe|"
    r"Socket Timeout|\bstore\b"
)

# torch's prefix for an exception in a loader's worker.
_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)
_LIGHTNING = re.compile(r"[\\/](pytorch_lightning|lightning_fabric)[\\/]")


@dataclasses.dataclass(frozen=True)
class Cause:
    """The first error of a launch, in any of its processes.

    Attributes:
        rank: of the process.
        reason: the error, with file and line of the code.
        exit_code: of the whole launch.
        lost: whether a process was killed, hangs or is unreachable; code and data are not the cause, so a restart may
            succeed.
        hangs: whether a process did not respond; each process then prints its position in the code.
    """

    rank: int
    reason: str
    exit_code: int
    lost: bool = False
    hangs: bool = False

    @property
    def whose(self) -> str:
        """The process, for an error message; empty for a signal."""
        return "" if self.exit_code in INTERRUPTED.values() else f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.whose}: {self.reason}".removeprefix(": ")


class RankError(UserError):
    """Raised in a process that ends because another one failed."""

    def __init__(self, cause: Cause):
        super().__init__(str(cause))
        self.cause, self.exit_code = cause, cause.exit_code


def is_lost(error: BaseException) -> bool:
    """Return whether an error only reports that another process is gone or does not respond."""
    is_quoted = _IN_WORKER.match(str(error))  # of a loader's worker: paths and code of the user are in the message
    return isinstance(error, RuntimeError) and not is_quoted and is_lost_message(str(error))


def is_lost_message(message: str) -> bool:
    """Return whether a message of gloo, NCCL or torch's store only reports a process that is gone or unresponsive."""
    return _LOST.search(message) is not None


def location_in(frames: Iterable[tuple[str, int]]) -> str | None:
    """Return `file:line` of the innermost frame in the user's code, else of the innermost frame of a file."""
    in_files = [(name, line) for name, line in frames if name != "<string>"]
    theirs = [frame for frame in in_files if is_user_file(frame[0])] or in_files
    return f"{short(theirs[-1][0])}:{theirs[-1][1]}" if theirs else None


def _frames_of(error: BaseException) -> list[tuple[str, int]]:
    """Return file and line of each frame of an error's traceback, the innermost last, without a `__getattr__` that has
    no such member: its caller is wrong."""
    stack = traceback.extract_tb(error.__traceback__)
    while isinstance(error, AttributeError) and stack and stack[-1].name == "__getattr__":
        stack.pop()
    frames = [(frame.filename, frame.lineno or 0) for frame in stack]
    if _IN_WORKER.match(str(error)):  # the message contains the traceback of the loader's worker
        frames += [(name, int(line)) for name, line in _FRAME.findall(str(error))]
    return frames


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of an error: its own, else 5 if the user's code raised it and 1 if ours did.

    An error raised in a library is attributed to the code that called the library. If Deep Lightning does not require
    the library, the config named it, so the code is 5. A lost DataLoader worker is 5 too, and so is an error that
    Lightning raises about the user's modules and settings.
    """
    if isinstance(code := getattr(error, "exit_code", None), int):
        return code
    if str(error).startswith("DataLoader worker (pid"):
        return 5
    frames = [name for name, _ in _frames_of(error)]
    types = {"ValueError", "TypeError", "RuntimeError", "MisconfigurationException"}
    if types & {cls.__name__ for cls in type(error).__mro__} and frames and _LIGHTNING.search(frames[-1]):
        return 5
    of_user = [is_user_file(name) for name in frames if is_user_file(name) or name.startswith(OURS)]
    return 5 if (of_user and of_user[-1]) or _is_in_optional_library(frames) else 1


def _is_in_optional_library(frames: Sequence[str]) -> bool:
    """Return whether our code last called, perhaps through torch or Lightning, a library that we do not require."""
    last = max((number for number, name in enumerate(frames) if name.startswith(OURS)), default=-1)
    folders = INSTALLED[2:]  # the first two are of the standard library
    inside = [name.removeprefix(top) for name in frames[last + 1 :] for top in folders if name.startswith(top)]
    tops = [Path(name).parts[0].removesuffix(".py") for name in inside]
    called = next((top for top in tops if top not in ("torch", "pytorch_lightning", "lightning_fabric")), None)
    if called is None:
        return False
    try:
        required = {re.split(r"[^\w-]", text)[0].lower() for text in requires("deeplightning") or ()}
    except PackageNotFoundError:  # the code is not installed as a package
        return False
    return required.isdisjoint(name.lower() for name in packages_distributions().get(called, [called]))


def reason_of(error: BaseException) -> str:
    """Format an error as one line: its message if the user can correct it, else `file:line`, type and message."""
    if getattr(error, "exit_code", None) is not None:
        return str(error).replace("\n", "; ")
    kind, text = type(error).__name__, str(error)
    if _IN_WORKER.match(text):
        message = text.rstrip().rpartition("\n")[2]
    else:
        message = f"{kind}: {first_line(error)}" if text.strip() else kind
    return f"{found}: {message}" if (found := location_in(_frames_of(error))) else message


def describe_exit(code: int) -> str:
    """Describe the exit code of a process that exited without a message."""
    if code >= 0:
        return f"the process ended with exit code {code} without a message"
    number = -code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = {
        int(signal.SIGKILL): "; if nobody did that by hand, memory ran out: see the system log",
        int(signal.SIGBUS): "; shared memory (/dev/shm) may be too small for the loader's workers",
    }.get(number, "")
    return f"a worker was lost: the process was killed by {name}{hint}"


def latest_checkpoint(run: RunFolder | None) -> Path | None:
    """Return the latest complete checkpoint of a run."""
    return next((path for path in run.checkpoints() if zipfile.is_zipfile(path)), None) if run is not None else None


def resume_hint(newest: Path | None) -> str:
    """Return the end of an error message, which names the checkpoint from which the run can resume."""
    if newest is None:
        return "; there is no checkpoint yet"
    return f"; the last checkpoint is {newest}, and train.resume_ckpt=auto resumes from it"


def cause_of_exit(rank: int, code: int) -> Cause:
    """Return the cause for a process that exited without a report; a negative code is a signal, as in `subprocess`."""
    if code < 0 and -code in INTERRUPTED:
        number = signal.Signals(-code)
        return Cause(rank, f"interrupted by {number.name}", INTERRUPTED[number])
    return Cause(rank, describe_exit(code), code if 0 < code <= 5 else 5, lost=code < 0)


def first_cause(folder: Path) -> Cause | None:
    """Return the failure cause recorded in a launch folder; None if nothing failed."""
    try:
        return Cause(**json.loads((folder / "first").read_text()))
    except (OSError, ValueError):
        return None


def record_cause(folder: Path, cause: Cause, by: int | None = None) -> bool:
    """Record a failure cause as the first one, unless there is one already; a process may refine its own.

    Args:
        by: the rank of the process that reports; None for the process that started the others.
    """
    try:
        # Each write goes to a new file, so readers always see a complete one.
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".words", delete=False) as file:
            file.write(json.dumps(dataclasses.asdict(cause)))
        new = Path(file.name)
        try:
            os.link(new, folder / "first")
        except FileExistsError:
            if (first := first_cause(folder)) is None or first.rank == by:
                new.replace(folder / "first")  # the same cause, with more detail
                return True
            return False
        finally:
            new.unlink(missing_ok=True)
        if requeue := os.environ.get("DEEPLIGHTNING_REQUEUE"):  # its batch script reads the causes of all nodes
            Path(f"{requeue}.causes", "lost" if cause.lost else "error").touch()
    except OSError:  # the folder is gone, and so are the others
        pass
    return True
