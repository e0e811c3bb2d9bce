"""Weigh each batch in a step's gradient, log the norm of gradients, clip them by the norms of weights, and warm the
rate up: Lightning weighs all batches alike, clips by value or by the norm of all gradients, and has no warm-up."""

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from deeplightning.callbacks.watch import samples_in
from deeplightning.engine.process_group import scale_gradients
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


class SampleWeights(Callback):
    """Make the gradient of each optimizer step the mean over what it sees, on however many processes and in however
    many accumulated batches that lies.

    Strategies take the mean over processes, and Lightning divides each loss by the number of batches to accumulate, as
    if all weighed the same and an epoch's last step had as many. So each loss, a mean over its own batch, is weighed on
    its way back; the loss itself stays as it is. A batch weighs what its loss divides by, where the task has
    `weighed_losses`, else its samples.

    Where the loader tells beforehand how many these are, processes need not ask each other. Else batches are weighed in
    proportion to the first ones of the step, and gradients are corrected when all of them are known.
    """

    def __init__(self) -> None:
        self._samples_of: Any = None
        self._samples = 0  # of the batch under way, where the loader does not tell
        self._batches = 0  # of the step under way; its first ones, and all of them, weigh:
        self._first = self._sum = torch.zeros(())
        self._passes = 0  # backward passes of the batch under way

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._find_sampler(trainer)  # Lightning skips the next hook where a run resumes inside an epoch

    def _find_sampler(self, trainer: Trainer, *_: object, **__: object) -> None:
        self._samples_of = _samples_of(trainer.train_dataloader)

    on_train_epoch_start = _find_sampler

    def on_train_batch_start(self, trainer: Trainer, pl_module: object, batch: object, batch_idx: int) -> None:
        self._passes = 0
        if self._samples_of is None:
            self._samples = samples_in(batch) or 1

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Scale the gradient by the samples of the batch; raise ConfigError if the optimizer asks for a step's loss
        twice, and only its last batch is at hand."""
        if not pl_module.automatic_optimization or not loss.requires_grad:
            return
        self._passes += 1
        if self._passes > 1 and trainer.accumulate_grad_batches > 1:
            name = type(trainer.optimizers[0]).__name__
            message = f"{name} calls its closure several times a step, where only the last accumulated batch is at hand"
            raise ConfigError(Fault(f"{message}; set 1, and a larger data.batch_size", "train.accumulator_factor"))
        parts: list[tuple[torch.Tensor, torch.Tensor]] = getattr(pl_module, "weighed_losses", [])
        if len(parts) == 1:
            self._weigh(trainer, loss, parts[0][1])
        elif self._samples_of is None and not parts:
            self._weigh(trainer, loss, torch.tensor(self._samples, dtype=torch.float64, device=loss.device))
        else:
            _scale_gradient(loss, _weight(trainer, self._samples_of, among_processes=not parts))
            if parts and trainer.world_size > 1:
                own = torch.stack([weight for _, weight in parts])
                for (part, _), weight in zip(parts, own / _or_one(_mean(trainer, own)), strict=True):
                    _scale_gradient(part, weight)

    def _weigh(self, trainer: Trainer, loss: torch.Tensor, own: torch.Tensor) -> None:
        """Let a batch of this weight take part in the step's mean."""
        factor = trainer.accumulate_grad_batches
        if trainer.world_size * factor == 1:
            return
        if self._batches == 0:
            self._first, self._sum = _or_one(_mean(trainer, own)), torch.zeros_like(own)
        self._batches += 1
        self._sum += own
        _scale_gradient(loss, factor * own / self._first)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        batches, self._batches = self._batches, 0
        if batches > 1:
            scale = float(self._first / _or_one(_mean(trainer, self._sum)))
            scale_gradients(trainer.strategy, optimizer, scale)


def _scale_gradient(loss: torch.Tensor, weight: float | torch.Tensor) -> None:
    if loss.requires_grad and (isinstance(weight, torch.Tensor) or weight != 1):
        loss.register_hook(lambda gradient: (gradient * weight).to(gradient.dtype))


def _mean(trainer: Any, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean over the processes that have other data."""
    return weights if trainer.world_size == 1 else trainer.strategy.reduce(weights.clone(), reduce_op="mean")


def _or_one(weights: torch.Tensor) -> torch.Tensor:
    return weights.where(weights > 0, 1)


def _samples_of(loader: Any) -> Callable[[int], tuple[int, float]] | None:
    """Return how many samples an epoch's batch has in this process and on average over all, see
    `deeplightning.data.samplers.BatchIndices.samples_of`; None: the loader does not tell it beforehand."""
    sampler: Any = getattr(loader, "sampler", None)
    if (found := getattr(sampler, "samples_of", None)) is not None:
        return found  # type: ignore[no-any-return]
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    size, samples = loader.batch_sampler.batch_size, len(sampler)
    # Lightning's samplers give each process as many.
    return functools.partial(_even_samples, size, samples)  # a trainer can be pickled


def _even_samples(size: int, samples: int, batch: int) -> tuple[int, float]:
    own = min(size, samples - batch * size)
    return own, own


def _weight(
    trainer: Trainer, samples_of: Callable[[int], tuple[int, float]] | None, among_processes: bool = True
) -> float:
    """Return by how much the samples of the batch under way are more than what the averages take it for.

    Args:
        among_processes: compare its samples with those of other processes, not only with those of other batches.
    """
    factor, batch = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_idx
    first = batch - batch % factor
    together = range(first, int(min(first + factor, trainer.num_training_batches)))
    if samples_of is None:
        return factor / len(together)
    own, average = samples_of(batch)
    return (own if among_processes else average) * factor / sum(average for _, average in map(samples_of, together))
