"""Delaying and freezing Python's garbage collector while a command imports its modules.

A training imports two thousand modules, whose million objects live until it ends. The collector scans all of them
several times during the imports and again at exit: 1.3 of 4.7 CPU seconds of a short training (November 2026).
`gc.freeze` excludes them. Only commands do this; the collector of a notebook is left alone.
"""

import gc
import sys

RARE_THRESHOLDS = (100_000, 50, 50)
"""Thresholds for `gc.set_threshold` that nearly disable collection; a command that runs for days still collects."""

_REPORTS_LEAKS = "triton._C.libtriton"
"""Bound by nanobind, which prints a page about objects that are not freed before the interpreter exits."""

_before: tuple[int, int, int] | None = None


def postpone() -> None:
    """Collect rarely until `resume` is called."""
    global _before
    _before = gc.get_threshold()
    gc.set_threshold(*RARE_THRESHOLDS)


def resume() -> None:
    """Freeze all live objects and restore the usual thresholds; without `postpone` do nothing."""
    global _before
    if _before is not None:
        leave_alone()
        gc.set_threshold(*_before)
        _before = None


def leave_alone() -> None:
    """Freeze all live objects so that later collections, including the one at exit, skip them."""
    if _REPORTS_LEAKS not in sys.modules:
        gc.freeze()
