"""Describe in words what a key of the schema accepts, and suggest what a wrong key or value may mean."""

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from deeplightning.config import other_tools, plugins, schema
from deeplightning.config.report import Report
from deeplightning.config.schema import Target
from deeplightning.config.section_kinds import role_of
from deeplightning.config.signature_check import SIMPLE
from deeplightning.config.tree import Entry, KeyPath, kind, nodes
from deeplightning.faults import MAX_WORD_CHARACTERS, nearest, upwards


def foreign_key_hint(report: Report, key: str, section: str | None = None) -> str:
    """Return a hint with our name for a key of another tool. `section` replaces the key's own section; "": unknown."""
    found = other_tools.ours(key, section)
    mean = other_tools.key_of(found) if found is not None else None
    report.meant_keys |= {above for above in upwards(mean or "") if "." in above}
    same = mean is not None and mean.rpartition(".")[2] == key.rpartition(".")[2] and ".params." not in mean
    return f" Did you mean {mean}?" if same else other_tools.hint(found)


def other_section_hint(name: str) -> str:
    """Return ` Did you mean …?` with the full key if another section has a key of this name."""
    found = (path for path, cls in sections(schema.Config) if path and any(f.name == name for f in schema.keys(cls)))
    return next((f" Did you mean {path}.{name}?" for path in found), "")


def suggestion(key: str, given: Any, options: list[object]) -> str:
    """Return ` Did you mean …?` for a value that other tools use here, or for the bare name of a target."""
    role = role_of(key)
    found = other_tools.value(key, given)
    if found is None and given is not None:
        for option in options:
            if isinstance(option, type) and issubclass(option, Target):
                name = other_tools.class_of(role, given) or (given if isinstance(given, str) and "." in given else None)
                found = f"{{type: {name}}}" if name and len(name) < MAX_WORD_CHARACTERS else None
            elif typing.get_origin(option) is list and key == "train.callbacks":
                found = "[{type: MODULE.CLASS}]"
    return f" Did you mean {found}?" if found else ""


def _describe_type(option: Any) -> str:
    """Describe what a type accepts."""
    origin, simple = typing.get_origin(option), SIMPLE | {type(None): "null"}
    if (kind := origin or option) in simple:
        return simple[kind]
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(option)))
    if origin is dict:
        return "a mapping of names" if typing.get_args(option)[1] is not Any else "a mapping"
    if isinstance(option, type) and issubclass(option, Target):
        return "a target {type: MODULE.CLASS, params: {…}}"
    return "a mapping of " + ", ".join(f.name for f in schema.keys(option))


def describe(hint: object, metadata: Mapping[str, object] = types.MappingProxyType({})) -> str:
    """Describe what a key accepts."""
    words = " or ".join(dict.fromkeys(_describe_type(option) for option in schema.options_of(hint)))
    bounds = {"at least": metadata.get("low"), "at most": metadata.get("high")}
    return ", ".join([words, *(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)])


def sections(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Yield each section of a config with its dotted path, outer before inner; for `Config` also those of installed
    plug-ins. A plain target counts as a value."""
    if cls is schema.Config:
        cls = plugins.config_class()
    yield path, cls
    hints = typing.get_type_hints(cls)
    for field in schema.keys(cls):
        for option in schema.options_of(hints[field.name]):
            if is_dataclass(option) and option is not Target:
                yield from sections(typing.cast(type, option), f"{path}.{field.name}".lstrip("."))


def report_unknown(report: Report, cls: type, section: Entry, key: str, name: str) -> None:
    """Report an unknown key of a section, an instance of `cls` at `key`, with what it may mean."""
    known, prefix, item = [f.name for f in schema.keys(cls)], f"{key}." if key else "", section.value[name]
    here = prefix + name
    others = known if key else {*known, "_base_", *plugins.section_names()}
    hint = foreign_key_hint(report, here)
    if hint or not (hint := nearest(name, others)):
        _report_foreign_keys(report, item, here)
    hint = hint or other_section_hint(name)
    if not hint and issubclass(cls, Target) and "type" in section.value:  # an argument beside `params`
        hint = other_tools.hint(f"{prefix}params.{name}") if name.isidentifier() else ""
        report.meant_keys.add(f"{prefix}params")
    message = f"unknown key.{hint} Known here: {', '.join(known)}"
    if name.startswith("~"):
        message = f"there is no such key to remove: nothing below this file sets `{prefix}{name[1:]}`"
    report.fault(message, here, item.place, found=name, allowed=", ".join(known))
    report.faulty_keys |= {prefix + other for other in known if f"mean {other}?" in hint}


def report_misfit(report: Report, hint: object, entry: Entry, key: str, path: KeyPath) -> None:
    """Report a value that does not match its type in the schema, with what it may mean."""
    value, options, allowed = entry.value, schema.options_of(hint), describe(hint)
    found, near = kind(entry), ""
    if (written := report.source.secrets.text_of(path)) is not None:
        found = f"the value of {written}"
    else:
        near = suggestion(key, value, options)
        if not near and isinstance(value, str):
            literals = [option for option in options if typing.get_origin(option) is typing.Literal]
            near = nearest(value, [str(word) for option in literals for word in typing.get_args(option)])
        _report_foreign_keys(report, entry, key)
    report.wrong(allowed, found, key, entry.place, near)


def _report_foreign_keys(report: Report, entry: Entry, key: str) -> None:
    """Report our names for the keys of other tools inside a value that contains no keys of ours."""
    known = [(path, item) for path, item in nodes(entry) if path and path[-1] in other_tools.NAMES]
    for path, item in reversed(known):
        here = ".".join([key, *map(str, path)])
        if hint := foreign_key_hint(report, here, section=""):
            report.fault(f"unknown key.{hint}", here, item.place, found=str(path[-1]))
