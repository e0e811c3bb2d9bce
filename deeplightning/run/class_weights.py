"""Counts of classes or labels in a training set, and weights that balance them.

N samples, K classes or labels.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytorch_lightning as pl

COLUMNS = ("label", "mask")
"""Entries of a batch with classes: of samples, int64 (B,), or of pixels, int64 (B, H, W)."""

LABELS = ("label", "target")
"""Entries of a batch with several labels per sample: float (B, K) of 0 and 1."""

_BATCH_SIZE = 256


def add_label_counts(labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return counts, int64 (K,) or longer, with integer labels of any shape added; negative labels do not count, as in
    losses."""
    found = np.bincount(labels[labels >= 0].ravel(), minlength=len(counts))
    found[: len(counts)] += counts
    return found


def class_counts(data: "pl.LightningDataModule", num_classes: int = 0) -> np.ndarray | None:
    """Return the number of samples, or pixels, of each class in the training set.

    A set with `labels` is not read. Otherwise each sample of the set is read once, whatever `data.sampler` is; of a
    data module without `dataset`, the batches of its `train_dataloader` are read.

    Args:
        data: a data module that is set up.
        num_classes: K; 0 for the largest label plus one.

    Returns:
        int64 (K,), without labels outside of the classes; None if the set has no integer labels.
    """
    counts, has_labels = np.zeros(num_classes, np.int64), False
    for labels in _labels(data, COLUMNS):
        if labels.dtype.kind not in "iub":
            return None
        counts, has_labels = add_label_counts(labels.astype(np.int64), counts), True
    return counts[: num_classes or None] if has_labels else None


def class_weights(counts: np.ndarray) -> list[float]:
    """Return n / (k * count) of each class to 8 digits, for counts int64 (K,), n samples and k non-empty classes; 0 for
    an empty class."""
    occurring = max(1, int((counts > 0).sum()))
    return [float(f"{counts.sum() / (occurring * count):.8g}") if count else 0.0 for count in counts]


def label_counts(data: Any) -> tuple[np.ndarray, int] | None:
    """Return the number of training samples with each label, int64 (K,), and N, where a sample may have several labels.

    None if the set, which is read as in `class_counts`, has no labels (B, K) of 0 and 1. A target of floats (B,) is one
    label.
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
    """Return negatives / positives of each label to 8 digits, for positives int64 (K,) of N samples; 0 if it has none.
    With this `pos_weight` of `BCEWithLogitsLoss`, samples with a label have the same total weight as those without."""
    return [float(f"{(samples - count) / count:.8g}") if count else 0.0 for count in positives.tolist()]


def _labels(data: Any, columns: tuple[str, ...]) -> Iterator[np.ndarray]:
    """Yield the labels of the training set in parts: its `labels`, or the first of `columns` that its batches have."""
    dataset: Any = data.dataset("train") if callable(getattr(data, "dataset", None)) else None
    from lightning_fabric.utilities.data import sized_len  # lazy: imported before the stand-ins are installed

    from deeplightning.batches import by_name

    size = sized_len(dataset) or 0
    column: object = getattr(dataset, "labels", None)
    if size and hasattr(column, "__len__") and len(column) == size:
        yield np.asarray(column)
        return
    batches = (dataset[list(range(n, min(size, n + _BATCH_SIZE)))] for n in range(0, size, _BATCH_SIZE))
    for batch in batches if size else data.train_dataloader():
        batch = by_name(batch, ("input", columns[0])) or {}
        name = next((name for name in columns if name in batch), None)
        if name is None:
            return
        labels = np.asarray(batch[name])
        yield labels[np.asarray(batch["index"]) >= 0] if "index" in batch else labels
