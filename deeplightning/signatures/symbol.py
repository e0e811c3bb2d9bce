"""What a name can mean (a thing or no thing), and the frame in which an expression is read."""

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
    """There is certainly no such name: its owner, the name, the names that are there."""

    def __init__(self, name: str, known: list[str]):
        super().__init__(name)
        self.name, self.known = name, known


class Failing(Exception):
    """Importing would certainly fail; the text says how, behind "importing … (for …) "."""


class Lacking(Failing):
    """It would fail for something that this machine does not have."""


UNKNOWABLE = (Undecided, Absent, Failing, Broken)
"""What is raised where a name or an expression does not lead to a thing."""


@dataclass(frozen=True)
class Thing:
    """A module, class, function or value, where it is defined.

    Attributes:
        module: that holds it.
        name: inside its module, `Class.method`.
        node: its source.
        owner: the class through which a method was found.
        live: itself, where the standard library holds it.
    """

    kind: Kind
    module: Module | None
    name: str
    node: Any = None
    owner: "Thing | None" = None
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
    """The scope of an expression: what its names mean.

    Attributes:
        module: the file.
        scope: of the class around it, if it is in a class body.
        function: around it.
        line: the line of ancestors of the class that a call is about, itself first.
        complete: whether the line is whole.
        position: in that line, of the class that holds the function.
    """

    module: Module
    scope: Scope | None = None
    function: Functions | None = None
    line: tuple[Thing, ...] = ()
    complete: bool = True
    position: int = 0


def is_unbound(option: Binding) -> bool:
    return isinstance(option, Opaque) and option.what is None


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("TypeVar", "ParamSpec")


def nominal(node: ast.expr, module: Module) -> str | None:
    """Return `typing.Optional` for what a module has imported under that or another name, without reading `typing`."""
    inner = node.value if isinstance(node, ast.Attribute) else node
    options = module.scope.names.get(inner.id, ()) if isinstance(inner, ast.Name) else ()
    only = options[0] if len(options) == 1 else None
    if not isinstance(only, Imported) or only.module.partition(".")[0] not in _NOMINAL:
        return None
    return ".".join(filter(None, (only.module, only.name, node.attr if isinstance(node, ast.Attribute) else None)))


_NOMINAL = {"typing", "typing_extensions", "collections", "dataclasses", "contextlib", "functools", "abc", "warnings"}


def positional_arguments(function: Functions) -> list[str]:
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]


def first_argument(function: Functions) -> str | None:
    return next(iter(positional_arguments(function)), None)


def inside(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Return the nodes of a body without those of the functions and classes that are defined in it."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def role_of_function(node: Functions) -> str | None:
    """Return `staticmethod`, `classmethod` or `property` for a function that is one."""
    names = [decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)]
    names += ["classmethod"] if node.name in ("__init_subclass__", "__class_getitem__") else []
    return next((name for name in names if name in ("staticmethod", "classmethod", "property")), None)
