"""Rows of a table before they are prepared: a file in the cache, which all processes of this run and of later ones map,
or an array in memory if there is no cache. Both give the same numbers.

The file has the values of the table, not the inputs of one network, so other seeds, folds and sets of the same columns
use the same file. The name of its folder (`deeplightning.data.cache_files`) is a digest of the kinds of the columns,
of the state of the table's file, and of the code that reads it; when one of them changes, the table is read again into
another folder. It contains these files:

    rows    row after row, see `_row_dtype`
    index   JSON: size in bytes, and the words of each column

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

CHUNK_ROWS = 2**16
"""Rows per step of the statistics, the same in memory and from disk, so that both give identical bits."""

MAX_WORDS = 1_000_000
"""Most distinct words of a column that the config does not declare a category; they are held in memory."""

log = logging.getLogger("deeplightning.data")

Column = np.ndarray | Words
"""Numbers, float64 (n,), or words."""

Part = Mapping[str, Any]
"""Some rows, by column."""


class Table:
    """The values of a table.

    Args:
        rows: (N,), see `_row_dtype`.
        columns: the words of each column, in the order of the table; None: a column of numbers.
        path: the cache folder that `rows` are mapped from; None: they are in memory.
    """

    def __init__(self, rows: np.ndarray, columns: Mapping[str, Sequence[str] | None], path: Path | None = None):
        self.rows, self.columns, self.path = rows, columns, path
        numbers = [name for name, words in columns.items() if words is None]
        others = [name for name, words in columns.items() if words is not None]
        self._offsets = {name: offset for names in (numbers, others) for offset, name in enumerate(names)}

    def __reduce__(self) -> Any:  # a loader worker maps the file again
        return (Table, (self.rows, self.columns)) if self.path is None else (_map_table, (self.path,))

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, positions: np.ndarray) -> Part:
        """Return the rows at these positions, int (n,), by column."""
        rows = self.rows[positions]
        return {name: self._column(name, rows, slice(None)) for name in self.columns}

    def column(self, name: str, positions: np.ndarray) -> Column:
        """Return one column of the rows at these positions, int (n,)."""
        return self._column(name, self.rows, positions)

    def _column(self, name: str, rows: np.ndarray, positions: np.ndarray | slice) -> Column:
        words, offset = self.columns[name], self._offsets[name]
        if words is None:
            return np.asarray(rows["numbers"][:, offset][positions])
        return Words(words, rows["codes"][:, offset][positions].astype(np.int64))


@dataclass(frozen=True)
class Rows(Divisible):
    """Rows of a table.

    Attributes:
        table: contains these and other rows.
        positions: of these rows in the table, int32 or int64 (N,).
        labels: int32 or int64 (N,), by which splits are stratified.
    """

    shared = ("table",)

    table: Table
    positions: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    def load(self, positions: np.ndarray | slice) -> Part:
        """Return the rows at these positions, in memory."""
        return self.table.read(self.positions[positions])

    def column(self, name: str) -> Column:
        """Return one column, in memory."""
        return self.table.column(name, self.positions)

    def parts(self) -> Iterator[Part]:
        """Yield all rows, `CHUNK_ROWS` at a time."""
        return (self.load(slice(start, start + CHUNK_ROWS)) for start in range(0, max(1, len(self)), CHUNK_ROWS))


def encoded(spec: TableSpec, targets: Sequence[str], rows: Rows, positions: np.ndarray) -> Batch:
    """Return a batch: `input`, float32 (B, F), and the numbers to be predicted."""
    part = rows.load(positions)
    return {"input": torch.from_numpy(spec.encode(part)), **numbers_of(targets, part)}


def numbers_of(targets: Sequence[str], rows: Part) -> Batch:
    """Return the numbers to be predicted, float32 (N,) or (N, T); empty if there are no targets."""
    if not targets:
        return {}
    values = np.stack([rows[name] for name in targets], 1).astype(np.float32)
    return {"target": torch.from_numpy(values[:, 0].copy() if values.shape[1] == 1 else values)}


# ---- reading a file


def read_table(file: "TableFile", types: Mapping[str, str], bounded: Sequence[str]) -> Table:
    """Return a table, mapped from the cache; read it into the cache first if needed. If the cache cannot be used, log
    the reason and read the table into memory.

    Args:
        bounded: columns in which more than `MAX_WORDS` distinct words are an error.

    Raises:
        DataError: the table is invalid.
    """
    if (top := cache_files.cache_folder(True, "tables")) is not None:
        try:
            return _read_cached(top, file, types, bounded)
        except OSError as error:
            log.warning("%s is read into memory: %s: %s", file.path, top, error.strerror or error)
    codes = _empty_codes(types)
    rows = np.concatenate([np.empty(0, _row_dtype(codes)), *_parts(file, types, codes, bounded)])
    return Table(rows, _words_of(codes))


def _read_cached(top: Path, file: "TableFile", types: Mapping[str, str], bounded: Sequence[str]) -> Table:
    names = ("table_rows.py", "table_files.py", "../table_format.py", "../table_spec.py")
    code = [(Path(__file__).parent / name).read_bytes() for name in names]
    before = stat_of(file.path.stat())
    folder = top / cache_files.folder_name((sys.byteorder, code, *types.items(), file.form, bounded), before)

    def read() -> None:
        _write(folder, file, types, bounded)
        if stat_of(file.path.stat()) != before:
            raise DataError(f"{file.path} was changed while it was read. Run again when it is complete.")

    return cache_files.find_or_make(folder, lambda: _map_table(folder), read)


_Codes = dict[str, dict[str, int] | None]
"""By column, the code of each word; None: a column of numbers."""


def _empty_codes(types: Mapping[str, str]) -> _Codes:
    return {name: None if kind == "number" else {} for name, kind in types.items()}


def _words_of(codes: _Codes) -> dict[str, list[str] | None]:
    return {name: None if words is None else list(words) for name, words in codes.items()}


def _row_dtype(columns: Mapping[str, object]) -> np.dtype:
    """Return the dtype of a row: the numbers, NaN if missing, and the codes of the words, -1 if missing."""
    numbers = sum(words is None for words in columns.values())
    return np.dtype([("numbers", "<f8", (numbers,)), ("codes", "<i4", (len(columns) - numbers,))])


def _parts(file: "TableFile", types: Mapping[str, str], codes: _Codes, bounded: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield all rows of a file in parts, and add their words to `codes`."""
    for part in file.parts(types, CHUNK_ROWS):
        rows = np.empty(len(next(iter(part.values()))), _row_dtype(codes))
        numbers, coded = iter(rows["numbers"].T), iter(rows["codes"].T)
        for name, own in codes.items():
            found: Any = part[name]
            if own is None:
                next(numbers)[:] = found
                continue
            next(coded)[:] = np.array([*(own.setdefault(word, len(own)) for word in found.words), -1])[found.indices]
            if name in bounded and len(own) > MAX_WORDS:
                raise DataError(
                    f"{file.path}, column {name}: more than {MAX_WORDS:,} different texts. Set "
                    f"data.module.params.columns.{name} to ignore, or to category if you mean that many."
                )
        yield rows


def _write(folder: Path, table: "TableFile", types: Mapping[str, str], bounded: Sequence[str]) -> None:
    path, data, codes, size = table.path, folder / "rows", _empty_codes(types), 0
    log.info("Reading %s into %s", path, folder)
    with cache_files.open_locked(data, "x+b") as file:  # on NFS, a shared lock needs a readable file
        for part in _parts(table, types, codes, bounded):
            file.write(part.tobytes())
            size += part.nbytes
            cache_files.make_room(data, size, f"{path} takes {size / 2**30:.3g} GiB", written=size)
        cache_files.write_index(data, file, json.dumps({"size": size, "columns": _words_of(codes)}).encode())


def _map_table(folder: Path) -> Table:
    """Return the mapped table of a cache folder. Raise FileNotFoundError if it is incomplete or being removed, Damaged
    if it is not what was written, Unusable if another user could have written it."""
    with cache_files.open_locked(folder / "rows") as file:
        index = json.loads(cache_files.read_index(folder))
        if os.fstat(file.fileno()).st_size != index["size"]:
            raise Damaged
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if index["size"] else b""
    return Table(np.frombuffer(content, _row_dtype(index["columns"])), index["columns"], folder)
