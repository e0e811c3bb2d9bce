"""Decode image files once, into a file of pixels that all processes of this run and of later ones map into memory.

`decoded` takes paths and returns the mapped pixels and the row of each path in them. A folder
(`deeplightning.data.cache_files`) has the images of one set of files. Its name is a digest of all that determines the
pixels; if any of it changes, all files are decoded again, into another folder:

- the state of each file: device, inode, size, modification time and status change time, but not its path;
- the `ImageSpec`, `deeplightning/image_spec.py`, the versions of Pillow and of its decoders, `max_pixels`.

It contains two files:

    pixels   row after row, uint8 (C, H, W)
    index    the checksum of each row

N paths, R files of different states, C channels, H height, W width.
"""

import hashlib
import logging
import math
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL
from PIL import features

from deeplightning import image_spec
from deeplightning.data import cache_files
from deeplightning.data.cache_files import Damaged, stat_of
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import in_threads
from deeplightning.image_spec import ImageError, ImageSpec

CHECKSUM_BYTES = 2**30
"""Bytes whose checksums are verified when a set is opened: all of a smaller set, evenly spaced rows of a larger one."""

_LAYOUT = 6  # version of the files in a folder
_CHUNK_BYTES = 4 * 2**20  # that one thread prepares at a time

log = logging.getLogger(__name__)


def decoded(top: Path, spec: ImageSpec, max_pixels: int, paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the pixels of image files; decode them if they are not in the cache.

    Args:
        top: the folder of the cache, created when there is something to write.
        spec: how images are prepared; its mean and deviation are not used.
        max_pixels: largest image file that is decoded.

    Returns:
        uint8 (R, C, H, W), read-only, mapped, and the row of each path, int64 (N,); or None if the cache cannot be
        used, with the reason in the log.

    Raises:
        DataError: a file cannot be read as an image.
    """
    states, first, rows = np.unique(_states_of(paths), axis=0, return_index=True, return_inverse=True)
    folder = top / cache_files.folder_name(rule_of(spec, max_pixels), hashlib.sha256(states.tobytes()).hexdigest())
    files = [(paths[position], tuple(state)) for position, state in zip(first.tolist(), states.tolist(), strict=True)]
    shape = (len(states), spec.channels, spec.height, spec.width)
    try:
        pixels = cache_files.find_or_make(
            folder, lambda: _map_pixels(folder, shape), lambda: _decode(folder, files, spec, max_pixels)
        )
    except OSError as error:
        log.warning("Decoded images are not cached in %s: %s.", top, error.strerror or error)
        return None
    return pixels, rows.reshape(-1)  # numpy 2.0 gives (N, 1)


def rule_of(spec: ImageSpec, max_pixels: int) -> tuple[object, ...]:
    """Return all that determines the pixels of an image, apart from the file."""
    decoders = [features.version(name) for name in ("jpg", "webp", "avif", "libtiff")]
    code = Path(image_spec.__file__).read_bytes()
    return (_LAYOUT, spec.height, spec.width, spec.mode, spec.resize, max_pixels, code, PIL.__version__, *decoders)


def _map_pixels(folder: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return the mapped pixels of a folder. Raise FileNotFoundError if it is incomplete or being removed, Damaged if
    the size or the checksum of a row is wrong; see `CHECKSUM_BYTES`."""
    with cache_files.open_locked(folder / "pixels") as file:
        sums = np.frombuffer(cache_files.read_index(folder), "<u4")
        if len(sums) != shape[0] or os.fstat(file.fileno()).st_size != math.prod(shape):
            raise Damaged
        pixels = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8).reshape(shape)
    number = min(len(sums), max(2, CHECKSUM_BYTES // math.prod(shape[1:])))
    for row in np.linspace(0, len(sums) - 1, number).astype(int):
        if zlib.crc32(pixels[row]) != sums[row]:
            raise Damaged
    return pixels


def _decode(folder: Path, files: Sequence[tuple[str, tuple[int, ...]]], spec: ImageSpec, max_pixels: int) -> None:
    """Decode files, given with their states, and write the pixels and the index."""
    row, sums = spec.channels * spec.height * spec.width, list[int]()
    size = len(files) * (row + 4)
    cache_files.make_room(folder / "pixels", size, f"{len(files):,} images take {size / 2**30:.3g} GiB")
    log.info("Decoding %s images into %s", f"{len(files):,}", folder)

    def read(path: str, state: tuple[int, ...]) -> np.ndarray:
        try:
            with open(path, "rb") as file:  # noqa: PTH123 (40,000 times a minute)
                if stat_of(os.fstat(file.fileno())) != state:
                    raise DataError(f"{path}: was changed while it was read. Run again when it is complete.")
                return spec.decode(file, max_pixels).transpose(2, 0, 1).reshape(-1)
        except (ImageError, OSError) as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error

    step = max(1, min(64, _CHUNK_BYTES // row))
    chunks = (files[start : start + step] for start in range(0, len(files), step))
    with cache_files.open_locked(folder / "pixels", "x+b") as file:  # on NFS, a shared lock needs a readable file
        for _, images in in_threads(lambda chunk: [read(*one) for one in chunk], chunks):
            for pixels in images:
                file.write(pixels)
                sums.append(zlib.crc32(pixels))
        cache_files.write_index(folder / "pixels", file, np.array(sums, "<u4").tobytes())


def _states_of(paths: Sequence[str]) -> np.ndarray:
    """Return the states of files, uint64 (N, 5); raise DataError if one is missing."""
    found = []
    for path in paths:
        try:
            found.append(stat_of(os.stat(path)))  # noqa: PTH116 (a Path for each would take five times as long)
        except OSError as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error
    return np.array(found, dtype=np.uint64).reshape(-1, 5)
