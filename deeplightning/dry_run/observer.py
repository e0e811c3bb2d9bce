"""Check each step of an attempt: loss, gradients, weights, and what is logged."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import Metric

from deeplightning.dry_run.diagnosis import UNCONNECTED, Attempt, line_of_method, target_at, tensor_in_words
from deeplightning.faults import ConfigError, Fault
from deeplightning.words import stage_of


def check_numbers(attempt: Attempt) -> None:
    """Report logged values that are not single numbers, and losses that are not finite."""
    for name, value in attempt.trainer.callback_metrics.items():
        stage, rest = stage_of(name)
        metric = next((n for n in attempt.cfg.model.metrics or {} if rest in (n, f"{n}_epoch")), None)
        key = f"model.metrics.{metric}" if metric else "model.module"
        if value.numel() != 1:
            attempt.fault(
                f"{name} is {tensor_in_words(value)}, not one number" + ("; see its `average`" if metric else ""), key
            )
        elif stage in ("val", "test") and rest == "loss" and not math.isfinite(value):
            attempt.fault(f"{name} is {float(value)} on a batch of random values", "model.loss")


class Observer(pl.Callback):
    """Check a training step, and end the training after it."""

    def __init__(self, attempt: Attempt):
        self.attempt = attempt
        self.learned = False
        self.unused: list[str] = []
        self._weights: dict[str, torch.Tensor] = {}
        self._broken: str | None = None  # the first module that gave what is not finite

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        task = self.attempt.cfg.model.module.type
        if not any(optimizer.param_groups for optimizer in trainer.optimizers) and pl_module.automatic_optimization:
            raise ConfigError(
                Fault(f"{task}.configure_optimizers gives no optimizer: nothing would learn", "model.module")
            )
        taught = {id(p) for optimizer in trainer.optimizers for g in optimizer.param_groups for p in g["params"]}
        if taught and taught.isdisjoint(map(id, pl_module.parameters())):
            message = f"{task}.configure_optimizers: the optimizer has none of the task's parameters, so nothing learns"
            raise ConfigError(
                Fault(f"{message}{line_of_method(pl_module, 'configure_optimizers')}; are they copies?", "model.module")
            )
        self.attempt.stage = "in the training step"
        for config in trainer.lr_scheduler_configs:
            config.frequency, config.strict = 1, False  # each schedule steps; a missing metric is reported later
        self._weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        for name, module in pl_module.named_modules():
            if name and not isinstance(module, Metric):
                module.register_forward_hook(self._watch(name))

    def _watch(self, name: str) -> object:
        def hook(_: nn.Module, __: object, output: Any) -> None:
            numbers = isinstance(output, torch.Tensor) and output.is_floating_point()
            if self._broken is None and numbers and not torch.isfinite(output).all():
                self._broken = name

        return hook

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        attempt, self.learned = self.attempt, True
        if loss.numel() != 1:
            message = f"the loss is {tensor_in_words(loss)}, not one number; a loss's `reduction` is mostly mean"
            raise ConfigError(Fault(message, "model.loss" if attempt.cfg.model.loss else "model.module"))
        if trainer.global_step == 0 and not torch.isfinite(loss).all():
            raise ConfigError(self._not_finite(pl_module, float(loss.detach())))

    def _not_finite(self, module: pl.LightningModule, loss: float) -> Fault:
        message = f"the loss of the first training step is {loss}"
        bad = [name for name, p in module.named_parameters() if not torch.isfinite(p).all()]
        path = bad[0].rpartition(".")[0] if bad else self._broken
        owner = target_at(self.attempt, path) if path else None
        key = str(owner.name) if owner else "model.loss" if self.attempt.cfg.model.loss else "model.module"
        if bad:
            return Fault(f"{message}: {bad[0]} begins with values that are not finite", key)
        if path:
            kind = type(module.get_submodule(path)).__name__
            return Fault(f"{message}: {path} ({kind}) is the first module whose output is not finite", key)
        return Fault(message, key)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        learning = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        self.unused = [name for name, p in learning.items() if p.grad is None]
        if len(self.unused) == len(learning):
            raise ConfigError(Fault(UNCONNECTED, "model.loss" if self.attempt.cfg.model.loss else "model.module"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        self.attempt.logged["step"] = set(trainer.callback_metrics)
        self.attempt.stage = "in the validation step"
        trainer.should_stop = True
        # How far a step goes is the learning rate's business: the network is judged as it was built.
        parameters = dict(pl_module.named_parameters())
        with torch.no_grad():
            for name, value in self._weights.items():
                parameters[name].copy_(value)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attempt.logged["validation"] = set(trainer.callback_metrics)
        self.attempt.stage = "at the end of the epoch"
        check_numbers(self.attempt)  # before Lightning stumbles over what is not one number
        if self.attempt.faults:
            raise ConfigError(self.attempt.faults.pop())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        attempt = self.attempt
        if attempt.batch is not None and not attempt.faults:  # a run saves while the task is on its device
            attempt.stage, attempt.saved = "while a checkpoint is saved", str(attempt.folder / "last.ckpt")
            trainer.save_checkpoint(attempt.saved)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        keep = trainer.strategy.checkpoint_io.save_checkpoint
        keep(checkpoint, "")  # Lightning asks the first rank alone

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attempt.logged = {moment: set() for moment in ("step", "validation", "epoch")}
