"""Execution of a Lightning stage, with library errors converted to faults of the config or the checkpoint."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from deeplightning.config.schema import Config
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.private.messages import Sentence, says
from deeplightning.words import first_line

if TYPE_CHECKING:
    import pytorch_lightning as pl

_OF_PARTS = (Sentence.OTHER_NETWORK, Sentence.OTHER_OPTIMIZER, Sentence.NO_METRIC)
"""Messages of torch about a checkpoint of another network or optimizer, and of Lightning about a missing metric."""

_PARTS = {
    "torch.nn.modules.loss": "model.loss",
    "torchmetrics.": "model.metrics",
    "torchvision.transforms.": "data.module",
}
"""Keys of the parts whose errors are faults of the config, by the beginning of their module."""


def run_stage(stage: Any, *args: Any, **kwargs: Any) -> None:
    """Run a stage of Lightning.

    Args:
        stage: `fit`, `validate`, `test` or `predict` of a trainer; the first of `args` is the task.

    Raises:
        ConfigError: a library's exception is about the config.
        CheckpointError: it is about the checkpoint of `ckpt_path`.
    """
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    from deeplightning.callbacks import callback_of
    from deeplightning.callbacks.checkpoints import Checkpoints
    from deeplightning.engine.checkpoint_io import raise_for_misfits, read_checkpoint
    from deeplightning.engine.restored import of_checkpoint
    from deeplightning.engine.sharded import whole_shapes

    try:
        if kwargs.get("ckpt_path") is not None:
            kwargs["ckpt_path"] = str(kwargs["ckpt_path"])
        try:
            stage(*args, **kwargs)
        except Exception as error:
            trainer = stage.__self__
            known = isinstance(error, MisconfigurationException) or says(error, *_OF_PARTS)
            if kwargs.get("ckpt_path") is None or trainer.state.fn != "fit" or known:
                raise
            resumed_at = callback_of(trainer, Checkpoints).resumed_at
            if (refusal := of_checkpoint(error, trainer, resumed_at)) is None:
                raise
            raise refusal from error
    except MisconfigurationException as error:
        if found := says(error, Sentence.NO_DATALOADER):
            data = {"val": "validation"}.get(found[1], found[1])
            message = f"no {data} data: the data module gives none. Leave out the stage, or add a set"
            raise ConfigError(Fault(message, "stages")) from error
        raise ConfigError(str(error)) from error
    except NotImplementedError as error:
        if says(error, Sentence.HOOK_IS_REMOVED):
            raise ConfigError(Fault(" ".join(str(error).split()), "model.module")) from error
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if (fault := _of_part(error, args[0])) is not None:
            raise ConfigError(fault) from error
        if says(error, Sentence.NO_METRIC):
            raise ConfigError(Fault(str(error), "train.early_stop.metric")) from error
        if says(error, Sentence.OTHER_NETWORK):
            path = kwargs["ckpt_path"]
            raise_for_misfits(whole_shapes(args[0]), read_checkpoint(path)["state_dict"], path)
        if says(error, Sentence.OTHER_OPTIMIZER):
            raise CheckpointError(f"{kwargs.get('ckpt_path')}: of another optimizer: {error}") from error
        raise


def _of_part(error: Exception, task: pl.LightningModule) -> Fault | None:
    """Return a fault if a loss of torch, a metric or a transform of a task with a config rejects its input, or None."""
    if type(error) not in (RuntimeError, ValueError, IndexError, TypeError):  # such as out of memory, or ours
        return None
    if not isinstance(getattr(task, "cfg", None), Config):
        return None
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        part = type(frame.f_locals.get("self"))
        key = next((key for package, key in _PARTS.items() if part.__module__.startswith(package)), None)
        if key is not None:
            return Fault(f"{part.__name__} does not take its input: {first_line(error)}", key)
    return None
