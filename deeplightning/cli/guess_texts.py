"""Find the columns of texts and of classes in a table, for the config of a new project."""

from pathlib import Path

from deeplightning.cli.guess import Columns, Guess, counted, some
from deeplightning.cli.guess_columns import MAX_CLASSES, likely_target, table
from deeplightning.faults import SetupError


def text(data: Path, wanted: Columns) -> Guess:
    """Look at a CSV file with a column of texts and one of classes.

    Raises:
        SetupError: it is something else.
    """
    found = table(data, ())
    if found.read.file.kind != "csv" or found.path.suffix.lower() in (".gz", ".bz2", ".zst"):
        raise SetupError(f"{found.path}: a project of texts reads plain CSV; convert the file, for example with pandas")
    found.check_names(wanted)
    text = max((n for n in found.columns if n != wanted.target), key=lambda name: found.columns[name].letters)
    most = min(MAX_CLASSES, found.read.size // 2)
    classes = [name for name, each in found.columns.items() if name != text and 2 <= each.different <= most]
    fewest = min(classes, key=lambda name: found.columns[name].different, default=None)
    label = wanted.target or likely_target(classes) or fewest
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
        f"{len(names)} classes: {counted(counts)}",
        *found.format_notes(),
        *found.left_out([text, label], found.form),
    ]
    return Guess(values, notes, '--text "a text of yours"')
