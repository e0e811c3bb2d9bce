"""Describe errors for the person who can fix them, with an exit code for each kind of error."""

import difflib
import errno
import keyword
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deeplightning.words import printable

MAX_HALF_CHARACTERS = 1_000  # kept at either end of a long note


@dataclass(frozen=True)
class Fault:
    """Description of one error.

    Attributes:
        message: what was found, what is allowed, and the next step, in one or two sentences.
        key: the dotted config key it is about, if any.
        place: `file:line:col`, or the override that set the value, if known.
        found: the wrong value, if a value is wrong.
        allowed: the allowed values, if they can be described by a word or a list.
        exit_code: exit code of the process if no other error has a higher one.
    """

    message: str
    key: str | None = None
    place: str | None = None
    found: str | None = None
    allowed: str | None = None
    exit_code: int = 2

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.place, self.key, self.message) if part)
        if len(text) > 2 * MAX_HALF_CHARACTERS:  # it quotes generated text
            text = f"{text[:MAX_HALF_CHARACTERS]} … {text[-MAX_HALF_CHARACTERS:]}"
        return printable(text)

    def position(self) -> tuple[str, int, int]:
        """Return file, line and column of the place, for sorting; of any other place its text, 0 and 0."""
        file, line, column = ([*(self.place or "").rsplit(":", 2), "", ""])[:3]
        return (file, int(line), int(column)) if line.isdigit() and column.isdigit() else (self.place or "", 0, 0)

    def to_dict(self) -> dict[str, object]:
        """Return the error for programs.

        It has `file`, `line` and `column` or the `override` that set the value, `key`, `message`, and if known `found`,
        `allowed` and `suggestion`, the nearest valid word.
        """
        is_override = (self.place or "").startswith("override ")
        file, line, column = ("", 0, 0) if is_override else self.position()
        suggestion = re.search(r" (?:Did you mean|Here it is called) (\{.*?\}|\[.*?\]|\S+?)[?.]?(?=\s|$)", self.message)
        return {
            "file": file or None,
            "line": line or None,
            "column": column or None,
            "override": (self.place or "").removeprefix("override ") if is_override else None,
            "key": self.key,
            "message": self.message,
            "found": self.found,
            "allowed": self.allowed,
            "suggestion": suggestion[1] if suggestion else None,
        }


@dataclass(frozen=True)
class Notice:
    """Describe a change to a config and its reason; `unasked` if the user did not leave the value to Deep Lightning."""

    text: str
    unasked: bool = True
    key: str | None = None


def upwards(key: str) -> Iterator[str]:
    """Yield a dotted key, then the keys of the sections around it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def place_of(key: str, places: Mapping[str, str]) -> str | None:
    """Return the place of a key or of the nearest section around it that is set, else that of the whole config, which
    has the key ""."""
    return next((places[k] for k in upwards(key) if k in places), places.get(""))


MAX_WORD_CHARACTERS, MAX_WORDS = 200, 2000  # torch itself has 1,500 names


def nearest(word: str, words: Collection[str]) -> str:
    """Return ` Did you mean …?`, or "" if no word is similar. Long texts and thousands of words are not compared."""
    if len(word) > MAX_WORD_CHARACTERS or len(words) > MAX_WORDS:
        return ""
    words = sorted({*map(str, words)})
    near = difflib.get_close_matches(word, words, 8, 0.6)
    near += [w for w in words if w.lower() == word.lower() or (len(w) < 5 and _edit_distance(word, w) == 1)]
    if not near:
        return ""

    def order(other: str) -> tuple[object, ...]:
        likeness = difflib.SequenceMatcher(None, word, other).ratio()
        distance = _edit_distance(word.lower(), other.lower())
        return distance, sorted(word) != sorted(other), len(word) != len(other), -likeness

    return f" Did you mean {min(near, key=order)}?"


PROJECTS = {"PIL": "pillow", "sklearn": "scikit-learn", "cv2": "opencv-python", "yaml": "PyYAML"}
PROJECTS |= {"skimage": "scikit-image", "skbase": "scikit-base"}
"""Modules whose package has another name, and that name."""

_PACKAGES = {"timm": "timm", "transformers": "'deeplightning[text]'", "deepspeed": "'deeplightning[deepspeed]'"}
"""How to install the packages whose classes configs name, by module."""

PLUGINS = {
    "hub": ("push", "encoder.Encoder"),
    "lab": ("bisect", "compare"),
    "migrate": ("migrate",),
    "plan": ("batch", "lr", "plan", "stats"),
    "ray": ("Ray",),
    "shards": ("Shards",),
    "slurm": ("Slurm",),
    "tune": ("tune", "tune:"),
}
"""What each of our plug-ins adds: verbs in lower case, targets, launchers, and sections of a config, which end with a
colon. Used to report that a plug-in is not installed."""

_RENAMED = {
    "deeplightning.data.multilabel": "deeplightning.data.labelled_images",
    "deeplightning.data.signal": "deeplightning.data.signal_folder",
    "deeplightning.model.table": "deeplightning.model.table_net",
}


class Missing(ValueError):
    """Raised if a name in a config needs a package that is not installed; the name may be right."""

    exit_code = 3


def plugin_of(name: str) -> str | None:
    """Return the plug-in that has a verb, a target, a section (`NAME:`) or a module of this name."""
    last = {plugin: [each.rpartition(".")[2] for each in names] for plugin, names in PLUGINS.items()}
    return next((plugin for plugin, names in last.items() if name in (*names, f"deeplightning_{plugin}")), None)


def not_installed(plugin: str) -> str:
    """Return the message that a plug-in is not installed, with the command that installs it."""
    return f"`{plugin}` is a plug-in: pip install 'deeplightning[{plugin}]'"


def parts_of(name: str) -> list[str]:
    """Return the parts of a MODULE.NAME; raise ValueError for others, and for the former name of a moved target."""
    parts = name.split(".")
    if len(parts) < 2 or not all(p.isidentifier() and not keyword.iskeyword(p) for p in parts):
        raise ValueError(f"`{name}` is not a MODULE.NAME such as torch.optim.SGD.")
    moved = {each.rpartition(".")[2]: f"deeplightning_{p}.{each}" for p, names in PLUGINS.items() for each in names}
    package, _, last = name.rpartition(".")
    new = f"{_RENAMED[package]}.{last}" if package in _RENAMED else None if last.islower() else moved.get(last)
    if new and package.startswith("deeplightning."):
        raise ValueError(f"`{name}` is called {new} here.")
    return parts


def install_command(module: str) -> str:
    """Return the command that installs the package of a module."""
    top = module.partition(".")[0]
    return f"pip install {_PACKAGES.get(top) or PROJECTS.get(top, top)}"


SCRIPT_HINT = " A run is a separate process: put the class of a script or notebook into a file, and use that module."
"""Hint for names in `__main__`."""


def no_module(top: str, name: str, known: Collection[str], places: Collection[str] = ()) -> ValueError:
    """Return the error for a target whose first part is not a module; `places` were searched too."""
    if top.startswith("deeplightning_") and (plugin := plugin_of(top)):
        return Missing(not_installed(plugin))
    is_known = top in _PACKAGES or top in PROJECTS
    hint = SCRIPT_HINT if top == "__main__" else nearest(top, known)
    hint = f" It is a package that is not installed here: {install_command(top)}." if is_known else hint
    searched = f" Searched: {', '.join(places)}, and what is installed." if places else ""
    return (Missing if is_known else ValueError)(f"there is no module {top} to import (for `{name}`).{hint}{searched}")


def _edit_distance(word: str, other: str) -> int:
    """Return the distance of optimal string alignment: letters dropped, added, replaced, or swapped with the next one.
    https://en.wikipedia.org/wiki/Damerau-Levenshtein_distance
    """
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, 1):
        before, last, row = row, before, [i]
        for j, its in enumerate(other, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != its)))
            if i > 1 and j > 1 and letter == other[j - 2] and its == word[i - 2]:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]


def count(number: float, noun: str) -> str:
    """Return `1 epoch` or `2 epochs`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


FREE_SPACE_HINT = (
    "remove runs that are not needed (`deeplightning runs --clean --delete`: the unfinished ones), or set "
    "logger.params.tracking_uri to a folder on another disk"
)


def is_full(error: OSError) -> bool:
    """Return whether a disk has no space left, or its user no quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


_DISK_ERRORS = ("EIO", "EROFS", "ESTALE", "ENOLCK", "ENODEV", "ENXIO", "EREMOTEIO", "EINTR")


def is_disk_failure(error: OSError) -> bool:
    """Return whether a disk or a file server has failed or become read-only."""
    return error.errno in {getattr(errno, name) for name in _DISK_ERRORS if hasattr(errno, name)}


def free_space(folder: Path, written: int = 0) -> str:
    """Return how much free space the disk of a folder has, plus `written` bytes of a file that is being removed."""
    try:
        size = shutil.disk_usage(folder).free + written
    except OSError:
        return f"{folder} has no room"
    return f"{folder} has " + (f"{size:,} bytes free" if size < 1_000_000 else f"{size / 1e6:,.0f} MB free")


class UserError(Exception):
    """Base of errors that a user can fix: shown as notes without a traceback, ends the process with `exit_code`.

    Any exception with an integer attribute `exit_code` is treated the same way, so that a part (data, task, network,
    loss), which imports nothing of the core, can raise one of its own.
    """

    exit_code = 1

    def __init__(self, faults: str | Fault | Iterable[Fault]):
        given = [Fault(faults)] if isinstance(faults, str) else [faults] if isinstance(faults, Fault) else faults
        self.faults = [replace(fault, exit_code=max(fault.exit_code, self.exit_code)) for fault in given]
        super().__init__("\n".join(map(str, self.faults)))


class ConfigError(UserError):
    """Raised if the config is wrong."""

    exit_code = 2


class SetupError(UserError):
    """Raised if the machine, the data or the tracking store do not meet the needs of the config."""

    exit_code = 3


class CheckpointError(UserError):
    """Raised if a checkpoint or a bundle is missing, damaged, or belongs to something else."""

    exit_code = 4


class RunError(UserError):
    """Raised if the run itself failed: a non-finite loss, no memory left, a lost worker, an exception in user code."""

    exit_code = 5


ERRORS = {kind.exit_code: kind for kind in (ConfigError, SetupError, CheckpointError, RunError, UserError)}
"""Error classes by exit code, in the order in which `error_of` prefers them."""


def error_of(faults: list[Fault]) -> UserError:
    """Return an error with these faults, of the first class that occurs: config, machine, weights, run, user code."""
    codes = {fault.exit_code for fault in faults}
    return next((kind for code, kind in ERRORS.items() if code in codes), UserError)(faults)


def seconds_of(variable: str, default: float, low: float = 0.0) -> float:
    """Return the number of seconds, at least `low`, that an environment variable sets; raise SetupError for others."""
    text = os.environ.get(variable) or str(default)
    if not re.fullmatch(r"\d{1,6}(\.\d*)?", text) or float(text) < low:
        raise SetupError(f"{variable}={text!r} is not a number of seconds")
    return float(text)
