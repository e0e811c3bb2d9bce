"""Samples as named columns, with classes or with numbers to be predicted. N samples, T numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deeplightning.config.part_config import PartConfig
from deeplightning.data.datasets import Batch
from deeplightning.data.loading import DataOfSets


class Moments:
    """Mean and deviation of numbers that come in parts (Chan, Golub and LeVeque 1983); those of a single part are
    numpy's, bit by bit.

    Attributes:
        count: numbers so far, per column.
        mean: float64, a number or (T,).
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = 0.0
        self._squares: Any = 0.0  # sum of squared distances from the mean

    def add(self, values: np.ndarray) -> None:
        """Numbers, float64 (n,) or (n, T)."""
        if not (size := len(values)):
            return
        mean = values.mean(0)
        squares = np.square(values - mean).sum(0)
        total, distance = self.count + size, mean - self.mean
        self.mean = self.mean + distance * (size / total)
        self._squares = self._squares + squares + np.square(distance) * (self.count * (size / total))
        self.count = total

    @property
    def std(self) -> Any:
        """float64, a number or (T,)."""
        return np.sqrt(self._squares / self.count)


class ColumnData(DataOfSets):
    """Base of data modules whose samples are columns, with classes or with numbers to be predicted.

    Attributes:
        class_names: the name of each label, in order; empty where the targets are numbers.
        target_names: the name of each number that is to be predicted; empty where there are classes.
        target_mean, target_std: of each, over the training samples.
    """

    samples = "rows"

    def __init__(self, cfg: PartConfig, limit: int | None = None):
        super().__init__(cfg, "auto", limit)
        self.class_names: list[str] = []
        self.target_names: list[str] = []
        self.target_mean: list[float] = []
        self.target_std: list[float] = []

    def learn_targets(self, names: Sequence[str], targets: Moments) -> None:
        """Keep mean and deviation of the numbers to be predicted, (T,)."""
        self.target_names = list(names)
        self.target_mean = targets.mean.tolist()
        self.target_std = np.where(targets.std > 0, targets.std, 1.0).tolist()

    def example_batch(self, size: int) -> Batch:
        """The first training samples, to try out whether the parts of a config fit; reads the data.

        Args:
            size: samples; of a smaller set, some come more than once.
        """
        self.setup("fit")
        found = self.dataset("train")
        return found[np.arange(size) % len(found)]
