"""CIFAR-10: torchvision's class reads all images into memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import Samples
from deeplightning.data.images import DownloadedImages, height_width
from deeplightning.image_spec import ImageSpec

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Per channel, over the 50,000 training images, on the scale 0 to 1; the customary values."""

_FOLDER = "cifar-10-batches-py"


class CIFAR10(DownloadedImages):
    """Colour photographs in ten classes: 50,000 for training, of which a tenth or a fold is for validation, and 10,000
    for testing.

    The files are in `cifar-10-batches-py` in `data.root`. They are pickles: torchvision checks their MD5 sums first.

    Args:
        cfg: the whole config.
        download: download missing files.
        image_size: pixels, one number for a square or [height, width]; 32 leaves the images as they are.
        options: augment, in_memory and limit of `deeplightning.data.images.ImageData`.
    """

    source = "CIFAR10"
    needed = (
        *(f"{_FOLDER}/data_batch_{number}" for number in range(1, 6)),
        f"{_FOLDER}/test_batch",
        f"{_FOLDER}/batches.meta",
    )

    def __init__(self, cfg: PartConfig, download: bool = False, image_size: int | Sequence[int] = 32, **options: Any):
        super().__init__(cfg, ImageSpec(*height_width(image_size), mode="RGB", mean=MEAN, std=STD), download, **options)
        self.class_names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

    def read(self) -> dict[str, Samples]:
        from torchvision.datasets import CIFAR10 as Source

        sets = {}
        for split in ("train", "test"):
            try:
                source = Source(str(self.root), train=split == "train")
            except RuntimeError as error:  # wrong MD5 sum
                raise DataError(
                    f"{self.root / _FOLDER} is damaged: {error}. Delete it and download it again, for instance with "
                    "data.module.params.download=true."
                ) from error
            sets[split] = Samples(source.data, np.array(source.targets, dtype=np.int64))  # (N, 32, 32, 3)
        return sets
