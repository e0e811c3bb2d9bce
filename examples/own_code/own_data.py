"""Data of one's own: scikit-learn's handwritten digits, to be told apart as even or odd.

`ImageData` divides, batches and augments; what is left to say is where the pictures are, and how they are prepared.
Any LightningDataModule that takes the config will do instead, see `own_task.py` for what a batch must hold then.
"""

import numpy as np
from sklearn.datasets import load_digits

from deeplightning.data.datasets import Samples
from deeplightning.data.images import ImageData
from deeplightning.image_spec import ImageSpec


class EvenOrOdd(ImageData):
    """Grey pictures of 8 x 8 pixels in two classes.

    Args:
        cfg: the whole config.
        options: `augment`, `in_memory`, `limit` and `cache`, see `ImageData`.
    """

    def __init__(self, cfg, **options):
        super().__init__(cfg, ImageSpec(8, 8, mode="L", mean=(0.305,), std=(0.376,)), **options)
        self.class_names = ["even", "odd"]  # the endpoint answers with these

    def read(self):
        """All samples under "all", to be divided 80/10/10; "train", "val" and "test" are taken as they are."""
        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (N, 8, 8), 0 to 255
        return {"all": Samples(pixels, digits.target.astype(np.int64) % 2)}  # labels (N,)
