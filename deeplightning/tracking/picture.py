"""Encode pictures as PNG: figures, images, arrays and tensors. Imports matplotlib only for figures."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from deeplightning.figures.style import BLUE, figure, label, lines, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 64
CHANNELS = (1, 3, 4)


def to_png(image: object) -> bytes:
    """Encode a matplotlib figure, a Pillow image, or an array or tensor (see `to_pixels`) as PNG.

    Raises:
        ValueError: it is none of these.
    """
    stream = io.BytesIO()
    if hasattr(image, "savefig"):
        image.savefig(stream, format="png", bbox_inches="tight")
    elif isinstance(image, Image.Image):
        image.save(stream, format="PNG")
    else:
        pixels = to_pixels(image)
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(stream, format="PNG")
    return stream.getvalue()


def to_pixels(image: Any) -> np.ndarray:
    """Convert an array or tensor to uint8 pixels (H, W, C).

    Args:
        image: uint8, bool, whole numbers from 0 to 255, or floats, which are clipped to [0, 1] (NaN is black); shape
            (H, W), (C, H, W) or (H, W, C) with C of 1, 3 or 4. Where the shape allows both readings, a tensor is read
            as (C, H, W), as is usual in torch, and an array as (H, W, C), as is usual in numpy.

    Raises:
        ValueError: the shape or the type of numbers is not supported.
    """
    is_tensor = hasattr(image, "detach")
    if is_tensor:
        image = image.detach().cpu()
        image = (image.float() if image.is_floating_point() else image).numpy()  # numpy has no bfloat16
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    elif array.ndim == 3:
        first, last = array.shape[0] in CHANNELS, array.shape[2] in CHANNELS
        if first and (is_tensor or not last):
            array = array.transpose(1, 2, 0)
        elif not last:
            raise ValueError(f"A picture has 1, 3 or 4 channels, first or last; this one has the shape {array.shape}.")
    if array.ndim != 3 or 0 in array.shape:
        shape = np.asarray(image).shape
        raise ValueError(f"A picture has the shape (H, W), (C, H, W) or (H, W, C); this one has {shape}.")
    if array.dtype.kind == "f":
        array = np.rint(np.clip(np.nan_to_num(array.astype(np.float64), nan=0.0), 0.0, 1.0) * 255)
    elif array.dtype.kind == "b":
        array = array * np.uint8(255)
    elif array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
        raise ValueError(f"A picture has whole numbers from 0 to 255 or floats from 0 to 1; this one is {array.dtype}.")
    return np.ascontiguousarray(array, dtype=np.uint8)


def histogram(values: object) -> tuple[list[int], list[float]]:
    """Return the counts and the edges (one more) of 64 equal bins over the finite `values`, of any shape."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    array = np.asarray(values, dtype=np.float64).ravel()
    array = array[np.isfinite(array)]
    counts, edges = np.histogram(array, bins=BINS) if array.size else (np.zeros(BINS, int), np.linspace(0, 1, BINS + 1))
    return counts.tolist(), edges.tolist()


def histogram_figure(title: str, counts: list[int], edges: list[float]) -> "Figure":
    """Draw a histogram as a matplotlib figure."""
    with style():
        made = figure(height=2.55)
        axes = made.subplots()
        axes.stairs(counts, edges, fill=True, color=BLUE)
        axes.set_title(label(title, 40))
        axes.set_ylabel("count")
        lines(axes, "y")
    return made


def kind_of(value: object) -> str:
    """Return the kind of artifact that a value is tracked as, or the name of its type."""
    if hasattr(value, "savefig"):
        return "figure"
    if isinstance(value, Image.Image):
        return "image"
    if isinstance(value, Path):
        return "file"
    if isinstance(value, Mapping | list):
        return "config"
    if isinstance(value, bool | int | float):
        return "metric"
    if (shape := getattr(value, "shape", None)) is not None:
        if math.prod(shape) == 1:
            return "metric"
        return "image" if len(shape) in (2, 3) else "histogram" if len(shape) == 1 else "array"
    return type(value).__name__
