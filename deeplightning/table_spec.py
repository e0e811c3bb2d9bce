"""Convert rows of a table to the array that a network was trained on (`TableSpec`), and CSV text to rows.

Training and serving both call it, so they cannot disagree. Uses numpy and the standard library only. Letters: N rows, F
columns.

The array is float32 (N, F), with one entry per column: first the numbers and then the categories, each in the order of
the spec. A number is standardised in float64. A category is the index of its word in the spec's list, from 1; 0 means
that the word is missing or not in the list.
"""

import codecs
import contextlib
import csv
import io
import itertools
import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from email.utils import parsedate
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from deeplightning.words import InputError, are_numbers, is_number, require_keys

KINDS = ("number", "category")

MISSING = ("na", "n/a", "nan", "null", "none")
"""Words, in any case, that mean a missing value unless a config lists others."""

DELIMITERS = (",", ";", "\t", "|")
"""Characters that may separate the values of a row, the most common first."""

_GROUPED = {
    decimal: re.compile(
        rf"[+-]?[1-9][0-9]{{0,2}}([{group}' \u2019\u00a0\u202f])[0-9]{{3}}(?:\1[0-9]{{3}})*(?:\{decimal}[0-9]*)?"
    )
    for decimal, group in ((".", ","), (",", "."))
}
"""Patterns of numbers with a thousands separator, by decimal sign."""

_UNIT_SIGN = re.compile(r"(?<![^+-])[$€£¥₹]\s?|\s?[$€£¥₹%]$")
"""A currency sign before or after a number, or a percent sign after it."""

NAMED_DAY = re.compile(r"[A-Za-z]{3,9}[-/. ]\d\d?[-/., ]+\d{4}|\d\d?[-/. ]+[A-Za-z]{3,9}[-/. ]+(?:\d\d){1,2}", re.ASCII)
"""A date with the name of the month, so that it is clear which number is the day."""

_UNUSUAL_SPELLING = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]00:00:00(?:\.0+)?|([+-]?[0-9]+|(?:[0-9-]{10}[T ])?[0-9:]{8})\.0+|"
    r"true|True|TRUE|false|False|FALSE"
)
"""Values that also have a more usual spelling."""

_LARGEST = float(np.finfo(np.float32).max)

MAX_SHOWN = 40
"""Most characters of a value that a message shows."""


class TableError(InputError):
    """Raised for a row that cannot be used; the message names row and column."""


@dataclass(frozen=True)
class TableFormat:
    """Describe how the values of a table are written.

    Attributes:
        delimiter: the character between the values of a row.
        decimal: the decimal sign, "." or ",".
        encoding: the Python codec of a file.
        missing_words: words that mean a missing value, in any case; the empty text always does.

    Raises:
        ValueError: a value is impossible.
    """

    delimiter: str = ","
    decimal: str = "."
    encoding: str = "utf-8"
    missing_words: tuple[str, ...] = MISSING

    def __post_init__(self) -> None:
        if not isinstance(self.delimiter, str) or not re.fullmatch(r"[\t !#-&(-~]", self.delimiter):
            raise ValueError(f'delimiter must be one ASCII character such as ";" or "\\t", not {self.delimiter!r}')
        if self.decimal not in [*_GROUPED]:
            raise ValueError(f'decimal must be "." or ",", not {self.decimal!r}')
        try:
            "a".encode(self.encoding)  # raises for codecs that do not encode text
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"encoding must be a codec such as utf-8 or latin-1, not {self.encoding!r}") from None
        words = self.missing_words
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise ValueError(f'missing_words must be a list of texts such as ["?", "na"], not {words!r}')
        object.__setattr__(self, "missing_words", tuple(dict.fromkeys(word.strip().lower() for word in words)))

    def is_missing(self, value: object) -> bool:
        """Return whether a value of a file or a request is missing."""
        if isinstance(value, str):
            word = value.strip().lower()
            return not word or word in self.missing_words
        if isinstance(value, date):
            return value != value  # pandas.NaT
        if isinstance(value, int | float | np.number | Decimal) and not isinstance(value, bool):
            exact: Any = Decimal if isinstance(value, int | Decimal) else float
            return value != value or any(is_number(word) and exact(word) == value for word in self.missing_words)
        return value is None or type(value).__name__ == "NAType"  # pandas.NA

    def number(self, value: object) -> float:
        """Convert a value of a number column to float, without its unit: 12.5% is 12.5. A date such as 2024-02-29 or
        Feb-29-2024 becomes the days since 1970, and a time with an offset, such as +02:00, is converted to UTC.

        Raises:
            ValueError: it is not a number.
        """
        if isinstance(value, int | float | Real | Decimal) and not isinstance(value, bool):  # Real: numpy's numbers
            try:
                return float(value)
            except OverflowError:
                return math.inf
        if isinstance(value, date):
            value = value.isoformat()
        if not isinstance(value, str) or "_" in value:  # Python accepts 1_000, but tables do not mean it
            raise ValueError(repr(value))
        text = _UNIT_SIGN.sub("", value.strip().replace("\u2212", "-"), count=1)
        if grouped := _GROUPED[self.decimal].fullmatch(text):
            text = text.replace(grouped[1], "")
        if self.decimal == "," and ":" not in text:  # the seconds of a time may have a point
            if "." in text:
                raise ValueError(value)
            text = text.replace(",", ".")
        try:
            found = float(text)
        except ValueError:
            named = parsedate(re.sub("[-/.,]", " ", text) + " 0:0") if NAMED_DAY.fullmatch(text) else None
            day = datetime(*named[:3]) if named else datetime.fromisoformat(text)
            return (day - datetime(1970, 1, 1, tzinfo=UTC if day.tzinfo else None)) / timedelta(days=1)
        return math.nan if self.is_missing(found) else found  # -999.0 where -999 is a missing word


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
    format: TableFormat = TableFormat()

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
                f"and this one has {', '.join(_shown(name) for name in [*row][:10]) or 'none'}."
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
            raise TableError(f"Column {column.name}: {_shown(value)} is not a number{written}.") from None
        if math.isnan(found):
            return self._missing_value(column)
        if math.isinf(found):
            raise TableError(f"Column {column.name}: {_shown(value)} is not a finite number.")
        standardised = (found - column.mean) / column.std
        if abs(standardised) > _LARGEST:
            raise TableError(f"Column {column.name}: {_shown(value)} is too large.")
        return standardised

    def _code(self, column: Column, value: object) -> float:
        word = word_of(value)
        is_exact = isinstance(value, int | Decimal) and value == value  # not NaN
        if self.format.is_missing(word if is_exact else value):  # as in training
            return self._missing_value(column)
        if not word:
            raise TableError(f"Column {column.name}: {_shown(value)} is neither a text nor a number.")
        code = column.codes.find(word, 0)
        if not code and self.unknown == "refuse":
            known = ", ".join(column.categories[:10]) + (", …" if len(column.categories) > 10 else "")
            raise TableError(f"Column {column.name}: {_shown(value)} is not a known category; known: {known}.")
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
            word = _shown(values.words[values.indices[row]])
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


def decoded(data: bytes, encoding: str = "utf-8") -> str:
    """Decode the text of a file: by its byte order mark, else as UTF-8 if that is valid, else as `encoding`.

    Raises:
        UnicodeDecodeError: it is none of these.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16")
    try:
        may_fit = codecs.lookup(encoding).name.startswith(("utf-16", "utf-32", "iso2022"))  # bytes that are valid UTF-8
        return data.decode(encoding if may_fit and (b"\0" in data or b"\x1b" in data) else "utf-8-sig")
    except UnicodeDecodeError:
        return data.decode(encoding)


def records(text: str, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the non-empty lines of a CSV file from the header on, each with its number and split into values.

    Raises:
        TableError: a line cannot be split.
    """
    above, quote = above_header(text, delimiter)
    lines = itertools.islice(io.StringIO(text, newline=""), above, None)
    csv.field_size_limit(sys.maxsize)  # for training, a value may have any length
    quoted: dict[str, Any] = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
    reader = csv.reader(lines, delimiter=delimiter, strict=True, **quoted)
    try:
        for values in reader:
            if values:
                yield above + reader.line_num, values
    except csv.Error as error:
        raise TableError(f"Line {above + reader.line_num} is not CSV: {error}.") from error


def above_header(text: str, delimiter: str) -> tuple[int, str | None]:
    """Return the number of lines above the header of a CSV file, and its quotation mark; None if quotes are ordinary
    characters, as in tab-separated values that begin with a quote and do not end with one.

    Empty lines, `sep=;` (from Excel) and lines that begin with # are above the header. The last line with # is the
    header itself if it has as many values as the next line, and only the next line has numbers.
    """
    head = [line.rstrip("\r\n") for line in io.StringIO(text[: 2**16], newline="")]
    above = len([*itertools.takewhile(lambda line: re.match(r"\s*$|#|sep=.$", line), head)])
    rows = [line.split(delimiter) for line in head[max(0, above - 1) : above + 1]]
    if above and len(rows) == 2 and len(rows[0]) == len(rows[1]) > 1:
        above -= any(map(is_number, rows[1])) and not any(map(is_number, rows[0]))
    if delimiter == "\t":
        values = [line.split("\t") for line in head[above : None if len(text) <= 2**16 else -1] if line]
        opened = (value for row in values for value in row if value.startswith('"'))
        if len({len(row) for row in values}) == 1 and not all(re.fullmatch('"([^"]|"")*"', value) for value in opened):
            return above, None
    sign = re.escape(delimiter)
    has_single = any(re.search(rf"(^|{sign})'[^']*'({sign}|$)", line) for line in head[above:])
    return above, "'" if has_single and '"' not in "".join(head) else '"'


def aligned(header: Sequence[str], first: Sequence[str]) -> Sequence[str]:
    """Return the header with a name for each value of the first row.

    If the row has one value more, the table was written by R and its first column has no name; but if the extra value
    is empty, rows end with a delimiter and the last column has no name. If it has one less, a last empty name is cut.
    """
    if first and len(first) == len(header) + 1:
        return ["", *header] if first[-1].strip() else [*header, ""]
    is_longer = first and len(first) == len(header) - 1 and not header[-1].strip()
    return header[:-1] if is_longer else header


def named_columns(header: Sequence[str], first: Sequence[str] = ()) -> list[str]:
    """Return the names of the columns, stripped of blanks, and `column_N` for the N-th column if it has none.

    Args:
        first: values of the first row, see `aligned`.

    Raises:
        TableError: two columns have the same name, or a quote after a blank splits a value.
    """
    if len(first) > len(header) and any(value.startswith(' "') for value in first):
        raise TableError("A quote in the first row follows a blank, so delimiters inside it count; remove the blank.")
    names = [name.strip() or f"column_{number}" for number, name in enumerate(aligned(header, first), 1)]
    counts = Counter(names)
    if twice := next((name for name in names if counts[name] > 1), None):
        found = [str(number) for number, name in enumerate(names, 1) if name == twice]
        raise TableError(
            f"The columns {', '.join(found[:-1])[:100]} and {found[-1]} have the same name, {_shown(twice)}; rename "
            f"{'one' if len(found) == 2 else 'all but one'}."
        )
    return names


def rows_of_csv(
    text: str, most: int | None = None, form: TableFormat | None = None, columns: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Return the rows of a table in CSV whose header names the columns.

    Args:
        most: number of rows to read; None: all.
        form: provides the delimiter.
        columns: required columns; the delimiter that finds most of them in the header is used.

    Raises:
        TableError: it has no rows, a row has more or fewer values than the header, or two columns have the same name.
    """
    delimiter = (form or TableFormat()).delimiter
    if columns:
        found_of = dict[str, int]()
        for sign in dict.fromkeys((delimiter, *DELIMITERS)):
            with contextlib.suppress(TableError):  # names in quotes end before the delimiter
                header = next(records(text, sign), (0, []))[1]
                found_of[sign] = len({*columns} & {name.strip() for name in header})
        delimiter = max(found_of, key=found_of.__getitem__, default=delimiter)
    found = records(text, delimiter)
    _, header = next(found, (0, []))
    if not header:
        raise TableError("The table is empty; the first line names the columns.")
    first = next(found, None)
    if first is None:
        raise TableError("The table has a header and no rows.")
    header = named_columns(header, first[1])
    rows: list[dict[str, str]] = []
    for number, values in itertools.islice(itertools.chain([first], found), None if most is None else most + 1):
        if len(values) != len(header):
            raise TableError(f"Line {number} has {len(values)} values, the header {len(header)}.")
        rows.append(dict(zip(header, values, strict=True)))
    return rows


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
