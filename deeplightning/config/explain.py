"""Show where each value of a config was set, what it may be and what it means."""

import functools
import operator
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, is_dataclass
from typing import Any

from deeplightning.config import schema, strategy
from deeplightning.config.allowed import describe, other_section_hint, sections
from deeplightning.config.auto_values import source_of
from deeplightning.config.plugins import config_class
from deeplightning.config.report import Report
from deeplightning.config.signature_check import Meanings
from deeplightning.config.tree import KeyPath, dotted, entry_at, line
from deeplightning.faults import ConfigError, Fault, SetupError, nearest, not_installed, plugin_of, upwards
from deeplightning.signatures.signature import UNKNOWN
from deeplightning.words import printable

TEXT_COLUMN = 14  # where the text about a key starts, after its label
_COMMENT_COLUMN = 56  # where the comments start, unless a line is longer


def explain(report: Report, key: str = "") -> str:
    """Show the config with the place that set each value, or everything about one key.

    The whole config is YAML that loads to the same config again. For a key that is not set, show its documentation and
    default.

    Raises:
        ConfigError: there is no such key.
    """
    assert report.config is not None
    shown = report.config.public()
    try:
        path = _split_key(key, shown)
    except ConfigError:
        if (unset := _describe_unset(report, key)) is None:
            raise
        return "".join(f"{row}\n" for row in unset)
    value = functools.reduce(operator.getitem, path, shown)
    is_nested = isinstance(value, dict | list) and value
    return "".join(f"{row}\n" for row in (_annotated_lines if is_nested else _describe_key)(report, path, value))


# ---- the whole config


def _annotated_lines(report: Report, path: KeyPath, value: object, indent: str = "", before: str = "") -> Iterator[str]:
    """Yield YAML with one leaf per line, followed by the place that set it."""
    if not (isinstance(value, dict | list) and value):
        text = f"{before or indent}{line(value)}"
        assert report.config is not None
        filled = source_of(path, value, report.config)
        comment = origin(report, path) + (f"; {filled}" if filled else "")
        yield f"{text.ljust(_COMMENT_COLUMN)}  # {printable(comment)}"
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _annotated_lines(report, (*path, number), item, indent + "  ", f"{before or indent}- ")
            before = ""
    else:
        for name, item in value.items():
            start = f"{before or indent}{line(name)}:"
            is_nested = isinstance(item, dict | list) and item
            if is_nested:
                yield start
            yield from _annotated_lines(report, (*path, name), item, indent + "  ", "" if is_nested else f"{start} ")
            before = ""


def origin(report: Report, path: KeyPath) -> str:
    """Describe in a few words what set the value at a path."""
    return _machine_change(report, path) or _source_place(report, path)


def _source_place(report: Report, path: KeyPath) -> str:
    entry = entry_at(report.source.root, path)
    if entry is None:
        return "default"
    above = (entry_at(report.source.root, path[:n]) for n in range(len(path), 0, -1))
    written = next((each.written for each in above if each is not None and each.written), None)  # perhaps of a section
    is_shown = report.source.secrets.text_of(path) is not None  # as written, because it came from the environment
    return report.source.secrets.redact(entry.place + (f", from {written}" if written and not is_shown else ""))


def _machine_change(report: Report, path: KeyPath) -> str | None:
    """Describe how this machine changed a value; None if it did not."""
    assert report.config is not None
    key = ".".join(map(str, path))
    found = [n for n in report.config.notices or [] if n.key in upwards(key)]
    changes = [n for n in found if " → " in n.text] or found  # the other notices describe consequences of a change
    return changes[-1].text.partition(": ")[2] if changes else None


# ---- one key


def _describe_key(report: Report, path: KeyPath, value: Any) -> Iterator[str]:
    assert report.config is not None
    yield f"{dotted(path)}: {line(value)}"
    rows = _documentation_rows(report, path)
    if path == ("engine", "backend") and value is not None:
        rows.append(("strategy", ", ".join(strategy.classes_of(value))))
    if (source := source_of(path, value, report.config)) is not None:
        rows.append(("means", source))
    changed = _machine_change(report, path)
    rows.append(("set by", _source_place(report, path) + (f"; then {changed}" if changed else "")))
    for group in report.source.groups.values():  # the option groups around the key
        if group.key in upwards(".".join(map(str, path))):
            choice = f"{group.name}={','.join(group.chosen) or 'null'}  # {group.place}"
            rows.append(("option", f"{choice}; available: {', '.join(group.options())}"))
    yield from (f"  {word.ljust(TEXT_COLUMN - 4)}  {text}" for word, text in rows)


def _describe_unset(report: Report, key: str) -> list[str] | None:
    """Describe a key that is not set; None if there is no such key.

    Raises:
        SetupError: the section belongs to a plug-in that is not installed.
    """
    path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    if path[0] not in {field.name for field in schema.keys(config_class())}:
        if plugin := plugin_of(f"{path[0]}:"):
            raise SetupError(Fault(not_installed(plugin), key))
        return None
    if not (rows := _documentation_rows(report, path)):
        return None
    rows.append(("set by", "nothing; the default applies"))
    return [f"{key}: not set", *(f"  {word.ljust(TEXT_COLUMN - 4)}  {text}" for word, text in rows)]


def _documentation_rows(report: Report, path: KeyPath) -> list[tuple[str, str]]:
    """Return the type, meaning and default of a key, set or not, as rows; an empty list if there is no such key."""
    assert report.config is not None
    if "params" in path[:-1]:
        at = path.index("params")
        owner: Any = schema.value_at(report.config, path[:at])
        is_engine = isinstance(owner, schema.Engine)
        names = strategy.classes_of(schema.backend_of(owner)) if is_engine else [getattr(owner, "type", "")]
        return _param_rows(names, path[at + 1 :])
    section = schema.value_at(report.config, path[:-1])
    own = type(section) if is_dataclass(section) else None
    cls: Any = dict(sections(schema.Config)).get(dotted(path[:-1])) or own
    field = next((f for f in schema.keys(cls) if f.name == path[-1]), None) if cls is not None else None
    return _field_rows(field, typing.get_type_hints(cls)[field.name]) if field is not None else []


def _field_rows(field: Field[object], hint: object) -> list[tuple[str, str]]:
    example = field.metadata["example"]
    default = schema.plain(schema.default_of(field))
    return [
        ("type", describe(hint, field.metadata)),
        ("meaning", field.metadata["doc"] + (f"; for example `{example}`" if example else "")),
        ("default", "none, it must be given" if default is MISSING else line(default)),
    ]


def _param_rows(names: Sequence[str], path: KeyPath) -> list[tuple[str, str]]:
    """Return the rows of a param, from the first class that takes it."""
    meanings = Meanings()
    for name in names if len(path) == 1 else ():
        if parameter := meanings.parameters(name).get(str(path[0])):
            default = str(UNKNOWN) if parameter.default is UNKNOWN else line(parameter.default)
            return [
                ("type", parameter.annotation or "unknown"),
                ("default", "none, it must be given" if parameter.required else default),
                ("taken by", name),
            ]
    return []


# ---- paths


def _split_key(key: str, shown: Any) -> KeyPath:
    """Split a dotted key into names and list indexes.

    Raises:
        ConfigError: there is no such key; the message suggests the nearest.
    """
    path: KeyPath = ()
    value, rest = shown, key
    while rest:
        items = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        names = {dotted([n]): n for n in items}
        # A key of a free mapping may contain dots: take the longest match.
        name = max((n for n in names if rest == n or rest.startswith(f"{n}.")), key=len, default=None)
        if name is None:
            above = ".".join(map(str, path))
            if value is None:
                raise ConfigError(Fault(f"{above} is null; `{rest}` applies once it is set", key))
            word = rest.partition(".")[0]
            where = f"{above} has" if above else "there is"
            hint = nearest(word, names)
            hint = (hint.replace("mean ", f"mean {above}.", 1) if above else hint) or other_section_hint(rest)
            known = f" Known here: {', '.join(names)}" if names else ""
            raise ConfigError(Fault(f"{where} no key `{word}`.{hint}{known}", key, found=word))
        path, value, rest = (*path, names[name]), value[names[name]], rest[len(name) + 1 :]
    return path
