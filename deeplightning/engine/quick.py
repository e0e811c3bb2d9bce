"""What Lightning's loop spends at each step on nothing is taken from it by the way in which it is used (2.6.6).

Its loop asks each callback for each hook, opens a profile around each call, and looks through the signature of the step
to learn what to hand it. A callback without a hook, a profiler that profiles nothing, and a signature that is known
cost next to nothing instead.
"""

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.profilers import Profiler

BATCH_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start"),
    *("on_test_batch_end", "on_predict_batch_start", "on_predict_batch_end"),
)
"""The hooks of a callback that Lightning calls at each batch, and calls only where they can be called."""

_NOTHING: Any = contextlib.nullcontext()


class NoProfiler(Profiler):
    """Profiles nothing, at a tenth of what Lightning's own takes for that."""

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass

    def profile(self, action_name: str) -> Any:
        return _NOTHING


def leave_out_empty_hooks(callbacks: Iterable[pl.Callback]) -> None:
    """Takes from callbacks the batch hooks that they do not define."""
    for callback in callbacks:
        for name in BATCH_HOOKS:
            if getattr(type(callback), name) is getattr(pl.Callback, name) and name not in vars(callback):
                setattr(callback, name, None)


def note_signatures(task: Any) -> None:
    """Leaves at the steps of a task what `inspect` finds out about them."""
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(type(task), name, None)
        if inspect.isfunction(step) and not hasattr(step, "__wrapped__"):
            step.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
