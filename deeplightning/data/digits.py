"""scikit-learn's 1,797 handwritten digits, 8x8 grey: real data that needs no download."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deeplightning.config.part_config import PartConfig
from deeplightning.data.datasets import Samples
from deeplightning.data.images import ImageData, height_width
from deeplightning.image_spec import ImageSpec

MEAN, STD = 0.3053, 0.3759
"""Over all pixels of the 1,797 images, on the scale 0 to 1."""


class Digits(ImageData):
    """Handwritten digits in ten classes, split 80/10/10 by the seed (1,439, 179 and 179).

    The original values 0 to 16 are scaled to 0 to 255. `data.root` is not used.

    Args:
        cfg: the whole config.
        image_size: pixels, one number for a square or [height, width]; 8 leaves the images as they are.
        options: augment, in_memory and limit of `deeplightning.data.images.ImageData`.
    """

    def __init__(self, cfg: PartConfig, image_size: int | Sequence[int] = 8, **options: Any):
        super().__init__(cfg, ImageSpec(*height_width(image_size), mode="L", mean=(MEAN,), std=(STD,)), **options)
        self.class_names = [str(digit) for digit in range(10)]

    def read(self) -> dict[str, Samples]:
        from sklearn.datasets import load_digits  # 1 s of CPU time

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)
        return {"all": Samples(pixels, digits.target.astype(np.int64))}
