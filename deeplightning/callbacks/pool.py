"""A worker of a pool that may change: it hands its checkpoints to a storage, and makes room where more workers came.

The launcher passes what it wants in an environment variable, and later through standard input.
"""

import select
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint as LightningCheckpoint

from deeplightning.callbacks.checkpoints import Checkpoints
from deeplightning.callbacks.record import Record
from deeplightning.config.schema import Config
from deeplightning.launch.storage import Storage, stored
from deeplightning.process.identity import identity, own_rank
from deeplightning.process.streams import Interrupted
from deeplightning.tracking.build import experiment_of
from deeplightning.tracking.store import locate

MAKES_ROOM = 75
"""Exit code of a worker that has ended so that more can start: EX_TEMPFAIL of sysexits.h, try again."""

_STDIN = 0


def storage_of(cfg: Config) -> Storage | None:
    """The storage that a launcher tells this process of; None: there is none."""
    found = stored()
    if not found.get("storage"):
        return None
    root = locate(cfg.logger.params.get("tracking_uri")).artifact_root or Path.cwd()
    experiment = experiment_of(cfg.logger.type, cfg.logger.params)
    return Storage(found["storage"], found["launch"], experiment, root.absolute())


def fetch(cfg: Config) -> None:
    """Brings what training resumes from to this machine, if a storage has it: the run of this launch, or of `auto`."""
    here = identity()
    goes_on = here is not None and here.goes_on
    if (goes_on or cfg.train.resume_ckpt == "auto") and (storage := storage_of(cfg)) is not None:
        storage.fetch(None if goes_on else "newest")


def hand_in(cfg: Config, folder: Path) -> None:
    """Puts all files of a run that has ended well into the storage, on rank 0."""
    if own_rank() == 0 and (storage := storage_of(cfg)) is not None:
        storage.put(folder, everything=True)


class MakesRoom(Interrupted):
    """The run continues with more workers."""

    def __init__(self, epoch: int):
        super().__init__("SIGTERM", 143, at_once=True)
        self.args = (f"makes room for more workers at the start of epoch {epoch}",)


class Pool(LightningCheckpoint):
    """Puts what a checkpoint has written into the storage at once, on rank 0, and ends the run at the start of an epoch
    when the launcher has more workers, on all ranks.

    Lightning calls callbacks of this base last: behind `Checkpoints`, if this one comes later.
    """

    def __init__(self, cfg: Config, record: Record, checkpoints: Checkpoints):
        self.record, self.checkpoints = record, checkpoints
        self.storage = storage_of(cfg)
        self._makes_room = False

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
        asked = trainer.is_global_zero and bool(select.select([_STDIN], [], [], 0)[0])
        self._makes_room = bool(trainer.strategy.broadcast(asked)) if trainer.world_size > 1 else asked
        if self._makes_room:
            self.checkpoints.save_now(trainer)
        self._store(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._makes_room:
            raise MakesRoom(trainer.current_epoch + 1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._store(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._store(trainer)
