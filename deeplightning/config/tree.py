"""YAML text with positions becomes a tree of values that know their places; plain values become text again.

The grammar of scalars is YAML 1.2's (`off` is a word, `1e-3` a number), with `_` allowed between digits.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from deeplightning.faults import ConfigError, Fault
from deeplightning.words import first_line, printable

if TYPE_CHECKING:
    pass

MAX_VALUES = 50_000  # after aliases are followed: a few lines of anchors can stand for billions of values
MAX_DEPTH = 60
MAX_FAULTS = 200  # that are reported one by one
TAG = "the tag"  # begins the fault of a value that cannot be read

KeyPath = tuple[str | int, ...]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, object] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf", ".Inf", ".INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass
class Entry:
    """One value of a config and the place that set it.

    `value` is a scalar, a dict of name to Entry, or a list of Entry. `place` of a mapping's item is that of its key.
    `written` is the text with `${…}` that a value was made from; all of a mapping or list that came from a reference
    has it in one place, the entry of the mapping or list. `over` is what stood at the same key before, in a file below
    or under an override; `gone` has the removed keys of a mapping, as entries without a value at the place that removed
    them.
    """

    value: Any
    place: str
    at: str = ""  # the place of the value itself, where the entry's is that of its key
    written: str | None = None
    over: "Entry | None" = None
    gone: "dict[str, Entry]" = field(default_factory=dict)


def scalar(text: str) -> Any:
    """What an unquoted word means: null, a truth value, a number, or itself."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) < 4000 else text  # Python converts no more digits
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


class _Dumper(yaml.SafeDumper):
    """Writes what `scalar` reads back as the same value; never an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> ScalarNode:
    style = None if isinstance(scalar(text), str) else "'"
    if printable(text) != text:
        style = '"'  # in the others line breaks are folded, and the rest could steer a terminal
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: _write_text(dumper, str(path)))


def dump(plain: object) -> str:
    """Plain values as YAML text that `read` turns into the same values."""
    return printable(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120), "\n")


def line(plain: object) -> str:
    """A value as YAML in one line."""
    text = yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"), default_flow_style=True
    )
    return printable(text.removesuffix("...\n").rstrip("\n"))


def kind(entry: Entry) -> str:
    """What a value is, in words."""
    value = entry.value
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value[:60]!r}" + ("…" if len(value) > 60 else "")
    return f"the number {value}"


def nodes(entry: Entry, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Entry]]:
    """Every entry of a tree with its path, the outer before the inner."""
    yield path, entry
    if isinstance(entry.value, dict | list):
        items = entry.value.items() if isinstance(entry.value, dict) else enumerate(entry.value)
        for name, item in items:
            yield from nodes(item, (*path, name))


def leaves(entry: Entry) -> Iterator[tuple[KeyPath, Entry]]:
    """Every scalar of a tree with its path."""
    return ((path, item) for path, item in nodes(entry) if not isinstance(item.value, dict | list))


def plain(entry: Entry, change: Callable[[object], object] = lambda value: value) -> Any:
    """A tree without its places."""
    if isinstance(entry.value, dict):
        return {name: plain(item, change) for name, item in entry.value.items()}
    if isinstance(entry.value, list):
        return [plain(item, change) for item in entry.value]
    return change(entry.value)


def flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Each leaf of a config with its dotted key; an empty block is one."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}".lstrip("."))
    else:
        yield name, value


def as_written(entry: Entry) -> Any:
    """A tree as plain values with its references as they were written."""
    if entry.written is not None:
        return entry.written
    if isinstance(entry.value, dict):
        return {name: as_written(item) for name, item in entry.value.items()}
    if isinstance(entry.value, list):
        return [as_written(item) for item in entry.value]
    return plain(entry)


# ---- text


def parse(text: str, name: str, faults: list[Fault]) -> Entry:
    """YAML text as a tree; what is wrong with single values goes to `faults`, what ends the reading is raised."""
    try:
        beyond = _beyond_bounds(text)
        if beyond is not None:
            message, mark = beyond
            raise ConfigError(Fault(message, place=f"{name}:{mark.line + 1}:{mark.column + 1}"))
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(Fault(_syntax(error, text, mark), place=place)) from None
    except UnicodeEncodeError as error:  # of a shell's arguments; files are decoded before
        raise ConfigError(Fault(f"not text in UTF-8 (character {error.start})", place=name)) from None
    except yaml.YAMLError as error:
        raise ConfigError(Fault(f"not YAML: {first_line(error)}", place=name)) from None
    if node is None:
        return Entry(None, f"{name}:1:1")
    return _Builder(name, faults).build(node)


def _beyond_bounds(text: str) -> tuple[str, Any] | None:
    """What passes a bound, and where. Composing descends on the C stack, which deep nesting would overrun, and makes an
    object of each value."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return f"nested more than {MAX_DEPTH} deep", event.start_mark
        if number > 4 * MAX_VALUES:  # a value has a key, a start and an end
            return f"this file holds more than {MAX_VALUES} values", event.start_mark
    return None


def _syntax(error: yaml.MarkedYAMLError, text: str, mark: yaml.Mark | None) -> str:
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in str(error.problem):
        return "a tab in the indentation; YAML wants spaces"
    if re.search(r"[{\[,].*\$\{", line):
        return 'not YAML: inside {…} or […] a reference needs quotes: "${a.b}"'
    problem = str(error.problem or error.context or "not YAML")
    return f"not YAML: {problem}" + (f" ({error.context})" if error.context and error.problem else "")


class _Builder:
    """Turns YAML nodes into entries, with a bound on what aliases can make of them."""

    def __init__(self, name: str, faults: list[Fault]):
        self.name, self.faults, self.count, self.open = name, faults, 0, set[int]()
        self.above: list[str] = []  # the keys that lead to what is being built

    def place(self, node: Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def stop(self, node: Node, message: str) -> ConfigError:
        return ConfigError([*self.faults, Fault(message, place=self.place(node))])

    def build(self, node: Node, place: str | None = None) -> Entry:
        at = self.place(node)
        self.count += 1
        if len(self.faults) > MAX_FAULTS:
            raise self.stop(node, f"more than {MAX_FAULTS} faults, up to here; is this a config?")
        if self.count > MAX_VALUES:
            raise self.stop(node, f"this config expands to more than {MAX_VALUES} values; write out fewer aliases")
        if id(node) in self.open:
            raise self.stop(node, "an alias inside its own anchor has no end; write the value out")
        if len(self.open) >= MAX_DEPTH:
            raise self.stop(node, f"nested more than {MAX_DEPTH} deep")
        if node.tag.startswith("tag:yaml.org,2002:python") or not node.tag.startswith("tag:yaml.org,2002:"):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            message = f"{TAG} {tag} is not allowed: a config holds plain values only"
            self.faults.append(Fault(message, ".".join(self.above) or None, at))
            return Entry(None, place or at, at)
        self.open.add(id(node))
        try:
            return Entry(self.value(node), place or at, at)
        finally:
            self.open.discard(id(node))

    def value(self, node: Node) -> Any:
        if isinstance(node, ScalarNode):
            return node.value if node.style else scalar(node.value)
        if isinstance(node, SequenceNode):
            return [self.build(item) for item in node.value]
        assert isinstance(node, MappingNode)
        return self.mapping(node)

    def mapping(self, node: MappingNode) -> dict[str, Entry]:
        items: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for name_node, value_node in node.value:
            place = self.place(name_node)
            if not isinstance(name_node, ScalarNode):
                self.faults.append(Fault("a key is a word, not a list or a mapping", place=place))
                continue
            name = name_node.value
            self.above.append(name)
            value = self.build(value_node, place)
            self.above.pop()
            if name == "<<" and not name_node.style:
                for entry in value.value if isinstance(value.value, list) else [value]:
                    if isinstance(entry.value, dict):
                        merged = {**entry.value, **merged}
                    else:
                        self.faults.append(Fault(f"`<<` merges mappings, not {kind(entry)}", place=place))
            elif name in items:
                line = items[name].place.rsplit(":", 2)[1]
                message = f"this key occurs twice, first in line {line}; remove one"
                self.faults.append(Fault(message, ".".join([*self.above, name]), place))
            else:
                items[name] = value
        return {**merged, **items}
