"""What a key of the schema takes, in words, and what a value that does not fit may mean."""

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


def known_elsewhere(report: Report, key: str, section: str | None = None) -> str:
    """Return a sentence that says what a key of another tool is called here; `section` is its section, if that is
    unknown."""
    found = other_tools.ours(key, section)
    mean = other_tools.key_of(found) if found is not None else None
    report.meant |= {above for above in upwards(mean or "") if "." in above}
    same = mean is not None and mean.rpartition(".")[2] == key.rpartition(".")[2] and ".params." not in mean
    return f" Did you mean {mean}?" if same else other_tools.hint(found)


def key_elsewhere(name: str) -> str:
    """Return ` Did you mean …?` with the whole key, where a word is a key of another section."""
    found = (path for path, cls in sections(schema.Config) if path and any(f.name == name for f in schema.keys(cls)))
    return next((f" Did you mean {path}.{name}?" for path in found), "")


def suggestion(key: str, given: Any, options: list[object]) -> str:
    """Return ` Did you mean …?` for a value that other tools have here, or the name of a target alone."""
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


def _words(option: Any) -> str:
    """Return what a type allows, in words."""
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
    """Return what a key takes, in words."""
    words = " or ".join(dict.fromkeys(_words(option) for option in schema.options_of(hint)))
    bounds = {"at least": metadata.get("low"), "at most": metadata.get("high")}
    return ", ".join([words, *(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)])


def sections(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Yield each section of a config with its dotted path, the outer before the inner; of `Config` those of installed
    plug-ins too. A plain target counts as a value."""
    if cls is schema.Config:
        cls = plugins.config_class()
    yield path, cls
    hints = typing.get_type_hints(cls)
    for field in schema.keys(cls):
        for option in schema.options_of(hints[field.name]):
            if is_dataclass(option) and option is not Target:
                yield from sections(typing.cast(type, option), f"{path}.{field.name}".lstrip("."))


def report_unknown(report: Report, cls: type, section: Entry, key: str, name: str) -> None:
    """Report a key that a section, an instance of `cls` at `key`, does not have, with what it may mean."""
    known, prefix, item = [f.name for f in schema.keys(cls)], f"{key}." if key else "", section.value[name]
    here = prefix + name
    others = known if key else {*known, "_base_", *plugins.section_names()}
    hint = known_elsewhere(report, here)
    if hint or not (hint := nearest(name, others)):
        _foreign(report, item, here)
    hint = hint or key_elsewhere(name)
    if not hint and issubclass(cls, Target) and "type" in section.value:  # an argument beside `params`
        hint = other_tools.hint(f"{prefix}params.{name}") if name.isidentifier() else ""
        report.meant.add(f"{prefix}params")
    message = f"unknown key.{hint} Known here: {', '.join(known)}"
    if name.startswith("~"):
        message = f"there is no such key to remove: nothing below this file sets `{prefix}{name[1:]}`"
    report.fault(message, here, item.place, found=name, allowed=", ".join(known))
    report.answered |= {prefix + other for other in known if f"mean {other}?" in hint}


def report_misfit(report: Report, hint: object, entry: Entry, key: str, path: KeyPath) -> None:
    """Report a value that does not fit the type that the schema gives, with what it may mean."""
    value, options, allowed = entry.value, schema.options_of(hint), describe(hint)
    found, near = kind(entry), ""
    if (written := report.source.secrets.text_of(path)) is not None:
        found = f"what {written} gives"
    else:
        near = suggestion(key, value, options)
        if not near and isinstance(value, str):
            literals = [option for option in options if typing.get_origin(option) is typing.Literal]
            near = nearest(value, [str(word) for option in literals for word in typing.get_args(option)])
        _foreign(report, entry, key)
    report.wrong(allowed, found, key, entry.place, near)


def _foreign(report: Report, entry: Entry, key: str) -> None:
    """Report what the keys of other tools inside a value are here, where nothing inside it is a key of ours."""
    known = [(path, item) for path, item in nodes(entry) if path and path[-1] in other_tools.NAMES]
    for path, item in reversed(known):
        here = ".".join([key, *map(str, path)])
        if hint := known_elsewhere(report, here, section=""):
            report.fault(f"unknown key.{hint}", here, item.place, found=str(path[-1]))
