"""Whether a run can resume from a checkpoint's training state: its form, and errors while it is restored.

Lightning ignores some missing counters and raises an error of its own at others. Values are not checked: whoever could
change a counter could have changed a weight.
"""

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import StochasticWeightAveraging

from deeplightning.engine.checkpoint_reading import described
from deeplightning.faults import CheckpointError
from deeplightning.words import first_line

_RESTORES = "pytorch_lightning.trainer.connectors.checkpoint_connector"
_LIBRARIES = ("deeplightning.", "pytorch_lightning.", "lightning_fabric.", "torch.", "torchmetrics.")
_USE = ("torch.optim.", "pytorch_lightning.loops.", "pytorch_lightning.core.", "pytorch_lightning.utilities.")
_USE_LATER = ("torch.optim.lr_scheduler", "pytorch_lightning.callbacks.early_stopping")
"""Modules that restore a state, that use it in the first step after, and that may use it later; Lightning 2.6 and
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
    for fault in _misfits(trainer.fit_loop.state_dict(), theirs, "loops.fit_loop"):
        raise _refusal(trainer.ckpt_path, fault)


def averages_at_end(trainer: Any) -> bool:
    """Return whether a callback puts averages in place of the weights when training has ended."""
    return any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks)


def check_optimizers(trainer: pl.Trainer, checkpoint: Mapping[str, object]) -> None:
    """Compare the numbers of optimizers and schedules of a checkpoint with those of a trainer that is set up.

    StochasticWeightAveraging replaces the schedule while it trains, and keeps the state of its own.

    Raises:
        CheckpointError: they differ.
    """
    made: dict[str, list[Any]] = {"optimizer_states": trainer.optimizers}
    if not averages_at_end(trainer):
        made["lr_schedulers"] = trainer.lr_scheduler_configs
    for key, ours in made.items():
        saved = checkpoint.get(key)
        if not isinstance(saved, list) or len(saved) != len(ours):
            found = len(saved) if isinstance(saved, list) else described(saved)
            raise _refusal(trainer.ckpt_path, f"`{key}` is {found}, and this run has {len(ours)}")


def of_checkpoint(error: Exception, trainer: pl.Trainer, resumed_at: int) -> CheckpointError | None:
    """Return the error for a failure that a checkpoint's training state caused; None if there is another cause.

    Args:
        error: ended the training.
        resumed_at: the optimizer steps of the checkpoint; negative before training has begun.
    """
    if hasattr(error, "exit_code") or isinstance(error, torch.OutOfMemoryError):
        return None
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not modules[-1].startswith(_LIBRARIES):  # in the user's code
        return None
    at_once = modules[-1].startswith(_USE) and (resumed_at < 0 or trainer.global_step <= resumed_at + 1)
    if not at_once and not modules[-1].startswith(_USE_LATER) and _RESTORES not in modules:
        return None
    return _refusal(trainer.ckpt_path, f"{type(error).__name__}: {first_line(error)}")


def _refusal(path: object, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: its training state is damaged, or of another optimizer, schedule or version: {fault}; resume from "
        f"another checkpoint, or start again from its weights: model.init_from='{path}'"
    )


def _misfits(ours: object, theirs: object, key: str) -> Iterator[str]:
    """Yield what is missing in a tree of counters or is not a count."""
    if isinstance(ours, Mapping):
        if not isinstance(theirs, Mapping):
            yield f"`{key}` is {described(theirs)}, and has to be a dict"
            return
        for name, value in ours.items():
            if name in theirs:
                yield from _misfits(value, theirs[name], f"{key}.{name}")
            else:
                yield f"`{key}.{name}` is missing"
        if unknown := [name for name in theirs if name not in ours] if key.endswith((".total", ".current")) else []:
            yield f"`{key}` holds {unknown[0]}, which is not a counter"
    elif isinstance(ours, bool):
        if not isinstance(theirs, bool):
            yield f"`{key}` is {described(theirs)}, and has to be true or false"
    elif isinstance(ours, int) and (isinstance(theirs, bool) or not isinstance(theirs, int) or theirs < 0):
        yield f"`{key}` is {described(theirs)}, and has to be a count"
