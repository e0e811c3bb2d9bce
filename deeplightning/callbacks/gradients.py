"""Gradient norm logging, adaptive gradient clipping and learning rate warm-up: Lightning clips only by value or by the
norm of all gradients, and has no warm-up."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deeplightning.faults import ConfigError, Fault
from deeplightning.private.lightning import logged_steps

MIN_WEIGHT_NORM = 1e-3
"""Lower bound of the weight norm used for clipping: otherwise units with zero weights would never learn."""


class GradientNorm(Callback):
    """Log the L2 norm of each optimizer's gradients at logged steps."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.log_every_n_steps == sys.maxsize:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        name = "grad_norm"
        if len(trainer.optimizers) > 1:
            number = next((n for n, other in enumerate(trainer.optimizers) if other is optimizer), 0)
            name += f"-{optimizer.param_groups[0].get('name', number)}"
        trainer.callback_metrics[name] = torch.tensor(norm)
        for logger in trainer.loggers:
            logger.log_metrics({name: norm}, logged_steps(trainer))


class AdaptiveClip(Callback):
    """Clip the gradient of each unit to a fraction of its weight norm. A unit is a row of a matrix or of convolution
    kernels, shape (units, …); a vector or a scalar is one unit.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021,
    https://arxiv.org/abs/2102.06171. Unlike there, the last layer is clipped too.

    Args:
        share: the maximum ratio of gradient norm to weight norm, above 0.
    """

    def __init__(self, share: float):
        self.share = share

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    largest = _norms(parameter).clamp(min=MIN_WEIGHT_NORM) * self.share
                    norms = _norms(parameter.grad)
                    parameter.grad.mul_(torch.where(norms > largest, largest / norms.clamp(min=1e-12), 1.0))


def _norms(values: Tensor) -> Tensor:
    """Return the L2 norm of each unit, in a shape that broadcasts with `values`."""
    if values.ndim <= 1:
        return torch.linalg.vector_norm(values)
    return torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)), keepdim=True)


class Warmup(Callback):
    """Scale the learning rate of the first W optimizer steps by 1/W, 2/W, … 1, whatever the schedule.

    The rate is scaled only during a step and its logging, so that the schedule never sees it, and a resumed run needs
    only the step number.

    Args:
        shares: fractions of the training's steps, from 0 to 1, by the name of an optimizer's first group; "" for all.
    """

    def __init__(self, shares: Mapping[str, float]):
        self.shares = shares
        self._warmup_steps: list[tuple[Optimizer, float]] = []  # optimizers with their number of warm-up steps
        self._hooks: list[RemovableHandle] = []
        self._original_rates: dict[int, list[float]] = {}  # original rates by optimizer, while they are scaled

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the warm-up of each optimizer; raise ConfigError if the training has no known length."""
        total = trainer.estimated_stepping_batches
        if not math.isfinite(total):
            message = "a fraction needs a training of known length; set train.max_steps"
            raise ConfigError(Fault(message, "model.scheduler.warmup"))
        for optimizer in trainer.optimizers:
            share = self.shares.get("", self.shares.get(optimizer.param_groups[0].get("name", ""), 0.0))
            if share > 0:
                self._warmup_steps.append((optimizer, max(1, math.ceil(share * total))))
                self._hooks.append(optimizer.register_step_post_hook(lambda stepped, *_: self._restore(stepped)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # With manual optimization, `global_step` counts the steps of all optimizers.
        step = trainer.global_step // (1 if pl_module.automatic_optimization else len(trainer.optimizers))
        for optimizer, steps in self._warmup_steps:
            if step < steps:
                self._original_rates[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * ((step + 1) / steps)

    def _restore(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._original_rates.pop(id(optimizer), ()), strict=False):
            group["lr"] = rate

    def _restore_all(self, *_: Any, **__: object) -> None:
        for optimizer, _steps in self._warmup_steps:
            self._restore(optimizer)

    on_train_batch_end = _restore_all  # batches without a step, while gradients accumulate
    on_exception = _restore_all  # a checkpoint may be saved then

    def on_train_end(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._warmup_steps = [], []
