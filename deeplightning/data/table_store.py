"""A table larger than memory: its numbers, read once in parts, are kept in files that all processes of this run and of
later ones map into memory.

The copy keeps the values of the table, not the inputs of one network, so that other seeds, folds and sets of the same
columns read the same copy. The name of its folder is a digest of the kinds of the columns, of the file's device, inode,
size and times, and of the code that reads it; when one of them changes, the table is read again into another folder.
Each folder contains:

    numbers   row after row, float64 (N, n), the columns of numbers; NaN: missing
    codes     row after row, int32 (N, c), the columns of words: the position of the row's word; -1: missing
    times     row after row, bytes (N, 64): the text by which the rows are in order of time, UTF-8
    words     JSON: N, the columns, and the words of each
    lock      as in the cache of images

A folder is made beside its place, under a lock, and renamed when all of it has reached the disk. Deleting it is safe at
any time: what is mapped stays readable. As in `deeplightning.data.cache`, nothing is used that another user than this
one and root could have written; the longest unused is removed where there is no room, and none that is in use.

N rows, n columns of numbers, c of words.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeplightning.data import cache_files
from deeplightning.data.cache import SETTLED, cache_folder
from deeplightning.data.cache_files import (
    CacheFolder,
    Unusable,
    locks,
    make_room,
    new_folder,
    refuse_foreign,
    short_hash,
)
from deeplightning.data.data_errors import DataError
from deeplightning.table_spec import Words

NAMES = ("numbers", "codes", "times", "words", "lock")
TIME = np.dtype("S64")
"""Of the text by which rows are in order of time; longer ones are refused."""

MOST_WORDS = 1_000_000
"""The most different words that are held in memory of a column that nobody has called a category."""

_LAYOUT = 1
_STEP = 2**12  # rows that are read at a time
_KEPT = 2**15  # rows after which what was mapped for them is released: 2 GiB at most, where each maps 64 KiB
_SIGN = 2**28  # bytes after which it is looked whether there is room for more

log = logging.getLogger("deeplightning.data")

Part = Mapping[str, Any]
"""Some rows that follow each other, by column: float64 (n,), or words."""


class TableStore:
    """The numbers of one table, mapped; a copy in a loader worker maps them again.

    Args:
        path: of the folder.

    Attributes:
        columns: their names, in the order of the table.
        words: of each column of words those that occur, in the order in which they do.

    Raises:
        FileNotFoundError: there is no such folder, or it is being removed.
        Unusable: another user could have written it, or it is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        with CacheFolder(path, 1) as folder:
            files = {name: folder.open_file(name, os.O_RDONLY) for name in NAMES}
            if not locks(files["numbers"], cache_files.fcntl.LOCK_SH):  # the map holds it as well
                raise FileNotFoundError(path)
            found = json.loads(os.pread(files["words"], os.fstat(files["words"]).st_size, 0))
            self._rows: int = found["rows"]
            self.columns: list[str] = found["columns"]
            self.words: dict[str, list[str]] = found["words"]
            self._numbers: list[str] = found["numbers"]
            self._maps: list[mmap.mmap] = []
            self._read = 0  # rows since the last release
            self._values = self._map(files["numbers"], np.dtype("<f8"), len(self._numbers))
            self._codes = self._map(files["codes"], np.dtype("<i4"), len(self.words))
            self._times: str | None = found["times"]
            self._longest = np.dtype(f"S{found['longest']}")
            self._texts = self._map(files["times"], TIME, 1 if self._times else 0)
            with contextlib.suppress(OSError):  # of another user
                os.utime(files["numbers"])

    def _map(self, file: int, kind: np.dtype, width: int) -> np.ndarray:
        size = self._rows * width * kind.itemsize
        if os.fstat(file).st_size != size:
            raise Unusable(f"{self.path} is damaged; delete it")
        if not size:
            return np.empty((self._rows, width), kind)
        self._maps.append(mmap.mmap(file, size, access=mmap.ACCESS_READ))
        return np.frombuffer(self._maps[-1], kind).reshape(self._rows, width)

    def __reduce__(self) -> Any:
        return TableStore, (self.path,)

    def __len__(self) -> int:
        return self._rows

    def read(self, positions: np.ndarray) -> dict[str, "np.ndarray | Words"]:
        """Some rows, int (n,), by column: copies, in memory."""
        values, codes = self._gathered(self._values, positions), self._gathered(self._codes, positions).astype(np.int64)
        found: dict[str, Any] = {name: values[:, place] for place, name in enumerate(self._numbers)}
        found |= {name: Words(words, codes[:, place]) for place, (name, words) in enumerate(self.words.items())}
        if self._times:
            found[self._times] = self._gathered(self._texts, positions)[:, 0]
        return {name: found[name] for name in self.columns}

    def column(self, name: str, positions: np.ndarray) -> "np.ndarray | Words":
        """One column of some rows, int (n,): float64 (n,), words, or the texts of the time, bytes (n,)."""
        is_words = name in self.words
        if name == self._times:
            source, place, kind = self._texts, 0, self._longest
        elif is_words:
            source, place, kind = self._codes, list(self.words).index(name), np.dtype(np.int64)
        else:
            source, place, kind = self._values, self._numbers.index(name), np.dtype(np.float64)
        found = self._gathered(source[:, place], positions, kind)
        return Words(self.words[name], found) if is_words else found

    def _gathered(self, source: np.ndarray, positions: np.ndarray, kind: np.dtype | None = None) -> np.ndarray:
        found = np.empty((len(positions), *source.shape[1:]), kind or source.dtype)
        for start in range(0, len(positions), _STEP):
            some = positions[start : start + _STEP]
            found[start : start + _STEP] = source[some]
            self._read += len(some)
            if self._read >= _KEPT:
                self._read = 0
                self._release()
        return found

    def _release(self) -> None:
        """What has been read stays with the system, which takes it back when it likes, and does not count as memory of
        this process."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for one in self._maps:
                one.madvise(mmap.MADV_DONTNEED)


def stored(
    path: Path,
    parts: Iterable[Part],
    rule: Sequence[Any],
    *,
    bounded: Sequence[str] = (),
    times: str | None = None,
    code: Sequence[Path] = (),
) -> TableStore:
    """The numbers of a table; what has not been read before is read.

    Args:
        path: of the table.
        parts: its rows; asked for only where they are not there yet.
        rule: plain values by which the columns are read.
        bounded: columns of which more than `MOST_WORDS` different words are refused.
        times: the column of words of which each row's own text is kept.
        code: the files of the program that make the parts.

    Raises:
        DataError: the table is not as it should be.
        Unusable: there is no cache, or no room in it; the message says why.
        OSError: likewise.
    """
    top = cache_folder(True, "tables")
    if top is None:
        raise Unusable("DEEPLIGHTNING_CACHE is off")
    programs = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (Path(__file__), *code)]
    before = path.stat()
    if (young := before.st_ctime + SETTLED - time.time()) > 0:  # it may change again without a trace
        time.sleep(min(young, SETTLED))
        before = path.stat()
    digest = repr((_LAYOUT, sys.byteorder, programs, *rule, bounded, times))
    folder = top / f"{short_hash(digest)}-{short_hash(repr(cache_files.stat_of(before)))}"
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    opened = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        refuse_foreign(opened, top)
    finally:
        os.close(opened)
    with contextlib.suppress(FileNotFoundError):
        return TableStore(folder)
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_suffix(".lock"), mode=0o600)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock.acquire(timeout=0))
        except Timeout:
            log.info("Waiting for another process that reads %s into %s", path, folder)
            held.enter_context(lock)
        for _ in range(5):  # another process may remove a folder before this one has opened it
            with contextlib.suppress(FileNotFoundError):
                return TableStore(folder)
            if folder.is_dir():  # a part of it was deleted
                cache_files.remove_folder(folder)
            _make(folder, path, parts, bounded, times)
            if cache_files.stat_of(path.stat()) != cache_files.stat_of(before):
                cache_files.remove_folder(folder)
                raise DataError(f"{path} was changed while it was read. Run again when it is whole.")
    raise Unusable("other processes remove it over and over")


def _make(folder: Path, path: Path, parts: Iterable[Part], bounded: Sequence[str], times: str | None) -> None:
    log.info("Reading %s, which is large, into %s", path, folder)
    known: dict[str, dict[str, int]] = {}  # of each column of words, the position of each
    columns: list[str] = []
    numbers: list[str] = []
    rows = size = looked = 0
    longest = 1
    with new_folder(folder, "Tables, as numbers,") as made, contextlib.ExitStack() as files:
        opened = {name: files.enter_context(_new(made / name)) for name in NAMES}
        for part in parts:
            if not columns:
                columns = list(part)
                numbers = [name for name, values in part.items() if not isinstance(values, Words)]
                known = {name: {} for name in columns if name not in numbers and name != times}
            count = len(part[columns[0]])
            values = np.empty((count, len(numbers)), "<f8")
            for place, name in enumerate(numbers):
                values[:, place] = part[name]
            codes = np.empty((count, len(known)), "<i4")
            for place, (name, positions) in enumerate(known.items()):
                found = part[name]
                assert isinstance(found, Words), "the columns of each part are of the same kinds"
                numbered = [positions.setdefault(word, len(positions)) for word in found.words]
                codes[:, place] = np.array([*numbered, -1])[found.indices]
                if name in bounded and len(positions) > MOST_WORDS:
                    raise DataError(
                        f"{path}, column {name}: more than {MOST_WORDS:,} different texts. Set "
                        f"data.module.params.columns.{name} to ignore, or to category if you mean that many."
                    )
            texts = _texts(path, times, part[times], rows) if times else np.empty(0, TIME)
            longest = max(longest, int(np.strings.str_len(texts).max(initial=0)))
            for name, array in (("numbers", values), ("codes", codes), ("times", texts)):
                opened[name].write(array.tobytes())
                size += array.nbytes
            rows += count
            if size - looked >= _SIGN:
                make_room(folder, size, size, f"{path} takes {size / 2**30:.3g} GiB", size, NAMES)
                looked = size
        table = {
            "rows": rows,
            "columns": columns,
            "numbers": numbers,
            "words": {name: list(positions) for name, positions in known.items()},
            "times": times,
            "longest": longest,
        }
        opened["words"].write(json.dumps(table).encode())
        make_room(folder, size, size, f"{path} takes {size / 2**30:.3g} GiB", size, NAMES)
        for file in opened.values():
            file.flush()
            os.fsync(file.fileno())


def _new(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _texts(path: Path, name: str, values: "np.ndarray | Words", before: int) -> np.ndarray:
    """The text of each row, bytes (n,), empty where it is missing; `before`: rows of former parts."""
    assert isinstance(values, Words), "the column of the time holds words"
    encoded = [word.encode() for word in values.words]
    for number, word in enumerate(encoded):
        if len(word) > TIME.itemsize:
            row = before + int((values.indices == number).argmax()) + 1
            raise DataError(f"{path}, column {name}, row {row}: a time has {TIME.itemsize} bytes at most.")
    return np.array([*encoded, b""], TIME)[values.indices]
