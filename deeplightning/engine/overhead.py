"""What Lightning's loop spends at each step on nothing is taken from it by the way in which it is used (2.6.6).

Its loop asks each callback for each hook, opens a profile around each call, and looks through the signature of the step
to learn what to hand it. A callback without a hook, a profiler that profiles nothing, and a signature that is known
cost next to nothing instead.
"""

import contextlib
import inspect
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.profilers import Profiler

TRAIN_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)
"""The hooks of callbacks and tasks that Lightning calls at each batch, and calls only where they can be called."""

JUDGE_HOOKS = tuple(
    f"on_{stage}_batch_{end}" for stage in ("validation", "test", "predict") for end in ("start", "end")
)
"""Those of callbacks alone: of a task it looks through their signatures, whether they can be called or not."""

_NOTHING: object = contextlib.nullcontext()


class NoProfiler(Profiler):
    """Profiles nothing, at a tenth of what Lightning's own takes for that."""

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass

    def profile(self, action_name: str) -> Any:
        return _NOTHING


def leave_out_empty_hooks(*parts: pl.Callback | pl.LightningModule) -> None:
    """Takes from callbacks and tasks the batch hooks that they do not define."""
    for part in parts:
        is_task = isinstance(part, pl.LightningModule)
        own, names = (pl.LightningModule, TRAIN_HOOKS) if is_task else (pl.Callback, TRAIN_HOOKS + JUDGE_HOOKS)
        for name in names:
            if getattr(type(part), name) is getattr(own, name) and name not in vars(part):
                setattr(part, name, None)


def note_signatures(task: pl.LightningModule) -> None:
    """Leaves at the steps of a task what `inspect` finds out about them."""
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(type(task), name, None)
        if inspect.isfunction(step) and not hasattr(step, "__wrapped__"):
            step.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
