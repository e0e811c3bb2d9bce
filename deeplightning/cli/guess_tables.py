"""What the columns of a CSV file are, and which of them holds texts, classes or numbers to be predicted, for the config
of a new project."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deeplightning.cli.guess import Guess, some
from deeplightning.faults import SetupError, count
from deeplightning.words import printable

MAX_ROWS = 200_000
"""Rows of a table that are read."""
MAX_CLASSES = 1000
"""Different values of a column; one with more holds no classes."""
MAX_FEW = 20
"""Different whole numbers that may be classes."""
MISSING = ("", "na", "n/a", "nan", "null", "none")
"""Words that mean a missing value, the same as in `deeplightning.table`."""

LABELS = ("label", "class", "category", "sentiment", "target", "y")
TARGETS = ("target", "y", "price", "value", "label")
NUMBERED = ("id", "index", "no", "nr", "row")


@dataclass
class Column:
    """What the values of a column are: how many are there, missing, and numbers; sums of these; some of them all."""

    filled: int = 0
    missing: int = 0
    numbers: int = 0
    total: float = 0.0
    squares: float = 0.0
    offset: float | None = None
    letters: int = 0
    values: Counter[str] = field(default_factory=Counter)

    def add(self, cell: str) -> None:
        cell = cell.strip()
        if cell.lower() in MISSING:
            self.missing += 1
            return
        number = _number(cell)
        if number is not None and not math.isfinite(number):
            self.missing += 1
            return
        self.filled += 1
        self.letters += len(cell)
        if len(self.values) <= MAX_CLASSES:
            self.values[cell] += 1
        if number is not None:
            self.numbers += 1
            self.offset = number if self.offset is None else self.offset
            self.total += number - self.offset
            self.squares += (number - self.offset) ** 2

    def is_numbers(self) -> bool:
        return self.filled > 0 and self.numbers == self.filled

    def mean_std(self) -> tuple[float, float]:
        rest = self.total / self.numbers
        std = math.sqrt(max(self.squares / self.numbers - rest**2, 0))
        return _short((self.offset or 0) + rest), _short(std or 1.0)


@dataclass
class Table:
    """A CSV file: its columns by name, in their order, how many rows were read, and the cells of the first."""

    path: Path
    delimiter: str
    columns: dict[str, Column]
    rows: int
    is_whole: bool
    first: dict[str, str]

    def of(self) -> str:
        return f"{count(self.rows, 'row')}{'' if self.is_whole else ', the first ones,'} of {self.path}"


def table(path: Path) -> Table:
    """The columns of a CSV file with a header.

    Raises:
        SetupError: it cannot be read, or is something else.
    """
    if path.suffix.lower() in (".parquet", ".pq"):
        raise SetupError(
            f"{path}: only CSV is looked at; begin with some of its rows in CSV, and name {path.name} then"
        )
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            names = [name.strip() for name in next(reader, [])]
            _check_header(path, names)
            columns = {name: Column() for name in names}
            rows, first = 0, dict[str, str]()
            for row in reader:
                if not row:
                    continue
                if rows == MAX_ROWS:
                    return Table(path, delimiter, columns, rows, False, first)
                if len(row) > len(names):
                    raise SetupError(
                        f"{path}, line {reader.line_num}: {len(row)} values for {len(names)} columns; a value with "
                        f"{delimiter!r} in it needs quotes"
                    )
                rows += 1
                cells = dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=True))
                first = first or {name: cell.strip() for name, cell in cells.items()}
                for name, cell in cells.items():
                    columns[name].add(cell)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is not UTF-8 ({error.reason}); save it as UTF-8") from None
    except csv.Error as error:
        raise SetupError(f"{path} is no CSV file: {error}") from None
    if rows < 10:
        raise SetupError(f"{path} has {count(rows, 'row')} below its header; at least 10 are needed to divide them")
    return Table(path, delimiter, columns, rows, True, first)


def _check_header(path: Path, names: list[str]) -> None:
    if not names:
        raise SetupError(f"{path} is empty")
    if all(_number(name) is not None for name in names) or not any(names):
        raise SetupError(f"{path}: the first line, {some(names)}, names no columns; put a header above it")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SetupError(f"{path}: two columns are called {printable(twice)!r}; rename one")


def text(data: Path) -> Guess:
    """A CSV file with a column of texts and one of classes.

    Raises:
        SetupError: it is something else.
    """
    found = table(_file_of(data))
    by_length = sorted(found.columns, key=lambda name: -found.columns[name].letters)
    text = by_length[0]
    others = [name for name in found.columns if name != text]
    classes = [name for name in others if 2 <= len(found.columns[name].values) <= min(MAX_CLASSES, found.rows // 2)]
    label = _named(classes, LABELS) or min(classes, key=lambda name: len(found.columns[name].values), default=None)
    if label is None:
        raise SetupError(
            f"{found.path}: beside the texts ({text}) no column has classes, 2 or more values that come again; its "
            f"columns: {some(list(found.columns))}"
        )
    names = sorted(found.columns[label].values, key=lambda name: (_number(name) is None, _number(name) or 0, name))
    counts = found.columns[label].values
    values = {
        "count": found.rows,
        "number": len(names),
        "classes": some(names),
        "names": names,
        "text": text,
        "label": label,
        "delimiter": found.delimiter,
    }
    notes = [
        f"{found.of()}: texts in the column {text}, classes in the column {label}",
        f"{len(names)} classes: {some([f'{name} ({counts[name]})' for name in names])}",
        *_missing(found, [text, label]),
    ]
    return Guess(values, notes, '--text "a text of yours"')


def rows(data: Path) -> Guess:
    """A CSV file with a column to be predicted: classes, or numbers.

    Raises:
        SetupError: it is something else.
    """
    found = table(_file_of(data))
    used = {name: kind for name, kind in _kinds(found).items() if kind != "ignore"}
    target = _named(list(used), (*LABELS, *TARGETS)) or next(reversed(used), None)
    if target is None or len(used) < 2:
        raise SetupError(f"{found.path}: there must be two columns or more of numbers or categories; {_columns(found)}")
    column = found.columns[target]
    are_classes = used[target] == "category" or (
        2 <= len(column.values) <= min(MAX_FEW, found.rows // 5)
        and all(float(value).is_integer() for value in column.values)
    )
    return _of_rows(found, target, are_classes)


def regression(data: Path) -> Guess:
    """The same with numbers to be predicted.

    Raises:
        SetupError: it is something else.
    """
    found = table(_file_of(data))
    used = {name: kind for name, kind in _kinds(found).items() if kind != "ignore"}
    numbers = [name for name, kind in used.items() if kind == "number"]
    target = _named(numbers, TARGETS) or (numbers[-1] if numbers else None)
    if target is None or len(used) < 2:
        raise SetupError(
            f"{found.path}: there must be two columns or more, and one of numbers to be predicted; {_columns(found)}"
        )
    return _of_rows(found, target, False)


def _of_rows(found: Table, target: str, are_classes: bool) -> Guess:
    if found.delimiter != ",":
        raise SetupError(f"{found.path}: its columns are divided by {found.delimiter!r}; save it with commas")
    column = found.columns[target]
    if column.missing:
        raise SetupError(
            f"{found.path}: {count(column.missing, 'row')} has nothing in the column {target}, which is to be "
            "predicted; remove such rows"
        )
    kinds = _kinds(found) | {target: "category" if are_classes else "number"}
    inputs = [name for name, kind in kinds.items() if kind != "ignore" and name != target]
    words = [len(found.columns[name].values) + 1 for name in inputs if kinds[name] == "category"]
    ignored = [name for name, kind in kinds.items() if kind == "ignore"]
    gaps = {name: found.columns[name].missing for name in inputs if found.columns[name].missing}
    task = "classif.Classification" if are_classes else "regression.Regression"
    values = {
        "count": found.rows,
        "number": len(inputs),
        "file": found.path.name,
        "target": target,
        "missing": "fill" if gaps else "refuse",
        "columns": kinds,
        "task": f"deeplightning.task.{task}",
        "numbers": len(inputs) - len(words),
        "cardinalities": words,
        "outputs": len(column.values) if are_classes else 1,
        "loss": "torch.nn.CrossEntropyLoss" if are_classes else "torch.nn.MSELoss",
        "monitor": "val_acc" if are_classes else "val_rmse",
        "mode": "max" if are_classes else "min",
    }
    classes = [f"{name} ({number})" for name, number in sorted(column.values.items())]
    predicted = (
        f"{len(classes)} classes: {some(classes)}" if are_classes else "mean {}, std {}".format(*column.mean_std())
    )
    notes = [
        f"{found.of()}: the column {target} is predicted, {predicted}",
        *(
            f"{kind}: {some([name for name in inputs if kinds[name] == kind])}"
            for kind in ("number", "category")
            if any(kinds[name] == kind for name in inputs)
        ),
        *([f"ignored, different in nearly each row, or empty: {some(ignored)}"] if ignored else []),
    ]
    if gaps:
        notes.append(f"missing values, which are filled: {some([f'{name} ({n})' for name, n in gaps.items()])}")
    row = {name: _cell(found.first[name], kinds[name]) for name in inputs}
    return Guess(values, notes, "row.json", {"row.json": json.dumps({"rows": [row]}, ensure_ascii=False) + "\n"})


def _kinds(found: Table) -> dict[str, str]:
    """What each column is taken for: number, category or ignore."""
    kinds = {}
    for name, column in found.columns.items():
        many = len(column.values) > min(MAX_CLASSES, max(MAX_FEW, found.rows // 2))
        empty = column.filled == 0 or not name or name.lower() in NUMBERED
        is_category = not column.is_numbers() and not many
        kinds[name] = (
            "ignore" if empty or (many and not column.is_numbers()) else "category" if is_category else "number"
        )
    return kinds


def _columns(found: Table) -> str:
    kinds = [f"{name} ({kind})" for name, kind in _kinds(found).items()]
    return f"its columns: {some(kinds)}"


def _cell(text: str, kind: str) -> object:
    """The value of a cell as JSON has it."""
    if text.lower() in MISSING:
        return None
    return float(text) if kind == "number" else text


def _file_of(data: Path) -> Path:
    if data.is_dir():
        files = sorted(path.name for path in data.iterdir() if path.suffix.lower() in (".csv", ".tsv"))
        hint = f", such as {data / files[0]}" if files else ""
        raise SetupError(f"{data} is a folder; name a CSV file with a header{hint}")
    return data


def _missing(found: Table, columns: list[str]) -> list[str]:
    lacking = {name: found.columns[name].missing for name in columns if found.columns[name].missing}
    if not lacking:
        return []
    return [f"missing values, whose rows are left out: {some([f'{name} ({n})' for name, n in lacking.items()])}"]


def _named(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """The first of the names that is one of those wanted, the likeliest first."""
    lowered = {name.lower(): name for name in names}
    return next((lowered[word] for word in wanted if word in lowered), None)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _short(value: float) -> float:
    """A number to 6 digits."""
    return float(f"{value:.6g}")
