"""Find out what the data of `init --data` are: what the kinds of data share, and signals in a folder per class."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.config.target import find
from deeplightning.faults import SetupError, count
from deeplightning.words import printable

MAX_LOOKED_AT = 300
"""Files that are decoded, evenly from all."""

MAX_SHOWN = 20_000
"""Numbers of a signal that is written down as an example."""


@dataclass
class Guess:
    """The values and notes that a look at the data gives.

    Attributes:
        values: for the template, by name.
        notes: lines for the user.
        ask: what `deeplightning ask` may be given: a file, or words; None: nothing.
        files: further ones for the project, by name.
        template: the folder in that of the kind whose templates it has.
    """

    values: dict[str, Any]
    notes: list[str]
    ask: Path | str | None = None
    files: dict[str, str] = field(default_factory=dict)
    template: str = "data"


@dataclass(frozen=True)
class Columns:
    """What the options of `init` say of the columns of a table.

    Attributes:
        target: the column to be predicted; None: guessed.
        ignore: columns that the network does not take.
        task: classification or regression; None: guessed.
    """

    target: str | None = None
    ignore: tuple[str, ...] = ()
    task: str | None = None


def evenly(files: Sequence[Path]) -> Sequence[Path]:
    """Return at most `MAX_LOOKED_AT` files, from all parts of the list."""
    return files[:: math.ceil(len(files) / MAX_LOOKED_AT)]


def need_folder(data: Path) -> None:
    if not data.is_dir():
        raise SetupError(f"{data} is not a folder; name the folder that holds the files")


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def stages(data: Path, top: Path) -> tuple[list[str], list[str]]:
    """Return the stages of a project, and a note where one is left out.

    Args:
        data: the folder that was given.
        top: the folder of the training set: `data` itself, which is divided by the seed, or `train` in it.
    """
    if top == data or (data / "test").is_dir():
        return ["train", "test"], []
    return ["train"], [f"no test set: there is no folder {data / 'test'}"]


def some(words: Sequence[object]) -> str:
    """Return the first of some words, for a line."""
    listed = ", ".join(printable(str(word)) for word in words[:8])
    return f"{listed}, … ({len(words)})" if len(words) > 8 else listed


def class_folders(data: Path, noun: str, endings: Sequence[str]) -> tuple[list[Path], dict[str, Any], list[str]]:
    """Find files in a folder for each class, or in `train`, and perhaps `val` and `test`, with such folders.

    Returns:
        The files for the training, the values that every such project has, and notes.

    Raises:
        SetupError: there are fewer than two classes, or one has no file.
    """
    found: Any = find("deeplightning.data.class_folders.ClassFolders")(data, noun, tuple(endings))
    with errors_of_data():
        classes = found.classes()
        if len(classes) < 2:
            there = some(classes) or "none"
            raise SetupError(f"{data} must hold a folder for each of two or more classes; it has: {there}")
        sets = found.find()
    top = data / "train" if found.is_divided else data
    paths, labels = sets["train" if found.is_divided else "all"]
    which, left_out = stages(data, top)
    values = {"stages": which, "count": len(paths), "number": len(classes), "classes": some(classes)}
    counts = Counter(labels.tolist())
    counted = some([f"{name} ({counts[label]})" for label, name in enumerate(classes)])
    notes = [f"{len(classes)} classes, the folders of {top}: {counted}", *left_out]
    return [Path(path) for path in paths], values, notes


@contextlib.contextmanager
def errors_of_data() -> Iterator[None]:
    """Turn an error of a part that reads data, with the exit code of a `SetupError`, into one."""
    try:
        yield
    except Exception as error:
        if getattr(error, "exit_code", None) != SetupError.exit_code:
            raise
        raise SetupError(str(error)) from None


def signals(data: Path) -> Guess:
    """Look at a folder per class with .npy, .csv or .wav files, or at `train` and perhaps `val` and `test` with these.

    Raises:
        SetupError: it is something else.
    """
    read_signal: Any = find("deeplightning.data.signal_folder.read_signal")
    need_folder(data)
    files, values, notes = class_folders(data, "signal", (".npy", ".csv", ".wav"))
    first, shapes = None, Counter[tuple[int, int]]()
    for path in evenly(files):
        with errors_of_data():
            signal = read_signal(path)  # (C, T)
        first = signal if first is None else first
        shapes[signal.shape] += 1
    channels = sorted({shape[0] for shape in shapes})
    if len(channels) > 1:
        raise SetupError(f"the signals in {data} have {some(channels)} channels; all must have the same number")
    lengths = sorted(shape[1] for shape in shapes.elements())
    length = None if lengths[0] == lengths[-1] else lengths[len(lengths) // 2]
    values |= {"channels": channels[0], "length": length}
    steps_of = f"{lengths[0]} steps" if length is None else f"{lengths[0]} to {lengths[-1]} steps, brought to {length}"
    notes.append(f"{count(len(files), 'signal')} of {count(channels[0], 'channel')} and {steps_of}")
    steps = length or lengths[0]
    if first is None or channels[0] * steps > MAX_SHOWN:
        return Guess(values, notes, files[0] if files[0].suffix.lower() == ".npy" else None)
    rows = [[round(float(value), 6) for value in row[:steps]] for row in first]
    body = json.dumps({"signal": [row + [0.0] * (steps - len(row)) for row in rows]})
    return Guess(values, notes, "signal.json", {"signal.json": f"{body}\n"})
