"""Convert pictures to numbers: `ImageSpec` converts an encoded image to the uint8 array that a network was trained on.

Training and serving both call it, so they cannot disagree. Uses Pillow, numpy and the standard library only.
Shapes: H height, W width, C channels (1 for "L", 3 for "RGB").
"""

import contextlib
import ctypes
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import AvifImagePlugin, Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

from deeplightning.words import InputError, are_numbers, is_whole, require_keys

# Importing these three registers them; otherwise Pillow loads all of its forty formats at the first unknown file.
_REGISTERED = (AvifImagePlugin, TiffImagePlugin, WebPImagePlugin)

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Supported formats. The list is short on purpose: Pillow also reads formats that start other programs (EPS) or contain
a second image with another size than the header (ICO)."""

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif")
"""File name extensions of images, in lower or upper case."""

MODES = {"L": 1, "RGB": 3}
"""Colour modes of a network's inputs, with their number of channels."""

RESIZES = ("stretch", "crop", "pad")

MAX_PIXELS = 50_000_000
"""Largest picture that is decoded by default: a photo of 48 megapixels passes. The most expensive kinds at this size
(transparent ones) take 0.8 GB and 1 s of CPU, from a file of 0.2 MB (Pillow 13, November 2026)."""

FILTER = Image.Resampling.BILINEAR
"""Pillow widens the support of the filter when it shrinks a picture, so every source pixel counts: there is no
aliasing, and results do not change between versions."""

_TURNS = {  # EXIF orientation → the transposition that makes the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPS_SIDES = {Image.Transpose[name] for name in ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")}
_EXIF_ORIENTATION = 0x0112
_PILLOW_WARNINGS = ("ignore", None, Warning, re.compile(r"PIL\."), 0)

Extent = tuple[float, float]
"""Width and height, in pixels."""


class ImageError(InputError):
    """Raised for a picture that cannot be used.

    Attributes:
        status: 400 damaged or empty, 413 too many pixels, 415 not a picture of a supported format.
    """


@dataclass(frozen=True)
class ImageSpec:
    """Describe how pictures are prepared for one network.

    Colour profiles (ICC) are not applied: samples are taken as stored.

    Attributes:
        height: rows of the result, in pixels.
        width: columns of the result, in pixels.
        mode: "RGB" (three channels) or "L" (one, grey by ITU-R 601-2 luma).
        resize: "stretch" to the size; "crop": scale until the shorter side fits and keep the centre; "pad": scale until
            the longer side fits and fill the rest with black.
        mean: per channel, on the scale 0 to 1; subtracted inside the network's graph, not here. Empty: zeros.
        std: per channel, on the scale 0 to 1; divided by inside the network's graph. Empty: ones.

    Raises:
        ValueError: a value is out of range.
    """

    height: int
    width: int
    mode: str = "RGB"
    resize: str = "stretch"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            if not is_whole(getattr(self, name), 1):
                raise ValueError(f"{name} must be a whole number of pixels of at least 1, not {getattr(self, name)!r}")
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.resize not in RESIZES:
            raise ValueError(f"resize must be one of {', '.join(RESIZES)}, not {self.resize!r}")
        for name, default in (("mean", 0.0), ("std", 1.0)):
            values = getattr(self, name)
            if not are_numbers(values) or len(values) not in (0, self.channels):
                raise ValueError(f"{name} must be {self.channels} finite numbers for mode {self.mode}, not {values!r}")
            object.__setattr__(self, name, tuple(map(float, values)) or (default,) * self.channels)
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, not {self.std!r}")

    @property
    def channels(self) -> int:
        return MODES[self.mode]

    def decode(
        self,
        data: bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO,
        max_pixels: int = MAX_PIXELS,
        max_side: int | None = None,
    ) -> np.ndarray:
        """Decode an image and prepare it.

        The picture is turned upright according to EXIF. Only the first frame of an animation is used. Transparency is
        blended with white, as in browsers and viewers, and 16 bits per sample are reduced to the upper 8.

        Args:
            data: the encoded bytes, the path of a file, or a seekable binary file.
            max_pixels: refuse larger pictures by their header, before decoding. Pillow itself refuses 178,956,970.
            max_side: refuse wider or higher pictures as well; None: no limit.

        Returns:
            uint8 (H, W, C), a contiguous new array. A picture of the right size and mode is not changed.

        Raises:
            ImageError: it is not a picture, is damaged, or is too large.
            OSError: a path cannot be opened.
        """
        # Pillow's warnings about a picture (damaged EXIF, odd palette) do not help users. A permanent filter is safe
        # with threads, unlike `warnings.catch_warnings`; it matches only warnings raised inside the package PIL.
        if not warnings.filters or warnings.filters[0] != _PILLOW_WARNINGS:
            warnings.filterwarnings("ignore", module=r"PIL\.")
        if isinstance(data, bytes | bytearray | memoryview):
            opened: contextlib.AbstractContextManager[BinaryIO] = io.BytesIO(data)
        elif isinstance(data, str | os.PathLike):
            opened = open(data, "rb")  # noqa: PTH123, SIM115 (a path of any kind; the `with` below closes it)
        else:
            opened = contextlib.nullcontext(data)
        with opened as file:
            try:
                with Image.open(file, formats=FORMATS) as image:
                    width, height = image.size
                    if max_side is not None and max(width, height) > max_side:
                        raise ImageError(
                            f"The image has {width:,} x {height:,} pixels; a side of at most {max_side:,} is accepted.",
                            413,
                        )
                    if width * height > max_pixels:
                        raise ImageError(
                            f"The image has {width} x {height} = {width * height:,} pixels; "
                            f"at most {max_pixels:,} are accepted.",
                            413,
                        )
                    extent = self._draft(image)
                    image.load()
                    return self._prepare(image, extent, _turn(image))
            except ImageError:
                raise
            except UnidentifiedImageError:
                file.seek(0)
                if not file.read(1):
                    raise ImageError("The image is empty (0 bytes).", 400) from None
                raise ImageError(f"This is not an image in a supported format ({', '.join(FORMATS)}).", 415) from None
            except Image.DecompressionBombError:
                raise ImageError(f"The image has too many pixels; at most {max_pixels:,} are accepted.", 413) from None
            except MemoryError:
                raise ImageError("The image needs more memory than is available.", 413) from None
            except Exception as error:
                # Parsing hostile bytes may raise anything: OSError, SyntaxError, struct.error, zlib.error, KeyError …
                reason = f" ({error})" if str(error) else ""
                raise ImageError(f"The image cannot be decoded, it may be damaged or cut off{reason}.", 400) from error

    def from_array(self, array: np.ndarray) -> np.ndarray:
        """Prepare pixels: uint8 (H', W') or (H', W', C') with 1, 2 (grey, alpha), 3 or 4 (with alpha) channels.

        Returns:
            uint8 (H, W, C), a contiguous new array, with the values of `decode` for a picture of these pixels.

        Raises:
            ImageError: the array has another dtype or shape.
        """
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or 0 in array.shape:
            raise ImageError(f"Pixels must be uint8 (H, W) or (H, W, C), not {array.dtype} {array.shape}.", 400)
        if array.ndim == 3 and array.shape[2] == 1:
            array = array[:, :, 0]
        if array.ndim == 3 and array.shape[2] not in (2, 3, 4):
            raise ImageError(f"Pixels must have 1, 2, 3 or 4 channels, not {array.shape[2]}.", 400)
        return self._prepare(Image.fromarray(np.ascontiguousarray(array)))

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON types, for a bundle."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ImageSpec":
        """Reverse `to_dict`.

        Raises:
            ValueError: a key is missing or unknown, or a value is out of range.
        """
        require_keys("an image spec", values, [field.name for field in fields(cls)])
        return cls(**values)

    def _draft(self, image: Image.Image) -> Extent:
        """Let libjpeg decode a large photo at a half, a quarter or an eighth of its size, to save most of the work.

        At least two pixels remain in both directions for each pixel of the result, so that the filter still averages:
        the result differs from a full decode by 0.4 of 255 levels on average and by 10 at most (two photos, nine output
        shapes). 1280 x 960 to 64 x 64 takes 3 ms instead of 15 (Pillow 13, November 2026).

        Returns:
            Width and height of the picture after decoding; the last column and row may be fractional.
        """
        side = 2 * max(self.height, self.width)  # whatever the orientation
        drafted = image.draft(None, (side, side))  # None: not a JPEG file
        return drafted[1][2:] if drafted else image.size

    def _prepare(
        self, image: Image.Image, extent: Extent | None = None, turn: Image.Transpose | None = None
    ) -> np.ndarray:
        image = _to_mode(image, self.mode)
        goal = (self.height, self.width) if turn in _SWAPS_SIDES else (self.width, self.height)
        image = self.fit(image, extent or image.size, goal)
        if turn is not None:  # after scaling, when fewer pixels are left
            image = image.transpose(turn)
        if image.size != (self.width, self.height):
            canvas = Image.new(image.mode, (self.width, self.height))
            canvas.paste(image, ((self.width - image.width) // 2, (self.height - image.height) // 2))
            image = canvas
        return np.frombuffer(image.tobytes(), dtype=np.uint8).copy().reshape(self.height, self.width, self.channels)

    def fit(
        self, image: Image.Image, extent: Extent, goal: tuple[int, int], resample: Image.Resampling = FILTER
    ) -> Image.Image:
        """Scale the part `extent` of an image to `goal` (width, height), or to fit into it."""
        if extent == goal:
            return image
        left = top = 0.0
        right, bottom = extent
        scales = (goal[0] / right, goal[1] / bottom)
        if self.resize == "pad":
            fitted = [max(1, round(side * min(scales))) for side in extent]
            goal = (fitted[0], fitted[1])
        elif self.resize == "crop":
            # Crop the source, not an enlarged copy: a picture of 1 x 1,000,000 stays harmless.
            kept = [min(side, wanted / max(scales)) for side, wanted in zip(extent, goal, strict=True)]
            left, top = (right - kept[0]) / 2, (bottom - kept[1]) / 2
            right, bottom = left + kept[0], top + kept[1]
        return image.resize(goal, resample, box=(left, top, right, bottom))


# Silence the messages that decoding TIFF prints to standard error: a file of 12 kB caused 2,000. This concerns libtiff,
# through its public interface, and Pillow's TIFF logger; other decoders print nothing (Pillow 13, November 2026). If
# Pillow is linked differently, libtiff still prints.
logging.getLogger("PIL.TiffImagePlugin").setLevel(logging.CRITICAL)
with contextlib.suppress(AttributeError, OSError):
    _library = ctypes.CDLL(Image.core.__file__)  # also finds symbols of the libraries that it is linked with
    _library.TIFFSetWarningHandler(None)
    _library.TIFFSetErrorHandler(None)


def shown_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of a picture as it is displayed, after the rotation that EXIF asks for."""
    return image.size[::-1] if image.format != "TIFF" and _turn(image) in _SWAPS_SIDES else image.size


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that makes a picture upright. The picture must be loaded: in some formats EXIF is read
    with the pixels."""
    try:
        return _TURNS.get(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # damaged EXIF; the pixels may be fine, and viewers show such a picture unrotated
        return None


def _to_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        image = _eight_bits(image)
    if image.has_transparency_data:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGB", layer.size, "white")
        image.paste(layer, mask=layer)
    if image.mode not in ("1", "L", "RGB"):  # palette, CMYK, YCbCr, LAB …
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert grey of more than 8 bits per sample to "L". Pillow's own conversion clips at 255.

    Integers are taken as 16 bits, of which the upper 8 are kept, as Pillow does for 16-bit colour. Floats have no
    fixed range: the first of 0 to 1, 0 to 255 and 0 to 65535 that contains all samples is used.
    """
    samples = np.asarray(image)
    low, high = float(samples.min()), float(samples.max())
    if not (low >= 0 and high <= 65535):  # also when a sample is not a number
        raise ImageError(
            f"The grey values run from {low:g} to {high:g}, which is neither 8 nor 16 bits; save it with 8 bits.", 415
        )
    if image.mode != "F":
        return Image.fromarray((samples >> 8).astype(np.uint8))
    top = next(top for top in (1, 255, 65535) if high <= top)
    return Image.fromarray(np.rint(samples * (255 / top)).astype(np.uint8))


def files_below(top: Path) -> Iterator[Path]:
    """Yield the files in a folder and below, without hidden ones, always in the same order.

    Links are followed; a folder that is reached twice counts once.

    Raises:
        OSError: a folder cannot be read.
    """
    seen = set()
    for name, below, names in os.walk(top, followlinks=True, onerror=_refuse):
        folder = Path(name)
        status = folder.stat()
        if (status.st_dev, status.st_ino) in seen:
            below.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        below[:] = sorted(inner for inner in below if not inner.startswith("."))
        yield from (folder / file for file in sorted(names) if not file.startswith("."))


def _refuse(error: OSError) -> None:
    raise error
