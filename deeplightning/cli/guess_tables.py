"""What the columns of a table are, and which of them holds texts, classes or numbers to be predicted, for the config of
a new project."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from deeplightning.cli.guess import Columns, Guess, errors_of_data, some
from deeplightning.config.target import find
from deeplightning.faults import ConfigError, Fault, SetupError, count, nearest
from deeplightning.table_spec import MISSING, NAMED_DAY, TableFormat

MAX_ROWS = 200_000
"""Rows of a table that are read."""
MAX_CLASSES = 1000
"""Different values of a column; one with more holds no classes."""
MAX_FEW = 20
"""Different whole numbers that may be classes."""
MAX_STRAY = 20
"""Different words that may stand for a missing value in a column of numbers."""
NUMBERS = 0.9
"""The part of numbers and words that must be numbers, for the words to be missing values; signs (?) always are."""

TARGETS = ("target", "label", "class", "category", "sentiment", "price", "value", "y")
"""Names of a column that is to be predicted, the likeliest first; the manual lists them."""

_GAPS = tuple(word for word in MISSING if word != "none")
"""Words that always stand for a missing value. "None" is a class, unless it is between numbers."""
_NUMBERED = {"id", "ids", "index", "idx", "no", "nr", "number", "num", "row", "rows", "rownames", "unnamed", "column"}
_DATE = re.compile(r"\d{4}([-/.])\d\d?\1\d\d?([T ].*)?|\d\d?([-/.])\d\d?\3(\d\d){1,2}([T ].*)?|" + NAMED_DAY.pattern)


class Column:
    """What the values of a column are, by how often each is in it.

    Args:
        counts: each text with its number.
        form: how numbers and missing values are written.
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
        self.has_codes = any(re.fullmatch(r"0\d+", word) for word in words)  # as 00501
        self.has_dates = bool(words) and all(map(_DATE.fullmatch, words))
        self.type = kind

    def is_number(self) -> bool:
        """Return whether the column is numeric; its other words then mean missing values."""
        words = sum(n for word, n in self.strays.items() if re.search(r"\w", word))  # others are signs, as "?"
        enough = self.numbers >= max(NUMBERS * (self.numbers + words), self.filled / 2) > 0
        return len(self.strays) <= MAX_STRAY and enough and not self.has_codes

    def classes(self) -> dict[str, int]:
        """Return the values that may be classes, in order, each with its number."""
        values = self.values if not self.is_number() else {w: n for w, n in self.values.items() if w not in self.strays}
        form = TableFormat()
        return dict(sorted(values.items(), key=lambda pair: ((n := _number(pair[0], form)) is None, n or 0, pair[0])))


@dataclass(frozen=True)
class Table:
    """The first rows of a table in a file, and its columns by name, in their order."""

    path: Path
    form: TableFormat
    columns: dict[str, Column]
    read: Any  # `deeplightning.data.table_files.FirstRows`

    def of(self) -> str:
        """Return `60 rows of t.csv`."""
        first = "" if self.read.is_whole else ", the first ones,"
        return f"{count(self.read.size, 'row')}{first} of {self.path}"

    def format_notes(self) -> list[str]:
        """Return how a file of CSV is written; other files say themselves how they are read."""
        form, above = self.form, self.read.file.above
        note = f"delimiter {form.delimiter!r}, decimal {form.decimal!r}, encoding {form.encoding}"
        is_foreign = form.encoding in ("latin-1", "cp1252")
        note += " (the file is not UTF-8; look whether letters such as ü are right)" * is_foreign
        note += f"; {count(above, 'line')} above the header skipped" if above else ""
        return [note] if self.read.file.kind == "csv" else []


def table(path: Path, missing_words: Sequence[str] = _GAPS) -> Table:
    """Read the first rows of a table.

    Raises:
        SetupError: it cannot be read, or is something else.
    """
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if each.suffix.lower() in (".csv", ".tsv"))
        hint = f", such as {path / files[0]}" if files else ""
        raise SetupError(f"{path} is a folder; name a CSV file with a header{hint}")
    with errors_of_data():
        form = replace(find("deeplightning.data.table_files.guess_format")(path), missing_words=tuple(missing_words))
        found: Any = find("deeplightning.data.table_files.first_rows")(path, form, MAX_ROWS)
    if found.size < 10:
        rows = count(found.size, "row")
        raise SetupError(f"{path} has {rows} below its header; at least 10 are needed to divide them into sets")
    columns = {name: Column(counts, form, found.types.get(name, "")) for name, counts in found.counts.items()}
    return Table(path, form, columns, found)


def text(data: Path, wanted: Columns) -> Guess:
    """Look at a CSV file with a column of texts and one of classes.

    Raises:
        SetupError: it is something else.
    """
    found = table(data, ())
    if found.read.file.kind != "csv" or found.path.suffix.lower() in (".gz", ".bz2", ".zst"):
        raise SetupError(f"{found.path}: a project of texts reads plain CSV; convert the file, for example with pandas")
    _check_names(found, wanted)
    text = max((n for n in found.columns if n != wanted.target), key=lambda name: found.columns[name].letters)
    most = min(MAX_CLASSES, found.read.size // 2)
    classes = [name for name, each in found.columns.items() if name != text and 2 <= each.different <= most]
    label = wanted.target or _named(classes) or min(classes, key=lambda n: found.columns[n].different, default=None)
    if label not in classes:
        which = f"the column {label}" if label else f"none of its columns ({some(list(found.columns))})"
        raise SetupError(f"{found.path}: {which} has classes, 2 or more values that come again")
    counts = found.columns[label].classes()
    names = [*counts]
    values = {
        "count": found.read.size,
        "number": len(names),
        "classes": some(names),
        "names": names,
        "text": text,
        "label": label,
        "delimiter": found.form.delimiter,
        "encoding": found.form.encoding,
    }
    notes = [
        f"{found.of()}: texts in the column {text}, classes in the column {label}",
        f"{len(names)} classes: {_counted(counts)}",
        *found.format_notes(),
        *_left_out(found, [text, label]),
    ]
    return Guess(values, notes, '--text "a text of yours"')


def rows(data: Path, wanted: Columns) -> Guess:
    """Look at a table with a column to be predicted: classes, or numbers.

    Raises:
        ConfigError: a column that is wanted is not there.
        SetupError: it is something else.
    """
    found = table(data)
    _check_names(found, wanted)
    kinds, reasons = _kinds(found, wanted)
    target, reason = _target(found, kinds, wanted)
    classes = _classes(found, kinds, target, wanted.task)
    kinds[target] = "category" if classes else "number"
    reasons.pop(target, None)
    inputs = [name for name, kind in kinds.items() if kind != "ignore" and name != target]
    if not inputs:
        raise _too_few(found, kinds)
    numbers = {name: found.columns[name] for name, kind in kinds.items() if kind == "number" or name == target}
    strays = {name: each.strays for name, each in numbers.items() if each.strays and each.is_number()}
    missing_words = [*_GAPS, *dict.fromkeys(word.lower() for words in strays.values() for word in words)]
    form = replace(found.form, missing_words=tuple(missing_words))
    gaps = _gaps(found, inputs, form)
    categories = [found.columns[name].values for name in inputs if kinds[name] == "category"]
    words = [sum(not form.is_missing(word) for word in values) + 1 for values in categories]
    values = {
        "count": found.read.size,
        "number": len(inputs),
        "file": found.path.name,
        "target": target,
        "missing": "fill" if gaps else "refuse",
        "missing_words": missing_words,
        "delimiter": form.delimiter,
        "decimal": form.decimal,
        "encoding": form.encoding,
        "columns": kinds,
        "task": f"deeplightning.task.{'classif.Classification' if classes else 'regression.Regression'}",
        "numbers": len(inputs) - len(words),
        "cardinalities": words,
        "outputs": len(classes) or 1,
        "dropout": 0.4 if classes else 0.2,
        "loss": "torch.nn.CrossEntropyLoss" if classes else "torch.nn.MSELoss",
    }
    predicted = f"{len(classes)} classes: {_counted(classes)}" if classes else "numbers"
    groups = {kind: [name for name in inputs if kinds[name] == kind] for kind in ("number", "category")}
    for name, why in reasons.items():
        groups.setdefault(f"ignored, {why}", []).append(name)
    groups["dates, as days since 1970-01-01"] = [name for name in groups["number"] if found.columns[name].has_dates]
    notes = [
        f"{found.of()}: the column {target} is predicted ({reason}), {predicted}",
        *found.format_notes(),
        *(f"{what}: {some(names)}" for what, names in groups.items() if names),
        *(
            f"missing-value words in the column {name}: {_counted({repr(w): n for w, n in words.items()})}"
            for name, words in strays.items()
        ),
        *_left_out(found, [target], form),
        *([f"missing values, which are filled: {_counted(gaps)}"] if gaps else []),
    ]
    first = {name: next(iter(counts)) for name, counts in found.read.counts.items()}
    row = {name: _cell(first[name], kinds[name], form) for name in inputs}
    return Guess(values, notes, "row.json", {"row.json": json.dumps({"rows": [row]}, ensure_ascii=False) + "\n"})


def _classes(found: Table, kinds: dict[str, str], target: str, task: str | None) -> dict[str, int]:
    """Return the classes of the target, each with its number of rows; none where numbers are predicted.

    Raises:
        SetupError: the target holds no numbers and a regression is wanted, or too many values for classes.
    """
    column = found.columns[target]
    classes, is_number = column.classes(), column.is_number()
    if task == "regression" and not is_number:
        raise SetupError(f"{found.path}: the column {target} holds no numbers to be predicted; {_columns(kinds)}")
    is_few = column.is_whole and 2 <= len(classes) <= min(MAX_FEW, found.read.size // 5)
    if task == "regression" or (task is None and is_number and not is_few):
        return {}
    if len(classes) > min(MAX_CLASSES, max(MAX_FEW, found.read.size // 2)):
        raise SetupError(
            f"{found.path}: the column {target} has {column.different} different values, too many for classes; "
            "--regression predicts numbers, and --target NAME names another column"
        )
    return classes


def _target(found: Table, kinds: dict[str, str], wanted: Columns) -> tuple[str, str]:
    """Return the column that is to be predicted, and why it is."""
    if wanted.target is not None:
        if found.columns[wanted.target].different < 2:
            raise SetupError(f"{found.path}: the column {wanted.target} has fewer than two different values")
        return wanted.target, "--target"
    allowed = ("number",) if wanted.task == "regression" else ("number", "category")
    able = [name for name, each in found.columns.items() if each.different > 1 and not each.has_dates]
    able = [name for name in able if kinds[name] in allowed]
    if not able or sum(kind != "ignore" for kind in kinds.values()) < 2:
        needed = ", and one of numbers to be predicted" if wanted.task == "regression" else ""
        raise _too_few(found, kinds, needed)
    named = _named(able)
    return (named, "by its name") if named else (able[-1], "the last column that can be; --target names another")


def _kinds(found: Table, wanted: Columns) -> tuple[dict[str, str], dict[str, str]]:
    """Return what each column is taken for, number, category or ignore, and the reasons of those that are ignored."""
    kinds, reasons = {}, {}
    for name, column in found.columns.items():
        parts = {part.lower() for part in re.split(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])", name)}
        is_whole = column.is_whole and column.numbers == column.filled
        is_number = column.is_number() and not ("id" in parts and is_whole)
        many = column.different > min(MAX_CLASSES, max(MAX_FEW, found.read.size // 2))
        undated = "dates that are not written as 2024-02-29 or Feb-29-2024"
        holds = {
            "by --ignore": name in wanted.ignore,
            f"of type {column.type}": bool(column.type),
            "empty": column.filled == 0,
            "a number of each row": parts & _NUMBERED and is_whole and column.different == column.filled,
            undated: column.has_dates and not column.is_number(),
            "different in nearly each row": many and not is_number,
        }
        kinds[name] = "ignore" if any(holds.values()) else "number" if is_number else "category"
        if kinds[name] == "ignore":
            reasons[name] = next(reason for reason, is_so in holds.items() if is_so)
    return kinds, reasons


def _check_names(found: Table, wanted: Columns) -> None:
    for option, name in [("--target", wanted.target), *(("--ignore", name) for name in wanted.ignore)]:
        if name is not None and name not in found.columns:
            message = f"{found.path} has no column {name!r}.{nearest(name, found.columns)} Its columns: "
            raise ConfigError(Fault(message + some(list(found.columns)), option))
    if wanted.target in wanted.ignore:
        raise ConfigError(Fault(f"the column {wanted.target} is the target; remove one of both", "--ignore"))


def _too_few(found: Table, kinds: dict[str, str], needed: str = "") -> SetupError:
    message = f"there must be two columns or more of numbers or categories{needed}; {_columns(kinds)}"
    return SetupError(f"{found.path}: {message}")


def _columns(kinds: dict[str, str]) -> str:
    return f"its columns: {some([f'{name} ({kind})' for name, kind in kinds.items()])}"


def _gaps(found: Table, names: Sequence[str], form: TableFormat) -> dict[str, int]:
    """Return how many values are missing in each of some columns that lacks any."""
    gaps = {}
    for name in names:
        column = found.columns[name]
        gaps[name] = column.missing + sum(n for word, n in column.values.items() if form.is_missing(word))
    return {name: number for name, number in gaps.items() if number}


def _counted(numbers: dict[str, int]) -> str:
    return some([f"{name} ({number})" for name, number in numbers.items()])


def _cell(text: str, kind: str, form: TableFormat) -> object:
    """Return the value of a cell as JSON has it."""
    if form.is_missing(text):
        return None
    return form.number(text) if kind == "number" and not _DATE.fullmatch(text) else text


def _left_out(found: Table, columns: list[str], form: TableFormat | None = None) -> list[str]:
    lacking = _gaps(found, columns, form or found.form)
    return [f"missing values, whose rows are left out: {_counted(lacking)}"] if lacking else []


def _named(names: Sequence[str]) -> str | None:
    """Return the column with the likeliest of `TARGETS`."""
    lowered = {name.lower(): name for name in names}
    return next((lowered[word] for word in TARGETS if word in lowered), None)


def _number(text: str, form: TableFormat) -> float | None:
    try:
        number = float(form.number(text))
    except ValueError:
        return None
    return number if np.isfinite(number) else None
