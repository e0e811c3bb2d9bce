"""Resolve params that depend on the data: `auto` in a network becomes the number that the data module declares, and
`weight: balanced` and `pos_weight: balanced` in a loss become weights of the training set's classes or labels. (N
samples, K classes or labels.)"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from deeplightning.batches import by_name, class_names_of
from deeplightning.config.auto_values import BALANCED, DECLARED, WEIGHT, WEIGHTS, unfilled
from deeplightning.config.machine import world_size
from deeplightning.config.schema import Config
from deeplightning.faults import ConfigError, Fault

if TYPE_CHECKING:
    import pytorch_lightning as pl

log = logging.getLogger("deeplightning")


def fill(cfg: Config, data: object, read: bool = True) -> None:
    """Replace each `auto` in the params of networks, and each `balanced` weight of a loss, in place.

    Args:
        data: the data module.
        read: prepare and set up the data if a number is not declared without it; if False, such an `auto` and
            `balanced` stay.

    Raises:
        ConfigError: the data module declares no such number, the training set has no classes or labels, or a label has
            no weight.
    """
    for key, params, name in unfilled(cfg):
        if name in WEIGHTS:
            if read:
                params[name] = {"type": "torch.tensor", "params": {"data": _weights(cfg, data, key, name)}}
            continue
        found = _declared(name, data)
        if found is None and hasattr(data, "example_batch"):
            data.example_batch(1)  # makes an image folder find its classes
            found = _declared(name, data)
        if found is None and read:
            _read(cfg, data)
            found = _declared(name, data)
        if found is None and not read:
            continue
        attributes = [each for each in DECLARED[name] if _attribute(data, each)] or DECLARED[name]
        source = f"{' or '.join(attributes)} of {cfg.data.module.type}"
        if found is None:
            message = f"`auto` needs {source}, which the data module does not declare; set {key} to a number"
            raise ConfigError(Fault(message, key, found="auto"))
        params[name] = found
        log.info("%s: auto → %s (%s)", key, found, source)


def refuse_unfilled(cfg: Config) -> None:
    """Raise if a network's params are not resolved yet.

    Raises:
        ConfigError: with each remaining `auto`.
    """
    message = "is filled when the data module is built; call init_module(cfg, 'data') before, or give a number"
    if faults := [Fault(f"`{p[name]}` {message}", key, found=p[name]) for key, p, name in unfilled(cfg)]:
        raise ConfigError(faults)


def _read(cfg: Config, data: Any) -> None:
    """Prepare and set up the training data."""
    if world_size(cfg.engine) == 1:  # of several, only the first may download
        data.prepare_data()
    data.setup("fit")


def _weights(cfg: Config, data: Any, key: str, name: str) -> list[float]:
    """Return the weight of each class, or of each label's positive samples, and log them."""
    _read(cfg, data)
    needs, found = f"`{BALANCED}` needs", f"of the training set of {cfg.data.module.type}"
    if name == WEIGHT:
        counts = class_counts(data, len(class_names_of(data)))
        if counts is None or not counts.any():
            message = f"{needs} classes, a `label` or `mask` of whole numbers {found}; remove it, or give a tensor"
            raise ConfigError(Fault(message, key, found=BALANCED))
        weights, of = class_weights(counts), f"the classes have {counts.tolist()} samples"
    else:
        positives, samples = label_counts(data) or (np.zeros(1, np.int64), 0)
        if ((positives == 0) | (positives == samples)).any():
            message = f"{needs} labels (B, K) of 0 and 1 {found}, each with samples that have it and samples that have "
            message += f"not (of {samples} have it: {positives.tolist()}); leave a label out, or give a tensor"
            raise ConfigError(Fault(message, key, found=BALANCED))
        weights, of = positive_weights(positives, samples), f"of {samples}, {positives.tolist()} have the label"
    log.info("%s: balanced → %s (%s)", key, weights, of)
    return weights


def _attribute(data: Any, name: str) -> Any:
    return class_names_of(data) if name == "class_names" else getattr(data, name, None)


def _declared(name: str, data: Any) -> int | list[int] | None:
    """Return the value that a data module currently declares for a param of a network, or None."""
    declared = next((found for each in DECLARED[name] if (found := _attribute(data, each))), None)
    if not declared:
        return None
    if name in ("num_classes", "num_outputs"):
        return len(declared)
    if name == "num_channels":
        return int(declared.channels if hasattr(declared, "channels") else declared.shape[0])
    if name == "num_numbers":
        return len(declared.numbers)
    if name == "cardinalities":
        return list(declared.cardinalities)
    if name == "image_size":
        square = declared.height == declared.width
        return int(declared.height) if square else [int(declared.height), int(declared.width)]
    return int(declared.size)


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


def class_counts(data: pl.LightningDataModule, num_classes: int = 0) -> np.ndarray | None:
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
