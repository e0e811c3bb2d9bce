"""Determine which column of a table to predict, from texts or from rows, for the config of a new project."""

import json
import re
from dataclasses import replace
from pathlib import Path

from deeplightning.cli.guess import Columns, Guess, counted, some
from deeplightning.cli.guess_columns import AMOUNT, DATE, GAPS, MAX_CLASSES, Table, likely_target, table
from deeplightning.faults import SetupError
from deeplightning.table_format import TableFormat

MAX_FEW = 20
"""Maximum number of different whole numbers that are taken for classes."""
FEW_ROWS = 2_000
"""With fewer rows, a network for classes gets one hidden layer and a low learning rate: more of either overfits."""
_ID_NAMES = {"id", "ids", "index", "idx", "no", "nr", "number", "num", "row", "rows", "rownames", "unnamed", "column"}


def text(data: Path, wanted: Columns) -> Guess:
    """Inspect a CSV file with a column of texts and one of classes.

    Raises:
        SetupError: the file is something else.
    """
    if data.is_dir() and (file := next(data.rglob("*.txt"), None)):
        raise SetupError(
            f"{data} holds texts in files, such as {file}; write them into a CSV file with a header: a text and its "
            "class in each row"
        )
    found = table(data, ())
    if found.read.file.kind != "csv" or found.path.suffix.lower() in (".gz", ".bz2", ".zst"):
        raise SetupError(f"{found.path}: a project of texts reads plain CSV; convert the file, for example with pandas")
    found.check_names(wanted)
    texts = [name for name in found.columns if name != wanted.target]
    if not texts:
        raise SetupError(f"{found.path}: {wanted.target} is its only column; a column of texts must be beside it")
    text = max(texts, key=lambda name: found.columns[name].letters)
    sets = [name for name, each in found.columns.items() if each.names_sets()]
    others = [name for name in found.columns if name not in (text, *sets)]
    classes = [name for name in others if 2 <= found.columns[name].different <= min(MAX_CLASSES, found.read.size // 2)]
    fewest = min(classes, key=lambda name: found.columns[name].different, default=None)
    label = wanted.target or likely_target(classes) or fewest
    if label not in classes:
        which = f"the column {label} has no" if label else f"none of its columns ({some(list(found.columns))}) has"
        raise SetupError(f"{found.path}: {which} classes: 2 or more values, each repeated")
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
        f"{len(names)} classes: {counted(counts)}",
        *found.format_notes(),
        *(f"the column {name} names sets; it does not divide the texts, but texts.py may use it" for name in sets),
        *found.left_out([text, label], found.form),
    ]
    return Guess(values, notes, '--text "a text of yours"')


def rows(data: Path, wanted: Columns) -> Guess:
    """Inspect a table with a column to predict: classes or numbers.

    Raises:
        ConfigError: a column that an option names does not exist.
        SetupError: the file is something else.
    """
    found = table(data)
    found.check_names(wanted)
    kinds, reasons = _kinds(found, wanted)
    target, reason = _target(found, kinds, wanted)
    classes = _classes(found, kinds, target, wanted.task)
    kinds[target] = "category" if classes else "number"
    reasons.pop(target, None)
    inputs = [name for name, kind in kinds.items() if kind != "ignore" and name != target]
    numbers = {name: found.columns[name] for name, kind in kinds.items() if kind == "number" or name == target}
    strays = {name: each.strays for name, each in numbers.items() if each.strays and each.is_number()}
    for name, between in strays.items():
        if shared := {*map(str.lower, classes)} & {*map(str.lower, between)}:
            message = f"{some(sorted(shared))} is a class of the column {target}, but a missing value among numbers"
            raise SetupError(f"{found.path}: {message}; leave such cells empty, or --ignore {name}")
    missing_words = [*GAPS, *dict.fromkeys(word.lower() for words in strays.values() for word in words)]
    form = replace(found.form, missing_words=tuple(missing_words))
    for name in [name for name in inputs if kinds[name] == "category"]:
        if all(map(form.is_missing, found.columns[name].values)):
            kinds[name], reasons[name] = "ignore", "with almost no values"
            inputs.remove(name)
    if not inputs:
        raise _too_few_columns(found, kinds)
    gaps = found.gaps(inputs, form)
    categories = [found.columns[name].values for name in inputs if kinds[name] == "category"]
    words = [sum(not form.is_missing(word) for word in values) + 1 for values in categories]
    is_shallow = bool(classes) and found.read.size < FEW_ROWS
    values = {
        "count": found.read.size,
        "number": len(inputs),
        "file": found.path.name,
        "target": target,
        "missing": "fill" if gaps or not found.read.is_whole else "refuse",
        "missing_words": missing_words,
        "delimiter": form.delimiter,
        "decimal": form.decimal,
        "encoding": form.encoding,
        "columns": kinds,
        "task": f"deeplightning.task.{'classif.Classification' if classes else 'regression.Regression'}",
        "numbers": len(inputs) - len(words),
        "cardinalities": words if found.read.is_whole else "auto",  # later rows may have others
        "outputs": (len(classes) or 1) if found.read.is_whole else "auto",
        "depth": 0 if is_shallow else 1,
        "dropout": 0.4 if classes else 0.2,
        "rate": 0.001 if is_shallow else 0.003,
        "epochs": min(max(60, 100_000 // found.read.size), 250) if is_shallow else 60,
        "monitor": "val_loss" if is_shallow else None,  # None: the last weights are tested
        "loss": "torch.nn.CrossEntropyLoss" if classes else "torch.nn.MSELoss",
    }
    predicted = f"{len(classes)} classes: {counted(classes)}" if classes else "numbers"
    groups = {kind: [name for name in inputs if kinds[name] == kind] for kind in ("number", "category")}
    for name, why in reasons.items():
        groups.setdefault(f"ignored, {why}", []).append(name)
    groups["dates, as days since 1970-01-01"] = [name for name in groups["number"] if found.columns[name].has_dates]
    notes = [
        f"{found.of()}: the column {target} is predicted ({reason}), {predicted}",
        *found.format_notes(),
        *(f"{what}: {some(names)}" for what, names in groups.items() if names),
        *(
            f"missing-value words in the column {name}: {counted({repr(w): n for w, n in words.items()})}"
            for name, words in strays.items()
        ),
        *found.left_out([target], form),
        *([f"missing values, which are filled: {counted(gaps)}"] if gaps else []),
    ]
    row = {name: _json_value(next(iter(found.read.counts[name])), kinds[name], form) for name in inputs}
    return Guess(values, notes, "row.json", {"row.json": json.dumps({"rows": [row]}, ensure_ascii=False) + "\n"})


def _classes(found: Table, kinds: dict[str, str], target: str, task: str | None) -> dict[str, int]:
    """Return the classes of the target, each with its number of rows; empty if numbers are predicted.

    Raises:
        SetupError: the target has no numbers but the task is regression, or it has too many values for classes.
    """
    column = found.columns[target]
    classes, is_number = column.classes(), column.is_number()
    if is_number:  # words among numbers are missing values
        classes = {word: number for word, number in classes.items() if word not in column.strays}
    if task == "regression" and not is_number:
        values = some([*column.values][:2])
        message = f"the column {target} holds no numbers to predict, but {values}; its columns: {counted(kinds)}"
        raise SetupError(f"{found.path}: {message}")
    is_few = column.is_whole and 2 <= len(classes) <= min(MAX_FEW, found.read.size // 5)
    if task == "regression" or (task is None and is_number and not is_few):
        return {}
    if len(classes) > min(MAX_CLASSES, max(MAX_FEW, found.read.size // 2)):
        raise SetupError(
            f"{found.path}: the column {target} has {column.different} different values, too many for classes; "
            f"{'--regression predicts numbers, and ' * is_number}--target NAME names another column"
        )
    return classes


def _target(found: Table, kinds: dict[str, str], wanted: Columns) -> tuple[str, str]:
    """Return the column to predict, and the reason."""
    if wanted.target is not None:
        if found.columns[wanted.target].different < 2:
            raise SetupError(f"{found.path}: the column {wanted.target} has fewer than two different values")
        return wanted.target, "--target"
    allowed = ("number",) if wanted.task == "regression" else ("number", "category")
    able = [name for name, each in found.columns.items() if each.different > 1 and not each.has_dates]
    able = [name for name in able if kinds[name] in allowed]
    if not able or sum(kind != "ignore" for kind in kinds.values()) < 2:
        needed = ", and one of numbers to predict" if wanted.task == "regression" else ""
        raise _too_few_columns(found, kinds, needed)
    named = likely_target(able)
    return (named, "by its name") if named else (able[-1], "the last possible column; --target names another")


def _kinds(found: Table, wanted: Columns) -> tuple[dict[str, str], dict[str, str]]:
    """Return the kind of each column, number, category or ignore, and the reasons for ignored ones."""
    kinds, reasons = {}, {}
    for name, column in found.columns.items():
        parts = {part.lower() for part in re.split(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])", name)}
        is_whole = column.is_whole and column.numbers == column.filled
        is_number = column.is_number() and not ("id" in parts and is_whole)
        amounts = [word for word in column.strays if AMOUNT.fullmatch(word)]
        many = column.different > min(MAX_CLASSES, max(MAX_FEW, found.read.size // 2))
        undated = "dates that are not written as 2024-02-29 or Feb-29-2024"
        holds = {
            "by --ignore": name in wanted.ignore,
            f"of type {column.type}": bool(column.type),
            "the sets of the rows, which data.module.params.split may name": column.names_sets(),
            "with almost no values": column.filled < 3,  # a training set may have none of them
            "a row number": parts & _ID_NAMES and is_whole and column.different == column.filled,
            undated: column.has_dates and not column.is_number(),
            f"amounts such as {some(amounts[:1])}, not plain numbers": many and len(amounts) > len(column.strays) / 2,
            "different in nearly every row": many and not is_number,
        }
        kinds[name] = "ignore" if any(holds.values()) else "number" if is_number else "category"
        if kinds[name] == "ignore":
            reasons[name] = next(reason for reason, is_so in holds.items() if is_so)
    return kinds, reasons


def _too_few_columns(found: Table, kinds: dict[str, str], needed: str = "") -> SetupError:
    message = f"there must be two or more columns of numbers or categories{needed}; its columns: {counted(kinds)}"
    if len(kinds) == 1:
        message += "; the values of a row are separated by a comma, semicolon, tab, | or one space"
    return SetupError(f"{found.path}: {message}")


def _json_value(text: str, kind: str, form: TableFormat) -> object:
    """Convert the text of a cell to a JSON value."""
    if form.is_missing(text):
        return None
    return form.number(text) if kind == "number" and not DATE.fullmatch(text) else text
