"""`${…}` in a tree of values is resolved in place; what came from the environment is noted, so that it stays unseen."""

import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deeplightning.config.fault import Fault
from deeplightning.config.tree import Entry, KeyPath, leaves, plain


@dataclass
class Secrets:
    """What came from the environment: never printed, saved or tracked."""

    texts: dict[KeyPath, str] = field(default_factory=dict)  # path of a value → how it was written, `${…}` and all
    values: dict[str, str] = field(default_factory=dict)  # value → the expression it came from
    words: set[KeyPath] = field(default_factory=set)  # paths of values that hold a variable's text, or its default

    def is_word(self, path: KeyPath) -> bool:
        """Whether a text at a path stands for a number too: a variable holds nothing but text."""
        return any(path[:n] in self.words for n in range(len(path), 0, -1))

    def text_of(self, path: KeyPath) -> str | None:
        """How the value at a path was written, if it, or the section it lies in, came from the environment."""
        return next((self.texts[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.texts), None)

    def redact(self, text: str) -> str:
        """Text without what came from the environment, plain or as Python's repr and JSON write it."""
        for value in sorted(self.values, key=len, reverse=True):
            for form in dict.fromkeys((value, repr(value)[1:-1], json.dumps(value)[1:-1])):
                text = text.replace(form, self.values[value])
        return text


def resolve(root: Entry, faults: list[Fault]) -> Secrets:
    """Resolves every `${…}` in place, and notes which values read the environment, directly or through others."""
    secrets = Secrets()
    waiting = [(path, entry) for path, entry in leaves(root) if isinstance(entry.value, str) and "${" in entry.value]
    if not waiting:
        return secrets
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError, OmegaConfBaseException

    malformed: set[str] = set()
    for path, entry in waiting:
        try:
            OmegaConf.create({"value": entry.value})
        except GrammarParseError:
            malformed.add(entry.value)
            message = f"`{entry.value}`: the braces hold no reference such as ${{a.b}}; for a plain `${{` write `\\${{`"
            faults.append(Fault(message, _dotted(path), entry.place))
    tree = OmegaConf.create(plain(root, lambda value: None if isinstance(value, str) and value in malformed else value))
    results = []
    with _watched_environment() as seen:
        for path, entry in waiting:
            if entry.value in malformed:
                continue
            seen.clear()
            try:
                results.append((entry, _value_at(tree, path)))
            except (OmegaConfBaseException, RecursionError) as error:
                faults.append(Fault(_words(error, entry.value, bool(seen)), _dotted(path), entry.place))
            if seen:
                secrets.words.add(path)
            set_ = {name: value for name, value in seen.items() if value is not None}
            if set_:
                secrets.texts[path] = entry.value
                secrets.values.update((value, f"${{oc.env:{name}}}") for name, value in set_.items() if _tells(value))
    for entry, value in results:
        entry.written = entry.value
        entry.value = _entries(value, entry.place)
    return secrets


def _value_at(tree: Any, path: KeyPath) -> Any:
    from omegaconf import OmegaConf

    for part in path[:-1]:
        tree = tree._get_node(part)
    value = tree[path[-1]]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


@contextmanager
def _watched_environment() -> Iterator[dict[str, str | None]]:
    """Collects the variables that OmegaConf asks for, by whatever expression, and their values."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    seen: dict[str, str | None] = {}

    def read_and_note(*arguments: Any) -> Any:
        if arguments:
            seen[str(arguments[0])] = os.environ.get(str(arguments[0]))
        return oc.env(*arguments)

    # The name of 2.4; in 2.3 it has an older meaning, without `replace`.
    new = "replace" in inspect.signature(OmegaConf.register_resolver).parameters
    register: Any = OmegaConf.register_resolver if new else OmegaConf.register_new_resolver
    register("oc.env", read_and_note, replace=True)
    try:
        yield seen
    finally:
        register("oc.env", oc.env, replace=True)


def _tells(value: str) -> bool:
    """Whether a variable's value can be told from other words: it is not among the shortest, and no folder or file of
    this machine, which stands in every message about it."""
    return len(value) >= 4 and not os.path.exists(value)  # noqa: PTH110  (Path's fails for a text that is too long)


def _entries(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {name: Entry(_entries(item, place), place) for name, item in value.items()}
    if isinstance(value, list):
        return [Entry(_entries(item, place), place) for item in value]
    return value


def _words(error: BaseException, text: str, from_environment: bool) -> str:
    if isinstance(error, RecursionError) or "Recursive interpolation" in str(error):
        return f"`{text}` refers to itself"
    first = str(error).splitlines()[0]
    if "Environment variable" in first:
        name = first.split("'")[1] if "'" in first else text
        return f"`{text}`: the environment variable {name} is not set; set it, or give a default: ${{oc.env:{name},…}}"
    if "Interpolation key" in first:
        return f"`{text}` refers to a key that is not there"
    if "Unsupported interpolation type" in first:
        return f"`{text}`: {first.split()[-1]} is not known; ${{a.b}} refers to a key, ${{oc.env:NAME}} to a variable"
    if from_environment:  # the words of the error may hold a part of the value
        return f"`{text}` cannot be resolved with the value that the environment gives"
    return f"`{text}` cannot be resolved: {first}"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))
