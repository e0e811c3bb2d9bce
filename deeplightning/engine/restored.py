"""Whether a run can resume from a checkpoint's training state: its optimizers, and errors while it is restored.

Values are not checked: whoever could change a counter could have changed a weight.
"""

import traceback
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch

from deeplightning.engine.checkpoint_io import described
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.words import first_line

_RESTORES = "pytorch_lightning.trainer.connectors.checkpoint_connector"
_LIBRARIES = ("deeplightning.", "pytorch_lightning.", "lightning_fabric.", "torch.", "torchmetrics.")
_USE = ("torch.optim.", "pytorch_lightning.loops.", "pytorch_lightning.core.", "pytorch_lightning.utilities.")
_USE_LATER = ("torch.optim.lr_scheduler", "pytorch_lightning.callbacks.early_stopping")
"""Modules that restore a state, that use it in the first step after, and that may use it later; Lightning 2.6 and
torch 2.15 have no specific exceptions for a bad state."""


def check_counters(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Raise if a checkpoint of this version of Lightning lacks a loop's state, which Lightning would not notice.

    Raises:
        CheckpointError: names one that is missing.
    """
    loops = checkpoint.get("loops") or {}
    theirs = loops.get("fit_loop")
    same_version = (checkpoint.get("versions") or {}).get("pytorch_lightning") == pl.__version__
    for name in trainer.fit_loop.state_dict() if same_version else ():
        if not isinstance(theirs, Mapping) or not isinstance(theirs.get(name), Mapping):
            raise _refusal(trainer.ckpt_path, f"`loops.fit_loop.{name}` is missing")


def check_optimizers(trainer: pl.Trainer, checkpoint: Mapping[str, object]) -> None:
    """Compare the numbers of optimizers and schedules of a checkpoint with those of a trainer that is set up.

    Raises:
        CheckpointError: they differ.
    """
    for key, ours in (("optimizer_states", trainer.optimizers), ("lr_schedulers", trainer.lr_scheduler_configs)):
        saved = checkpoint.get(key)
        if not isinstance(saved, list) or len(saved) != len(ours):
            found = len(saved) if isinstance(saved, list) else described(saved)
            raise _refusal(trainer.ckpt_path, f"`{key}` is {found}, and this run has {len(ours)}")


def check_schedules(trainer: pl.Trainer) -> None:
    """Compare each schedule's length in steps with the training's; a resumed schedule keeps its first length.

    Raises:
        ConfigError: a schedule is shorter.
    """
    steps = trainer.estimated_stepping_batches
    for config in trainer.lr_scheduler_configs:
        length = getattr(config.scheduler, "total_steps", None)
        if length is not None and config.interval == "step" and steps > length * config.frequency:
            keeps = (
                "a resumed run keeps the schedule that it began with, and so its train.num_epochs and data.batch_size. "
                f"To train on, start a new run with model.init_from='{trainer.ckpt_path}'"
            )
            advice = keeps if trainer.ckpt_path else "set the length of the schedule to `auto`"
            message = f"this schedule ends after {length} steps, the training takes {steps}; {advice}"
            raise ConfigError(Fault(message, "model.scheduler"))


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
