"""The signature of a class or function, from its source (`from_source`) or from the live object (`of_object`).

Both give the same `Signature`, so `deeplightning.config.signature_check` compares configs in one way.
"""

import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda self: "…"})()
"""A default that is not a plain value, or is known only at run time."""

_UNEVALUATED: Any = {"annotation_format": 3} if sys.version_info >= (3, 14) else {}
"""For `inspect.signature`: keep names in annotations that are not defined (annotationlib.Format.FORWARDREF)."""

_BY_NAME = {"int": int, "float": float, "bool": bool, "str": str}

Options = tuple[Any, ...] | None
"""The alternatives that an annotation allows; None: anything.

Each is a type (int, float, bool, str, NoneType; dict: any mapping), a literal word, a `ListOf`, a `Factory`,
`Built`, or `TheConfig`.
"""

_CONFIGS = ("deeplightning.config.schema.Config", "deeplightning.config.part_config.PartConfig")


class Built:
    """An option: an object that only a target can build, such as a network."""


class TheConfig:
    """An option: the whole config, which is passed to a module that takes it."""


@dataclass(frozen=True)
class Factory:
    """An option: a callable, such as `Callable[[Iterable], Optimizer]`.

    Attributes:
        arguments: how many positional arguments it is called with; None: unknown.
        returns: the dotted paths of the classes that it may return, except tensors and plain values; (): unknown.
    """

    arguments: int | None = None
    returns: tuple[str, ...] = ()


@dataclass(frozen=True)
class ListOf:
    """An option: a list.

    Attributes:
        items: the options of every item, or of each item in turn if `fixed`.
        fixed: whether the list has exactly as many items as `items`.
        also: types of other plain values that Python accepts as such a list, as `str` is a `Sequence[str]`.
    """

    items: tuple[Options, ...] = (None,)
    fixed: bool = False
    also: tuple[type, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        name: its name.
        position: whether it may be given by position.
        keyword: whether it may be given by name.
        required: whether it has no default.
        default: the default, if it is a plain value or a list of these; else UNKNOWN.
        allowed: what its annotation allows; None without an annotation, or if that allows other types too. A tensor
            beside a number (`float | Tensor`) is ignored: a config can give only the number.
        annotation: its text, for messages.
    """

    name: str
    position: bool = True
    keyword: bool = True
    required: bool = False
    default: Any = UNKNOWN
    allowed: Options = None
    annotation: str | None = None


@dataclass(frozen=True)
class Signature:
    """The arguments that a class or function takes.

    Attributes:
        parameters: in order, without `self`, `*args` and `**kwargs`, but with those that `**kwargs` passes on.
        rest: None if it takes no other keyword; else why others cannot be checked, as text after "unchecked: ".
        unresolved: whether an annotation of a live object cannot be resolved.
    """

    parameters: tuple[Parameter, ...]
    rest: str | None = None
    unresolved: bool = field(default=False, compare=False)

    def config(self) -> Parameter | None:
        """Return the parameter that receives the whole config: the first, if it is named `cfg` or annotated with the
        type of the config."""
        return next((p for p in self.parameters[:1] if p.name == "cfg" or TheConfig in (p.allowed or ())), None)

    def lacking(self, params: Collection[str]) -> list[str]:
        """Return the names of the required parameters that are not in `params`."""
        return [p.name for p in self.parameters if p.required and p.name not in params]

    def given(self, count: int | None) -> set[str]:
        """Return the names of the parameters that Deep Lightning sets.

        Args:
            count: how many positional arguments it passes; None: the config, if a parameter takes it.
        """
        if count is None:
            config = self.config()
            return {config.name} if config is not None else set()
        return {p.name for p in [p for p in self.parameters if p.position][:count]}


def of_item(options: Options, number: int) -> Options:
    """Return the options of an item of a list that has these options."""
    found = next((option for option in options or () if isinstance(option, ListOf) and option.items), None)
    if found is None:
        return None
    return found.items[min(number, len(found.items) - 1)] if found.fixed else found.items[0]


def factory_of(options: Options) -> Factory | None:
    """Return the callable among the options of a parameter, or None."""
    found = next((option for option in options or () if isinstance(option, Factory)), None)
    return replace(found, returns=()) if found is not None and Built in (options or ()) else found


class Undecided(Exception):
    """A name cannot be resolved without importing it. The text gives the reason."""


def in_config(value: object) -> Any:
    """Return a plain value with lists instead of tuples, as in a config, or UNKNOWN for any other."""
    if isinstance(value, tuple | list):
        items = [in_config(item) for item in value]
        return UNKNOWN if UNKNOWN in items else items
    return value if isinstance(value, bool | int | float | str | None) else UNKNOWN


def of_object(found: Callable[..., object]) -> Signature:
    """Return the signature of a live class or function.

    Raises:
        Undecided: it has no signature (a function written in C).
    """
    try:
        parameters = [*inspect.signature(found, **_UNEVALUATED).parameters.values()]
    except (ValueError, TypeError):
        raise Undecided("it has no signature") from None
    try:
        hints, unresolved = typing.get_type_hints(found.__init__ if inspect.isclass(found) else found), False
    except Exception:  # an annotation cannot be resolved: compare without types
        hints, unresolved = {}, True
    known = tuple(
        Parameter(
            p.name,
            position=p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD),
            keyword=p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD),
            required=p.default is p.empty,
            default=UNKNOWN if p.default is p.empty else in_config(p.default),
            allowed=allowed_by(hints.get(p.name, p.annotation)),
            annotation=None if p.annotation is p.empty else str(p.annotation),
        )
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    called = found.__init__ if inspect.isclass(found) else found
    if isinstance(called, types.FunctionType) and hasattr(called, "__wrapped__"):  # it may take more than it shows
        parameters += inspect.signature(called, follow_wrapped=False, **_UNEVALUATED).parameters.values()
    rest = "it takes any keyword" if any(p.kind is p.VAR_KEYWORD for p in parameters) else None
    # a metaclass, or a class before the one that names its parameters, passes the config on
    kinds = {p.kind for p in parameters} - {inspect.Parameter.KEYWORD_ONLY}
    if inspect.isclass(found) and kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        inits = [init for each in found.__mro__ if isinstance(init := vars(each).get("__init__"), types.FunctionType)]
        signatures = (Signature(of_object(init).parameters[1:]) for init in inits)
        config = next((each.config() for each in signatures if any(p.position for p in each.parameters)), None)
        known = known if config is None else (replace(config, required=False), *known)
    return Signature(known, rest, unresolved)


def allowed_by(hint: object) -> Options:
    """Return the options that a live annotation allows."""
    hint = _BY_NAME.get(hint, hint) if isinstance(hint, str) else hint  # if not all annotations could be resolved
    if hint in (int, float, bool, str, type(None)):
        return (hint,)
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Literal:
        return inner
    if origin in (typing.Union, types.UnionType):
        if {int, float} & set(inner):
            inner = tuple(option for option in inner if repr(option) != "<class 'torch.Tensor'>")
        parts = [allowed_by(option) for option in inner]
        options = [option for part in parts if part for option in part]
        return None if None in parts else tuple({(type(option), repr(option)): option for option in options}.values())
    if not isinstance(origin, type):
        return None
    if origin.__module__ in ("builtins", "collections.abc"):
        if origin.__name__ == "Callable" and inner:
            arguments = len(inner[0]) if isinstance(inner[0], list) else None
            returned = [c for c in typing.get_args(inner[1]) or (inner[1],) if isinstance(c, type)]
            paths = [f"{c.__module__}.{c.__qualname__}" for c in returned if c.__module__ != "builtins"]
            return (Factory(arguments, tuple(path for path in paths if not path.endswith(".Tensor"))),)
        if any(typing.get_origin(i) is typing.Unpack or getattr(i, "__unpacked__", False) for i in inner):
            return None
        return _collection(origin.__name__, [i if i is ... else allowed_by(i) for i in inner])
    paths = getattr(origin, "paths", None) or [f"{c.__module__}.{c.__qualname__}" for c in origin.__mro__]
    if not {"torch.nn.modules.module.Module", "datetime.timedelta"}.isdisjoint(paths):
        return (Built,)
    if not set(_CONFIGS).isdisjoint(paths):
        return (TheConfig,)
    top, _, name = paths[0].partition(".")
    is_path = top in ("os", "pathlib") and name.rpartition(".")[2] in ("PathLike", "Path", "PurePath")
    return (str,) if is_path else None


def _collection(name: str, inner: Sequence[Any]) -> Options:
    """Return the options of a generic such as `tuple[int, ...]`, given its name and the options in its brackets."""
    if len(inner) == 2 and inner[1] is ...:
        inner = inner[:1]
    item = inner[0] if len(inner) == 1 and inner[0] is not ... else None
    match name.lower():
        case "dict" | "mapping" | "mutablemapping":
            return (dict,)
        case "callable":
            return (Factory(),)
        case "tuple" if len(inner) > 1 and ... not in inner:
            return (ListOf(tuple(inner), fixed=True),)
        case "list" | "mutablesequence" | "tuple":  # many write `tuple[int]` for a tuple of any length
            return (ListOf((item,)),)
        case "sequence" | "iterable" | "collection" as word:
            is_of_texts = item is None or any(option is str or isinstance(option, str) for option in item)
            also = () if not is_of_texts else (str,) if word == "sequence" else (str, dict)
            return (ListOf((item,), also=also),)
    return None
