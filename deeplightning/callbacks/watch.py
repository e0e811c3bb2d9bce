"""Callbacks to name under `train.callbacks` by whoever wants to look closer: losses, parameters, gradients, timings."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch

log = logging.getLogger("deeplightning.watch")


def batch_loss(trainer: Any, outputs: Any) -> torch.Tensor:
    """The loss of one batch from what `on_train_batch_end` is handed: Lightning has divided it by the accumulation."""
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    return loss.detach() * trainer.accumulate_grad_batches if loss is not None else torch.tensor(float("nan"))


class SyncedLoss(pl.Callback):
    """A line per optimizer step: the loss, meaned over accumulated batches and over processes.

    Args:
        prefix: what the line begins with.
        ranks: processes that write it; none: nobody.
    """

    def __init__(self, prefix: str = "loss", ranks: Sequence[int] = (0,)):
        self.prefix, self.ranks = prefix, tuple(ranks)
        self._losses: list[torch.Tensor] = []
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._losses, self._step = [], trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._losses.append(batch_loss(trainer, outputs))
        if trainer.global_step == self._step:
            return
        mean = trainer.strategy.reduce(torch.stack(self._losses).mean(), reduce_op="mean")
        if trainer.global_rank in self.ranks:
            log.info("%s step %d: %.6f", self.prefix, self._step, mean)
        self._losses, self._step = [], trainer.global_step


class SmoothedLoss(pl.Callback):
    """Logs `train_loss_ema`: each batch's loss moves it by `weight`; the first of an epoch is taken as it is."""

    def __init__(self, weight: float = 0.1):
        if not 0 < weight <= 1:
            raise ValueError(f"weight must be above 0 and at most 1, not {weight}")
        self.weight = weight
        self._value: torch.Tensor | None = None

    def on_train_epoch_start(self, *_: Any) -> None:
        self._value = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = batch_loss(trainer, outputs)
        self._value = loss if self._value is None else self.weight * loss + (1 - self.weight) * self._value
        pl_module.log("train_loss_ema", self._value)


class ListParameters(pl.Callback):
    """A line per trainable tensor at the start: name, shape, device, type."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, p in pl_module.named_parameters():
            if p.requires_grad:
                log.info("%s %s %s %s", name, tuple(p.shape), p.device, str(p.dtype).removeprefix("torch."))


class GradientNorms(pl.Callback):
    """Logs `grad_norm/<name>` of each trainable tensor before each optimizer step, and `grad_norm` of all.

    Args:
        norm_type: which norm.
    """

    def __init__(self, norm_type: float = 2.0):
        self.norm_type = norm_type

    def on_before_optimizer_step(self, trainer: Any, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if not trainer.log_every_n_steps:
            return
        found = {n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}
        norms = {f"grad_norm/{n}": torch.linalg.vector_norm(g, self.norm_type) for n, g in found.items()}
        if norms:
            norms["grad_norm"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), self.norm_type)
        pl_module.log_dict(norms)


class Timings(pl.Callback):
    """Logs `batch_time` and `data_time`, seconds per batch since the last logged step, and `batches` so far."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self._waiting_since = self._logged_at = time.perf_counter()
        self._data = 0.0
        self._count = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._data += time.perf_counter() - self._waiting_since

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        now = self._waiting_since = time.perf_counter()
        self._count += 1
        if trainer.log_every_n_steps:
            whole = (now - self._logged_at) / self._count
            done = float(trainer.fit_loop.total_batch_idx + 1)
            pl_module.log_dict({"batch_time": whole, "data_time": self._data / self._count, "batches": done})
            self._logged_at, self._data, self._count = now, 0.0, 0
