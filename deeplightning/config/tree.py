"""Parse YAML text to a tree of values with their places, and write plain values as YAML.

Scalars follow YAML 1.2 (`off` is a string, `1e-3` a number), with `_` allowed between digits.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from deeplightning.faults import ConfigError, Fault
from deeplightning.words import first_line, printable

MAX_VALUES = 50_000  # with aliases expanded: a few lines of anchors can expand to billions of values
MAX_DEPTH = 60
MAX_FAULTS = 200  # that are reported individually
TAG = "the tag"  # start of the message about a value that cannot be read

KeyPath = tuple[Any, ...]  # names and indexes; inside params, keys of any plain type
_Loader = type("_Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {"resolve": lambda *_: ""})
"""A loader whose nodes have only the tags written in the file."""
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

    `value` is a scalar, a dict of name to Entry, or a list of Entry. The `place` of an item is that of its key.
    `written` is the text with `${…}` that a value came from. For a mapping or list from a reference, only the entry of
    the mapping or list has it.
    """

    value: Any
    place: str
    written: str | None = None


def scalar(text: str) -> Any:
    """Convert an unquoted scalar to null, a boolean, a number, or a string."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) < 4000 else text  # Python refuses to convert more digits
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


def has_typed_keys(above: Sequence[str | int]) -> bool:
    """Return whether the keys of a mapping have YAML types, such as a number for `0`. This holds inside params; keys of
    the config and names of params are text. `above` are the keys that lead to the mapping."""
    return "params" in above and above[-1] != "params"


def key_named(word: str, items: dict[Any, Any], above: Sequence[str | int] = ()) -> Any:
    """Return the key of a mapping for a part of a dotted key, whether or not the mapping has it yet."""
    return scalar(word) if word not in items and (has_typed_keys(above) or scalar(word) in items) else word


class _Dumper(yaml.SafeDumper):
    """Writes scalars that `scalar` reads back as the same value, and never writes aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> ScalarNode:
    style = None if isinstance(scalar(text), str) else "'"
    if printable(text) != text:
        style = '"'  # other styles fold line breaks, and control characters could steer a terminal
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: _write_text(dumper, str(path)))


def dump(plain: object) -> str:
    """Write plain values as YAML text, which `parse` reads back as the same values."""
    return printable(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120), "\n")


def line(plain: object) -> str:
    """Write a value as YAML in one line."""
    text = yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"), default_flow_style=True
    )
    return printable(text.removesuffix("...\n").rstrip("\n"))


def kind(entry: Entry) -> str:
    """Describe the type of a value in words."""
    value = entry.value
    words = {dict: "a mapping", list: "a list", type(None): "null"}
    if type(value) in words:
        return words[type(value)]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value[:60]!r}" + ("…" if len(value) > 60 else "")
    return f"the number {value}"


def nodes(entry: Entry, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Entry]]:
    """Yield every entry of a tree with its path, outer before inner."""
    pending = [(path, entry)]
    while pending:
        path, entry = pending.pop()
        yield path, entry
        if isinstance(entry.value, dict | list):
            items = entry.value.items() if isinstance(entry.value, dict) else enumerate(entry.value)
            pending += reversed([((*path, name), item) for name, item in items])


def leaves(entry: Entry) -> Iterator[tuple[KeyPath, Entry]]:
    """Yield every scalar of a tree with its path."""
    return ((path, item) for path, item in nodes(entry) if not isinstance(item.value, dict | list))


def entry_at(root: Entry, path: Iterable[Any]) -> Entry | None:
    """Return the entry at a path of names and indexes, or None if it does not exist."""
    found = root
    for part in path:
        items = dict(enumerate(found.value)) if isinstance(found.value, list) else found.value
        if not isinstance(items, dict) or part not in items:
            return None
        found = items[part]
    return found


def plain(entry: Entry, written: bool = False) -> Any:
    """Convert a tree to plain values; with `written`, references stay as written."""
    if written and entry.written is not None:
        return entry.written
    if isinstance(entry.value, dict):
        return {name: plain(item, written) for name, item in entry.value.items()}
    if isinstance(entry.value, list):
        return [plain(item, written) for item in entry.value]
    return entry.value


def flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield each leaf of a config with its dotted key; an empty mapping is a leaf."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, dotted((*filter(None, [name]), key)))
    else:
        yield name, value


def dotted(path: Sequence[Any]) -> str:
    """Join a path to a dotted key, such as `a.b.0`; a key that is None becomes `null`."""
    return ".".join(key if isinstance(key, str) else line(key) for key in path)


# ---- parsing


def parse(text: str, name: str, faults: list[Fault], above: Sequence[str] = (), is_override: bool = False) -> Entry:
    """Parse YAML text to a tree, and add faults of single values to `faults`.

    Args:
        above: the keys that lead to the place of the tree.
        is_override: the text is the value of an override, which has no comments: an unquoted scalar is the whole text.

    Raises:
        ConfigError: the text is not YAML, or exceeds a limit.
    """
    try:
        _check_bounds(text, name)
        node = yaml.compose(text, Loader=_Loader)
        if is_override:
            node = _restore_comment(node, text, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(Fault(_syntax(error, text, mark), place=_place(name, mark) if mark else name)) from None
    except UnicodeEncodeError as error:  # in arguments of a shell; files are decoded before
        raise ConfigError(Fault(f"not text in UTF-8 (character {error.start})", place=name)) from None
    except yaml.YAMLError as error:
        raise ConfigError(Fault(f"not YAML: {first_line(error)}", place=name)) from None
    return Entry(None, f"{name}:1:1") if node is None else _Builder(name, faults, above).build(node)


def _restore_comment(node: Node | None, text: str, name: str) -> Node | None:
    """Restore text of an override that YAML takes for a comment, such as `#3` in `run #3`."""
    words = text.strip()
    is_word = node is None or (isinstance(node, ScalarNode) and (not node.style or node.style in "|>"))
    if is_word and not words.startswith("!") and ("\n" not in words or words[0] not in "|>"):
        return ScalarNode("", words, yaml.Mark(name, 0, 0, 0, None, 0))
    return node


def _check_bounds(text: str, name: str) -> None:
    """Refuse text that is nested too deeply or too long: composing recurses on the C stack, with an object per value.

    Raises:
        ConfigError: it exceeds a limit.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or number > 4 * MAX_VALUES:  # a value has a key, a start and an end
            message = f"nested more than {MAX_DEPTH} deep"
            message = message if depth > MAX_DEPTH else f"this file holds more than {MAX_VALUES} values"
            raise ConfigError(Fault(message, place=_place(name, event.start_mark)))


def _place(name: str, mark: Any) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _syntax(error: yaml.MarkedYAMLError, text: str, mark: yaml.Mark | None) -> str:
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())] or "'\\t'" in str(error.problem):
        return "a tab in the indentation; YAML needs spaces"
    if re.search(r"[{\[,].*\$\{", line):
        return 'not YAML: inside {…} or […] a reference needs quotes: "${a.b}"'
    problem = str(error.problem or error.context or "not YAML")
    return f"not YAML: {problem}" + (f" ({error.context})" if error.context and error.problem else "")


class _Builder:
    """Converts YAML nodes to entries, with a limit on values from aliases."""

    def __init__(self, name: str, faults: list[Fault], above: Sequence[str]):
        self.name, self.faults, self.count, self.active = name, faults, 0, set[int]()
        self.above = [*above]  # the keys that lead to what is being built

    def error(self, node: Node, message: str) -> ConfigError:
        return ConfigError([*self.faults, Fault(message, place=_place(self.name, node.start_mark))])

    def build(self, node: Node, place: str | None = None) -> Entry:
        self.count += 1
        if len(self.faults) > MAX_FAULTS:
            raise self.error(node, f"more than {MAX_FAULTS} faults, up to here; is this a config?")
        if self.count > MAX_VALUES:
            raise self.error(node, f"this config expands to more than {MAX_VALUES} values; write out fewer aliases")
        if id(node) in self.active:
            raise self.error(node, "an alias inside its own anchor is circular; write the value out")
        if len(self.active) >= MAX_DEPTH:
            raise self.error(node, f"nested more than {MAX_DEPTH} deep")
        self.active.add(id(node))
        try:
            return Entry(self.value(node), place or _place(self.name, node.start_mark))
        finally:
            self.active.discard(id(node))

    def value(self, node: Node) -> Any:
        if node.tag:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            message = f"{TAG} {tag} is not allowed: a config holds plain values only"
            self.faults.append(Fault(message, ".".join(self.above) or None, _place(self.name, node.start_mark)))
            return None
        if isinstance(node, SequenceNode):
            return [self.build(item) for item in node.value]
        if isinstance(node, MappingNode):
            return self.mapping(node)
        assert isinstance(node, ScalarNode)
        return node.value if node.style else scalar(node.value)

    def mapping(self, node: MappingNode) -> dict[Any, Entry]:
        items, merged = dict[Any, Entry](), dict[Any, Entry]()
        is_typed = has_typed_keys(self.above)
        for name_node, value_node in node.value:
            place = _place(self.name, name_node.start_mark)
            if not isinstance(name_node, ScalarNode):
                self.faults.append(Fault("a key is a word, not a list or a mapping", place=place))
                continue
            if name_node.value == "<<" and not name_node.style and not name_node.tag:
                value = self.build(value_node, place)
                for entry in value.value if isinstance(value.value, list) else [value]:
                    if isinstance(entry.value, dict):
                        merged = {**entry.value, **merged}
                    else:
                        self.faults.append(Fault(f"`<<` merges mappings, not {kind(entry)}", place=place))
                continue
            name = self.value(name_node)
            if not is_typed and not isinstance(name, str):
                name = name_node.value
            self.above.append(name_node.value)
            value = self.build(value_node, place)
            if name in items:
                line = items[name].place.rsplit(":", 2)[1]
                message = f"this key occurs twice, first in line {line}; remove one"
                self.faults.append(Fault(message, ".".join(self.above), place))
            else:
                items[name] = value
            self.above.pop()
        return {**merged, **items}


def to_yaml(config: Mapping[str, Any], place: str) -> str:
    """Convert a config that is passed as a value to YAML; references of OmegaConf stay references."""
    content: Any = config
    if type(config).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        content = OmegaConf.to_container(config, resolve=False)
    try:
        return dump(dict(content))
    except RecursionError:
        raise ConfigError(Fault("a part of this config contains itself", place=place)) from None
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        what = f"not {type(value).__name__} such as {repr(value)[:80]}"
        message = f"a config may contain texts, numbers, booleans, null, lists and mappings, {what}"
        raise ConfigError(Fault(message, place=place)) from None
