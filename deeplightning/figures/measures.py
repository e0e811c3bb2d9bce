"""Compute metrics per class and by confidence with numpy, which imports fast; `tests/unit/test_figures.py` compares
them with scikit-learn and torchmetrics.

N samples, K classes, M bins.
"""

from typing import NamedTuple

import numpy as np

BINS = 15
"""Number of confidence bins, as in Guo et al. 2017, https://arxiv.org/abs/1706.04599, and in torchmetrics."""


class PerClass(NamedTuple):
    """Metrics of each class, float (K,) from 0 to 1, 0 if undefined; `support`, int (K,), is its number of samples."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return the confusion matrix, int (K, K): rows are true, columns predicted classes; both arguments int (N,)."""
    return np.bincount(labels * classes + predicted, minlength=classes * classes).reshape(classes, classes)


def from_counts(right: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> PerClass:
    """Compute precision, recall and F1 from numbers of right, predicted and true samples per class, int (K,) each."""
    return PerClass(_share(right, predicted), _share(right, true), _share(2 * right, predicted + true), true)


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.where(whole > 0, part / np.maximum(whole, 1), 0.0)


class Reliability(NamedTuple):
    """Accuracy by confidence."""

    confidence: np.ndarray  # mean probability in each bin, float (M,); 0 if the bin is empty
    accuracy: np.ndarray  # share of right answers in each bin, float (M,)
    samples: np.ndarray  # number of samples in each bin, int (M,)
    error: float  # expected calibration error (ECE) in [0, 1]: mean difference of both, weighted by samples


def reliability(probability: np.ndarray, is_right: np.ndarray, bins: int = BINS) -> Reliability:
    """Compute the reliability from the probability of each answer, float (N,), and whether it is right, bool (N,)."""
    which = np.clip(np.searchsorted(np.linspace(0, 1, bins + 1), probability, side="right") - 1, 0, bins - 1)
    count = np.bincount(which, minlength=bins)
    confidence = np.bincount(which, probability, bins) / np.maximum(count, 1)
    accuracy = np.bincount(which, is_right, bins) / np.maximum(count, 1)
    error = float((np.abs(confidence - accuracy) * count).sum() / max(1, len(probability)))
    return Reliability(confidence, accuracy, count, error)


def most_confused(labels: np.ndarray, predicted: np.ndarray, most: int = 10) -> list[tuple[int, int, int]]:
    """Return the most frequent confusions as (true class, predicted class, count); both arguments int (N,)."""
    pairs, often = np.unique(np.stack([labels, predicted])[:, labels != predicted], axis=1, return_counts=True)
    order = np.argsort(-often, kind="stable")[:most]
    return [(int(true), int(other), int(n)) for (true, other), n in zip(pairs.T[order], often[order], strict=True)]
