"""The code that the modules `guess_KIND` share, which examine the data of `init --data`."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.config.target import find
from deeplightning.faults import SetupError
from deeplightning.words import printable

MAX_EXAMINED_FILES = 300
"""Maximum number of files that are decoded, taken evenly from all."""


@dataclass
class Guess:
    """The result of examining the data.

    Attributes:
        values: values for the template, by name.
        notes: lines for the user.
        ask: an argument of `deeplightning ask`, a file or words; None if there is none.
        files: further files for the project, by name.
        template: the folder of templates inside the kind's folder.
    """

    values: dict[str, Any]
    notes: list[str]
    ask: Path | str | None = None
    files: dict[str, str] = field(default_factory=dict)
    template: str = "data"


@dataclass(frozen=True)
class Columns:
    """The options of `init` about the columns of a table.

    Attributes:
        target: the column to predict; None to guess it.
        ignore: columns that are not inputs of the network.
        task: classification or regression; None to guess it.
    """

    target: str | None = None
    ignore: tuple[str, ...] = ()
    task: str | None = None


def evenly(files: Sequence[Any]) -> Sequence[Any]:
    """Return at most `MAX_EXAMINED_FILES` files, evenly spaced in the list."""
    return files[:: math.ceil(len(files) / MAX_EXAMINED_FILES)]


def require_folder(data: Path) -> None:
    if not data.is_dir():
        raise SetupError(f"{data} is not a folder; name the folder that holds the files")


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def stages(data: Path, sets: Mapping[str, Path], number: int) -> tuple[list[str], list[str]]:
    """Return the stages of a project, and a note if a stage is left out or training needs more files.

    Args:
        data: the folder that the user named.
        sets: its folders train, val and test; empty if the seed divides the files into sets.
        number: the number of files.
    """
    if not sets and number < 10:
        return ["train", "test"], [f"too few to train: at least 10 are needed to divide them into sets, not {number}"]
    if not sets or "test" in sets:
        return ["train", "test"], []
    return ["train"], [f"no test set: there is no folder {data / 'test'}"]


def some(words: Sequence[object]) -> str:
    """Return the first few words, joined for a line of output."""
    listed = ", ".join(printable(str(word)) for word in words[:8])
    return f"{listed}, … ({len(words)})" if len(words) > 8 else listed


def counted(numbers: Mapping[str, object]) -> str:
    """Return the first few names, each with its number or kind, joined for a line of output."""
    return some([f"{name} ({number})" for name, number in numbers.items()])


def class_folders(data: Path, noun: str, endings: Sequence[str]) -> tuple[list[Path], dict[str, Any], list[str]]:
    """Find files in a folder per class, or in `train`, and perhaps `val` and `test`, with such folders.

    Returns:
        The training files, the values that every such project has, and notes.

    Raises:
        SetupError: `data` is not a folder, or there are fewer than two classes, or one has no file.
    """
    require_folder(data)
    found: Any = find("deeplightning.data.class_folders.ClassFolders")(data, noun, tuple(endings))
    with errors_of_data():
        classes, sets = found.classes(), found.sets()
        top = sets.get("train", data)
        if len(classes) < 2:
            found_names = some(classes) or "none"
            hint = f"; if they are in {top / classes[0]}, name that" if len(folders(top / classes[0])) > 1 else ""
            raise SetupError(f"{top} must hold a folder for each of two or more classes; it has: {found_names}{hint}")
        if {name.lower() for name in classes} <= {*find("deeplightning.data.splits.SET_NAMES")}:
            labelled = f", or write {data / 'labels.csv'} with the columns file and labels" * (noun == "picture")
            raise SetupError(
                f"{top / classes[0]} holds {noun}s but no folders, so their classes are unknown. Put those of each "
                f"class into a folder with the name of the class{labelled}"
            )
        paths, labels = found.find()["train" if sets else "all"]
    which, left_out = stages(data, sets, len(paths))
    below = {tuple(folders(top / name)) for name in classes}
    if len(below) == 1 and len(names := below.pop()) > 1:
        left_out.append(
            f"each of these holds the folders {some(names)}; if those are the classes, rename these train, val and test"
        )
    values = {"stages": which, "count": len(paths), "number": len(classes), "classes": some(classes)}
    counts = Counter(labels.tolist())
    files = counted({name: counts[label] for label, name in enumerate(classes)})
    notes = [f"{len(classes)} classes, the folders of {top}: {files}", *left_out]
    return [Path(path) for path in paths], values, notes


@contextlib.contextmanager
def errors_of_data() -> Iterator[None]:
    """Convert an error of code that reads data into a `SetupError`, if it has the same exit code or is the system's."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and getattr(error, "exit_code", None) != SetupError.exit_code:
            raise
        raise SetupError(str(error)) from None
