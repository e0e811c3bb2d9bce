"""Delay garbage collection while a command imports its modules, and freeze the imported objects.

A training run imports two thousand modules, whose million objects live until it ends. The collector scans all of them
several times during the imports and again at exit: 1.3 of 4.7 CPU seconds of a short run (November 2026).
`gc.freeze` excludes them. Only commands do this, never a notebook.
"""

import gc
import sys

RARE_THRESHOLDS = (100_000, 50, 50)
"""Thresholds for `gc.set_threshold` that nearly disable collection, except in a command that runs for days."""

_LEAK_REPORTER = "triton._C.libtriton"
"""Bound by nanobind, which prints a page about objects that are not freed when the interpreter exits."""

_former_thresholds: tuple[int, int, int] | None = None


def postpone() -> None:
    """Collect rarely until `resume` is called."""
    global _former_thresholds
    _former_thresholds = gc.get_threshold()
    gc.set_threshold(*RARE_THRESHOLDS)


def resume() -> None:
    """Freeze all live objects and restore the thresholds from before `postpone`; do nothing if it was not called."""
    global _former_thresholds
    if _former_thresholds is not None:
        freeze()
        gc.set_threshold(*_former_thresholds)
        _former_thresholds = None


def freeze() -> None:
    """Freeze all live objects so that later collections, including the one at exit, skip them."""
    if _LEAK_REPORTER not in sys.modules:
        gc.freeze()
