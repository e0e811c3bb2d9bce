"""Check whether a run can resume from a checkpoint's training state: its structure, and errors while it is restored.

Lightning ignores some missing counters and raises unspecific errors for others. Values are not checked: whoever can
change a counter can change a weight too.
"""

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging

from deeplightning.engine.checkpoint_reading import described
from deeplightning.faults import CheckpointError
from deeplightning.own_code import user_frames
from deeplightning.words import first_line

_RESTORING_MODULE = "pytorch_lightning.trainer.connectors.checkpoint_connector"
_LIBRARIES = ("deeplightning.", "pytorch_lightning.", "lightning_fabric.", "torch.", "torchmetrics.")
_STEP_MODULES = ("torch.optim.", "pytorch_lightning.loops.", "pytorch_lightning.core.", "pytorch_lightning.utilities.")
_LATER_MODULES = ("torch.optim.lr_scheduler", "pytorch_lightning.callbacks.early_stopping")
"""Modules that restore a state, that use it in the first step after that, and that may use it later; Lightning 2.6 and
torch 2.15 have no specific exceptions for a bad state."""


def check_counters(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Compare a checkpoint's counters with a trainer's, if both are from the same version of Lightning.

    Raises:
        CheckpointError: a counter is missing or not a count.
    """
    if (checkpoint.get("versions") or {}).get("pytorch_lightning") != pl.__version__:
        return
    loops = checkpoint.get("loops")
    theirs = loops.get("fit_loop") if isinstance(loops, Mapping) else None
    for fault in _counter_faults(trainer.fit_loop.state_dict(), theirs, "loops.fit_loop"):
        raise _refusal(trainer.ckpt_path, fault)


def averages_at_end(trainer: Any) -> bool:
    """Return whether a callback replaces the weights by averages when training ends."""
    return any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks)


def check_optimizers(trainer: pl.Trainer, checkpoint: Mapping[str, object]) -> None:
    """Compare the numbers of optimizers and schedules of a checkpoint with those of a trainer that is set up.

    StochasticWeightAveraging replaces the schedule during training and saves the state of its own schedule.

    Raises:
        CheckpointError: they differ.
    """
    expected: dict[str, list[Any]] = {"optimizer_states": trainer.optimizers}
    if not averages_at_end(trainer):
        expected["lr_schedulers"] = trainer.lr_scheduler_configs
    for key, ours in expected.items():
        saved = checkpoint.get(key)
        if not isinstance(saved, list) or len(saved) != len(ours):
            found = len(saved) if isinstance(saved, list) else described(saved)
            raise _refusal(trainer.ckpt_path, f"`{key}` is {found}, but this run has {len(ours)}")


def checkpoint_error(error: Exception, trainer: pl.Trainer, resumed_at: int) -> CheckpointError | None:
    """Return the error for a failure that a checkpoint's training state caused; None if there is another cause.

    Args:
        error: the error that ended the training.
        resumed_at: the number of optimizer steps of the checkpoint; negative before training starts.
    """
    if hasattr(error, "exit_code") or isinstance(error, torch.OutOfMemoryError):
        return None
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = (resumed_at < 0 and _RESTORING_MODULE not in modules) or modules[-1].startswith("pytorch_lightning.core.")
    if not modules[-1].startswith(_LIBRARIES) or (called and user_frames(error)):  # in the user's code, or from it
        return None
    at_once = modules[-1].startswith(_STEP_MODULES) and (resumed_at < 0 or trainer.global_step <= resumed_at + 1)
    if not at_once and not modules[-1].startswith(_LATER_MODULES) and _RESTORING_MODULE not in modules:
        return None
    return _refusal(trainer.ckpt_path, f"{type(error).__name__}: {first_line(error)}")


def _refusal(path: object, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: its training state is damaged, or of another optimizer, schedule or version: {fault}; resume from "
        f"another checkpoint, or start again from its weights: model.init_from='{path}'"
    )


def _counter_faults(ours: object, theirs: object, key: str) -> Iterator[str]:
    """Yield a message for each counter that a tree lacks or that is not a count."""
    if isinstance(ours, Mapping):
        if not isinstance(theirs, Mapping):
            yield f"`{key}` is {described(theirs)}, but must be a dict"
            return
        for name, value in ours.items():
            if name in theirs:
                yield from _counter_faults(value, theirs[name], f"{key}.{name}")
            else:
                yield f"`{key}.{name}` is missing"
        if unknown := [name for name in theirs if name not in ours] if key.endswith((".total", ".current")) else []:
            yield f"`{key}` holds {unknown[0]}, which is not a counter"
    elif isinstance(ours, bool):
        if not isinstance(theirs, bool):
            yield f"`{key}` is {described(theirs)}, but must be true or false"
    elif isinstance(ours, int) and (isinstance(theirs, bool) or not isinstance(theirs, int) or theirs < 0):
        yield f"`{key}` is {described(theirs)}, but must be a count"
