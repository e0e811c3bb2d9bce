"""Weight each batch in the gradient of a step: Lightning weights all batches equally."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import StochasticWeightAveraging
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from deeplightning.batches import samples_in
from deeplightning.engine.process_group import scale_gradients
from deeplightning.faults import ConfigError, Fault


class SampleWeights(Callback):
    """Make the gradient of each optimizer step the mean over its samples, however they are split over processes and
    accumulated batches.

    Strategies average over processes, and Lightning divides each loss by the number of batches to accumulate, as if all
    batches had the same size and the last step of an epoch were complete. Therefore the gradient of each loss, a mean
    over its own batch, is weighted in the backward pass; the loss itself does not change. The weight of a batch is the
    divisor of its loss if the task has `weighed_losses`, else its number of samples.

    If the loader gives the batch sizes in advance, processes need not communicate. Otherwise batches of our tasks are
    weighted relative to the first ones of the step, and the gradients are corrected when all weights are known. Those
    of another module count alike, as in Lightning: the first dimension of its tensors need not be that of the samples.
    """

    def __init__(self) -> None:
        self._samples_of: Any = None
        self._samples = 0  # of the current batch, if the loader does not give it
        self._batches = 0  # of the current step; then the mean weight of its first batches, and the sum of all
        self._first = self._sum = torch.zeros(())
        self._passes = 0  # backward passes of the current batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._find_sampler(trainer, pl_module)  # Lightning skips the next hook if a run resumes inside an epoch

    def _find_sampler(self, trainer: Any, pl_module: LightningModule) -> None:
        self._samples_of, callbacks = _samples_of(trainer.train_dataloader), trainer.callbacks
        if pl_module.automatic_optimization and any(isinstance(c, StochasticWeightAveraging) for c in callbacks):
            pl_module.zero_grad()  # StochasticWeightAveraging's own epoch steps without a backward pass

    on_train_epoch_start = _find_sampler

    def on_train_batch_start(self, trainer: Trainer, pl_module: object, batch: object, batch_idx: int) -> None:
        self._passes = 0
        if self._samples_of is None:
            self._samples = (hasattr(pl_module, "weighed_losses") and samples_in(batch)) or 1

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Scale the gradient by the samples of the batch. Raise ConfigError if the optimizer calls its closure several
        times while batches are accumulated."""
        if not pl_module.automatic_optimization or not loss.requires_grad:
            return
        self._passes += 1
        if self._passes > 1 and trainer.accumulate_grad_batches > 1:
            name = type(trainer.optimizers[0]).__name__
            message = f"{name} calls its closure several times a step, but only the last accumulated batch is available"
            raise ConfigError(Fault(f"{message}; set 1, and a larger data.batch_size", "train.accumulator_factor"))
        parts: list[tuple[torch.Tensor, torch.Tensor]] = getattr(pl_module, "weighed_losses", [])
        if len(parts) == 1:
            self._weight_batch(trainer, loss, parts[0][1])
        elif self._samples_of is None and not parts:
            self._weight_batch(trainer, loss, torch.tensor(self._samples, dtype=torch.float64, device=loss.device))
        else:
            _scale_gradient(loss, _weight(trainer, self._samples_of, among_processes=not parts))
            if parts and trainer.world_size > 1:
                own = torch.stack([weight for _, weight in parts])
                for (part, _), weight in zip(parts, own / _positive_or_one(_mean(trainer, own)), strict=True):
                    _scale_gradient(part, weight)

    def _weight_batch(self, trainer: Trainer, loss: torch.Tensor, own: torch.Tensor) -> None:
        """Scale the gradient of a batch by its weight, relative to the first batches of the step."""
        factor = trainer.accumulate_grad_batches
        if trainer.world_size * factor == 1:
            return
        if self._batches == 0:
            self._first, self._sum = _positive_or_one(_mean(trainer, own)), torch.zeros_like(own)
        self._batches += 1
        self._sum += own
        _scale_gradient(loss, factor * own / self._first)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        batches, self._batches = self._batches, 0
        if batches > 1:
            scale = float(self._first / _positive_or_one(_mean(trainer, self._sum)))
            scale_gradients(trainer.strategy, optimizer, scale)


def _scale_gradient(loss: torch.Tensor, weight: float | torch.Tensor) -> None:
    if loss.requires_grad and (isinstance(weight, torch.Tensor) or weight != 1):
        loss.register_hook(lambda gradient: (gradient * weight).to(gradient.dtype))


def _mean(trainer: Any, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean over the data-parallel processes."""
    return weights if trainer.world_size == 1 else trainer.strategy.reduce(weights.clone(), reduce_op="mean")


def _positive_or_one(weights: torch.Tensor) -> torch.Tensor:
    return weights.where(weights > 0, 1)


def _samples_of(loader: Any) -> Callable[[int], tuple[int, float]] | None:
    """Return a function that gives the samples of an epoch's batch in this process and on average over all (see
    `deeplightning.data.samplers.BatchIndices.samples_of`), or None if they are not known in advance."""
    sampler: Any = getattr(loader, "sampler", None)
    if (found := getattr(sampler, "samples_of", None)) is not None:
        return found  # type: ignore[no-any-return]
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if type(loader.batch_sampler) is not BatchSampler or not hasattr(sampler, "__len__"):
        return None
    size, samples = loader.batch_sampler.batch_size, len(sampler)
    # Lightning's samplers give each process the same number.
    return functools.partial(_equal_samples, size, samples)  # a trainer can be pickled


def _equal_samples(size: int, samples: int, batch: int) -> tuple[int, float]:
    own = min(size, samples - batch * size)
    return own, own


def _weight(
    trainer: Trainer, samples_of: Callable[[int], tuple[int, float]] | None, among_processes: bool = True
) -> float:
    """Return the weight of the current batch: its share of the step's samples, times the accumulation factor.
    `among_processes`: use the samples of this process, not the average over all processes."""
    factor, batch = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_idx
    first = batch - batch % factor
    together = range(first, int(min(first + factor, trainer.num_training_batches)))
    if samples_of is None:
        return factor / len(together)
    own, average = samples_of(batch)
    return (own if among_processes else average) * factor / sum(average for _, average in map(samples_of, together))
