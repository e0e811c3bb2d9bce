"""Values that one process chooses for the whole launch and passes to the processes that it starts."""

import json
import os
from collections.abc import Callable
from typing import Any

from deeplightning.process.identity import own_rank

DECIDED = "DEEPLIGHTNING_DECIDED"
"""The environment variable in which rank 0 passes its decisions, as JSON, to the processes that Lightning starts."""


def decision(what: str) -> Any:
    """Return the value that rank 0 passed to this process, or None; rank 0 itself always gets None."""
    return None if own_rank() == 0 else _known().get(what)


def decided(what: str, decide: Callable[[], object]) -> Any:
    """Return a plain value that rank 0 chooses for all processes by calling `decide`; those that it starts read its
    result.

    Processes started by something else (torchrun, Slurm) each call `decide`; a run whose processes disagree does not
    start (see `deeplightning.callbacks.record.Record`).
    """
    if own_rank() == 0 or what not in _known():
        hand_on(what, decide())
    return _known()[what]


def hand_on(what: str, value: object) -> None:
    """Pass a plain value to the processes that this one starts."""
    os.environ[DECIDED] = json.dumps(_known() | {what: value})


def _known() -> dict[str, object]:
    found: dict[str, object] = json.loads(os.environ.get(DECIDED, "{}"))
    return found
