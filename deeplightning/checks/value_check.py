"""A plain value of a config against what the parameter that it goes to allows. Doubt counts as right."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from deeplightning.config.target import is_reference, is_target
from deeplightning.faults import nearest
from deeplightning.static.signature import Built, ListOf, Options, Parameter, TheConfig, factory_of

SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}


class Misfit(NamedTuple):
    """A plain value that certainly is not allowed.

    Attributes:
        at: where in the value of the parameter: nothing, or `.1` for an item of a list.
        value: the value there.
        allowed: what may stand there, in words.
        hint: ` Did you mean …?`, or nothing.
    """

    at: str
    value: Any
    allowed: str
    hint: str


def misfits(value: object, parameter: Parameter) -> list[Misfit]:
    """Return what of a plain value certainly is not allowed. Doubt counts as right."""
    if not _is_annotated(parameter.allowed):
        allowed = None if _is_open(value) else _unlike_default(value, parameter)
        return [Misfit("", value, allowed, _hint(value, ()))] if allowed else []
    return _compared(value, parameter.allowed, "")


def _is_annotated(allowed: Options) -> bool:
    return allowed not in (None, (type(None),))  # some annotations of torch's come to nothing when they are live


def _is_open(value: object) -> bool:
    """Return whether a value does not show what it will be."""
    return value is None or is_target(value) or is_reference(value)


def _unlike_default(value: object, parameter: Parameter) -> str | None:
    """Return what is allowed where only a default tells, if the value certainly is not."""
    default = parameter.default
    if parameter.annotation is not None:  # it says something that is not understood
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool | int) else SIMPLE[bool]
    return SIMPLE[float] if isinstance(default, int | float) and isinstance(value, str) else None


def _compared(value: object, allowed: Options, at: str) -> list[Misfit]:
    if _is_open(value) or not _is_annotated(allowed) or factory_of(allowed) is not None:
        return []  # many libraries take the name of a function where they want a callable
    inside: list[list[Misfit]] = []  # for each kind of list that may stand here, what is wrong with the items
    for option in allowed or ():
        if _fits(value, option):
            if not isinstance(option, ListOf) or not isinstance(value, list):
                return []
            items = option.items if option.fixed else option.items * len(value)
            pairs = enumerate(zip(value, items, strict=True))
            inside.append([found for n, pair in pairs for found in _compared(*pair, f"{at}.{n}")])
    if inside:
        return min(inside, key=len)
    words = [_words(option) for option in allowed or () if option is not type(None)]
    return [Misfit(at, value, " or ".join(dict.fromkeys(words)), _hint(value, allowed or ()))]


def _fits(value: object, option: object) -> bool:
    """Return whether a value is of that kind, whatever its items are."""
    if isinstance(option, ListOf):
        right = isinstance(value, list) and (not option.fixed or len(value) == len(option.items))
        return right or isinstance(value, option.also)
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, option) if isinstance(option, type) else value == option


def _words(option: Any) -> str:
    if isinstance(option, ListOf):
        return f"a list of {len(option.items)} items" if option.fixed else SIMPLE[list]
    more = {dict: "a mapping", Built: "a target {type: MODULE.CLASS, params: {…}}", TheConfig: "the config"}
    return (SIMPLE | more).get(option) or repr(option)


def _hint(value: object, allowed: tuple[object, ...]) -> str:
    """Return the word that was meant: one of the literal words, or a key of a target."""
    if isinstance(value, str):
        return nearest(value, [option for option in allowed if isinstance(option, str)])
    if isinstance(value, Mapping) and len(value) < 4:  # more is not meant for a target
        absent = {"type", "params"} - set(value)
        hints = [nearest(key, absent) for key in value if key not in ("type", "params") and isinstance(key, str)]
        return next(filter(None, hints), "")
    return ""
