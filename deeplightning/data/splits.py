"""Split samples: labels and a seed go in, positions come out, the same on every process and machine."""

from pathlib import Path
from typing import Any

import numpy as np

from deeplightning.data.data_errors import DataError

SPLITS: dict[str | None, tuple[str, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("test",),
    None: ("train", "val", "test"),
}
"""The sets that a stage needs; None: all stages."""

SET_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SET_NAMES |= dict.fromkeys(("val", "valid", "validation"), "val")
"""The set by its name, in lower case, in a folder or a column."""


def set_folders(root: Path, inner: str = "") -> dict[str, Path]:
    """Return the folders of train, val and test in a folder; if a set has several, the first in alphabetical order.

    Args:
        inner: ignore folders that do not contain one of this name.
    """
    entries = sorted(root.iterdir(), reverse=True) if root.is_dir() else ()
    found = {SET_NAMES.get(each.name.lower()): each for each in entries if (each / inner).is_dir()}
    return {name: found[name] for name in ("train", "val", "test") if name in found}


def assign_folds(labels: np.ndarray, num_folds: int, seed: int, purpose: int = 0) -> np.ndarray:
    """Assign samples to folds, stratified by label: shuffle each class, then go round the folds, class by class.

    The folds differ by at most one sample, in total and per class. Fold 0 is never the larger one.

    Args:
        labels: int (N,).
        num_folds: at least 1.
        seed: at least 0.
        purpose: a number for each use of one seed, which makes the uses independent.

    Returns:
        The fold of each sample, int (N,), from 0 to num_folds - 1.
    """
    order = shuffled(len(labels), seed, purpose)
    order = order[np.argsort(labels[order], kind="stable")]  # by class
    folds = np.empty(len(labels), np.int32)
    folds[order] = np.resize(np.arange(num_folds, dtype=np.int32)[::-1], len(labels))
    return folds


def keep_classes(labels: np.ndarray, folds: np.ndarray, held_out: int) -> np.ndarray:
    """Move one sample of each class that occurs only in the held-out fold to the next fold, so that the training set
    has every class.

    Args:
        labels, folds: int (N,).
    """
    if labels.ndim > 1:  # several labels for each sample
        return folds
    missing = np.setdiff1d(labels[folds == held_out], labels[folds != held_out])
    num_folds = folds.max(initial=0) + 1
    if len(missing) == 0 or num_folds == 1 or labels.min() == labels.max():
        return folds
    classes, first, counts = np.unique(labels, return_index=True, return_counts=True)
    moved = folds.copy()
    moved[first[np.searchsorted(classes, missing)]] = (held_out + 1) % num_folds
    if not (moved == held_out).any() and counts.max() > 1:  # in exchange, a sample of the largest class
        moved[(labels == classes[counts.argmax()]).argmax()] = held_out
    return moved


def shuffled(size: int, seed: int, purpose: int = 0) -> np.ndarray:
    """Return a seeded permutation, int (size,)."""
    return random_state(seed, purpose=purpose).permutation(size)


def random_state(*seeds: int, purpose: int | None = None) -> np.random.RandomState:
    """Return the random generator for these seeds and this purpose. It is a `RandomState`, since NumPy freezes its
    streams (NEP 19); those of `default_rng` and of torch may change between versions."""
    key = () if purpose is None else (purpose,)
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds, spawn_key=key)))


def divide_by_set(samples: Any, sets: np.ndarray, source: str) -> dict[str, Any]:
    """Divide samples by `sets`, the index of each sample's set in `SPLITS[None]`, (N,).

    Raises:
        DataError: the training set is empty; the message names the source.
    """
    found = {name: samples.take(np.flatnonzero(sets == index)) for index, name in enumerate(SPLITS[None])}
    if not len(found["train"]):
        raise DataError(f"{source}: none of the {len(samples)} samples is in the set train.")
    return {name: part for name, part in found.items() if len(part)}
