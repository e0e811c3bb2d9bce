"""Describe the result of the fixture `fit`: a training in this process, and observations during it."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch


class Recorder(pl.Callback):
    """Record the events of a training.

    Attributes:
        gradients: the optimizer's gradients at each step, in one vector.
        backward: the number of backward passes.
        rates: the learning rate of each optimizer step.
        saves: (epoch, optimizer steps) of each checkpoint that was written.
        validations: (epoch, optimizer steps) of each validation.
    """

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.backward = 0
        self.rates: list[float] = []
        self.saves: list[tuple[int, int]] = []
        self.validations: list[tuple[int, int]] = []

    def _record_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters:  # Lightning's mock optimizer has none
            self.gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
            self.rates.append(optimizer.param_groups[0].get("lr"))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers[0].register_step_post_hook(self._record_step)  # after the closure has computed them

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.backward += 1

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self.saves.append((trainer.current_epoch, trainer.global_step))

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.validations.append((trainer.current_epoch, trainer.global_step))


@dataclass
class Fitted:
    """Training that took place in this process."""

    trainer: pl.Trainer
    task: Any
    data: Any
    seen: Recorder
    folder: Path

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return steps and values of a metric."""
        with (self.folder / "metrics.csv").open(newline="") as file:
            return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]
