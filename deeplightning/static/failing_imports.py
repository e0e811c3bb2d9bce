"""Why importing a module would certainly fail: a package that is not installed, or a `raise`."""

import ast
import builtins
import importlib.util
import sys
from collections.abc import Iterator

from deeplightning.faults import install
from deeplightning.static.bindings import Module
from deeplightning.static.symbol import Failing, Lacking


def missing_packages(module: Module) -> Iterator[tuple[str, int]]:
    """The packages that a module certainly imports and that are not installed, with the line."""
    for name, line in module.scope.imports:
        top = name.partition(".")[0]
        if top not in sys.modules and not _is_there(top):
            yield top, line


def lacking(top: str, place: str) -> Lacking:
    return Lacking(f"needs {top}, which is not installed here{place}: {install(top)}")


def raised_by(node: ast.Raise, module: Module) -> Failing:
    """What importing a module ends with that comes to this statement."""
    words, called = f"`{ast.unparse(node):.200}`", node.exc
    match called:
        case ast.Name(id=str(name)):
            words = name
        case ast.Call(func=ast.Name(id=str(name)) as called, args=arguments):
            if [type(each) for each in arguments] == [ast.Constant]:
                words = f"{name}: {arguments[0].value}"  # type: ignore[attr-defined]
    found = getattr(builtins, called.id, None) if isinstance(called, ast.Name) else None
    kind = Lacking if isinstance(found, type) and issubclass(found, OSError | ImportError) else Failing
    return kind(f"failed: {words}{module.place(node.lineno)}")


def _is_there(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ValueError, ImportError):
        return True
