"""`engine.profiler: flops`: how many floating-point operations a training step takes, by module."""

import logging
from typing import Any

import pytorch_lightning as pl
from torch.utils.flop_counter import FlopCounterMode

from deeplightning.callbacks.record import Record

log = logging.getLogger("deeplightning")


class Flops(pl.Callback):
    """Counts the matrix products, convolutions and attentions of the first batch, forward and backward, and writes
    `flops.txt` in the run's folder: a row for each module, for the first process' share of the samples."""

    def __init__(self, record: Record):
        self.record = record
        self._counter: FlopCounterMode | None = None
        self._done = False

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.is_global_zero and not self._done:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            total = self._counter.get_total_flops()
            path = self.record.folder.flops
            counts = self._counter.get_flop_counts()
            # Names begin with the class of the module that was called first: the task, or its network.
            tops = {type(module).__name__: f"{name}." for name, module in pl_module.named_children()}
            tops[type(pl_module).__name__] = ""
            parts = ((name.partition("."), sum(found.values())) for name, found in counts.items())
            sums = {f"{tops.get(top, '')}{rest}".rstrip("."): total for (top, _, rest), total in parts}
            # It lays some of the backward pass to metrics, too (torch 2.15): to modules that have no parameters.
            learning = [n for n, m in pl_module.named_modules() if n and next(m.parameters(), None) is not None]
            rows = [f"{sums[name]:>20,}  {name}" for name in learning if name in sums]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([*rows, f"{total:>20,}  operations in all"]) + "\n")
            log.info("%-10s %s operations in a batch, by module in %s", "FLOPs", f"{total:,}", path.name)
            self._counter, self._done = None, True
