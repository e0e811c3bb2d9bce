"""Write the memory by use and the time of a step to `memory.json`: Lightning's DeviceStatsMonitor logs totals alone.

`deeplightning plan --against RUN` compares it with the plan.
"""

import json
import logging
import statistics
from time import perf_counter

import pytorch_lightning as pl
import torch

from deeplightning.callbacks.record import Record
from deeplightning.engine.footprint import footprint
from deeplightning.runfolder import write_whole

log = logging.getLogger("deeplightning")

_MOST = 200
"""So many steps are timed."""


class Memory(pl.Callback):
    """Record bytes of the first process and the time of its steps: from the start of a batch to that of the next, the
    median of the first 200. A GPU that computes behind the CPU is no faster in the long run."""

    after = ("Record",)

    def __init__(self, record: Record):
        self.record = record
        self._times: list[float] = []
        self._last: float | None = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if len(self._times) >= _MOST:
            return
        now = perf_counter()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now

    def on_validation_end(self, *_: object) -> None:
        self._last = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or not self.record.opened:
            return
        found: dict[str, object] = {"processes": trainer.world_size, **footprint(pl_module, trainer.optimizers)}
        if pl_module.device.type == "cuda":
            found["device"] = torch.cuda.get_device_name(pl_module.device)
            found["peak"] = torch.cuda.max_memory_allocated(pl_module.device)
        if self._times:
            found["seconds"] = statistics.median(self._times)  # of a batch
        path = self.record.folder.memory
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(found, indent=2) + "\n")
        except OSError as error:  # all is trained: a run that is resumed would not come here again
            log.warning("memory     %s is not written: %s", path.name, error)
