"""This process's part in the supervision of its launch. Importing it loads neither torch nor Lightning."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from deeplightning.faults import SetupError
from deeplightning.process.identity import ATTEMPT, identity
from deeplightning.process.ranks import Ranks
from deeplightning.process.shared_folder import PREFIX, enter, is_alive, sweep

FOLDER, PARENT = "DEEPLIGHTNING_RANKS", "DEEPLIGHTNING_RANKS_PARENT"  # set for the processes that a launch starts
AGENT = "DEEPLIGHTNING_RANKS_AGENT"  # set instead of PARENT by a process that starts all others and does not train


def restarts() -> int:
    """Return how often the processes of this launch were started before."""
    names = ("TORCHELASTIC_RESTART_COUNT", ATTEMPT, "SLURM_RESTART_COUNT")
    return max((int(word) for name in names if (word := os.environ.get(name, "")).isdecimal()), default=0)


def is_supervised() -> bool:
    """Return whether `deeplightning.launch.Local` started this process; it may restart it and reports the end."""
    return _here is not None and _here.parent_reports and "TORCHELASTIC_RESTART_COUNT" in os.environ


_here: Ranks | None = None
_end: Callable[[BaseException], None] | None = None
_redact: Callable[[str], str] = str


def prepare(redact: Callable[[str], str], end: Callable[[BaseException], None]) -> None:
    """Set how secrets are removed from messages, and how a run is ended if its main thread is blocked."""
    global _end, _redact
    _end, _redact = end, redact
    if (found := here()) is not None:
        found.end, found.redact = end, redact


def here() -> Ranks | None:
    """Return this process's supervision; None if it is not one of several."""
    return _here if _here is not None and _here.pid == os.getpid() else None


def follow() -> None:
    """Take part in the supervision if this process is one of several. Every process calls it first.

    A process that one of our launches started ends with that launch.
    """
    parent, agent = int(os.environ.get(PARENT, 0)), int(os.environ.get(AGENT, 0))
    try:
        found = identity()
    except SetupError:  # the verb reports it, if it needs the others
        return
    if found is None:
        return
    if agent:
        if os.getppid() == agent:
            _take_part(found.rank, Path(os.environ[FOLDER]), agent, parent_reports=True)
        elif not is_alive(agent):
            os._exit(5)
    elif parent and found.local_rank != 0:
        if os.getppid() == parent:
            _take_part(found.rank, Path(os.environ[FOLDER]), parent)
        elif not is_alive(parent):
            os._exit(5)
    elif not parent and found.world > 1:
        _take_part(found.rank, enter(found.rank), expected=found.local_world)


def begin(rank: int, starts_others: bool) -> Ranks:
    """Take part with this rank, in processes that this one will start or that were started elsewhere."""
    if (found := here()) is not None:
        found.rank = rank
        return found
    if starts_others:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        os.environ |= {FOLDER: str(folder), PARENT: str(os.getpid())}
    else:
        folder = enter(rank)
    return _take_part(rank, folder)


def _take_part(
    rank: int, folder: Path, parent: int | None = None, parent_reports: bool = False, expected: int = 0
) -> Ranks:
    global _here
    _here = Ranks(rank, folder, parent, parent_reports, expected, _end, _redact)
    sweep()
    return _here
