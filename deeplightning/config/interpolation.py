"""`${…}` in a tree of values is resolved in place; what came from the environment is noted, so that it stays unseen.

Each value is made once and what references make together is bounded: forty lines can stand for billions of
values.
"""

import base64
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import quote, quote_plus

from deeplightning.config.expression import Call, Key, Malformed, Node, Text, Word, parse, parse_argument
from deeplightning.config.fault import ConfigError, Fault, nearest
from deeplightning.config.tree import MAX_DEPTH, MAX_FAULTS, MAX_VALUES, Entry, KeyPath, leaves, nodes, plain, scalar

MAX_CHARACTERS = 1_000_000  # of the texts that references make
MAX_PARTS = 100_000  # of the texts that hold references: words, keys, arguments
CUT = 20  # characters: a value that a message has cut is known by its first ones
_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_MAYBE_KEY = re.compile(r"(?i)pass|pwd|secret|token|credential|key|salt|auth")
_MAYBE_VALUE = re.compile(r"://[^\s/]*@|-----BEGIN|=|\s")
_LONG, _DIGIT = re.compile(r"[\w+/-]{16}"), re.compile(r"\d")
MAX_STEPS = 150  # of references and sections that lead to each other; Python bears a thousand


@dataclass
class Secrets:
    """What came from the environment, or should have: never printed, saved or tracked.

    A secret that is written in clear counts as if `${oc.env:NAME}` stood there, with a name made of its key.
    """

    texts: dict[KeyPath, str] = field(default_factory=dict)  # path of a value → how it was written, `${…}` and all
    values: dict[str, str] = field(default_factory=dict)  # value → the expression it came from
    words: set[KeyPath] = field(default_factory=set)  # paths of values that hold a variable's text, or its default
    literals: dict[str, tuple[KeyPath, str]] = field(
        default_factory=dict
    )  # variable → path and value, written in clear

    def is_word(self, path: KeyPath) -> bool:
        """Whether a text at a path stands for a number too: a variable holds nothing but text."""
        return any(path[:n] in self.words for n in range(len(path), 0, -1))

    def text_of(self, path: KeyPath) -> str | None:
        """How the value at a path was written, if it, or the section it lies in, came from the environment."""
        return next((self.texts[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.texts), None)

    def redact(self, text: str) -> str:
        """Text without what came from the environment, in every form that `redact` knows."""
        return redact(text, self.values)

    def redact_message(self, text: str) -> str:
        """The same of what is said to people, also without what looks like a secret."""
        from deeplightning.config.conceal import conceal  # 10 ms

        return conceal(redact(text, self.values), ".txt")[0]

    def to_environment(self) -> None:
        """Sets the variables that replace secrets written in clear, so that what this run saves can be read by it and
        by the processes that it starts."""
        os.environ.update({name: value for name, (_, value) in self.literals.items()})


def redact(text: str, values: Mapping[str, str], other: str | None = None) -> str:
    """Text without values: plain, as Python's repr and JSON write them, quoted for a URL, in base64 (also as a part of
    what was encoded), and of each of these the first 20 characters or more.

    Args:
        values: what replaces each.
        other: what replaces a form that is not the plain one; None: the same.
    """
    for value in sorted(values, key=len, reverse=True):
        for form in _forms(value):
            instead = values[value] if other is None or form == value else other
            text = text.replace(form, instead)
            begin = text.find(form[:CUT]) if len(form) > CUT else -1
            instead = values[value] if other is None else other
            while begin >= 0:
                end = begin + CUT
                while text[end : end + 1] == form[end - begin : end - begin + 1] != "":
                    end += 1
                text = text[:begin] + instead + text[end:]
                begin = text.find(form[:CUT], begin + len(instead))
    return text


@cache
def _forms(value: str) -> tuple[str, ...]:
    """How messages of other libraries may write a value."""
    forms = [value, repr(value)[1:-1], json.dumps(value)[1:-1]]
    content = value.encode("utf-8", "surrogateescape")
    forms += [quote(content), quote(content, safe=""), quote_plus(content), quote(content, safe="").lower()]
    for encode in (base64.b64encode, base64.urlsafe_b64encode) if len(value) >= 6 else ():
        forms.append(encode(content).decode())
        for before in range(3):  # characters in front of it shift it; those that they share are dropped
            whole = encode(bytes(before) + content).decode().rstrip("=")
            shared = len(content) + before
            forms.append(whole[-(-before * 8 // 6) : shared * 8 // 6])
    return tuple(dict.fromkeys(forms))


def resolve(root: Entry, faults: list[Fault]) -> Secrets:
    """Resolves every `${…}` in place, and notes which values read the environment, directly or through others.

    Raises:
        ConfigError: the references stand for more than a config may hold.
    """
    secrets = Secrets()
    waiting = [(path, entry) for path, entry in leaves(root) if isinstance(entry.value, str) and "${" in entry.value]
    resolver = _Resolver(root)
    results: list[tuple[Entry, Any]] = []
    broken: list[Fault] = []
    path: KeyPath = ()
    entry = root
    try:
        for path, entry in waiting:
            resolver.read(path, entry.value)
        for path, entry in waiting:
            resolver.seen = {}
            try:
                results.append((entry, _entries(resolver.value(path), entry.place, len(path))))
            except _Unresolved as error:
                broken.append(Fault(_told(entry.value, error), _dotted(path), entry.place))
            if len(broken) > MAX_FAULTS:
                raise _TooMuch(f"more than {MAX_FAULTS} references of this config are broken, up to here")
            _note(secrets, path, entry.value, resolver.seen)
    except _TooMuch as error:
        raise ConfigError([*faults, *broken, Fault(str(error), _dotted(path), entry.place)]) from None
    faults += broken
    for entry, value in results:
        entry.written, entry.value = entry.value, value
    _note_literals(root, secrets)
    return secrets


def _note_literals(root: Entry, secrets: Secrets) -> None:
    """Notes secrets that are written in clear, and which values refer to them."""
    for path, entry in leaves(root):
        text = str(entry.value)
        name = next((part for part in reversed(path) if isinstance(part, str)), "")
        is_random = _DIGIT.search(text) and _LONG.search(text)
        if not (_MAYBE_KEY.search(name) or _MAYBE_VALUE.search(text) or is_random):
            continue
        if isinstance(entry.value, bool | float | None) or secrets.text_of(path) or not _tells(text):
            continue
        if entry.written is not None and _REFERENCE.search(entry.written):
            continue
        from deeplightning.config.conceal import BLOT, secrets_in_value  # 10 ms, and hardly a config has any

        parts, done = [], 0
        for number, (start, end) in enumerate(secrets_in_value(name, text), start=1):
            variable = re.sub(r"\W+", "_", "_".join(map(str, path)).upper()) + (f"_{number}" if number > 1 else "")
            expression = f"${{oc.env:{variable}}}"
            if not isinstance(entry.value, str):
                expression = f"${{oc.decode:{expression}}}"
            secrets.literals[variable] = path, text[start:end]
            secrets.values[text[start:end]] = expression
            password = text[start:end].partition(":")[2] if text[end : end + 1] == "@" else ""
            if _tells(password):  # of an address: messages may cite it alone
                secrets.values.setdefault(password, BLOT)
            parts += [escaped(text[done:start]), expression]
            done = end
        if parts:
            secrets.texts[path] = "".join([*parts, escaped(text[done:])])
    clear = {value: secrets.values[value] for _, value in secrets.literals.values()}
    for path, entry in nodes(root) if clear else ():
        if secrets.text_of(path) is None and any(value in str(plain(entry)) for value in clear):
            if entry.written is not None and _REFERENCE.search(entry.written):
                secrets.texts[path] = entry.written
            elif isinstance(entry.value, str):
                secrets.texts[path] = redact(escaped(entry.value), clear)


def escaped(text: str) -> str:
    """The text as a config writes it literally: `${` in it is no reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _note(secrets: Secrets, path: KeyPath, text: str, seen: dict[str, str | None]) -> None:
    """Notes that a text at a path asked for these variables."""
    if seen:
        secrets.words.add(path)
    found = {name: value for name, value in seen.items() if value is not None}
    if found:
        secrets.texts[path] = text
        secrets.values.update((value, f"${{oc.env:{name}}}") for name, value in found.items() if _tells(value))


def _tells(value: str) -> bool:
    """Whether a variable's value can be told from other words: it is not among the shortest, and no folder or file of
    this machine, which stands in every message about it."""
    return len(value) >= 4 and not os.path.exists(value)  # noqa: PTH110  (Path's fails for a text that is too long)


def _entries(value: Any, place: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _Unresolved(f" stands for values that are nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {name: Entry(_entries(item, place, depth + 1), place) for name, item in value.items()}
    if isinstance(value, list):
        return [Entry(_entries(item, place, depth + 1), place) for item in value]
    return value


def _quoted(text: str) -> str:
    return f"`{text[:200]}…`" if len(text) > 200 else f"`{text}`"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


class _TooMuch(Exception):
    """References are more, or stand for more, than a config may hold; the text says what."""


class _Unresolved(Exception):
    """A text with references has no value; the words go on from the text."""


class _Absent(_Unresolved):
    """A key is not there; the text is the key, `hint` the nearest one."""

    def __init__(self, key: str, hint: str = ""):
        super().__init__(key)
        self.hint = hint


def _told(text: str, error: _Unresolved) -> str:
    """What to say of a text that has no value, by itself or because of what it leads to."""
    if not isinstance(error, _Absent):
        return f"{_quoted(text)}{error}"
    missing = str(error)
    named = not missing or f"{{{missing}}}" in text
    which = "" if named else f": {_quoted(missing)}"
    return f"{_quoted(text)} refers to a key that is not there{which}{error.hint and f'.{error.hint}'}"


_MISSING: Any = object()


class _Resolver:
    """Finds what references stand for; what they lead to is made once.

    Attributes:
        nodes: the texts with references by path, None where the braces hold none.
        seen: the environment variables asked for since it was last emptied, and their values.
    """

    def __init__(self, root: Entry):
        self.root = root
        self.nodes: dict[KeyPath, Node | None] = {}
        self.seen: dict[str, str | None] = {}
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
        try:
            self.nodes[path] = parse(text, self.count)
        except Malformed:
            self.nodes[path] = None

    def count(self) -> None:
        """Counts one more part of a text with references."""
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise _TooMuch(f"references of more than {MAX_PARTS} parts, up to here; write fewer")

    def spend(self, value: Any) -> Any:
        """Counts one more value that a reference stands for, or what it is made of."""
        self.values += 1
        if self.values > MAX_VALUES:
            raise _TooMuch(f"references stand for more than {MAX_VALUES} values, up to here; write fewer")
        if isinstance(value, str):
            self.characters += len(value)
            if self.characters > MAX_CHARACTERS:
                raise _TooMuch(f"references stand for more than {MAX_CHARACTERS} characters, up to here; write fewer")
        return value

    def value(self, path: KeyPath) -> Any:
        """What the text with references at a path stands for."""
        if self.nodes[path] is None:
            raise _Unresolved(": the braces hold no reference such as ${a.b}; for a plain `${` write `\\${`")
        if path in self.open:
            raise _Unresolved(" refers to itself")
        if path not in self.made:
            before, self.seen = self.seen, {}
            self.open.add(path)
            try:
                self.made[path] = self.evaluate(self.nodes[path], path), self.seen
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

    def evaluate(self, node: Any, path: KeyPath) -> Any:
        """What a node means in the value at a path."""
        with self:
            if isinstance(node, Word):
                return scalar(node.text)
            if isinstance(node, Text):
                return self.text(node, path)
            if isinstance(node, Key):
                return self.whole(*self.find(node, path))
            if isinstance(node, Call):
                return self.call(node, path)
            if isinstance(node, list):
                return [self.evaluate(item, path) for item in node]
            if isinstance(node, dict):
                return {name: self.evaluate(item, path) for name, item in node.items()}
            raise AssertionError(node)

    def text(self, node: Text, path: KeyPath) -> str:
        parts = [part if isinstance(part, str) else str(self.evaluate(part, path)) for part in node.parts]
        return self.spend("".join(parts))

    # ---- keys

    def find(self, key: Key, path: KeyPath) -> tuple[Any, KeyPath | None]:
        """The entry that a key names and its path; in what a call has made, the plain value and None."""
        dots, parts = key.dots, list[str]()
        for part in key.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            name = str(self.evaluate(part, path))
            if not parts:  # a reference may give a whole key, which may begin with dots
                dots += len(name) - len(name.lstrip("."))
            parts += re.findall(r"[^.\[\]]+", name)
        wanted = "." * dots + ".".join(parts)
        if dots > len(path) or not parts:
            raise _Absent(self.shown(wanted))
        found: Any = self.root
        where: KeyPath | None = ()
        for part in (*path[: len(path) - dots if dots else 0], *parts):
            found, where = self.behind(found, where)
            items = found.value if isinstance(found, Entry) else found
            index: Any = part
            if isinstance(items, list) and re.fullmatch("-?[0-9]{1,9}", str(part)):
                index = int(part) + len(items) * (int(part) < 0)
                there = 0 <= index < len(items)
            else:
                there = isinstance(items, dict) and part in items
            if not there:
                raise _Absent(self.shown(wanted), self.hint(str(part), items, where))
            found, where = items[index], None if where is None else (*where, index)
        return found, where

    def shown(self, wanted: str) -> str:
        """A key to be told; not where it may hold a variable's value."""
        return "" if self.seen else wanted

    def hint(self, part: str, items: Any, where: KeyPath | None) -> str:
        """The nearest of the keys that are there; not where the word may hold a variable's value."""
        if self.seen or not isinstance(items, dict) or where is None:
            return ""
        found = nearest(part, items)
        return found.replace("mean ", f"mean {_dotted(where)}.", 1) if where else found

    def behind(self, found: Any, where: KeyPath | None) -> tuple[Any, KeyPath | None]:
        """Follows an entry that is one reference to where it leads, without making the value there."""
        node = self.nodes.get(where) if where is not None else None
        if where is None or node is None:
            return found, where
        if not isinstance(node, Key):
            return self.value(where), None
        if where in self.followed:
            raise _Unresolved(" refers to itself")
        self.spend(None)
        self.followed.add(where)
        try:
            with self:
                return self.behind(*self.find(node, where))
        finally:
            self.followed.discard(where)

    def whole(self, found: Any, where: KeyPath | None) -> Any:
        """All that stands at a place, without references."""
        with self:
            if isinstance(found, Entry):
                assert where is not None
                if where in self.nodes:
                    return None if self.nodes[where] is None else self.whole(self.value(where), None)
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

    def call(self, node: Call, path: KeyPath) -> Any:
        name = ".".join(part if isinstance(part, str) else str(self.evaluate(part, path)) for part in node.name)
        known: dict[str, tuple[Callable[..., Any], int]] = {
            "oc.env": (self.variable, 2),
            "oc.decode": (self.decode, 1),
            "oc.select": (self.select, 2),
            "oc.create": (self.create, 1),
            "oc.dict.keys": (self.names, 1),
            "oc.dict.values": (self.items, 1),
        }
        if name not in known:
            said = ": {} is not known; ${{a.b}} refers to a key, ${{oc.env:NAME}} to a variable"
            raise _Unresolved(said.format(_quoted(name).strip("`")))
        function, most = known[name]
        if not 1 <= len(node.arguments) <= most:
            takes = "one argument" if most == 1 else "one argument and perhaps a default"
            raise _Unresolved(f": {name} takes {takes}, not {len(node.arguments)}")
        values = [self.evaluate(argument, path) for argument in node.arguments]
        if name == "oc.env" and isinstance(node.arguments[-1], Word) and values[-1] is not None:
            values[-1] = node.arguments[-1].text  # a variable is text, and so is its default: `1.10` as it is written
        return function(path, *values)

    def variable(self, path: KeyPath, name: Any, default: Any = _MISSING) -> Any:
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

    def decode(self, path: KeyPath, text: Any) -> Any:
        if text is None:
            return None
        if not isinstance(text, str):
            raise _Unresolved(" cannot be resolved: oc.decode takes a text")
        try:
            node = parse_argument(text, self.count)
        except Malformed:
            words = " with the value that the environment gives" if self.seen else f": {_quoted(text)} is no value"
            raise _Unresolved(f" cannot be resolved{words}") from None
        return self.evaluate(node, path)

    def select(self, path: KeyPath, key: Any, default: Any = None) -> Any:
        """The value of a key, or a default where it is not there."""
        try:
            found = self.find(_key(key), path)
        except _Absent:
            return default
        return self.whole(*found)

    def create(self, path: KeyPath, value: Any) -> Any:
        """A mapping or list as it is."""
        if not isinstance(value, dict | list):
            raise _Unresolved(" cannot be resolved: oc.create takes a mapping or a list")
        return value

    def names(self, path: KeyPath, key: Any) -> Any:
        """The keys of a mapping; what stands under them is not looked at."""
        found: Any = key
        if not isinstance(key, dict):
            found, _ = self.behind(*self.find(_key(key), path))
            found = found.value if isinstance(found, Entry) else found
        return [self.spend(name) for name in _mapping(found)]

    def items(self, path: KeyPath, key: Any) -> Any:
        """The values of a mapping."""
        found = key if isinstance(key, dict) else self.whole(*self.find(_key(key), path))
        return list(_mapping(found).values())


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Unresolved(" cannot be resolved: oc.dict takes a mapping")
    return value


def _key(text: Any) -> Key:
    """`a.b` of an argument."""
    words = str(text)
    return Key(len(words) - len(words.lstrip(".")), re.findall(r"[^.\[\]]+", words))
