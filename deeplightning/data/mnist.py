"""MNIST, or any data set in its format: four IDX files, read into memory; torchvision downloads them."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import Samples
from deeplightning.data.images import DownloadedImages, height_width
from deeplightning.image_spec import ImageSpec

MEAN, STD = 0.1307, 0.3081
"""Over the 60,000 training images, on the scale 0 to 1; the customary values."""

_FILES = {
    train: (f"MNIST/raw/{name}-images-idx3-ubyte", f"MNIST/raw/{name}-labels-idx1-ubyte")
    for train, name in ((True, "train"), (False, "t10k"))
}


class MNIST(DownloadedImages):
    """Handwritten digits: 60,000 for training, of which a tenth or a fold is for validation, and 10,000 for testing.

    `MNIST/raw/train-images-idx3-ubyte` and the other three files are in `data.root`. Images may have any size.

    Args:
        cfg: the whole config.
        download: download missing files.
        image_size: pixels, one number for a square or [height, width]; 28 leaves the images as they are.
        options: augment, in_memory and limit of `deeplightning.data.images.ImageData`.
    """

    source = "MNIST"
    needed = (*_FILES[True], *_FILES[False])

    def __init__(self, cfg: PartConfig, download: bool = False, image_size: int | Sequence[int] = 28, **options: Any):
        spec = ImageSpec(*height_width(image_size), mode="L", mean=(MEAN,), std=(STD,))
        super().__init__(cfg, spec, download, **options)
        self.class_names = [str(digit) for digit in range(10)]

    def read(self) -> dict[str, Samples]:
        return {"train": self._read(True), "test": self._read(False)}

    def _read(self, train: bool) -> Samples:
        images, labels = (self.root / name for name in _FILES[train])
        pixels, targets = _read_idx(images, 3), _read_idx(labels, 1).astype(np.int64)
        if len(pixels) != len(targets):
            raise DataError(f"{images} holds {len(pixels)} images, but {labels} holds {len(targets)} labels.")
        if targets.max() >= len(self.class_names):
            position = int(targets.argmax())
            raise DataError(
                f"{labels}: label {targets[position]} of sample {position} is outside the "
                f"{len(self.class_names)} classes, 0 to {len(self.class_names) - 1}."
            )
        return Samples(pixels, targets)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the content of an IDX file, uint8, in the shape of its header; raise DataError if it is damaged, or not an
    IDX file with so many dimensions. Importing torchvision for it would take two CPU seconds."""
    with path.open("rb") as file:
        header = file.read(4 + 4 * dimensions)
    size = path.stat().st_size
    is_idx = header[:4] == bytes([0, 0, 8, dimensions]) and len(header) == 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", header[4:]) if is_idx else ()
    if not is_idx or 0 in shape or size != len(header) + int(np.prod(shape, dtype=np.uint64)):
        raise DataError(
            f"{path} is empty, damaged or not an IDX file of bytes with {dimensions} dimension(s); delete it and "
            "download it again, for instance with data.module.params.download=true."
        )
    return np.fromfile(path, dtype=np.uint8, offset=len(header)).reshape(shape)
