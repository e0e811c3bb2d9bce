"""A target of a config against what it names: is it there, of the right kind, and does it take these params?

The answer comes from the source, which costs milliseconds and executes nothing (`static`), or from the imported object.
What the source does not show is undecided, never guessed.
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
    """What is wrong with a target, and what was not decided: keys with the reason, and the option that settles it."""

    faults: list[Fault] = field(default_factory=list)
    undecided: dict[str, tuple[str, str]] = field(default_factory=dict)


class Imported:
    """What a name means, read from the live object: the counterpart of `definition.Definition`.

    Raises:
        ValueError: in words, when there is no such thing or its module cannot be imported.
    """

    def __init__(self, name: str):
        self.name, self.thing = name, find(name)
        self.kind = "class" if isinstance(self.thing, type) else "function" if callable(self.thing) else "value"

    @property
    def path(self) -> str:
        """Return where it is defined; where that is unknown, the name."""
        return path_of(self.thing) or self.name

    def bases(self) -> tuple[list[str], bool]:
        """Return the paths of itself and its ancestors, and that these are all."""
        return [path_of(c) or "" for c in getattr(self.thing, "__mro__", ())], True

    def defines(self, name: str) -> bool:
        """Return whether a class or an ancestor has an attribute of a name."""
        return hasattr(self.thing, name)

    def signature(self) -> Signature:
        """Return its parameters. Those that `**kwargs` hand on are known from the source alone.

        Raises:
            Undecided: it has none (a function written in C).
        """
        return signature_of(self.name, self.thing)


class Meanings:
    """What names mean, each found out once.

    Args:
        importing: import what is named, which leaves nothing undecided but what C functions hide.
    """

    def __init__(self, importing: bool = False):
        self.importing = importing
        self._found: dict[str, object] = {}
        self._names: Names | None = None

    def of(self, name: str) -> "Imported | Definition":
        """Return what a name means.

        Raises:
            ValueError: in words, when there is no such thing.
            Undecided: only importing can tell.
        """
        return self._once(name, lambda: Imported(name) if self.importing else self._read(name))

    def _read(self, name: str) -> "Definition":
        from deeplightning.signatures import definition
        from deeplightning.signatures.names import Names

        self._names = self._names or Names()
        return definition.look_up(name, self._names)

    def known(self, name: object) -> Any:
        """Return what a name means; None where there is no such thing, or only importing can tell."""
        with contextlib.suppress(ValueError, Undecided):
            return self.of(name) if isinstance(name, str) else None
        return None

    def parameters(self, name: object) -> dict[str, Parameter]:
        """Return the parameters of what a name means, by their names; none where they are not known."""
        with contextlib.suppress(ValueError, Undecided):
            return {p.name: p for p in self.signature(name).parameters} if isinstance(name, str) else {}
        return {}

    def signature(self, name: str) -> Signature:
        """Return what it takes.

        Raises:
            ValueError, Undecided: as `of`.
        """
        return self._once(f"{name} signature", lambda: self.of(name).signature())

    def _once(self, key: str, ask: Callable[[], T]) -> T:
        if key not in self._found:
            try:
                self._found[key] = ask()
            except (ValueError, Undecided) as error:
                self._found[key] = type(error)(*error.args)  # without the frames that it came through
        found = self._found[key]
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
    """Return what is wrong with the target at `key`.

    Args:
        role: what it is for, one of `KINDS`; None: anything.
        given: how many positional arguments it gets from us; None: the config, if it takes that.
        hidden: how params were written that hold what must not be shown.
        wanted: of a target inside params, what the parameter allows that it is for; None: it is not inside params.
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
        what = type(found.thing).__name__ if isinstance(found, Imported) else f"a {found.kind}"
        return refused(f"`{name}` is {what}, not a class or function")
    if refusal := no_part(found.path, role):
        return refused(refusal)
    if isinstance(found, Imported) and inspect.isabstract(found.thing):
        absent = ", ".join(sorted(found.thing.__abstractmethods__))
        return refused(f"{name} is abstract: it has no {absent} of its own; name a class that has")
    verdict = _kind(meanings, name, key, role) if role in KINDS else Verdict()
    call = _call(meanings, name, params, key, given, hidden or {}, wanted)
    if found.kind == "function" and role in KINDS and not params and call.faults:  # the commonest: a loss as a function
        once = f"; a function is called once, to make {KINDS[role].words}"
        return Verdict([replace(f, message=f.message + once) for f in call.faults])
    return verdict if verdict.faults else Verdict(call.faults, verdict.undecided | call.undecided)


def _kind(meanings: Meanings, name: str, key: str, role: str) -> Verdict:
    """Return whether a class is of the kind that its role needs; what a function returns is judged when it is built."""
    found, words = meanings.of(name), KINDS[role].words
    mismatch = misfit(*found.bases(), role) if found.kind == "class" else ""
    if mismatch is None:
        return Verdict(undecided={f"{key}.type": (f"{name}: whether it is {words}", "--import")})
    return Verdict([Fault(f"{name} {mismatch}", f"{key}.type", found=name, allowed=words)] if mismatch else [])


def _call(
    meanings: Meanings,
    name: str,
    params: Mapping[str, object],
    key: str,
    given: int | None,
    hidden: Mapping[str, str],
    wanted: Callable[[], Options] | None,
) -> Verdict:
    """Return whether it takes these params beside the arguments that we give."""
    try:
        signature = meanings.signature(name)
    except Undecided as why:
        return Verdict(undecided={f"{key}.params": (f"{name}: {why}", "--import")} if params else {})
    verdict, meant, may_lack, lacking = Verdict(), "", False, signature.lacking(params)
    if wanted is not None:
        factory = factory_of(wanted())
        paths = meanings.of(name).bases()[0] if meanings.of(name).kind == "class" else ()
        if is_bound(paths, bool(lacking), factory):  # the rest is given where it is called
            given = factory.arguments if factory is not None else 1
            given, may_lack = given or 0, given is None
    taken = signature.given(given)
    free = {p.name: p for p in signature.parameters if p.keyword and p.name not in taken}
    for param, value in params.items():
        here = f"{key}.params.{param}"
        if param in free:
            for at, wrong, allowed, hint in value_misfits(value, free[param]):
                shown = _show(wrong)
                if param in hidden:
                    shown = f"the text that {hidden[param]} gives"
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


def _show(value: object) -> str:
    return kind(Entry(value, "")) if isinstance(value, str | dict | bool) else repr(value)[:80]


# ---- a plain value against what its parameter allows

SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}


ValueMisfit = tuple[str, Any, str, str]
"""The place inside a value that is not allowed (empty, or `.1` for an item of a list), the value there, the allowed
values in words, and a hint such as ` Did you mean …?`, which may be empty."""


def value_misfits(value: object, parameter: Parameter) -> list[ValueMisfit]:
    """Return what of a plain value certainly is not allowed. Doubt counts as right."""
    if not _is_annotated(parameter.allowed):
        allowed = None if _is_open(value) else _unlike_default(value, parameter)
        return [("", value, allowed, _value_hint(value, ()))] if allowed else []
    if parameter.default is not UNKNOWN and _compared(parameter.default, parameter.allowed, ""):
        return []  # `rate: int = 0.1`: an annotation that its own default contradicts
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


def _compared(value: object, allowed: Options, at: str) -> list[ValueMisfit]:
    if _is_open(value) or not _is_annotated(allowed) or factory_of(allowed) is not None:
        return []  # many libraries take the name of a function where they want a callable
    inside: list[list[ValueMisfit]] = []  # for each kind of list that may stand here, what is wrong with the items
    for option in allowed or ():
        if _fits(value, option):
            if not isinstance(option, ListOf) or not isinstance(value, list):
                return []
            items = option.items if option.fixed else option.items * len(value)
            pairs = enumerate(zip(value, items, strict=True))
            inside.append([found for n, pair in pairs for found in _compared(*pair, f"{at}.{n}")])
    if inside:
        return min(inside, key=len)
    words = [_allowed_words(option) for option in allowed or () if option is not type(None)]
    return [(at, value, " or ".join(dict.fromkeys(words)), _value_hint(value, allowed or ()))]


def _fits(value: object, option: object) -> bool:
    """Return whether a value is of that kind, whatever its items are."""
    if isinstance(option, ListOf):
        right = isinstance(value, list) and (not option.fixed or len(value) == len(option.items))
        return right or isinstance(value, option.also)
    return is_kind_of(value, option) if isinstance(option, type) else value == option


def is_kind_of(value: object, kind: type) -> bool:
    """Return whether a value of YAML is of a kind: true and false are no numbers, a whole number is a number too."""
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _allowed_words(option: Any) -> str:
    if isinstance(option, ListOf):
        return f"a list of {len(option.items)} items" if option.fixed else SIMPLE[list]
    more = {dict: "a mapping", Built: "a target {type: MODULE.CLASS, params: {…}}", TheConfig: "the config"}
    return (SIMPLE | more).get(option) or repr(option)


def _value_hint(value: object, allowed: tuple[object, ...]) -> str:
    """Return the word that was meant: one of the literal words, or a key of a target."""
    if isinstance(value, str):
        return nearest(value, [option for option in allowed if isinstance(option, str)])
    if isinstance(value, Mapping) and len(value) < 4:  # more is not meant for a target
        absent = {"type", "params"} - set(value)
        hints = [nearest(key, absent) for key in value if key not in ("type", "params") and isinstance(key, str)]
        return next(filter(None, hints), "")
    return ""
