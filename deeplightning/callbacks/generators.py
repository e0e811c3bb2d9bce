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
        self._saved: list[dict[str, Any]] | None = None  # of each process
        self._before: dict[str, Any] | None = None  # the states before the epoch; None: it is the first

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        build_network(trainer, pl_module, stage)

    def state_dict(self) -> dict[str, Any]:
        every: list[Any] = [{"now": _states(), "before": self._before}]
        if distributed.is_available() and distributed.is_initialized():
            every *= distributed.get_world_size()
            distributed.all_gather_object(every, every[0])
        return {"processes": every}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("processes")

    def _take(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return what this process has saved, once. A run may resume with more processes."""
        saved, self._saved = self._saved, None
        if not saved:
            return {}
        try:
            found: dict[str, Any] = saved[trainer.global_rank % len(saved)]
            self._before = found["before"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{trainer.ckpt_path}: damaged: the states of generators: {error!r}") from error
        return found

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress
        done = batches.current.ready
        if trainer.ckpt_path is None or batches.is_last_batch or not 0 < done < trainer.num_training_batches:
            return
        saved = self._take(trainer)
        if not any(map(knows_position, training_loaders(trainer))):
            if self._before is not None:
                _set_states(trainer, self._before)
            restart_epoch(trainer, skip=done, new_iterator=self._before is not None)
        if saved:
            _set_states(trainer, saved.get("now"))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if saved := self._take(trainer):
            _set_states(trainer, saved.get("now"))
            self._before = saved["now"]
            restart_epoch(trainer, skip=0, new_iterator=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = _states()


def _states() -> dict[str, Any]:
    """Return the states as plain lists: a pickled tensor would call `torch.save`, which users count."""
    accelerator: Any = torch.get_device_module() if torch.accelerator.is_available() else None
    devices = accelerator.get_rng_state_all() if hasattr(accelerator, "get_rng_state_all") else []
    return {
        "python": random.getstate(),
        "numpy": [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "device": [device.tolist() for device in devices],
    }


def _set_states(trainer: pl.Trainer, states: Any) -> None:
    """Set the generators to states from a checkpoint; a CheckpointError says that they are damaged."""
    try:
        random.setstate(states["python"])
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
        if devices := [torch.tensor(device, dtype=torch.uint8) for device in states["device"]]:
            torch.get_device_module().set_rng_state_all(devices)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{trainer.ckpt_path}: damaged: the states of generators: {error!r}") from error
