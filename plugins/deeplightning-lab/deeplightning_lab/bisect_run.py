"""Find the differences between two runs that can be switched one by one, and mix the two runs.

A mixed run is the first run with some differences switched to the values of the second run. It is written as a run
folder without results, so that `again.prepare` prepares it like any run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deeplightning.config.source import read
from deeplightning.config.tree import dump, line, plain
from deeplightning.reproduce.again import resolve_data_root
from deeplightning.reproduce.differences import PROGRAM, between, differences, shown, size_of
from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.code import Code, describe_program
from deeplightning.tracking.environment import VARIABLES
from deeplightning.words import is_address

EXCLUDED_KEYS = ("logger", "serve", "tune", "train.export")
"""Keys that affect no metric: a mixed run keeps those of the first run."""

_KeyPath = tuple[str, ...]  # the parts of a dotted key
_THREAD_VARIABLES = tuple(name for name in VARIABLES if name.endswith("_NUM_THREADS"))
_MACHINE_VARIABLES = ("CUDA_VISIBLE_DEVICES",)  # `reproduce` does not change it
_MISSING = object()
_MAX_SHOWN_CHARACTERS = 70  # of a section; four times as many of a single value, such as a path


@dataclass
class Parts:
    """Config, code and environment of a run.

    Attributes:
        tree: the config with unresolved references, and `data.root` absolute.
        code: the user's code, and Deep Lightning's version.
        environment: the content of `environment.json`.
        python: the interpreter.
    """

    tree: dict[str, Any]
    code: Code
    environment: dict[str, Any]
    python: str

    def copy(self) -> Parts:
        """Return an independent copy."""
        code = replace(self.code, roots=[*self.code.roots], files=dict(self.code.files))
        return Parts(copy.deepcopy(self.tree), code, copy.deepcopy(self.environment), self.python)

    def digest(self) -> str:
        """Return the SHA-256 of everything that affects the run's metrics."""
        found = [self.environment.get(name) for name in ("threads", "variables")]
        texts = [dump(self.tree), json.dumps(found, sort_keys=True), self.python]
        digest = hashlib.sha256("\0".join(texts).encode())
        digest.update(self.code.pack())
        return digest.hexdigest()

    def write(self, folder: RunFolder) -> None:
        """Write the parts as a run folder. It contains nothing that is not already in the folders of the two runs."""
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(dump(self.tree), encoding="utf-8")
        folder.environment.write_text(json.dumps(self.environment))
        folder.code.write_bytes(self.code.pack())


@dataclass(frozen=True)
class Difference:
    """One difference between two runs.

    Attributes:
        name: a dotted key of the config, a code file, an environment variable, `threads` or `packages`.
        good: a short text for the first run's value.
        bad: a short text for the second run's value.
        switch: sets the second run's value in a mixed run; called with the mixed run's and the second run's parts.
    """

    name: str
    good: str
    bad: str
    switch: Callable[[Parts, Parts], None]

    def __str__(self) -> str:
        return f"{self.name} {self.good} → {self.bad}"


def parts_of(run: PastRun, python: str) -> Parts:
    """Return config, code and environment of a finished run whose code was saved."""
    tree = plain(read(run.source).root, written=True)
    data = tree.get("data")
    root = data.get("root") if isinstance(data, dict) else None
    if isinstance(root, str) and "${" not in root and not is_address(root):
        path = Path(root).expanduser()
        data["root"] = str(path if path.is_absolute() else resolve_data_root(run, root).absolute())
    assert run.code is not None
    return Parts(tree, run.code, dict(run.environment), python)


def mix(good: Parts, bad: Parts, switched: Sequence[Difference]) -> Parts:
    """Return the first run with some differences switched to the second run."""
    mixed = good.copy()
    for difference in switched:
        difference.switch(mixed, bad)
    return mixed


def switchable(good: Parts, bad: Parts, overrides: Sequence[str] = ()) -> list[Difference]:
    """Return the differences that can be switched one by one, related ones next to each other.

    Args:
        overrides: `key=value` for all mixed runs; these keys and those below them are not differences.
    """
    overridden = [tuple(re.split(r"[=~]", text.lstrip("~+"), maxsplit=1)[0].split(".")) for text in overrides]
    excluded = [tuple(key.split(".")) for key in EXCLUDED_KEYS]
    config = [
        difference
        for path, difference in _config_differences(good.tree, bad.tree)
        if not any(path[: len(key)] == key for key in (*overridden, *excluded))
    ]
    return [*config, *_code_differences(good, bad), *_environment_differences(good, bad)]


def fixed(good: PastRun, bad: PastRun, switched: Sequence[Difference]) -> list[str]:
    """Return descriptions of the differences that cannot be switched on this machine.

    These are data files, packages, hardware, and Deep Lightning's own files if those of a run are not available.

    Args:
        switched: the differences that can be switched.
    """
    names = {difference.name for difference in switched}
    found = differences(good, bad)
    data = found["data"] if not any(name.startswith("data.") for name in names) else []  # another data set has others
    environment = [
        item
        for item in found["environment"]
        if item[0] not in {*VARIABLES, "threads"} - {*_MACHINE_VARIABLES} and "packages" not in names
    ]
    items = [(f"data {name}", one, two) for name, one, two in data] + environment + found["hardware"]
    items += [item for item in found["code"] if item[0] == PROGRAM]
    return [f"{name} {shown(one)} → {shown(two)}" for name, one, two in items]


# ---- config


def _config_differences(good: dict[str, Any], bad: dict[str, Any]) -> Iterator[tuple[_KeyPath, Difference]]:
    for paths in _differing_keys(good, bad, ()):
        one, two = (_value_at(tree, paths[0]) for tree in (good, bad))
        name = ".".join(map(str, paths[0]))
        yield paths[0], Difference(name, _short_text(one), _short_text(two), _switch_keys(paths))


def _differing_keys(one: Any, two: Any, path: _KeyPath) -> Iterator[list[_KeyPath]]:
    """Yield the keys whose values differ, in groups that are switched together.

    A section whose `type` differs is switched as a whole; the arguments of an engine are switched with its backend.
    """
    if not (isinstance(one, dict) and isinstance(two, dict)):
        if (one is _MISSING) != (two is _MISSING) or (one is not _MISSING and line(one) != line(two)):
            yield [path]
    elif path and one.get("type", _MISSING) != two.get("type", _MISSING):
        yield [path]
    else:
        together = [key for key in ("backend", "params") if path == ("engine",)]
        if together and one.get("backend") == two.get("backend"):
            together = []
        if together:
            yield [(*path, key) for key in together]
        for key in dict.fromkeys([*one, *two]):
            if key not in together:
                yield from _differing_keys(one.get(key, _MISSING), two.get(key, _MISSING), (*path, key))


def _switch_keys(paths: list[_KeyPath]) -> Callable[[Parts, Parts], None]:
    def switch(into: Parts, of: Parts) -> None:
        for path in paths:
            value, section = _value_at(of.tree, path), into.tree
            for key in path[:-1]:
                section = section[key]
            if value is _MISSING:
                section.pop(path[-1], None)
            else:
                section[path[-1]] = copy.deepcopy(value)

    return switch


def _value_at(tree: Any, path: _KeyPath) -> Any:
    for key in path:
        tree = tree.get(key, _MISSING) if isinstance(tree, dict) else _MISSING
    return tree


def _short_text(value: object) -> str:
    text = "none" if value is _MISSING else line(value)
    limit = _MAX_SHOWN_CHARACTERS if isinstance(value, dict | list) else 4 * _MAX_SHOWN_CHARACTERS
    return text if len(text) <= limit else f"{text[:limit]}…"


# ---- code


def _code_differences(good: Parts, bad: Parts) -> Iterator[Difference]:
    one, two = good.code, bad.code
    before, after = _files_by_label(one), _files_by_label(two)
    paths = [path for _, path in {**before, **after}]
    for label, path in sorted({*before, *after}, key=lambda key: key[::-1]):
        key = (label, path)
        if before.get(key) != after.get(key):
            name = path if paths.count(path) == 1 else f"{path} (root {label or 'working directory'})"
            one_size, two_size = (shown(size_of(found.get(key))) for found in (before, after))
            yield Difference(name, one_size, two_size, _switch_file(key))


def is_available(code: Code) -> bool:
    """Return whether a run used the Deep Lightning version that is installed here."""
    return code.program.get("digest") in (None, describe_program()["digest"])


def _root_labels(code: Code) -> list[str]:
    """Return a label for each root, to match it with a root of the other run.

    It is "" for the working directory, else the position among the other roots.
    """
    others = iter(range(len(code.roots)))
    return ["" if root == code.working_directory else str(next(others)) for root in code.roots]


def _files_by_label(code: Code) -> dict[tuple[str, str], bytes]:
    labels = _root_labels(code)
    return {(labels[root], path): content for (root, path), content in code.files.items()}


def _switch_file(key: tuple[str, str]) -> Callable[[Parts, Parts], None]:
    label, path = key

    def switch(into: Parts, of: Parts) -> None:
        mine, theirs = into.code, of.code
        content, labels = _files_by_label(theirs).get(key), _root_labels(mine)
        if label not in labels:
            mine.roots.append(theirs.roots[_root_labels(theirs).index(label)])
            if not label:
                mine.working_directory = theirs.working_directory
            labels = _root_labels(mine)
        name = (labels.index(label), path)
        mine.files.pop(name, None)
        if content is not None:
            mine.files[name] = content

    return switch


# ---- environment


def _environment_differences(good: Parts, bad: Parts) -> Iterator[Difference]:
    one, two = (dict(parts.environment.get("variables") or {}) for parts in (good, bad))
    threads = [parts.environment.get("threads") for parts in (good, bad)]
    differs_in_config = _value_at(good.tree, ("engine", "threads")) != _value_at(bad.tree, ("engine", "threads"))
    if [one.get(n) for n in _THREAD_VARIABLES] != [two.get(n) for n in _THREAD_VARIABLES] or (
        None not in threads and threads[0] != threads[1] and not differs_in_config
    ):
        yield Difference("threads", shown(threads[0]), shown(threads[1]), _switch_threads)
    for name, a, b in between(one, two):
        if name in VARIABLES and name not in (*_THREAD_VARIABLES, *_MACHINE_VARIABLES):
            yield Difference(name, shown(a), shown(b), _switch_variables(name))
    if good.python != bad.python:
        yield Difference("packages", good.python, bad.python, _switch_python)


def _switch_threads(into: Parts, of: Parts) -> None:
    into.environment["threads"] = of.environment.get("threads")
    _switch_variables(*_THREAD_VARIABLES)(into, of)


def _switch_variables(*names: str) -> Callable[[Parts, Parts], None]:
    def switch(into: Parts, of: Parts) -> None:
        theirs = of.environment.get("variables") or {}
        others = {n: v for n, v in (into.environment.get("variables") or {}).items() if n not in names}
        into.environment["variables"] = others | {n: theirs[n] for n in names if n in theirs}

    return switch


def _switch_python(into: Parts, of: Parts) -> None:
    into.python = of.python
