"""What names and expressions of source files mean, and where the classes that they name come from.

Modules of the standard library that this process holds anyway (`_HELD`) are asked directly.
"""

import ast
import builtins
import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from deeplightning import own_code
from deeplightning.faults import install, nearest
from deeplightning.signatures import bindings
from deeplightning.signatures.bindings import Assigned, Binding, Broken, Defined, Imported, Module, Scope
from deeplightning.signatures.signature import Undecided
from deeplightning.signatures.symbol import (
    UNKNOWABLE,
    Absent,
    Failing,
    Frame,
    Functions,
    Kind,
    Lacking,
    Thing,
    is_type_variable,
    is_unbound,
    nominal,
)

T = TypeVar("T")

_HELD = (
    "abc", "builtins", "collections", "collections.abc", "contextlib", "dataclasses", "datetime", "enum", "functools",
    "itertools", "operator", "os", "os.path", "types", "typing",
)  # fmt: skip

# Decorators that leave alone what a function or class with a constructor of its own takes.
KEEPING = {
    "abc.abstractmethod", "builtins.classmethod", "builtins.property", "builtins.staticmethod",
    "contextlib.contextmanager", "dataclasses.dataclass", "functools.cache", "functools.lru_cache", "functools.wraps",
    "pytorch_lightning.utilities.argparse._defaults_from_env_vars", "sklearn.utils._param_validation.validate_params",
    "torch.autograd.grad_mode.enable_grad", "torch.autograd.grad_mode.inference_mode",
    "torch.autograd.grad_mode.no_grad", "torchvision.models._api.register_model",
    "torchvision.models._utils.kwonly_to_pos_or_kw", "transformers.utils.auto_docstring.auto_docstring",
    "typing.overload", "typing_extensions.deprecated", "typing_extensions.overload", "typing_extensions.override",
    "warnings.deprecated",
}  # fmt: skip


class Names:
    """One search through source files. What it has found it keeps; what it is about to find it does not begin again."""

    def __init__(self) -> None:
        self.modules: dict[str, Module | None] = {}
        self.lines: dict[object, tuple[list[Thing], bool]] = {}
        self.scopes: dict[int, Scope] = {}
        self.found: dict[object, Thing] = {}
        self.hints: dict[object, object] = {}
        self.active: set[object] = set()
        self.changes_path = False  # whether own code may add folders to import from

    @contextlib.contextmanager
    def asking(self, key: object) -> Iterator[None]:
        """Mark a question as asked while it is answered.

        Raises:
            Undecided: its answer depends on itself.
        """
        if key in self.active or len(self.active) > 150:
            raise Undecided("its definition goes round in a circle")
        self.active.add(key)
        try:
            yield
        finally:
            self.active.discard(key)

    # ---- names

    def module(self, name: str) -> Module | None:
        if name not in self.modules:
            module = bindings.module(name)
            if module is not None and module.is_ours:
                if "." in name:
                    self.module(name.rpartition(".")[0])
                self.modules[name] = module  # own files may import each other
                try:
                    self.need_imports(module)
                except (Failing, Broken):
                    del self.modules[name]
                    raise
            self.modules[name] = module
        return self.modules[name]

    def need_imports(self, module: Module) -> None:
        """Raise what importing own code certainly ends with: a package that is not installed."""
        self.changes_path = self.changes_path or b"sys.path" in module.text or b"addsitedir" in module.text
        if self.changes_path:
            return
        for top, line in _missing_packages(module):
            raise _lacking(top, module.place(line))
        for name, _ in module.scope.imports if own_code.is_own(str(module.file)) else ():
            if own_code.top_level(name.partition(".")[0]) is not None:
                self.module(name)

    def member(self, owner: Thing, name: str) -> Thing:
        """Return an attribute.

        Raises:
            Absent: there is none.
        """
        if owner.live is not None:
            return self.live(owner.live, name, owner)
        if owner.kind == "module":
            assert owner.module is not None
            return self.name_in(owner.module, name)
        if owner.kind == "class":
            return self.attribute(owner, name)
        raise Undecided(f"what `{name}` of a {owner.kind} is shows only when it is imported")

    def live(self, owner: object, name: str, through: Thing | None = None) -> Thing:
        try:
            found = getattr(owner, name)
        except AttributeError:
            raise Absent(name, dir(owner)) from None
        if isinstance(found, types.ModuleType):
            return Thing("module", None, name, live=found)
        kind: Kind = "class" if isinstance(found, type) else "function" if callable(found) else "value"
        return Thing(kind, None, name, None, through if through and through.kind == "class" else None, found)

    def name_in(self, module: Module, name: str) -> Thing:
        """Return what a name of a module means, or its submodule of that name."""
        key = (module.name, name)
        if key in self.found:
            return self.found[key]
        if module.name in _HELD and module.name in sys.modules:
            return self.live(sys.modules[module.name], name)
        if module.is_open:
            raise Undecided(f"{module.name} is not written in Python")
        with self.asking(key):
            self.found[key] = self.bound(module, name)
        return self.found[key]

    def bound(self, module: Module, name: str) -> Thing:
        scope = module.scope
        options, doubt = self.options(scope, name)
        try:
            if options != (bindings.UNBOUND,) or not doubt:
                return self.one_of(options, name, Frame(module))
        except Absent as absent:
            if absent.name != name:
                raise
        submodule = self.module(f"{module.name}.{name}") if module.folders else None
        if submodule is not None:
            return Thing("module", submodule, "")
        if name in ("__name__", "__file__", "__doc__", "__path__", "__spec__", "__package__", "__loader__"):
            return Thing("value", module, name)
        if "__getattr__" in scope.names:
            return self.answered(module, name)
        if doubt:
            raise Undecided(doubt)
        if scope.makes_names:
            raise Undecided(f"{module.name} makes names as it is imported ({scope.makes_names})")
        raise Absent(name, self.names_of(module))

    def options(self, scope: Scope, name: str) -> tuple[tuple[Binding, ...], str | None]:
        """Return the possible bindings of a name, those by `import *` among them, and why there may be others."""
        options = scope.names.get(name, (bindings.UNBOUND,))
        since = max(option.order for option in options)
        doubt = None
        for star in reversed(scope.stars):
            if star.order < since:
                break
            try:
                source = self.module(star.module)
            except Failing:
                if star.certain:
                    raise
                source = None
            if source is None or source.is_open:
                doubt = f"{star.module}, whose names {scope.module.name} takes over, is not written in Python"
            elif source.may_bind(name) and (source.name, name) not in self.active and self.exports(source, name):
                taken = Imported(star.order, star.line, star.module, name)
                if star.certain:
                    return (taken,), None
                options = (*options, taken)
        return options, doubt

    def exports(self, module: Module, name: str) -> bool:
        """Return whether `from module import *` gives a name.

        Raises:
            Undecided: a decorator may add it to `__all__`.
        """
        listed, options = self.listed(module), module.scope.names.get(name, ())
        if name.startswith("_") if listed is None else name not in listed:
            nodes = [option.node for option in options if isinstance(option, Defined)] if listed is not None else []
            for decorator in (each for node in nodes for each in node.decorator_list):
                if self.real_path(decorator, Frame(module)) not in KEEPING:
                    raise Undecided(f"@{ast.unparse(decorator)[:60]} may add it to `__all__` of {module.name}")
            return False
        if any(option is not bindings.UNBOUND for option in options):
            return True
        try:
            self.name_in(module, name)
        except Absent:
            return False
        except (Undecided, Failing, Broken):  # who wants it will hear why
            pass
        return True

    def listed(self, module: Module) -> set[str] | None:
        """Return `__all__`, where a module has one that is written out."""
        parts = [part for part in module.scope.exported if part is not None]
        if not parts or len(parts) < len(module.scope.exported):
            return None
        try:
            return {name for part in parts for name in ast.literal_eval(part)}
        except (ValueError, TypeError):
            return None

    def answered(self, module: Module, name: str) -> Thing:
        """Return what a module's `__getattr__` imports under a name."""
        functions = [option.node for option in module.scope.names["__getattr__"] if isinstance(option, Defined)]
        nodes = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
        imports = {alias.asname or alias.name: (node, alias.name) for node in nodes for alias in node.names}
        if name in imports:
            node, inside = imports[name]
            option = Imported(0, node.lineno, bindings.absolute(node, module), inside)
            return self.imported(option, inside, Frame(module))
        if nearest(name, [*imports]):
            raise Absent(name, [*imports])
        raise Undecided(f"{module.name} makes names when they are asked for (`__getattr__`)")

    def names_of(self, module: Module) -> list[str]:
        """Return what there is in a module, for the nearest word."""
        names = {n for n, options in module.scope.names.items() if not all(map(is_unbound, options))}
        for star in module.scope.stars:
            source, key = self.module(star.module), ("*", star.module)
            if source is not None and not source.is_open and source is not module and key not in self.active:
                self.active.add(key)
                names |= self.listed(source) or set(self.names_of(source))
                self.active.discard(key)
        return sorted(names | set(module.submodules))

    def one_of(self, options: tuple[Binding, ...], name: str, frame: Frame) -> Thing:
        """Return what several possible bindings come to, if they come to one thing."""
        left = []
        for option in options:
            if not (isinstance(option, Imported) and option.is_tried):
                left.append(option)
                continue
            with contextlib.suppress(Absent, Failing, Broken):
                source = self.module(option.module)
                if source is not None and not any(_missing_packages(source)):
                    found = self.meant(option, name, frame)
                    if not left:
                        return found
                    left.append(option)
        if not left:
            raise Undecided(f"what {frame.module.name} imports for `{name}` is not there")
        bound = [option for option in left if not is_unbound(option)]
        if not bound:
            raise Absent(name, [])
        if len(bound) < len(left):
            raise Undecided(f"whether {frame.module.name} has `{name}` depends on the machine")
        if len(bound) > 1:
            raise Undecided(f"`{name}` of {frame.module.name} is one thing or another, depending on the machine")
        return self.meant(bound[0], name, frame)

    def meant(self, option: Binding, name: str, frame: Frame) -> Thing:
        prefix = f"{frame.line[0].name}." if frame.scope and frame.line else ""
        match option:
            case Imported(module=module, name=None):
                found = self.module(module)
                if found is None:
                    raise Undecided(f"{module} is not there")
                return Thing("module", found, "")
            case Imported(module=module, name=str(inside)):
                return self.imported(option, inside, frame)
            case Defined(node=node):
                kind: Kind = "class" if isinstance(node, ast.ClassDef) else "function"
                owner = frame.line[0] if prefix and kind == "function" else None
                return Thing(kind, frame.module, prefix + node.name, node, owner)
            case Assigned(value=value):
                return self.assigned(value, prefix + name, frame)
            case bindings.Opaque(what=str(what)):
                place = f"in {frame.function.name}" if frame.function else f"of {frame.module.name}"
                raise Undecided(f"`{name}` {place} {what}")
        raise Undecided(f"`{name}` of {frame.module.name} is unknown")

    def imported(self, option: Imported, name: str, frame: Frame) -> Thing:
        source = self.module(option.module)
        if source is None:
            top = option.module.partition(".")[0]
            if self.module(top) is None and not self.changes_path:
                raise _lacking(top, frame.module.place(option.line))
            raise Undecided(f"{option.module}, which {frame.module.name} imports, is made when it is imported")
        if source is frame.module or source.name == frame.module.name:  # `from . import part`
            submodule = self.module(f"{source.name}.{name}")
            if submodule is not None:
                return Thing("module", submodule, "")
        try:
            return self.name_in(source, name)
        except Absent as absent:
            if absent.name != name:
                raise
            where = f" ({source.file})" if source.file else " (unknown location)"
            words = f"ImportError: cannot import name {name!r} from {source.name!r}{where}"
            raise Failing(f"failed: {words}{frame.module.place(option.line)}") from None

    def assigned(self, value: ast.expr, name: str, frame: Frame) -> Thing:
        """Return what `name = value` binds: another word for something, or a value."""
        match value:
            case ast.Name() | ast.Attribute():
                try:
                    return self.value(value, frame)
                except Absent:
                    raise Undecided(f"what `{name}` of {frame.module.name} is shows only when it is imported") from None
            case ast.Call() | ast.IfExp() | ast.BoolOp() | ast.Lambda() | ast.Await():
                words = ast.unparse(value)
                words = words if len(words) < 60 else f"{words[:57]}…"
                if is_type_variable(value):
                    return Thing("value", frame.module, name, value)
                raise Undecided(f"`{name}` of {frame.module.name} is what `{words}` gives")
        return Thing("value", frame.module, name, value)

    # ---- expressions

    def value(self, node: ast.expr, frame: Frame) -> Thing:
        """Return what an expression of names means."""
        match node:
            case ast.Name(id=name):
                return self.named(name, frame)
            case ast.Attribute(value=inner, attr=name):
                owner = self.value(inner, frame)
                try:
                    return self.member(owner, name)
                except Absent:
                    if owner.kind == "module":
                        raise Undecided(f"{owner.path} seems to have no `{name}`") from None
                    raise
            case ast.Subscript(value=inner):
                return self.value(inner, frame)
        words = ast.unparse(node)
        raise Undecided(f"`{words[:60]}` shows only when it is run")

    def named(self, name: str, frame: Frame) -> Thing:
        if frame.function is not None:
            local = self.scope_of(frame.function, frame.module)
            if name in local.rebound:
                raise Undecided(f"`{name}` in {frame.function.name} is known only when it is run")
            if name in local.names:
                with self.asking(("local", id(local), name)):
                    return self.one_of(local.names[name], name, replace(frame, scope=None))
        if frame.scope is not None and name in frame.scope.names:
            return self.one_of(frame.scope.names[name], name, frame)
        if hasattr(builtins, name) and name not in frame.module.scope.names and not frame.module.scope.stars:
            return self.live(builtins, name)
        try:
            return self.name_in(frame.module, name)
        except Absent as absent:
            if absent.name == name and hasattr(builtins, name):
                return self.live(builtins, name)
            raise Undecided(f"{frame.module.name} names `{absent.name}`, which is not there") from None

    # ---- classes

    def line(self, thing: Thing) -> tuple[list[Thing], bool]:
        """Return a class and its ancestors in Python's order (C3), and whether all are known."""
        if thing.live is not None:
            return [Thing("class", None, c.__name__, live=c) for c in thing.live.__mro__ if c is not object], True
        key = thing.key
        if key in self.lines:
            return self.lines[key]
        try:
            with self.asking(("line", key)):
                self.lines[key] = self._ancestors(thing)
        except Undecided:  # it derives from itself
            return [thing], False
        return self.lines[key]

    def _ancestors(self, thing: Thing) -> tuple[list[Thing], bool]:
        complete = True
        lines: list[list[Thing]] = []
        parents: list[Thing] = []
        for base in thing.node.bases:
            try:
                parent = self.value(base, Frame(self.home(thing), function=None))
                if parent.live is object:
                    continue
                if parent.kind != "class":
                    raise Undecided(f"{parent.path} is no class")
            except (*UNKNOWABLE, RecursionError):
                complete = False
                continue
            above, whole = self.line(parent)
            complete = complete and whole
            parents.append(parent)
            lines.append(above)
        merged = _merged([*lines, parents])
        if merged is None:
            complete = False
            merged = list({t.path: t for above in lines for t in above}.values())
        return [thing, *merged], complete

    def home(self, thing: Thing) -> Module:
        assert thing.module is not None
        return thing.module

    def scope(self, thing: Thing) -> Scope:
        return self.scope_of(thing.node, self.home(thing))

    def scope_of(self, node: ast.ClassDef | Functions, module: Module) -> Scope:
        if id(node) not in self.scopes:
            self.scopes[id(node)] = Scope.of(node, module)
        return self.scopes[id(node)]

    def own(self, thing: Thing, name: str) -> bool:
        return thing.live is None and any(not is_unbound(o) for o in self.scope(thing).names.get(name, ()))

    def attribute(self, thing: Thing, name: str, asked: Thing | None = None) -> Thing:
        """Return an attribute of a class, its own or an ancestor's."""
        line, complete = self.line(thing)
        asked = asked or thing
        known: list[str] = []
        for each in line:
            if each.live is not None:
                if name in vars(each.live):
                    return self.live(each.live, name, asked)
                known += dir(each.live)
                continue
            scope = self.scope(each)
            known += [n for n, found in scope.names.items() if not all(map(is_unbound, found))]
            options = scope.names.get(name, ())
            home = self.home(each)
            if (each.node.name, name) in home.scope.patched:
                raise Undecided(f"`{name}` of {each.path} is set afterwards")
            if options and not all(map(is_unbound, options)):
                found = self.one_of(options, name, Frame(home, scope=scope, line=(each,)))
                if found.kind == "function" and found.owner is not None and found.module is home:
                    found = replace(found, owner=asked)
                return found
            for decorator in each.node.decorator_list if name not in ("__init__", "__new__") else ():
                if self.real_path(decorator, Frame(home)) not in KEEPING:
                    raise Undecided(f"{each.path} is changed by @{ast.unparse(decorator)[:60]}")
        if not complete:
            raise Undecided(f"an ancestor of {thing.path} cannot be read")
        if name in ("__init__", "__new__"):
            raise Absent(name, known)
        if hasattr(type, name):
            return self.live(object, name) if hasattr(object, name) else Thing("value", thing.module, name)
        if self.metaclass(line) is not None:
            raise Undecided(f"what {thing.path} has, its metaclass decides")
        raise Absent(name, known)

    def metaclass(self, line: list[Thing]) -> str | None:
        """Return the metaclass of a class where it is no usual one."""
        for each in line:
            if each.live is not None:
                if type(each.live).__module__ not in ("abc", "builtins", "typing"):
                    return type(each.live).__name__
                continue
            for word in each.node.keywords:
                if word.arg == "metaclass":
                    path = self.real_path(word.value, Frame(self.home(each)))
                    if path not in ("abc.ABCMeta", "builtins.type"):
                        return ast.unparse(word.value)
        return None

    def real_path(self, node: ast.expr, frame: Frame) -> str | None:
        """Return the dotted path of what an expression, or the function of a call, names."""
        node = node.func if isinstance(node, ast.Call) else node
        try:
            return nominal(node, frame.module) or self.value(node, frame).path
        except UNKNOWABLE:
            return None


class Texts:
    """Finds the texts that an expression may give, as far as the source shows them."""

    def __init__(self, names: Names, frame: Frame):
        self.names, self.frame = names, frame

    def of(self, node: ast.expr | None) -> set[str]:
        """Return the texts that an expression may give.

        Raises:
            Undecided: it may give others.
        """
        match node:
            case ast.Constant(value=str() | int() as value):
                return {str(value)}
            case ast.JoinedStr(values=parts):
                return self.joined(parts)
            case ast.FormattedValue(value=value, format_spec=None):
                return self.of(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.joined([left, right])
            case ast.IfExp(body=one, orelse=other):
                return self.of(one) | self.of(other)
            case ast.Name() | ast.Attribute():
                return set().union(*(texts.of(e) for texts, e in self.options(node)))
        raise Undecided("a text shows only when it is run")

    def joined(self, parts: Sequence[ast.expr]) -> set[str]:
        whole = {""}
        for part in parts:
            texts = self.of(part)
            if len(whole) * len(texts) > 1000:
                raise Undecided("a text has too many forms")
            whole = {one + text for one in whole for text in texts}
        return whole

    def items(self, node: ast.expr | None) -> set[str]:
        """Return the texts in a list, the keys of a mapping, or a single text.

        Raises:
            Undecided: there may be others.
        """
        match node:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return set().union(*(self.items(e.value) if isinstance(e, ast.Starred) else self.of(e) for e in items))
            case ast.Dict(keys=keys):
                return set().union(*map(self.of, keys))
            case ast.Constant(value=str()):
                return self.of(node)
            case ast.Name() | ast.Attribute():
                return set().union(*(texts.items(e) for texts, e in self.options(node)))
        raise Undecided("the items of a list show only when it is run")

    def options(self, node: ast.Name | ast.Attribute) -> Iterator[tuple["Texts", ast.expr]]:
        """Yield the expressions that a name may refer to."""
        found = self.names.value(node, self.frame)
        if found.kind != "value" or not isinstance(found.node, ast.expr):
            raise Undecided(f"`{ast.unparse(node)[:60]}` is no plain value")
        yield Texts(self.names, Frame(self.names.home(found))), found.node


def _missing_packages(module: Module) -> Iterator[tuple[str, int]]:
    """Return the packages that a module certainly imports and that are not installed, with the line."""
    for name, line in module.scope.imports:
        top = name.partition(".")[0]
        if top not in sys.modules and bindings.module(top) is None:
            yield top, line


def _lacking(top: str, place: str) -> Lacking:
    return Lacking(f"needs {top}, which is not installed here{place}: {install(top)}")


def _merged(lines: list[list[Thing]]) -> list[Thing] | None:
    """Merge lines of ancestors by C3; return None if the classes cannot be put in one order."""
    merged: list[Thing] = []
    while lines := [line for line in lines if line]:
        later = {thing.path for line in lines for thing in line[1:]}
        head = next((line[0] for line in lines if line[0].path not in later), None)
        if head is None:
            return None
        merged.append(head)
        lines = [line[1:] if line[0].path == head.path else line for line in lines]
    return merged
