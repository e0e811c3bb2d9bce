"""`${…}` in a tree of values is resolved in place, by OmegaConf's grammar and the meaning of its resolvers.

OmegaConf resolves anew at each look, knows no places, and takes what forty lines make as long as it takes: what a key
leads to is looked up here, each value is made once, what references make together is counted while it is made, and
what came from the environment is noted. OmegaConf is imported where a config has a `${` only.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from string import Template
from typing import TYPE_CHECKING, Any

from deeplightning.config.secrets import Secrets, note_literals, tells
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
from deeplightning.faults import ConfigError, Fault, Notice, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_CHARACTERS = 1_000_000  # of the texts that references make
MAX_PARTS = 20_000  # words and signs of the texts that hold references: OmegaConf reads 30,000 a second
MAX_STEPS = 40  # of references and sections that lead to each other; Python bears a thousand calls
_PART = re.compile(r"[\w/-]+|\s+|.", re.DOTALL)
_MANDATORY = re.compile(r"\\*\?\?\?")
_NESTED = re.compile(r"(\$\{)|\}")
DEPRECATED = "'$OLD_KEY' is deprecated. Change your code and config to use '$NEW_KEY'"  # as OmegaConf has it


@dataclass
class Resolved:
    """What resolving a tree came to.

    Attributes:
        unchecked: the values that depend on a resolver of the user's that was not imported.
        notices: what `oc.deprecated` says.
    """

    secrets: Secrets = field(default_factory=Secrets)
    unchecked: list[Fault] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


def resolve(
    root: Entry, faults: list[Fault], resolvers: Mapping[str, Callable[..., object] | None] | None = None
) -> Resolved:
    """Resolves every `${…}` in place, and notes which values read the environment, directly or through others.

    Args:
        resolvers: the user's functions by name; None for one that is not to be called.

    Raises:
        ConfigError: the references expand to more than a config may hold.
    """
    done = Resolved()
    waiting = [(path, entry) for path, entry in leaves(root) if isinstance(entry.value, str) and "${" in entry.value]
    if waiting:
        _resolve(root, waiting, faults, done, resolvers or {})
    _missing(root, faults)
    note_literals(root, done.secrets)
    return done


def _missing(root: Entry, faults: list[Fault]) -> None:
    """Report each `???`, OmegaConf's word for a value that must be given; `\\???` is the text."""
    for path, entry in leaves(root):
        if entry.written is not None or not (isinstance(entry.value, str) and _MANDATORY.fullmatch(entry.value)):
            continue
        if entry.value == "???":
            message = f"missing: `???` is a value that must be given, here or by {dotted(path)}=VALUE"
            faults.append(Fault(message, dotted(path), entry.place))
        else:
            entry.written, entry.value = entry.value, entry.value[1:]


def _resolve(
    root: Entry,
    waiting: list[tuple[KeyPath, Entry]],
    faults: list[Fault],
    done: Resolved,
    resolvers: Mapping[str, Callable[..., object] | None],
) -> None:
    resolver = _Resolver(root, resolvers)
    results: list[tuple[Entry, object]] = []
    broken: list[Fault] = []
    path, entry = waiting[0]
    try:
        for path, entry in waiting:
            resolver.read(path, entry.value)
        for path, entry in waiting:
            resolver.seen = {}
            try:
                results.append((entry, _entries(resolver.value(path), entry.place, path)))
            except _Unchecked as why:
                done.unchecked.append(Fault(_message(entry.value, why), dotted(path), entry.place))
                done.secrets.texts[path] = entry.value
            except _Unresolved as error:
                broken.append(Fault(_message(entry.value, error), dotted(path), entry.place))
            if len(broken) > MAX_FAULTS:
                raise _TooMuch(f"more than {MAX_FAULTS} references of this config are broken, up to here")
            done.secrets.note(path, entry.value, resolver.seen)
    except _TooMuch as error:
        raise ConfigError([*faults, *broken, Fault(str(error), dotted(path), entry.place)]) from None
    faults += broken
    for entry, value in results:
        entry.written, entry.value = entry.value, value
    done.secrets.values |= {text: written for text, written in resolver.derived.items() if tells(text)}
    done.notices += resolver.notices


def _entries(value: object, place: str, path: KeyPath) -> object:
    if len(path) > MAX_DEPTH:
        raise _Unresolved(f" expands to values that are nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        is_typed = has_typed_keys(path)
        named = {name if is_typed else dotted([name]): item for name, item in value.items()}
        return {name: Entry(_entries(item, place, (*path, name)), place) for name, item in named.items()}
    if isinstance(value, list):
        return [Entry(_entries(item, place, (*path, number)), place) for number, item in enumerate(value)]
    return value


def _plain(value: object) -> object:
    """A value that OmegaConf's grammar made, which has a kind of text of its own."""
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
    """A text with references has no value; the words continue the text."""


class _Unchecked(_Unresolved):
    """A text needs a resolver that is not to be called here."""


class _Absent(_Unresolved):
    """A key, or its value, is not there; the text is the key, `hint` the nearest one."""

    def __init__(self, key: str, hint: str = "", what: str = "a key that is not there"):
        super().__init__(key)
        self.hint, self.what = hint, what


def _message(text: str, error: _Unresolved) -> str:
    """What to say of a text that has no value, by itself or because of what it leads to."""
    if not isinstance(error, _Absent):
        return f"{_quoted(text)}{error}"
    missing = str(error)
    named = not missing or f"{{{missing}}}" in text
    which = "" if named else f": {_quoted(missing)}"
    return f"{_quoted(text)} refers to {error.what}{which}{error.hint and f'.{error.hint}'}"


_MISSING: object = object()


class _Resolver:
    """Finds what references stand for; what they lead to is made once.

    Attributes:
        texts: the texts with references by path.
        trees: the same as trees, None where the braces hold no reference.
        seen: the environment variables asked for since it was last emptied, and their values.
        derived: what a resolver of the user's made of them, and how that was written.
    """

    def __init__(self, root: Entry, resolvers: Mapping[str, Callable[..., object] | None]):
        from deeplightning.private import omegaconf as omega  # 0.1 CPU s

        self.root, self.resolvers, self.omega = root, resolvers, omega
        self.texts: dict[KeyPath, str] = {}
        self.trees: dict[KeyPath, object] = {}
        self.seen: dict[str, str | None] = {}
        self.derived: dict[str, str] = {}
        self.notices: list[Notice] = []
        self.made: dict[KeyPath, tuple[Any, dict[str, str | None]]] = {}
        self.open: set[KeyPath] = set()  # whose values are being made
        self.followed: set[KeyPath] = set()  # whose references are being followed
        self.steps = self.parts = self.values = self.characters = 0

    def __enter__(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            self.steps -= 1
            raise _Unresolved(" leads on over too many references, one after the other; refer to the value itself")

    def __exit__(self, *_: object) -> None:
        self.steps -= 1

    def read(self, path: KeyPath, text: str) -> None:
        """Takes a text with references in."""
        self.texts[path], self.trees[path] = text, self.parse(text)

    def parse(self, text: str, argument: bool = False) -> object:
        """The tree of a text; None where it is no such text."""
        self.parts += sum(1 for _ in islice(_PART.finditer(text), MAX_PARTS + 1))
        if self.parts > MAX_PARTS:
            raise _TooMuch(f"references of more than {MAX_PARTS} parts, up to here; write fewer")
        depth = 0
        for found in _NESTED.finditer(text):
            depth = depth + 1 if found[1] else max(depth - 1, 0)
            if depth > MAX_DEPTH:
                return None
        try:
            return self.omega.parse(text, argument)
        except self.omega.Malformed:
            return None

    def spend(self, value: object) -> object:
        """Counts one more value of a reference, or of its parts."""
        self.values += 1
        if self.values > MAX_VALUES:
            raise _TooMuch(f"references expand to more than {MAX_VALUES} values, up to here; write fewer")
        if isinstance(value, str):
            self.characters += len(value)
            if self.characters > MAX_CHARACTERS:
                raise _TooMuch(f"references expand to more than {MAX_CHARACTERS} characters, up to here; write fewer")
        return value

    def value(self, path: KeyPath) -> Any:
        """The value of the text with references at a path."""
        if self.trees[path] is None:
            raise _Unresolved(": the braces hold no reference such as ${a.b}; for a plain `${` write `\\${`")
        if path in self.open:
            raise _Unresolved(" refers to itself")
        if path not in self.made:
            before, self.seen = self.seen, {}
            self.open.add(path)
            try:
                self.made[path] = self.evaluate(self.trees[path], path), self.seen
            except _Unresolved as error:
                self.made[path] = error, self.seen
            finally:
                self.open.discard(path)
                self.seen = before
        result, seen = self.made[path]
        for name in seen:
            self.spend(None)
            self.seen[name] = seen[name]
        if isinstance(result, _Unresolved):
            raise result
        return result

    def evaluate(self, tree: object, path: KeyPath) -> object:
        """What a tree means in the value at a path."""
        with self:
            try:
                value = self.evaluation(path).value(tree)
            except self.omega.Malformed:
                what = "neither a word nor a whole number"
                raise _Unresolved(f" has a reference inside a key or a name that gives {what}") from None
            except RecursionError:
                raise _Unresolved(
                    " leads on over too many references, one after the other; refer to the value itself"
                ) from None
            return self.spend(str(value)) if isinstance(value, str) else value

    def evaluation(self, path: KeyPath) -> Any:
        return self.omega.Evaluation(
            lambda dots, parts: self.find(dots, parts, path),
            lambda found: self.whole(*found),
            lambda name, values, texts: self.call(name, values, texts, path),
        )

    # ---- keys

    def find(self, dots: int, parts: "Sequence[str]", path: KeyPath) -> tuple[Any, KeyPath | None]:
        """The entry that a key in the value at a path names, and its path; in what a call has made, the plain value and
        None."""
        wanted = "." * dots + ".".join(parts)
        if dots > len(path) or not parts:
            raise _Absent(self.shown(wanted))
        found: Any = self.root
        where: KeyPath | None = ()
        for part in (*path[: len(path) - dots if dots else 0], *parts):
            found, where = self.behind(found, where)
            items = found.value if isinstance(found, Entry) else found
            index: str | int = part
            if isinstance(items, list) and re.fullmatch("-?[0-9]{1,9}", str(part)):
                index = int(part) + len(items) * (int(part) < 0)
                there = 0 <= index < len(items)
            else:
                index = key_named(part, items) if isinstance(items, dict) else part
                there = isinstance(items, dict) and index in items
            if not there:
                raise _Absent(self.shown(wanted), self.hint(str(part), items, where))
            found, where = items[index], None if where is None else (*where, index)
        if isinstance(found, Entry) and found.value == "???":
            raise _Absent(self.shown(wanted), what="a value that must be given, `???`")
        return found, where

    def named(self, key: object, path: KeyPath) -> tuple[object, KeyPath | None]:
        """The same of a key that is a text, `.a.b[0]`."""
        words = str(key)
        return self.find(len(words) - len(words.lstrip(".")), re.findall(r"[^.\[\]]+", words), path)

    def shown(self, wanted: str) -> str:
        """A key to report; not where it may hold a variable's value."""
        return "" if self.seen else wanted

    def hint(self, part: str, items: object, where: KeyPath | None) -> str:
        """The nearest of the keys that are there; not where the word may hold a variable's value."""
        if self.seen or not isinstance(items, dict) or where is None:
            return ""
        found = nearest(part, items)
        return found.replace("mean ", f"mean {dotted(where)}.", 1) if where else found

    def behind(self, found: object, where: KeyPath | None) -> tuple[Any, KeyPath | None]:
        """Follows an entry that is one reference to where it leads, without making the value there."""
        tree = self.trees.get(where) if where is not None else None
        if where is None or tree is None:
            return found, where
        if where in self.followed:
            raise _Unresolved(" refers to itself")
        self.spend(None)
        self.followed.add(where)
        try:
            with self:
                target = self.evaluation(where).target(tree)
                return (self.value(where), None) if target is None else self.behind(*target)
        except self.omega.Malformed:
            return self.value(where), None  # which says why
        finally:
            self.followed.discard(where)

    def whole(self, found: object, where: KeyPath | None) -> Any:
        """The value at a place, without references."""
        if isinstance(found, Entry):
            assert where is not None
            if where in self.trees:
                return None if self.trees[where] is None else self.whole(self.value(where), None)
            found, inside = found.value, where
        else:
            inside = None
        if isinstance(found, dict):
            self.spend(None)
            return {name: self.whole(item, inside and (*inside, name)) for name, item in found.items()}
        if isinstance(found, list):
            self.spend(None)
            return [self.whole(item, inside and (*inside, number)) for number, item in enumerate(found)]
        return self.spend(found)

    # ---- calls

    def call(self, name: str, values: tuple[object, ...], texts: tuple[Callable[[], str], ...], path: KeyPath) -> Any:
        """What a resolver returns for arguments; `texts` give them as they are written."""
        values = tuple(map(_plain, values))
        if name in self.resolvers:
            return self.own(name, values, path)
        known: dict[str, tuple[Callable[..., object], int]] = {
            "oc.env": (self.variable, 2),
            "oc.decode": (self.decode, 1),
            "oc.select": (self.select, 2),
            "oc.create": (self.create, 1),
            "oc.deprecated": (self.deprecated, 2),
            "oc.dict.keys": (self.names, 1),
            "oc.dict.values": (self.items, 1),
        }
        if name not in known:
            near = "" if self.seen else nearest(name, [*known, *self.resolvers])
            what = f": {_quoted(name).strip('`')} is not known"
            raise _Unresolved(f"{what}; ${{a.b}} refers to a key, ${{oc.env:NAME}} to a variable{near and f'.{near}'}")
        function, most = known[name]
        if not 1 <= len(values) <= most:
            takes = "one argument" if most == 1 else "one argument and perhaps a default"
            raise _Unresolved(f": {name} takes {takes}, not {len(values)}")
        if name == "oc.env" and isinstance(values[-1], bool | int | float) and "${" not in (text := texts[-1]()):
            values = (*values[:-1], text.strip())  # a variable is text, and so is its default: `1.10` as written
        return function(path, *values)

    def own(self, name: str, values: tuple[Any, ...], path: KeyPath) -> Any:
        """What a function of the user's returns."""
        from deeplightning.config.target import reason

        function = self.resolvers[name]
        if function is None:
            raise _Unchecked(f" needs what the resolver `{name}` returns")
        try:
            value = function(*values)
        except (Exception, SystemExit) as error:
            inside = error.__traceback__ and error.__traceback__.tb_next  # the first line is that of the call above
            raise _Unresolved(f": the resolver `{name}` failed: {reason(error.with_traceback(inside))}") from error
        return self.returned(value, name, path, 0)

    def returned(self, value: object, name: str, path: KeyPath, depth: int) -> object:
        """The same as a config holds it."""
        from omegaconf import OmegaConf

        self.spend(None)
        if depth > MAX_DEPTH:
            raise _Unresolved(f" expands to values that are nested more than {MAX_DEPTH} deep")
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if isinstance(value, Mapping):
            return {str(key): self.returned(item, name, path, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.returned(item, name, path, depth + 1) for item in value]
        if isinstance(value, str):
            if self.seen:
                self.derived[str(value)] = self.texts[path]
            return self.spend(str.__str__(value))
        if value is None or isinstance(value, bool):
            return value
        for kind in (int, float):
            if isinstance(value, kind):
                return kind(value)
        what = f"a `{type(value).__name__}`; a config holds texts, numbers, lists and mappings"
        raise _Unresolved(f": the resolver `{name}` returned {what}")

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
        if not isinstance(text, str):
            raise _Unresolved(" cannot be resolved: oc.decode takes a text")
        tree = self.parse(text, argument=True)
        if tree is None:
            words = " with the value that the environment gives" if self.seen else f": {_quoted(text)} is no value"
            raise _Unresolved(f" cannot be resolved{words}")
        return _plain(self.evaluate(tree, path))

    def select(self, path: KeyPath, key: object, default: object = None) -> object:
        """The value of a key, or a default where it is not there."""
        try:
            found = self.named(key, path)
        except _Absent:
            return default
        return self.whole(*found)

    def create(self, path: KeyPath, value: object) -> Any:
        """A mapping or list as it is."""
        if not isinstance(value, dict | list):
            raise _Unresolved(" cannot be resolved: oc.create takes a mapping or a list")
        return value

    def deprecated(self, path: KeyPath, key: object, message: object = DEPRECATED) -> object:
        """The value of the key that has replaced this one, with a notice."""
        found = self.named(key, path)
        text = Template(str(message)).safe_substitute(OLD_KEY=dotted(path), NEW_KEY=self.shown(str(key)))
        self.notices.append(Notice(f"{dotted(path)}: {text}", key=dotted(path)))
        return self.whole(*found)

    def names(self, path: KeyPath, key: Any) -> Any:
        """The keys of a mapping; their values are not read."""
        found: object = key
        if not isinstance(key, dict):
            found, _ = self.behind(*self.named(key, path))
            found = found.value if isinstance(found, Entry) else found
        return [self.spend(name) for name in _mapping(found)]

    def items(self, path: KeyPath, key: Any) -> Any:
        """The values of a mapping."""
        found = key if isinstance(key, dict) else self.whole(*self.named(key, path))
        return list(_mapping(found).values())


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _Unresolved(" cannot be resolved: oc.dict takes a mapping")
    return value
