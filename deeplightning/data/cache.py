"""Image files decoded once: pixels in a file that later runs, and all processes of one, map into their memory.

`ImageCache.rows_of` takes paths and gives the mapped pixels, and the row of each path in them. The row of a file
follows from what it holds, never from its name:

- A file's content is told by its SHA-256. It is read again only where its device, inode, size, time of change or time
  of status change is another than when it was hashed. What was moved or touched is hashed, not decoded. A file that
  changed less than `SETTLED` before it was read is hashed at the next start again.
- What a content becomes stands in the name of the folder: the `ImageSpec`, `deeplightning/image_spec.py` itself, the
  versions of Pillow and of its decoders, `max_pixels`. Where one changes, all is decoded again, into another folder.

A folder (`deeplightning.data.cache_files`) has two files:

    pixels   row after row, uint8 (C, H, W)
    index    a `RECORD` for each file seen; written once the pixels are on the disk

Rows are only ever added behind all others, so a map stays right whatever happens.

N samples, R rows, C channels, H height, W width.
"""

import contextlib
import hashlib
import logging
import math
import mmap
import os
import sys
import time
import zlib
from collections.abc import Container, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import PIL
from PIL import features

from deeplightning import image_spec
from deeplightning.data import cache_files
from deeplightning.data.cache_files import Damaged, Unusable, stat_of
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import in_threads, report_messages
from deeplightning.image_spec import ImageError, ImageSpec

RECORD = np.dtype([("stat", "<u8", 5), ("digest", "V16"), ("row", "<i8"), ("sum", "<u8")])
"""Of a file: its state (all 0: not settled), the first half of its SHA-256, its row, the check sum of this row."""

CHECKED = 2**30
"""Bytes of which check sums are compared when a set is opened: all of a smaller set, rows spread over a larger one."""

_LAYOUT = 3  # of the files
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
            for _ in range(5):  # another process may remove the folder between two steps, which then find nothing
                if (found := self._find(stats)) is not None:
                    return found
                with contextlib.suppress(FileNotFoundError), cache_files.alone(self.folder / "pixels"):
                    # What this process waited for may be what it looks for.
                    return self._find(stats) or self._add(paths, stats)
            raise Unusable("other processes remove it over and over")
        except Unusable as error:
            log.warning("Decoded images are not cached in %s: %s.", self.top, error)
        except OSError as error:
            log.warning("Decoded images are not cached in %s: %s.", self.top, error.strerror or error)
        return None

    def _find(self, stats: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the pixels and rows of files in these states; None: some are missing."""
        with contextlib.suppress(FileNotFoundError, Damaged):
            records, pixels = self._load()
            if ((known := find_rows(records["stat"], stats)) >= 0).all():
                self._check(pixels, records[known])
                with contextlib.suppress(OSError):  # a folder that may only be read
                    os.utime(self.folder / "pixels")  # it was used
                return pixels.reshape(-1, *self._shape), records["row"][known]
        return None

    def _load(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the records of the folder, and its pixels, uint8 (R, bytes of a row), mapped.

        Raises:
            FileNotFoundError: the folder is not complete.
            Damaged: there are fewer rows than it says.
        """
        with cache_files.in_use(self.folder / "pixels") as file:
            records = np.frombuffer(cache_files.read_index(self.folder), RECORD)
            size = (int(records["row"].max(initial=0)) + 1) * self._row
            if os.fstat(file).st_size < size:
                raise Damaged
            mapped = mmap.mmap(file, size, access=mmap.ACCESS_READ)
        return records, np.frombuffer(mapped, np.uint8).reshape(-1, self._row)

    def _check(self, pixels: np.ndarray, records: np.ndarray) -> None:
        """Compare the check sums of all these rows, or of `CHECKED` bytes of them, the first and last included.

        Raises:
            Damaged: a row is not what was written.
        """
        rows, first = np.unique(records["row"], return_index=True)
        chosen = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), max(2, CHECKED // self._row))).astype(int))
        for row, checked in zip(rows[chosen].tolist(), records["sum"][first[chosen]].tolist(), strict=True):
            if zlib.crc32(pixels[row]) != checked:
                raise Damaged

    def _add(self, paths: Sequence[str], stats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decode what is missing, with the lock held."""
        records = np.empty(0, RECORD)
        try:
            there, pixels = self._load()
            self._check(pixels, there)  # what has one of these contents is not decoded again
            records = there
        except FileNotFoundError:
            cache_files.remove(self.folder)
        except Damaged:
            log.warning("The decoded images in %s are damaged: they are decoded again.", self.folder)
            cache_files.remove(self.folder)
        known = find_rows(records["stat"], stats)
        missing = np.flatnonzero(known < 0)
        self._make_room(len(np.unique(records["row"])), len(missing))
        log.info("Decoding %s images into %s", f"{len(missing):,}", self.folder)
        cache_files.make_folder(self.folder)
        with cache_files.in_use(self.folder / "pixels", os.O_RDWR | os.O_CREAT) as file:
            found = self._decode(file, records, known, paths)
        return self._load()[1].reshape(-1, *self._shape), found["row"].copy()

    def _decode(self, file: int, records: np.ndarray, known: np.ndarray, paths: Sequence[str]) -> np.ndarray:
        """Return the record of each path; those that are not among `records`, at the places `known`, are made."""
        there, begun = known >= 0, time.time()
        found = np.zeros(len(paths), RECORD)
        found[there] = records[known[there]]
        rows = dict(zip(records["digest"].tolist(), records[["row", "sum"]].tolist(), strict=True))
        committed = first = number = int(records["row"].max(initial=-1)) + 1

        def commit() -> None:
            os.fsync(file)
            if there.any():
                cache_files.write_index(self.folder / "pixels", file, _merged(records, found[there]).tobytes())

        try:
            missing, step = np.flatnonzero(~there), max(1, min(64, _CHUNK // self._row))
            chunks = (missing[start : start + step] for start in range(0, len(missing), step))
            for chunk, read in in_threads(lambda some: [self._read(paths[n], rows) for n in some], chunks):
                for position, (stat, digest, pixels) in zip(chunk, read, strict=True):
                    if digest not in rows:
                        assert pixels is not None, "a row that was there stays there"
                        cache_files.write(file, pixels, number * self._row)
                        rows[digest], number = (number, zlib.crc32(pixels)), number + 1
                    # One that changed just before it was read is hashed again.
                    settled = stat if stat[4] < (begun - cache_files.SETTLED) * 1e9 else (0,) * 5
                    found[position], there[position] = (settled, digest, *rows[digest]), True
                os.utime(file)  # a sign of life
                if (number - committed) * self._row >= _COMMIT:
                    commit()
                    committed = number
            commit()
        except OSError:  # nothing is left of what could not be written: the disk may be full
            if not first:
                cache_files.remove(self.folder)
            with contextlib.suppress(OSError):
                os.ftruncate(file, committed * self._row)
            raise
        except BaseException:  # what is done stays done
            with contextlib.suppress(OSError):
                commit()
            raise
        return found

    def _read(self, path: str, have: Container[bytes]) -> tuple[tuple[int, ...], bytes, np.ndarray | None]:
        """Return state, digest and pixels of a file, uint8 (bytes of a row,); None: these are there already."""
        try:
            with open(path, "rb") as file:  # noqa: PTH123 (40,000 times a minute)
                stat = stat_of(os.fstat(file.fileno()))
                data = file.read()
            digest = hashlib.sha256(data).digest()[:16]
            if digest in have:
                return stat, digest, None
            return stat, digest, self._spec.decode(data, self._max_pixels).transpose(2, 0, 1).reshape(-1)
        except (ImageError, OSError) as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error
        finally:
            report_messages(path)

    def _make_room(self, have: int, new: int) -> None:
        """Remove what is longest unused, so that so many rows fit.

        Raises:
            Unusable: they do not fit.
            FileNotFoundError: this folder was removed: most of its rows are of files that are gone.
        """
        row = self._row + RECORD.itemsize
        whole, size = self._size * row, (have + new) * row
        if size > cache_files.limit_in_bytes() >= whole:
            cache_files.remove(self.folder)
            raise FileNotFoundError
        words = f"{self._size:,} images take {whole / 2**30:.3g} GiB"
        cache_files.make_room(self.folder / "pixels", max(whole, size), new * row, words)


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


def _merged(records: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return records with new ones in the place of those of the same files; of files that are not settled, of those of
    the same content."""
    of_file = find_rows(new["stat"][:, :2], records["stat"][:, :2])
    outdated = np.where(records["stat"][:, 1] > 0, of_file, find_rows(new["digest"], records["digest"]))
    return np.concatenate([records[outdated < 0], new])
