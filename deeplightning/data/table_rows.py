"""Rows of a table before they are prepared: in memory, or, of a table larger than memory, in a copy on the disk, which
all processes of this run and of later ones map. Both give the same numbers.

The copy keeps the values of the table, not the inputs of one network, so that other seeds, folds and sets of the same
columns read the same copy. The name of its folder (`deeplightning.data.cache_files`) is a digest of the kinds of the
columns, of the file's state, and of the code that reads it; when one of them changes, the table is read again into
another folder. It has these files:

    rows    row after row, the columns of numbers, float64 (n,), NaN: missing; and the columns of words, int32 (c,): the
            position of the row's word, -1: missing
    index   JSON: N, the columns, and the words of each

N rows, B batch, F columns that the network takes, n columns of numbers, c of words.
"""

import contextlib
import json
import logging
import mmap
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deeplightning.data import cache_files
from deeplightning.data.cache_files import Damaged, Unusable, stat_of
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import Batch, Divisible
from deeplightning.table_spec import TableSpec, Words

if TYPE_CHECKING:  # a loader worker needs no pyarrow
    from deeplightning.data.table_files import TableFile

CHUNK = 2**16
"""Rows of which statistics are made at a time, in memory and on the disk: so both have equal bits."""

MOST_WORDS = 1_000_000
"""The most different words that are held in memory of a column that nobody has called a category."""

_STEP = 2**12  # rows that are read at a time
_KEPT = 2**15  # rows after which what was mapped for them is released: 2 GiB at most, where each maps 64 KiB
_SIGN = 2**28  # bytes after which it is looked whether there is room for more

log = logging.getLogger("deeplightning.data")

Column = np.ndarray | Words
"""float64 (n,), or words."""

Part = Mapping[str, Any]
"""Some rows that follow each other, by column."""


class Table:
    """A table in memory, with the same methods as a `TableStore`.

    Args:
        columns: by name.
    """

    def __init__(self, columns: Part):
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def read(self, positions: np.ndarray) -> Part:
        """Return some rows, int (n,), by column."""
        return {name: self.column(name, positions) for name in self._columns}

    def column(self, name: str, positions: np.ndarray) -> Column:
        """Return one column of some rows, int (n,)."""
        values = self._columns[name]
        return Words(values.words, values.indices[positions]) if isinstance(values, Words) else values[positions]


class TableStore:
    """The numbers of one table, mapped; a copy in a loader worker maps them again.

    Args:
        path: of the folder.

    Raises:
        FileNotFoundError: the folder is not complete, or it is being removed.
        Damaged: it is not what was written.
        Unusable: another user could have written it.
    """

    def __init__(self, path: Path):
        self.path = path
        with cache_files.in_use(path / "rows") as file:
            found = json.loads(cache_files.read_index(path))
            self._columns: list[str] = found["columns"]
            self._words: dict[str, list[str]] = found["words"]
            self._numbers: list[str] = found["numbers"]
            self._read = 0  # rows since the last release
            kind = _record(self._numbers, self._words)
            if os.fstat(file).st_size != found["rows"] * kind.itemsize:
                raise Damaged
            self._map: Any = mmap.mmap(file, 0, access=mmap.ACCESS_READ) if found["rows"] else b""
            self._rows = np.frombuffer(self._map, kind)
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(path / "rows")  # it was used

    def __reduce__(self) -> Any:
        return TableStore, (self.path,)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, positions: np.ndarray) -> Part:
        """Return some rows, int (n,), by column: copies, in memory."""
        rows = self._gathered(self._rows, positions)
        values, codes = rows["numbers"], rows["codes"].astype(np.int64)
        found: dict[str, Any] = {name: values[:, place] for place, name in enumerate(self._numbers)}
        found |= {name: Words(words, codes[:, place]) for place, (name, words) in enumerate(self._words.items())}
        return {name: found[name] for name in self._columns}

    def column(self, name: str, positions: np.ndarray) -> Column:
        """Return one column of some rows, int (n,)."""
        if name in self._words:
            codes = self._rows["codes"][:, list(self._words).index(name)]
            return Words(self._words[name], self._gathered(codes, positions).astype(np.int64))
        return self._gathered(self._rows["numbers"][:, self._numbers.index(name)], positions)

    def _gathered(self, source: np.ndarray, positions: np.ndarray) -> np.ndarray:
        found = np.empty(len(positions), source.dtype)
        for start in range(0, len(positions), _STEP):
            some = positions[start : start + _STEP]
            found[start : start + _STEP] = source[some]
            self._read += len(some)
            if self._read >= _KEPT and hasattr(mmap, "MADV_DONTNEED"):
                self._read = 0  # the system keeps it while it likes, and not as memory of this process
                self._map.madvise(mmap.MADV_DONTNEED)
        return found


@dataclass(frozen=True)
class Rows(Divisible):
    """Rows of a table.

    Attributes:
        table: holds them, and others.
        positions: theirs, int32 or int64 (N,).
        labels: int32 or int64 (N,), by which they are divided evenly.
    """

    shared = ("table",)

    table: Table | TableStore
    positions: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    def load(self, positions: np.ndarray | slice) -> Part:
        """Return some rows in memory."""
        return self.table.read(self.positions[positions])

    def column(self, name: str) -> Column:
        """Return one column, in memory."""
        return self.table.column(name, self.positions)

    def parts(self) -> Iterator[Part]:
        """Yield all rows, `CHUNK` at a time."""
        return (self.load(slice(start, start + CHUNK)) for start in range(0, max(1, len(self)), CHUNK))


def encoded(spec: TableSpec, targets: Sequence[str], rows: Rows, positions: np.ndarray) -> Batch:
    """Return rows as a network takes them, float32 (B, F), with the numbers to be predicted."""
    part = rows.load(positions)
    return {"input": torch.from_numpy(spec.encode(part)), **numbers_of(targets, part)}


def numbers_of(targets: Sequence[str], rows: Part) -> Batch:
    """Return the numbers to be predicted, float32 (N,) or (N, T); no targets: nothing."""
    if not targets:
        return {}
    values = np.stack([rows[name] for name in targets], 1).astype(np.float32)
    return {"target": torch.from_numpy(values[:, 0].copy() if values.shape[1] == 1 else values)}


# ---- the copy


def stored(file: "TableFile", types: Mapping[str, str], bounded: list[str]) -> TableStore:
    """Return the numbers of a table; what has not been read before is read.

    Args:
        bounded: columns of which more than `MOST_WORDS` different words are refused.

    Raises:
        DataError: the table is not as it should be.
        OSError: there is no cache, or no room in it; the message says why.
    """
    top = cache_files.cache_folder(True, "tables")
    if top is None:
        raise Unusable("DEEPLIGHTNING_CACHE is off")
    programs = [Path(__file__).with_name(name).read_bytes() for name in ("table_rows.py", "table_files.py")]
    path, before = file.path, file.path.stat()
    if (young := before.st_ctime + cache_files.SETTLED - time.time()) > 0:  # it may change again without a trace
        time.sleep(min(young, cache_files.SETTLED))
        before = path.stat()
    rule = (sys.byteorder, programs, *types.items(), file.form, bounded)
    folder = top / cache_files.folder_name(rule, stat_of(before))
    with contextlib.suppress(FileNotFoundError, Damaged):
        return TableStore(folder)
    with cache_files.alone(folder):
        with contextlib.suppress(FileNotFoundError, Damaged):  # of a process that this one has waited for
            return TableStore(folder)
        cache_files.remove(folder)
        try:
            _make(folder, file, types, bounded)
            if stat_of(path.stat()) != stat_of(before):
                raise DataError(f"{path} was changed while it was read. Run again when it is whole.")
        except BaseException:
            cache_files.remove(folder)
            raise
        return TableStore(folder)


def _record(numbers: Collection[str], words: Collection[str]) -> np.dtype:
    return np.dtype([("numbers", "<f8", (len(numbers),)), ("codes", "<i4", (len(words),))])


def _make(folder: Path, table: "TableFile", types: Mapping[str, str], bounded: Sequence[str]) -> None:
    path, data = table.path, folder / "rows"
    log.info("Reading %s, which is large, into %s", path, folder)
    numbers = [name for name, kind in types.items() if kind == "number"]
    known: dict[str, dict[str, int]] = {name: {} for name in types if name not in numbers}  # the position of each word
    rows = size = looked = 0

    def make_room() -> None:
        cache_files.make_room(data, size, size, f"{path} takes {size / 2**30:.3g} GiB", size)

    cache_files.make_folder(folder)
    with cache_files.in_use(data, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        for part in table.parts(types, CHUNK):
            made = np.empty(len(next(iter(part.values()))), _record(numbers, known))
            for place, name in enumerate(numbers):
                made["numbers"][:, place] = part[name]
            for place, (name, positions) in enumerate(known.items()):
                found = part[name]
                assert isinstance(found, Words), "the columns of each part are of the same kinds"
                numbered = [positions.setdefault(word, len(positions)) for word in found.words]
                made["codes"][:, place] = np.array([*numbered, -1])[found.indices]
                if name in bounded and len(positions) > MOST_WORDS:
                    raise DataError(
                        f"{path}, column {name}: more than {MOST_WORDS:,} different texts. Set "
                        f"data.module.params.columns.{name} to ignore, or to category if you mean that many."
                    )
            cache_files.write(file, made, size)
            rows, size = rows + len(made), size + made.nbytes
            if size - looked >= _SIGN:
                make_room()
                looked = size
        make_room()
        os.fsync(file)
        words = {name: list(positions) for name, positions in known.items()}
        index = {"rows": rows, "columns": [*types], "numbers": numbers, "words": words}
        cache_files.write_index(data, file, json.dumps(index).encode())
