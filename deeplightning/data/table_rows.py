"""Rows of a table before they are prepared: in memory, or in a copy on the disk; both give the same numbers.

N rows, B batch, F columns that the network takes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deeplightning.data.columns import Columns
from deeplightning.data.datasets import Batch, OnDemand
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


class StoredSet(OnDemand):
    """Rows that are read and prepared when a batch asks for them.

    Args:
        rows: all of the set.
        spec: prepares them.
        labels: the class of each, int64 (N,); None: `targets` makes further entries of a batch.
        targets: called with the rows of a batch.
    """

    def __init__(
        self,
        rows: StoredRows,
        spec: TableSpec,
        labels: torch.Tensor | None,
        targets: Callable[[Rows], Batch],
    ):
        self.samples = rows  # type: ignore[assignment]
        self.labels = torch.zeros(0) if labels is None else labels
        self._table_spec, self._targets = spec, targets

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, positions: Sequence[int] | np.ndarray) -> Batch:
        index = torch.as_tensor(positions)
        taken = np.asarray(positions) % len(self)  # index -1 is padding: it takes the last sample
        rows: Rows = self.samples.load(taken)  # type: ignore[attr-defined]
        others = {"label": self.labels[taken]} if len(self.labels) else self._targets(rows)
        return {"input": torch.from_numpy(self._table_spec.encode(rows.columns)), **others, "index": index}
