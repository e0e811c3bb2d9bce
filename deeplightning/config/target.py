"""Import and build targets: `MODULE.CLASS` or `MODULE.FUNCTION` with params.

Only this module imports by name.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from deeplightning import own_code
from deeplightning.config.schema import Config, Target
from deeplightning.config.section_kinds import is_bound, misfit, no_part, role_of
from deeplightning.faults import (
    ConfigError,
    Fault,
    Missing,
    SetupError,
    UserError,
    error_of,
    install_command,
    is_full,
    nearest,
    no_module,
    parts_of,
)
from deeplightning.signatures.signature import Options, Signature, Undecided, factory_of, of_item, of_object
from deeplightning.words import first_line


def is_installed(package: str) -> bool:
    """Return whether a top-level package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def is_target(value: object) -> bool:
    """Return whether a mapping inside params is a target: only `type` (with a dot) and optionally `params`."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("type"), str)
        and "." in value["type"]
        and set(value) <= {"type", "params"}
        and isinstance(value.get("params"), Mapping | None)
    )


def is_reference(value: object) -> bool:
    """Return whether a mapping inside params is a reference, `{ref: MODULE.NAME}`, which is not called."""
    return (
        isinstance(value, Mapping) and set(value) == {"ref"} and isinstance(value["ref"], str) and "." in value["ref"]
    )


def find(name: str) -> Any:
    """Return the object that `MODULE.NAME` (or `MODULE.CLASS.METHOD`) names.

    Raises:
        ValueError: no object has this name (the message suggests the nearest), or its module cannot be imported;
            `Missing` if this machine lacks a package or library that the module needs.
    """
    parts = parts_of(name)
    found: object = None
    for depth in range(len(parts) - 1, 0, -1):
        if (found := _import_module(".".join(parts[:depth]), name)) is not None:
            break
    if found is None:
        known = [m.name for m in pkgutil.iter_modules()] if len(parts[0]) > 2 else []
        raise no_module(parts[0], name, known, own_code.roots())
    read = own_code.lookup_hint(name, getattr(found, "__file__", None))
    for part in parts[depth:]:
        owner = ".".join(parts[:depth])
        try:
            module = None if hasattr(found, part) else _import_module(f"{owner}.{part}", name)
            found = module or getattr(found, part)
        except ValueError:
            raise
        except AttributeError:
            public = [n for n in dir(found) if not n.startswith("_")]
            public += [m.name for m in pkgutil.iter_modules(getattr(found, "__path__", ()))]
            objects = [n for n in public if own_code.full_name(f"{owner}.{n}") not in sys.modules]
            near = nearest(part, objects if depth == len(parts) - 1 else public).replace("mean ", f"mean {owner}.", 1)
            raise ValueError(f"{owner} has no `{part}`.{near}{read}") from None
        except (Exception, SystemExit) as error:  # a module that imports on access
            raise _import_error(error, f"{owner}.{part}", name) from error
        depth += 1
    return found


def _import_module(module: str, wanted: str) -> types.ModuleType | None:
    full = own_code.full_name(module)
    try:
        return importlib.import_module(full)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{full}.".startswith(f"{error.name}."):
            return None
        raise _import_error(error, module, wanted) from error


def _import_error(error: BaseException, module: str, wanted: str) -> ValueError:
    """Return the error to raise if importing a module failed."""
    lacks = isinstance(error, ImportError | OSError) and not str(error).startswith("cannot import name")
    if isinstance(error, ModuleNotFoundError) and error.name:
        lacks = not is_installed(error.name.partition(".")[0])
    words = needs(error) or f"failed: {reason(error)}"
    return (Missing if lacks else ValueError)(f"importing {module} (for `{wanted}`) {words}")


def needs(error: BaseException) -> str | None:
    """Describe the missing package that caused an error and how to install it, or return None."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name or is_installed(name.partition(".")[0]):
        return None
    return f"needs {name}, which is not installed here{own_code.user_location(error)}: {install_command(name)}"


def path_of(found: object) -> str | None:
    """Return where a live class or function is defined, such as `posix.system` for `os.system`, or None if unknown."""
    if not isinstance(found, type | types.FunctionType | types.BuiltinFunctionType) or not found.__module__:
        return None
    return f"{found.__module__}.{found.__qualname__}"


def reason(error: BaseException) -> str:
    """Describe an error, with the line of the user's own code that it came from, if any."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({own_code.short(error.filename or '?')}:{error.lineno})"
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{words}{own_code.user_location(error)}"


def signature_of(name: str, found: Any) -> Signature:
    """Return the signature of a live class or function. Parameters that `**kwargs` passes on, and annotations that are
    not imported at run time, are read from source.

    Raises:
        Undecided: it has no signature (a function written in C).
    """
    live = of_object(found)
    if live.rest is None and not live.unresolved:
        return live
    from deeplightning.signatures import definition

    try:
        read = definition.look_up(name).signature()
    except (ValueError, Undecided):
        return live
    return read if read.rest is None else live


def build(target: Target | Mapping[str, Any], *given: object, **more: Any) -> Any:
    """Build a target: call it with `given`, its params and `more`, which overrides params.

    Targets and references inside the params, at any depth, are built first. If a parameter takes a callable, a target
    becomes a callable with its params bound, as does every optimizer and schedule. If the first of `given` is a config,
    it is passed to a first parameter that is named `cfg` or annotated with its type, or dropped without such a one.

    Raises:
        ConfigError: the target cannot be found, is no part of a run, cannot be built, or returns an object that does
            not fit its section.
        SetupError: it needs a package that is not installed, a missing file, or a download that fails.
    """
    return _build(target, given, more)


def _build(
    target: Target | Mapping[str, Any],
    given: tuple[object, ...] = (),
    more: Mapping[str, Any] = types.MappingProxyType({}),
    wanted: Options = None,
    inside: bool = False,
) -> Any:
    if isinstance(target, Mapping):
        target = Target(type=target["type"], params=dict(target.get("params") or {}))
    role = role_of(target.name or "")
    try:
        found = find(target.type)
        if refusal := no_part(target.type, role) or no_part(path_of(found) or "", role):
            raise ValueError(refusal)
        has_config = bool(given) and isinstance(given[0], Config)
        signature: Signature | None = None
        if has_config or inside or any(isinstance(value, Mapping | list) for value in target.params.values()):
            with contextlib.suppress(Undecided):
                signature = signature_of(target.type, found)
        allowed = {p.name: p.allowed for p in signature.parameters} if signature else {}
        params = {name: build_inside(value, allowed.get(name)) for name, value in target.params.items()}
    except ValueError as error:
        code = getattr(error, "exit_code", 2)
        raise error_of([Fault(str(error), target.name, target.place, exit_code=code)]) from error
    if inside:
        paths = [path_of(c) or "" for c in found.__mro__] if isinstance(found, type) else []
        is_lacking = signature is None or bool(signature.lacking(params))
        if is_bound(paths, is_lacking, factory_of(wanted)):
            return functools.partial(found, **_with_tensors(found, params))
    if has_config and signature is not None:
        config = signature.config()
        if config is not None and not config.position:
            more = {config.name: given[0], **more}
        given = given if config is not None and config.position else given[1:]
    try:
        made = found(*given, **{**_with_tensors(found, params), **more})
    except Exception as error:
        if hasattr(error, "exit_code") or os.environ.get("DEEPLIGHTNING_DEBUG") == "1" or not _is_config_error(error):
            raise
        raise _build_error(error, target) from error
    if role is not None and (mismatch := misfit([path_of(c) or "" for c in type(made).__mro__], True, role)):
        returned = "nothing" if made is None else f"`{type(made).__name__}`"
        raise ConfigError(Fault(f"{target.type} returns {returned}, which {mismatch}", target.name, target.place))
    return made


def _build_error(error: Exception, target: Target) -> UserError:
    """Return the error to raise if the constructor or function of a target failed."""
    message = f"{target.type} cannot be built: {reason(error)}"
    kind: type[UserError] = SetupError if isinstance(error, ImportError | OSError) else ConfigError
    if isinstance(error, ImportError):
        message = f"{target.type} {needs(error) or f'needs a package that is not installed: {error}'}"
    elif isinstance(error, OSError):
        if error.errno is None and not (type(error) is OSError and own_code.is_user_file(own_code.raising_file(error))):
            message = (
                f"{target.type} downloads files when it is built, and that failed: {first_line(error)}. Connect the "
                "machine, or copy them from one that has them (~/.cache/torch, ~/.cache/huggingface)"
            )
    elif isinstance(error, TypeError | ValueError):
        message = f"{target.type} refuses its arguments: {reason(error)}"
    return kind(Fault(message, target.name, target.place))


def _is_config_error(error: Exception) -> bool:
    """Return whether the config caused a constructor's error, not memory, a full disk or a bug in Deep Lightning."""
    if type(error).__name__ == "OutOfMemoryError" or (isinstance(error, OSError) and is_full(error)):
        return False
    is_unexpected = not isinstance(error, ImportError | OSError | TypeError | ValueError)
    return not (is_unexpected and own_code.raising_file(error).startswith(own_code.OURS))


def _with_tensors(found: object, params: dict[str, object]) -> dict[str, object]:
    """Return params with lists of numbers as float32 tensors where the parameter is annotated `Tensor`, or `Tensor` or
    None.

    Raises:
        ValueError: such a list is ragged.
    """
    lists = [name for name, value in params.items() if isinstance(value, list) and value and _is_numbers(value)]
    if not lists:
        return params
    import torch

    try:
        hints = typing.get_type_hints(found.__init__ if inspect.isclass(found) else found)
    except Exception:  # there are no annotations, or one cannot be resolved
        return params
    to_convert = [n for n in lists if hints.get(n) in (torch.Tensor, torch.Tensor | None)]
    return params | {name: torch.tensor(params[name], dtype=torch.float32) for name in to_convert}


def _is_numbers(value: object) -> bool:
    """Return whether a value is a number, or a list of numbers at any depth."""
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def build_inside(value: Any, wanted: Options = None) -> Any:
    """Build the targets and references in a value inside params, at any depth.

    A target becomes a callable with its params bound where `section_kinds.is_bound` holds.

    Args:
        wanted: the options of the parameter that takes the value; None: unknown.
    """
    if is_target(value):
        return _build(value, wanted=wanted, inside=True)
    if is_reference(value):
        return find(value["ref"])
    if isinstance(value, Mapping):
        return {name: build_inside(item) for name, item in value.items()}
    if isinstance(value, list):
        return [build_inside(item, of_item(wanted, number)) for number, item in enumerate(value)]
    return value
