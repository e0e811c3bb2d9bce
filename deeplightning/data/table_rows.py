"""Rows of a table before they are prepared: in memory, or in a copy on the disk; both give the same numbers.

N rows, B batch, F columns that the network takes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deeplightning.data.columns import Columns
from deeplightning.data.datasets import Batch
from deeplightning.data.table_store import TableStore
from deeplightning.table_spec import Fault, TableError, TableSpec, Words

CHUNK = 2**16
"""Rows of which statistics are made at a time, in memory and on the disk: so both have equal bits."""


class Rows(Columns):
    """Rows in memory: each column float64 (N,), or `Words`."""

    def take(self, positions: np.ndarray | slice) -> "Rows":
        columns = {
            name: Words(column.words, column.indices[positions]) if isinstance(column, Words) else column[positions]
            for name, column in self.columns.items()
        }
        return Rows(columns, self.labels[positions])

    def load(self, positions: np.ndarray) -> "Rows":
        """Some rows, in memory."""
        return self.take(positions)

    def column(self, name: str) -> "np.ndarray | Words":
        """One column."""
        found: np.ndarray | Words = self.columns[name]
        return found

    def parts(self) -> Iterator["Rows"]:
        """All rows, `CHUNK` at a time."""
        return (self.take(slice(start, start + CHUNK)) for start in range(0, len(self), CHUNK))


@dataclass(frozen=True)
class StoredRows:
    """Rows on the disk.

    Attributes:
        store: holds them, and others.
        positions: theirs, int32 or int64 (N,).
        labels: int32 or int64 (N,), by which they are divided evenly.
    """

    store: TableStore
    positions: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, positions: np.ndarray) -> "StoredRows":
        """The rows at these positions, int (n,), in this order."""
        return StoredRows(self.store, self.positions[positions], self.labels[positions])

    def load(self, positions: np.ndarray | slice) -> Rows:
        """Some rows, in memory."""
        return Rows(self.store.read(self.positions[positions]), self.labels[positions])

    def column(self, name: str) -> "np.ndarray | Words":
        """One column, in memory; of a time its texts, bytes (N,)."""
        return self.store.column(name, self.positions)

    def parts(self) -> Iterator[Rows]:
        """All rows, `CHUNK` at a time."""
        return (self.load(slice(start, start + CHUNK)) for start in range(0, len(self), CHUNK))


def check_parts(spec: TableSpec, rows: StoredRows) -> None:
    """Raises what `TableSpec.encode` would raise of all rows at a time.

    Raises:
        TableError: a value is refused; the message names column and row.
    """
    found: dict[str, Fault] = {}
    for number, part in enumerate(rows.parts()):
        for name, fault in spec.encode_part(part.columns)[1].items():
            later = fault.moved(number * CHUNK)
            found[name] = found[name].and_then(later) if name in found else later
    for column in spec.ordered:
        if column.name in found:
            raise TableError(found[column.name].text(column.name, len(rows)))


def encoded(spec: TableSpec, targets: Sequence[str], rows: StoredRows, positions: np.ndarray) -> Batch:
    """Return rows as a network takes them, float32 (B, F), with the numbers to be predicted."""
    part = rows.load(positions)
    return {"input": torch.from_numpy(spec.encode(part.columns)), **numbers_of(targets, part)}


def numbers_of(targets: Sequence[str], rows: Rows) -> Batch:
    """Return the numbers to be predicted, float32 (N,) or (N, T); no targets: nothing."""
    if not targets:
        return {}
    values = np.stack([rows.columns[name] for name in targets], 1).astype(np.float32)
    return {"target": torch.from_numpy(values[:, 0].copy() if values.shape[1] == 1 else values)}
