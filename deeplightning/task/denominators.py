"""Compute the denominator of a mean loss, which weights a batch when means of batches are combined.

Shapes: B is the batch size; the other dimensions depend on the loss.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_OF_CLASSES = ("CrossEntropyLoss", "NLLLoss", "LinearCrossEntropyLoss")  # older torch lacks the last
_BY_CLASS = tuple(kind for name in _OF_CLASSES if (kind := getattr(nn, name, None)) is not None)
_BY_ELEMENT = (
    *(nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss),
    *(nn.PoissonNLLLoss, nn.GaussianNLLLoss, nn.HingeEmbeddingLoss, nn.KLDivLoss),
)


CANNOT_WEIGH = (
    "the batches of the data have a weight for each sample, and {} cannot weigh samples: use a loss of torch.nn that "
    "is a mean over samples, pixels or elements, such as CrossEntropyLoss, BCEWithLogitsLoss or MSELoss, or remove the "
    "weights from the batch"
)


def divides_by_samples(loss: nn.Module, uniform: bool) -> bool:
    """Return whether a loss's denominator is proportional to the number of samples, whatever the batch.

    Args:
        uniform: whether the truth of each sample has the same shape and no class in it is negative.
    """
    if hasattr(loss, "denominator"):
        return False
    if _averages(loss, _BY_CLASS):
        ignored: Any = loss.ignore_index
        return uniform and loss.weight is None and (ignored is None or ignored < 0)
    return uniform or not _averages(loss, _BY_ELEMENT)


def denominator(loss: Any, outputs: Any, truth: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return what a loss divides by for a batch, float64 (): the result of its method `denominator`, if any; for
    torch.nn losses of classes, the total weight of the classes that are not ignored; for means over elements, their
    number; otherwise the number of samples.

    Args:
        weight: of each sample, (B,), which multiplies its contribution; None: 1 each.
    """
    samples: Any = len(truth) if weight is None else weight.sum(dtype=torch.float64)
    if hasattr(loss, "denominator"):
        found = loss.denominator(outputs, truth)
        if isinstance(found, Tensor):
            return found.detach().double()
    elif _averages(loss, _BY_CLASS) and not truth.is_floating_point():
        counted = truth != (-100 if loss.ignore_index is None else loss.ignore_index)
        shares = counted if weight is None else counted * _broadcastable(weight.double(), counted)
        if loss.weight is None:
            return shares.sum().double()
        try:
            return (loss.weight.double()[truth.where(counted, 0)] * shares).sum()
        except IndexError:
            loss(outputs, truth)  # raises an error that explains the misfit
            raise
    elif _averages(loss, _BY_CLASS):
        found = truth[0, 0].numel() * samples  # probabilities, (B, K, …)
    else:
        found = samples * (truth[0].numel() if _averages(loss, _BY_ELEMENT) else 1)
    return torch.as_tensor(found, dtype=torch.float64, device=truth.device)


def can_weigh(loss: Any) -> bool:
    """Return whether a loss is a mean that can also be computed per sample, pixel or element."""
    return _averages(loss, (*_BY_CLASS, *_BY_ELEMENT))


def _broadcastable(weight: Tensor, values: Tensor) -> Tensor:
    """Return weights (B,) in the shape (B, 1, …), to multiply values (B, …)."""
    return weight.view(-1, *(1,) * (values.ndim - 1))


def mean(loss: Any, outputs: Any, truth: Tensor, divided_by: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute a loss of a batch. Losses of torch.nn return 0, not nan, if all classes are ignored or have weight 0.

    Args:
        divided_by: the `denominator` for these samples and weights.
        weight: of each sample, (B,), which multiplies its contribution, if the loss `can_weigh`; None: 1 each.
    """
    if not _averages(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
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
    weighed = each if weight is None else each * _broadcastable(weight, each)
    found = weighed.sum(dtype=torch.float64) / divided_by.where(divided_by > 0, 1)
    return found.to(each.dtype if each.dtype == torch.float64 else torch.float32)


def _averages(loss: Any, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a loss is a mean with the `forward` of one of these classes; a derived class may differ."""
    is_known = any(isinstance(loss, kind) and type(loss).forward is kind.forward for kind in kinds)
    return is_known and loss.reduction == "mean"
