"""When the garbage collector looks at what a command has made.

A training imports two thousand modules, whose million objects stay until its end. Python's collector looks at all of
them several times while they are imported, and again when the interpreter ends: 1.3 of 4.7 CPU seconds of a short
training (November 2026). `gc.freeze` is its means for objects that stay. Nothing is done where no command runs: the
collector of a notebook is its user's.
"""

import gc
import sys

RARELY = (100_000, 50, 50)
"""Thresholds, see `gc.set_threshold`, with which it is nearly off, but a command that runs for days still collects."""

_REPORTS_LEAKS = "triton._C.libtriton"
"""Bound by nanobind, which prints a page about objects of its own that nobody frees before the interpreter ends."""

_before: tuple[int, int, int] | None = None


def postpone() -> None:
    """Collects rarely from here until `resume`."""
    global _before
    _before = gc.get_threshold()
    gc.set_threshold(*RARELY)


def resume() -> None:
    """Collects as usual what is made from here on, and leaves all that is there; without `postpone`, does nothing."""
    global _before
    if _before is not None:
        leave_alone()
        gc.set_threshold(*_before)
        _before = None


def leave_alone() -> None:
    """What is there is not looked at again, not even when the interpreter ends."""
    if _REPORTS_LEAKS not in sys.modules:
        gc.freeze()
