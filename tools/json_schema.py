"""Make `configs/schema.json`, the JSON Schema (draft 2020-12) with which YAML editors complete and check a config:

    python tools/json_schema.py >configs/schema.json

It describes a file before `_base_` files are read and references are resolved. So a key of any type may contain a
reference such as `${data.root}`, and no key is required. Only the loader checks missing keys, targets and their params,
keys that contradict each other, ranges with gaps (`every_n_epochs`), and `1.0` for a whole number, which JSON does not
distinguish from `1`.

Language servers differ in their support of the draft; only features with the same meaning in draft 7 are used.
"""

import json
import typing
from dataclasses import MISSING, Field, is_dataclass
from typing import Any

from deeplightning.config import schema
from deeplightning.config.allowed import describe, sections
from deeplightning.config.plugins import config_class
from deeplightning.config.schema import options_of
from deeplightning.config.signature_check import SIMPLE
from deeplightning.config.tree import line, parse, plain

Json = dict[str, Any]

REFERENCE = r"\$\{|^\?\?\?$"  # `???`: a value that a further file or an override gives
TARGET_NAME = r"^[^\s.]+(\.[^\s.]+)*$|" + REFERENCE  # without a dot, a short name

_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", list: "array"}
_WORDS = {_TYPES[kind]: words for kind, words in SIMPLE.items()} | {"null": "null", "object": "a mapping"}


def json_schema() -> Json:
    """Return the JSON Schema of a config file."""
    whole = config_class()
    parts = {cls: path for path, cls in sections(schema.Config)} | {schema.Target: ""}
    definitions = {
        "reference": {
            "title": "reference",
            "description": "${a.b} is the value of another key, ${oc.env:NAME} that of an environment variable",
            "type": "string",
            **_reference("one of the allowed values"),
        }
    }
    definitions |= {cls.__name__: _section(cls, path) for cls, path in parts.items() if cls is not whole}
    config = _section(whole, "") | {"title": "Deep Lightning config", "type": "object"}
    del config["pattern"], config["patternErrorMessage"]
    options: Json = {
        "propertyNames": {"pattern": r"^[A-Za-z_][\w-]*(/[A-Za-z_][\w-]*)*$"},
        "additionalProperties": {
            "type": ["string", "array", "null"],
            "items": {"type": "string"},
        },
    }
    base = {
        "title": "_base_",
        "description": "a config file to build on, or several, by paths relative to this file; {GROUP: OPTION} takes "
        "GROUP/OPTION.yaml and places it under the key GROUP. This file overrides them, and a key `~name` removes one "
        "of theirs",
        "type": ["string", "array", "object", "null"],
        "items": {"type": ["string", "object"], **options},
        **options,
        "examples": ["base.yaml", ["base.yaml", {"model": "resnet18"}]],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **config,
        "properties": {"_base_": base, **config["properties"]},
        "$defs": definitions,
    }


# ---- schemas of sections, keys and values


def _section(cls: type, path: str) -> Json:
    hints = typing.get_type_hints(cls)
    return {
        "title": path or cls.__name__,
        "description": (cls.__doc__ or "").strip(),
        "type": ["object", "string", "null"],  # an empty section has its defaults
        **_reference("a mapping"),
        "properties": {f.name: _key(cls, f, hints[f.name], path) for f in schema.keys(cls)},
        "patternProperties": {"^~": {"description": "removes the key that a file of `_base_` has set"}},
        "additionalProperties": False,
    }


def _key(cls: type, field: Field[object], hint: object, path: str) -> Json:
    doc, example = field.metadata["doc"], field.metadata["example"]
    # Editors show title, description and examples when hovering over a key; few show type and default.
    value = schema.default_of(field)
    is_section = all(is_dataclass(option) and option is not schema.Target for option in options_of(hint))
    facts = [] if is_section else [f"Type: {describe(hint, field.metadata)}"]
    if value is MISSING:
        facts.append("Default: none, it must be given")
    elif not is_dataclass(value):
        facts.append(f"Default: {line(value)}")
    about: Json = {"title": f"{path}.{field.name}".lstrip("."), "description": "\n\n".join([doc, *facts])}
    if value is not MISSING and not is_dataclass(value):
        about["default"] = value
    if example:
        written = plain(parse(example, "example", []))
        is_type = isinstance(written, str) and _sections_in(options_of(hint))[0]
        about["examples"] = [{"type": written} if is_type else written]
    bounds = {"minimum": field.metadata["low"], "maximum": field.metadata["high"]}
    if issubclass(cls, schema.Target) and field.name == "type":
        bounds |= {"pattern": TARGET_NAME, "patternErrorMessage": "must be MODULE.NAME, such as torch.optim.SGD"}
    return about | _value(hint, {name: bound for name, bound in bounds.items() if bound is not None})


def _value(hint: object, bounds: Json) -> Json:
    found = options_of(hint)
    section, named = _sections_in(found)
    if section is None and named is None:
        return _simple(found, bounds)
    one: Json = {"$ref": f"#/$defs/{section.__name__}"} if section else {}
    if named:
        several: Json = {
            "type": ["object", "string", "null"],
            **_reference("a mapping"),
            "additionalProperties": {"$ref": f"#/$defs/{named.__name__}"},
            "patternProperties": {"^~": {}},
        }
        return {"if": _several_by_name(section), "then": several, "else": one} if section else several
    others = [option for option in found if option is not section]
    has_others = any(option is not type(None) for option in others)
    return {"if": {"type": "object"}, "then": one, "else": _simple(others, bounds)} if has_others else one


def _sections_in(found: typing.Iterable[object]) -> tuple[type | None, type | None]:
    """Return the section among some types, and the section of which a mapping has several by name."""
    inner = [typing.get_args(option)[1] for option in found if typing.get_origin(option) is dict]
    section, named = (
        next((o for o in some if isinstance(o, type) and is_dataclass(o)), None) for some in (found, inner)
    )
    return section, named


def _simple(found: typing.Iterable[Any], bounds: Json) -> Json:
    """Return the schema of a value that is not a section."""
    words: list[object] = []
    types: list[str] = []
    more: Json = {}
    for option in found:
        origin, inner = typing.get_origin(option), typing.get_args(option)
        if origin is typing.Literal:
            words += inner
        elif origin is list:
            types.append("array")
            more["items"] = _item(inner[0])
        elif origin is dict:
            types += ["object"] if inner[1] is not Any else ["object", "null"]
            more |= {} if inner[1] is Any else {"additionalProperties": _simple([inner[1]], {})}
        else:
            types.append(_TYPES[option])
    if words and types in ([], ["null"]):
        return {"anyOf": [{"enum": words + [None] * len(types)}, {"$ref": "#/$defs/reference"}]}
    if "string" not in types:
        more |= _reference(" or ".join(dict.fromkeys(_WORDS[name] for name in types)))
        types.append("string")
    kind: Json = {"type": types[0] if len(types) == 1 else types, **more, **bounds}
    return {"anyOf": [{"enum": words}, kind]} if words else kind


def _reference(else_allowed: str) -> Json:
    """Return the schema of a reference, with an error message that names the other allowed values."""
    return {"pattern": REFERENCE, "patternErrorMessage": f"must be {else_allowed}, or a reference such as ${{a.b}}"}


def _item(hint: object) -> Json:
    """Return the schema of a list item, which must not be `null`."""
    if not is_dataclass(hint):
        return _simple(options_of(hint), {})
    return {"allOf": [{"$ref": f"#/$defs/{typing.cast(type, hint).__name__}"}], "type": ["object", "string"]}


def _several_by_name(section: object) -> Json:
    """Return the schema of a mapping that is several targets by name, not one target, by the loader's rule, in which a
    reference may replace a mapping."""
    return {
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"not": {"enum": [f.name for f in schema.keys(section)]}},
        "patternProperties": {"^~": {}},
        "additionalProperties": {"type": ["object", "string"], "pattern": REFERENCE},
    }


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
