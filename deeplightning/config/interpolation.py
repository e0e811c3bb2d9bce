"""Resolve `${…}` in a tree of values in place, with OmegaConf's grammar and the semantics of its resolvers.

OmegaConf does not limit what references expand to, its resolvers are global, and it reports neither places nor the
variables that a value reads. So its parse trees are evaluated here, each value once, and the results are counted.
OmegaConf is imported only if a config has a `${`.
"""

import os
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from deeplightning.config.secrets import Secrets, record_literals
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

MAX_CHARACTERS = 1_000_000  # of the texts that references expand to
MAX_STEPS = 40  # of a chain of references and sections; Python allows a thousand nested calls
MAX_PARTS = 20_000  # tokens of the texts with references: OmegaConf parses 30,000 a second
_PART = re.compile(r"[\w/-]+|\s+|.", re.DOTALL)
_MANDATORY = re.compile(r"\\*\?\?\?")
_TOO_DEEP = f" expands to values that are nested more than {MAX_DEPTH} deep"
_TOO_LONG = " follows a chain of too many references; refer to the value itself"
_MISSING: object = object()


def resolve(root: Entry, faults: list[Fault]) -> Secrets:
    """Resolve every `${…}` in place; return which values read the environment, directly or through others.

    Raises:
        ConfigError: the references expand to more than a config may contain.
    """
    resolver = Resolver(root)
    pending = [(path, entry) for path, entry in leaves(root) if isinstance(entry.value, str) and "${" in entry.value]
    if pending:
        resolver.run(pending, faults)
    for path, entry in leaves(root):  # `???` is OmegaConf's marker for a required value, `\???` the literal text
        if entry.written is not None or not (isinstance(entry.value, str) and _MANDATORY.fullmatch(entry.value)):
            continue
        if entry.value == "???":
            message = f"missing: `???` is a value that must be given, here or by {dotted(path)}=VALUE"
            faults.append(Fault(message, dotted(path), entry.place))
        else:
            entry.written, entry.value = entry.value, entry.value[1:]
    record_literals(root, resolver.secrets)
    return resolver.secrets


def _to_entries(value: object, place: str, path: KeyPath) -> object:
    if len(path) > MAX_DEPTH:
        raise _Unresolved(_TOO_DEEP)
    if isinstance(value, dict):
        is_typed = has_typed_keys(path)
        named = {name if is_typed else dotted([name]): item for name, item in value.items()}
        return {name: Entry(_to_entries(item, place, (*path, name)), place) for name, item in named.items()}
    if isinstance(value, list):
        return [Entry(_to_entries(item, place, (*path, number)), place) for number, item in enumerate(value)]
    return value


def _plain(value: object) -> object:
    """Convert a value from OmegaConf's grammar, which has its own string type."""
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _quoted(text: str) -> str:
    return f"`{text[:200]}…`" if len(text) > 200 else f"`{text}`"


class _LimitExceeded(Exception):
    """References, or what they expand to, exceed a limit of configs; the message names it."""


class _Unresolved(Exception):
    """A text with references, or one that it refers to, cannot be resolved; the message follows the quoted text."""


class _Absent(_Unresolved):
    """A key, or its value, does not exist."""


class Resolver:
    """Replaces references with their values, each once, after resolving what it refers to.

    Attributes:
        texts: the texts with references, by path.
        trees: their parse trees, by path; None if the braces contain no reference.
        results: the error of a text that has no value, else None, and the variables that it reads, by path.
        active: the paths of the texts that are being resolved.
        variables: the environment variables read since it was last emptied, and their values.
    """

    def __init__(self, root: Entry):
        self.root, self.secrets = root, Secrets()
        self.texts, self.trees, self.active = dict[KeyPath, str](), dict[KeyPath, object](), set[KeyPath]()
        self.variables: dict[str, str | None] = {}
        self.results: dict[KeyPath, tuple[_Unresolved | None, dict[str, str | None]]] = {}
        self.parts = self.values = self.characters = 0

    def run(self, pending: list[tuple[KeyPath, Entry]], faults: list[Fault]) -> None:
        """Resolve these texts."""
        from deeplightning.private import omegaconf  # 0.1 CPU s

        self.omega = omegaconf
        broken: list[Fault] = []
        path, entry = pending[0]
        try:
            for path, entry in pending:
                self.texts[path], self.trees[path] = entry.value, self.parse(entry.value)
            for path, entry in pending:
                self.variables = {}
                try:
                    self.resolve_entry(entry, path)
                except _Unresolved as error:
                    broken.append(Fault(f"{_quoted(self.texts[path])}{error}", dotted(path), entry.place))
                if len(broken) > MAX_FAULTS:
                    raise _LimitExceeded(f"more than {MAX_FAULTS} references of this config are broken, up to here")
                self.secrets.record(path, self.texts[path], self.variables)
        except _LimitExceeded as error:
            raise ConfigError([*faults, *broken, Fault(str(error), dotted(path), entry.place)]) from None
        faults += broken

    def parse(self, text: str, argument: bool = False) -> object:
        """Return the parse tree of a text; None if the text is malformed."""
        self.parts += sum(1 for _ in islice(_PART.finditer(text), MAX_PARTS + 1))
        if self.parts > MAX_PARTS:
            raise _LimitExceeded(f"references of more than {MAX_PARTS} parts, up to here; write fewer")
        try:
            return self.omega.parse(text, argument)
        except self.omega.Malformed:
            return None

    def count(self, value: Any) -> Any:
        """Count a value that references expand to, and return it."""
        self.values += 1
        self.characters += len(value) if isinstance(value, str) else 0
        for total, most, what in ((self.values, MAX_VALUES, "values"), (self.characters, MAX_CHARACTERS, "characters")):
            if total > most:
                raise _LimitExceeded(f"references expand to more than {most} {what}, up to here; write fewer")
        return value

    def resolve_entry(self, entry: Entry, path: KeyPath) -> None:
        """Replace a text that contains references with its value, once, and record the variables that it reads."""
        if path not in self.trees:
            return
        if path in self.active:
            raise _Unresolved(" refers to itself")
        if path not in self.results:
            before, self.variables = self.variables, {}
            self.active.add(path)
            error: _Unresolved | None = None
            try:
                value = self.evaluate(self.trees[path], path)
                entry.written, entry.value = entry.value, _to_entries(value, entry.place, path)
            except _Unresolved as unresolved:
                error = unresolved
            finally:
                self.active.discard(path)
                self.results[path], self.variables = (error, self.variables), before
        error, variables = self.results[path]
        for name in variables:
            self.count(None)
            self.variables[name] = variables[name]
        if error is not None:
            raise error

    def evaluate(self, tree: object, path: KeyPath) -> object:
        """Return the value of a parse tree at a path."""
        if tree is None:
            raise _Unresolved(": the braces contain no reference such as ${a.b}; for a plain `${` write `\\${`")
        if len(self.active) > MAX_STEPS:
            raise _Unresolved(_TOO_LONG)
        evaluation = self.omega.Evaluation(
            lambda dots, parts: self.resolved(*self.find(dots, parts, path)),
            lambda name, values, texts: self.call(name, values, texts, path),
        )
        try:
            value = evaluation.value(tree)
        except self.omega.Malformed:
            what = "neither a word nor a whole number"
            raise _Unresolved(f" has a reference inside a key or a name that gives {what}") from None
        except RecursionError:
            raise _Unresolved(_TOO_LONG) from None
        return self.count(str(value)) if isinstance(value, str) else value

    # ---- keys

    def find(self, dots: int, parts: Sequence[str], path: KeyPath) -> tuple[Entry, KeyPath]:
        """Return the entry that a key refers to from a path, and the path of that entry."""
        if dots > len(path) or not parts:
            raise _Absent(" refers to a key that does not exist")
        found: Entry = self.root
        where: KeyPath = ()
        for part in (*path[: len(path) - dots if dots else 0], *parts):
            self.resolve_entry(found, where)
            items, index = found.value, part
            if isinstance(items, list) and re.fullmatch("-?[0-9]{1,9}", str(part)):
                index = int(part) + len(items) * (int(part) < 0)
                there = 0 <= index < len(items)
            else:
                index = key_named(part, items) if isinstance(items, dict) else part
                there = isinstance(items, dict) and index in items
            if not there:
                is_shown = isinstance(items, dict) and not self.variables  # else a part may be a variable's value
                hint = nearest(str(part), items) if is_shown else ""
                raise _Absent(f" refers to a key that does not exist{hint and f'.{hint}'}")
            found, where = items[index], (*where, index)
        if found.value == "???":
            raise _Absent(" refers to a value that must be given, `???`")
        return found, where

    def find_by_text(self, key: object, path: KeyPath) -> tuple[Entry, KeyPath]:
        """Return the same for a key in text form, `.a.b[0]`."""
        text = str(key)
        return self.find(len(text) - len(text.lstrip(".")), re.findall(r"[^.\[\]]+", text), path)

    def resolved(self, entry: Entry, where: KeyPath) -> Any:
        """Return the resolved value of an entry; None for a malformed text, which is reported at its own place."""
        if self.trees.get(where, entry) is None:
            return None
        self.resolve_entry(entry, where)
        value = self.count(entry.value)
        if isinstance(value, dict):
            return {name: self.resolved(item, (*where, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [self.resolved(item, (*where, number)) for number, item in enumerate(value)]
        return value

    # ---- calls

    def call(self, name: str, values: tuple[object, ...], texts: tuple[Callable[[], str], ...], path: KeyPath) -> Any:
        """Call a resolver; `texts` return its arguments as written."""
        values = tuple(map(_plain, values))
        resolvers: dict[str, tuple[Callable[..., object], int]] = {
            "oc.env": (self.variable, 2),
            "oc.decode": (self.decode, 1),
            "oc.select": (self.select, 2),
            "oc.create": (lambda _, value: value, 1),
            "oc.dict.keys": (lambda path, key: [*self.mapping(path, key)], 1),
            "oc.dict.values": (lambda path, key: [*self.mapping(path, key).values()], 1),
        }
        if name not in resolvers:
            near = "" if self.variables else nearest(name, resolvers)
            what = f": there is no resolver {_quoted(name).strip('`')}"
            raise _Unresolved(f"{what}; ${{a.b}} refers to a key, ${{oc.env:NAME}} to a variable{near and f'.{near}'}")
        function, most = resolvers[name]
        if not 1 <= len(values) <= most:
            raise _Unresolved(f": {name} takes {most} argument{'s, or one' * (most > 1)}, not {len(values)}")
        if name == "oc.env" and isinstance(values[-1], bool | int | float) and "${" not in (text := texts[-1]()):
            values = (*values[:-1], text.strip())  # a variable is text, and so is its default: `1.10` as written
        return function(path, *values)

    def variable(self, path: KeyPath, name: object, default: object = _MISSING) -> Any:
        name = str(name)
        try:
            value = os.environ.get(name)
        except UnicodeEncodeError:  # not a valid name
            value = None
        self.variables[name] = value
        if value is None and default is _MISSING:
            hint = f"is not set; set it, or give a default: ${{oc.env:{name},…}}"
            raise _Unresolved(f": the environment variable {name} {hint}")
        if value is None:
            return default if default is None else self.count(str(default))
        return self.count(value)

    def decode(self, path: KeyPath, text: object) -> Any:
        if text is None:
            return None
        tree = self.parse(text, argument=True) if isinstance(text, str) else None
        if tree is None:
            words = " with the value from the environment" if self.variables else f": {_quoted(str(text))} is invalid"
            raise _Unresolved(f" cannot be resolved{words}")
        return _plain(self.evaluate(tree, path))

    def select(self, path: KeyPath, key: object, default: object = None) -> object:
        """Return the value of a key, or a default if it does not exist."""
        try:
            found = self.find_by_text(key, path)
        except _Absent:
            return default
        return self.resolved(*found)

    def mapping(self, path: KeyPath, key: object) -> dict[Any, Any]:
        """Return a mapping, or the one at a key."""
        found = key if isinstance(key, dict) else self.resolved(*self.find_by_text(key, path))
        if not isinstance(found, dict):
            raise _Unresolved(" cannot be resolved: oc.dict takes a mapping")
        return found
