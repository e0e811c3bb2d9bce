"""Make batches of pictures with masks that are in memory, or prepared on demand; both give the same batches.

It does not import Lightning, since loader workers import it: that would cost each worker 1.5 s.
N samples, B batch, C channels, H height, W width of the prepared picture, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import Batch, Samples
from deeplightning.image_spec import ImageSpec, shown_size

NO_CLASS = 255
"""Value in a batch's masks of pixels that are excluded from losses and metrics."""

MaskValue = int | Sequence[int]
"""The pixels of a class in mask files: a grey value or palette index, 0 to 65535, or a colour, [red, green, blue]."""

_COLOUR_FLAG = 1 << 24  # added to the code of a colour, so that it differs from every grey value


@dataclass(frozen=True)
class MaskedSamples(Samples):
    """Pictures with masks.

    Attributes:
        items: the paths of the pictures.
        labels: int64 (N,), all 0: the pictures themselves have no class.
        masks: the paths of the masks.
    """

    masks: Sequence[str] = ()


def code_of(value: object) -> int:
    """Return one number for a `MaskValue`. A grey colour has the code of its grey value.

    Raises:
        ValueError: it is not a `MaskValue`.
    """
    is_colour = isinstance(value, Sequence) and not isinstance(value, str)
    parts: list[Any] = [*cast(Sequence[object], value)] if is_colour else [value]
    highest = 255 if is_colour else 65535
    if len(parts) != (3 if is_colour else 1) or not all(type(part) is int and 0 <= part <= highest for part in parts):
        raise ValueError("a value is a number from 0 to 65535, or a colour [red, green, blue] of numbers from 0 to 255")
    if len(set(parts)) == 1:
        return int(parts[0])
    red, green, blue = parts
    return int(_COLOUR_FLAG | red << 16 | green << 8 | blue)


def value_of(code: int, by_colour: bool) -> MaskValue:
    """Return the `MaskValue` of a code: a colour if `by_colour` or if it is not grey, otherwise a number."""
    if code < _COLOUR_FLAG:
        return [code] * 3 if by_colour else code
    return [code >> 16 & 255, code >> 8 & 255, code & 255]


def read_codes(mask: Image.Image, by_colour: bool) -> np.ndarray:
    """Return the code of each pixel, int (H, W), see `code_of`. A mask of one bit per pixel has values 0 and 255.
    Transparency is ignored.

    Args:
        mask: a PNG.
        by_colour: whether the value of a palette pixel is its colour; otherwise it is its index.
    """
    if mask.mode in ("1", "LA"):
        mask = mask.convert("L")
    if mask.mode not in ("RGB", "RGBA") and not (mask.mode == "P" and by_colour):
        return np.asarray(mask)
    # Pillow converts a palette with transparency to RGBA only.
    red, green, blue, _ = np.moveaxis(np.asarray(mask.convert("RGBA")).astype(np.int32), -1, 0)
    is_grey = (red == green) & (green == blue)
    return np.where(is_grey, red, _COLOUR_FLAG | red << 16 | green << 8 | blue)


def check_size(path: str, mask: tuple[int, int], picture: str, size: tuple[int, int]) -> None:
    """Raise DataError unless a mask has the width and height of its picture."""
    if mask != size:
        raise DataError(
            f"{path}: this mask has {mask[0]} x {mask[1]} pixels, its picture {picture} has {size[0]} x {size[1]}."
        )


@dataclass(frozen=True)
class Masks:
    """Prepares pictures and their masks.

    Attributes:
        spec: how pictures are prepared.
        max_pixels: largest picture that is decoded.
        codes: of class 0, 1 … to K - 1, see `code_of`.
        ignore: the code of ignored pixels, or None.
        by_colour: see `read_codes`.
    """

    spec: ImageSpec
    max_pixels: int
    codes: Sequence[int]
    ignore: int | None
    by_colour: bool

    def __call__(self, samples: MaskedSamples, positions: np.ndarray) -> Batch:
        """Return `image`, uint8 (B, C, H, W), and `mask`, uint8 (B, H, W); raise DataError if a file is invalid."""
        spec = self.spec
        images = np.empty((len(positions), spec.channels, spec.height, spec.width), dtype=np.uint8)
        masks = np.empty((len(positions), spec.height, spec.width), dtype=np.uint8)
        for row, position in enumerate(positions):
            images[row] = samples.prepare(position, spec, self.max_pixels)
            masks[row] = self._mask(samples.masks[position], str(samples.items[position]))
        return {"image": torch.from_numpy(images), "mask": torch.from_numpy(masks)}

    def _mask(self, path: str, picture: str) -> np.ndarray:
        try:
            with Image.open(picture) as opened:
                size = shown_size(opened)
            with Image.open(path, formats=["PNG"]) as mask:
                check_size(path, mask.size, picture, size)
                found = read_codes(mask, self.by_colour)  # (H', W')
        except DataError:
            raise
        except UnidentifiedImageError:
            raise DataError(f"{path}: a mask must be a PNG file; this is not one.") from None
        except Exception as error:  # parsers raise anything on damaged bytes, see `deeplightning.image_spec`
            raise DataError(f"{path}: cannot be used as a mask. {error}") from error
        return resized(self._classes(path, found), self.spec)

    def _classes(self, path: str, found: np.ndarray) -> np.ndarray:
        """Return the class of each pixel, uint8 (H', W'), for its code, int (H', W')."""
        codes = np.array([*self.codes, *([] if self.ignore is None else [self.ignore])])
        numbers = np.array([*range(len(self.codes)), NO_CLASS], np.uint8)
        order = codes.argsort()
        indices = order[np.searchsorted(codes, found, sorter=order).clip(max=len(codes) - 1)]
        wrong = codes[indices] != found
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            value, *values = (value_of(code, self.by_colour) for code in (found[row, column].item(), *codes.tolist()))
            raise DataError(
                f"{path}: value {value} (row {row}, column {column}) is not a class. The classes are {values}, by "
                "data.module.params.values (of class_names) and ignore."
            )
        return numbers[indices]


def resized(values: np.ndarray, spec: ImageSpec) -> np.ndarray:
    """Resize a mask like `ImageSpec` resizes its picture, by nearest neighbour.

    Args:
        values: uint8 (H', W').

    Returns:
        uint8 (H, W); padding is `NO_CLASS`.
    """
    mask, size = Image.fromarray(values), (spec.width, spec.height)
    mask = spec.fit(mask, mask.size, size, Image.Resampling.NEAREST)
    padded = Image.new("L", size, NO_CLASS)
    padded.paste(mask, ((spec.width - mask.width) // 2, (spec.height - mask.height) // 2))
    return np.array(padded)
