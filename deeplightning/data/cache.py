"""Image files decoded once: pixels in a file that later runs, and all processes of one, map into their memory.

`ImageCache.rows_of` takes paths and gives the mapped pixels, and the row of each path in them. The row of a file
follows from its state, never from its name:

- The state is device, inode, size, time of change and time of status change. A file in another state is decoded again,
  into another row.
- The name of the folder depends on all that determines the pixels: the `ImageSpec`, `deeplightning/image_spec.py`, the
  versions of Pillow and of its decoders, `max_pixels`. If one changes, all is decoded again, into another folder.

A folder (`deeplightning.data.cache_files`) has two files:

    pixels   row after row, uint8 (C, H, W)
    index    a `RECORD` for each row that counts; written once the pixels are on the disk

Rows are only ever added behind all others, so a map stays right whatever happens.

N samples, R rows, C channels, H height, W width.
"""

import logging
import math
import mmap
import os
import sys
import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import PIL
from PIL import features

from deeplightning import image_spec
from deeplightning.data import cache_files
from deeplightning.data.cache_files import Damaged, stat_of
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import in_threads
from deeplightning.image_spec import ImageError, ImageSpec

RECORD = np.dtype([("stat", "<u8", 5), ("sum", "<u8")])
"""Of a row: the state of its file, and its check sum."""

CHECKED = 2**30
"""Bytes of which check sums are compared when a set is opened: all of a smaller set, rows spread over a larger one."""

_LAYOUT = 5  # of the files
_CHUNK = 4 * 2**20  # bytes that one thread prepares at a time
_COMMIT = 2**28  # bytes of new rows after which the index is written

log = logging.getLogger(__name__)


class ImageCache:
    """The decoded images of one source under one spec.

    Args:
        top: the folder of all caches, made when there is something to write.
        source: a name of the set, which then has a folder of its own; any text will do.
        spec: how images are prepared; its mean and deviation do not matter.
        max_pixels: largest image file that is decoded.
        size: images of the whole set, for all of which there must be room.
    """

    def __init__(self, top: Path, source: str, spec: ImageSpec, max_pixels: int, size: int):
        self.top = top
        self._spec, self._max_pixels, self._size = spec, max_pixels, size
        self._shape = (spec.channels, spec.height, spec.width)
        self._row = math.prod(self._shape)
        self._source = source

    @cached_property
    def folder(self) -> Path:
        """The folder of these images."""
        spec = self._spec
        decoders = [features.version(name) for name in ("jpg", "webp", "avif", "libtiff")]
        code = Path(image_spec.__file__).read_bytes()
        parts = (spec.height, spec.width, spec.mode, spec.resize, self._max_pixels)
        return self.top / cache_files.folder_name(
            (_LAYOUT, sys.byteorder, *parts, code, PIL.__version__, *decoders), self._source
        )

    def rows_of(self, paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the pixels of image files; what has not been seen is decoded.

        Returns:
            uint8 (R, C, H, W), read-only, mapped; and the row of each path, int64 (N,). None: the cache cannot be used,
            and the log says why.

        Raises:
            DataError: if a file cannot be read as an image.
        """
        try:
            stats = stats_of(paths)
            return cache_files.find_or_make(self.folder, lambda: self._find(stats), lambda: self._add(paths, stats))
        except OSError as error:
            log.warning("Decoded images are not cached in %s: %s.", self.top, error.strerror or error)
        return None

    def _find(self, stats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels and rows of files in these states; raise FileNotFoundError if some are missing."""
        records, pixels = self._load()
        rows = find_rows(records["stat"], stats)
        if (rows < 0).any():
            raise FileNotFoundError(self.folder)
        self._check(pixels, records, rows)
        return pixels.reshape(-1, *self._shape), rows

    def _load(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the records of the folder, and its pixels, uint8 (R, bytes of a row), mapped; raise FileNotFoundError
        if it is not complete, and Damaged if there are fewer rows than it says."""
        with cache_files.in_use(self.folder / "pixels") as file:
            records = np.frombuffer(cache_files.read_index(self.folder), RECORD)
            size = len(records) * self._row
            if os.fstat(file.fileno()).st_size < size:
                raise Damaged
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        return records, np.frombuffer(mapped, np.uint8).reshape(-1, self._row)

    def _check(self, pixels: np.ndarray, records: np.ndarray, rows: np.ndarray) -> None:
        """Raise Damaged if one of these rows, or of `CHECKED` bytes of them, the first and last included, is not what
        was written."""
        number = min(len(rows), max(2, CHECKED // self._row))
        for row in np.sort(rows)[np.linspace(0, len(rows) - 1, number).astype(int)]:
            if zlib.crc32(pixels[row]) != records["sum"][row]:
                raise Damaged

    def _add(self, paths: Sequence[str], stats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decode what is missing, with the lock held."""
        try:
            records, pixels = self._load()
            self._check(pixels, records, np.arange(len(records)))
        except (FileNotFoundError, Damaged) as error:
            if isinstance(error, Damaged):
                log.warning("The decoded images in %s are damaged: they are decoded again.", self.folder)
            cache_files.remove(self.folder)
            records = np.empty(0, RECORD)
        rows = find_rows(records["stat"], stats)
        missing = np.flatnonzero(rows < 0)
        rows[missing] = np.arange(len(missing)) + len(records)
        row = self._row + RECORD.itemsize
        whole, size = self._size * row, (len(records) + len(missing)) * row
        if size > cache_files.limit_in_bytes() >= whole:  # most rows are of files that are gone
            cache_files.remove(self.folder)
            return self._add(paths, stats)
        words = f"{self._size:,} images take {whole / 2**30:.3g} GiB"
        cache_files.make_room(self.folder / "pixels", max(whole, size), len(missing) * row, words)
        log.info("Decoding %s images into %s", f"{len(missing):,}", self.folder)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with cache_files.in_use(self.folder / "pixels", "ab") as file:
                self._decode(file, [paths[n] for n in missing.tolist()], records)
        except OSError:  # the disk may be full
            cache_files.remove(self.folder)
            raise
        return self._load()[1].reshape(-1, *self._shape), rows

    def _decode(self, file: IO[bytes], paths: Sequence[str], records: np.ndarray) -> None:
        """Write the pixels of files behind the rows of these records, and the index every `_COMMIT` bytes."""
        made, committed, step = list[tuple[tuple[int, ...], int]](), 0, max(1, min(64, _CHUNK // self._row))
        file.truncate(len(records) * self._row)  # a process that was killed may have begun another row

        def commit() -> None:
            index = np.concatenate([records, np.array(made, RECORD)]).tobytes()
            cache_files.write_index(self.folder / "pixels", file, index)

        chunks = (paths[start : start + step] for start in range(0, len(paths), step))
        try:
            for _, read in in_threads(lambda some: [self._read(path) for path in some], chunks):
                for stat, pixels in read:
                    file.write(pixels)
                    made.append((stat, zlib.crc32(pixels)))
                if (len(made) - committed) * self._row >= _COMMIT:
                    commit()
                    committed = len(made)
        finally:
            if made:  # what is done stays done
                commit()

    def _read(self, path: str) -> tuple[tuple[int, ...], np.ndarray]:
        """Return state and pixels of a file, uint8 (bytes of a row,)."""
        try:
            with open(path, "rb") as file:  # noqa: PTH123 (40,000 times a minute)
                stat = stat_of(os.fstat(file.fileno()))
                return stat, self._spec.decode(file, self._max_pixels).transpose(2, 0, 1).reshape(-1)
        except (ImageError, OSError) as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error


def stats_of(paths: Sequence[str]) -> np.ndarray:
    """Return the states of files, uint64 (N, 5); raise DataError if one is missing."""
    found = []
    for path in paths:
        try:
            found.append(stat_of(os.stat(path)))  # noqa: PTH116 (a Path for each would take five times as long)
        except OSError as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error
    return np.array(found, dtype=np.uint64).reshape(-1, 5)


def find_rows(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return for each row of `wanted` where `table` has the same, int64 (n,); -1: nowhere."""
    places = {row.tobytes(): place for place, row in enumerate(np.ascontiguousarray(table))}
    return np.array([places.get(row.tobytes(), -1) for row in np.ascontiguousarray(wanted)], np.int64)
