"""Check a target of a config: whether it exists, is of the right kind, and takes these params.

The signature comes from source, which takes milliseconds and executes nothing (`deeplightning.signatures`), or from the
imported object. What the source does not show is undecided, never guessed.
"""

import contextlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from deeplightning.config.section_kinds import KINDS, is_bound, misfit, no_part
from deeplightning.config.target import find, is_reference, is_target, path_of, signature_of
from deeplightning.config.tree import Entry, kind
from deeplightning.faults import Fault, nearest
from deeplightning.signatures.signature import (
    UNKNOWN,
    Built,
    ListOf,
    Options,
    Parameter,
    Signature,
    TheConfig,
    Undecided,
    factory_of,
)

if TYPE_CHECKING:
    from deeplightning.signatures.definition import Definition
    from deeplightning.signatures.names import Names

T = TypeVar("T")


@dataclass
class Verdict:
    """The faults of a target, and the keys that are undecided, with the reason and the option that checks them."""

    faults: list[Fault] = field(default_factory=list)
    undecided: dict[str, tuple[str, str]] = field(default_factory=dict)


class Imported:
    """An imported object: the counterpart of `definition.Definition`.

    Raises:
        ValueError: it does not exist, or its module cannot be imported.
    """

    def __init__(self, name: str):
        self.name, self.object = name, find(name)
        self.kind = "class" if isinstance(self.object, type) else "function" if callable(self.object) else "value"

    @property
    def path(self) -> str:
        """Return the path of its definition, or its name if that is unknown."""
        return path_of(self.object) or self.name

    def bases(self) -> tuple[list[str], bool]:
        """Return the paths of a class and its ancestors, complete unless its `__new__` may make another object."""
        paths = [path_of(c) or "" for c in getattr(self.object, "__mro__", ())]
        return paths, not inspect.isfunction(getattr(self.object, "__new__", None))

    def signature(self) -> Signature:
        """Return its signature. Parameters that `**kwargs` passes on are read from source.

        Raises:
            Undecided: it has no signature (a function written in C).
        """
        return signature_of(self.name, self.object)


class Meanings:
    """Resolves names, and caches the results.

    Args:
        importing: import the named objects, so that only signatures of C functions are undecided.
    """

    def __init__(self, importing: bool = False):
        self.importing = importing
        self._cache: dict[str, object] = {}
        self._names: Names | None = None

    def of(self, name: str) -> "Imported | Definition":
        """Resolve a name.

        Raises:
            ValueError: it does not exist.
            Undecided: only importing would show it.
        """
        return self._cached(name, lambda: Imported(name) if self.importing else self._read(name))

    def _read(self, name: str) -> "Definition":
        from deeplightning.signatures import definition
        from deeplightning.signatures.names import Names

        self._names = self._names or Names()
        return definition.look_up(name, self._names)

    def known(self, name: object) -> Any:
        """Resolve a name, or return None if it does not exist or only importing would show it."""
        with contextlib.suppress(ValueError, Undecided):
            return self.of(name) if isinstance(name, str) else None
        return None

    def parameters(self, name: object) -> dict[str, Parameter]:
        """Return the parameters of a named object by their names; empty if unknown."""
        with contextlib.suppress(ValueError, Undecided):
            return {p.name: p for p in self.signature(name).parameters} if isinstance(name, str) else {}
        return {}

    def signature(self, name: str) -> Signature:
        """Return the signature of a named object.

        Raises:
            ValueError, Undecided: as `of`.
        """
        return self._cached(f"{name} signature", lambda: self.of(name).signature())

    def _cached(self, key: str, compute: Callable[[], T]) -> T:
        if key not in self._cache:
            try:
                self._cache[key] = compute()
            except (ValueError, Undecided) as error:
                self._cache[key] = type(error)(*error.args)  # without its traceback
        found = self._cache[key]
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return typing.cast(T, found)


def judge(
    meanings: Meanings,
    name: str,
    params: Mapping[str, object],
    key: str,
    *,
    role: str | None = None,
    given: int | None = 0,
    hidden: Mapping[str, str] | None = None,
    wanted: Callable[[], Options] | None = None,
) -> Verdict:
    """Check the target at `key`.

    Args:
        role: its role, one of `KINDS`; None: any.
        given: how many positional arguments Deep Lightning passes; None: the config, if the target takes it.
        hidden: the text with `${…}` of params whose values must not be shown.
        wanted: for a target inside params, the options of its parameter; None: it is not inside params.
    """

    def refused(why: str, code: int = 2) -> Verdict:
        return Verdict([Fault(why, f"{key}.type", found=name, exit_code=code)])

    try:
        if refusal := no_part(name, role):
            return refused(refusal)
        found = meanings.of(name)
    except ValueError as error:
        from deeplightning.config import other_tools

        known = other_tools.class_of(role, name)
        meant = f" Did you mean {known}?" if known else ""
        return refused(f"{error}{meant}", getattr(error, "exit_code", 2))
    except Undecided as why:
        return Verdict(undecided={f"{key}.type": (f"{name}: {why}", "--import")})
    if found.kind not in ("class", "function"):
        what = type(found.object).__name__ if isinstance(found, Imported) else f"a {found.kind}"
        return refused(f"`{name}` is {what}, not a class or function")
    if refusal := no_part(found.path, role):
        return refused(refusal)
    if isinstance(found, Imported) and inspect.isabstract(found.object):
        absent = ", ".join(sorted(found.object.__abstractmethods__))
        return refused(f"{name} is abstract: it does not implement {absent}; name a class that does")
    verdict = _check_kind(meanings, name, key, role) if role in KINDS else Verdict()
    call = _check_call(meanings, name, params, key, given, hidden or {}, wanted)
    if found.kind == "function" and role in KINDS and not params and call.faults:  # often a loss as a function
        once = f"; a function is called once, to make {KINDS[role].words}"
        return Verdict([replace(f, message=f.message + once) for f in call.faults])
    return verdict if verdict.faults else Verdict(call.faults, verdict.undecided | call.undecided)


def _check_kind(meanings: Meanings, name: str, key: str, role: str) -> Verdict:
    """Check whether a class fits its role. The result of a function is checked when it is built."""
    found, words = meanings.of(name), KINDS[role].words
    mismatch = misfit(*found.bases(), role) if found.kind == "class" else ""
    if mismatch is None:
        return Verdict(undecided={f"{key}.type": (f"{name}: whether it is {words}", "--import")})
    return Verdict([Fault(f"{name} {mismatch}", f"{key}.type", found=name, allowed=words)] if mismatch else [])


def _check_call(
    meanings: Meanings,
    name: str,
    params: Mapping[str, object],
    key: str,
    given: int | None,
    hidden: Mapping[str, str],
    wanted: Callable[[], Options] | None,
) -> Verdict:
    """Check whether a target takes these params besides the arguments that Deep Lightning passes."""
    try:
        signature = meanings.signature(name)
    except Undecided as why:
        return Verdict(undecided={f"{key}.params": (f"{name}: {why}", "--import")} if params else {})
    verdict, meant, may_lack, lacking = Verdict(), "", False, signature.lacking(params)
    if wanted is not None:
        factory = factory_of(wanted())
        paths = meanings.of(name).bases()[0] if meanings.of(name).kind == "class" else ()
        if is_bound(paths, bool(lacking), factory):  # the caller passes the rest
            given = factory.arguments if factory is not None else 1
            given, may_lack = given or 0, given is None
    taken = signature.given(given)
    free = {p.name: p for p in signature.parameters if p.keyword and p.name not in taken}
    for param, value in params.items():
        here = f"{key}.params.{param}"
        if param in free:
            for at, wrong, allowed, hint in value_misfits(value, free[param]):
                shown = kind(Entry(wrong, "")) if isinstance(wrong, str | dict | bool) else repr(wrong)[:80]
                if param in hidden:
                    shown = f"the text of {hidden[param]}"
                    if "number" in allowed:
                        shown += f"; write `${{oc.decode:{hidden[param]}}}`"
                message = f"{name} takes {allowed} here, not {shown}" + (hint and f".{hint}")
                verdict.faults.append(Fault(message, here + at, found=shown, allowed=allowed))
        elif param in taken:
            verdict.faults.append(Fault(f"{name}: `{param}` is set by Deep Lightning; remove it", here, found=param))
        elif signature.rest is None:
            known = ", ".join(free) or "none"
            from deeplightning.config import other_tools

            known_as = other_tools.ours(here)
            same = next((p for p in free if known_as and known_as.split()[0] == f"{key}.params.{p}"), None)
            elsewhere = "" if known_as and known_as.startswith(here) else other_tools.hint(known_as)
            hint = f" Did you mean {same}?" if same else nearest(param, free) or elsewhere
            meant += hint
            message = f"{name} has no param `{param}`.{hint} It takes: {known}"
            verdict.faults.append(Fault(message, here, found=param, allowed=known))
        else:
            verdict.undecided[here] = f"{name}: {signature.rest}", "--dry-run"
    absent = [] if may_lack else [param for param in lacking if param not in taken]
    missing = [param for param in absent if f"mean {param}?" not in meant]  # a misspelt one is reported once
    if missing:
        words = ", ".join(missing)
        message = f"{name} needs {words}"
        if given is None and not taken and {"cfg", "config"} & set(missing):
            message += ". The config is passed to the first parameter alone, if that is named `cfg`"
        verdict.faults.append(Fault(message, f"{key}.params", allowed=words))
    return verdict


# ---- plain values and the options of their parameters

SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}

ValueMisfit = tuple[str, Any, str, str]
"""A wrong part of a value: its place (empty, or `.1` for an item of a list), the part, a description of the allowed
values, and a hint such as ` Did you mean …?`, which may be empty."""


def value_misfits(value: object, parameter: Parameter) -> list[ValueMisfit]:
    """Return the parts of a plain value that are certainly not allowed."""
    if not _is_annotated(parameter.allowed):
        allowed = None if _is_unresolved(value) else _unlike_default(value, parameter)
        return [("", value, allowed, _value_hint(value, ()))] if allowed else []
    if parameter.default is not UNKNOWN and _misfits_of(parameter.default, parameter.allowed, ""):
        return []  # `rate: int = 0.1`: the default contradicts the annotation
    return _misfits_of(value, parameter.allowed, "")


def _is_annotated(allowed: Options) -> bool:
    return allowed not in (None, (type(None),))  # some live annotations of torch allow only None


def _is_unresolved(value: object) -> bool:
    """Return whether the final value is not known yet."""
    return value is None or is_target(value) or is_reference(value)


def _unlike_default(value: object, parameter: Parameter) -> str | None:
    """Return what a parameter without annotation allows, judged by its default, if the value certainly does not fit."""
    default = parameter.default
    if parameter.annotation is not None:  # an annotation that is not understood
        return None
    word = value.lower() if isinstance(value, str) else ""  # a number may also be a word, such as `random` or `same`
    if isinstance(default, bool):
        return SIMPLE[bool] if word in ("true", "false", "yes", "no", "on", "off") else None
    return SIMPLE[float] if isinstance(default, int | float) and any(map(str.isdigit, word)) else None


def _misfits_of(value: object, allowed: Options, at: str) -> list[ValueMisfit]:
    if _is_unresolved(value) or not _is_annotated(allowed) or factory_of(allowed) is not None:
        return []  # many libraries also take the name of a callable
    inside: list[list[ValueMisfit]] = []  # for each allowed kind of list, the misfits of its items
    for option in allowed or ():
        if _fits(value, option):
            if not isinstance(option, ListOf) or not isinstance(value, list):
                return []
            items = option.items if option.fixed else option.items * len(value)
            pairs = enumerate(zip(value, items, strict=True))
            inside.append([found for n, pair in pairs for found in _misfits_of(*pair, f"{at}.{n}")])
    if inside:
        return min(inside, key=len)
    words = [_describe_option(option) for option in allowed or () if option is not type(None)]
    return [(at, value, " or ".join(dict.fromkeys(words)), _value_hint(value, allowed or ()))]


def _fits(value: object, option: object) -> bool:
    """Return whether a value matches an option, regardless of its items."""
    if isinstance(option, ListOf):
        right = isinstance(value, list) and (not option.fixed or len(value) == len(option.items))
        return right or isinstance(value, option.also)
    return is_kind_of(value, option) if isinstance(option, type) else value == option


def is_kind_of(value: object, kind: type) -> bool:
    """Return whether a YAML value has a type. Booleans are not numbers; an int is also a float."""
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe_option(option: Any) -> str:
    if isinstance(option, ListOf):
        return f"a list of {len(option.items)} items" if option.fixed else SIMPLE[list]
    more = {dict: "a mapping", Built: "a target {type: MODULE.CLASS, params: {…}}", TheConfig: "the config"}
    return (SIMPLE | more).get(option) or repr(option)


def _value_hint(value: object, allowed: tuple[object, ...]) -> str:
    """Suggest the nearest allowed string, or the nearest key of a target."""
    if isinstance(value, str):
        return nearest(value, [option for option in allowed if isinstance(option, str)])
    if isinstance(value, Mapping) and len(value) < 4:  # a larger mapping is not a misspelt target
        absent = {"type", "params"} - set(value)
        hints = [nearest(key, absent) for key in value if key not in ("type", "params") and isinstance(key, str)]
        return next(filter(None, hints), "")
    return ""
