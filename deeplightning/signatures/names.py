"""Resolve names, expressions and ancestors of classes in source files.

Modules of the standard library that every process has loaded (`_LIVE_MODULES`) are inspected live.
"""

import ast
import builtins
import contextlib
import re
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace

from deeplightning import own_code
from deeplightning.faults import install_command, nearest
from deeplightning.signatures import bindings
from deeplightning.signatures.bindings import Assigned, Binding, Broken, Defined, Imported, Module, Scope
from deeplightning.signatures.signature import Undecided
from deeplightning.signatures.symbol import (
    RESOLUTION_ERRORS,
    Absent,
    Frame,
    Functions,
    ImportFails,
    Kind,
    PackageMissing,
    Symbol,
    is_type_variable,
    is_unbound,
    stdlib_path,
)

_LIVE_MODULES = (
    "abc", "builtins", "collections", "collections.abc", "contextlib", "dataclasses", "datetime", "enum", "functools",
    "itertools", "operator", "os", "os.path", "types", "typing",
)  # fmt: skip

# Decorators that do not change the signature of a function, or of a class with its own constructor.
PRESERVING_DECORATORS = {
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
    """Resolves names in source files. Caches what it finds, and stops at circular definitions."""

    def __init__(self) -> None:
        self.modules: dict[str, Module | None] = {}
        self.mros: dict[object, tuple[list[Symbol], bool]] = {}
        self.scopes, self.found = dict[int, Scope](), dict[object, Symbol]()
        self.hints, self.active = dict[object, object](), set[object]()
        self.changes_path = False  # whether own code may change `sys.path`

    @contextlib.contextmanager
    def resolving(self, key: object) -> Iterator[None]:
        """Mark a look-up as active.

        Raises:
            Undecided: it is active already, so the definition depends on itself.
        """
        if key in self.active or len(self.active) > 150:
            raise Undecided("its definition is circular")
        self.active.add(key)
        try:
            yield
        finally:
            self.active.discard(key)

    # ---- names

    def module(self, name: str) -> Module | None:
        if name not in self.modules:
            module = bindings.module(name)
            if module is not None and module.is_user_code:
                if "." in name:
                    self.module(name.rpartition(".")[0])
                self.modules[name] = module  # own files may import each other
                try:
                    self.require_imports(module)
                except (ImportFails, Broken):
                    del self.modules[name]
                    raise
            self.modules[name] = module
        return self.modules[name]

    def require_imports(self, module: Module) -> None:
        """Raise the error that importing own code would certainly raise: a package is not installed."""
        self.changes_path = self.changes_path or b"sys.path" in module.text or b"addsitedir" in module.text
        if self.changes_path:
            return
        for top, line in _missing_packages(module):
            raise _package_missing(top, module.place(line))
        for name, _ in module.scope.imports if own_code.is_own(str(module.file)) else ():
            if own_code.top_level(name.partition(".")[0]) is not None:
                self.module(name)

    def member(self, owner: Symbol, name: str) -> Symbol:
        """Return an attribute of a module, class or live object.

        Raises:
            Absent: it does not exist.
        """
        if owner.live is not None:
            return self.live_member(owner.live, name, owner)
        if owner.kind == "module":
            assert owner.module is not None
            return self.name_in_module(owner.module, name)
        if owner.kind == "class":
            return self.attribute(owner, name)
        raise Undecided(f"`{name}` of a {owner.kind} is known only at import time")

    def live_member(self, owner: object, name: str, through: Symbol | None = None) -> Symbol:
        try:
            found = getattr(owner, name)
        except AttributeError:
            raise Absent(name, dir(owner)) from None
        if isinstance(found, types.ModuleType):
            return Symbol("module", None, name, live=found)
        kind: Kind = "class" if isinstance(found, type) else "function" if callable(found) else "value"
        return Symbol(kind, None, name, None, through if through and through.kind == "class" else None, found)

    def name_in_module(self, module: Module, name: str) -> Symbol:
        """Resolve a name in a module, or return the submodule of that name."""
        key = (module.name, name)
        if key in self.found:
            return self.found[key]
        if module.name in _LIVE_MODULES and module.name in sys.modules:
            return self.live_member(sys.modules[module.name], name)
        if module.is_compiled:
            raise Undecided(f"{module.name} is not written in Python")
        with self.resolving(key):
            self.found[key] = self.bound_in_module(module, name)
        return self.found[key]

    def bound_in_module(self, module: Module, name: str) -> Symbol:
        scope = module.scope
        options, doubt = self.possible_bindings(scope, name)
        try:
            if options != (bindings.UNBOUND,) or not doubt:
                return self.resolve_bindings(options, name, Frame(module))
        except Absent as absent:
            if absent.name != name:
                raise
        submodule = self.module(f"{module.name}.{name}") if module.folders else None
        if submodule is not None:
            return Symbol("module", submodule, "")
        if name in ("__name__", "__file__", "__doc__", "__path__", "__spec__", "__package__", "__loader__"):
            return Symbol("value", module, name)
        if "__getattr__" in scope.names:
            return self.from_getattr(module, name)
        if doubt:
            raise Undecided(doubt)
        if scope.dynamic_names:
            raise Undecided(f"{module.name} creates names at import time ({scope.dynamic_names})")
        raise Absent(name, self.names_of(module))

    def possible_bindings(self, scope: Scope, name: str) -> tuple[tuple[Binding, ...], str | None]:
        """Return the possible bindings of a name, also by `import *`, and why there may be others, or None."""
        options = scope.names.get(name, (bindings.UNBOUND,))
        since = max(option.order for option in options)
        doubt = None
        for star, certain in reversed(scope.stars):
            if star.order < since:
                break
            try:
                source = self.module(star.module)
            except ImportFails:
                if certain:
                    raise
                source = None
            if source is None or source.is_compiled:
                doubt = f"{star.module}, from which {scope.module.name} imports `*`, is not written in Python"
            elif source.may_bind(name) and (source.name, name) not in self.active and self.exports(source, name):
                taken = replace(star, name=name)
                if certain:
                    return (taken,), None
                options = (*options, taken)
        return options, doubt

    def exports(self, module: Module, name: str) -> bool:
        """Return whether `from module import *` imports a name.

        Raises:
            Undecided: a decorator may add it to `__all__`.
        """
        listed, options = self.dunder_all(module), module.scope.names.get(name, ())
        if name.startswith("_") if listed is None else name not in listed:
            nodes = [option.node for option in options if isinstance(option, Defined)] if listed is not None else []
            for decorator in (each for node in nodes for each in node.decorator_list):
                if self.real_path(decorator, Frame(module)) not in PRESERVING_DECORATORS:
                    raise Undecided(f"@{ast.unparse(decorator)[:60]} may add it to `__all__` of {module.name}")
            return False
        if any(option is not bindings.UNBOUND for option in options):
            return True
        try:
            self.name_in_module(module, name)
        except Absent:
            return False
        except (Undecided, ImportFails, Broken):  # resolving the name raises it again
            pass
        return True

    def dunder_all(self, module: Module) -> set[str] | None:
        """Return the `__all__` of a module, or None if it has none or computes it."""
        parts = [part for part in module.scope.exported if part is not None]
        if not parts or len(parts) < len(module.scope.exported):
            return None
        try:
            return {name for part in parts for name in ast.literal_eval(part)}
        except (ValueError, TypeError):
            return None

    def from_getattr(self, module: Module, name: str) -> Symbol:
        """Resolve a name that a module's `__getattr__` imports."""
        functions = [option.node for option in module.scope.names["__getattr__"] if isinstance(option, Defined)]
        nodes = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
        imports = {alias.asname or alias.name: (node, alias.name) for node in nodes for alias in node.names}
        if name in imports:
            node, inside = imports[name]
            option = Imported(0, node.lineno, bindings.absolute(node, module), inside)
            return self.resolve_import(option, inside, Frame(module))
        if nearest(name, [*imports]) and not re.search(rf"(?<![^\W_]){re.escape(name)}(?!\w)".encode(), module.text):
            raise Absent(name, [*imports])
        raise Undecided(f"{module.name} creates names on access (`__getattr__`)")

    def names_of(self, module: Module) -> list[str]:
        """Return the names in a module, for suggestions."""
        names = {n for n, options in module.scope.names.items() if not all(map(is_unbound, options))}
        for star, _ in module.scope.stars:
            source, key = self.module(star.module), ("*", star.module)
            if source is not None and not source.is_compiled and source is not module and key not in self.active:
                self.active.add(key)
                names |= self.dunder_all(source) or set(self.names_of(source))
                self.active.discard(key)
        return sorted(names | set(module.submodules))

    def resolve_bindings(self, options: tuple[Binding, ...], name: str, frame: Frame) -> Symbol:
        """Resolve possible bindings, which must lead to one symbol."""
        candidates = []
        for option in options:
            if not (isinstance(option, Imported) and option.is_tried):
                candidates.append(option)
                continue
            with contextlib.suppress(Absent, ImportFails, Broken):
                source = self.module(option.module)
                if source is not None and not any(_missing_packages(source)):
                    found = self.resolve_binding(option, name, frame)
                    if not candidates:
                        return found
                    candidates.append(option)
        if not candidates:
            raise Undecided(f"{frame.module.name} has no import of `{name}` that can be resolved")
        bound = [option for option in candidates if not is_unbound(option)]
        if not bound:
            raise Absent(name, [])
        if len(bound) < len(candidates):
            raise Undecided(f"whether {frame.module.name} has `{name}` depends on the machine")
        if len(bound) > 1:
            raise Undecided(f"which definition of `{name}` {frame.module.name} uses depends on the machine")
        return self.resolve_binding(bound[0], name, frame)

    def resolve_binding(self, option: Binding, name: str, frame: Frame) -> Symbol:
        prefix = f"{frame.mro[0].name}." if frame.scope and frame.mro else ""
        match option:
            case Imported(module=module, name=None):
                found = self.module(module)
                if found is None:
                    raise Undecided(f"there is no module {module}")
                return Symbol("module", found, "")
            case Imported(module=module, name=str(inside)):
                return self.resolve_import(option, inside, frame)
            case Defined(node=node):
                kind: Kind = "class" if isinstance(node, ast.ClassDef) else "function"
                owner = frame.mro[0] if prefix and kind == "function" else None
                return Symbol(kind, frame.module, prefix + node.name, node, owner)
            case Assigned(value=value):
                return self.resolve_assignment(value, prefix + name, frame)
            case bindings.Opaque(what=str(what)):
                place = f"in {frame.function.name}" if frame.function else f"of {frame.module.name}"
                raise Undecided(f"`{name}` {place} {what}")
        raise Undecided(f"`{name}` of {frame.module.name} is unknown")

    def resolve_import(self, option: Imported, name: str, frame: Frame) -> Symbol:
        source = self.module(option.module)
        if source is None:
            top = option.module.partition(".")[0]
            if self.module(top) is None and not self.changes_path:
                raise _package_missing(top, frame.module.place(option.line))
            raise Undecided(f"{option.module}, which {frame.module.name} imports, is created at import time")
        if source is frame.module or source.name == frame.module.name:  # `from . import part`
            submodule = self.module(f"{source.name}.{name}")
            if submodule is not None:
                return Symbol("module", submodule, "")
        try:
            return self.name_in_module(source, name)
        except Absent as absent:
            if absent.name != name:
                raise
            where = f" ({source.file})" if source.file else " (unknown location)"
            words = f"ImportError: cannot import name {name!r} from {source.name!r}{where}"
            raise ImportFails(f"failed: {words}{frame.module.place(option.line)}") from None

    def resolve_assignment(self, value: ast.expr, name: str, frame: Frame) -> Symbol:
        """Resolve what `name = value` binds: an alias of another name, or a value."""
        match value:
            case ast.Name() | ast.Attribute():
                try:
                    return self.value(value, frame)
                except Absent:
                    raise Undecided(f"`{name}` of {frame.module.name} is known only at import time") from None
            case ast.Call() | ast.IfExp() | ast.BoolOp() | ast.Lambda() | ast.Await():
                words = ast.unparse(value)
                words = words if len(words) < 60 else f"{words[:57]}…"
                if is_type_variable(value):
                    return Symbol("value", frame.module, name, value)
                raise Undecided(f"`{name}` of {frame.module.name} is the result of `{words}`")
        return Symbol("value", frame.module, name, value)

    # ---- expressions

    def value(self, node: ast.expr, frame: Frame) -> Symbol:
        """Resolve an expression of names, such as `module.Class`."""
        match node:
            case ast.Name(id=name):
                return self.name_in_frame(name, frame)
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
        raise Undecided(f"`{ast.unparse(node)[:60]}` is known only at run time")

    def name_in_frame(self, name: str, frame: Frame) -> Symbol:
        if frame.function is not None:
            local = self.scope_of(frame.function, frame.module)
            if name in local.rebound:
                raise Undecided(f"`{name}` in {frame.function.name} is known only at run time")
            if name in local.names:
                with self.resolving(("local", id(local), name)):
                    return self.resolve_bindings(local.names[name], name, replace(frame, scope=None))
        if frame.scope is not None and name in frame.scope.names:
            return self.resolve_bindings(frame.scope.names[name], name, frame)
        if hasattr(builtins, name) and name not in frame.module.scope.names and not frame.module.scope.stars:
            return self.live_member(builtins, name)
        try:
            return self.name_in_module(frame.module, name)
        except Absent as absent:
            if absent.name == name and hasattr(builtins, name):
                return self.live_member(builtins, name)
            raise Undecided(f"{frame.module.name} uses `{absent.name}`, which is not defined") from None

    # ---- classes

    def mro(self, symbol: Symbol) -> tuple[list[Symbol], bool]:
        """Return a class and its ancestors in Python's order (C3), and whether all are known."""
        if symbol.live is not None:
            return [Symbol("class", None, c.__name__, live=c) for c in symbol.live.__mro__ if c is not object], True
        key = symbol.key
        if key in self.mros:
            return self.mros[key]
        try:
            with self.resolving(("mro", key)):
                self.mros[key] = self._compute_mro(symbol)
        except Undecided:  # the class derives from itself
            return [symbol], False
        return self.mros[key]

    def _compute_mro(self, symbol: Symbol) -> tuple[list[Symbol], bool]:
        complete, mros, parents = True, list[list[Symbol]](), list[Symbol]()
        for base in symbol.node.bases:
            try:
                parent = self.value(base, Frame(self.home(symbol), function=None))
                if parent.live is object:
                    continue
                if parent.kind != "class":
                    raise Undecided(f"{parent.path} is not a class")
            except (*RESOLUTION_ERRORS, RecursionError):
                complete = False
                continue
            above, is_complete = self.mro(parent)
            complete = complete and is_complete
            parents.append(parent)
            mros.append(above)
        merged = _merge_mros([*mros, parents])
        if merged is None:
            complete = False
            merged = list({t.path: t for above in mros for t in above}.values())
        return [symbol, *merged], complete

    def home(self, symbol: Symbol) -> Module:
        assert symbol.module is not None
        return symbol.module

    def scope(self, symbol: Symbol) -> Scope:
        return self.scope_of(symbol.node, self.home(symbol))

    def scope_of(self, node: ast.ClassDef | Functions, module: Module) -> Scope:
        if id(node) not in self.scopes:
            self.scopes[id(node)] = Scope.of(node, module)
        return self.scopes[id(node)]

    def defines(self, symbol: Symbol, name: str) -> bool:
        return symbol.live is None and any(not is_unbound(o) for o in self.scope(symbol).names.get(name, ()))

    def attribute(self, symbol: Symbol, name: str, through: Symbol | None = None) -> Symbol:
        """Return an attribute of a class, its own or an ancestor's."""
        mro, complete = self.mro(symbol)
        through = through or symbol
        known: list[str] = []
        for each in mro:
            if each.live is not None:
                if name in vars(each.live):
                    return self.live_member(each.live, name, through)
                known += dir(each.live)
                continue
            scope = self.scope(each)
            known += [n for n, found in scope.names.items() if not all(map(is_unbound, found))]
            options = scope.names.get(name, ())
            home = self.home(each)
            if (each.node.name, name) in home.scope.patched:
                raise Undecided(f"`{name}` of {each.path} is assigned outside the class")
            if options and not all(map(is_unbound, options)):
                found = self.resolve_bindings(options, name, Frame(home, scope=scope, mro=(each,)))
                if found.kind == "function" and found.owner is not None and found.module is home:
                    found = replace(found, owner=through)
                return found
            for decorator in each.node.decorator_list if name not in ("__init__", "__new__") else ():
                if self.real_path(decorator, Frame(home)) not in PRESERVING_DECORATORS:
                    raise Undecided(f"{each.path} is changed by @{ast.unparse(decorator)[:60]}")
        if not complete:
            raise Undecided(f"an ancestor of {symbol.path} cannot be read")
        if name in ("__init__", "__new__"):
            raise Absent(name, known)
        if hasattr(type, name):
            return self.live_member(object, name) if hasattr(object, name) else Symbol("value", symbol.module, name)
        if self.metaclass(mro) is not None:
            raise Undecided(f"the metaclass of {symbol.path} decides its attributes")
        raise Absent(name, known)

    def metaclass(self, mro: list[Symbol]) -> str | None:
        """Return the name of the metaclass, or None if it is `type` or `ABCMeta`."""
        for each in mro:
            if each.live is not None:
                if type(each.live).__module__ not in ("abc", "builtins", "typing"):
                    return type(each.live).__name__
                continue
            for word in (word for word in each.node.keywords if word.arg == "metaclass"):
                if self.real_path(word.value, Frame(self.home(each))) not in ("abc.ABCMeta", "builtins.type"):
                    return ast.unparse(word.value)
        return None

    def real_path(self, node: ast.expr, frame: Frame) -> str | None:
        """Return the dotted path of the object that an expression, or the function of a call, refers to."""
        node = node.func if isinstance(node, ast.Call) else node
        try:
            return stdlib_path(node, frame.module) or self.value(node, frame).path
        except RESOLUTION_ERRORS:
            return None


class Texts:
    """Finds the strings that an expression may evaluate to, as far as the source shows them."""

    def __init__(self, names: Names, frame: Frame):
        self.names, self.frame = names, frame

    def of(self, node: ast.expr | None) -> set[str]:
        """Return the strings that an expression may evaluate to.

        Raises:
            Undecided: there may be others.
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
        raise Undecided("a string is known only at run time")

    def joined(self, parts: Sequence[ast.expr]) -> set[str]:
        results = {""}
        for part in parts:
            texts = self.of(part)
            if len(results) * len(texts) > 1000:
                raise Undecided("a string has too many possible values")
            results = {one + text for one in results for text in texts}
        return results

    def items(self, node: ast.expr | None) -> set[str]:
        """Return the strings in a list, the keys of a mapping, or a single string.

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
        raise Undecided("the items of a list are known only at run time")

    def options(self, node: ast.Name | ast.Attribute) -> Iterator[tuple["Texts", ast.expr]]:
        """Yield the expressions that a name may refer to."""
        found = self.names.value(node, self.frame)
        if found.kind != "value" or not isinstance(found.node, ast.expr):
            raise Undecided(f"`{ast.unparse(node)[:60]}` is not a plain value")
        yield Texts(self.names, Frame(self.names.home(found))), found.node


def _missing_packages(module: Module) -> Iterator[tuple[str, int]]:
    """Yield each package that a module certainly imports and that is not installed, with the line of the import."""
    for name, line in module.scope.imports:
        top = name.partition(".")[0]
        if top not in sys.modules and bindings.module(top) is None:
            yield top, line


def _package_missing(top: str, place: str) -> PackageMissing:
    if not top:
        return PackageMissing(f"failed: ImportError: attempted relative import with no known parent package{place}")
    return PackageMissing(f"needs {top}, which is not installed here{place}: {install_command(top)}")


def _merge_mros(mros: list[list[Symbol]]) -> list[Symbol] | None:
    """Merge MROs by C3, or return None if the classes cannot be put in one order."""
    merged: list[Symbol] = []
    while mros := [mro for mro in mros if mro]:
        later = {symbol.path for mro in mros for symbol in mro[1:]}
        head = next((mro[0] for mro in mros if mro[0].path not in later), None)
        if head is None:
            return None
        merged.append(head)
        mros = [mro[1:] if mro[0].path == head.path else mro for mro in mros]
    return merged
