"""Data module `type: Stripes`."""

import numpy as np

from deeplightning.data.datasets import Samples
from deeplightning.data.images import ImageData
from deeplightning.image_spec import ImageSpec

from .draw import NAMES, SIZE, draw


class Stripes(ImageData):
    """Greyscale pictures of 16 x 16 pixels in four classes.

    Args:
        cfg: the whole config.
        number: total number of pictures, at least 40, to be split into training, validation and test.
        options: see `ImageData`.

    Raises:
        ValueError: `number` is too small.
    """

    def __init__(self, cfg, number=1200, **options):
        super().__init__(cfg, ImageSpec(SIZE, SIZE, mode="L", mean=(0.5,), std=(0.25,)), **options)
        if number < 40:
            raise ValueError(f"number must be at least 40, not {number}")
        self.number = number
        self.class_names = list(NAMES)

    def read(self):
        random = np.random.RandomState(0)  # the same pictures for every seed of the config, which determines the split
        labels = np.arange(self.number) % len(NAMES)
        pixels = np.stack([draw(label, random) for label in labels])  # (N, 16, 16)
        return {"all": Samples(pixels, labels.astype(np.int64))}
