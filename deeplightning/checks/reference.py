"""The schema as a list of sections and keys, for whoever describes them: `explain`, the JSON Schema and the manual."""

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, is_dataclass
from typing import Any

from deeplightning.config import schema
from deeplightning.config.plugin_sections import config_class


def sections(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Yield each section of a config with its dotted path, the outer before the inner; of `Config` those of installed
    plug-ins too. A plain target counts as a value."""
    if cls is schema.Config:
        cls = config_class()
    yield path, cls
    hints = typing.get_type_hints(cls)
    for field in schema.keys(cls):
        for option in options(hints[field.name]):
            if is_dataclass(option) and option is not schema.Target:
                yield from sections(typing.cast(type, option), f"{path}.{field.name}".lstrip("."))


def options(hint: object) -> tuple[object, ...]:
    """Return the types in a hint: those of a union, else the hint itself."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


def default(field: Field[object]) -> Any:
    """Return the default of a key, or MISSING if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()
