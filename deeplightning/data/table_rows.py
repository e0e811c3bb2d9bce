"""Rows of a table before they are prepared: in memory, or in a copy on the disk; both give the same numbers.

N rows, B batch, F columns that the network takes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deeplightning.data.datasets import Batch
from deeplightning.data.table_store import Part, TableStore
from deeplightning.table_spec import Fault, TableError, TableSpec, Words

CHUNK = 2**16
"""Rows of which statistics are made at a time, in memory and on the disk: so both have equal bits."""


class Table:
    """A table in memory, with the same methods as a `TableStore`.

    Args:
        columns: by name, float64 (N,), or words.
    """

    def __init__(self, columns: Part):
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def read(self, positions: np.ndarray) -> Part:
        """Return some rows, int (n,), by column."""
        return {name: self.column(name, positions) for name in self._columns}

    def column(self, name: str, positions: np.ndarray) -> "np.ndarray | Words":
        """Return one column of some rows, int (n,)."""
        values = self._columns[name]
        return Words(values.words, values.indices[positions]) if isinstance(values, Words) else values[positions]


@dataclass(frozen=True)
class Rows:
    """Rows of a table.

    Attributes:
        table: holds them, and others.
        positions: theirs, int32 or int64 (N,).
        labels: int32 or int64 (N,), by which they are divided evenly.
    """

    table: Table | TableStore
    positions: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, positions: np.ndarray) -> "Rows":
        """Return the rows at these positions, int (n,), in this order."""
        return Rows(self.table, self.positions[positions], self.labels[positions])

    def load(self, positions: np.ndarray | slice) -> Part:
        """Return some rows in memory."""
        return self.table.read(self.positions[positions])

    def column(self, name: str) -> "np.ndarray | Words":
        """Return one column, in memory; of a time in a `TableStore` its texts, bytes (N,)."""
        return self.table.column(name, self.positions)

    def parts(self) -> Iterator[Part]:
        """Yield all rows, `CHUNK` at a time."""
        return (self.load(slice(start, start + CHUNK)) for start in range(0, len(self), CHUNK))


def check_parts(spec: TableSpec, rows: Rows) -> None:
    """Raise what `TableSpec.encode` raises for all rows at a time.

    Raises:
        TableError: a value is refused; the message names column and row.
    """
    found: dict[str, Fault] = {}
    for number, part in enumerate(rows.parts()):
        for name, fault in spec.encode_part(part)[1].items():
            later = fault.moved(number * CHUNK)
            found[name] = found[name].and_then(later) if name in found else later
    for column in spec.ordered:
        if column.name in found:
            raise TableError(found[column.name].text(column.name, len(rows)))


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
