"""Random numbers of the user's own modules: as under Lightning's own Trainer, also in a resumed run."""

import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import distributed

from deeplightning.callbacks.order import OWN
from deeplightning.callbacks.steps import build_network, knows_position
from deeplightning.faults import CheckpointError
from deeplightning.private.lightning import restart_epoch, training_loaders


class Generators(pl.Callback):
    """Save the states of each process' generators of Python, NumPy and torch in checkpoints, and restore them.

    So the numbers are those of `seed_everything` and `Trainer.fit`, and a run that resumes draws what an uninterrupted
    one does. Inside an epoch it iterates from the states before that epoch, and drops the batches that are done, unless
    the loader knows its position.
    """

    after = ("Record",)
    before = (OWN, "EarlyStopping")

    def __init__(self) -> None:
        self._saved: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None  # the states before the epoch; None: it is the first

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        build_network(trainer, pl_module, stage)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = {"now": _states(), "before": self._before}
        every: list[Any] = [own] * trainer.world_size
        if trainer.world_size > 1 and distributed.is_initialized():  # a dry run may pretend to have more processes
            distributed.all_gather_object(every, own)
        checkpoint["generators"] = every

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        every = checkpoint.get("generators")
        if every and trainer.state.fn == "fit":
            self._saved = every[trainer.global_rank % len(every)]  # a run may resume with more processes
            if not isinstance(self._saved, dict):
                raise CheckpointError(
                    f"{trainer.ckpt_path}: damaged: `generators` holds a {type(self._saved).__name__}"
                )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress
        done = batches.current.ready
        if trainer.ckpt_path is None or batches.is_last_batch or not 0 < done < trainer.num_training_batches:
            return
        saved, self._saved = self._saved or {}, None
        self._before = saved.get("before")
        if not any(map(knows_position, training_loaders(trainer))):
            if self._before is not None:
                _set_states(trainer, self._before)
            restart_epoch(trainer, skip=done, new_iterator=self._before is not None)
        if saved:
            _set_states(trainer, saved.get("now"))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._saved is not None:
            saved, self._saved = self._saved, None
            _set_states(trainer, saved.get("now"))
            self._before = saved["now"]
            restart_epoch(trainer, skip=0, new_iterator=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = _states()


def _states() -> dict[str, Any]:
    accelerator: Any = torch.get_device_module() if torch.accelerator.is_available() else None
    return {
        "python": random.getstate(),
        "numpy": [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()],
        "torch": torch.get_rng_state(),
        "device": accelerator.get_rng_state_all() if hasattr(accelerator, "get_rng_state_all") else [],
    }


def _set_states(trainer: pl.Trainer, states: Any) -> None:
    """
    Raises:
        CheckpointError: they are damaged.
    """
    try:
        random.setstate(states["python"])
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(states["torch"])
        if states["device"]:
            torch.get_device_module().set_rng_state_all(states["device"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{trainer.ckpt_path}: damaged: `generators`: {error}") from error
