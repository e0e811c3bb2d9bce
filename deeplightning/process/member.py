"""This process as a member of its launch, which may have several processes that supervise each other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deeplightning.faults import SetupError
from deeplightning.process.identity import identity

if TYPE_CHECKING:
    from deeplightning.process.ranks import Ranks

FOLDER, PARENT = "DEEPLIGHTNING_RANKS", "DEEPLIGHTNING_RANKS_PARENT"  # set for processes started by a launch
AGENT = "DEEPLIGHTNING_RANKS_AGENT"  # set instead of PARENT by a process that starts all others and does not train

_current: Ranks | None = None
_run: dict[str, object] = {}  # what supervision needs to know of the run


def is_supervised() -> bool:
    """Return whether `deeplightning.launch.Local` started this process; it reports a lost process and may restart."""
    return _current is not None and _current.parent_reports and "TORCHELASTIC_RESTART_COUNT" in os.environ


def prepare(redact: Callable[[str], str], end_run: Callable[[BaseException], None], timeout: float | None) -> None:
    """Set the functions that remove secrets from messages and that end the run while its main thread is blocked, and
    the time limit of collective operations in seconds."""
    _run.update(redact=redact, end_run=end_run, timeout=timeout)
    if _current is not None:
        vars(_current).update(_run)


def current() -> Ranks | None:
    """Return the supervision of this process; None if its launch has no other process."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def wait_for_children() -> None:
    """Wait for the processes that this one started, after its own work is done.

    Raises:
        RankError: one of them failed after it last communicated with this process.
    """
    if (group := current()) is not None and group.children:
        from deeplightning.process.failure import RankError

        group.end_children()
        if (cause := group.failed_child()) is not None:
            group.record_cause(cause)
            raise RankError(group.first() or cause)


def join_launch() -> None:
    """Start supervision if this process is one of several, and end with the launch that started it. Every process calls
    this first."""
    from deeplightning.process.shared_folder import enter, is_alive

    parent, agent = int(os.environ.get(PARENT, 0)), int(os.environ.get(AGENT, 0))
    try:
        found = identity()
    except SetupError:  # the verb reports it, if it needs the others
        return
    if found is None:
        return
    started_by = agent or (parent if found.local_rank != 0 else 0)
    if started_by and os.getppid() == started_by:
        _supervise(found.rank, Path(os.environ[FOLDER]), started_by, parent_reports=bool(agent))
    elif started_by and not is_alive(started_by):
        os._exit(5)
    elif not agent and not parent and found.world > 1:
        _supervise(found.rank, enter(found.rank), expected=found.local_world)


def supervise(rank: int, starts_others: bool) -> Ranks:
    """Start supervision with this rank; the other processes are started by this one or elsewhere."""
    from deeplightning.process.shared_folder import PREFIX, enter

    if (found := current()) is not None:
        found.rank = rank
        return found
    if not starts_others:
        return _supervise(rank, enter(rank))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    os.environ |= {FOLDER: str(folder), PARENT: str(os.getpid())}
    return _supervise(rank, folder)


def _supervise(
    rank: int, folder: Path, parent: int | None = None, parent_reports: bool = False, expected: int = 0
) -> Ranks:
    global _current
    from deeplightning.process.ranks import Ranks

    _current = Ranks(rank, folder, parent, parent_reports, expected)
    vars(_current).update(_run)
    return _current
