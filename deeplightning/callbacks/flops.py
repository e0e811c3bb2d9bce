"""Count the operations of a training step by module; Lightning's ThroughputMonitor has to be given their number."""

import logging

from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.flop_counter import FlopCounterMode

from deeplightning.callbacks.record import Record
from deeplightning.runfolder import write_whole

log = logging.getLogger("deeplightning")


class Flops(Callback):
    """Write the operations of the first batch to `flops.txt` in the run's folder: the matrix products, convolutions and
    attentions, forward and backward, of each module, for the first process' share of the samples."""

    def __init__(self, record: Record):
        self.record = record
        self._is_counted = False
        self._counter: FlopCounterMode | None = None  # during the first batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.is_global_zero and not self._is_counted:
            self._is_counted, self._counter = True, FlopCounterMode(display=False)
            self._counter.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if (counter := self._stop()) is None:
            return
        total, path = counter.get_total_flops(), self.record.folder.flops
        # Names begin with the class of the module that was called first: the task, or its network.
        tops = {type(module).__name__: f"{name}." for name, module in pl_module.named_children()}
        tops[type(pl_module).__name__] = ""
        parts = ((name.partition("."), sum(found.values())) for name, found in counter.get_flop_counts().items())
        sums = {f"{tops.get(top, '')}{rest}".rstrip("."): count for (top, _, rest), count in parts}
        # It lays some of the backward pass to metrics, too (torch 2.15): to modules that have no parameters.
        learning = [n for n, m in pl_module.named_modules() if n and next(m.parameters(), None) is not None]
        rows = [f"{sums[name]:>20,}  {name}" for name in learning if name in sums]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n".join([*rows, f"{total:>20,}  operations in all"]) + "\n")
        log.info("%-10s %s operations in a batch, by module in %s", "FLOPs", f"{total:,}", path.name)

    def _stop(self, *_: object) -> FlopCounterMode | None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
        return counter

    on_exception = _stop  # type: ignore[assignment]
