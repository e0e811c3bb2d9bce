"""YAML text with positions becomes one tree of values: `_base_` files under their children, overrides on top,
interpolations resolved. Every value knows the place that set it.

The grammar of scalars is YAML 1.2's (`off` is a word, `1e-3` a number), with `_` allowed between digits.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from deeplightning.config.fault import ConfigError, Fault

MAX_BYTES = 1_000_000
MAX_VALUES = 50_000  # after aliases are followed: a few lines of anchors can stand for billions of values
MAX_DEPTH = 60
MAX_BASES = 50

Path_ = tuple[str | int, ...]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf", ".Inf", ".INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


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

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> ScalarNode:
    style = None if isinstance(scalar(text), str) else "'"
    if re.search("[\x85\u2028\u2029]", text):
        style = '"'  # in the others they are line breaks, which YAML folds
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def dump(plain: Any) -> str:
    """Plain values as YAML text that `read` turns into the same values."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass
class Entry:
    """One value of a config and the place that set it.

    `value` is a scalar, a dict of name to Entry, or a list of Entry. `place` of a mapping's item is that of its key.
    """

    value: Any
    place: str
    at: str = ""  # the place of the value itself, where the entry's is that of its key


@dataclass
class Secrets:
    """What came from the environment: never printed, saved or tracked."""

    texts: dict[Path_, str] = field(default_factory=dict)  # path of a value → how it was written, `${…}` and all
    values: dict[str, str] = field(default_factory=dict)  # value → the expression it came from
    words: set[Path_] = field(default_factory=set)  # paths of values that hold a variable's text, or its default

    def is_word(self, path: Path_) -> bool:
        """Whether a text at a path stands for a number too: a variable holds nothing but text."""
        return any(path[:n] in self.words for n in range(len(path), 0, -1))

    def text_of(self, path: Path_) -> str | None:
        """How the value at a path was written, if it, or the section it lies in, came from the environment."""
        return next((self.texts[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.texts), None)

    def redact(self, text: str) -> str:
        """Text without what came from the environment, plain or as Python's repr and JSON write it."""
        for value in sorted(self.values, key=len, reverse=True):
            for form in dict.fromkeys((value, repr(value)[1:-1], json.dumps(value)[1:-1])):
                text = text.replace(form, self.values[value])
        return text


@dataclass
class Source:
    """A config as it was written: the merged tree, and where each file stands."""

    root: Entry
    folder: Path
    faults: list[Fault]
    secrets: Secrets


def read(path: str | Path, overrides: list[str] | None = None) -> Source:
    """Reads a config file, the files it builds on, and the overrides.

    Raises:
        ConfigError: when there is no tree to go on with. Lesser faults stand in the result.
    """
    path = Path(os.path.expanduser(path))  # noqa: PTH111  (Path's fails for an unknown ~user)
    faults: list[Fault] = []
    root = _with_bases(path, [], faults)
    for text in overrides or []:
        try:
            _override(root, text)
        except ConfigError as error:
            faults += error.faults
    secrets = _interpolate(root, faults)
    return Source(root, path.absolute().parent, faults, secrets)


# ---- one file


def _with_bases(path: Path, trail: list[Path], faults: list[Fault]) -> Entry:
    """The tree of a file, laid over the trees of its `_base_` files."""
    here = Path(os.path.realpath(path))  # unlike Path.resolve, without an error for links that go round
    if here in trail:
        chain = " → ".join(_short(p) for p in [*trail[trail.index(here) :], here])
        raise ConfigError(Fault(f"these files build on each other in a circle: {chain}; remove one `_base_`"))
    if len(trail) >= MAX_BASES:
        raise ConfigError(Fault(f"more than {MAX_BASES} files build on each other", place=_short(path)))
    tree = _parse(_text(path), _short(path), faults)
    if not isinstance(tree.value, dict):
        what = "is empty" if tree.value is None else f"holds {kind(tree)}"
        raise ConfigError(Fault(f"this file {what}; a config is a mapping of keys such as `data:`", place=_short(path)))
    base = tree.value.pop("_base_", None)
    if base is None or base.value is None:
        return tree
    names = base.value if isinstance(base.value, list) else [base]
    merged = Entry({}, tree.place)
    for name in names:
        if not isinstance(name.value, str):
            raise ConfigError(Fault(f"a `_base_` is the path of a file, not {kind(name)}", "_base_", name.place))
        file = path.parent / os.path.expanduser(name.value)  # noqa: PTH111  (Path's fails for an unknown ~user)
        if not os.path.isfile(file):  # noqa: PTH113  (Path's fails for a name that is too long)
            raise ConfigError(Fault(f"there is no file {_short(file)} to build on", "_base_", name.place))
        merged = _merge(merged, _with_bases(file, [*trail, here], faults))
    return _merge(merged, tree)


def _text(path: Path) -> str:
    place = _short(path)
    if os.path.isdir(path):  # noqa: PTH112  (Path's fails for a name that is too long)
        raise ConfigError(Fault("this is a folder; name the YAML file in it", place=place))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        near = sorted(p.name for p in path.parent.glob("*.y*ml"))[:8] if path.parent.is_dir() else []
        hint = f"; {_short(path.parent)} holds {', '.join(near)}" if near else ""
        raise ConfigError(Fault(f"there is no such config file{hint}", place=place)) from None
    except OSError as error:
        raise ConfigError(Fault(f"cannot be read: {error.strerror}", place=place)) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(Fault(f"a config has at most {MAX_BYTES // 1000} kB; is this the right file?", place=place))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not text in UTF-8 (byte {error.start} is {data[error.start]:#04x}); is this the right file?"
        raise ConfigError(Fault(message, place=place)) from None
    return text


def _parse(text: str, name: str, faults: list[Fault]) -> Entry:
    """YAML text as a tree; what is wrong with single values goes to `faults`, what ends the reading is raised."""
    try:
        too_deep = _too_deep(text)
        if too_deep is not None:
            place = f"{name}:{too_deep.line + 1}:{too_deep.column + 1}"
            raise ConfigError(Fault(f"nested more than {MAX_DEPTH} deep", place=place))
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(Fault(_syntax(error, text, mark), place=place)) from None
    except yaml.YAMLError as error:
        raise ConfigError(Fault(f"not YAML: {str(error).splitlines()[0]}", place=name)) from None
    if node is None:
        return Entry(None, f"{name}:1:1")
    return _Builder(name, faults).build(node)


def _too_deep(text: str) -> Any:
    """Where nesting passes the bound, if it does. Composing descends on the C stack and would crash the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return event.start_mark
    return None


def _syntax(error: yaml.MarkedYAMLError, text: str, mark: Any) -> str:
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
        if self.count > MAX_VALUES:
            raise self.stop(node, f"this config stands for more than {MAX_VALUES} values; write out fewer aliases")
        if id(node) in self.open:
            raise self.stop(node, "an alias that stands inside its own anchor has no end; write the value out")
        if len(self.open) >= MAX_DEPTH:
            raise self.stop(node, f"nested more than {MAX_DEPTH} deep")
        if node.tag.startswith("tag:yaml.org,2002:python") or not node.tag.startswith("tag:yaml.org,2002:"):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.faults.append(Fault(f"the tag {tag} is not allowed: a config holds plain values only", place=at))
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
                message = f"this key stands twice, first in line {line}; remove one"
                self.faults.append(Fault(message, ".".join([*self.above, name]), place))
            else:
                items[name] = value
        return {**merged, **items}


def _short(path: Path) -> str:
    """A path as the user would write it: relative where it lies below the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


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


# ---- several files


def _merge(base: Entry, top: Entry) -> Entry:
    """`top` over `base`: mappings are merged at any depth, anything else is replaced; a key `~name` removes `name`."""
    if not (isinstance(base.value, dict) and isinstance(top.value, dict)):
        return top
    merged = dict(base.value)
    for name, entry in top.value.items():
        if name.startswith("~") and name[1:] in base.value:
            merged.pop(name[1:], None)
        else:
            merged[name] = _merge(merged[name], entry) if name in merged else entry
    return Entry(merged, top.place, top.at)


# ---- overrides


def _override(root: Entry, text: str) -> None:
    """Applies one override to the tree: `key=value`, `~key`, or `+list=[x]`."""
    place = f"override {text}"
    sign = text[:1] if text[:1] in ("~", "+") else ""
    name, equals, value = text.removeprefix(sign).partition("=")
    name = name.strip()
    parts = name.split(".")
    if not all(parts) or (equals == "") != (sign == "~"):
        raise ConfigError(Fault("an override is key=value, ~key (remove), or +list=[x] (append)", place=place))
    new = None if sign == "~" else _override_value(value, name, place)
    items, last = _reach(root, parts, place, make=sign != "~")
    if new is None:
        if isinstance(items, dict) and last not in items:
            raise ConfigError(Fault("there is no such key to remove", name, place))
        del items[last]
    elif sign == "+":
        old = items[last] if isinstance(items, list) or last in items else Entry([], place)
        before = [] if old.value is None else old.value
        if not isinstance(before, list) or not isinstance(new.value, list):
            raise ConfigError(Fault(f"`+` appends a list to a list; this is {kind(old)} and {kind(new)}", name, place))
        items[last] = Entry([*before, *new.value], place)
    else:
        items[last] = new


def _override_value(text: str, name: str, place: str) -> Entry:
    """The value of an override, everything in it set at `place`."""
    problems: list[Fault] = []
    try:
        value = _parse(text, place, problems)
    except ConfigError as error:
        problems = error.faults
    if problems:
        raise ConfigError([Fault(fault.message, name, place) for fault in problems])
    return _replaced(value, place)


def _reach(entry: Entry, parts: list[str], place: str, make: bool) -> tuple[Any, Any]:
    """The mapping or list that the last of `parts` stands in, and its key or index there. `make` adds mappings on the
    way where there is nothing."""
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        if entry.value is None and make:
            entry.value = {}
        if isinstance(entry.value, list):
            length = len(entry.value)
            if not re.fullmatch("-?[0-9]{1,9}", part) or not -length <= int(part) < length:
                message = f"`{above}` is a list of {length}; `{part}` is none of its items 0 to {length - 1}"
                raise ConfigError(Fault(message, place=place))
            index: Any = int(part)
        elif isinstance(entry.value, dict):
            index = part
        else:
            raise ConfigError(Fault(f"`{above}` is {kind(entry)}; `{part}` cannot stand under it", place=place))
        if depth == len(parts) - 1:
            break
        if isinstance(entry.value, dict) and part not in entry.value:
            if not make:
                raise ConfigError(Fault("there is no such key to remove", ".".join(parts), place))
            entry.value[part] = Entry({}, place)
        entry = entry.value[index]
    return entry.value, index


def _replaced(entry: Entry, place: str) -> Entry:
    """The same values, all set at `place`."""
    if isinstance(entry.value, dict):
        return Entry({name: _replaced(item, place) for name, item in entry.value.items()}, place)
    if isinstance(entry.value, list):
        return Entry([_replaced(item, place) for item in entry.value], place)
    return Entry(entry.value, place)


# ---- interpolation


def leaves(entry: Entry, path: Path_ = ()) -> Iterator[tuple[Path_, Entry]]:
    """Every scalar of a tree with its path."""
    if isinstance(entry.value, dict):
        for name, item in entry.value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(entry.value, list):
        for number, item in enumerate(entry.value):
            yield from leaves(item, (*path, number))
    else:
        yield path, entry


def plain(entry: Entry, change: Callable[[Any], Any] = lambda value: value) -> Any:
    """A tree without its places."""
    if isinstance(entry.value, dict):
        return {name: plain(item, change) for name, item in entry.value.items()}
    if isinstance(entry.value, list):
        return [plain(item, change) for item in entry.value]
    return change(entry.value)


def _interpolate(root: Entry, faults: list[Fault]) -> Secrets:
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
                results.append((entry, _resolve(tree, path)))
            except (OmegaConfBaseException, RecursionError) as error:
                faults.append(Fault(_interpolation_words(error, entry.value, bool(seen)), _dotted(path), entry.place))
            if seen:
                secrets.words.add(path)
            set_ = {name: value for name, value in seen.items() if value is not None}
            if set_:
                secrets.texts[path] = entry.value
                secrets.values.update((value, f"${{oc.env:{name}}}") for name, value in set_.items() if _tells(value))
    for entry, value in results:
        entry.value = _entries(value, entry.place)
    return secrets


def _resolve(tree: Any, path: Path_) -> Any:
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


def _interpolation_words(error: BaseException, text: str, from_environment: bool) -> str:
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


def _dotted(path: Path_) -> str:
    return ".".join(map(str, path))
