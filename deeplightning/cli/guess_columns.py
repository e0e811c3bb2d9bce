"""Read the first rows of a table and determine what its columns contain, for the config of a new project."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from deeplightning.cli.guess import Columns, counted, errors_of_data, some
from deeplightning.config.target import find
from deeplightning.faults import ConfigError, Fault, SetupError, count, nearest
from deeplightning.table_format import MISSING, NAMED_DAY, TableFormat

MAX_ROWS = 200_000
"""Maximum number of rows of a table that are read."""
MAX_CLASSES = 1000
"""Maximum number of different values of a column of classes."""
MAX_STRAY = 20
"""Maximum number of different words for a missing value in a column of numbers."""
MIN_NUMBERS = 0.9
"""Minimum share of numbers among numbers and words, for the words to be missing values; signs always are."""
_SIGN = re.compile(r"\W*|[+-]?inf(inity)?|#[A-Z]+(/[A-Z0]+)?[!?]?", re.IGNORECASE)
"""A sign, such as ?, an infinite number, or a spreadsheet's error, such as #DIV/0!."""
AMOUNT = re.compile(r"(?=.*[^\d., -])[(+-]?[^\W\d_]{0,4}\W{0,3}\d+(?:[.,' ]\d{3})*[.,]\d+\s?[^\W\d_]{0,4}\)?")
"""An amount that is not a plain number, such as CHF 12.50, ($1,200.00) or 3.5 kg."""

TARGETS = ("target", "label", "class", "category", "sentiment", "price", "value", "y")
"""Names of a column to predict, the likeliest first; the manual lists them."""

GAPS = tuple(word for word in MISSING if word != "none")
"""Words that always mean a missing value. "None" does so only in a column of numbers; elsewhere it is a class."""
DATE = re.compile(r"\d{4}([-/.])\d\d?\1\d\d?([T ].*)?|\d\d?([-/.])\d\d?\3(\d\d){1,2}([T ].*)?|" + NAMED_DAY.pattern)


class Column:
    """Properties of the values of a column.

    Args:
        counts: the number of occurrences of each text.
        form: the format of numbers and missing values.
        kind: the name of a type that is neither number nor text, such as list.
    """

    def __init__(self, counts: dict[str, int], form: TableFormat, kind: str):
        words = {word: number for word, number in counts.items() if not form.is_missing(word)}
        numbers = {word: value for word in words if (value := _number(word, form)) is not None}
        strays = {word: number for word, number in words.items() if word not in numbers}
        self.filled = sum(words.values())
        self.missing = sum(counts.values()) - self.filled
        self.different = len(words)
        self.values = dict(islice(words.items(), MAX_CLASSES + 1))
        self.strays = dict(islice(strays.items(), MAX_STRAY + 1))  # words between numbers
        self.numbers = self.filled - sum(strays.values())
        self.letters = sum(len(word) * number for word, number in words.items())
        self.is_whole = bool(numbers) and all(value.is_integer() for value in numbers.values())
        long = [word for word in words if re.fullmatch(r"\d{16,300}", word, re.ASCII)]
        is_exact = len({*map(int, long)}) == len({*map(float, long)})
        self.has_codes = not is_exact or any(re.fullmatch(r"0\d+", word) for word in words)  # as 00501
        self.has_dates = bool(words) and all(map(DATE.fullmatch, words))
        self.type = kind

    def is_number(self) -> bool:
        """Return whether the column is numeric, so that its words are missing values."""
        words = sum(n for word, n in self.strays.items() if not _SIGN.fullmatch(word))
        enough = self.numbers >= max(MIN_NUMBERS * (self.numbers + words), self.filled / 2) > 0
        return len(self.strays) <= MAX_STRAY and enough and not self.has_codes

    def names_sets(self) -> bool:
        """Return whether all values are names of sets, such as train and test."""
        names: Any = find("deeplightning.data.splits.SET_NAMES")
        found = {names.get(word.lower()) for word in self.values}
        return len(found) > 1 and "train" in found and None not in found

    def classes(self) -> dict[str, int]:
        """Return the values that may be classes, in order, each with its number of rows."""
        form = TableFormat()
        return dict(sorted(self.values.items(), key=lambda at: ((n := _number(at[0], form)) is None, n or 0, at[0])))


@dataclass(frozen=True)
class Table:
    """The first rows of a table in a file, and its columns by name, in order."""

    path: Path
    form: TableFormat
    columns: dict[str, Column]
    read: Any  # `deeplightning.data.table_files.FirstRows`

    def of(self) -> str:
        """Return a description such as `60 rows of t.csv`."""
        first = "" if self.read.is_whole else ", the first ones,"
        return f"{count(self.read.size, 'row')}{first} of {self.path}"

    def format_notes(self) -> list[str]:
        """Return a note on the format of a CSV file; other files specify their format themselves."""
        form, above = self.form, self.read.file.above
        note = f"delimiter {form.delimiter!r}, decimal {form.decimal!r}, encoding {form.encoding}"
        is_foreign = form.encoding in ("latin-1", "cp1252")
        note += " (the file is not UTF-8; check that letters such as ü are right)" * is_foreign
        note += f"; {count(above, 'line')} above the header skipped" if above else ""
        return [note] if self.read.file.kind == "csv" else []

    def check_names(self, wanted: Columns) -> None:
        for option, name in [("--target", wanted.target), *(("--ignore", name) for name in wanted.ignore)]:
            if name is not None and name not in self.columns:
                message = f"{self.path} has no column {name!r}.{nearest(name, self.columns)} Its columns: "
                raise ConfigError(Fault(message + some(list(self.columns)), option))
        if wanted.target in wanted.ignore:
            raise ConfigError(Fault(f"the column {wanted.target} is the target; remove one option", "--ignore"))

    def gaps(self, names: Sequence[str], form: TableFormat) -> dict[str, int]:
        """Return the number of missing values of each of these columns that has any."""
        gaps = {}
        for name in names:
            column = self.columns[name]
            gaps[name] = column.missing + sum(n for word, n in column.values.items() if form.is_missing(word))
        return {name: number for name, number in gaps.items() if number}

    def left_out(self, columns: Sequence[str], form: TableFormat) -> list[str]:
        lacking = self.gaps(columns, form)
        return [f"missing values, whose rows are left out: {counted(lacking)}"] if lacking else []


def table(path: Path, missing_words: Sequence[str] = GAPS) -> Table:
    """Read the first rows of a table.

    Raises:
        SetupError: the file cannot be read, or is not a table.
    """
    if path.is_dir():
        files = [one for one in sorted(path.iterdir()) if one.suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet")]
        likely = min(files, key=lambda file: "train" not in file.name.lower(), default=None)
        hint = f", such as {likely}" if likely else ""
        raise SetupError(f"{path} is a folder; name a file: CSV with a header, JSON lines or Parquet{hint}")
    with errors_of_data():
        form = replace(find("deeplightning.data.table_files.guess_format")(path), missing_words=tuple(missing_words))
        found: Any = find("deeplightning.data.table_files.first_rows")(path, form, MAX_ROWS)
    if found.size < 10:
        rows = count(found.size, "row")
        raise SetupError(f"{path} has {rows} below its header; at least 10 are needed to divide them into sets")
    columns = {name: Column(counts, form, found.types.get(name, "")) for name, counts in found.counts.items()}
    return Table(path, form, columns, found)


def likely_target(names: Sequence[str]) -> str | None:
    """Return the column with the likeliest of `TARGETS`."""
    lowered = {name.lower(): name for name in names}
    return next((lowered[word] for word in TARGETS if word in lowered), None)


def _number(text: str, form: TableFormat) -> float | None:
    try:
        number = float(form.number(text))
    except ValueError:
        return None
    return number if np.isfinite(number) else None
