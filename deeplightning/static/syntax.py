"""Questions that a piece of source answers by itself: what is local, unbound, or a word of `typing`."""

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deeplightning.static import bindings
from deeplightning.static.bindings import Binding, Imported, Module
from deeplightning.static.symbol import Functions

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_unbound(option: Binding) -> bool:
    return isinstance(option, bindings.Opaque) and option.what is None


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("TypeVar", "ParamSpec")


def nominal(node: ast.expr, module: Module) -> str | None:
    """`typing.Optional` of what a module has imported under that or another name, without reading `typing`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        options = module.scope.names.get(node.value.id, ())
        if len(options) == 1 and isinstance(options[0], Imported):
            head = options[0].module if options[0].name is None else f"{options[0].module}.{options[0].name}"
            if head.partition(".")[0] in _NOMINAL:
                return f"{head}.{node.attr}"
    if isinstance(node, ast.Name):
        options = module.scope.names.get(node.id, ())
        if len(options) == 1 and isinstance(options[0], Imported) and options[0].module.partition(".")[0] in _NOMINAL:
            return f"{options[0].module}.{options[0].name}"
    return None


_NOMINAL = {"typing", "typing_extensions", "collections", "dataclasses", "contextlib", "functools", "abc", "warnings"}


def first_argument(function: Functions) -> str | None:
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else None


def inside(body: "Sequence[ast.AST]") -> Iterator[ast.AST]:
    """The nodes of a body without those of the functions and classes that are defined in it."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
