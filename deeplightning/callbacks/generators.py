"""Random numbers of modules that do not take the config: as under Lightning's own Trainer, also in a resumed run."""

import logging
import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from deeplightning.callbacks.order import OWN
from deeplightning.faults import CheckpointError
from deeplightning.private.lightning import begin_epoch_again

log = logging.getLogger("deeplightning")


class Generators(pl.Callback):
    """Save the states of the generators of Python, NumPy and torch in each checkpoint, and restore them on resume.

    So the numbers are those of `seed_everything` and `Trainer.fit`, and a run that resumes at the end of an epoch draws
    what an uninterrupted one does. Inside an epoch, an order that a loader has drawn cannot be restored.
    """

    after = ("Record",)
    before = (OWN, "EarlyStopping")

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["generators"] = _states()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved = checkpoint.get("generators") if trainer.state.fn == "fit" else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if 0 < trainer.fit_loop.epoch_loop.batch_progress.current.ready < trainer.num_training_batches:
            self._restore(trainer)
            log.warning(
                "This run resumes inside an epoch. It will not end bit for bit like an uninterrupted one where its "
                "loaders shuffle: they draw the order of this epoch anew"
            )

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._restore(trainer):
            begin_epoch_again(trainer)

    def _restore(self, trainer: pl.Trainer) -> bool:
        """Restore the states of the checkpoint, once; return whether there were any.

        Raises:
            CheckpointError: they are damaged.
        """
        if self._saved is None:
            return False
        saved, self._saved = self._saved, None
        try:
            _set_states(saved)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{trainer.ckpt_path}: damaged: `generators`: {error}") from error
        return True


def _states() -> dict[str, Any]:
    accelerator: Any = torch.get_device_module() if torch.accelerator.is_available() else None
    return {
        "python": random.getstate(),
        "numpy": [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()],
        "torch": torch.get_rng_state(),
        "device": accelerator.get_rng_state_all() if hasattr(accelerator, "get_rng_state_all") else [],
    }


def _set_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    if states["device"]:
        torch.get_device_module().set_rng_state_all(states["device"])
