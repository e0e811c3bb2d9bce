"""The grammar of references: a text with `${…}` becomes nodes that say what to look up. Nothing is looked up here.

The notation is that of OmegaConf, which users know. Reading takes time in proportion to the text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deeplightning.config.tree import MAX_DEPTH

_SPACE = re.compile(r"\s*")
_KEY = re.compile(r"(?:\\[\\.\[\]:=]|[^\\{}()\[\]:.\s'\"])+")  # one word of `a.b`; a backslash before a dot keeps it
_NAME = re.compile(r"[^\\$'\"{}\[\],:]+")  # a key of a mapping in an argument
_WORD = re.compile(r"(?:\\[\\()\[\]{}:=,\s]|[^\\$'\"{}\[\],\s]|\\|\$(?!\{))+")  # an argument without quotes


class Malformed(ValueError):
    """The braces hold no reference."""


@dataclass(frozen=True)
class Key:
    """`${a.b}`; with dots in front it counts from where it stands. A part may be a reference itself."""

    dots: int
    parts: list[Any]


@dataclass(frozen=True)
class Call:
    """`${name:argument,…}`."""

    name: list[Any]
    arguments: list[Any]


@dataclass(frozen=True)
class Text:
    """Texts and references that make one text."""

    parts: list[Any]


@dataclass(frozen=True)
class Word:
    """An argument without quotes, which may be a number."""

    text: str


Node = Key | Call | Text | Word | list | dict
"""A list and a dict hold nodes."""

Count = Callable[[], None]


def parse(text: str, count: Count = lambda: None) -> Node:
    """A value of a config. `\\${` stands for a plain `${`.

    Args:
        count: called for each part that is read, so that a caller may stop it by an exception of its own.

    Raises:
        Malformed: where a `${` opens no reference.
    """
    return _Reader(text, count).mixed()


def parse_argument(text: str, count: Count = lambda: None) -> Node:
    """A text as it may stand in an argument: a word, a number, a quoted text, a list, a mapping, a reference.

    Raises:
        Malformed: it is none of them.
    """
    reader = _Reader(text, count)
    node = reader.argument()
    if reader.position < len(text) or not text.strip():
        raise Malformed
    return node


class _Reader:
    """Descends through a text from left to right."""

    def __init__(self, text: str, count: Count):
        self.text, self.count, self.position, self.depth = text, count, 0, 0

    def take(self, pattern: re.Pattern[str]) -> str:
        """What matches here, read."""
        found = pattern.match(self.text, self.position)
        self.position = found.end() if found else self.position
        return found[0] if found else ""

    def has(self, sign: str) -> bool:
        """Whether a sign stands here; if so it is read."""
        found = self.text.startswith(sign, self.position)
        self.position += len(sign) * found
        return found

    def need(self, sign: str) -> None:
        if not self.has(sign):
            raise Malformed

    def mixed(self, quote: str = "") -> Node:
        """Text and references, up to the closing quote if one is given. Of the backslashes before a `${` or a quote
        every second one counts; an odd one makes it plain text."""
        parts: list[Any] = []
        stops = re.compile(rf"\$\{{|{quote}" if quote else r"\$\{")
        while True:
            stop = stops.search(self.text, self.position)
            if stop is None:
                if quote:
                    raise Malformed
                parts.append(self.text[self.position :])
                break
            before = self.text[self.position : stop.start()]
            kept = before.rstrip("\\")
            slashes = len(before) - len(kept)
            parts.append(kept + "\\" * (slashes // 2))
            self.position = stop.end()
            if slashes % 2:
                parts.append(stop[0])
            elif stop[0] == quote:
                break
            else:
                parts.append(self.reference())
        parts = [part for part in parts if part != ""]
        alone = len(parts) == 1 and not isinstance(parts[0], str) and not quote
        return parts[0] if alone else Text(parts)

    def reference(self) -> Key | Call:
        """What follows a `${`, with the closing brace."""
        self.deeper()
        self.take(_SPACE)
        dots = 0
        while self.has("."):
            dots += 1
        parts, plain = [], not dots
        while True:
            if self.has("["):
                parts.append(self.key())
                self.need("]")
                plain = False
            else:
                parts.append(self.key())
            if not (self.has(".") or self.text.startswith("[", self.position)):
                break
        self.take(_SPACE)
        if plain and self.has(":"):
            return self.up(Call(parts, self.arguments("}")))
        self.need("}")
        return self.up(Key(dots, parts))

    def key(self) -> Any:
        self.count()
        if self.has("${"):
            return self.reference()
        word = self.take(_KEY)
        if not word:
            raise Malformed
        return re.sub(r"\\(.)", r"\1", word)

    def arguments(self, close: str) -> list[Any]:
        """Arguments up to a closing bracket; nothing between two commas is an empty text."""
        self.take(_SPACE)
        found: list[Any] = []
        if self.has(close):
            return found
        while True:
            found.append(self.argument())
            if self.has(close):
                return found
            self.need(",")

    def argument(self) -> Node:
        self.deeper()
        self.take(_SPACE)
        node: Node
        if self.has("'"):
            node = self.mixed("'")
        elif self.has('"'):
            node = self.mixed('"')
        elif self.has("["):
            node = self.arguments("]")
        elif self.has("{"):
            node = self.mapping()
        else:
            node = self.word()
        self.take(_SPACE)
        return self.up(node)

    def mapping(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.take(_SPACE)
        if self.has("}"):
            return found
        while True:
            self.count()
            name = self.take(_NAME).strip()
            if not name:
                raise Malformed
            self.need(":")
            found[name] = self.argument()
            if self.has("}"):
                return found
            self.need(",")

    def word(self) -> Node:
        parts: list[Any] = []
        escaped = False
        while True:
            self.count()
            space = self.take(_SPACE)
            if self.has("${"):
                part: Any = self.reference()
            else:
                written = self.take(_WORD)
                if not written:  # space at the end does not count
                    break
                part = re.sub(r"\\([\\()\[\]{}:=,\s])", r"\1", written)
                escaped = escaped or part != written
            parts += [space, part] if parts and space else [part]
        if len(parts) == 1 and not isinstance(parts[0], str):
            return parts[0]
        if not parts or escaped or not all(isinstance(part, str) for part in parts):
            return Text(parts)
        return Word("".join(parts))

    def deeper(self) -> None:
        self.count()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Malformed

    def up(self, node: Any) -> Any:
        self.depth -= 1
        return node
