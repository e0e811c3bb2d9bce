"""Rows of a table before they are prepared: a file of the cache, which all processes of this run and of later ones map,
or an array in memory where there is no cache. Both give the same numbers.

The file keeps the values of the table, not the inputs of one network, so that other seeds, folds and sets of the same
columns read the same file. The name of its folder (`deeplightning.data.cache_files`) is a digest of the kinds of the
columns, of the table's state, and of the code that reads it; when one of them changes, the table is read again into
another folder. It has these files:

    rows    row after row, see `_record`
    index   JSON: the columns, and the words of each

N rows, B batch, F columns that the network takes, n columns of numbers, c of words.
"""

import json
import logging
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deeplightning.data import cache_files
from deeplightning.data.cache_files import Damaged, stat_of
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import Batch, Divisible
from deeplightning.table_spec import TableSpec, Words

if TYPE_CHECKING:  # a loader worker needs no pyarrow
    from deeplightning.data.table_files import TableFile

CHUNK = 2**16
"""Rows of which statistics are made at a time, in memory and on the disk: so both have equal bits."""

MOST_WORDS = 1_000_000
"""The most different words that are held in memory of a column that nobody has called a category."""

log = logging.getLogger("deeplightning.data")

Column = np.ndarray | Words
"""float64 (n,), or words."""

Part = Mapping[str, Any]
"""Some rows that follow each other, by column."""


class Table:
    """The values of a table.

    Args:
        rows: see `_record`, (N,).
        columns: the words of each column, in the order of the table; None: it has numbers.
        path: the folder of the cache that `rows` are mapped from; None: they are in memory.
    """

    def __init__(self, rows: np.ndarray, columns: Mapping[str, Sequence[str] | None], path: Path | None = None):
        self.rows, self.columns, self.path = rows, columns, path
        numbers = [name for name, words in columns.items() if words is None]
        others = [name for name, words in columns.items() if words is not None]
        self._places = {name: place for names in (numbers, others) for place, name in enumerate(names)}

    def __reduce__(self) -> Any:  # a loader worker maps the file again
        return (Table, (self.rows, self.columns)) if self.path is None else (_mapped, (self.path,))

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, positions: np.ndarray) -> Part:
        """Return some rows, int (n,), by column."""
        rows = self.rows[positions]
        return {name: self._column(name, rows, slice(None)) for name in self.columns}

    def column(self, name: str, positions: np.ndarray) -> Column:
        """Return one column of some rows, int (n,)."""
        return self._column(name, self.rows, positions)

    def _column(self, name: str, rows: np.ndarray, positions: np.ndarray | slice) -> Column:
        words, place = self.columns[name], self._places[name]
        if words is None:
            return np.asarray(rows["numbers"][:, place][positions])
        return Words(words, rows["codes"][:, place][positions].astype(np.int64))


@dataclass(frozen=True)
class Rows(Divisible):
    """Rows of a table.

    Attributes:
        table: holds them, and others.
        positions: theirs, int32 or int64 (N,).
        labels: int32 or int64 (N,), by which they are divided evenly.
    """

    shared = ("table",)

    table: Table
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


# ---- reading a file


def read_table(file: "TableFile", types: Mapping[str, str], bounded: Sequence[str]) -> Table:
    """Return a table that is mapped from the cache; one that has not been read before is read. Where the cache cannot
    be used, the log says why, and the table is in memory.

    Args:
        bounded: columns of which more than `MOST_WORDS` different words are refused.

    Raises:
        DataError: the table is not as it should be.
    """
    if (top := cache_files.cache_folder(True, "tables")) is not None:
        try:
            return _on_disk(top, file, types, bounded)
        except OSError as error:
            log.warning("%s is read into memory: %s: %s", file.path, top, error.strerror or error)
    known = _no_words(types)
    rows = np.concatenate([np.empty(0, _record(known)), *_parts(file, types, known, bounded)])
    return Table(rows, _columns(known))


def _on_disk(top: Path, file: "TableFile", types: Mapping[str, str], bounded: Sequence[str]) -> Table:
    names = ("table_rows.py", "table_files.py", "../table_spec.py")
    code = [(Path(__file__).parent / name).read_bytes() for name in names]
    before = stat_of(file.path.stat())
    folder = top / cache_files.folder_name((sys.byteorder, code, *types.items(), file.form, bounded), before)

    def read() -> None:
        _write(folder, file, types, bounded)
        if stat_of(file.path.stat()) != before:
            raise DataError(f"{file.path} was changed while it was read. Run again when it is whole.")

    return cache_files.find_or_make(folder, lambda: _mapped(folder), read)


_Known = dict[str, dict[str, int] | None]
"""The place of each word by column, None: it has numbers."""


def _no_words(types: Mapping[str, str]) -> _Known:
    return {name: None if kind == "number" else {} for name, kind in types.items()}


def _columns(known: _Known) -> dict[str, list[str] | None]:
    return {name: None if words is None else list(words) for name, words in known.items()}


def _record(columns: Mapping[str, object]) -> np.dtype:
    """Return what a row has: the numbers, NaN: missing; and the places of the words, -1: missing."""
    numbers = sum(words is None for words in columns.values())
    return np.dtype([("numbers", "<f8", (numbers,)), ("codes", "<i4", (len(columns) - numbers,))])


def _parts(file: "TableFile", types: Mapping[str, str], known: _Known, bounded: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield all rows of a file in parts, and add their words to `known`."""
    for part in file.parts(types, CHUNK):
        made = np.empty(len(next(iter(part.values()))), _record(known))
        numbers, codes = iter(made["numbers"].T), iter(made["codes"].T)
        for name, places in known.items():
            found: Any = part[name]
            if places is None:
                next(numbers)[:] = found
                continue
            numbered = [places.setdefault(word, len(places)) for word in found.words]
            next(codes)[:] = np.array([*numbered, -1])[found.indices]
            if name in bounded and len(places) > MOST_WORDS:
                raise DataError(
                    f"{file.path}, column {name}: more than {MOST_WORDS:,} different texts. Set "
                    f"data.module.params.columns.{name} to ignore, or to category if you mean that many."
                )
        yield made


def _write(folder: Path, table: "TableFile", types: Mapping[str, str], bounded: Sequence[str]) -> None:
    path, data, known, size = table.path, folder / "rows", _no_words(types), 0
    log.info("Reading %s into %s", path, folder)

    with cache_files.in_use(data, "xb") as file:
        for part in _parts(table, types, known, bounded):
            file.write(part.tobytes())
            size += part.nbytes
            cache_files.make_room(data, size, f"{path} takes {size / 2**30:.3g} GiB", written=size)
        cache_files.write_index(data, file, json.dumps({"size": size, "columns": _columns(known)}).encode())


def _mapped(folder: Path) -> Table:
    """Return the table of a folder of the cache.

    Raises:
        FileNotFoundError: the folder is not complete, or it is being removed.
        Damaged: it is not what was written.
        Unusable: another user could have written it.
    """
    with cache_files.in_use(folder / "rows") as file:
        index = json.loads(cache_files.read_index(folder))
        if os.fstat(file.fileno()).st_size != index["size"]:
            raise Damaged
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if index["size"] else b""
    return Table(np.frombuffer(content, _record(index["columns"])), index["columns"], folder)
