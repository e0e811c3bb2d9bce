"""What the mean of a loss divides by: the weight of a batch where means of batches are combined.

Shapes: B is the batch size; the other dimensions depend on the loss.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_BY_CLASS = tuple(
    kind
    for name in ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")  # older torch lacks the last
    if (kind := getattr(nn, name, None)) is not None
)
_BY_ELEMENT = (
    *(nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss),
    *(nn.PoissonNLLLoss, nn.GaussianNLLLoss, nn.HingeEmbeddingLoss, nn.KLDivLoss),
)


CANNOT_WEIGH = (
    "the batches of the data have a weight for each sample, and {} cannot weigh samples: take a loss of torch.nn that "
    "is a mean over samples, pixels or elements, such as CrossEntropyLoss, BCEWithLogitsLoss or MSELoss, or leave the "
    "weights out of the batch"
)


def divides_by_samples(loss: nn.Module, uniform: bool) -> bool:
    """Return whether a loss's denominators are to each other as the numbers of samples, in batches of any data.

    Args:
        uniform: the truth of each sample has the same shape, and no class in it is negative.
    """
    if hasattr(loss, "denominator"):
        return False
    if _is(loss, _BY_CLASS):
        ignored: Any = loss.ignore_index
        return uniform and loss.weight is None and (ignored is None or ignored < 0)
    return uniform or not _is(loss, _BY_ELEMENT) or loss.reduction != "mean"


def denominator(loss: Any, outputs: Any, truth: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return what a loss divides by for a batch, float64 (): what its method `denominator` gives; of a loss of torch.nn
    with classes as truth, the sum of the weights of the classes that it does not ignore; of one that is a mean over
    elements, their number; else the number of samples.

    Args:
        weight: of each sample, (B,); it multiplies what the sample adds. None: 1 each.
    """
    samples: Any = len(truth) if weight is None else weight.sum(dtype=torch.float64)
    if hasattr(loss, "denominator"):
        found = loss.denominator(outputs, truth)
        if isinstance(found, Tensor):
            return found.detach().double()
    elif _is(loss, _BY_CLASS) and not truth.is_floating_point():
        counted = truth != (-100 if loss.ignore_index is None else loss.ignore_index)
        shares = counted if weight is None else counted * _along(weight.double(), counted)
        if loss.weight is None:
            return shares.sum().double()
        try:
            return (loss.weight.double()[truth.where(counted, 0)] * shares).sum()
        except IndexError:
            loss(outputs, truth)  # says what does not fit
            raise
    elif _is(loss, _BY_CLASS):
        found = truth[0, 0].numel() * samples  # probabilities, (B, K, …)
    else:
        found = samples * (truth[0].numel() if _is(loss, _BY_ELEMENT) and loss.reduction == "mean" else 1)
    return torch.as_tensor(found, dtype=torch.float64, device=truth.device)


def can_weigh(loss: Any) -> bool:
    """Return whether a loss is a mean that also gives a number for each sample, pixel or element."""
    return _is(loss, (*_BY_CLASS, *_BY_ELEMENT)) and loss.reduction == "mean"


def _along(weight: Tensor, values: Tensor) -> Tensor:
    """Return weights (B,) in the shape (B, 1, …), to multiply values (B, …)."""
    return weight.view(-1, *(1,) * (values.ndim - 1))


def mean(loss: Any, outputs: Any, truth: Tensor, divided_by: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute a loss of a batch. Losses of torch.nn give 0, not nan, where all classes are ignored or weigh 0.

    Args:
        divided_by: the `denominator` for these samples and weights.
        weight: of each sample, (B,), for a loss that `can_weigh`: what it adds is multiplied by this. None: 1 each.
    """
    if not _is(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        if weight is None:
            return loss(outputs, truth)
        loss = copy.copy(loss)
        loss.reduction = "none"
        each = loss(outputs, truth)  # (B, …)
    else:  # as functions, which compile in one graph
        own = {"weight": loss.weight, "ignore_index": loss.ignore_index, "reduction": "none"}
        if isinstance(loss, nn.NLLLoss):
            each = functional.nll_loss(outputs, truth, **own)
        else:
            each = functional.cross_entropy(outputs, truth, label_smoothing=loss.label_smoothing, **own)
    weighed = each if weight is None else each * _along(weight, each)
    found = weighed.sum(dtype=torch.float64) / divided_by.where(divided_by > 0, 1)
    return found.to(each.dtype if each.dtype == torch.float64 else torch.float32)


def _is(loss: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a loss computes what one of these computes; a derived class may divide by something else."""
    return any(isinstance(loss, kind) and type(loss).forward is kind.forward for kind in kinds)
