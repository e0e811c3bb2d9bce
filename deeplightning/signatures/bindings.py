"""Read from the text of a Python file what its names are bound to. Nothing is imported or executed.

A name may have several possible bindings (`if`, `try`), which `names` resolves. We use `ast` rather than griffe, which
keeps no function bodies and only one of several bindings, and takes twice the time.
"""

import ast
import gc
import importlib.util
import pkgutil
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from deeplightning import own_code
from deeplightning.own_code import INSTALLED, short


class Broken(Exception):
    """A file that is not valid Python. The text is that of the error."""


# ---- files


@dataclass(eq=False)
class Module:
    """A source file, or a folder without `__init__.py`.

    Attributes:
        name: its dotted name.
        file: None for a folder, and for a module without source.
        folders: the folders of its submodules; None if it is not a package.
        loader: Python's loader, which reads the file.
    """

    name: str
    file: Path | None
    folders: tuple[str, ...] | None
    loader: SourceFileLoader | None = None

    @property
    def is_compiled(self) -> bool:
        """Return whether it is written in C, so that its names cannot be read."""
        return self.file is None and self.folders is None

    @cached_property
    def text(self) -> bytes:
        if self.file is None or self.loader is None:
            return b""
        try:
            return self.loader.get_data(str(self.file))
        except OSError as error:
            raise Broken(f"{type(error).__name__}: {error}") from error

    @cached_property
    def tree(self) -> ast.Module:
        """Return its syntax tree.

        Raises:
            Broken: it is not valid Python.
        """
        file = str(self.file)
        if file not in _trees or _trees[file][0] != self.text:
            try:
                _trees[file] = self.text, _parse(self.text, file)
            except SyntaxError as error:
                place = f"{short(error.filename or '?')}:{error.lineno}"
                raise Broken(f"{type(error).__name__}: {error.msg} ({place})") from error
            except (ValueError, RecursionError, MemoryError) as error:
                raise Broken(f"{type(error).__name__}: {error}") from error
        return _trees[file][1]

    def may_bind(self, name: str) -> bool:
        """Return whether it can bind a name, judged by a search in its text."""
        words = (name.encode(), b"import *", b"globals", b"vars(", b"exec")
        return any(word in self.text for word in words)

    @cached_property
    def scope(self) -> "Scope":
        return Scope.of(self.tree, self)

    @cached_property
    def type_imports(self) -> dict[str, str]:
        """Map the local names of `Tensor` and our config, imported also for type checkers only, to their modules."""
        body = [*self.tree.body, *(inner for node in self.tree.body if isinstance(node, ast.If) for inner in node.body)]
        imports = [node for node in body if isinstance(node, ast.ImportFrom)]
        wanted = ("Tensor", "Config", "PartConfig")
        return {a.asname or a.name: str(node.module) for node in imports for a in node.names if a.name in wanted}

    @cached_property
    def submodules(self) -> list[str]:
        return [found.name for found in pkgutil.iter_modules(self.folders or ())]

    @property
    def is_user_code(self) -> bool:
        """Return whether it is the user's own code and not an installed package."""
        return self.file is not None and not str(self.file).startswith(INSTALLED)

    def place(self, line: int) -> str:
        """Return ` (file:line)` for own code, or "" for installed code."""
        return f" ({short(str(self.file))}:{line})" if self.is_user_code else ""


_trees: dict[str, tuple[bytes, ast.Module]] = {}  # text and syntax tree by file


def module(name: str) -> Module | None:
    """Return the module of this name, or None if there is none. Parent packages are not imported."""
    folders: Sequence[str] | None = None
    parts = ("_collections_abc" if name == "collections.abc" else name).split(".")  # Python 3.13 gives it no file
    spec: Any = None
    for depth in range(1, len(parts) + 1):
        if depth > 1 and not folders:
            return None
        spec = _spec(".".join(parts[:depth]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    inside = None if spec.submodule_search_locations is None else tuple(folders or ())
    file = spec.origin if spec.has_location else None
    if file is None or not file.endswith(".py"):
        return Module(name, None, inside)
    return Module(name, Path(file), inside, spec.loader)


def _spec(name: str, folders: Sequence[str] | None) -> object:
    if folders is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ValueError, ImportError):  # loaded by hand
            spec = None
        return spec if spec and spec.origin != "frozen" else PathFinder.find_spec(name) or spec
    portions: list[str] = []
    for folder in folders:  # PathFinder needs the parents of a nested folder imported
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        if spec is not None:
            portions += spec.submodule_search_locations or ()
    if portions:
        spec = importlib.util.spec_from_loader(name, None, is_package=True)
        assert spec is not None
        spec.submodule_search_locations = portions
        return spec
    return None


def _parse(text: bytes, file: str) -> ast.Module:
    """Return the syntax tree of a file. Garbage collection is off: it would find nothing and double the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            return ast.parse(text, file)
    finally:
        if was_enabled:
            gc.enable()


# ---- bindings


@dataclass(frozen=True, eq=False)
class Binding:
    """A possible binding of a name.

    Attributes:
        order: its position in the scope; the last one wins.
        line: its line in the file.
    """

    order: int
    line: int


@dataclass(frozen=True, eq=False)
class Imported(Binding):
    """`import module` or `from module import name`; `is_tried`: in a `try`, which may handle its failure."""

    module: str
    name: str | None
    is_tried: bool = False


@dataclass(frozen=True, eq=False)
class Defined(Binding):
    """`class` or `def`."""

    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Assigned(Binding):
    """`name = value`, also with an annotation."""

    value: ast.expr


@dataclass(frozen=True, eq=False)
class Opaque(Binding):
    """A value known only at run time, such as a loop variable; `what` describes it. None: the name is unbound."""

    what: str | None


UNBOUND = Opaque(-1, 0, None)


Names = dict[str, tuple[Binding, ...]]


@dataclass(eq=False)
class Scope:
    """The names of a module or class.

    Attributes:
        stars: `from module import *`, as an import of the name `*`, and whether it is certainly reached.
        exported: the parts of `__all__`, with None for one that is unknown.
        patched: attributes that are assigned to a name, such as `("Model", "__init__")`.
        imports: modules that are certainly imported, with the line.
        rebound: names that are bound more than once.
    """

    module: Module
    names: Names = field(default_factory=dict)
    stars: list[tuple[Imported, bool]] = field(default_factory=list)
    exported: list[ast.expr | None] = field(default_factory=list)
    patched: set[tuple[str, str]] = field(default_factory=set)
    imports: list[tuple[str, int]] = field(default_factory=list)
    rebound: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, module: Module) -> "Scope":
        """Return the names that a module or class binds, or the local names of a function."""
        scope = cls(module)
        reader = _Reader(scope)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node) if is_function else ():  # nested functions and comprehensions too
            if isinstance(inner, ast.arg):
                reader.bind(inner.arg, Opaque, inner.lineno, "is known only at run time")
            elif isinstance(inner, ast.comprehension):
                reader.bind_opaque(inner.target, "is known only at run time")
        reader.run_body(node.body)
        scope.names = reader.names
        return scope

    @cached_property
    def dynamic_names(self) -> str | None:
        """Return the first expression of the module that may bind names at run time, such as `globals()`, or None."""
        found = re.search(rb"\b(globals|vars|exec|locals)\(|\bsys\.modules\b", self.module.text)
        return found[0].decode().replace("(", "()") if found else None


class _Reader:
    """Interprets the statements of one scope, as far as their effect on names is known."""

    def __init__(self, scope: Scope):
        self.scope, self.names = scope, scope.names
        self.order, self.certain, self.is_tried = 0, True, False

    def bind(self, name: str, kind: type[Binding], line: int, *more: object) -> None:
        self.order += 1
        if name in self.names:
            self.scope.rebound.add(name)
        self.names[name] = (kind(self.order, line, *more),)

    def run_body(self, body: list[ast.stmt]) -> bool:
        """Interpret a body, and return whether its end is reached."""
        return all(self.run_statement(statement) for statement in body)

    def run_statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.bind(node.name, Defined, node.lineno, node)
            case ast.Import():
                for alias in node.names:
                    bound = alias.name if alias.asname else alias.name.partition(".")[0]
                    full = own_code.full_name(alias.name)
                    self.record_import(full, node.lineno)
                    if alias.asname is None:
                        full = own_code.full_name(bound)
                    self.bind(alias.asname or bound, Imported, node.lineno, full, None, self.is_tried)
            case ast.ImportFrom():
                self.import_from(node)
            case ast.Assign():
                for target in node.targets:
                    self.assign(target, node.value, node.lineno)
            case ast.AnnAssign(value=ast.expr() as value):
                self.assign(node.target, value, node.lineno)
            case ast.AnnAssign(target=ast.Name(id=name)) if name not in self.names:
                self.order += 1
                self.names[name] = (Opaque(-1, node.lineno, None),)  # an annotation binds nothing
            case ast.AugAssign(target=ast.Name(id="__all__")):
                self.scope.exported.append(node.value if self.certain else None)
            case ast.AugAssign():
                self.bind_opaque(node.target, "is changed in place")
            case ast.Delete():
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.bind(target.id, Opaque, node.lineno, None)
            case ast.Expr(value=ast.Call() as call):
                self.call(call)
            case ast.If():
                truth = _is_true(node.test)
                if truth is not None:
                    return self.run_body(node.body if truth else node.orelse)
                return self.run_alternatives([node.body, node.orelse])
            case ast.Try() | ast.TryStar():
                return self.run_try(node)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    if item.optional_vars is not None:
                        self.bind_opaque(item.optional_vars, "is bound by `with`")
                if any("suppress" in ast.unparse(item.context_expr) for item in node.items):
                    return self.run_alternatives([node.body, []])
                return self.run_body(node.body)
            case ast.For() | ast.AsyncFor() | ast.While():
                if not isinstance(node, ast.While):
                    self.bind_opaque(node.target, "is bound by a loop")
                self.run_alternatives([node.body, []])
                return self.run_body(node.orelse)
            case ast.Match():
                self.run_alternatives([*(case.body for case in node.cases), []])
            case ast.Raise() | ast.Return() | ast.Continue() | ast.Break():
                return self.certain and isinstance(node, ast.Raise)  # a module that always raises fails at run time
        for inner in ast.iter_child_nodes(node) if not hasattr(node, "body") else ():
            if isinstance(inner, ast.NamedExpr):
                self.bind_opaque(inner.target, "is bound inside an expression")
        return True

    def record_import(self, module: str, line: int) -> None:
        if self.certain:
            self.scope.imports.append((module, line))

    def import_from(self, node: ast.ImportFrom) -> None:
        module = absolute(node, self.scope.module)
        if module != "__future__":
            self.record_import(module, node.lineno)
        for alias in node.names:
            if alias.name == "*":
                self.order += 1
                self.scope.stars.append((Imported(self.order, node.lineno, module, "*"), self.certain))
            else:
                self.bind(alias.asname or alias.name, Imported, node.lineno, module, alias.name, self.is_tried)

    def assign(self, target: ast.expr, value: ast.expr, line: int) -> None:
        match target:
            case ast.Name(id=name):
                if name == "__all__":
                    self.scope.exported[:] = [value if self.certain else None]
                self.bind(name, Assigned, line, value)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                self.scope.patched.add((name, attribute))
            case _:
                self.bind_opaque(target, "is bound to a part of another value")

    def bind_opaque(self, target: ast.expr, what: str) -> None:
        for node in ast.walk(target):
            match node:
                case ast.Name(id=name, ctx=ast.Store()):
                    self.bind(name, Opaque, node.lineno, what)
                case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Store()):
                    self.scope.patched.add((name, attribute))

    def call(self, call: ast.Call) -> None:
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="__all__"), attr=how), args=args):
                value = ast.List(args, ast.Load()) if how == "append" else args[0] if how == "extend" and args else None
                self.scope.exported.append(value if self.certain else None)
            case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), ast.Constant(value=str(word)), _]):
                self.scope.patched.add((name, word))

    # ---- conditional code

    def run_alternatives(self, bodies: Sequence[list[ast.stmt]]) -> bool:
        """Interpret alternative bodies, and merge the bindings that each of them leaves."""
        before, was_certain, self.certain = self.names, self.certain, False
        outcomes = []
        for body in bodies:
            self.names = dict(before)
            if self.run_body(body):
                outcomes.append(self.names)
            else:  # the calls of a function that returns there use these names
                self.scope.rebound |= self.names.keys() - before.keys()
        self.certain = was_certain
        self.names = _merge_names(outcomes) if outcomes else before
        return bool(outcomes)

    def run_try(self, node: ast.Try | ast.TryStar) -> bool:
        """Interpret a `try`. Whether the modules that it imports exist is looked up when a name is resolved."""
        before, was_certain, was_tried = self.names, self.certain, self.is_tried
        self.names, self.certain, self.is_tried = dict(before), False, True
        outcomes = [self.names] if self.run_body(node.body) and self.run_body(node.orelse) else []
        self.is_tried = was_tried
        for handler in node.handlers:
            self.names = dict(before)
            if handler.name:
                self.bind(handler.name, Opaque, handler.lineno, None)
            if self.run_body(handler.body):
                outcomes.append(self.names)
        self.certain = was_certain
        self.names = _merge_names(outcomes) if outcomes else before
        return self.run_body(node.finalbody) and bool(outcomes)


def _merge_names(several: list[Names]) -> Names:
    if len(several) == 1:
        return several[0]
    names = {name for each in several for name in each}
    found = {name: [binding for each in several for binding in each.get(name, (UNBOUND,))] for name in names}
    return {name: tuple(dict.fromkeys(bindings)) for name, bindings in found.items()}


def absolute(node: ast.ImportFrom, module: Module) -> str:
    """Return the absolute name of the module in `from … import`."""
    if node.module and not node.level:
        return own_code.full_name(node.module)
    above = module.name.split(".")
    above = above[: len(above) - node.level + (module.folders is not None)]
    return ".".join([*above, *([node.module] if node.module else [])]) if above else ""  # "": it has no parent


def _is_true(test: ast.expr) -> bool | None:
    """Return whether a condition holds in this Python, or None if unknown."""
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return False
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return None if (known := _is_true(inner)) is None else not known
        case ast.BoolOp(op=ast.And(), values=values) if False in map(_is_true, values):
            return False
        case ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant(value="__main__")]):
            return False
    return None
