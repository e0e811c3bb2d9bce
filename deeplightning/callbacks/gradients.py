"""Log the norm of gradients, clip them by the norms of weights, warm the rate up: Lightning clips by value or by the
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

LEAST_NORM = 1e-3
"""A unit whose weights have a smaller norm is clipped as if they had this one, or zeros would never learn."""


class GradientNorm(Callback):
    """Log the second norm of an optimizer's gradients, at the steps that are logged."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer.log_every_n_steps == sys.maxsize:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        name = "grad_norm"
        if len(trainer.optimizers) > 1:
            number = next((n for n, known in enumerate(trainer.optimizers) if known is optimizer), 0)
            name += f"-{optimizer.param_groups[0].get('name', number)}"
        trainer.callback_metrics[name] = torch.tensor(norm)
        for logger in trainer.loggers:
            logger.log_metrics({name: norm}, logged_steps(trainer))


class AdaptiveClip(Callback):
    """Clip the gradient of each unit to a share of the norm of its weights. A unit is a row of a matrix or of a
    convolution's kernels, shape (units, …); a vector or a number is one unit.

    Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization", 2021,
    https://arxiv.org/abs/2102.06171. It clips every parameter, the last layer's too.

    Args:
        share: the largest norm of a gradient divided by that of the weights, above 0.
    """

    def __init__(self, share: float):
        self.share = share

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    largest = _norms(parameter).clamp(min=LEAST_NORM) * self.share
                    norms = _norms(parameter.grad)
                    parameter.grad.mul_(torch.where(norms > largest, largest / norms.clamp(min=1e-12), 1.0))


def _norms(values: Tensor) -> Tensor:
    """Return the second norm of each unit, in a shape that multiplies `values`."""
    if values.ndim <= 1:
        return torch.linalg.vector_norm(values)
    return torch.linalg.vector_norm(values, dim=tuple(range(1, values.ndim)), keepdim=True)


class Warmup(Callback):
    """Scale the rate of the first optimizer steps: of W by 1/W, 2/W, … 1, whatever the schedule gives.

    The rate is scaled for the time of a step and the logging of it alone, so that a schedule never sees it, and a
    resumed run needs to know no more than the number of its step.

    Args:
        shares: of the training's steps, from 0 to 1, by the name of the optimizer's first group; "": of all.
    """

    def __init__(self, shares: Mapping[str, float]):
        self.shares = shares
        self._of: list[tuple[Optimizer, float]] = []  # optimizers, with their number of steps
        self._hooks: list[RemovableHandle] = []
        self._rates: dict[int, list[float]] = {}  # of an optimizer's groups, while they are scaled

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the warm-up of each optimizer; raise ConfigError if the training has no known length."""
        total = trainer.estimated_stepping_batches
        if not math.isfinite(total):
            message = "a share of a training without end; set train.max_steps"
            raise ConfigError(Fault(message, "model.scheduler.warmup"))
        for optimizer in trainer.optimizers:
            share = self.shares.get("", self.shares.get(optimizer.param_groups[0].get("name", ""), 0.0))
            if share > 0:
                self._of.append((optimizer, max(1, math.ceil(share * total))))
                self._hooks.append(optimizer.register_step_post_hook(lambda stepped, *_: self._restore(stepped)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # A task that steps several itself counts the steps of all.
        step = trainer.global_step // (1 if pl_module.automatic_optimization else len(trainer.optimizers))
        for optimizer, steps in self._of:
            if step < steps:
                self._rates[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * ((step + 1) / steps)

    def _restore(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates.pop(id(optimizer), ()), strict=False):
            group["lr"] = rate

    def _restore_all(self, *_: Any, **__: object) -> None:
        for optimizer, _steps in self._of:
            self._restore(optimizer)

    on_train_batch_end = _restore_all  # it accumulates
    on_exception = _restore_all  # a checkpoint may be saved

    def on_train_end(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._of = [], []
