"""The files of one folder of the cache of decoded images, and the room that all its folders take.

`deeplightning.data.cache` describes the files, and when a folder is made, read and removed.
"""

import contextlib
import functools
import hashlib
import logging
import mmap
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from deeplightning.data.data_errors import DataConfigError, DataError

try:
    import fcntl
except ImportError:  # Windows, which cannot remove a mapped file either
    fcntl = None  # type: ignore[assignment]

LIMIT = 20.0
"""GiB of the whole cache; `DEEPLIGHTNING_CACHE_LIMIT` overrides it. Half of the disk's free space stays free, too."""

STALLED = 120.0
"""Seconds without a sign of life from the process that decodes, after which others go on without the cache."""

NAMES = ("pixels", "rows", "lock")  # that a folder is made with
_OURS = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")  # nothing else in the user's folder is ever touched
NEW, _GONE = ".deeplightning-new-", ".deeplightning-gone-"
_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# {} of Deep Lightning. They may be deleted at any time, also while runs use them.
"""
_COMMIT = 64 * 2**20  # bytes after which new rows count
ROW = np.dtype([("digest", "<u8", 2), ("sum", "<u8"), ("row", "<u8")])
FILE = np.dtype([("stat", "<u8", 5), ("digest", "<u8", 2), ("sum", "<u8")])
_ODD = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD], np.uint64
)

log = logging.getLogger(__name__)


class Unusable(Exception):
    """The cache cannot take these images; the message says why."""


class Damaged(Exception):
    """The cache does not hold what was written."""


class CacheFolder:
    """The files of one folder of the cache, each opened once.

    Args:
        path: of the folder.
        row: bytes of a row.

    Raises:
        FileNotFoundError: on entering, if the folder does not exist.
        Unusable: on entering, or when a file is opened, if another user could have written it.
    """

    def __init__(self, path: Path, row: int):
        self.path, self._row = path, row
        self._files = contextlib.ExitStack()
        self._adds, self._pixels, self._rows = False, -1, -1
        self._records = self._mapped = self._end = 0  # records; rows that they describe; rows written
        self._written: list[np.ndarray] = []  # records of rows that do not count yet

    def __enter__(self) -> "CacheFolder":
        if fcntl is None:
            raise Unusable("this system has no flock")
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, self._folder)
            refuse_foreign(self._folder, self.path)
            self._files = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def open_file(self, name: str, flags: int) -> int:
        """Return a file of the folder, opened."""
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self._folder)
        self._files.callback(os.close, file)
        refuse_foreign(file, self.path / name)
        return file

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Waits to be the one that adds.

        Raises:
            FileNotFoundError: the folder was removed meanwhile.
            Unusable: the one that adds does nothing.
        """
        lock = self._lock = self.open_file("lock", os.O_RDWR)
        stamp, since, logged = -1, time.monotonic(), False
        while not locks(lock, fcntl.LOCK_EX):
            if (now := os.fstat(lock).st_mtime_ns) != stamp:
                stamp, since = now, time.monotonic()
            elif time.monotonic() - since > STALLED:
                raise Unusable(f"the process that decodes into it has been silent for {STALLED:g} s")
            if not logged:
                log.info("Waiting for another process that decodes images into %s", self.path)
                logged = True
            time.sleep(0.05)
        if not os.path.samestat(self.path.stat(), os.fstat(self._folder)):
            raise FileNotFoundError
        self._adds = True
        yield

    def sign(self) -> None:
        """Shows the processes that wait that this one is still working."""
        os.utime(self._lock)

    def open(self) -> np.ndarray:
        """Records of the rows that count; from now on the pixels are in use.

        Raises:
            Damaged: if there are no such rows.
        """
        if self._pixels < 0:
            how = os.O_RDWR if self._adds else os.O_RDONLY
            self._pixels, self._rows = self.open_file("pixels", how), self.open_file("rows", how)
        if not locks(self._pixels, fcntl.LOCK_SH):
            raise FileNotFoundError  # it is being removed
        rows, size = _array(self._rows, ROW), os.fstat(self._pixels).st_size
        self._records, self._mapped = len(rows), int(rows["row"].max()) + 1 if len(rows) else 0
        self._end = -(-size // self._row)
        if size < self._mapped * self._row:
            raise Damaged
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
        """Of the files seen, what they were and held; records that are damaged are left out."""
        try:
            found = _array(self.open_file("files", os.O_RDONLY), FILE)
        except FileNotFoundError:
            return np.empty(0, dtype=FILE)
        return found[found["sum"] == marks(found)]

    def add(self, pixels: np.ndarray, digests: bytes) -> None:
        """Writes rows, uint8 (n, bytes of a row), which count from the next commit on."""
        _write(self._pixels, pixels, self._end * self._row)
        records = np.empty(len(pixels), dtype=ROW)
        records["digest"] = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        records["row"] = np.arange(self._end, self._end + len(pixels))
        records["sum"] = sums(pixels) + marks(records)
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
        _write(self._rows, records, self._records * ROW.itemsize)
        self._records, self._mapped = self._records + len(records), self._end
        self._written.clear()

    def note(self, files: np.ndarray, stats: np.ndarray, digests: np.ndarray) -> None:
        """Writes down what files held, in the place of what the same ones held before."""
        kept = files[find_rows(stats[:, :2], files["stat"][:, :2]) < 0]
        new = np.empty(len(stats), dtype=FILE)
        new["stat"], new["digest"] = stats, digests
        new["sum"] = marks(new)
        beside = self.open_file("files.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
        """Removes the folder, with the lock held. A process that has mapped the pixels can still read them."""
        remove_folder(self.path)


def refuse_foreign(file: int, path: Path) -> None:
    """A check sum is no proof of where pixels come from: whoever can write them can write it too.

    Raises:
        Unusable: an open file or folder is of another user than this one and root, or others may write it.
    """
    status = os.fstat(file)
    if not is_ours(status):
        whose = "others may write it" if status.st_uid in (os.geteuid(), 0) else "it is of another user"
        raise Unusable(f"{path} is left alone, since {whose}")


def is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def remove_folder(path: Path) -> None:
    gone = path.with_name(f"{_GONE}{os.getpid()}-{time.monotonic_ns()}")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_unused(path: Path, data: str = "pixels") -> bool:
    """Whether a folder of the cache could be removed: no process uses it or adds to it. `data`: the file that those
    who use it hold a shared lock on."""
    with contextlib.suppress(OSError, Unusable), CacheFolder(path, 1) as folder:
        lock, pixels = folder.open_file("lock", os.O_RDWR), folder.open_file(data, os.O_RDWR)
        if locks(lock, fcntl.LOCK_EX) and locks(pixels, fcntl.LOCK_EX):
            folder.remove()
            return True
    return False


def caches(top: Path, but: Path, names: Sequence[str] = NAMES) -> Iterator[tuple[Path, float, int]]:
    """The other folders: path, when last used, bytes. What killed processes have left of one is taken away; what other
    users have put there is left alone. `names`: the files of each, of which the first shows when it was used."""
    for path in top.iterdir():
        with contextlib.suppress(OSError):
            if not is_ours(path.lstat()):
                continue
            if path.name.startswith(_GONE) or (path.name.startswith(NEW) and _age(path) > 3600):
                shutil.rmtree(path, ignore_errors=True)
            elif path != but and _OURS.fullmatch(path.name):
                yield path, -_age(path / names[0]), sum((path / name).stat().st_size for name in names)


@contextlib.contextmanager
def new_folder(folder: Path, content: str) -> Iterator[Path]:
    """Make a folder beside its place, and move it there when the block has filled it.

    Args:
        content: what is in it, for people who find it.
    """
    made = Path(tempfile.mkdtemp(prefix=NEW, dir=folder.parent))
    try:
        (made / "CACHEDIR.TAG").write_text(_TAG.format(content))  # backups leave it out
        yield made
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def make_room(folder: Path, size: int, new: int, words: str, written: int = 0, names: Sequence[str] = NAMES) -> None:
    """Remove what is longest unused, so that a folder fits; half of the disk's free space stays free.

    Args:
        size: bytes of the folder when it is complete.
        new: those of them that it does not have yet.
        words: what takes so much, for messages.
        written: bytes of `new` that are on the disk already.
        names: the files of each folder.

    Raises:
        Unusable: it does not fit.
    """
    limit = limit_in_bytes()
    others = sorted(caches(folder.parent, folder, names), key=lambda one: one[1])
    taken = sum(size for _, _, size in others)

    def disk_has(besides: int = 0) -> bool:
        return new <= (shutil.disk_usage(folder.parent).free + written + besides) / 2

    if size > limit:
        raise Unusable(f"{words}, more than the {limit / 2**30:.3g} GiB that DEEPLIGHTNING_CACHE_LIMIT allows")
    if not disk_has(besides=taken):
        raise Unusable(f"{words}, and half of the disk's free space stays free")
    while taken + size > limit or not disk_has():
        if not others:
            raise Unusable(f"{words}, and the rest of the cache is in use")
        path, _, gone = others.pop(0)
        if remove_unused(path, names[0]):
            log.info("Removed %s: there was no room, and it was longest unused", path)
            taken -= gone


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def limit_in_bytes() -> float:
    """Of the whole cache, bytes.

    Raises:
        DataConfigError: `DEEPLIGHTNING_CACHE_LIMIT` is not a number of GiB.
    """
    given = os.environ.get("DEEPLIGHTNING_CACHE_LIMIT") or LIMIT
    with contextlib.suppress(ValueError):
        if (limit := float(given)) >= 0:
            return limit * 2**30
    raise DataConfigError(f"DEEPLIGHTNING_CACHE_LIMIT must be a number of GiB, not {given!r}.")


def locks(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def stats_of(paths: Sequence[str]) -> np.ndarray:
    """What tells one state of a file from another, uint64 (N, 5)."""
    found = []
    for path in paths:
        try:
            found.append(stat_of(os.stat(path)))  # noqa: PTH116 (a Path for each would take five times as long)
        except OSError as error:
            raise DataError(f"{path}: cannot be used as an image. {error}") from error
    return np.array(found, dtype=np.uint64).reshape(-1, 5)


def stat_of(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size, time of change, time of status change."""
    times = (status.st_mtime_ns % 2**64, status.st_ctime_ns % 2**64)  # before 1970 they are negative
    return (status.st_dev, status.st_ino, status.st_size, *times)


def find_rows(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each row of `wanted`, uint64 (n, k), where `table` (m, k) has the same, int64 (n,); -1: nowhere."""
    if not len(table):
        return np.full(len(wanted), -1)
    keys, sought = ((rows * _ODD[: rows.shape[1]]).sum(axis=1) for rows in (table, wanted))
    order = np.argsort(keys)
    place = order[np.minimum(np.searchsorted(keys, sought, sorter=order), len(table) - 1)]
    return np.where((table[place] == wanted).all(axis=1), place, -1)


def sums(pixels: np.ndarray) -> np.ndarray:
    """A check sum of each row, uint64 (n,): of its words, each with a weight of its own. Any flipped bit changes it, as
    does a page that was lost, or words that were swapped."""
    words = pixels.view("<u8") if pixels.shape[1] % 8 == 0 else pixels
    return (words * _weights(words.shape[1])).sum(axis=1, dtype=np.uint64)


def marks(records: np.ndarray) -> np.ndarray:
    """A check sum of all that records hold besides their `sum`, uint64 (n,)."""
    names = [name for name in records.dtype.names or () if name != "sum"]
    words = np.column_stack([records[name] for name in names])
    return (words * _weights(words.shape[1])).sum(axis=1, dtype=np.uint64)


@functools.lru_cache(8)
def _weights(count: int) -> np.ndarray:
    """Odd ones, uint64 (count,): a product with one has all bits of the other factor."""
    return (np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)) * _ODD[0]


def texts(digests: np.ndarray) -> list[bytes]:
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


def short_hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]
