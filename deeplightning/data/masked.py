"""Pictures with masks become batches, held in memory or prepared when asked for; both give the same batches.

A loader worker imports this module and nothing of Lightning, which would cost each worker 1.5 s.
N samples, B batch, C channels, H height, W width of the prepared picture, K classes.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from deeplightning.data.datasets import Batch, InMemory, OnDemand, Samples
from deeplightning.data.errors import DataError
from deeplightning.image import ImageSpec

NO_CLASS = 255
"""In a batch's masks: the pixel counts in no loss and no metric."""

_EXIF_ORIENTATION, _LYING = 0x0112, (5, 6, 7, 8)  # a picture so marked is shown turned by a quarter


@dataclass(frozen=True)
class MaskedSamples(Samples):
    """Pictures with masks.

    Attributes:
        items: the paths of the pictures.
        labels: int64 (N,), all 0: pictures as such have no class.
        masks: the paths of the masks.
    """

    masks: Sequence[str] = ()

    def take(self, positions: np.ndarray) -> "MaskedSamples":
        """The samples at these positions, int (n,), in this order."""
        items, masks = ([paths[position] for position in positions] for paths in (self.items, self.masks))
        return MaskedSamples(items, self.labels[positions], masks)


@dataclass(frozen=True)
class Masks:
    """How a file becomes a mask.

    Attributes:
        spec: of the pictures.
        max_pixels: largest picture that is decoded.
        num_classes: K.
        ignore: the value of pixels that do not count.
    """

    spec: ImageSpec
    max_pixels: int
    num_classes: int
    ignore: int

    def prepare(self, samples: MaskedSamples, position: int) -> tuple[np.ndarray, np.ndarray]:
        """A picture, uint8 (C, H, W), and its mask, uint8 (H, W).

        Raises:
            DataError: if a file cannot be read, or they do not fit together.
        """
        picture = samples.prepare(position, self.spec, self.max_pixels)
        return picture, self._mask(samples.masks[position], str(samples.items[position]))

    def _mask(self, path: str, picture: str) -> np.ndarray:
        try:
            with Image.open(picture) as opened:
                lying = opened.getexif().get(_EXIF_ORIENTATION) in _LYING
                size = opened.size[::-1] if lying else opened.size
            with Image.open(path, formats=["PNG"]) as mask:
                if mask.mode not in ("L", "P"):
                    raise DataError(
                        f"{path}: a mask is a PNG of mode L or P whose values are class numbers; this is of mode "
                        f"{mask.mode}."
                    )
                if mask.size != size:
                    raise DataError(
                        f"{path}: this mask has {mask.width} x {mask.height} pixels, its picture {picture} has "
                        f"{size[0]} x {size[1]}."
                    )
                values = np.asarray(mask)  # (H', W'), of a palette the indexes
        except DataError:
            raise
        except UnidentifiedImageError:
            raise DataError(f"{path}: this is no PNG, which a mask must be.") from None
        except Exception as error:  # parsers of damaged bytes raise anything, see `deeplightning.image`
            raise DataError(f"{path}: cannot be used as a mask. {error}") from error
        wrong = (values >= self.num_classes) & (values != self.ignore)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise DataError(
                f"{path}: value {values[row, column]} (row {row}, column {column}) is no class. There are "
                f"{self.num_classes} (0 to {self.num_classes - 1}, data.module.params.class_names), and "
                f"{self.ignore} for pixels that do not count (data.module.params.ignore)."
            )
        values = np.where(values == self.ignore, NO_CLASS, values).astype(np.uint8)
        return resized(values, self.spec)


def resized(values: np.ndarray, spec: ImageSpec) -> np.ndarray:
    """A mask brought to a picture's size as `ImageSpec` brings the picture there, each pixel as its nearest one was.

    Args:
        values: uint8 (H', W').

    Returns:
        uint8 (H, W); what padding adds is `NO_CLASS`.
    """
    mask = Image.fromarray(values)
    goal = (spec.width, spec.height)
    if mask.size == goal:
        return values
    scales = [wanted / side for wanted, side in zip(goal, mask.size, strict=True)]
    box = (0.0, 0.0, float(mask.width), float(mask.height))
    if spec.resize == "pad":
        goal = (max(1, round(mask.width * min(scales))), max(1, round(mask.height * min(scales))))
    elif spec.resize == "crop":
        kept = [min(side, wanted / max(scales)) for side, wanted in zip(mask.size, goal, strict=True)]
        left, top = (mask.width - kept[0]) / 2, (mask.height - kept[1]) / 2
        box = (left, top, left + kept[0], top + kept[1])
    mask = mask.resize(goal, Image.Resampling.NEAREST, box=box)
    whole = Image.new("L", (spec.width, spec.height), NO_CLASS)
    whole.paste(mask, ((spec.width - mask.width) // 2, (spec.height - mask.height) // 2))
    return np.array(whole)


class MaskedInMemory(InMemory):
    """Pictures and masks prepared, in two tensors.

    Args:
        samples: where they come from.
        pixels: uint8 (N, C, H, W).
        masks: uint8 (N, H, W).
    """

    def __init__(self, samples: Samples, pixels: torch.Tensor, masks: torch.Tensor):
        super().__init__(samples, pixels)
        self.labels = masks

    def large(self) -> Batch:
        return {"image": self.pixels, "mask": self.labels}

    def small(self) -> Batch:
        return {}

    def __getitem__(self, positions: Sequence[int] | np.ndarray) -> Batch:
        batch = super().__getitem__(positions)
        return {"image": batch["image"], "mask": batch["label"], "index": batch["index"]}


class MaskedOnDemand(OnDemand):
    """Pictures and masks prepared when a batch asks for them.

    Args:
        samples: where they come from.
        masks: how a file becomes a mask.
    """

    def __init__(self, samples: MaskedSamples, masks: Masks):
        super().__init__(samples, masks.spec, masks.max_pixels)
        self.masked, self.masks = samples, masks

    def __getitem__(self, positions: Sequence[int] | np.ndarray) -> Batch:
        images, masks = prepare_masked(self.masked, positions, self.masks)
        return {"image": images, "mask": masks, "index": torch.as_tensor(positions)}


def prepare_masked(
    samples: MaskedSamples, positions: Sequence[int] | np.ndarray, masks: Masks, workers: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures uint8 (n, C, H, W) and masks uint8 (n, H, W) of these positions."""
    spec = masks.spec
    pictures = np.empty((len(positions), spec.channels, spec.height, spec.width), dtype=np.uint8)
    values = np.empty((len(positions), spec.height, spec.width), dtype=np.uint8)

    def prepare(row: int) -> None:
        pictures[row], values[row] = masks.prepare(samples, positions[row])

    if workers == 1:
        for row in range(len(positions)):
            prepare(row)
    else:
        with ThreadPoolExecutor(workers) as pool:
            try:
                for _ in pool.map(prepare, range(len(positions))):  # raises the first error in data order
                    pass
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return torch.from_numpy(pictures), torch.from_numpy(values)
