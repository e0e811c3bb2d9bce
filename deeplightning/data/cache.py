"""Image files decoded once: pixels in a file that later runs, and all processes of one, map into their memory.

`ImageCache.rows_of` takes paths and gives the mapped pixels, and the row of each path in them. Which row is a path's is
decided by what its file holds, never by its name:

- A file's content is told by its SHA-256. It is read again only where its device, inode, size, time of change or time
  of status change is another than when it was hashed. The last cannot be set by hand: a file replaced by one of the
  same size and time is seen, as is a link that leads elsewhere now. What was moved or touched is hashed, not decoded.
  A file that changed less than `SETTLED` before it was read is hashed at the next start again.
- What a content becomes stands in the name of the folder: the `ImageSpec`, `deeplightning/image_spec.py` itself, the
  versions of Pillow and of its decoders, `max_pixels`. Where one changes, all is decoded again, into another folder.

The cache is a folder with one folder for each such rule and source of images. In each are four files:

    pixels   row after row, uint8 (C, H, W)
    rows     of each content SHA-256 (its first half), check sum of all, row; written once the pixels are on the disk
    files    of each file seen: device, inode, size, both times, SHA-256, check sum of these
    lock     held by the one process that adds rows; those that wait for it take what it has decoded

Rows are only ever added behind all others, so a map stays right whatever happens. A process that maps `pixels` holds a
shared lock on it. A folder is removed as a whole by a process that holds its `lock`: when there is no room (the longest
unused goes first, none in use) or a row is damaged. Deleting it by hand is safe at any time: what is mapped stays
readable, a folder is made whole and one that lacks a file is not used, and all files are opened relative to the opened
folder, so nothing is ever mixed with a later one of the same name. A folder or file that belongs to another user than
this one and root, or that others may write, is never used.

N samples, R rows, C channels, H height, W width.
"""

import contextlib
import errno
import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from PIL import features

from deeplightning import image_spec
from deeplightning.data.cache_files import (
    FILE,
    NAMES,
    ROW,
    CacheFolder,
    Damaged,
    Unusable,
    find_rows,
    limit_in_bytes,
    make_room,
    marks,
    new_folder,
    remove_folder,
    short_hash,
    stat_of,
    stats_of,
    sums,
    texts,
)
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import in_threads, report_messages
from deeplightning.image_spec import ImageError, ImageSpec

CHECKED = 2**30
"""Bytes of which check sums are compared when a set is opened: all of a smaller set, rows spread over a larger one."""

SETTLED = 2.0
"""Seconds. A file system's clock ticks every few milliseconds, on some every other second: what is read within the tick
of its last change may change again without a trace."""

_LAYOUT = 2  # of the files
_CHUNK = 4 * 2**20  # bytes that one thread prepares at a time

log = logging.getLogger(__name__)


_Elsewhere = dict[bytes, tuple[np.ndarray, int]]
"""By digest, pixels of another folder and their check sum."""


class _Read(NamedTuple):
    """A file's content; `pixels`: uint8 (bytes of a row,), None: they are there already."""

    stat: tuple[int, ...]
    digest: bytes
    pixels: np.ndarray | None


def cache_folder(cache: bool | str, kind: str = "images") -> Path | None:
    """Where decoded images go; None: nowhere.

    Args:
        cache: a folder; false: none; true: the one that `DEEPLIGHTNING_CACHE` names ("off": none), else
            `deeplightning/images` in the user's cache folder.
        kind: another folder in that of the user, for what is no image.
    """
    given = cache if isinstance(cache, str) else os.environ.get("DEEPLIGHTNING_CACHE", "")
    if cache is False or given.lower() == "off":
        return None
    try:
        if given:
            return Path(given).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / kind
    except RuntimeError:  # a user without a home
        return None


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
        """Of these images."""
        spec = self._spec
        decoders = [features.version(name) for name in ("jpg", "webp", "avif", "libtiff")]
        code = hashlib.sha256(Path(image_spec.__file__).read_bytes()).hexdigest()
        parts = (spec.height, spec.width, spec.mode, spec.resize, self._max_pixels)
        rule = (_LAYOUT, sys.byteorder, *parts, code, PIL.__version__, *decoders)
        return self.top / f"{short_hash(repr(rule))}-{short_hash(self._source)}"

    def rows_of(self, paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """The pixels of image files; what has not been seen is decoded.

        Returns:
            uint8 (R, C, H, W), read-only, mapped; and the row of each path, int64 (N,). None: the cache cannot be used,
            and the log says why.

        Raises:
            DataError: if a file cannot be read as an image.
        """
        try:
            return self._rows_of(paths)
        except Unusable as error:
            log.warning("Decoded images are not cached in %s: %s.", self.top, error)
        except OSError as error:
            log.warning("Decoded images are not cached in %s: %s.", self.top, error.strerror or error)
        return None

    def _rows_of(self, paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        stats = stats_of(paths)
        for _ in range(5):  # another process may remove the folder between two steps, which then find nothing
            with contextlib.suppress(FileNotFoundError, Damaged), CacheFolder(self.folder, self._row) as folder:
                if (found := self._look_up(folder, stats)) is not None:
                    return found
            self._make_folder()
            with contextlib.suppress(FileNotFoundError), CacheFolder(self.folder, self._row) as folder, folder.locked():
                try:  # what this process waited for may be what it looks for
                    return self._look_up(folder, stats) or self._add(folder, paths, stats)
                except Damaged:
                    log.warning("The decoded images in %s are damaged: they are decoded again.", self.folder)
                    folder.remove()
        raise Unusable("other processes remove it over and over")

    def _make_folder(self) -> None:
        """Make sure that there is a complete one, at least for a moment."""
        self.top.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # there is none
            if {path.name for path in self.folder.iterdir()} >= {*NAMES}:
                return
            remove_folder(self.folder)  # a part of it was deleted
        try:
            with new_folder(self.folder, "Decoded images") as made:
                for name in NAMES:
                    (made / name).touch(mode=0o600)
        except OSError as error:  # another process does the same, or removes it
            if error.errno not in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY):
                raise

    def _look_up(self, folder: "CacheFolder", stats: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """None: some are missing.

        Raises:
            Damaged: if a row is not what was written.
            FileNotFoundError: if there is no such folder.
        """
        rows, files = folder.open(), folder.files()
        known = find_rows(files["stat"], stats)
        found = find_rows(rows["digest"], files["digest"][known]) if (known >= 0).all() else known
        if (found < 0).any():
            return None
        pixels = folder.map()
        self._check(pixels, rows[np.unique(found)])
        folder.touch()
        return pixels.reshape(-1, *self._shape), rows["row"][found].astype(np.int64)

    def _check(self, pixels: np.ndarray, records: np.ndarray) -> None:
        """Compares check sums: of all these rows, or of `CHECKED` bytes of them, the first and last included."""
        most = max(2, CHECKED // self._row)
        if len(records) > most:
            records = records[np.linspace(0, len(records) - 1, most).astype(np.int64)]
        step = max(1, 2**20 // self._row)
        for start in range(0, len(records), step):
            some = records[start : start + step]
            rows = some["row"].astype(np.int64)
            together = (np.diff(rows) == 1).all()
            found = sums(pixels[rows[0] : rows[-1] + 1] if together else pixels[rows])
            if (found + marks(some) != some["sum"]).any():
                raise Damaged

    def _add(self, folder: "CacheFolder", paths: Sequence[str], stats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decodes what is missing, with the lock held.

        Raises:
            Damaged: if a row is not what was written.
        """
        rows, files, begun = folder.open(), folder.files(), time.time()
        if len(rows):  # what has one of these contents is not decoded again
            self._check(folder.map(), rows)
        known = find_rows(files["stat"], stats)
        digests = np.zeros((len(paths), 2), dtype="<u8")
        digests[known >= 0] = files["digest"][known[known >= 0]]
        missing = np.flatnonzero((known < 0) | (find_rows(rows["digest"], digests) < 0))
        try:
            self._make_room(folder, len(missing))
        except Unusable:
            if not len(rows):  # it was made in vain
                folder.remove()
            raise
        log.info("Decoding %s images into %s", f"{len(missing):,}", self.folder)
        have = set(texts(rows["digest"]))
        elsewhere = self._elsewhere()
        read = [False] * len(paths)

        def prepare(position: int) -> _Read:
            return self._read(paths[position], have, elsewhere)

        def take(chunk: np.ndarray, contents: list[_Read]) -> None:
            new = {one.digest: one.pixels for one in contents if one.pixels is not None and one.digest not in have}
            if new:
                folder.add(np.stack([*new.values()]), b"".join(new))
                have.update(new)
            for position, one in zip(chunk, contents, strict=True):
                stats[position] = one.stat
                digests[position] = np.frombuffer(one.digest, dtype="<u8")
                read[position] = True
            folder.sign()

        try:
            step = max(1, min(64, _CHUNK // self._row))
            chunks = (missing[start : start + step] for start in range(0, len(missing), step))
            for chunk, contents in in_threads(lambda some: [prepare(one) for one in some], chunks):
                take(chunk, contents)
            folder.commit()
        except OSError:
            folder.give_up(everything=len(rows) == 0)
            raise
        except BaseException:  # what is done stays done
            with contextlib.suppress(OSError):
                folder.commit()
            raise
        finally:
            # Those that changed just before they were read are left out, to be hashed again.
            settled = np.flatnonzero(np.array(read) & (stats[:, 4] < (begun - SETTLED) * 1e9))
            with contextlib.suppress(OSError):
                folder.note(files, stats[settled], digests[settled])
        rows = folder.open()
        found = rows["row"][find_rows(rows["digest"], digests)]
        return folder.map().reshape(-1, *self._shape), found.astype(np.int64)

    def _read(self, path: str, have: set[bytes], elsewhere: _Elsewhere) -> _Read:
        try:
            with open(path, "rb") as file:  # noqa: PTH123 (40,000 times a minute)
                stat = stat_of(os.fstat(file.fileno()))
                data = file.read()
            digest = hashlib.sha256(data).digest()[:16]
            if digest in have:
                return _Read(stat, digest, None)
            if digest in elsewhere:
                pixels, checked = elsewhere[digest]
                if sums(pixels[None])[0] == checked:
                    return _Read(stat, digest, pixels)
            return _Read(stat, digest, self._spec.decode(data, self._max_pixels).transpose(2, 0, 1).reshape(-1))
        except (ImageError, OSError) as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error
        finally:
            report_messages(path)

    def _elsewhere(self) -> _Elsewhere:
        """What the same rule made of other sources: a data set that was copied is not decoded again."""
        found: _Elsewhere = {}
        for path in self.top.glob(f"{self.folder.name.partition('-')[0]}-*"):
            with contextlib.suppress(OSError, Damaged, Unusable), CacheFolder(path, self._row) as other:
                if path != self.folder and len(rows := other.open()):
                    pixels, expected = other.map(), rows["sum"] - marks(rows)
                    found |= {
                        text: (pixels[row], checked)
                        for text, row, checked in zip(texts(rows["digest"]), rows["row"], expected, strict=True)
                    }
        return found

    def _make_room(self, folder: "CacheFolder", new: int) -> None:
        """Remove what is longest unused, so that so many rows fit.

        Raises:
            Unusable: if they do not.
        """
        limit, row = limit_in_bytes(), self._row + ROW.itemsize + FILE.itemsize
        size, words = self._size * row, f"{self._size:,} images take {self._size * row / 2**30:.3g} GiB"
        if size > limit:
            raise Unusable(f"{words}, more than the {limit / 2**30:.3g} that DEEPLIGHTNING_CACHE_LIMIT allows")
        have = folder.rows_taken()
        if (have + new) * row > limit:  # most of them of files that are gone
            folder.remove()
            raise FileNotFoundError
        make_room(self.folder, (have + new) * row, new * row, words)
