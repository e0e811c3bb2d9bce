"""What a dotted name means, and what it takes, found in source text: nothing of the target is imported.

`look_up` follows a name through re-exports to its class or function; `Definition` answers what `check` and `explain`
ask of it. What only running the code would tell is `Undecided`, never guessed. `target` does the same by importing,
and says what is missing in the same words.

Modules of the standard library that this process holds anyway (`_HELD`) are asked directly.
"""

import ast
import builtins
import importlib.util
import inspect
import keyword
import pkgutil
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal

from deeplightning.config import bindings
from deeplightning.config.bindings import Assigned, Binding, Broken, Defined, Imported, Module, Scope
from deeplightning.config.signature import SIMPLE, UNKNOWN, Parameter, Signature, Undecided, of_object

Kind = Literal["class", "function", "value", "module"]

_HELD = (
    "abc", "builtins", "collections", "collections.abc", "contextlib", "dataclasses", "enum", "functools", "itertools",
    "operator", "os", "os.path", "types", "typing",
)  # fmt: skip

# Decorators that leave alone what a function takes, beside those whose source shows it.
_KEEPING = {
    "abc.abstractmethod", "contextlib.contextmanager", "contextlib.asynccontextmanager", "functools.cache",
    "functools.lru_cache", "functools.total_ordering", "typing.final", "typing.no_type_check", "typing.overload",
    "typing.runtime_checkable", "typing_extensions.deprecated", "typing_extensions.final",
    "typing_extensions.overload", "typing_extensions.override", "typing_extensions.runtime_checkable",
    "warnings.deprecated",
}  # fmt: skip

_FRAMEWORKS = ("torch", "pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics", "torchvision")

Functions = ast.FunctionDef | ast.AsyncFunctionDef


class _Absent(Exception):
    """There is certainly no such name: its owner, the name, the names that are there."""

    def __init__(self, name: str, known: list[str]):
        super().__init__(name)
        self.name, self.known = name, known


class _Failing(Exception):
    """Importing would certainly fail; the text says how, behind "importing … (for …) "."""


# ---- what is asked


def look_up(name: str) -> "Definition":
    """What a dotted name means.

    Raises:
        ValueError: there is certainly nothing of this name, in the words of `target.find`.
        Undecided: that cannot be told without importing.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(p.isidentifier() and not keyword.iskeyword(p) for p in parts):
        raise ValueError(f"`{name}` is no MODULE.NAME such as torch.optim.SGD.")
    walk = _Walk()
    try:
        thing = _find(parts, walk)
    except RecursionError:
        raise Undecided("its source is nested too deeply") from None
    except (_Failing, Broken) as error:
        words = f"failed: {error}" if isinstance(error, Broken) else str(error)
        raise ValueError(f"importing {'.'.join(parts[:-1])} (for `{name}`) {words}") from None
    return Definition(name, thing.path, thing.kind, thing.file, thing, walk)


def _find(parts: list[str], walk: "_Walk") -> "_Thing":
    name = ".".join(parts)
    module, depth = None, 0
    for depth in range(min(len(parts) - 1, 50), 0, -1):
        module = walk.module(".".join(parts[:depth]))
        if module is not None:
            break
    if module is None:
        known = [m.name for m in pkgutil.iter_modules()] if len(parts[0]) > 2 else []
        raise ValueError(f"there is no module {parts[0]} to import (for `{name}`).{_nearest(parts[0], known)}")
    thing = walk.of_module(module)
    for part in parts[depth:]:
        try:
            thing = walk.member(thing, part)
        except Undecided:
            # What has something behind it is a module or class. A module is a file: where one of nearly this name lies,
            # and this name is written nowhere in the package's own file, it is that one misspelt.
            if depth == len(parts) - 1 or thing.kind != "module" or not _is_misspelt(part, thing.module):
                raise
            owner = ".".join(parts[:depth])
            assert thing.module is not None
            near = _nearest(part, thing.module.submodules()).replace("mean ", f"mean {owner}.", 1)
            raise ValueError(f"{owner} has no `{part}`.{near}") from None
        except _Absent as absent:
            if absent.name != part:
                raise Undecided(f"{absent.name} cannot be found where it is imported from") from None
            owner = ".".join(parts[:depth])
            public = [n for n in absent.known if not n.startswith("_")]
            near = _nearest(part, public).replace("mean ", f"mean {owner}.", 1)
            raise ValueError(f"{owner} has no `{part}`.{near}") from None
        depth += 1
    return thing


def _is_misspelt(part: str, owner: Module | None) -> bool:
    if owner is None or not owner.folders or part.startswith("_"):
        return False
    written = {word for node in ast.walk(owner.tree) for word in _words_of(node)}
    return part not in written and bool(_nearest(part, [n for n in owner.submodules() if not n.startswith("_")]))


def _words_of(node: ast.AST) -> list[str]:
    """The names and texts in a node."""
    found = [getattr(node, name, None) for name in ("id", "attr", "name", "asname", "arg", "value", "module")]
    return [word for word in found if isinstance(word, str)]


def _nearest(word: str, words: list[str]) -> str:
    from deeplightning.config.target import nearest

    return nearest(word, words)


@dataclass(eq=False)
class Definition:
    """What a dotted name means.

    Attributes:
        name: as it was asked.
        path: where it is really defined, `torch.optim.sgd.SGD` of torch.optim.SGD.
        kind: "value" is anything that is no class, function or module.
        file: where its source is, if it has any.
    """

    name: str
    path: str
    kind: Kind
    file: Path | None
    _thing: "_Thing" = field(repr=False)
    _walk: "_Walk" = field(repr=False)

    def bases(self) -> tuple[list[str], bool]:
        """The dotted real paths of itself and its ancestors in the order of Python, without `object`; False behind it
        where an ancestor could not be followed, so that there may be more."""
        if self.kind != "class":
            return [self.path], True
        line, complete = self._walk.line(self._thing)
        return [thing.path for thing in line], complete

    def signature(self) -> Signature:
        """What may be given to it; of classes and of methods that are called on their class, without `self`.

        Raises:
            Undecided: that cannot be told without importing.
        """
        if self.kind == "module" or (self.kind == "value"):
            raise Undecided(f"it is a {self.kind}")
        return self._walk.guarded(lambda: self._walk.signature(self._thing))

    def documentation(self, parameter: str) -> str | None:
        """What a docstring says about a parameter: its own, or the ancestor's that takes it."""
        for text in self._walk.docstrings(self._thing):
            found = _described(text, parameter)
            if found:
                return found
        return None

    def logged_names(self) -> tuple[set[str], bool]:
        """The names that a class gives to `self.log` and `self.log_dict`; False if there may be others.

        What the class says itself in `logged_metrics`, a tuple of literal words, is taken as it is, placeholders
        included.
        """
        if self.kind != "class":
            return set(), False
        return self._walk.logged(self._thing)


# ---- things


@dataclass(frozen=True)
class _Thing:
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
    owner: "_Thing | None" = None
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
    def key(self) -> tuple[Any, ...]:
        return (self.path, id(self.node), self.owner.path if self.owner else None)


@dataclass(frozen=True)
class _Frame:
    """Where an expression stands: what its names mean.

    Attributes:
        module: the file.
        scope: of the class around it, if it stands in a class body.
        function: around it.
        line: the line of ancestors of the class that a call is about, itself first.
        complete: whether the line is whole.
        position: in that line, of the class that holds the function.
        static: the function gets neither an instance nor a class.
    """

    module: Module
    scope: Scope | None = None
    function: Functions | None = None
    line: tuple[_Thing, ...] = ()
    complete: bool = True
    position: int = 0
    static: bool = False

    @property
    def first(self) -> str | None:
        """The word for the instance or class."""
        if self.function is None or self.static or not self.line:
            return None
        arguments = [*self.function.args.posonlyargs, *self.function.args.args]
        return arguments[0].arg if arguments else None


class _Walk:
    """One search through source files. What it has found it keeps; what it is about to find it does not begin again."""

    def __init__(self) -> None:
        self.modules: dict[str, Module | None] = {}
        self.lines: dict[Any, tuple[list[_Thing], bool]] = {}
        self.scopes: dict[int, Scope] = {}
        self.found: dict[Any, _Thing] = {}
        self.active: set[Any] = set()

    def guarded(self, ask: Any) -> Any:
        try:
            return ask()
        except (_Failing, Broken, _Absent) as error:
            raise Undecided(f"what it needs cannot be read: {error}") from None
        except RecursionError:
            raise Undecided("its source is nested too deeply") from None

    def enter(self, key: Any) -> None:
        if key in self.active or len(self.active) > 150:
            raise Undecided("its definition goes round in a circle")
        self.active.add(key)

    # ---- names

    def module(self, name: str) -> Module | None:
        if name not in self.modules:
            self.modules[name] = bindings.module(name)
            module = self.modules[name]
            if module is not None and module.is_ours:
                self.need_imports(module)
                if "." in name:
                    self.module(name.rpartition(".")[0])
        return self.modules[name]

    def need_imports(self, module: Module) -> None:
        """Own code that certainly imports what is not there."""
        for name, line in module.scope.imports:
            top = name.partition(".")[0]
            if top not in sys.modules and not _is_there(top):
                raise _Failing(f"needs {top}, which is not installed here{module.place(line)}")

    @staticmethod
    def of_module(module: Module) -> _Thing:
        return _Thing("module", module, "")

    def member(self, owner: _Thing, name: str) -> _Thing:
        """An attribute.

        Raises:
            _Absent: there is none.
        """
        if owner.live is not None:
            return self.live(owner.live, name, owner)
        if owner.kind == "module":
            assert owner.module is not None
            return self.name_in(owner.module, name)
        if owner.kind == "class":
            return self.attribute(owner, name)
        raise Undecided(f"what `{name}` of a {owner.kind} is shows only when it is imported")

    def live(self, owner: Any, name: str, through: _Thing | None = None) -> _Thing:
        try:
            found = getattr(owner, name)
        except AttributeError:
            raise _Absent(name, dir(owner)) from None
        if isinstance(found, types.ModuleType):
            return _Thing("module", None, name, live=found)
        kind: Kind = "class" if isinstance(found, type) else "function" if callable(found) else "value"
        return _Thing(kind, None, name, None, through if through and through.kind == "class" else None, found)

    def name_in(self, module: Module, name: str) -> _Thing:
        """What a name of a module means, or its submodule of that name."""
        key = (module.name, name)
        if key in self.found:
            return self.found[key]
        if module.name in _HELD and module.name in sys.modules:
            return self.live(sys.modules[module.name], name)
        if module.is_open:
            raise Undecided(f"{module.name} is not written in Python")
        self.enter(key)
        try:
            self.found[key] = self.bound(module, name)
        finally:
            self.active.discard(key)
        return self.found[key]

    def bound(self, module: Module, name: str) -> _Thing:
        scope = module.scope
        options, doubt = self.options(scope, name)
        try:
            if options != (bindings.UNBOUND,) or not doubt:
                return self.one_of(options, name, _Frame(module))
        except _Absent as absent:
            if absent.name != name:
                raise
        submodule = self.module(f"{module.name}.{name}") if module.folders else None
        if submodule is not None:
            return self.of_module(submodule)
        if name in ("__name__", "__file__", "__doc__", "__path__", "__spec__", "__package__", "__loader__"):
            return _Thing("value", module, name)
        if "__getattr__" in scope.names:
            return self.answered(module, name)
        if doubt:
            raise Undecided(doubt)
        if scope.makes_names:
            raise Undecided(f"{module.name} makes names as it is imported ({scope.makes_names})")
        raise _Absent(name, self.names_of(module))

    def options(self, scope: Scope, name: str) -> tuple[tuple[Binding, ...], str | None]:
        """The possible bindings of a name, those by `import *` among them, and why there may be others."""
        options = scope.names.get(name, (bindings.UNBOUND,))
        since = max(option.order for option in options)
        doubt = None
        for star in reversed(scope.stars):
            if star.order < since:
                break
            source = self.module(star.module)
            if source is None:
                doubt = f"{star.module}, whose names {scope.module.name} takes over, is not there"
            elif source.is_open:
                doubt = f"{star.module}, whose names {scope.module.name} takes over, is not written in Python"
            elif source.may_bind(name) and (source.name, name) not in self.active and self.exports(source, name):
                taken = Imported(star.order, star.line, (), star.module, name)
                if star.certain:
                    return (taken,), None
                options = (*options, taken)
        return options, doubt

    def exports(self, module: Module, name: str) -> bool:
        """Whether `from module import *` gives a name."""
        listed = self.listed(module)
        if listed is not None and name not in listed:
            return False
        if listed is None and name.startswith("_"):
            return False
        if any(option is not bindings.UNBOUND for option in module.scope.names.get(name, ())):
            return True
        try:
            self.name_in(module, name)
        except _Absent:
            return False
        except Undecided:  # who wants it will hear why
            pass
        return True

    def listed(self, module: Module) -> set[str] | None:
        """`__all__`, where a module has one that can be told."""
        if not module.scope.exported:
            return None
        names: set[str] = set()
        for part in module.scope.exported:
            inside = self.words(part, _Frame(module)) if part is not None else None
            if inside is None:
                return None
            names |= inside
        return names

    def words(self, node: ast.expr | None, frame: _Frame) -> set[str] | None:
        """The literal words of a list, also of a sum of lists and of another module's `__all__`."""
        match node:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                words: set[str] = set()
                for item in items:
                    match item:
                        case ast.Constant(value=str(word)):
                            words.add(word)
                        case ast.Starred(value=inner) if (more := self.words(inner, frame)) is not None:
                            words |= more
                        case _:
                            return None
                return words
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                parts = [self.words(left, frame), self.words(right, frame)]
                return None if None in parts else set().union(*(part for part in parts if part))
            case ast.Call(func=ast.Name(id="list" | "tuple" | "sorted" | "set"), args=[inner]):
                return self.words(inner, frame)
            case ast.Dict(keys=keys) if all(isinstance(k, ast.Constant) and isinstance(k.value, str) for k in keys):
                return {str(k.value) for k in keys if isinstance(k, ast.Constant)}
            case ast.Attribute(value=owner, attr="__all__"):
                try:
                    found = self.value(owner, frame)
                except (Undecided, _Absent):
                    return None
                return self.listed(found.module) if found.kind == "module" and found.module else None
            case ast.Name() | ast.Attribute():
                try:
                    found = self.value(node, frame)
                except (Undecided, _Absent):
                    return None
                if found.kind == "value" and isinstance(found.node, ast.expr) and found.module:
                    return self.words(found.node, _Frame(found.module))
        return None

    def answered(self, module: Module, name: str) -> _Thing:
        """What a module's own `__getattr__` gives for a name, where it is of the usual kind: `if name == "word":`."""
        vague = Undecided(f"{module.name} makes names when they are asked for (`__getattr__`)")
        options = module.scope.names["__getattr__"]
        node = options[0].node if len(options) == 1 and isinstance(options[0], Defined) else None
        if not isinstance(node, ast.FunctionDef) or not node.args.args:
            raise vague
        asked, known, frame = node.args.args[0].arg, set[str](), _Frame(module, function=node)
        gets: set[str] = set()
        for statement in node.body:
            match statement:
                case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom() | ast.Raise():
                    continue
                case ast.Assign(
                    targets=[ast.Name(id=bound)],
                    value=ast.Call(func=ast.Attribute(value=table, attr="get"), args=[ast.Name(id=word)]),
                ) if word == asked and (words := self.words(table, frame)) is not None:
                    known |= words
                    gets.add(bound)
                    continue
                case ast.If(test=ast.Compare(left=ast.Name(id=word), ops=[ast.IsNot()]), orelse=[]) if word in gets:
                    continue
                case ast.If(test=ast.Compare(left=ast.Name(id=word), ops=[op], comparators=[right]), orelse=[]) if (
                    word == asked
                ):
                    words = None
                    if isinstance(op, ast.Eq) and isinstance(right, ast.Constant):
                        words = {str(right.value)}
                    elif isinstance(op, ast.In):
                        words = self.words(right, frame)
                    if words is not None:
                        if name in words and isinstance(statement.body[-1], ast.Return):
                            given = statement.body[-1].value
                            inner = replace(frame, function=replace_body(node, statement.body))
                            if isinstance(given, ast.Name) and asked not in {
                                n.id for n in ast.walk(given) if isinstance(n, ast.Name)
                            }:
                                return self.value(given, inner)
                        known |= words
                        continue
            raise vague
        if name in known or not isinstance(node.body[-1], ast.Raise) or module.scope.makes_names:
            raise vague
        raise _Absent(name, [*self.names_of(module), *known])

    def names_of(self, module: Module) -> list[str]:
        """What there is in a module, for the nearest word."""
        names = {n for n, options in module.scope.names.items() if not all(map(_is_unbound, options))}
        for star in module.scope.stars:
            source = self.module(star.module)
            if (
                source is not None
                and not source.is_open
                and source is not module
                and ("*", source.name) not in self.active
            ):
                self.active.add(("*", source.name))
                names |= self.listed(source) or set(self.names_of(source))
                self.active.discard(("*", source.name))
        return sorted(names | set(module.submodules()))

    def one_of(self, options: tuple[Binding, ...], name: str, frame: _Frame) -> _Thing:
        """What several possible bindings come to, if they come to one thing."""
        left = []
        for option in options:
            if option.guards and not all(self.importable(m, n, frame) for m, n in option.guards):
                continue
            left.append(option)
            if option.guards and not isinstance(option, bindings.Opaque):
                break
        if not left:
            raise Undecided(f"what {frame.module.name} imports for `{name}` is not there")
        bound = [option for option in left if not _is_unbound(option)]
        if not bound:
            raise _Absent(name, [])
        if len(bound) < len(left):
            raise Undecided(f"whether {frame.module.name} has `{name}` depends on the machine")
        if len(bound) == 1:
            return self.meant(bound[0], name, frame)
        try:
            things = [self.meant(option, name, frame) for option in bound]
        except (_Absent, _Failing, Broken) as error:
            raise Undecided(f"whether {frame.module.name} uses it depends on the machine: {error}") from None
        if len({thing.key for thing in things}) > 1:
            raise Undecided(f"`{name}` of {frame.module.name} is one thing or another, depending on the machine")
        return things[0]

    def importable(self, module: str, name: str | None, frame: _Frame) -> bool:
        try:
            found = self.module(module)
            if found is None:
                return False
            if name is None or found.is_open:
                return True
            self.name_in(found, name)
        except (_Absent, _Failing, Broken):
            return False
        except Undecided:
            return True
        return True

    def meant(self, option: Binding, name: str, frame: _Frame) -> _Thing:
        prefix = f"{frame.line[0].name}." if frame.scope and frame.line else ""
        match option:
            case Imported(module=module, name=None):
                found = self.module(module)
                if found is None:
                    raise Undecided(f"{module} is not there")
                return self.of_module(found)
            case Imported(module=module, name=str(inside)):
                return self.imported(option, inside, frame)
            case Defined(node=ast.ClassDef() as node):
                thing = _Thing("class", frame.module, prefix + name, node)
                if name != node.name:
                    thing = replace(thing, name=prefix + node.name)
                return thing
            case Defined(node=node):
                owner = frame.line[0] if frame.scope and frame.line else None
                return _Thing("function", frame.module, prefix + node.name, node, owner)
            case Assigned(value=value):
                return self.assigned(value, prefix + name, frame)
            case bindings.Opaque(what=str(what)):
                raise Undecided(f"`{name}` of {frame.module.name} {what}")
        raise Undecided(f"`{name}` of {frame.module.name} cannot be told")

    def imported(self, option: Imported, name: str, frame: _Frame) -> _Thing:
        source = self.module(option.module)
        if source is None:
            top = option.module.partition(".")[0]
            if self.module(top) is None:
                raise _Failing(f"needs {top}, which is not installed here{frame.module.place(option.line)}")
            raise Undecided(f"{option.module}, which {frame.module.name} imports, is made when it is imported")
        if source is frame.module or source.name == frame.module.name:  # `from . import part`
            submodule = self.module(f"{source.name}.{name}")
            if submodule is not None:
                return self.of_module(submodule)
        try:
            return self.name_in(source, name)
        except _Absent as absent:
            if absent.name != name:
                raise
            where = f" ({source.file})" if source.file else " (unknown location)"
            words = f"ImportError: cannot import name {name!r} from {source.name!r}{where}"
            raise _Failing(f"failed: {words}{frame.module.place(option.line)}") from None

    def assigned(self, value: ast.expr, name: str, frame: _Frame) -> _Thing:
        """`name = value`: another word for something, or a value."""
        match value:
            case ast.Name() | ast.Attribute():
                try:
                    return self.value(value, frame)
                except _Absent:
                    raise Undecided(f"what `{name}` of {frame.module.name} is shows only when it is imported") from None
            case ast.Call() | ast.IfExp() | ast.BoolOp() | ast.Lambda() | ast.Await():
                words = ast.unparse(value)
                words = words if len(words) < 60 else f"{words[:57]}…"
                if _is_type_variable(value):
                    return _Thing("value", frame.module, name, value)
                raise Undecided(f"`{name}` of {frame.module.name} is what `{words}` gives")
        return _Thing("value", frame.module, name, value)

    # ---- expressions

    def value(self, node: ast.expr, frame: _Frame) -> _Thing:
        """What an expression of names means."""
        match node:
            case ast.Name(id=name):
                return self.named(name, frame)
            case ast.Attribute(value=inner, attr=name):
                owner = self.value(inner, frame)
                try:
                    return self.member(owner, name)
                except _Absent:
                    if owner.kind == "module":
                        raise Undecided(f"{owner.path} seems to have no `{name}`") from None
                    raise
            case ast.Subscript(value=inner):
                return self.value(inner, frame)
            case ast.Call(func=ast.Name(id="type"), args=[ast.Name(id=name)]) if name == frame.first:
                return frame.line[0]
            case ast.Call(func=ast.Attribute(attr="cast") | ast.Name(id="cast"), args=[_, inner]):
                return self.value(inner, frame)
        words = ast.unparse(node)
        raise Undecided(f"`{words[:60]}` shows only when it is run")

    def named(self, name: str, frame: _Frame) -> _Thing:
        if frame.function is not None:
            local = _local(frame.function, name)
            if isinstance(local, ast.ImportFrom):
                alias = next(a for a in local.names if (a.asname or a.name) == name)
                source = bindings.absolute(local, frame.module)
                return self.imported(Imported(0, local.lineno, (), source, alias.name), alias.name, frame)
            if isinstance(local, ast.Import):
                alias = next(a for a in local.names if (a.asname or a.name.partition(".")[0]) == name)
                found = self.module(alias.name if alias.asname else name)
                if found is not None:
                    return self.of_module(found)
            if local is not None:
                raise Undecided(f"`{name}` in {frame.function.name} is known only when it is run")
        if frame.scope is not None and name in frame.scope.names:
            return self.one_of(frame.scope.names[name], name, frame)
        if hasattr(builtins, name) and name not in frame.module.scope.names and not frame.module.scope.stars:
            return self.live(builtins, name)
        try:
            return self.name_in(frame.module, name)
        except _Absent as absent:
            if absent.name == name and hasattr(builtins, name):
                return self.live(builtins, name)
            raise Undecided(f"{frame.module.name} names `{absent.name}`, which is not there") from None

    # ---- classes

    def line(self, thing: _Thing) -> tuple[list[_Thing], bool]:
        """A class and its ancestors in Python's order (C3), and whether all are known."""
        if thing.live is not None:
            return [_live_class(c) for c in thing.live.__mro__ if c is not object], True
        key = thing.key
        if key in self.lines:
            return self.lines[key]
        try:
            self.enter(("line", key))
        except Undecided:
            return [thing], False
        try:
            complete, is_generic = True, False
            lines: list[list[_Thing]] = []
            parents: list[_Thing] = []
            for base in thing.node.bases:
                try:
                    parent = self.value(base, _Frame(self.home(thing), function=None))
                    if parent.live is object:
                        continue
                    if parent.kind != "class":
                        if parent.live is not None and parent.path == "typing.NamedTuple":
                            parent = _live_class(tuple)
                        elif isinstance(getattr(parent.live, "__origin__", None), type):  # typing.Iterable
                            parent = _live_class(parent.live.__origin__)
                            is_generic = True
                        else:
                            raise Undecided(f"{parent.path} is no class")
                except (Undecided, _Absent, _Failing, Broken):
                    complete = False
                    continue
                above, whole = self.line(parent)
                complete = complete and whole
                parents.append(parent)
                lines.append(list(above))
            if is_generic and not any(parent.live is Generic for parent in parents):
                parents.append(_live_class(Generic))  # as `typing` does
                lines.append([parents[-1]])
            merged = _merged([*lines, parents])
            if merged is None:
                complete = False
                merged = list({t.path: t for above in lines for t in above}.values())
            self.lines[key] = [thing, *merged], complete
        finally:
            self.active.discard(("line", key))
        return self.lines[key]

    def home(self, thing: _Thing) -> Module:
        assert thing.module is not None
        return thing.module

    def scope(self, thing: _Thing) -> Scope:
        if id(thing.node) not in self.scopes:
            self.scopes[id(thing.node)] = Scope.of(thing.node.body, self.home(thing))
        return self.scopes[id(thing.node)]

    def attribute(self, thing: _Thing, name: str, start: int = 0, asked: _Thing | None = None) -> _Thing:
        """An attribute of a class, its own or an ancestor's."""
        line, complete = self.line(thing)
        asked = asked or thing
        known: list[str] = []
        for each in line[start:]:
            if each.live is not None:
                if name in vars(each.live):
                    return _Thing("function" if callable(getattr(each.live, name)) else "value", None, name,
                                  owner=asked, live=getattr(each.live, name))  # fmt: skip
                known += dir(each.live)
                continue
            scope = self.scope(each)
            known += [n for n, found in scope.names.items() if not all(map(_is_unbound, found))]
            options = scope.names.get(name, ())
            home = self.home(each)
            if (each.node.name, name) in home.scope.patched:
                raise Undecided(f"`{name}` of {each.path} is set afterwards")
            if options and not all(map(_is_unbound, options)):
                found = self.one_of(options, name, _Frame(home, scope=scope, line=(each,)))
                if found.kind == "function" and found.owner is not None and found.module is home:
                    found = replace(found, owner=asked)
                return found
            if each.node.decorator_list and name not in ("__init__", "__new__"):
                for decorator in each.node.decorator_list:
                    if self.real_path(decorator, _Frame(home)) not in {*_KEEPING, "dataclasses.dataclass"}:
                        raise Undecided(f"{each.path} is changed by @{ast.unparse(decorator)[:60]}")
        if not complete:
            raise Undecided(f"an ancestor of {thing.path} cannot be read")
        if name in ("__init__", "__new__"):
            raise _Absent(name, known)
        if hasattr(type, name):
            return self.live(object, name) if hasattr(object, name) else _Thing("value", thing.module, name)
        if self.metaclass(line) is not None:
            raise Undecided(f"what {thing.path} has, its metaclass decides")
        raise _Absent(name, known)

    def metaclass(self, line: list[_Thing]) -> str | None:
        """The metaclass of a class where it is no usual one."""
        for each in line:
            if each.live is not None:
                if type(each.live).__module__ not in ("builtins", "abc") and each.path not in (
                    "typing.Generic", "typing.Protocol"
                ):  # fmt: skip
                    return type(each.live).__name__
                continue
            for word in each.node.keywords:
                if word.arg != "metaclass":
                    continue
                try:
                    found = self.value(word.value, _Frame(self.home(each)))
                    if found.path in ("abc.ABCMeta", "builtins.type"):
                        continue
                    above, whole = self.line(found)
                    plain = all(a.live is not None or "__call__" not in self.scope(a).names for a in above)
                    if (
                        whole
                        and plain
                        and all(a.live is None or a.live.__module__ in ("builtins", "abc") for a in above)
                    ):
                        continue
                except (Undecided, _Absent):
                    pass
                return ast.unparse(word.value)
        return None

    def real_path(self, node: ast.expr, frame: _Frame) -> str | None:
        """The dotted path of what an expression, or the function of a call, names."""
        node = node.func if isinstance(node, ast.Call) else node
        try:
            return _nominal(node, frame.module) or self.value(node, frame).path
        except (Undecided, _Absent, _Failing, Broken):
            return None

    # ---- what they take

    def signature(self, thing: _Thing) -> Signature:
        if thing.live is not None:
            return of_object(thing.live)
        key = ("signature", thing.key)
        self.enter(key)
        try:
            if thing.kind == "class":
                return self.of_class(thing)
            if thing.kind == "function":
                return self.of_function(thing)
        finally:
            self.active.discard(key)
        raise Undecided(f"it is a {thing.kind}")

    def of_class(self, thing: _Thing) -> Signature:
        line, complete = self.line(thing)
        odd = self.metaclass(line)
        if odd is not None:
            raise Undecided(f"its metaclass {odd} makes its instances")
        if "typing.Protocol" in {t.path for t in line[:2]}:
            raise Undecided("it is a Protocol, of which there are no instances")
        self.undecorated(thing)
        return self.constructor(thing, line, complete)

    def constructor(self, thing: _Thing, line: list[_Thing], complete: bool, start: int = 0) -> Signature:
        """What makes an instance of a class takes; from `start` on in its line, as `super()` asks."""
        new: Signature | None = None
        open_new: tuple[_Thing, int] | None = None  # takes anything, and leaves it to `__init__` what that may be
        for position, each in enumerate(line):
            if position < start:
                continue
            if each.live is not None:
                if not {"__init__", "__new__"} & vars(each.live).keys():
                    continue
                if each.path == "builtins.tuple" and position and self.is_named_tuple(line[position - 1]):
                    return self.of_fields([line[position - 1]], line)
                raise Undecided(f"{each.path} is not written in Python")
            if self.is_dataclass(each) and not self.own(each, "__init__"):
                return self.of_fields(line[position:], line)
            for attribute in ("__init__", "__new__", "__signature__"):
                if (each.node.name, attribute) in self.home(each).scope.patched:
                    raise Undecided(f"`{attribute}` of {each.path} is set afterwards")
            if self.own(each, "__signature__"):
                raise Undecided(f"{each.path} says itself what it takes")
            if self.own(each, "__new__") and new is None and not start:
                function = self.attribute(each, "__new__", asked=thing)
                if function.kind != "function" or not isinstance(function.node, Functions):
                    raise Undecided(f"`__new__` of {each.path} is not a plain function")
                arguments = function.node.args
                if arguments.vararg and arguments.kwarg:
                    open_new = open_new or (function, position)
                else:
                    new = self.of_method(function, line, position, complete, bound=True)
                    if not _makes_its_own(function.node):
                        return new  # an instance of another class, whose `__init__` Python leaves out
            if self.own(each, "__init__"):
                function = self.attribute(each, "__init__", asked=thing)
                if function.kind != "function":
                    raise Undecided(f"`__init__` of {each.path} is not a plain function")
                taken = self.of_method(function, line, position, complete, bound=True)
                if new is not None and [p.name for p in new.parameters] != [p.name for p in taken.parameters]:
                    raise Undecided("its `__new__` and `__init__` differ")
                return taken
        if not complete:
            raise Undecided("an ancestor cannot be read")
        if new is None and open_new is not None:
            return self.of_method(open_new[0], line, open_new[1], complete, bound=True)
        return new if new is not None else Signature(())

    def own(self, thing: _Thing, name: str) -> bool:
        return thing.live is None and any(not _is_unbound(o) for o in self.scope(thing).names.get(name, ()))

    def undecorated(self, thing: _Thing) -> None:
        for decorator in thing.node.decorator_list:
            frame = _Frame(self.home(thing))
            if (
                self.real_path(decorator, frame) != "dataclasses.dataclass"
                and self.keeps(decorator, frame, True) is None
            ):
                raise Undecided(f"@{ast.unparse(decorator)[:60]} may change what it takes")

    def of_function(self, thing: _Thing) -> Signature:
        if thing.owner is None:
            return self.of_method(thing, [], 0, True, bound=False)
        line, complete = self.line(thing.owner)
        position = next((n for n, each in enumerate(line) if thing.path == f"{each.path}.{thing.node.name}"), 0)
        return self.of_method(thing, line, position, complete, bound=_role(thing.node) == "classmethod")

    def of_method(self, thing: _Thing, line: list[_Thing], position: int, complete: bool, bound: bool) -> Signature:
        """What a function takes; `bound`: without its first argument.

        A function that `**kwargs` hand on to is asked in turn, `super()` along the line of the class that is made.
        """
        if thing.live is not None:
            return of_object(thing.live)
        node = thing.node
        role = _role(node)
        if role == "property":
            raise Undecided("it is a property")
        frame = _Frame(self.home(thing), None, node, tuple(line), complete, position, role == "staticmethod")
        extra: set[str] = set()
        for decorator in reversed(node.decorator_list):
            if _role_of(decorator) is not None:
                continue
            words = self.keeps(decorator, _Frame(frame.module))
            if words is None:
                raise Undecided(f"@{ast.unparse(decorator)[:60]} may change what it takes")
            extra |= words
        key = ("method", thing.key, tuple(t.path for t in line[:1]))
        self.enter(key)
        try:
            taken = _Handed(self, frame).signature(bound and role != "staticmethod")
        finally:
            self.active.discard(key)
        names = {p.name for p in taken.parameters}
        more = tuple(Parameter(word, position=False) for word in sorted(extra - names))
        return replace(taken, parameters=taken.parameters + more)

    # ---- generated constructors

    def is_dataclass(self, thing: _Thing) -> bool:
        if thing.live is not None:
            return False
        for decorator in thing.node.decorator_list:
            if self.real_path(decorator, _Frame(self.home(thing))) == "dataclasses.dataclass":
                words = _literal_words(decorator)
                return words.get("init", True) is not False
        return False

    def is_named_tuple(self, thing: _Thing) -> bool:
        return thing.live is None and any(
            _nominal(base, self.home(thing)) == "typing.NamedTuple" for base in thing.node.bases
        )

    def of_fields(self, line: list[_Thing], whole: list[_Thing]) -> Signature:
        """The constructor that a dataclass or named tuple gets."""
        fields: dict[str, Parameter] = {}
        for each in reversed(line):
            is_tuple = len(line) == 1 and self.is_named_tuple(each)
            if each.live is not None or not (is_tuple or self.is_any_dataclass(each)):
                continue
            frame = _Frame(self.home(each), scope=self.scope(each), line=(each,))
            keyword_only = any(
                _literal_words(d).get("kw_only") is True for d in each.node.decorator_list if isinstance(d, ast.Call)
            )
            for statement in each.node.body:
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                name, annotation = statement.target.id, statement.annotation
                written = ast.unparse(annotation).strip("'\"")
                head = written.partition("[")[0].rpartition(".")[2]
                if head == "ClassVar":
                    continue
                if head == "KW_ONLY":
                    keyword_only = True
                    continue
                if head == "InitVar":
                    annotation = annotation.slice if isinstance(annotation, ast.Subscript) else annotation
                made = self.of_field(statement, frame)
                if made is None:
                    fields.pop(name, None)
                    continue
                required, default, only = made
                only = keyword_only if only is None else only
                allowed = self.allowed(annotation, frame)
                fields[name] = Parameter(name, not only, True, required, default, allowed, ast.unparse(annotation))
        ordered = sorted(fields.values(), key=lambda p: not p.position)
        return Signature(tuple(ordered))

    def is_any_dataclass(self, thing: _Thing) -> bool:
        return any(
            self.real_path(d, _Frame(self.home(thing))) == "dataclasses.dataclass" for d in thing.node.decorator_list
        )

    def of_field(self, statement: ast.AnnAssign, frame: _Frame) -> tuple[bool, Any, bool | None] | None:
        """Whether a field is required, its default, and whether it is given by name only; None: not at all."""
        value = statement.value
        if value is None:
            return True, UNKNOWN, None
        if isinstance(value, ast.Call):
            path = self.real_path(value, _Frame(frame.module))
            if path == "dataclasses.field":
                given = {word.arg: word.value for word in value.keywords}
                literal = _literal_words(value)
                if literal.get("init") is False:
                    return None
                only = literal.get("kw_only")
                if "default" in given:
                    return False, self.plain(given["default"], frame), only
                if None in given:
                    raise Undecided(f"the field `{ast.unparse(statement.target)}` takes more than is written")
                return "default_factory" not in given, UNKNOWN, only
            function = self.value(value.func, _Frame(frame.module))
            if function.kind != "class":  # a function of its own that may make a field
                made = self.returned_field(function)
                if made is not None:
                    return made
                return False, UNKNOWN, None
        return False, self.plain(value, frame), None

    def returned_field(self, function: _Thing) -> tuple[bool, Any, bool | None] | None:
        """A function that returns `field(…)`: whether that is required shows only there."""
        if not isinstance(function.node, Functions):
            raise Undecided(f"{function.path} makes one of its fields")
        for node in ast.walk(function.node):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                path = self.real_path(node.value, _Frame(self.home(function), function=function.node))
                if path is None or path == "dataclasses.field":
                    raise Undecided(f"{function.path} makes one of its fields")
        return None

    # ---- decorators

    def keeps(self, decorator: ast.expr, frame: _Frame, of_class: bool = False) -> set[str] | None:
        """None unless a decorator leaves alone what a function takes; words that it takes beside, as older names."""
        if self.real_path(decorator, frame) in _KEEPING:
            return set()
        try:
            return _Decorator(self, of_class).keeps(decorator, frame)
        except (Undecided, _Absent, _Failing, Broken):
            return None

    # ---- types and defaults

    def plain(self, node: ast.expr, frame: _Frame) -> Any:
        """A plain value, also one that a module gives a name; else UNKNOWN."""
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            if not isinstance(node, ast.Name):
                return UNKNOWN
            try:
                found = self.named(node.id, replace(frame, function=None))
                value = ast.literal_eval(found.node) if found.kind == "value" and found.live is None else UNKNOWN
            except (ValueError, TypeError, Undecided, _Absent, _Failing, Broken):
                return UNKNOWN
        return value if isinstance(value, bool | int | float | str | None) else UNKNOWN

    def allowed(self, node: ast.expr | None, frame: _Frame) -> tuple[Any, ...] | None:
        """The simple types and literals of an annotation, as `signature.allowed_by` gives them of a live one."""
        try:
            return _Types(self, replace(frame, function=None)).of(node, {})
        except (Undecided, _Absent, _Failing, Broken, ValueError, SyntaxError, TypeError):
            return None

    # ---- documentation

    def docstrings(self, thing: _Thing) -> Iterator[str]:
        if thing.live is not None:
            yield getattr(thing.live, "__doc__", None) or ""
            return
        things = [thing]
        if thing.kind == "class":
            things = [t for t in self.line(thing)[0] if t.live is None]
        for each in things:
            if each.module is not None:
                for value in each.module.scope.documents.get(each.name, ()):
                    yield inspect.cleandoc(self.prose(value, _Frame(each.module)))
            if isinstance(each.node, ast.ClassDef | Functions):
                yield ast.get_docstring(each.node) or ""
            if each.kind == "class" and self.own(each, "__init__"):
                for option in self.scope(each).names["__init__"]:
                    if isinstance(option, Defined):
                        yield ast.get_docstring(option.node) or ""
        if thing.kind == "function" and isinstance(thing.node, Functions) and thing.node.args.kwarg:
            frame = _Frame(self.home(thing), function=thing.node)
            for call in _uses(thing.node, thing.node.args.kwarg.arg).calls:
                try:
                    callee = self.value(call.node.func, frame)
                except (Undecided, _Absent, _Failing, Broken):
                    continue
                if callee.key != thing.key and ("doc", callee.key) not in self.active:
                    self.active.add(("doc", callee.key))
                    yield from self.docstrings(callee)

    def prose(self, node: ast.expr, frame: _Frame) -> str:
        """A text that is put together from others."""
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(self.prose(part, frame) for part in parts)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.prose(left, frame) + self.prose(right, frame)
            case ast.FormattedValue(value=value):
                return self.prose(value, frame)
            case ast.Name() | ast.Attribute():
                value = self.plain(node, frame)
                return value if isinstance(value, str) else ""
        return ""

    # ---- metrics

    def logged(self, thing: _Thing) -> tuple[set[str], bool]:
        line, complete = self.line(thing)
        own = [t for t in line if t.live is None and t.path.partition(".")[0] not in _FRAMEWORKS]
        for each in own:
            for option in self.scope(each).names.get("logged_metrics", ()):
                if isinstance(option, Assigned):
                    words = self.words(option.value, _Frame(self.home(each)))
                    if words is not None:
                        return words, True
        return _Logged(self, own).names(complete)


def _is_there(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except (ValueError, ImportError):
        return True


def _is_unbound(option: Binding) -> bool:
    return isinstance(option, bindings.Opaque) and option.what is None


def _live_class(found: type) -> _Thing:
    return _Thing("class", None, found.__name__, live=found)


def _is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in ("TypeVar", "ParamSpec")


def _nominal(node: ast.expr, module: Module) -> str | None:
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


def _merged(lines: list[list[_Thing]]) -> list[_Thing] | None:
    """C3; None if the classes cannot be put in one order."""
    merged: list[_Thing] = []
    lines = [list(each) for each in lines if each]
    while lines:
        for each in lines:
            head = each[0]
            if not any(head.path == t.path for other in lines for t in other[1:]):
                break
        else:
            return None
        merged.append(head)
        lines = [rest for other in lines if (rest := other[1:] if other[0].path == head.path else other)]
    return merged


def _literal_words(call: ast.expr) -> dict[str, Any]:
    """The keywords of a call that are literal."""
    if not isinstance(call, ast.Call):
        return {}
    return {w.arg: w.value.value for w in call.keywords if w.arg and isinstance(w.value, ast.Constant)}


def _role_of(decorator: ast.expr) -> str | None:
    match decorator:
        case ast.Name(id="staticmethod" | "classmethod" | "property" as word):
            return word
        case ast.Attribute(attr="setter" | "getter" | "deleter") | ast.Name(id="cached_property"):
            return "property"
        case ast.Attribute(attr="cached_property" | "abstractproperty"):
            return "property"
    return None


def _role(node: Functions) -> str | None:
    roles = [role for d in node.decorator_list if (role := _role_of(d))]
    if node.name in ("__init_subclass__", "__class_getitem__"):
        roles.append("classmethod")
    return roles[0] if roles else None


def _makes_its_own(new: Functions) -> bool:
    """Whether a `__new__` may give an instance of its own class."""
    names = {node.func.id for node in ast.walk(new) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(names & {_first(new), "super"}) or any(
        isinstance(node, ast.Attribute) and node.attr == "__new__" for node in ast.walk(new)
    )


def replace_body(node: ast.FunctionDef, body: list[ast.stmt]) -> ast.FunctionDef:
    """The same function with fewer statements, to see what is local there."""
    fields = {name: value for name, value in ast.iter_fields(node) if name != "body"}
    return ast.copy_location(ast.FunctionDef(body=body, **fields), node)


def _local(function: Functions, name: str) -> ast.AST | None:
    """What binds a name inside a function, if anything does."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None and argument.arg == name:
            return argument
    found: ast.AST | None = None
    for node in _inside(function.body):
        match node:
            case ast.Import() | ast.ImportFrom():
                if name in {a.asname or (a.name.partition(".")[0] if isinstance(node, ast.Import) else a.name)
                            for a in node.names}:  # fmt: skip
                    found = node if found is None else arguments
            case ast.Name(id=word, ctx=ast.Store() | ast.Del()) if word == name:
                return node
            case ast.FunctionDef(name=word) | ast.ClassDef(name=word) | ast.AsyncFunctionDef(name=word) if word == name:
                return node
    return found


def _inside(body: list[Any]) -> Iterator[ast.AST]:
    """The nodes of a body without those of the functions and classes that are defined in it."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


# ---- `**kwargs`


@dataclass
class _Call:
    """A call that gets `**kwargs`."""

    node: ast.Call
    certain: bool


@dataclass
class _Uses:
    """What a function does with a mapping that it was given.

    Attributes:
        calls: those that get it as `**kwargs`.
        words: literal names that are taken out of it.
        passed: calls that get it as a plain argument, with the argument's position or name.
        refuses: whether anything left over is an error.
        adds: whether names are put into it.
        dynamic: whether names are looked up in it that are not literal.
        kept: attributes of the instance that it becomes.
        other: anything else, in words.
    """

    calls: list[_Call] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    passed: list[tuple[ast.Call, int | str]] = field(default_factory=list)
    refuses: bool = False
    adds: bool = False
    dynamic: bool = False
    kept: set[str] = field(default_factory=set)
    other: str | None = None


def _uses(function: Functions, name: str) -> _Uses:
    uses = _Uses()
    certain = True
    for statement in function.body:
        _look(statement, name, uses, certain)
        if any(isinstance(node, ast.Return) for node in _inside([statement])):
            certain = False
    return uses


def _is_it(node: ast.AST, name: str) -> bool:
    """Whether an expression is a variable, or an attribute of one (`self.options`)."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and name == f"{node.value.id}.{node.attr}"
    return isinstance(node, ast.Name) and node.id == name


def _look(node: ast.AST, name: str, uses: _Uses, certain: bool) -> None:
    """Notes every use of a mapping in a statement or expression."""
    match node:
        case ast.Name() | ast.Attribute() if _is_it(node, name):
            uses.other = uses.other or f"uses `{name}` in a way of its own (line {node.lineno})"
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            inner = node.args
            if name in {
                a.arg for a in (*inner.posonlyargs, *inner.args, *inner.kwonlyargs, inner.vararg, inner.kwarg) if a
            }:
                return
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert() if _asks(node.test, name):
            body = getattr(node, "body", [])
            if isinstance(body, list) and body and isinstance(body[-1], ast.Raise):
                uses.refuses = True
                body = []
            if isinstance(node, ast.Assert):
                uses.refuses = True
            for part in [*(body if isinstance(body, list) else [body]), *_listed(getattr(node, "orelse", []))]:
                _look(part, name, uses, False)
            return
        case ast.Call():
            _look_at_call(node, name, uses, certain)
            return
        case ast.Subscript(value=value, slice=index) if _is_it(value, name):
            if isinstance(node.ctx, ast.Store):
                uses.adds = True
            elif isinstance(index, ast.Constant) and isinstance(index.value, str):
                uses.words.add(index.value)
            elif isinstance(node.ctx, ast.Del):
                uses.other = uses.other or f"takes names out of `{name}` that show only when it is run"
            else:
                uses.dynamic = True
            _look(index, name, uses, False)
            return
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]) if _is_it(right, name):
            _look(left, name, uses, False)
            return
        case ast.FormattedValue(value=value) if _is_it(value, name):
            return
        case (
            ast.Assign(targets=[ast.Attribute() as target], value=value)
            | ast.AnnAssign(target=ast.Attribute() as target, value=value)
        ) if value is not None and _is_it(value, name) and isinstance(target.value, ast.Name):
            uses.kept.add(f"{target.value.id}.{target.attr}")
            return
        case ast.Assign(targets=[target], value=ast.Name()) if _is_it(target, name):
            return
        case ast.Delete(targets=[target]) if _is_it(target, name):
            return
    inside = certain and not isinstance(
        node,
        ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.FunctionDef | ast.Lambda | ast.IfExp | ast.BoolOp
        | ast.AsyncFunctionDef | ast.AsyncFor | ast.ClassDef | ast.ListComp | ast.DictComp | ast.GeneratorExp
        | ast.SetComp,
    )  # fmt: skip
    for child in ast.iter_child_nodes(node):
        _look(child, name, uses, inside)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _asks(test: ast.expr, name: str) -> bool:
    """Whether a condition does no more with a mapping than to ask whether it is empty."""
    match test:
        case ast.Name():
            return _is_it(test, name)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _asks(inner, name)
        case ast.Call(func=ast.Name(id="bool" | "len"), args=[inner]):
            return _is_it(inner, name)
        case ast.Compare(left=ast.Call() as inner, comparators=[ast.Constant()]):
            return _asks(inner, name)
        case ast.BoolOp(values=parts):
            asking = [part for part in parts if any(_is_it(n, name) for n in ast.walk(part))]
            return bool(asking) and all(_asks(part, name) for part in asking)
    return False


def _look_at_call(node: ast.Call, name: str, uses: _Uses, certain: bool) -> None:
    match node.func:
        case ast.Attribute(value=owner, attr=method) if _is_it(owner, name):
            literal = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if method in ("pop", "get", "setdefault"):
                if isinstance(literal, str):
                    uses.words.add(literal)
                elif method == "pop":
                    uses.dynamic = True
                    uses.other = uses.other or f"takes names out of `{name}` that show only when it is run"
                else:
                    uses.dynamic = True
                uses.adds = uses.adds or method == "setdefault"
            elif method == "update":
                uses.adds = True
            else:
                uses.other = uses.other or f"uses `{name}.{method}()`"
        case ast.Name(id="len" | "bool" | "print" | "str" | "repr" | "isinstance"):
            if any(_is_it(argument, name) for argument in node.args):
                return
        case _:
            _look(node.func, name, uses, certain)
    for index, argument in enumerate(node.args):
        if _is_it(argument, name):
            uses.passed.append((node, index))
        else:
            _look(argument, name, uses, certain)
    for word in node.keywords:
        match word:
            case ast.keyword(arg=None, value=value) if _is_it(value, name):
                uses.calls.append(_Call(node, certain))
            case ast.keyword(arg=None, value=ast.Dict(keys=keys, values=values)) if any(
                key is None and _is_it(value, name) for key, value in zip(keys, values, strict=True)
            ):
                uses.calls.append(_Call(node, False))
            case ast.keyword(arg=str(given), value=value) if _is_it(value, name):
                uses.passed.append((node, given))
            case _:
                _look(word.value, name, uses, certain)


class _Handed:
    """What one function takes, together with those that it hands `**kwargs` on to."""

    def __init__(self, walk: _Walk, frame: _Frame):
        assert frame.function is not None
        self.walk, self.frame, self.node = walk, frame, frame.function

    def signature(self, bound: bool) -> Signature:
        own = self.own()
        if bound and own and own[0].position:
            own = own[1:]
        if self.node.args.kwarg is None:
            return Signature(tuple(own))
        uses = _uses(self.node, self.node.args.kwarg.arg)
        more: dict[str, Parameter] = {}
        first: list[Parameter] = []
        rest: str | None = None
        words = set(uses.words)
        other = uses.other or ("looks up names that show only when it is run" if uses.dynamic else None)
        asked: list[tuple[_Handed, _Call]] = [(self, call) for call in uses.calls]
        passed = [(self, *item) for item in uses.passed]
        for attribute in uses.kept:
            for place, inside in self.later(attribute):
                asked += [(place, replace(call, certain=False)) for call in inside.calls]
                passed += [(place, *item) for item in inside.passed]
                words |= inside.words
                other = other or inside.other or ("looks up names that show later" if inside.dynamic else None)
            if not asked:
                other = other or f"keeps `{self.node.args.kwarg.arg}` for later"
        for where, call, place_ in passed:
            found = where.helper(call, place_)
            if found is None:
                other = other or f"hands `{self.node.args.kwarg.arg}` to `{ast.unparse(call.func)[:40]}`"
            else:
                words |= found
        for where, call_ in asked:
            try:
                taken, position = where.of_call(call_, sure=len(asked) == 1 and not uses.adds)
            except (Undecided, _Absent, _Failing, Broken) as error:
                rest = rest or f"`{ast.unparse(call_.node.func)[:60]}`, which takes the others, is not known: {error}"
                continue
            rest = rest or taken.rest
            for parameter in taken.parameters:
                known = more.get(parameter.name)
                more[parameter.name] = parameter if known is None else _either(known, parameter)
            if position and where is self and len(asked) == 1:
                first = [p for p in taken.parameters if p.position]
        for word in sorted(words):
            known = more.get(word)
            more[word] = Parameter(word, position=False) if known is None else replace(known, required=False)
        taken_already = {p.name for p in own if p.keyword}
        handed = [p for p in more.values() if p.name not in taken_already and p.keyword]
        names = {p.name for p in first}
        ordered = [
            *(p for p in own if p.position),
            *(p for p in first if p.name not in taken_already),
            *(p for p in own if not p.position),
            *(replace(p, position=False) for p in handed if p.name not in names),
        ]
        if other is not None:
            rest = rest or f"{self.node.name} {other}"
        elif rest is None and not asked and not uses.refuses:
            rest = "it takes any other keyword and ignores it"
        return Signature(tuple(ordered), rest)

    def later(self, attribute: str) -> Iterator[tuple["_Handed", _Uses]]:
        """What the methods of the class do with `**kwargs` that have become an attribute."""
        for position, each in enumerate(self.frame.line):
            if each.live is not None:
                continue
            for node in each.node.body:
                if not isinstance(node, Functions) or (first := _first(node)) is None:
                    continue
                uses = _uses(node, f"{first}.{attribute.rpartition('.')[2]}")
                frame = replace(self.frame, module=self.walk.home(each), function=node, position=position)
                yield _Handed(self.walk, frame), uses

    def own(self) -> list[Parameter]:
        arguments = self.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
        made = []
        for number, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
            made.append(self.parameter(argument, default, True, number >= len(arguments.posonlyargs)))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            made.append(self.parameter(argument, default, False, True))
        return made

    def parameter(self, argument: ast.arg, default: ast.expr | None, position: bool, keyword_: bool) -> Parameter:
        frame = _Frame(self.frame.module)
        return Parameter(
            argument.arg,
            position,
            keyword_,
            required=default is None,
            default=UNKNOWN if default is None else self.walk.plain(default, frame),
            allowed=self.walk.allowed(argument.annotation, frame),
            annotation=None if argument.annotation is None else _written(argument.annotation),
        )

    def of_call(self, call: _Call, sure: bool) -> tuple[Signature, bool]:
        """What a call still takes by `**kwargs`, and whether also by position: our `*args` are handed on to it."""
        taken = self.callee(call.node.func)
        arguments = list(call.node.args)
        vararg = self.node.args.vararg
        open_end = False
        if arguments and isinstance(arguments[-1], ast.Starred) and vararg and _is_it(arguments[-1].value, vararg.arg):
            arguments.pop()
            open_end = True
        if any(isinstance(argument, ast.Starred) for argument in arguments):
            sure = False
        given = len([argument for argument in arguments if not isinstance(argument, ast.Starred)])
        words = {word.arg for word in call.node.keywords if word.arg}
        sure = sure and call.certain and sum(word.arg is None for word in call.node.keywords) == 1
        left = [p for p in taken.parameters if p.position][given:]
        left += [p for p in taken.parameters if not p.position]
        kept = [
            replace(p, required=p.required and sure, position=p.position and open_end)
            for p in left
            if p.name not in words and (p.keyword or (p.position and open_end))
        ]
        return Signature(tuple(kept), taken.rest), open_end

    def callee(self, function: ast.expr) -> Signature:
        """What a called expression takes, without what Python gives it itself."""
        frame, walk = self.frame, self.walk
        match function:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if not frame.line:
                    raise Undecided("its class is not known")
                if name == "__init__":
                    return walk.constructor(frame.line[0], list(frame.line), frame.complete, frame.position + 1)
                try:
                    found = walk.attribute(frame.line[0], name, frame.position + 1)
                except _Absent:
                    if name == "__new__":
                        return Signature((Parameter("cls", keyword=False),))
                    raise
                return self.method(found, bound=name != "__new__")
            case ast.Name(id=name) if name == frame.first and self.role() in ("classmethod", "__new__"):
                return walk.signature(frame.line[0])
            case ast.Attribute(value=ast.Name(id=name), attr="__class__") if name == frame.first:
                return walk.signature(frame.line[0])
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == frame.first:
                return self.method(walk.attribute(frame.line[0], attribute), bound=True)
        found = walk.value(function, frame)
        if found.live is not None and found.live is object.__init__:
            return Signature((Parameter("self", keyword=False),))
        if found.kind == "function" and found.owner is not None:
            return self.method(found, bound=_role(found.node) == "classmethod" if found.node is not None else False)
        return walk.signature(found)

    def method(self, found: _Thing, bound: bool) -> Signature:
        if found.kind != "function" or found.live is not None or found.owner is None:
            raise Undecided(f"`{found.name}` is no method written in Python")
        line, complete = self.walk.line(found.owner)
        if self.frame.line and found.owner.path in {t.path for t in self.frame.line}:
            line, complete = list(self.frame.line), self.frame.complete
        position = next((n for n, each in enumerate(line) if found.path == f"{each.path}.{found.node.name}"), 0)
        return self.walk.of_method(found, line, position, complete, bound)

    def role(self) -> str | None:
        return "__new__" if self.node.name == "__new__" else _role(self.node)

    def helper(self, call: ast.Call, place: int | str) -> set[str] | None:
        """The literal names that a helper looks up in the mapping, if it does no more with it than that."""
        try:
            found = self.walk.value(call.func, self.frame)
        except (Undecided, _Absent, _Failing, Broken):
            return None
        if found.kind != "function" or not isinstance(found.node, Functions) or found.node.decorator_list:
            return None
        arguments = found.node.args
        positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if isinstance(place, int):
            if place >= len(positional) or any(isinstance(a, ast.Starred) for a in call.args[:place]):
                return None
            place = positional[place]
        uses = _uses(found.node, place)
        if uses.other or uses.calls or uses.passed:
            return None
        return uses.words


def _either(one: Parameter, other: Parameter) -> Parameter:
    """A parameter that two functions have."""
    if one == other:
        return one
    same = one.default == other.default and type(one.default) is type(other.default)
    return replace(
        one,
        required=False,
        default=one.default if same else UNKNOWN,
        allowed=one.allowed if one.allowed == other.allowed else None,
    )


def _written(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


# ---- decorators


class _Decorator:
    """Shows from its source that a decorator leaves alone what a function takes: that it returns the function, or one
    that `functools.wraps` makes look like it."""

    def __init__(self, walk: _Walk, of_class: bool):
        self.walk, self.of_class = walk, of_class
        self.literals: set[str] = set()  # words that the decorator itself is given

    def keeps(self, decorator: ast.expr, frame: _Frame) -> set[str] | None:
        called = isinstance(decorator, ast.Call)
        if isinstance(decorator, ast.Call):
            self.literals = {
                n.value
                for part in (*decorator.args, *(word.value for word in decorator.keywords))
                for n in ast.walk(part)
                if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier()
            }
        found = self.walk.value(decorator.func if isinstance(decorator, ast.Call) else decorator, frame)
        if found.live is not None or found.module is None:
            return None
        if found.kind == "class" and called:
            method = self.walk.attribute(found, "__call__")
            if not isinstance(method.node, Functions) or len(method.node.args.args) < 2 or method.module is None:
                return None
            return self.returns(method.node, method.node.args.args[1].arg, method.module)
        if found.kind != "function" or not isinstance(found.node, Functions):
            return None
        if not called:
            first = _first(found.node)
            return self.returns(found.node, first, found.module) if first else None
        inner = {n.name: n for n in _inside(found.node.body) if isinstance(n, ast.FunctionDef)}
        words: set[str] = set()
        answers = [n.value for n in _inside(found.node.body) if isinstance(n, ast.Return)]
        for answer in answers:
            name = answer.id if isinstance(answer, ast.Name) else None
            first = _first(inner[name]) if name in inner else None
            more = self.returns(inner[name], first, found.module) if name in inner and first else None
            if more is None:
                return None
            words |= more
        return words if answers else None

    def returns(self, function: Functions, parameter: str, module: Module) -> set[str] | None:
        """Words that are taken beside, if a function surely returns what looks like its parameter."""
        key = ("decorator", module.name, function.lineno)
        self.walk.enter(key)
        try:
            words: set[str] = set()
            body = self.given(function, parameter)
            answers = [n.value for n in _inside(body) if isinstance(n, ast.Return)]
            for answer in answers:
                more = self.like(answer, parameter, function, module)
                if more is None:
                    return None
                words |= more
            return words if answers else None
        finally:
            self.walk.active.discard(key)

    def given(self, function: Functions, parameter: str) -> list[ast.stmt]:
        """The statements that are run when a parameter is a function, or a class."""

        def run(body: list[ast.stmt]) -> Iterator[ast.stmt]:
            for statement in body:
                truth = self.truth(statement.test, parameter) if isinstance(statement, ast.If) else None
                if truth is None:
                    yield statement
                elif isinstance(statement, ast.If):
                    yield from run(statement.body if truth else statement.orelse)

        return list(run(function.body))

    def truth(self, test: ast.expr, parameter: str) -> bool | None:
        match test:
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                return isinstance(op, ast.IsNot) if _is_it(left, parameter) else None
            case ast.Call(func=ast.Attribute(attr="isclass") | ast.Name(id="isclass"), args=[given]):
                return self.of_class if _is_it(given, parameter) else None
            case ast.Call(func=ast.Name(id="isinstance"), args=[given, ast.Name(id="type")]):
                return self.of_class if _is_it(given, parameter) else None
        return None

    def like(self, value: ast.expr | None, parameter: str, function: Functions, module: Module) -> set[str] | None:
        frame = _Frame(module, function=function)
        inner = {n.name: n for n in _inside(function.body) if isinstance(n, Functions)}
        match value:
            case ast.Name(id=name) if name == parameter:
                return set()
            case ast.Name(id=name) if name in inner:
                return self.wrapper(inner[name], parameter, frame)
            case ast.Name(id=name):  # a variable, where it is nothing else
                made = [
                    n.value
                    for n in _inside(self.given(function, parameter))
                    if isinstance(n, ast.Assign) and any(_is_it(target, name) for target in n.targets)
                ]
                alike = [None if _is_it(m, name) else self.like(m, parameter, function, module) for m in made]
                return None if not alike or None in alike else set().union(*(words for words in alike if words))
            case ast.Call(func=ast.Name(id="cast") | ast.Attribute(attr="cast"), args=[_, given]):
                return self.like(given, parameter, function, module)
            case ast.Call(func=called, args=arguments):
                path = self.walk.real_path(called, frame)
                if path == "functools.update_wrapper" and len(arguments) > 1:
                    return self.like(arguments[1], parameter, function, module)
                if isinstance(called, ast.Call) and self.walk.real_path(called, frame) == "functools.wraps":
                    return self.like(called.args[0], parameter, function, module) if called.args else None
                position = [
                    n
                    for n, a in enumerate(arguments)
                    if isinstance(a, ast.Name) and self.like(a, parameter, function, module) is not None
                ]
                if not position:
                    return None
                if isinstance(called, ast.Name) and called.id in inner:
                    target: Functions | None = inner[called.id]
                    home = module
                else:
                    found = self.walk.value(called, frame)
                    target = found.node if found.kind == "function" and isinstance(found.node, Functions) else None
                    if found.module is None:
                        return None
                    home = found.module
                if target is None or position[0] >= len(target.args.args):
                    return None
                return self.returns(target, target.args.args[position[0]].arg, home)
        return None

    def wrapper(self, node: Functions, parameter: str, frame: _Frame) -> set[str] | None:
        """A function inside a decorator: whether it says that it is like the parameter."""
        words: set[str] = set()
        wraps = False
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and self.walk.real_path(decorator, frame) == "functools.wraps":
                wraps = bool(decorator.args) and _is_it(decorator.args[0], parameter)
                if not wraps:
                    return None
                continue
            more = self.walk.keeps(decorator, frame)
            if more is None:
                return None
            words |= more
        if not wraps:
            return None
        if node.args.kwarg is not None:
            uses = _uses(node, node.args.kwarg.arg)
            words |= uses.words
            if uses.dynamic:
                words |= self.literals
        return words


def _first(function: Functions) -> str | None:
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else None


# ---- types


class _Types:
    """Annotations as the simple types that they allow."""

    def __init__(self, walk: _Walk, frame: _Frame, depth: int = 0):
        self.walk, self.frame, self.depth = walk, frame, depth

    def of(self, node: ast.expr | None, variables: dict[str, Any]) -> tuple[Any, ...] | None:
        if self.depth > 20:
            return None
        match node:
            case ast.Constant(value=None):
                return (type(None),)
            case ast.Constant(value=str(text)):
                return self.of(ast.parse(text.strip(), mode="eval").body, variables)
            case ast.BinOp(op=ast.BitOr()):
                return self.union(_sides(node), variables)
            case ast.Subscript(value=outer, slice=inner):
                return self.subscript(outer, inner, variables)
            case ast.Name() | ast.Attribute():
                return self.named(node, variables)
        return None

    def subscript(self, outer: ast.expr, inner: ast.expr, variables: dict[str, Any]) -> tuple[Any, ...] | None:
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        match self.typing(outer):
            case "Optional":
                return self.union([inner, ast.Constant(None)], variables)
            case "Union":
                return self.union(parts, variables)
            case "Literal":
                values = [p.value if isinstance(p, ast.Constant) else ast.literal_eval(p) for p in parts]
                return tuple(values)
            case "List" | "Tuple" | "list" | "tuple":
                return (list,)
            case "Annotated":
                return self.of(parts[0], variables)
            case None:
                found = self.walk.value(outer, self.frame)
                if found.kind == "value" and isinstance(found.node, ast.expr) and found.module and len(parts) == 1:
                    free = [n.id for n in ast.walk(found.node) if isinstance(n, ast.Name)]
                    given = self.of(parts[0], variables)
                    inside = _Types(self.walk, _Frame(found.module), self.depth + 1)
                    return inside.of(found.node, {name: given for name in free if inside.is_variable(name)})
        return None

    def is_variable(self, name: str) -> bool:
        try:
            return _is_type_variable(self.walk.named(name, self.frame).node)
        except (Undecided, _Absent, _Failing, Broken):
            return False

    def typing(self, node: ast.expr) -> str | None:
        """The last word of what stands in `typing` or `builtins`."""
        path = _nominal(node, self.frame.module)
        if path is None:
            if isinstance(node, ast.Name) and node.id not in ("list", "tuple"):
                return None
            path = self.walk.value(node, self.frame).path
        head, _, word = path.rpartition(".")
        return word if head in ("typing", "typing_extensions", "builtins") else None

    def named(self, node: ast.Name | ast.Attribute, variables: dict[str, Any]) -> tuple[Any, ...] | None:
        if isinstance(node, ast.Name) and node.id in variables:
            return variables[node.id]
        nominal = _nominal(node, self.frame.module)
        if nominal is not None:
            return (list,) if nominal in ("typing.List", "typing.Tuple") else None
        if _is_tensor(node, self.frame.module):
            return None
        found = self.walk.value(node, self.frame)
        if found.live is not None:
            return (found.live,) if found.live in SIMPLE else None
        if found.kind == "value" and isinstance(found.node, ast.expr) and found.module is not None:
            return _Types(self.walk, _Frame(found.module), self.depth + 1).of(found.node, {})
        return None

    def union(self, parts: list[ast.expr], variables: dict[str, Any]) -> tuple[Any, ...] | None:
        options = []
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                part = ast.parse(part.value.strip(), mode="eval").body
            try:
                options.append((part, self.of(part, variables)))
            except (Undecided, _Absent, _Failing, Broken):
                options.append((part, None))
        numbers = any(option and {int, float} & set(option) for _, option in options)
        kept: list[Any] = []
        for part, option in options:
            if option is None:
                if numbers and self.is_of_torch(part):
                    continue
                return None
            kept += [each for each in option if each not in kept or isinstance(each, bool)]
        return tuple(kept)

    def is_of_torch(self, node: ast.expr) -> bool:
        """Whether it is a class of torch that no plain value stands for."""
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        if _is_tensor(node, self.frame.module):
            return True
        try:
            found = self.walk.value(node, self.frame)
            if found.kind != "class" or not found.path.startswith("torch."):
                return False
            line, complete = self.walk.line(found)
        except (Undecided, _Absent, _Failing, Broken):
            return False
        return complete and not any(t.live is not None and t.live.__module__ in ("builtins", "enum") for t in line)


def _is_tensor(node: ast.expr, module: Module) -> bool:
    """`Tensor` of torch, without reading torch."""
    match node:
        case ast.Name(id=name):
            options = module.scope.names.get(name, ())
            return any(
                isinstance(o, Imported) and o.module in ("torch", "torch._tensor") and o.name == "Tensor"
                for o in options
            )
        case ast.Attribute(value=ast.Name(id=name), attr="Tensor"):
            options = module.scope.names.get(name, ())
            return any(isinstance(o, Imported) and o.module == "torch" and o.name is None for o in options)
    return False


def _sides(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_sides(node.left), *_sides(node.right)]
    return [node]


# ---- metrics


class _Logged:
    """The names that the methods of some classes log."""

    def __init__(self, walk: _Walk, classes: list[_Thing]):
        self.walk, self.classes = walk, classes
        self.methods = [
            (each, node) for each in classes for node in each.node.body if isinstance(node, Functions) and _first(node)
        ]
        self.asked: set[tuple[int, str]] = set()

    def names(self, complete: bool) -> tuple[set[str], bool]:
        names: set[str] = set()
        for each, method in self.methods:
            for call in ast.walk(method):
                match call:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=word), attr="log" | "log_dict" as how)) if (
                        word == _first(method)
                    ):
                        given = call.args[0] if call.args else next(
                            (k.value for k in call.keywords if k.arg in ("name", "dictionary")), None
                        )  # fmt: skip
                        found = self.text(given, each, method) if how == "log" else self.keys(given, each, method)
                        if found is None:
                            complete = False
                        else:
                            names |= found
        return names, complete

    def text(self, node: ast.expr | None, each: _Thing, method: Functions) -> set[str] | None:
        """The texts that an expression may give."""
        match node:
            case ast.Constant(value=str(word)):
                return {word}
            case ast.Constant(value=int(number)):
                return {str(number)}
            case ast.JoinedStr(values=parts):
                return self.product([p.value if isinstance(p, ast.FormattedValue) and p.format_spec is None else p
                                     for p in parts], each, method)  # fmt: skip
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.product([left, right], each, method)
            case ast.IfExp(body=body, orelse=other):
                one, two = self.text(body, each, method), self.text(other, each, method)
                return None if one is None or two is None else one | two
            case ast.Name(id=name):
                return self.variable(name, each, method)
            case ast.Attribute(value=ast.Name(id=word), attr=name) if word == _first(method):
                return self.of_class(name)
        return None

    def product(self, parts: list[Any], each: _Thing, method: Functions) -> set[str] | None:
        whole = {""}
        for part in parts:
            texts = self.text(part, each, method)
            if texts is None or len(whole) * len(texts) > 1000:
                return None
            whole = {one + text for one in whole for text in texts}
        return whole

    def of_class(self, name: str) -> set[str] | None:
        for _, method in self.methods:
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                    return None
        for each in self.classes:
            for option in self.walk.scope(each).names.get(name, ()):
                if isinstance(option, Assigned) and isinstance(option.value, ast.Constant):
                    return {str(option.value.value)}
        return None

    def items(self, node: ast.expr, each: _Thing, method: Functions) -> set[str] | None:
        """The literal items of a loop."""
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            found: set[str] = set()
            for item in node.elts:
                texts = self.text(item, each, method)
                if texts is None:
                    return None
                found |= texts
            return found
        if isinstance(node, ast.Attribute) and _is_it(node.value, str(_first(method))):
            for owner in self.classes:
                for option in self.walk.scope(owner).names.get(node.attr, ()):
                    if isinstance(option, Assigned):
                        return self.walk.words(option.value, _Frame(self.walk.home(owner)))
            return None
        if isinstance(node, ast.Call):
            return None
        return self.walk.words(node, _Frame(self.walk.home(each), function=method))

    def variable(self, name: str, each: _Thing, method: Functions) -> set[str] | None:
        key = (id(method), name)
        if key in self.asked:
            return None
        self.asked.add(key)
        try:
            return self._variable(name, each, method)
        finally:
            self.asked.discard(key)

    def _variable(self, name: str, each: _Thing, method: Functions) -> set[str] | None:
        found: list[set[str] | None] = []
        arguments = [a.arg for a in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)]
        if name in arguments:
            found.append(self.argument(name, method))
        for node in ast.walk(method):
            match node:
                case ast.For(target=target, iter=items) | ast.comprehension(target=target, iter=items):
                    if _is_it(target, name):
                        found.append(self.items(items, each, method))
                    elif any(_is_it(n, name) for n in ast.walk(target)):
                        found.append(None)
                case ast.Assign(targets=[ast.Name(id=word)], value=value) if word == name:
                    found.append(self.text(value, each, method))
                case ast.Name(id=word, ctx=ast.Store()) if word == name:
                    found.append(set())
        if not found or None in found:
            return None
        whole = set().union(*(texts for texts in found if texts))
        return whole or None

    def argument(self, name: str, method: Functions) -> set[str] | None:
        """What the other methods give for a parameter."""
        positional = [a.arg for a in (*method.args.posonlyargs, *method.args.args)][1:]
        defaults = dict(zip(reversed(positional), reversed(method.args.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True) if d}
        found: set[str] = set()
        calls = 0
        for each, caller in self.methods:
            for node in ast.walk(caller):
                if not (isinstance(node, ast.Attribute) and node.attr == method.name):
                    continue
                if not _is_it(node.value, str(_first(caller))):
                    continue
                call = next((c for c in ast.walk(caller) if isinstance(c, ast.Call) and c.func is node), None)
                if call is None or any(isinstance(a, ast.Starred) for a in call.args):
                    return None
                given = next((k.value for k in call.keywords if k.arg == name), None)
                if given is None and name in positional and positional.index(name) < len(call.args):
                    given = call.args[positional.index(name)]
                texts = self.text(given or defaults.get(name), each, caller)
                if texts is None:
                    return None
                found |= texts
                calls += 1
        return found if calls else None

    def keys(self, node: ast.expr | None, each: _Thing, method: Functions) -> set[str] | None:
        """The keys of a mapping."""
        match node:
            case ast.Dict(keys=keys, values=values):
                found: set[str] = set()
                for key, value in zip(keys, values, strict=True):
                    texts = self.keys(value, each, method) if key is None else self.text(key, each, method)
                    if texts is None:
                        return None
                    found |= texts
                return found
            case ast.DictComp(key=key):
                return self.text(key, each, method)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                one, two = self.keys(left, each, method), self.keys(right, each, method)
                return None if one is None or two is None else one | two
            case ast.Name(id=name):
                return self.mapping(name, each, method)
        return None

    def mapping(self, name: str, each: _Thing, method: Functions) -> set[str] | None:
        """A variable that is made as a mapping and gets more items."""
        found: set[str] = set()
        made = 0
        for node in ast.walk(method):
            texts: set[str] | None = set()
            match node:
                case ast.Assign(targets=[ast.Name(id=word)], value=value) if word == name:
                    texts = self.keys(value, each, method)
                    made += 1
                case ast.AugAssign(target=ast.Name(id=word), value=value) if word == name:
                    texts = self.keys(value, each, method)
                case ast.Subscript(value=ast.Name(id=word), slice=index, ctx=ast.Store()) if word == name:
                    texts = self.text(index, each, method)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=word), attr="update" | "setdefault")) if (
                    word == name
                ):
                    texts = None
            if texts is None:
                return None
            found |= texts
        return found if made else None


# ---- documentation


def _described(docstring: str, parameter: str) -> str | None:
    """What a docstring of Google's, NumPy's or Sphinx's kind says about a parameter."""
    if parameter not in docstring:
        return None
    import logging

    import griffe  # 0.04 CPU seconds, needed by `explain` alone

    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    for style in ("google", "numpy", "sphinx"):
        for section in griffe.Docstring(docstring).parse(style):
            if section.kind.value not in ("parameters", "other parameters", "attributes"):
                continue
            for item in section.value:
                names = [name.strip("*` ") for name in item.name.split(",")]
                if parameter in names and item.description:
                    return " ".join(item.description.split())
    return None
