"""What a user of ours adds, for benchmarks/train.py: a data module, and a logger that tracks nothing."""

from pathlib import Path
from typing import Any

import numpy as np
from pytorch_lightning.loggers import Logger

from deeplightning.data.datasets import Samples
from deeplightning.data.images import ImageData
from deeplightning.image_spec import MODES, ImageSpec


class Pictures(ImageData):
    """The pictures of `pictures.npz` in `data.root` (see train_data.py), divided like MNIST: a tenth validates.

    Args:
        size: pixels of a side.
        mode: L or RGB.
        classes: how many.
        options: see `deeplightning.data.images.ImageData`.
    """

    def __init__(self, cfg: Any, size: int, mode: str, classes: int, **options: Any):
        channels = MODES[mode]
        super().__init__(cfg, ImageSpec(size, size, mode, mean=(0.5,) * channels, std=(0.25,) * channels), **options)
        self.class_names = [str(number) for number in range(classes)]

    def read(self) -> dict[str, Samples]:
        with np.load(Path(self.cfg.data.root) / "pictures.npz") as file:
            return {"train": Samples(file["images"], file["labels"])}


class Nowhere(Logger):
    """Takes whatever it is told, and keeps none of it."""

    name, version = "nowhere", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass
