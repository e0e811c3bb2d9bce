"""Image files decoded once: pixels in a file that later runs, and all processes of one, map into their memory.

`ImageCache.rows_of` takes paths and gives the mapped pixels, and the row of each path in them. Which row is a path's is
decided by what its file holds, never by its name:

- A file's content is told by its SHA-256. It is read again only where its device, inode, size, time of change or time
  of status change is another than when it was hashed. The last cannot be set by hand: a file replaced by one of the
  same size and time is seen, as is a link that leads elsewhere now. What was moved or touched is hashed, not decoded.
  A file that changed less than `SETTLED` before it was read is hashed at the next start again.
- What a content becomes stands in the name of the folder: the `ImageSpec`, `deeplightning/image.py` itself, the
  versions of Pillow and of its decoders, `max_pixels`. Where one changes, all is decoded again, into another folder.

The cache is a folder with one folder for each such rule and source of images. In each are four files:

    pixels   row after row, uint8 (C, H, W)
    rows     of each content SHA-256 (its first half), row, check sum; written once the pixels have reached the disk
    files    of each file seen: device, inode, size, both times, SHA-256
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
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from PIL import features

from deeplightning import image
from deeplightning.data.datasets import threads
from deeplightning.data.errors import DataConfigError, DataError
from deeplightning.image import ImageError, ImageSpec

try:
    import fcntl
except ImportError:  # Windows, which cannot remove a mapped file either
    fcntl = None  # type: ignore[assignment]

LIMIT = 20.0
"""GiB of the whole cache; `DEEPLIGHTNING_CACHE_LIMIT` overrides it. Half of the disk's free space stays free, too."""

CHECKED = 2**30
"""Bytes of which check sums are compared when a set is opened: all of a smaller set, rows spread over a larger one."""

SETTLED = 2.0
"""Seconds. A file system's clock ticks every few milliseconds, on some every other second: what is read within the tick
of its last change may change again without a trace."""

STALLED = 120.0
"""Seconds without a sign of life from the process that decodes, after which others go on without the cache."""

_LAYOUT = 1  # of the files
_NAMES = ("pixels", "rows", "lock")  # that a folder is made with
_OURS = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")  # nothing else in the user's folder is ever touched
_NEW, _GONE = ".deeplightning-new-", ".deeplightning-gone-"
_COMMIT = 64 * 2**20  # bytes after which new rows count
_CHUNK = 4 * 2**20  # bytes that one thread prepares at a time
_ROW = np.dtype([("digest", "<u8", 2), ("sum", "<u8"), ("row", "<u8")])
_FILE = np.dtype([("stat", "<u8", 5), ("digest", "<u8", 2)])
_ODD = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD], np.uint64
)
_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# Decoded images of Deep Lightning. They may be deleted at any time, also while runs use them.
"""

log = logging.getLogger(__name__)


class _Unusable(Exception):
    """The cache cannot take these images; the message says why."""


class _Damaged(Exception):
    """The cache does not hold what was written."""


_Elsewhere = dict[bytes, tuple[np.ndarray, int]]
"""By digest, pixels of another folder and their check sum."""


class _Read(NamedTuple):
    """A file's content; `pixels`: uint8 (bytes of a row,), None: they are there already."""

    stat: tuple[int, ...]
    digest: bytes
    pixels: np.ndarray | None


def cache_folder(cache: bool | str) -> Path | None:
    """Where decoded images go; None: nowhere.

    Args:
        cache: a folder; false: none; true: the one that `DEEPLIGHTNING_CACHE` names ("off": none), else
            `deeplightning/images` in the user's cache folder.
    """
    told = cache if isinstance(cache, str) else os.environ.get("DEEPLIGHTNING_CACHE", "")
    if cache is False or told.lower() == "off":
        return None
    try:
        if told:
            return Path(told).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "images"
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
        code = hashlib.sha256(Path(image.__file__).read_bytes()).hexdigest()
        parts = (spec.height, spec.width, spec.mode, spec.resize, self._max_pixels)
        rule = (_LAYOUT, sys.byteorder, *parts, code, PIL.__version__, *decoders)
        return self.top / f"{_name(repr(rule))}-{_name(self._source)}"

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
        except _Unusable as error:
            log.warning("Decoded images are not cached in %s: %s.", self.top, error)
        except OSError as error:
            log.warning("Decoded images are not cached in %s: %s.", self.top, error.strerror or error)
        return None

    def _rows_of(self, paths: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if fcntl is None:
            raise _Unusable("this system has no flock")
        stats = _stats(paths)
        for _ in range(5):  # another process may remove the folder between two steps, which then find nothing
            with contextlib.suppress(FileNotFoundError, _Damaged), _Folder(self.folder, self._row) as folder:
                if (found := self._look_up(folder, stats)) is not None:
                    return found
            self._make_folder()
            with contextlib.suppress(FileNotFoundError), _Folder(self.folder, self._row) as folder, folder.locked():
                try:  # what this process waited for may be what it looks for
                    return self._look_up(folder, stats) or self._add(folder, paths, stats)
                except _Damaged:
                    log.warning("The decoded images in %s are damaged: they are decoded again.", self.folder)
                    folder.remove()
        raise _Unusable("other processes remove it over and over")

    def _make_folder(self) -> None:
        """Makes sure that there is a whole one, at least for a moment."""
        self.top.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # there is none
            if {path.name for path in self.folder.iterdir()} >= {*_NAMES}:
                return
            _remove(self.folder)  # a part of it was deleted
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # another process does the same, or removes it
            made = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.top))
            try:
                (made / "CACHEDIR.TAG").write_text(_TAG)  # backups leave it out
                for name in _NAMES:
                    (made / name).touch(mode=0o600)
                made.rename(self.folder)
            except OSError as error:
                shutil.rmtree(made, ignore_errors=True)
                if error.errno != errno.ENOTEMPTY:
                    raise

    def _look_up(self, folder: "_Folder", stats: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """None: some are missing.

        Raises:
            _Damaged: if a row is not what was written.
            FileNotFoundError: if there is no such folder.
        """
        rows, files = folder.open(), folder.files()
        known = _find(files["stat"], stats)
        found = _find(rows["digest"], files["digest"][known]) if (known >= 0).all() else known
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
            if (_sums(pixels[rows[0] : rows[-1] + 1] if together else pixels[rows]) != some["sum"]).any():
                raise _Damaged

    def _add(self, folder: "_Folder", paths: Sequence[str], stats: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decodes what is missing, with the lock held."""
        rows, files, begun = folder.open(), folder.files(), time.time()
        known = _find(files["stat"], stats)
        digests = np.zeros((len(paths), 2), dtype="<u8")
        digests[known >= 0] = files["digest"][known[known >= 0]]
        missing = np.flatnonzero((known < 0) | (_find(rows["digest"], digests) < 0))
        try:
            self._make_room(folder, len(missing))
        except _Unusable:
            if not len(rows):  # it was made in vain
                folder.remove()
            raise
        log.info("Decoding %s images into %s", f"{len(missing):,}", self.folder)
        have = set(_texts(rows["digest"]))
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
            self._in_threads(missing, prepare, take)
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
        found = rows["row"][_find(rows["digest"], digests)]
        return folder.map().reshape(-1, *self._shape), found.astype(np.int64)

    def _read(self, path: str, have: set[bytes], elsewhere: _Elsewhere) -> _Read:
        try:
            with open(path, "rb") as file:  # noqa: PTH123 (40,000 times a minute)
                stat = _stat(os.fstat(file.fileno()))
                data = file.read()
            digest = hashlib.sha256(data).digest()[:16]
            if digest in have:
                return _Read(stat, digest, None)
            if digest in elsewhere:
                pixels, checked = elsewhere[digest]
                if _sums(pixels[None])[0] == checked:
                    return _Read(stat, digest, pixels)
            return _Read(stat, digest, self._spec.decode(data, self._max_pixels).transpose(2, 0, 1).reshape(-1))
        except (ImageError, OSError) as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error

    def _elsewhere(self) -> _Elsewhere:
        """What the same rule made of other sources: a data set that was copied is not decoded again."""
        found: _Elsewhere = {}
        for path in self.top.glob(f"{self.folder.name.partition('-')[0]}-*"):
            with contextlib.suppress(OSError, _Damaged, _Unusable), _Folder(path, self._row) as other:
                if path != self.folder and len(rows := other.open()):
                    pixels = other.map()
                    found |= {
                        text: (pixels[row], checked)
                        for text, row, checked in zip(_texts(rows["digest"]), rows["row"], rows["sum"], strict=True)
                    }
        return found

    def _in_threads(
        self,
        positions: np.ndarray,
        prepare: Callable[[int], _Read],
        take: Callable[[np.ndarray, list[_Read]], None],
    ) -> None:
        """Reads in threads (Pillow lets others run while it decodes), and takes the results in order."""
        step = max(1, min(64, _CHUNK // self._row))
        count = threads()
        waiting: deque[tuple[np.ndarray, Future[list[_Read]]]] = deque()
        with ThreadPoolExecutor(count) as pool:
            try:
                for start in range(0, len(positions), step):
                    chunk = positions[start : start + step]
                    waiting.append((chunk, pool.submit(lambda some: [prepare(one) for one in some], chunk)))
                    if len(waiting) > 2 * count:  # the disk may be slower than the threads
                        take(waiting[0][0], waiting.popleft()[1].result())
                while waiting:
                    take(waiting[0][0], waiting.popleft()[1].result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _make_room(self, folder: "_Folder", new: int) -> None:
        """Removes what is longest unused, so that so many rows fit.

        Raises:
            _Unusable: if they do not.
        """
        limit, row = _limit(), self._row + _ROW.itemsize + _FILE.itemsize
        size, words = self._size * row, f"{self._size:,} images take {self._size * row / 2**30:.3g} GiB"
        if size > limit:
            raise _Unusable(f"{words}, more than the {limit / 2**30:.3g} that DEEPLIGHTNING_CACHE_LIMIT allows")
        have = folder.rows_taken()
        if (have + new) * row > limit:  # most of them of files that are gone
            folder.remove()
            raise FileNotFoundError
        others = sorted(_caches(self.top, self.folder), key=lambda one: one[1])
        taken = sum(size for _, _, size in others)
        if not self._disk_has(new * row, besides=taken):
            raise _Unusable(f"{words}, and half of the disk's free space stays free")
        while taken + (have + new) * row > limit or not self._disk_has(new * row):
            if not others:
                raise _Unusable(f"{words}, and the rest of the cache is in use")
            path, _, size = others.pop(0)
            if _remove_unused(path):
                log.info("Removed the decoded images in %s: there was no room, and they were longest unused", path)
                taken -= size

    def _disk_has(self, size: int, besides: int = 0) -> bool:
        return size <= (shutil.disk_usage(self.top).free + besides) / 2


class _Folder:
    """The files of one folder of the cache, each opened once.

    Args:
        path: of the folder.
        row: bytes of a row.

    Raises:
        FileNotFoundError: on entering, if there is none.
        _Unusable: on entering, or when a file is opened, if another user could have written it.
    """

    def __init__(self, path: Path, row: int):
        self.path, self._row = path, row
        self._files = contextlib.ExitStack()
        self._adds, self._pixels, self._rows = False, -1, -1
        self._records = self._mapped = self._end = 0  # records; rows that they tell of; rows written
        self._written: list[np.ndarray] = []  # records of rows that do not count yet

    def __enter__(self) -> "_Folder":
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, self._folder)
            _refuse_foreign(self._folder, self.path)
            self._files = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _open(self, name: str, flags: int) -> int:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self._folder)
        self._files.callback(os.close, file)
        _refuse_foreign(file, self.path / name)
        return file

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Waits to be the one that adds.

        Raises:
            FileNotFoundError: the folder was removed meanwhile.
            _Unusable: the one that adds does nothing.
        """
        lock = self._lock = self._open("lock", os.O_RDWR)
        stamp, since, told = -1, time.monotonic(), False
        while not _locks(lock, fcntl.LOCK_EX):
            if (now := os.fstat(lock).st_mtime_ns) != stamp:
                stamp, since = now, time.monotonic()
            elif time.monotonic() - since > STALLED:
                raise _Unusable(f"the process that decodes into it has been silent for {STALLED:g} s")
            if not told:
                log.info("Waiting for another process that decodes images into %s", self.path)
                told = True
            time.sleep(0.05)
        if not os.path.samestat(self.path.stat(), os.fstat(self._folder)):
            raise FileNotFoundError
        self._adds = True
        yield

    def sign(self) -> None:
        """Shows those that wait that work goes on."""
        os.utime(self._lock)

    def open(self) -> np.ndarray:
        """Records of the rows that count; from now on the pixels are in use.

        Raises:
            _Damaged: if there are no such rows.
        """
        if self._pixels < 0:
            how = os.O_RDWR if self._adds else os.O_RDONLY
            self._pixels, self._rows = self._open("pixels", how), self._open("rows", how)
        if not _locks(self._pixels, fcntl.LOCK_SH):
            raise FileNotFoundError  # it is being removed
        rows, size = _array(self._rows, _ROW), os.fstat(self._pixels).st_size
        self._records, self._mapped = len(rows), int(rows["row"].max()) + 1 if len(rows) else 0
        self._end = -(-size // self._row)
        if size < self._mapped * self._row:
            raise _Damaged
        return rows

    def map(self) -> np.ndarray:
        """Pixels of the rows that count, uint8 (R, bytes of a row), read-only. They stay in use while they are mapped:
        the map has the lock as well."""
        mapped = mmap.mmap(self._pixels, self._mapped * self._row, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype=np.uint8).reshape(-1, self._row)

    def rows_taken(self) -> int:
        """With those that a killed process has left behind."""
        return self._end

    def touch(self) -> None:
        """Notes that it was used."""
        with contextlib.suppress(OSError):  # of another user
            os.utime(self._pixels)

    def files(self) -> np.ndarray:
        """Of the files seen, what they were and held."""
        try:
            return _array(self._open("files", os.O_RDONLY), _FILE)
        except FileNotFoundError:
            return np.empty(0, dtype=_FILE)

    def add(self, pixels: np.ndarray, digests: bytes) -> None:
        """Writes rows, uint8 (n, bytes of a row), which count from the next commit on."""
        _write(self._pixels, pixels, self._end * self._row)
        records = np.empty(len(pixels), dtype=_ROW)
        records["digest"] = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        records["sum"] = _sums(pixels)
        records["row"] = np.arange(self._end, self._end + len(pixels))
        self._end += len(pixels)
        self._written.append(records)
        if sum(map(len, self._written)) * self._row >= _COMMIT:
            self.commit()

    def commit(self) -> None:
        """Makes the rows written count, once they have reached the disk."""
        if not self._written:
            return
        records = np.concatenate(self._written)
        os.fsync(self._pixels)
        _write(self._rows, records, self._records * _ROW.itemsize)
        self._records, self._mapped = self._records + len(records), self._end
        self._written.clear()

    def note(self, files: np.ndarray, stats: np.ndarray, digests: np.ndarray) -> None:
        """Writes down what files held, in the place of what the same ones held before."""
        kept = files[_find(stats[:, :2], files["stat"][:, :2]) < 0]
        new = np.empty(len(stats), dtype=_FILE)
        new["stat"], new["digest"] = stats, digests
        beside = self._open("files.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        _write(beside, np.concatenate([kept, new]), 0)
        os.replace("files.new", "files", src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def give_up(self, everything: bool) -> None:
        """Leaves nothing behind of what could not be written, or of all: the disk may be full."""
        if everything:
            self.remove()
        else:
            with contextlib.suppress(OSError):
                os.ftruncate(self._pixels, self._mapped * self._row)  # nobody maps more

    def remove(self) -> None:
        """Removes the folder, with the lock held. Who has mapped the pixels can go on reading them."""
        _remove(self.path)


def _refuse_foreign(file: int, path: Path) -> None:
    """A check sum is no proof of where pixels come from: whoever can write them can write it too.

    Raises:
        _Unusable: an open file or folder is of another user than this one and root, or others may write it.
    """
    status = os.fstat(file)
    if not _is_ours(status):
        whose = "others may write it" if status.st_uid in (os.geteuid(), 0) else "it is of another user"
        raise _Unusable(f"{path} is left alone, since {whose}")


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _remove(path: Path) -> None:
    gone = path.with_name(f"{_GONE}{os.getpid()}-{time.monotonic_ns()}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _remove_unused(path: Path) -> bool:
    """Whether a folder of the cache could be removed: no process uses it or adds to it."""
    with contextlib.suppress(OSError, _Unusable), _Folder(path, 1) as folder:
        lock, pixels = folder._open("lock", os.O_RDWR), folder._open("pixels", os.O_RDWR)
        if _locks(lock, fcntl.LOCK_EX) and _locks(pixels, fcntl.LOCK_EX):
            folder.remove()
            return True
    return False


def _caches(top: Path, but: Path) -> Iterator[tuple[Path, float, int]]:
    """The other folders: path, when last used, bytes. What killed processes have left of one is taken away; what other
    users have put there is left alone."""
    for path in top.iterdir():
        with contextlib.suppress(OSError):
            if not _is_ours(path.lstat()):
                continue
            if path.name.startswith(_GONE) or (path.name.startswith(_NEW) and _age(path) > 3600):
                shutil.rmtree(path, ignore_errors=True)
            elif path != but and _OURS.fullmatch(path.name):
                yield path, -_age(path / "pixels"), sum((path / name).stat().st_size for name in _NAMES)


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def _limit() -> float:
    """Bytes."""
    told = os.environ.get("DEEPLIGHTNING_CACHE_LIMIT") or LIMIT
    with contextlib.suppress(ValueError):
        if (limit := float(told)) >= 0:
            return limit * 2**30
    raise DataConfigError(f"DEEPLIGHTNING_CACHE_LIMIT must be a number of GiB, not {told!r}.")


def _locks(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stats(paths: Sequence[str]) -> np.ndarray:
    """What tells one state of a file from another, uint64 (N, 5)."""
    found = []
    for path in paths:
        try:
            found.append(_stat(os.stat(path)))  # noqa: PTH116 (a Path for each would take five times as long)
        except OSError as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error
    return np.array(found, dtype=np.uint64).reshape(-1, 5)


def _stat(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size, time of change, time of status change."""
    times = (status.st_mtime_ns % 2**64, status.st_ctime_ns % 2**64)  # before 1970 they are negative
    return (status.st_dev, status.st_ino, status.st_size, *times)


def _find(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each row of `wanted`, uint64 (n, k), where `table` (m, k) has the same, int64 (n,); -1: nowhere."""
    if not len(table):
        return np.full(len(wanted), -1)
    keys, sought = ((rows * _ODD[: rows.shape[1]]).sum(axis=1) for rows in (table, wanted))
    order = np.argsort(keys)
    place = order[np.minimum(np.searchsorted(keys, sought, sorter=order), len(table) - 1)]
    return np.where((table[place] == wanted).all(axis=1), place, -1)


def _sums(pixels: np.ndarray) -> np.ndarray:
    """A check sum of each row, uint64 (n,): of its words. Any flipped bit changes it, as does a page that was lost."""
    return (pixels.view("<u8") if pixels.shape[1] % 8 == 0 else pixels).sum(axis=1, dtype=np.uint64)


def _texts(digests: np.ndarray) -> list[bytes]:
    return np.ascontiguousarray(digests).view("V16").ravel().tolist()


def _array(file: int, kind: np.dtype) -> np.ndarray:
    """All whole records of a file."""
    data = os.pread(file, os.fstat(file).st_size, 0)
    return np.frombuffer(data, dtype=kind, count=len(data) // kind.itemsize)


def _write(file: int, array: np.ndarray, place: int) -> None:
    left = memoryview(array.tobytes())
    while left:
        written = os.pwrite(file, left, place)
        left, place = left[written:], place + written


def _name(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
