"""Resolve `${…}` in a tree of values in place, by OmegaConf's grammar and the meaning of its resolvers.

OmegaConf has no bound on what references expand to, its resolvers are global, and it reports neither places nor the
variables that a value has read. So its trees are evaluated here, each value once, and what they make is counted.
OmegaConf is imported only if a config has a `${`.
"""

import os
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from deeplightning.config.secrets import Secrets, note_literals
from deeplightning.config.tree import (
    MAX_DEPTH,
    MAX_FAULTS,
    MAX_VALUES,
    Entry,
    KeyPath,
    dotted,
    has_typed_keys,
    key_named,
    leaves,
)
from deeplightning.faults import ConfigError, Fault, nearest

MAX_CHARACTERS = 1_000_000  # of the texts that references make
MAX_STEPS = 40  # of references and sections that lead to each other; Python bears a thousand calls
MAX_PARTS = 20_000  # words and signs of the texts that hold references: OmegaConf reads 30,000 a second
_PART = re.compile(r"[\w/-]+|\s+|.", re.DOTALL)
_MANDATORY = re.compile(r"\\*\?\?\?")
_TOO_DEEP = f" expands to values that are nested more than {MAX_DEPTH} deep"
_TOO_LONG = " leads on over too many references, one after the other; refer to the value itself"
_MISSING: object = object()


def resolve(root: Entry, faults: list[Fault]) -> Secrets:
    """Resolve every `${…}` in place; return which values read the environment, directly or through others.

    Raises:
        ConfigError: the references expand to more than a config may hold.
    """
    resolver = Resolver(root)
    waiting = [(path, entry) for path, entry in leaves(root) if isinstance(entry.value, str) and "${" in entry.value]
    if waiting:
        resolver.run(waiting, faults)
    _report_missing(root, faults)
    note_literals(root, resolver.secrets)
    return resolver.secrets


def _report_missing(root: Entry, faults: list[Fault]) -> None:
    """Report each `???`, OmegaConf's word for a value that must be given; `\\???` is the text."""
    for path, entry in leaves(root):
        if entry.written is not None or not (isinstance(entry.value, str) and _MANDATORY.fullmatch(entry.value)):
            continue
        if entry.value == "???":
            message = f"missing: `???` is a value that must be given, here or by {dotted(path)}=VALUE"
            faults.append(Fault(message, dotted(path), entry.place))
        else:
            entry.written, entry.value = entry.value, entry.value[1:]


def _entries(value: object, place: str, path: KeyPath) -> object:
    if len(path) > MAX_DEPTH:
        raise _Unresolved(_TOO_DEEP)
    if isinstance(value, dict):
        is_typed = has_typed_keys(path)
        named = {name if is_typed else dotted([name]): item for name, item in value.items()}
        return {name: Entry(_entries(item, place, (*path, name)), place) for name, item in named.items()}
    if isinstance(value, list):
        return [Entry(_entries(item, place, (*path, number)), place) for number, item in enumerate(value)]
    return value


def _plain(value: object) -> object:
    """Convert a value that OmegaConf's grammar made, which has a kind of text of its own."""
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _quoted(text: str) -> str:
    return f"`{text[:200]}…`" if len(text) > 200 else f"`{text}`"


class _TooMuch(Exception):
    """References are more, or stand for more, than a config may hold; the text says what."""


class _Unresolved(Exception):
    """A text with references has no value, by itself or because of what it leads to; the words continue the text."""


class _Absent(_Unresolved):
    """A key, or its value, is not there."""


class Resolver:
    """Puts values in the place of references, each once, what they lead to first.

    Attributes:
        texts: the texts with references by path.
        trees: the same as trees, None where the braces hold no reference.
        made: why a text has no value, if it has none, and the variables that it reads, by path.
        open: the paths of the texts whose values are being made.
        seen: the environment variables asked for since it was last emptied, and their values.
    """

    def __init__(self, root: Entry):
        self.root, self.secrets = root, Secrets()
        self.texts: dict[KeyPath, str] = {}
        self.trees: dict[KeyPath, object] = {}
        self.seen: dict[str, str | None] = {}
        self.made: dict[KeyPath, tuple[_Unresolved | None, dict[str, str | None]]] = {}
        self.open: set[KeyPath] = set()
        self.parts = self.values = self.characters = 0

    def run(self, waiting: list[tuple[KeyPath, Entry]], faults: list[Fault]) -> None:
        """Resolve these texts."""
        from deeplightning.private import omegaconf  # 0.1 CPU s

        self.omega = omegaconf
        broken: list[Fault] = []
        path, entry = waiting[0]
        try:
            for path, entry in waiting:
                self.texts[path], self.trees[path] = entry.value, self.parse(entry.value)
            for path, entry in waiting:
                self.seen = {}
                try:
                    self.settle(entry, path)
                except _Unresolved as error:
                    broken.append(Fault(f"{_quoted(self.texts[path])}{error}", dotted(path), entry.place))
                if len(broken) > MAX_FAULTS:
                    raise _TooMuch(f"more than {MAX_FAULTS} references of this config are broken, up to here")
                self.secrets.note(path, self.texts[path], self.seen)
        except _TooMuch as error:
            raise ConfigError([*faults, *broken, Fault(str(error), dotted(path), entry.place)]) from None
        faults += broken

    def parse(self, text: str, argument: bool = False) -> object:
        """Return the tree of a text; None where it is no such text."""
        self.parts += sum(1 for _ in islice(_PART.finditer(text), MAX_PARTS + 1))
        if self.parts > MAX_PARTS:
            raise _TooMuch(f"references of more than {MAX_PARTS} parts, up to here; write fewer")
        try:
            return self.omega.parse(text, argument)
        except self.omega.Malformed:
            return None

    def spend(self, value: Any) -> Any:
        """Count one more value of a reference, or of its parts."""
        self.values += 1
        self.characters += len(value) if isinstance(value, str) else 0
        for spent, most, what in ((self.values, MAX_VALUES, "values"), (self.characters, MAX_CHARACTERS, "characters")):
            if spent > most:
                raise _TooMuch(f"references expand to more than {most} {what}, up to here; write fewer")
        return value

    def settle(self, entry: Entry, path: KeyPath) -> None:
        """Put the value of a text with references in its place, once, and note the variables that it reads."""
        if path not in self.trees:
            return
        if path in self.open:
            raise _Unresolved(" refers to itself")
        if path not in self.made:
            before, self.seen = self.seen, {}
            self.open.add(path)
            error: _Unresolved | None = None
            try:
                value = self.evaluate(self.trees[path], path)
                entry.written, entry.value = entry.value, _entries(value, entry.place, path)
            except _Unresolved as unresolved:
                error = unresolved
            finally:
                self.open.discard(path)
                self.made[path], self.seen = (error, self.seen), before
        error, seen = self.made[path]
        for name in seen:
            self.spend(None)
            self.seen[name] = seen[name]
        if error is not None:
            raise error

    def evaluate(self, tree: object, path: KeyPath) -> object:
        """Return what a tree means in the value at a path."""
        if tree is None:
            raise _Unresolved(": the braces hold no reference such as ${a.b}; for a plain `${` write `\\${`")
        if len(self.open) > MAX_STEPS:
            raise _Unresolved(_TOO_LONG)
        evaluation = self.omega.Evaluation(
            lambda dots, parts: self.whole(*self.find(dots, parts, path)),
            lambda name, values, texts: self.call(name, values, texts, path),
        )
        try:
            value = evaluation.value(tree)
        except self.omega.Malformed:
            what = "neither a word nor a whole number"
            raise _Unresolved(f" has a reference inside a key or a name that gives {what}") from None
        except RecursionError:
            raise _Unresolved(_TOO_LONG) from None
        return self.spend(str(value)) if isinstance(value, str) else value

    # ---- keys

    def find(self, dots: int, parts: Sequence[str], path: KeyPath) -> tuple[Entry, KeyPath]:
        """Return the entry that a key in the value at a path names, and its path."""
        if dots > len(path) or not parts:
            raise _Absent(" refers to a key that is not there")
        found: Entry = self.root
        where: KeyPath = ()
        for part in (*path[: len(path) - dots if dots else 0], *parts):
            self.settle(found, where)
            items, index = found.value, part
            if isinstance(items, list) and re.fullmatch("-?[0-9]{1,9}", str(part)):
                index = int(part) + len(items) * (int(part) < 0)
                there = 0 <= index < len(items)
            else:
                index = key_named(part, items) if isinstance(items, dict) else part
                there = isinstance(items, dict) and index in items
            if not there:
                is_shown = isinstance(items, dict) and not self.seen  # else a part may be a variable's value
                hint = nearest(str(part), items) if is_shown else ""
                raise _Absent(f" refers to a key that is not there{hint and f'.{hint}'}")
            found, where = items[index], (*where, index)
        if found.value == "???":
            raise _Absent(" refers to a value that must be given, `???`")
        return found, where

    def named(self, key: object, path: KeyPath) -> tuple[Entry, KeyPath]:
        """Return the same for a key that is a text, `.a.b[0]`."""
        words = str(key)
        return self.find(len(words) - len(words.lstrip(".")), re.findall(r"[^.\[\]]+", words), path)

    def whole(self, entry: Entry, where: KeyPath) -> Any:
        """Return the value of an entry, without references; None for a text that is reported where it stands."""
        if self.trees.get(where, entry) is None:
            return None
        self.settle(entry, where)
        if isinstance(entry.value, dict):
            self.spend(None)
            return {name: self.whole(item, (*where, name)) for name, item in entry.value.items()}
        if isinstance(entry.value, list):
            self.spend(None)
            return [self.whole(item, (*where, number)) for number, item in enumerate(entry.value)]
        return self.spend(entry.value)

    # ---- calls

    def call(self, name: str, values: tuple[object, ...], texts: tuple[Callable[[], str], ...], path: KeyPath) -> Any:
        """Return what a resolver makes of arguments; `texts` give them as they are written."""
        values = tuple(map(_plain, values))
        known: dict[str, tuple[Callable[..., object], int]] = {
            "oc.env": (self.variable, 2),
            "oc.decode": (self.decode, 1),
            "oc.select": (self.select, 2),
            "oc.create": (lambda _, value: value, 1),
            "oc.dict.keys": (lambda path, key: [*self.mapping(path, key)], 1),
            "oc.dict.values": (lambda path, key: [*self.mapping(path, key).values()], 1),
        }
        if name not in known:
            near = "" if self.seen else nearest(name, known)
            what = f": {_quoted(name).strip('`')} is not known"
            raise _Unresolved(f"{what}; ${{a.b}} refers to a key, ${{oc.env:NAME}} to a variable{near and f'.{near}'}")
        function, most = known[name]
        if not 1 <= len(values) <= most:
            raise _Unresolved(f": {name} takes {most} argument{'s, or one' * (most > 1)}, not {len(values)}")
        if name == "oc.env" and isinstance(values[-1], bool | int | float) and "${" not in (text := texts[-1]()):
            values = (*values[:-1], text.strip())  # a variable is text, and so is its default: `1.10` as written
        return function(path, *values)

    def variable(self, path: KeyPath, name: object, default: object = _MISSING) -> Any:
        name = str(name)
        try:
            value = os.environ.get(name)
        except UnicodeEncodeError:  # no name of a variable
            value = None
        self.seen[name] = value
        if value is None and default is _MISSING:
            hint = f"is not set; set it, or give a default: ${{oc.env:{name},…}}"
            raise _Unresolved(f": the environment variable {name} {hint}")
        if value is None:
            return default if default is None else self.spend(str(default))
        return self.spend(value)

    def decode(self, path: KeyPath, text: object) -> Any:
        if text is None:
            return None
        tree = self.parse(text, argument=True) if isinstance(text, str) else None
        if tree is None:
            words = " with the value that the environment gives" if self.seen else f": {_quoted(str(text))} is invalid"
            raise _Unresolved(f" cannot be resolved{words}")
        return _plain(self.evaluate(tree, path))

    def select(self, path: KeyPath, key: object, default: object = None) -> object:
        """Return the value of a key, or a default where it is not there."""
        try:
            found = self.named(key, path)
        except _Absent:
            return default
        return self.whole(*found)

    def mapping(self, path: KeyPath, key: object) -> dict[Any, Any]:
        """Return a mapping, or the one at a key."""
        found = key if isinstance(key, dict) else self.whole(*self.named(key, path))
        if not isinstance(found, dict):
            raise _Unresolved(" cannot be resolved: oc.dict takes a mapping")
        return found
