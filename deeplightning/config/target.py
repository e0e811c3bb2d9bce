"""A target, `MODULE.CLASS` or `MODULE.FUNCTION` with its params: found, compared with its signature, built.

The only place that imports by name.
"""

import difflib
import importlib
import importlib.util
import inspect
import keyword
import os
import pkgutil
import sys
import sysconfig
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deeplightning.config.fault import ConfigError, Fault, SetupError
from deeplightning.config.schema import Target

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def nearest(word: str, words: Iterable[str]) -> str:
    """` Did you mean …?`, or nothing when no word is near."""
    words = sorted(set(words))
    near = difflib.get_close_matches(word, words, 1, 0.6) or [w for w in words if w.lower() == word.lower()][:1]
    return f" Did you mean {near[0]}?" if near else ""


def add_import_roots(*folders: Path) -> None:
    """Lets targets come from these folders, behind everything that is installed: they can add names, not shadow any."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)


def is_installed(package: str) -> bool:
    """Whether a top-level package is there, without importing it."""
    return importlib.util.find_spec(package) is not None


def is_target(value: Any) -> bool:
    """Whether a mapping inside params is a target: just `type` (with a dot) and perhaps `params`."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("type"), str)
        and "." in value["type"]
        and set(value) <= {"type", "params"}
        and isinstance(value.get("params"), Mapping | None)
    )


def is_reference(value: Any) -> bool:
    """Whether a mapping inside params names something without calling it: just `{ref: MODULE.NAME}`."""
    return (
        isinstance(value, Mapping) and set(value) == {"ref"} and isinstance(value["ref"], str) and "." in value["ref"]
    )


def find(name: str) -> Any:
    """The object that `MODULE.NAME` (or `MODULE.CLASS.METHOD`) names.

    Raises:
        ValueError: in words, with the nearest name, when there is none or its module cannot be imported.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(p.isidentifier() and not keyword.iskeyword(p) for p in parts):
        raise ValueError(f"`{name}` is no MODULE.NAME such as torch.optim.SGD.")
    found: Any = None
    depth = 0
    for depth in range(len(parts) - 1, 0, -1):
        found = _module(".".join(parts[:depth]), name)
        if found is not None:
            break
    if found is None:
        known = [m.name for m in pkgutil.iter_modules()] if len(parts[0]) > 2 else []
        raise ValueError(f"there is no module {parts[0]} to import (for `{name}`).{nearest(parts[0], known)}")
    for part in parts[depth:]:
        try:
            found = getattr(found, part)
        except AttributeError:
            owner = ".".join(parts[:depth])
            prefix = f"{owner}."
            near = nearest(part, _public_names(found)).replace("mean ", f"mean {prefix}", 1)
            raise ValueError(f"{owner} has no `{part}`.{near}") from None
        depth += 1
    return found


def _module(module: str, wanted: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return None
        raise ValueError(
            f"importing {module} (for `{wanted}`) needs {error.name}, which is not installed here{_place(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"importing {module} (for `{wanted}`) failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The error, and the line of the user's own code that it came from, if it did."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({_short(error.filename or '?')}:{error.lineno})"
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{words}{_place(error)}"


def _place(error: BaseException) -> str:
    """` (file:line)` of the innermost line of code that is neither ours nor installed."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((*_INSTALLED, "<")) and file != __file__:
            place = f" ({_short(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place


def _short(file: str) -> str:
    """A file as the user would write it: relative where it lies below the working directory."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file


def _public_names(owner: Any) -> list[str]:
    names = [n for n in dir(owner) if not n.startswith("_")]
    if hasattr(owner, "__path__"):
        names += [m.name for m in pkgutil.iter_modules(owner.__path__)]
    return names


def faults_of(
    name: str,
    params: Mapping[str, Any],
    given: int,
    key: str,
    hidden: Mapping[str, str] = types.MappingProxyType({}),
) -> list[Fault]:
    """What is wrong with calling a target with `given` positional arguments and these params.

    Args:
        hidden: how params were written that hold what must not be shown.
    """
    try:
        found = find(name)
    except ValueError as error:
        return [Fault(str(error), f"{key}.type")]
    if not callable(found):
        return [Fault(f"`{name}` is {type(found).__name__}, not a class or function", f"{key}.type")]
    faults = []
    accepted, hints = _signature(found)
    if accepted is None:
        return []
    names = [p for p in accepted.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    taken = {p.name for p in list(accepted.values())[:given] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    free = {p.name: p for p in names if p.name not in taken}
    for param, value in params.items():
        if param in free:
            wrong = _wrong_type(value, hints.get(param, free[param].annotation), free[param].default)
            if wrong:
                shown = _show(value)
                if param in hidden:
                    shown = f"the text that {hidden[param]} gives"
                    if "number" in wrong:
                        shown += f"; write `${{oc.decode:{hidden[param]}}}`"
                faults.append(Fault(f"{name} takes {wrong} here, not {shown}", f"{key}.params.{param}"))
        elif param in taken:
            faults.append(Fault(f"{name} gets `{param}` from us; remove it", f"{key}.params.{param}"))
        elif not open_ended:
            known = ", ".join(free) or "none"
            message = f"{name} has no param `{param}`.{nearest(param, free)} It takes: {known}"
            faults.append(Fault(message, f"{key}.params.{param}"))
    missing = [p.name for p in free.values() if p.default is p.empty and p.name not in params]
    if missing:
        faults.append(Fault(f"{name} needs {', '.join(missing)}", f"{key}.params"))
    return faults


def _signature(found: Any) -> tuple[dict[str, inspect.Parameter] | None, dict[str, Any]]:
    """Parameters of a callable and their types; None where nothing can be known. `**kwargs` of an `__init__` that
    hands them on to its parent are the parent's."""
    try:
        parameters = dict(inspect.signature(found).parameters)
    except (ValueError, TypeError):
        return None, {}
    function = found.__init__ if inspect.isclass(found) else found
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # an annotation that names something unknown: the check goes on without types
        hints = {}
    return parameters, hints


_SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _wrong_type(value: Any, hint: Any, default: Any) -> str | None:
    """What is allowed, if `value` certainly is not. Doubt counts as right."""
    if value is None or isinstance(value, dict) or hint is Any:
        return None
    options = _options(hint)
    if options is None:
        if isinstance(default, bool) and not isinstance(value, bool | int):
            return "true or false"
        if isinstance(default, int | float) and not isinstance(default, bool) and isinstance(value, str):
            return "a number"
        return None
    if any(_fits(value, option) for option in options):
        return None
    words = [_SIMPLE[o] if o in _SIMPLE else "a list" if o is list else repr(o) for o in options if o is not type(None)]
    return " or ".join(dict.fromkeys(words))


def _options(hint: Any) -> list[Any] | None:
    """The simple types that a hint allows; None if it allows any other."""
    if hint in _SIMPLE or hint is type(None):
        return [hint]
    origin = typing.get_origin(hint)
    if origin in (list, tuple):
        return [list]
    if origin is typing.Literal:
        return list(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        parts = [_options(part) for part in typing.get_args(hint)]
        return None if any(part is None for part in parts) else [o for part in parts if part for o in part]
    return None


def _fits(value: Any, option: Any) -> bool:
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if option is list:
        return isinstance(value, list)
    return isinstance(value, option) if isinstance(option, type) else value == option


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value[:60]!r}" + ("…" if len(value) > 60 else "")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def build(target: Target | Mapping[str, Any], *given: Any, **more: Any) -> Any:
    """The object that a target describes, called with `given`, its params and `more`, which wins over params.

    Targets and references inside the params, at any depth, are built first.

    Raises:
        ConfigError: the target cannot be found, or refuses its arguments with TypeError or ValueError.
        SetupError: it needs a package that is not installed.
    """
    if isinstance(target, Mapping):
        target = Target(type=target["type"], params=dict(target.get("params") or {}))
    try:
        found = find(target.type)
        params = {name: _build_inside(value) for name, value in target.params.items()}
    except ValueError as error:
        raise ConfigError(Fault(str(error), target.name, target.place)) from error
    try:
        return found(*given, **params | more)
    except ImportError as error:
        message = f"{target.type} needs a package that is not installed: {error}"
        raise SetupError(Fault(message, target.name, target.place)) from error
    except (TypeError, ValueError) as error:
        if hasattr(error, "exit_code") or os.environ.get("DEEPLIGHTNING_DEBUG") == "1":
            raise
        raise ConfigError(
            Fault(f"{target.type} refuses its arguments: {_reason(error)}", target.name, target.place)
        ) from error


def _build_inside(value: Any) -> Any:
    if is_target(value):
        return build(value)
    if is_reference(value):
        return find(value["ref"])
    if isinstance(value, Mapping):
        return {name: _build_inside(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_build_inside(item) for item in value]
    return value
