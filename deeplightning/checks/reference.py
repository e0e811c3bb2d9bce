"""The schema becomes the page that people read: every key with its type, its default and its sentence.

`python -m deeplightning.checks.reference FILE` rewrites FILE from the line `START` on; the lines above are kept.
"""

import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from typing import Any

from deeplightning.checks.combination_tables import engines, table
from deeplightning.config import schema
from deeplightning.config.tree import dump

START = "<!-- From here on this page is made: python -m deeplightning.checks.reference docs/config.md -->"
COMBINATIONS = (
    "Each message names both keys, their values and places, and the remedy; the number is the exit code. What concerns "
    "a backend is refused on every machine."
)


ON_CPU = (
    "[Engines](engines.md) explains the words. Over CPU processes, each cell as the tests run it; what has a "
    "number is refused by `check`, with that exit code:"
)
ON_GPUS = "On GPUs, by the same rules; [GPUs](gpu.md) says what has been run:"


def reference() -> str:
    """The tables of all keys, as Markdown."""
    parts = [START]
    for path, cls in sections(schema.Config):
        intro = (cls.__doc__ or "").strip()
        parts += [f"## {path or 'Top level'}", intro, "| Key | Value | Default | Meaning |\n|---|---|---|---|"]
        for field in schema.keys(cls):
            hint = typing.get_type_hints(cls)[field.name]
            name = f"{path}.{field.name}".lstrip(".")
            cells = (f"`{name}`", _type(hint, field, name), _default(field), _meaning(field))
            parts[-1] += "\n| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    parts += ["## Settings that do not go together", COMBINATIONS, table()]
    parts += ["## Settings with each engine", ON_CPU, engines(), ON_GPUS, engines(gpus=2)]
    return "\n\n".join(parts) + "\n"


def sections(cls: type, path: str = "") -> Iterator[tuple[str, type]]:
    """Each section of a config with its dotted path, the outer before the inner. A plain target counts as a value."""
    yield path, cls
    hints = typing.get_type_hints(cls)
    for field in schema.keys(cls):
        for option in options(hints[field.name]):
            if is_dataclass(option) and option is not schema.Target:
                yield from sections(typing.cast(type, option), f"{path}.{field.name}".lstrip("."))


def options(hint: object) -> tuple[object, ...]:
    """The types that a hint names: those of a union, else the hint itself."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


def default(field: Field[object]) -> Any:
    """The default of a key; MISSING if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _type(hint: object, field: Field[object], path: str) -> str:
    low = field.metadata["low"]
    words = " or ".join(_word(option, path) for option in options(hint))
    return words + (f", at least {low}" if low is not None else "")


def _word(option: Any, path: str) -> str:
    simple = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "true or false",
        type(None): "`null`",
        Any: "any",
    }
    if option in simple:
        return simple[option]
    origin, inner = typing.get_origin(option), typing.get_args(option)
    if origin is types.UnionType:
        return " or ".join(_word(one, path) for one in inner)
    if origin is typing.Literal:
        return " or ".join(f"`{word}`" for word in inner)
    if origin is list:
        return f"list ({_word(inner[0], path)})"
    if origin is dict:
        return (
            "mapping" if inner[1] in (Any, str) else _word(inner[1], path).replace("target]", "targets]") + " by name"
        )
    if option is schema.Target:
        return "[target](#targets)"
    kind = "target" if issubclass(option, schema.Target) and path != "logger" else "section"
    return f"[{kind}](#{path.replace('.', '')})"  # as GitHub names the heading


def _default(field: Field[object]) -> str:
    value = default(field)
    if value is MISSING:
        return "required"
    return "see there" if is_dataclass(value) else f"`{_flow(value)}`"


def _flow(value: object) -> str:
    """A value as one would write it in a line of YAML."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    return dump(value).removesuffix("...\n").strip()


def _meaning(field: Field[object]) -> str:
    text: str = field.metadata["doc"]
    if field.metadata["example"]:
        text += f"; for example `{field.metadata['example']}`"
    return text


def main(path: Path) -> None:
    """Writes the page anew below its line `START`."""
    path.write_text(path.read_text().partition(START)[0] + reference())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
