"""Custom callbacks for `train.callbacks`: losses by step, gradient norms, batch times."""

import logging
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from deeplightning.batches import batch_loss, has_loss

# Loggers below `deeplightning` write to the terminal, with the rank, and to logs/rank_N.log of the run.
log = logging.getLogger("deeplightning.watching")


class SyncedLoss(Callback):
    """Print a line per optimizer step: the mean loss over accumulated batches and processes.

    Args:
        prefix: start of the line.
        ranks: ranks that print it; empty: none.
    """

    def __init__(self, prefix: str = "loss", ranks: Sequence[int] = (0,)):
        self.prefix, self.ranks = prefix, tuple(ranks)
        self._losses: list[torch.Tensor] = []
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses, self._step = [], trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, *_: object) -> None:
        if has_loss(outputs):
            self._losses.append(batch_loss(trainer, outputs))
        if trainer.global_step == self._step:
            return
        losses = self._losses or [batch_loss(trainer, None)]
        mean = trainer.strategy.reduce(torch.stack(losses).mean(), reduce_op="mean")
        if trainer.global_rank in self.ranks:
            log.info("%s step %d: %.6f", self.prefix, self._step, mean)
        self._losses, self._step = [], trainer.global_step


class SmoothedLoss(Callback):
    """Log `train_loss_ema`, a moving average in which a new batch has `weight`; it restarts in each epoch."""

    def __init__(self, weight: float = 0.1):
        if not 0 < weight <= 1:
            raise ValueError(f"weight must be above 0 and at most 1, not {weight}")
        self.weight = weight
        self._value: torch.Tensor | None = None

    def on_train_epoch_start(self, *_: object) -> None:
        self._value = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, *_: object) -> None:
        if not has_loss(outputs):
            return
        loss = batch_loss(trainer, outputs)
        self._value = loss if self._value is None else self.weight * loss + (1 - self.weight) * self._value
        pl_module.log("train_loss_ema", self._value)


class ListParameters(Callback):
    """Print name, shape, device and dtype of each trainable tensor at the start."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, p in pl_module.named_parameters():
            if p.requires_grad:
                log.info("%s %s %s %s", name, tuple(p.shape), p.device, str(p.dtype).removeprefix("torch."))


class GradientNorms(Callback):
    """Log `grad_norm/<name>` of each trainable tensor before each optimizer step, and `grad_norm` of all.

    Args:
        norm_type: p of the p-norm.
    """

    def __init__(self, norm_type: float = 2.0):
        self.norm_type = norm_type

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.log_every_n_steps == sys.maxsize:  # logging is off
            return
        found = {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}
        norms = {f"grad_norm/{n}": torch.linalg.vector_norm(g, self.norm_type) for n, g in found.items()}
        if norms:
            norms["grad_norm"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), self.norm_type)
        pl_module.log_dict(norms)


class Timings(Callback):
    """Log seconds per batch, `batch_time`, the part spent waiting for data, `data_time`, and the number of `batches`.
    Times are means since the last logged step. `engine.profiler: simple` measures the parts of a step.
    """

    def on_train_start(self, *_: object) -> None:
        self._begin()  # Lightning skips the next hook when a run resumes within an epoch

    def _begin(self, *_: object, **__: object) -> None:
        self._last = self._logged_at = time.perf_counter()
        self._count = 0
        self._waited = 0.0

    on_train_epoch_start = _begin

    def on_train_batch_start(self, *_: object) -> None:
        self._waited += time.perf_counter() - self._last

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: object) -> None:
        self._last = time.perf_counter()
        self._count += 1
        if trainer.log_every_n_steps < sys.maxsize:
            pl_module.log_dict(
                {
                    "batch_time": (self._last - self._logged_at) / self._count,
                    "data_time": self._waited / self._count,
                    "batches": float(trainer.fit_loop.total_batch_idx + 1),
                }
            )
            self._logged_at, self._count, self._waited = self._last, 0, 0.0


class ProgressLines(Callback):
    """Print the loss of the last batch at each tenth of an epoch; after each batch in epochs of up to 15 batches; after
    each hundredth batch in epochs of unknown length.

    Args:
        ranks: ranks that print it; empty: none.
    """

    def __init__(self, ranks: Sequence[int] = (0,)):
        self.ranks = tuple(ranks)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: object, batch: object, batch_idx: int) -> None:
        done, of = batch_idx + 1, trainer.num_training_batches
        is_finite = math.isfinite(of)
        due = of <= 15 or done * 10 // of > batch_idx * 10 // of if is_finite else done % 100 == 0
        if due and trainer.global_rank in self.ranks:
            share = f" of {of} ({100 * done // of} %)" if is_finite else ""
            loss = batch_loss(trainer, outputs)
            log.info("epoch %d, batch %d%s: train_loss %.4f", trainer.current_epoch + 1, done, share, loss)
