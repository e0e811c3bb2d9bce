"""What one process decides for all of a launch, handed to the processes that it starts."""

import json
import os
from collections.abc import Callable
from typing import Any

from deeplightning.process.identity import own_rank

DECIDED = "DEEPLIGHTNING_DECIDED"
"""The environment variable in which rank 0 tells the processes that Lightning starts what it has decided, as JSON."""


def decision(what: str) -> Any:
    """What rank 0 has decided before it started this process; None: nothing, or this process is rank 0."""
    return None if own_rank() == 0 else _known().get(what)


def decided(what: str, decide: Callable[[], object]) -> Any:
    """What one process must decide for all, a plain value: rank 0 decides, and the processes that it starts take that.

    Processes that somebody else starts (torchrun, Slurm) decide each for themselves; a run whose processes disagree
    does not begin (see `deeplightning.callbacks.record.Record`).
    """
    if own_rank() == 0 or what not in _known():
        hand_on(what, decide())
    return _known()[what]


def hand_on(what: str, value: object) -> None:
    """Tells the processes that this one starts what it has decided, a plain value."""
    os.environ[DECIDED] = json.dumps(_known() | {what: value})


def _known() -> dict[str, object]:
    found: dict[str, object] = json.loads(os.environ.get(DECIDED, "{}"))
    return found
