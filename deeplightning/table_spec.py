"""Convert rows of a table to the array that a network was trained on (`TableSpec`).

Training and serving both call it, so they cannot disagree. Uses numpy and the standard library only. Letters: N rows, F
columns.

The array is float32 (N, F), with one entry per column: first the numbers and then the categories, each in the order of
the spec. A number is standardised in float64. A category is the index of its word in the spec's list, from 1; 0 means
that the word is missing or not in the list.
"""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, time
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np

# Projects of `init --kind text` import `decoded`, `named_columns` and `records` from here.
from deeplightning.table_format import TableError, TableFormat, decoded, named_columns, records, shown  # noqa: F401
from deeplightning.words import are_numbers, require_keys

KINDS = ("number", "category")

_UNUSUAL_SPELLING = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]00:00:00(?:\.0+)?|([+-]?[0-9]+|(?:[0-9-]{10}[T ])?[0-9:]{8})\.0+|"
    r"true|True|TRUE|false|False|FALSE"
)
"""Values that also have a more usual spelling."""

_LARGEST = float(np.finfo(np.float32).max)


class Codes(dict[str, int]):
    """The number of each word, counted from `first`; `find` also accepts other spellings of the same value.

    True from pandas and TRUE from R equal true in JSON and Parquet; 1.0, in a column with gaps, equals 1; 2024-02-29
    00:00:00 equals the day; and Parquet's 08:30:00.000000 equals 08:30:00.
    """

    def __init__(self, words: Sequence[str], first: int = 0):
        super().__init__((word, number) for number, word in enumerate(words, first))
        for word, number in [*self.items()]:
            self.setdefault(_usual_spelling(word), number)

    def find(self, word: str, otherwise: int) -> int:
        return self.get(word, self.get(_usual_spelling(word), otherwise))


def _usual_spelling(word: str) -> str:
    found = _UNUSUAL_SPELLING.fullmatch(word)
    return (found[1] or found[2] or found[0].lower()) if found else unicodedata.normalize("NFC", word)


@dataclass(frozen=True)
class Column:
    """Describe how one column is prepared.

    Attributes:
        name: as in the header and in JSON.
        kind: "number" or "category".
        mean, std: of the training rows, in the unit of the column; 0 and 1 for a category.
        categories: the words of the training rows, numbered from 1; empty for a number.

    Raises:
        ValueError: a value is impossible.
    """

    name: str
    kind: str
    mean: float = 0.0
    std: float = 1.0
    categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"the name of a column must be a text that is not empty, not {self.name!r}")
        if self.kind not in KINDS:
            raise ValueError(f"the kind of column {self.name} must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if not are_numbers([self.mean, self.std]) or self.std <= 0:
            raise ValueError(f"mean and std of column {self.name} must be finite numbers, and std positive")
        words = self.categories
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"categories of column {self.name} must be a list of texts, not {words!r}")
        if len(set(words)) != len(words) or (self.kind == "category") != bool(words):
            raise ValueError(f"column {self.name} must have different categories if it is a category, and only then")
        object.__setattr__(self, "categories", tuple(words))

    @cached_property
    def codes(self) -> Codes:
        """The number of each word, from 1."""
        return Codes(self.categories, 1)


@dataclass(frozen=True)
class Words:
    """A column of categories.

    Attributes:
        words: the words that occur.
        indices: index of each row's word, int64 (N,); -1 if it is missing.
    """

    words: Sequence[str]
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class TableSpec:
    """Describe how the rows of a table are prepared for one network.

    Attributes:
        columns: the columns that the network uses.
        unknown: how to treat a category that no training row has: "other" (the number 0), or "refuse".
        missing: how to treat a missing value: "fill" (with the mean of a number or the number 0 of a category), or
            "refuse".
        format: format of the values.

    Raises:
        ValueError: a value is impossible.
    """

    columns: tuple[Column, ...]
    unknown: str = "other"
    missing: str = "refuse"
    format: TableFormat = field(default_factory=TableFormat)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns:
            raise ValueError("a table needs at least one column")
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"the columns must have different names, not {', '.join(names)}")
        for name, words in (("unknown", ("other", "refuse")), ("missing", ("fill", "refuse"))):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, not {getattr(self, name)!r}")

    @cached_property
    def numbers(self) -> tuple[Column, ...]:
        """The columns of numbers, which come first in the array."""
        return tuple(column for column in self.columns if column.kind == "number")

    @cached_property
    def categories(self) -> tuple[Column, ...]:
        """The columns of categories, which follow."""
        return tuple(column for column in self.columns if column.kind == "category")

    @property
    def ordered(self) -> tuple[Column, ...]:
        """The columns in the order of the array."""
        return self.numbers + self.categories

    @property
    def shape(self) -> tuple[int, ...]:
        """(F,)"""
        return (len(self.columns),)

    @property
    def cardinalities(self) -> list[int]:
        """Number of codes of each category column: its words, and 0."""
        return [len(column.categories) + 1 for column in self.categories]

    # ---- one row, in a server

    def prepare(self, row: Mapping[str, object]) -> np.ndarray:
        """Prepare one row; return float32 (F,).

        Args:
            row: values by column: numbers, texts, true, false or None. Other columns are ignored.

        Raises:
            TableError: a column or a value is missing, or a value has the wrong kind.
        """
        if not isinstance(row, Mapping):
            raise TableError(f"A row has values by column; this one is of type {type(row).__name__}.")
        if absent := [column.name for column in self.columns if column.name not in row]:
            are = f"columns {', '.join(absent)} are" if len(absent) > 1 else f"column {absent[0]} is"
            raise TableError(
                f"The {are} missing; a row has {', '.join(column.name for column in self.columns)}, "
                f"and this one has {', '.join(shown(name) for name in [*row][:10]) or 'none'}."
            )
        numbers = [self._number(column, row[column.name]) for column in self.numbers]
        codes = [self._code(column, row[column.name]) for column in self.categories]
        return np.array([*numbers, *codes], np.float32)

    def stack(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Stack prepared rows; return float32 (N, F)."""
        return np.stack(rows)

    def _number(self, column: Column, value: object) -> float:
        try:
            found = math.nan if self.format.is_missing(value) else self.format.number(value)
        except ValueError:
            written = ", nor a date such as 2024-02-29" * isinstance(value, str)
            raise TableError(f"Column {column.name}: {shown(value)} is not a number{written}.") from None
        if math.isnan(found):
            return self._missing_value(column)
        if math.isinf(found):
            raise TableError(f"Column {column.name}: {shown(value)} is not a finite number.")
        standardised = (found - column.mean) / column.std
        if abs(standardised) > _LARGEST:
            raise TableError(f"Column {column.name}: {shown(value)} is too large.")
        return standardised

    def _code(self, column: Column, value: object) -> float:
        word = word_of(value)
        is_exact = isinstance(value, int | Decimal) and value == value  # not NaN
        if self.format.is_missing(word if is_exact else value):  # as in training
            return self._missing_value(column)
        if not word:
            raise TableError(f"Column {column.name}: {shown(value)} is neither a text nor a number.")
        code = column.codes.find(word, 0)
        if not code and self.unknown == "refuse":
            known = ", ".join(column.categories[:10]) + (", …" if len(column.categories) > 10 else "")
            raise TableError(f"Column {column.name}: {shown(value)} is not a known category; known: {known}.")
        return code

    def _missing_value(self, column: Column) -> float:
        if self.missing == "refuse":
            raise TableError(f"Column {column.name}: the value is missing.")
        return 0.0

    # ---- all rows, for training

    def encode(self, columns: Mapping[str, "np.ndarray | Words"], rows: Any = None) -> np.ndarray:
        """Prepare many rows; return float32 (N, F), with the same numbers as from `prepare`.

        Args:
            columns: by name; float64 (N,) for a number, with NaN for missing values; `Words` for a category.
            rows: the number of each row in its table, from 0, for messages; None: 0, 1, 2 …

        Raises:
            TableError: a value is missing, not finite or unknown, and refused; the message names column and row.
        """
        encoded = np.empty((len(next(iter(columns.values()))), len(self.columns)), np.float32)
        rows = range(len(encoded)) if rows is None else rows
        for index, column in enumerate(self.ordered):
            values = columns[column.name]
            encode = self._codes if isinstance(values, Words) else self._numbers
            encoded[:, index] = encode(column, values, rows)  # type: ignore[arg-type]
        return encoded

    def _numbers(self, column: Column, values: np.ndarray, rows: Any) -> np.ndarray:
        gaps, wrong = np.isnan(values), np.isinf(values)
        numbers = (np.where(gaps | wrong, column.mean, values) - column.mean) / column.std
        wrong |= np.abs(numbers) > _LARGEST
        if wrong.any():
            row = int(wrong.argmax())
            raise _row_error(column, rows[row], f"{values[row]} is not finite, or too large")
        self._check_gaps(column, gaps, rows)
        return numbers

    def _codes(self, column: Column, values: "Words", rows: Any) -> np.ndarray:
        codes = np.array([*(column.codes.find(word, 0) for word in values.words), 0])[values.indices]
        gaps = values.indices < 0
        if self.unknown == "refuse" and (wrong := (codes == 0) & ~gaps).any():
            row = int(wrong.argmax())
            word = shown(values.words[values.indices[row]])
            raise _row_error(column, rows[row], f"{word} is not a category of the training rows")
        self._check_gaps(column, gaps, rows)
        return codes

    def _check_gaps(self, column: Column, gaps: np.ndarray, rows: Any) -> None:
        if self.missing == "refuse" and gaps.any():
            others = f"as are {gaps.sum()} of {len(gaps)} in this column"
            raise _row_error(column, rows[int(gaps.argmax())], f"the value is missing, {others}")

    # ---- checkpoints and bundles

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON types, for a checkpoint and a bundle."""
        columns = [asdict(column) | {"categories": list(column.categories)} for column in self.columns]
        form = asdict(self.format) | {"missing_words": list(self.format.missing_words)}
        return {"columns": columns, "unknown": self.unknown, "missing": self.missing, "format": form}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TableSpec":
        """Reverse `to_dict`.

        Raises:
            ValueError: a key is missing or unknown, or a value is impossible.
        """
        require_keys("a table spec", values, ("columns", "unknown", "missing", "format"))
        if not isinstance(values["columns"], list | tuple):
            raise ValueError("the columns of a table spec must be a list")
        columns = []
        for column in values["columns"]:
            require_keys("a column", column, ("name", "kind", "mean", "std", "categories"))
            columns.append(Column(**column))
        require_keys("the format of a table", values["format"], [*asdict(TableFormat())])
        return cls(tuple(columns), values["unknown"], values["missing"], TableFormat(**values["format"]))


def _row_error(column: Column, row: int, words: str) -> TableError:
    return TableError(f"column {column.name}, row {row + 1}: {words}")


def word_of(value: object) -> str:
    """Return the word of a category's value, or "" if the value cannot be a category."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() if isinstance(value, str | int | float | Decimal | date | time) else ""
