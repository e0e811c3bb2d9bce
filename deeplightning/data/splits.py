"""Which samples are held out: labels and a seed go in, positions come out, the same on every process and machine."""

from pathlib import Path

import numpy as np

SET_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SET_NAMES |= dict.fromkeys(("val", "valid", "validation"), "val")
"""The words, in small or capital letters, of a folder or a column that name the set of samples."""


def set_folders(root: Path, inner: str = "") -> dict[str, Path]:
    """Return the folders of the sets in a folder, by train, val and test; of `val` and `valid` the former.

    Args:
        inner: only those that hold a folder of this name.
    """
    entries = sorted(root.iterdir(), reverse=True) if root.is_dir() else ()
    found = {SET_NAMES.get(each.name.lower()): each for each in entries if (each / inner).is_dir()}
    return {name: found[name] for name in ("train", "val", "test") if name in found}


def deal(labels: np.ndarray, num_folds: int, seed: int, purpose: int = 0) -> np.ndarray:
    """Deal samples to folds like cards: each class is shuffled, then all go round the folds, class by class.

    So the folds differ by at most one sample, in total and per class. Fold 0 is never the larger one.

    Args:
        labels: int (N,).
        num_folds: at least 1.
        seed: at least 0.
        purpose: a number that keeps two uses of one seed apart.

    Returns:
        The fold of each sample, int (N,), from 0 to num_folds - 1.
    """
    order = shuffled(len(labels), seed, purpose)
    order = order[np.argsort(labels[order], kind="stable")]  # by class
    folds = np.empty(len(labels), dtype=np.int64)
    folds[order] = np.resize(np.arange(num_folds)[::-1], len(labels))
    return folds


def keep_classes(labels: np.ndarray, folds: np.ndarray, held_out: int) -> np.ndarray:
    """Move a sample of each class that lies only in the fold that is held out into the next fold, so that each class
    is in the training set.

    Args:
        labels, folds: int (N,).
    """
    if labels.ndim > 1:  # several labels for each sample
        return folds
    lost = np.setdiff1d(labels[folds == held_out], labels[folds != held_out])
    number = folds.max(initial=0) + 1
    if len(lost) == 0 or number == 1 or len(np.unique(labels)) == 1:
        return folds
    first = [int((labels == label).argmax()) for label in lost]
    moved = folds.copy()
    moved[first] = (held_out + 1) % number
    return moved


def shuffled(size: int, seed: int, purpose: int = 0) -> np.ndarray:
    """Draw a permutation, int (size,)."""
    return stream(seed, purpose=purpose).permutation(size)


def stream(*seeds: int, purpose: int | None = None) -> np.random.RandomState:
    """Return a generator that follows from some numbers; each purpose, and None, has another. A `RandomState`, because
    its streams are frozen by numpy's policy (NEP 19); those of `default_rng` and of torch may change with a version."""
    key = () if purpose is None else (purpose,)
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds, spawn_key=key)))
