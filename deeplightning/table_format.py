"""How the values of a table are written (`TableFormat`), and rows of CSV text.

Training and serving both call it, so they cannot disagree. Uses numpy and the standard library only.
"""

import codecs
import contextlib
import csv
import io
import itertools
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from email.utils import parsedate
from numbers import Real
from typing import Any

import numpy as np

from deeplightning.words import InputError, is_number

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
            f"The columns {', '.join(found[:-1])[:100]} and {found[-1]} have the same name, {shown(twice)}; rename "
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


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
