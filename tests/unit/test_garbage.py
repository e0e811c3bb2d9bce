"""Commands postpone garbage collection until training starts, and freeze imported objects."""

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from deeplightning.process import garbage


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Restore the collector's thresholds after the test."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Circle:
    """A reference cycle, which only the collector frees."""

    freed = 0

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Circle.freed += 1


def test_garbage_collection_is_postponed_until_training_starts():
    """`postpone` raises the collector's thresholds, and `resume` restores them; without `postpone`, `resume` does
    nothing."""
    thresholds = gc.get_threshold()
    garbage.postpone()
    assert gc.isenabled()  # a search runs for days
    assert gc.get_threshold() > (10_000, 10, 10)
    garbage.resume()
    assert gc.get_threshold() == thresholds
    gc.set_threshold(123, 4, 5)  # of a user who runs no command
    held, made = gc.get_freeze_count(), [[number] for number in range(1000)]
    garbage.resume()
    assert gc.get_threshold() == (123, 4, 5)
    assert gc.get_freeze_count() < held + len(made)  # not equal to `held`: frozen objects may be freed meanwhile


def test_what_was_imported_is_left_alone_and_what_is_made_later_is_collected(monkeypatch):
    """Nothing is frozen if Triton is imported, whose bindings would report leaks after the command's last line."""
    held = gc.get_freeze_count()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton._C.libtriton", ModuleType("libtriton"))
        garbage.postpone()
        garbage.resume()
        assert gc.get_freeze_count() <= held
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    Circle()
    garbage.postpone()
    garbage.resume()
    held, before = gc.get_freeze_count(), Circle.freed
    assert held > 10_000
    gc.collect()
    assert Circle.freed == before
    Circle()
    gc.collect()
    assert Circle.freed == before + 1
