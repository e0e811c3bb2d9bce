"""Folders of the user's caches: where they are, how processes share them, and how much disk space they take together.

A cache has a folder for each rule by which data is prepared and each source of data; its name is a digest of both. A
folder contains a data file, which processes map into memory, and the file `index`, which describes it and is written
last. One process at a time creates or removes a folder; it holds the lock file beside the folder. A process that has
mapped the data file holds a shared lock on it. To free space, the least recently used folder is removed, never one that
is in use. Deleting a folder by hand is safe at any time: mapped data stays readable.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from deeplightning.data.data_errors import DataConfigError

T = TypeVar("T")

LIMIT_GIB = 20.0
"""Size of the whole cache; `DEEPLIGHTNING_CACHE_LIMIT` overrides it. Half of the free disk space stays free, too."""

_FOLDER_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")  # nothing else in the user's folder is ever touched

log = logging.getLogger("deeplightning.data")


class Unusable(OSError):
    """The cache cannot be used for this data; the message has the reason."""


class Damaged(Exception):
    """The content of the cache is not what was written."""


def cache_folder(cache: bool | str, kind: str = "images") -> Path | None:
    """Return the folder of a cache, or None if caching is off.

    Args:
        cache: a folder; false: off; true: the one that `DEEPLIGHTNING_CACHE` names ("off": none), else
            `deeplightning/images` in the user's cache folder.
        kind: another name instead of `images`, for other data.
    """
    given = cache if isinstance(cache, str) else os.environ.get("DEEPLIGHTNING_CACHE", "")
    if cache is False or given.lower() == "off":
        return None
    try:
        if given:
            return Path(given).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / kind
    except RuntimeError:  # no home directory
        return None


def folder_name(rule: object, source: object) -> str:
    """Return the name of the folder for data of a source, prepared by a rule; the `repr` of each identifies it."""
    return "-".join(hashlib.sha256(os.fsencode(repr(one))).hexdigest()[:16] for one in (rule, source))


def stat_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what identifies a state of a file: device, inode, size, modification time, status change time.

    The last one cannot be set, so it reveals a file that was replaced by one of the same size and time.
    """
    times = (status.st_mtime_ns % 2**64, status.st_ctime_ns % 2**64)  # before 1970 they are negative
    return (status.st_dev, status.st_ino, status.st_size, *times)


# ---- one folder


@contextlib.contextmanager
def open_locked(data: Path, mode: str = "rb") -> Iterator[IO[bytes]]:
    """Open a data file with a shared lock, which a map of the file keeps.

    Raises:
        FileNotFoundError: the file does not exist, or it is being removed.
        Unusable: another user could have written it.
    """
    refuse_foreign(data.parent)
    with data.open(mode) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileNotFoundError(data) from None
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(data)  # mark as used
        yield file


def find_or_make(folder: Path, find: Callable[[], T], make: Callable[[], None]) -> T:
    """Return the result of `find`. If it raises FileNotFoundError or Damaged, one process creates the folder and fills
    it by `make`, and the others find the result. A folder that cannot be completed is removed."""
    from filelock import FileLock

    with contextlib.suppress(FileNotFoundError, Damaged):
        return find()
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock"), mode=0o600):
        try:
            return find()
        except FileNotFoundError:
            pass
        except Damaged:
            log.warning("%s is damaged and is rebuilt.", folder)
        remove(folder)
        try:
            folder.mkdir(mode=0o700)
            make()
        except BaseException:
            remove(folder)
            raise
        return find()


def remove(folder: Path) -> None:
    """Remove a folder, the index first."""
    (folder / "index").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def write_index(data: Path, file: IO[bytes], content: bytes) -> None:
    """Write a data file to disk, then its index; raise FileNotFoundError if the file has been deleted."""
    file.flush()
    os.fsync(file.fileno())
    temporary = data.with_name("index.new")
    temporary.write_bytes(zlib.crc32(content).to_bytes(4) + content)
    if not os.path.samestat(data.stat(), os.fstat(file.fileno())):
        raise FileNotFoundError(data)
    temporary.replace(data.with_name("index"))


def read_index(folder: Path) -> bytes:
    """Return the content that `write_index` wrote.

    Raises:
        FileNotFoundError: the folder is incomplete.
        Damaged: the checksum is wrong.
    """
    found = (folder / "index").read_bytes()
    if zlib.crc32(found[4:]).to_bytes(4) != found[:4]:
        raise Damaged
    return found[4:]


def refuse_foreign(folder: Path) -> None:
    """Raise Unusable if a folder belongs to a user other than this one and root, or others may write into it."""
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0)
    if not is_ours or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unusable(f"{folder} is not used: others may write into it")


# ---- disk space


def make_room(data: Path, size: int, purpose: str, written: int = 0) -> None:
    """Remove the least recently used folders until this one fits; half of the free disk space stays free.

    Args:
        data: the data file of this folder; other folders of the cache have one of the same name.
        size: bytes of the folder when it is complete.
        purpose: what takes how much space, for messages.
        written: how many of these bytes are on disk already.

    Raises:
        Unusable: it does not fit beside the folders in use.
    """
    from filelock import FileLock

    folder, limit, others = data.parent, limit_in_bytes(), list[tuple[float, int, Path]]()
    for path in folder.parent.iterdir():
        with contextlib.suppress(OSError):
            if path != folder and _FOLDER_NAME.fullmatch(path.name):
                used = (path / data.name).stat().st_mtime
                others.append((used, sum(file.stat().st_size for file in path.iterdir()), path))
    others.sort()
    taken = sum(occupied for _, occupied, _ in others)

    def fits(taken: int, removed: int = 0) -> bool:
        free = shutil.disk_usage(folder.parent).free + written + removed
        return taken + size <= limit and size <= free / 2

    while not fits(taken):
        if not others or not fits(0, removed=taken):
            raise Unusable(
                f"{purpose}, more than DEEPLIGHTNING_CACHE_LIMIT ({limit / 2**30:.3g} GiB) and half of the free disk "
                "allow beside the folders in use"
            )
        _, occupied, path = others.pop(0)
        with (
            contextlib.suppress(OSError),
            FileLock(path.with_suffix(".lock"), timeout=0),
            open_locked(path / data.name, "r+b") as file,  # on NFS, an exclusive lock needs a writable file
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
            log.info("Removed %s to make room: it was the least recently used", path)
            taken -= occupied


def limit_in_bytes() -> float:
    """Return the limit of the whole cache in bytes; raise DataConfigError if the variable is not a number of GiB."""
    given = os.environ.get("DEEPLIGHTNING_CACHE_LIMIT") or LIMIT_GIB
    with contextlib.suppress(ValueError):
        if (limit := float(given)) >= 0:
            return limit * 2**30
    raise DataConfigError(f"DEEPLIGHTNING_CACHE_LIMIT must be a number of GiB, not {given!r}.")
