"""How often a training set has each class, or label of several, and what weights make them count alike.

N samples, K classes or labels.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytorch_lightning as pl

COLUMNS = ("label", "mask")
"""The entries of a batch that have classes: of samples, int64 (B,), or of pixels, int64 (B, H, W)."""

LABELS = ("label", "target")
"""The entries of a batch that may have several labels of each sample: float (B, K) of 0 and 1."""

_BATCH = 256


def counted(labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Adds labels to counts.

    Args:
        labels: whole numbers, any shape; negative ones, which losses leave out, do not count.
        counts: int64 (K,), so far.

    Returns:
        int64 (K',), at least as long as `counts`.
    """
    found = np.bincount(labels[labels >= 0].ravel(), minlength=len(counts))
    found[: len(counts)] += counts
    return found


def class_counts(data: "pl.LightningDataModule", num_classes: int = 0) -> np.ndarray | None:
    """How many samples, or pixels, of each class the training set has.

    A set with `labels` is not read. Of another data module's own set each sample is read once, whatever `data.sampler`
    is; of one without `dataset` the batches of its `train_dataloader`.

    Args:
        data: a data module that is set up.
        num_classes: K; 0: the largest label and one more.

    Returns:
        int64 (K,), without labels that are none of the classes; None: the set has no labels that are whole numbers.
    """
    counts, is_found = np.zeros(num_classes, np.int64), False
    for labels in _labels(data, COLUMNS):
        if labels.dtype.kind not in "iub":
            return None
        counts, is_found = counted(labels.astype(np.int64), counts), True
    if not is_found:
        return None
    return counts[:num_classes] if num_classes else counts


def class_weights(counts: np.ndarray) -> list[float]:
    """n / (k * count) of each class, for n samples and k classes that occur, to 8 digits; 0 of a class without samples.

    Args:
        counts: int64 (K,).
    """
    occurring = max(1, int((counts > 0).sum()))
    return [float(f"{counts.sum() / (occurring * count):.8g}") if count else 0.0 for count in counts]


def label_counts(data: Any) -> tuple[np.ndarray, int] | None:
    """How many samples of the training set have each label, where it may have several.

    The set is read as `class_counts` reads it.

    Args:
        data: a data module that is set up.

    Returns:
        int64 (K,) and N; None: the set has no labels (B, K) of 0 and 1. A single target (B,) of floats is a label too.
    """
    positives, samples = np.zeros(0, np.int64), 0
    for labels in _labels(data, LABELS):
        if labels.ndim == 1 and labels.dtype.kind == "f":
            labels = labels[:, None]
        if labels.ndim != 2 or not ((labels == 0) | (labels == 1)).all():
            return None
        positives = (labels == 1).sum(0) + (positives if samples else 0)
        samples += len(labels)
    return (positives, samples) if samples else None


def positive_weights(positives: np.ndarray, samples: int) -> list[float]:
    """Negatives / positives of each label, to 8 digits, as `BCEWithLogitsLoss` takes them: with this `pos_weight` the
    samples that have a label weigh as much as those that do not; 0 of a label without positives.

    Args:
        positives: int64 (K,), how many samples have each label.
        samples: N.
    """
    return [float(f"{(samples - count) / count:.8g}") if count else 0.0 for count in positives.tolist()]


def _labels(data: Any, columns: tuple[str, ...]) -> Iterator[np.ndarray]:
    """The labels of the training set, in parts: a column of the set, or else the first of `columns` that its batches
    have."""
    dataset: Any = data.dataset("train") if callable(getattr(data, "dataset", None)) else None
    from lightning_fabric.utilities.data import sized_len  # commands import this module before the stand-ins are there

    from deeplightning.batches import by_name

    size = sized_len(dataset) or 0
    column: object = getattr(dataset, "labels", None)
    if size and hasattr(column, "__len__") and len(column) == size:
        yield np.asarray(column)
        return
    batches = (dataset[list(range(n, min(size, n + _BATCH)))] for n in range(0, size, _BATCH))
    for batch in batches if size else data.train_dataloader():
        batch = by_name(batch, ("input", columns[0])) or {}
        name = next((name for name in columns if name in batch), None)
        if name is None:
            return
        labels = np.asarray(batch[name])
        yield labels[np.asarray(batch["index"]) >= 0] if "index" in batch else labels
