"""YAML text with positions becomes one tree of values: `_base_` files under their children, overrides on top,
interpolations resolved. Every value knows the place that set it.

The grammar of scalars is YAML 1.2's (`off` is a word, `1e-3` a number), with `_` allowed between digits.
"""

import os
import re
from collections.abc import Callable, Iterator
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
_INT = re.compile(r"[-+]?\d+(_\d+)*$")
_FLOAT = re.compile(r"[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?$")
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
    if _INT.match(text):
        return int(text) if len(text) < 4000 else text
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return text


class _Dumper(yaml.SafeDumper):
    """Writes what `scalar` reads back as the same value; never an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> ScalarNode:
    quoted = not isinstance(scalar(text), str)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if quoted else None)


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

    texts: dict[Path_, str] = field(default_factory=dict)  # path of a value → its text with `${oc.env:…}` kept
    values: dict[str, str] = field(default_factory=dict)  # value → the expression it came from

    def redact(self, text: str) -> str:
        for value in sorted(self.values, key=len, reverse=True):
            text = text.replace(value, self.values[value])
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
    path = Path(path).expanduser()
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
    here = path.resolve()
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
        file = path.parent / Path(name.value).expanduser()
        if not file.is_file():
            raise ConfigError(Fault(f"there is no file {_short(file)} to build on", "_base_", name.place))
        merged = _merge(merged, _with_bases(file, [*trail, here], faults))
    return _merge(merged, tree)


def _text(path: Path) -> str:
    place = _short(path)
    if path.is_dir():
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
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(Fault(_syntax(error, text, mark), place=place)) from None
    except yaml.YAMLError as error:
        raise ConfigError(Fault(f"not YAML: {str(error).splitlines()[0]}", place=name)) from None
    except RecursionError:
        raise ConfigError(Fault(f"nested more than {MAX_DEPTH} deep", place=name)) from None
    if node is None:
        return Entry(None, f"{name}:1:1")
    return _Builder(name, faults).build(node)


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
            value = self.build(value_node, place)
            if name == "<<" and not name_node.style:
                for entry in value.value if isinstance(value.value, list) else [value]:
                    if isinstance(entry.value, dict):
                        merged = {**entry.value, **merged}
                    else:
                        self.faults.append(Fault(f"`<<` merges mappings, not {kind(entry)}", place=place))
            elif name in items:
                first = items[name].place.split(":", 1)[-1]
                self.faults.append(Fault(f"this key stands twice, first at {first}; remove one", name, place))
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
    parts = name.strip().split(".")
    if not all(parts) or (equals == "") != (sign == "~"):
        raise ConfigError(Fault("an override is key=value, ~key (remove), or +list=[x] (append)", place=place))
    section = root
    for part in parts[:-1]:
        section = _child(section, part, place, make=sign != "~")
    last = parts[-1]
    if sign == "~":
        if isinstance(section.value, list):
            section.value.remove(_child(section, last, place))
        elif not isinstance(section.value, dict) or last not in section.value:
            raise ConfigError(Fault("there is no such key to remove", ".".join(parts), place))
        else:
            del section.value[last]
        return
    problems: list[Fault] = []
    new = _parse(value, place, problems)
    if problems:
        raise ConfigError([Fault(fault.message, name, place) for fault in problems])
    new = _replaced(new, place)
    if sign == "+":
        old = _child(section, last, place, make=True)
        if old.value == {}:
            old.value = []
        if not isinstance(old.value, list) or not isinstance(new.value, list):
            raise ConfigError(Fault(f"`+` appends a list to a list; this is {kind(old)} and {kind(new)}", name, place))
        old.value = [*old.value, *new.value]
    elif isinstance(section.value, list):
        section.value[section.value.index(_child(section, last, place))] = new
    else:
        section.value[last] = new


def _child(section: Entry, part: str, place: str, make: bool = False) -> Entry:
    if isinstance(section.value, list):
        if part.lstrip("-").isdigit() and -len(section.value) <= int(part) < len(section.value):
            return section.value[int(part)]
        raise ConfigError(Fault(f"`{part}` is no item of a list of {len(section.value)}", place=place))
    if section.value is None and make:
        section.value = {}
    if not isinstance(section.value, dict):
        raise ConfigError(Fault(f"`{part}` cannot stand under {kind(section)}", place=place))
    if part not in section.value:
        if not make:
            raise ConfigError(Fault(f"there is no key `{part}`", place=place))
        section.value[part] = Entry({}, place)
    return section.value[part]


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
    """Resolves every `${…}` in place. Resolving a second time, with a mark in place of each `${oc.env:…}`, shows
    which values came from the environment, directly or through others."""
    secrets = Secrets()
    waiting = [(path, entry) for path, entry in leaves(root) if isinstance(entry.value, str) and "${" in entry.value]
    if not waiting:
        return secrets
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    marks: dict[str, str] = {}

    def mark(value: Any) -> Any:
        return _mark_environment(value, marks) if isinstance(value, str) else value

    clear, marked = OmegaConf.create(plain(root)), OmegaConf.create(plain(root, mark))
    results = []
    for path, entry in waiting:
        try:
            results.append((path, entry, _resolve(clear, path), _resolve(marked, path)))
        except (OmegaConfBaseException, RecursionError) as error:
            faults.append(Fault(_interpolation_words(error, entry.value), _dotted(path), entry.place))
    for path, entry, value, shown in results:
        text = _unmark(shown, marks)
        if text != shown:
            _set_aside(secrets, path, value, text)
            secrets.values.update(_environment_values(text))
        entry.value = _entries(value, entry.place)
    return secrets


def _resolve(conf: Any, path: Path_) -> Any:
    from omegaconf import OmegaConf

    for part in path[:-1]:
        conf = conf._get_node(part)
    value = conf[path[-1]]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _set_aside(secrets: Secrets, path: Path_, value: Any, text: Any) -> None:
    """Notes the texts of a resolved value; a reference to a whole section brings several."""
    if isinstance(text, dict):
        for name in text:
            _set_aside(secrets, (*path, name), value[name], text[name])
    elif isinstance(text, list):
        for number, item in enumerate(text):
            _set_aside(secrets, (*path, number), value[number], item)
    elif text != value and isinstance(text, str):
        secrets.texts[path] = text


def _entries(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {name: Entry(_entries(item, place), place) for name, item in value.items()}
    if isinstance(value, list):
        return [Entry(_entries(item, place), place) for item in value]
    return value


def _environment_expressions(text: str) -> Iterator[str]:
    """Each `${oc.env:…}` of a text, with its closing brace, braces inside counted."""
    start = text.find("${oc.env:")
    while start >= 0:
        depth = 0
        for end in range(start, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0 and text[end] == "}":
                break
        else:
            return
        yield text[start : end + 1]
        start = text.find("${oc.env:", end)


def _mark_environment(text: str, marks: dict[str, str]) -> str:
    for expression in set(_environment_expressions(text)):
        mark = f"\x1a{len(marks)}\x1a"
        marks[mark] = expression
        text = text.replace(expression, mark)
    return text


def _unmark(value: Any, marks: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _unmark(item, marks) for name, item in value.items()}
    if isinstance(value, list):
        return [_unmark(item, marks) for item in value]
    if isinstance(value, str) and "\x1a" in value:
        for mark, expression in marks.items():
            value = value.replace(mark, expression)
    return value


def _environment_values(text: Any) -> dict[str, str]:
    """Values of the variables that a text names, as far as they can be told from other words: not the shortest, and
    not a folder of this machine, which stands in every message about a file."""
    if isinstance(text, dict | list):
        found: dict[str, str] = {}
        for item in text.values() if isinstance(text, dict) else text:
            found |= _environment_values(item)
        return found
    names = {}
    for expression in _environment_expressions(text if isinstance(text, str) else ""):
        name = expression[len("${oc.env:") : -1].partition(",")[0].strip()
        value = os.environ.get(name, "")
        if len(value) >= 4 and not Path(value).exists():
            names[value] = f"${{oc.env:{name}}}"
    return names


def _interpolation_words(error: BaseException, text: str) -> str:
    if isinstance(error, RecursionError) or "Recursive interpolation" in str(error):
        return f"`{text}` refers to itself"
    first = str(error).splitlines()[0]
    if "Environment variable" in first:
        name = first.split("'")[1] if "'" in first else text
        return f"`{text}`: the environment variable {name} is not set; set it, or give a default: ${{oc.env:{name},…}}"
    if "Interpolation key" in first:
        return f"`{text}` refers to a key that is not there"
    return f"`{text}` cannot be resolved: {first}"


def _dotted(path: Path_) -> str:
    return ".".join(map(str, path))
