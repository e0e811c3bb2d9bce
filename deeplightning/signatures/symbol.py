"""A resolved name (`Symbol`), the errors of names that cannot be resolved, and the frame of an expression."""

import ast
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deeplightning.signatures.bindings import Binding, Broken, Imported, Module, Opaque, Scope
from deeplightning.signatures.signature import Undecided

Kind = Literal["class", "function", "value", "module"]
Functions = ast.FunctionDef | ast.AsyncFunctionDef


class Absent(Exception):
    """The owner certainly has no attribute of this name. `known` lists those that it has."""

    def __init__(self, name: str, known: list[str]):
        super().__init__(name)
        self.name, self.known = name, known


class ImportFails(Exception):
    """Importing would certainly fail. The text explains how, and follows "importing … (for …) "."""


class PackageMissing(ImportFails):
    """Importing would fail because a package is not installed."""


RESOLUTION_ERRORS = (Undecided, Absent, ImportFails, Broken)
"""Errors of a name or an expression that cannot be resolved."""


@dataclass(frozen=True)
class Symbol:
    """The definition of a module, class, function or value.

    Attributes:
        module: the module that defines it.
        name: within its module, such as `Class.method`.
        node: its syntax tree.
        owner: the class through which a method was found.
        live: the live object, for the standard library.
    """

    kind: Kind
    module: Module | None
    name: str
    node: Any = None
    owner: "Symbol | None" = None
    live: Any = None

    @property
    def path(self) -> str:
        if self.live is not None:
            if isinstance(self.live, types.ModuleType):
                return self.live.__name__
            home = getattr(self.live, "__module__", None) or (self.owner.live.__module__ if self.owner else "builtins")
            return f"{home}.{getattr(self.live, '__qualname__', self.name)}"
        assert self.module is not None
        return f"{self.module.name}.{self.name}" if self.name else self.module.name

    @property
    def file(self) -> Path | None:
        return self.module.file if self.module else None

    @property
    def key(self) -> tuple[str, int, str | None]:
        return (self.path, id(self.node), self.owner.path if self.owner else None)


@dataclass(frozen=True)
class Frame:
    """The context in which the names of an expression are resolved.

    Attributes:
        module: its file.
        scope: that of the enclosing class, in a class body.
        function: the enclosing function.
        mro: the class of a call and its ancestors, in Python's order.
        complete: whether all ancestors are known.
        position: the position in `mro` of the class that defines the function.
    """

    module: Module
    scope: Scope | None = None
    function: Functions | None = None
    mro: tuple[Symbol, ...] = ()
    complete: bool = True
    position: int = 0


def is_unbound(option: Binding) -> bool:
    return isinstance(option, Opaque) and option.what is None


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("TypeVar", "ParamSpec")


def stdlib_path(node: ast.expr, module: Module) -> str | None:
    """Return the path of a name from the standard library, such as `typing.Optional`, without reading its source."""
    inner = node.value if isinstance(node, ast.Attribute) else node
    options = module.scope.names.get(inner.id, ()) if isinstance(inner, ast.Name) else ()
    only = options[0] if len(options) == 1 else None
    if not isinstance(only, Imported) or only.module.partition(".")[0] not in _STDLIB:
        return None
    return ".".join(filter(None, (only.module, only.name, node.attr if isinstance(node, ast.Attribute) else None)))


_STDLIB = {"typing", "typing_extensions", "collections", "dataclasses", "contextlib", "functools", "abc", "warnings"}


def positional_arguments(function: Functions) -> list[str]:
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]


def first_argument(function: Functions) -> str | None:
    return next(iter(positional_arguments(function)), None)


def body_nodes(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Return the nodes of a body, except those inside its functions and classes."""
    pending = list(body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def method_kind(node: Functions) -> str | None:
    """Return `staticmethod`, `classmethod` or `property`, or None for any other function."""
    names = [decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)]
    names += ["classmethod"] if node.name in ("__init_subclass__", "__class_getitem__") else []
    return next((name for name in names if name in ("staticmethod", "classmethod", "property")), None)
