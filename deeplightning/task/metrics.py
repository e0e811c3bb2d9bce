"""Metrics that are exact means over batches of any size and all processes. B batch, K classes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric


class FixedDtypeDict(nn.ModuleDict):
    """Metrics that are moved between devices but keep their dtype: sums in bf16 would stop growing.

    torchmetrics ignores `half()` and the like, but not `to(torch.bfloat16)`, which Lightning casts networks with (1.9).
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FixedDtypeDict":
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)


class _Sums(Metric):
    """Metric of a few sums. Its updates are cheap compared with the step of a small network."""

    full_state_update = False

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_computed", "_update_count"):  # set at each update; torch would search its parameters
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


class Accuracy(_Sums):
    """Share of samples whose largest logit is the label's, over all samples and processes; in [0, 1]."""

    correct: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (B, K), labels int64 (B,)."""
        self.correct.add_((logits.argmax(1) == labels).sum())
        self.total.add_(labels.numel())

    def compute(self) -> Tensor:
        return self.correct / self.total


class Collected(Metric):
    """Outputs and truth of all samples and processes; derived metrics compute a number from them."""

    full_state_update = False
    outputs: list[Tensor]
    truth: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("outputs", [], dist_reduce_fx="cat")
        self.add_state("truth", [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, truth: Tensor) -> None:
        """Add a batch: the measured outputs, (B, …), and the truth, (B, …)."""
        self.outputs.append(outputs)
        self.truth.append(truth)

    def forward(self, outputs: Tensor, truth: Tensor) -> Any:
        """Add a batch and return its own value; torchmetrics would copy all earlier batches (1.9)."""
        before, self.outputs, self.truth = (self.outputs, self.truth), [outputs], [truth]
        value, (self.outputs, self.truth) = type(self).compute(self), before
        self.update(outputs, truth)
        return value

    def compute(self) -> Any:
        """Return outputs and truth, (N, …)."""
        return tuple(v if isinstance(v, Tensor) else torch.cat(v) for v in (self.outputs, self.truth))


class SampleMean(_Sums):
    """Mean of the values of batches over all processes, weighted by their samples or by another denominator.

    A NaN in one batch makes the result NaN; torchmetrics' MeanMetric leaves it out or forgets the weights (1.9).

    Args:
        factors: of the means whose weighted sum is computed, each with its own denominator; empty: a single mean.
    """

    total: Tensor
    samples: Tensor

    def __init__(self, factors: Sequence[float] = ()) -> None:
        super().__init__()
        self.factors = tuple(factors)
        # float64: a run that resumes inside an epoch adds in another order, and must give the same digits.
        zero = torch.zeros([len(factors)] if factors else [], dtype=torch.float64)
        self.add_state("total", zero, dist_reduce_fx="sum")
        self.add_state("samples", zero.clone(), dist_reduce_fx="sum")

    def update(self, value: Tensor, samples: int | Tensor) -> None:
        """Add a batch: its mean, float (), and its number of samples or other weight; both (K,) for K factors."""
        if isinstance(samples, Tensor):
            self.total.add_(torch.where(samples > 0, value * samples, 0.0))
        else:
            self.total.add_(value, alpha=samples)  # computed in float64, in one kernel
        self.samples.add_(samples)

    def compute(self) -> Tensor:
        means = self.total / self.samples
        return (means @ means.new_tensor(self.factors) if self.factors else means).float()
