"""What `init --data` finds out about data, and what the modules for each kind of data share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.faults import SetupError
from deeplightning.words import printable

MAX_LOOKED_AT = 300
"""Files that are decoded, evenly from all."""


@dataclass
class Guess:
    """What was found.

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
    """At most `MAX_LOOKED_AT` of them, from all parts of the list."""
    return files[:: math.ceil(len(files) / MAX_LOOKED_AT)]


def need_folder(data: Path) -> None:
    if not data.is_dir():
        raise SetupError(f"{data} is not a folder; name the folder that holds the files")


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def stages(data: Path, top: Path) -> tuple[list[str], list[str]]:
    """The stages of a project, and a note where one is left out.

    Args:
        data: the folder that was given.
        top: the folder of the training set: `data` itself, which is divided by the seed, or `train` in it.
    """
    if top == data or (data / "test").is_dir():
        return ["train", "test"], []
    return ["train"], [f"no test set: there is no folder {data / 'test'}"]


def some(words: Sequence[object]) -> str:
    """The first of them, for a line."""
    listed = ", ".join(printable(str(word)) for word in words[:8])
    return f"{listed}, … ({len(words)})" if len(words) > 8 else listed
