"""A custom data module: scikit-learn's handwritten digits, to be classified as even or odd.

`ImageData` splits, batches and augments; a subclass returns the pictures and describes their preparation. Any other
LightningDataModule that takes the config works, too; `own_task.py` shows what its batches must contain.
"""

import numpy as np
from sklearn.datasets import load_digits

from deeplightning.data.datasets import Samples
from deeplightning.data.images import ImageData
from deeplightning.image_spec import ImageSpec


class EvenOrOdd(ImageData):
    """Greyscale pictures of 8 x 8 pixels in two classes.

    Args:
        cfg: the whole config.
        options: `augment`, `in_memory`, `limit` and `cache`, see `ImageData`.
    """

    def __init__(self, cfg, **options):
        super().__init__(cfg, ImageSpec(8, 8, mode="L", mean=(0.305,), std=(0.376,)), **options)
        self.class_names = ["even", "odd"]  # labels in predictions of the endpoint

    def read(self):
        """Return all samples under "all", to be split 80/10/10; "train", "val" and "test" would be used as they are."""
        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (N, 8, 8), 0 to 255
        return {"all": Samples(pixels, digits.target.astype(np.int64) % 2)}  # labels (N,)
