"""Some of scikit-learn's handwritten digits, as few as wanted: one set to learn from first, another to go on with."""

from collections.abc import Sequence

import numpy as np

from deeplightning.data.datasets import Samples
from deeplightning.data.digits import Digits


class SomeDigits(Digits):
    """The pictures of some digits: so many to learn from, half of the rest validates, half is for the test.

    Args:
        cfg: the whole config; `seed` decides which picture is in which set.
        digits: which; they are classes 0, 1 … in this order.
        train: pictures to learn from.
        options: see `Digits`.
    """

    def __init__(self, cfg, digits: Sequence[int], train: int, **options):
        super().__init__(cfg, **options)
        self.digits, self.count = list(digits), train
        self.class_names = [str(digit) for digit in digits]

    def read(self):
        whole = super().read()["all"]
        chosen = np.random.RandomState(self.cfg.seed).permutation(np.flatnonzero(np.isin(whole.labels, self.digits)))
        labels = np.array([self.digits.index(digit) for digit in whole.labels[chosen]])  # (N,)
        middle = (self.count + len(chosen)) // 2
        parts = {"train": slice(self.count), "val": slice(self.count, middle), "test": slice(middle, None)}
        return {name: Samples(whole.items[chosen[part]], labels[part]) for name, part in parts.items()}
