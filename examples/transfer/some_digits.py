"""Some of scikit-learn's handwritten digits, as few as wanted: for pretraining, and for transfer learning."""

from collections.abc import Sequence

import numpy as np

from deeplightning.data.datasets import Samples
from deeplightning.data.digits import Digits


class SomeDigits(Digits):
    """The pictures of some digits: `train` of them for training, half of the rest for validation, half for test.

    Args:
        cfg: the whole config; `seed` determines the split.
        digits: the digits that become classes 0, 1 … in this order.
        train: number of training pictures.
        options: see `Digits`.
    """

    def __init__(self, cfg, digits: Sequence[int], train: int, **options):
        super().__init__(cfg, **options)
        self.digits, self.count = list(digits), train
        self.class_names = [str(digit) for digit in digits]

    def read(self):
        samples = super().read()["all"]
        chosen = np.random.RandomState(self.cfg.seed).permutation(np.flatnonzero(np.isin(samples.labels, self.digits)))
        labels = np.array([self.digits.index(digit) for digit in samples.labels[chosen]])  # (N,)
        middle = (self.count + len(chosen)) // 2
        parts = {"train": slice(self.count), "val": slice(self.count, middle), "test": slice(middle, None)}
        return {name: Samples(samples.items[chosen[part]], labels[part]) for name, part in parts.items()}
