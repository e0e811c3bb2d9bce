"""This process as a member of its launch: alone, or one of several that supervise each other."""

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

FOLDER, PARENT = "DEEPLIGHTNING_RANKS", "DEEPLIGHTNING_RANKS_PARENT"  # set for the processes that a launch starts
AGENT = "DEEPLIGHTNING_RANKS_AGENT"  # set instead of PARENT by a process that starts all others and does not train

_here: Ranks | None = None
_run: dict[str, object] = {}  # what supervision needs to know of the run


def is_supervised() -> bool:
    """Return whether `deeplightning.launch.Local` started this process; it may restart it and reports the end."""
    return _here is not None and _here.parent_reports and "TORCHELASTIC_RESTART_COUNT" in os.environ


def prepare(redact: Callable[[str], str], end_run: Callable[[BaseException], None]) -> None:
    """Set how secrets are removed from messages, and how a run is ended if its main thread is blocked."""
    _run.update(redact=redact, end_run=end_run)
    if _here is not None:
        vars(_here).update(_run)


def here() -> Ranks | None:
    """Return this process's supervision; None if it is not one of several."""
    return _here if _here is not None and _here.pid == os.getpid() else None


def all_ended() -> None:
    """Wait for the processes that this one started, once its own work is done.

    Raises:
        RankError: one of them failed after its last message.
    """
    if (group := here()) is not None and group.children:
        from deeplightning.process.failure import RankError

        group.end_children()
        if (cause := group.failed_child()) is not None:
            group.record_cause(cause)
            raise RankError(group.first() or cause)


def follow() -> None:
    """Take part in the supervision if this process is one of several, and end with the launch that started it. Every
    process calls it first."""
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


def begin(rank: int, starts_others: bool) -> Ranks:
    """Take part with this rank, in processes that this one will start or that were started elsewhere."""
    from deeplightning.process.shared_folder import PREFIX, enter

    if (found := here()) is not None:
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
    global _here
    from deeplightning.process.ranks import Ranks

    _here = Ranks(rank, folder, parent, parent_reports, expected)
    vars(_here).update(_run)
    return _here
