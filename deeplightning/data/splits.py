"""Which samples are held out: labels and a seed go in, positions come out, the same on every process and machine."""

import numpy as np


def deal(labels: np.ndarray, num_folds: int, seed: int, purpose: int = 0) -> np.ndarray:
    """Deals samples to folds like cards: each class is shuffled, then all go round the folds, class by class.

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


def shuffled(size: int, seed: int, purpose: int = 0) -> np.ndarray:
    """A permutation, int (size,). `RandomState`, because its streams are frozen by numpy's policy (NEP 19)."""
    bits = np.random.MT19937(np.random.SeedSequence(seed, spawn_key=(purpose,)))
    return np.random.RandomState(bits).permutation(size)
