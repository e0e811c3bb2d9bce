"""What a class or function takes, however that was found out: from its source (`static`) or from the live object.

Both sides give the same `Signature`, so that a config is compared in one way (`deeplightning.config.target`).
"""

import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "…"})()
"""A default that is no plain value, or cannot be told without executing code."""

SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: its name.
        position: whether it may be given by position.
        keyword: whether it may be given by name.
        required: whether it has no default.
        default: the default, where it is a plain value; else UNKNOWN.
        allowed: the simple types (int, float, bool, str, list, NoneType) and literal words that its annotation names;
            None if it has none, or one that names anything else as well. A tensor beside a number (`float | Tensor`)
            does not count: no other plain value stands for it.
        annotation: as it is written, for people.
    """

    name: str
    position: bool = True
    keyword: bool = True
    required: bool = False
    default: Any = UNKNOWN
    allowed: tuple[Any, ...] | None = None
    annotation: str | None = None


@dataclass(frozen=True)
class Signature:
    """What may be given to a class or function.

    Attributes:
        parameters: in order, without `self`, `*args` and `**kwargs`; those that `**kwargs` hand on are among them.
        rest: None if no other keyword is taken; else why others cannot be judged, in words that follow "unchecked: ".
    """

    parameters: tuple[Parameter, ...]
    rest: str | None = None


class Undecided(Exception):
    """What a name means cannot be told without importing it; the text says why."""


def of_object(found: Any) -> Signature:
    """The signature of a live class or function.

    Raises:
        Undecided: it has none (a function written in C).
    """
    try:
        parameters = inspect.signature(found).parameters.values()
    except (ValueError, TypeError):
        raise Undecided("it does not tell its parameters") from None
    try:
        hints = typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except Exception:  # an annotation that names something unknown: the comparison goes on without types
        hints = {}
    known = tuple(
        Parameter(
            p.name,
            position=p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD),
            keyword=p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD),
            required=p.default is p.empty,
            default=p.default if isinstance(p.default, bool | int | float | str | None) else UNKNOWN,
            allowed=allowed_by(hints.get(p.name, p.annotation)),
            annotation=None if p.annotation is p.empty else str(p.annotation),
        )
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    rest = "it takes any keyword" if any(p.kind is p.VAR_KEYWORD for p in parameters) else None
    return Signature(known, rest)


def allowed_by(hint: Any) -> tuple[Any, ...] | None:
    """The simple types and literals that a live annotation names; None if it names any other."""
    if hint in (*SIMPLE, type(None)):
        return (hint,)
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        return (list,)
    if origin is typing.Literal:
        return typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if {int, float} & set(options):
            options = tuple(option for option in options if not _is_tensor(option))
        parts = [allowed_by(option) for option in options]
        return None if None in parts else tuple(option for part in parts if part for option in part)
    return None


def _is_tensor(hint: Any) -> bool:
    return isinstance(hint, type) and (hint.__module__.partition(".")[0], hint.__name__) == ("torch", "Tensor")


def wrong_type(value: Any, parameter: Parameter) -> str | None:
    """What is allowed, if a plain value certainly is not. Doubt counts as right."""
    if value is None or (isinstance(value, Mapping) and {"type", "ref"} & set(value)):
        return None
    if parameter.allowed in (None, (type(None),)):  # some annotations of torch's come to nothing when they are live
        default = parameter.default
        if isinstance(default, bool):
            unfit = isinstance(value, str) or (parameter.annotation is None and not isinstance(value, bool | int))
            return SIMPLE[bool] if unfit else None
        return SIMPLE[float] if isinstance(default, int | float) and isinstance(value, str) else None
    allowed = parameter.allowed or ()
    if any(_fits(value, option) for option in allowed):
        return None
    words = [SIMPLE.get(o, repr(o)) for o in allowed if o is not type(None)]
    return " or ".join(dict.fromkeys(words))


def _fits(value: Any, option: Any) -> bool:
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, option) if isinstance(option, type) else value == option
