"""Elastic Ray workers: upload checkpoints, and stop at an epoch boundary so that the group can grow.

The launcher sets an environment variable for each worker, and later writes to its standard input.
"""

import json
import os
import select
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint

from deeplightning.callbacks.checkpoints import Checkpoints
from deeplightning.callbacks.record import Record
from deeplightning.config.schema import Config
from deeplightning.launch import ProcessHooks
from deeplightning.process.identity import identity, own_rank
from deeplightning.process.streams import Interrupted
from deeplightning.tracking.build import experiment_of
from deeplightning.tracking.store import locate
from deeplightning_ray.storage import POOL, Storage

_STDIN = 0


def storage_of(cfg: Config) -> Storage | None:
    """Return the storage of this worker's launch, or None."""
    found = json.loads(os.environ.get(POOL) or "{}")
    if not found.get("storage"):
        return None
    root = locate(cfg.logger.params.get("tracking_uri")).artifact_root or Path.cwd()
    experiment = experiment_of(cfg.logger.type, cfg.logger.params)
    return Storage(found["storage"], found["launch"], experiment, root.absolute())


def fetch(cfg: Config) -> None:
    """Copy the run to resume from the storage to this machine: that of this launch, or the latest for `auto`."""
    process = identity()
    may_resume = process is not None and process.may_resume
    if (may_resume or cfg.train.resume_ckpt == "auto") and (storage := storage_of(cfg)) is not None:
        storage.fetch(None if may_resume else "newest")


def store_all(cfg: Config, folder: Path) -> None:
    """Copy all files of a finished run to the storage, on rank 0."""
    if own_rank() == 0 and (storage := storage_of(cfg)) is not None:
        storage.put(folder, everything=True)


class GroupGrows(Interrupted):
    """Raised to end this worker so that the run continues with more workers."""

    def __init__(self, epoch: int):
        super().__init__("SIGTERM", 143, at_once=True)
        self.args = (f"makes room for more workers at the start of epoch {epoch}",)


class ElasticWorkers(LightningCheckpoint):
    """Copy each new checkpoint to the storage, on rank 0, and end all ranks at an epoch boundary when more can start.

    Lightning calls callbacks of this base class last: this one runs after `Checkpoints` if it comes later in the list.
    """

    def __init__(self, cfg: Config, record: Record, checkpoints: Checkpoints):
        self.record, self.checkpoints = record, checkpoints
        self.storage = storage_of(cfg)
        self._group_grows = False

    def _store(self, trainer: pl.Trainer) -> None:
        if self.storage is not None and trainer.is_global_zero and self.record.opened:
            self.storage.put(self.record.folder.path)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._store(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self._store(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._store(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        requested = trainer.is_global_zero and bool(select.select([_STDIN], [], [], 0)[0])
        self._group_grows = bool(trainer.strategy.broadcast(requested)) if trainer.world_size > 1 else requested
        if self._group_grows:
            self.checkpoints.save_now(trainer)
        self._store(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._group_grows:
            raise GroupGrows(trainer.current_epoch + 1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._store(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._store(trainer)


class WorkerHooks(ProcessHooks):
    """Add the callback of elastic workers to a run."""

    copies_files = True

    def callbacks(self, cfg: Config, record: Record, checkpoints: Checkpoints) -> list[pl.Callback]:
        """Return the callback."""
        return [ElasticWorkers(cfg, record, checkpoints)]
