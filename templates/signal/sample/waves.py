"""Slow and quick waves, made up: one-dimensional signals in two classes."""

import numpy as np

from deeplightning.data.arrays import ArrayData


class Waves(ArrayData):
    """300 signals of one channel and 64 steps."""

    def read(self):
        """All samples under "all", to be divided 80/10/10; "train", "val" and "test" are taken as they are."""
        random, steps = np.random.default_rng(0), np.arange(64)
        quick = np.arange(300) % 2  # (300,)
        speed = np.where(quick == 1, 0.8, 0.3)[:, None, None]
        waves = np.sin(steps * speed + 6 * random.random((300, 1, 1)))  # (300, 1, 64)
        waves += random.normal(0, 0.3, waves.shape)
        self.class_names = ["slow", "quick"]
        return {"all": self.samples_of(waves, quick, "made-up waves")}
