"""Resolve a dotted name and its signature from source text: nothing of the target is imported.

`look_up` follows a name through re-exports to its class or function. `Definition` describes it for `check` and
`explain`. What only running the code would show is `Undecided`, never guessed. `deeplightning.config.target` does the
same by importing, with the same error messages.

`bindings` reads one file, `names` resolves names across files, `from_source` reads signatures.
"""

import ast
import builtins
import contextlib
import pkgutil
import re
from collections.abc import Iterator

from deeplightning import own_code
from deeplightning.faults import Missing, nearest, no_module, parts_of
from deeplightning.signatures.bindings import Assigned, Broken
from deeplightning.signatures.from_source import Signatures
from deeplightning.signatures.names import Names, Texts
from deeplightning.signatures.signature import Signature, Undecided
from deeplightning.signatures.symbol import (
    RESOLUTION_ERRORS,
    Absent,
    Frame,
    Functions,
    ImportFails,
    PackageMissing,
    Symbol,
    first_argument,
    positional_arguments,
)
from deeplightning.signatures.uses import is_name

_FRAMEWORKS = ("torch", "pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics", "torchvision")


def look_up(name: str, names: Names | None = None) -> "Definition":
    """Return the definition of a dotted name.

    Args:
        names: a cache of earlier look-ups.

    Raises:
        ValueError: the name certainly does not exist, with the message of `target.find`; `Missing` if a package that
            it needs is not installed.
        Undecided: only importing would show it.
    """
    parts = parts_of(name)
    names = names or Names()
    try:
        symbol = _find(parts, names)
    except RecursionError:
        raise Undecided("its source is nested too deeply") from None
    except (ImportFails, Broken) as error:
        words = f"failed: {error}" if isinstance(error, Broken) else str(error)
        kind = Missing if isinstance(error, PackageMissing) else ValueError
        raise kind(f"importing {'.'.join(parts[:-1])} (for `{name}`) {words}") from None
    return Definition(symbol, names)


def _find(parts: list[str], names: Names) -> Symbol:
    name = ".".join(parts)
    module, depth = None, 0
    for depth in range(min(len(parts) - 1, 50), 0, -1):
        module = names.module(own_code.full_name(".".join(parts[:depth])))
        if module is not None:
            break
    if module is None:
        known = [m.name for m in pkgutil.iter_modules()] if len(parts[0]) > 2 else []
        raise no_module(parts[0], name, known, own_code.roots())
    read = own_code.lookup_hint(name, str(module.file) if module.file else None)
    symbol = Symbol("module", module, "")
    for part in parts[depth:]:
        try:
            symbol = names.member(symbol, part)
        except (Undecided, Absent) as error:
            owner, is_last = ".".join(parts[:depth]), depth == len(parts) - 1
            home = symbol.module if symbol.kind == "module" else None
            modules = home.submodules if home is not None else []
            if isinstance(error, Undecided):
                # A part that is not the last is a module or class. If a module has nearly this name, and the package's
                # own file does not contain this name, it is a misspelling of that module.
                near = nearest(part, [n for n in modules if not n.startswith("_")])
                is_in = home is not None and re.search(rb"\b%b\b" % re.escape(part.encode()), home.text)
                if is_last or not near or home is None or part.startswith("_") or is_in:
                    raise
            elif error.name != part:
                raise Undecided(f"{error.name} cannot be found where it is imported from") from None
            else:
                public = [n for n in error.known if not n.startswith("_")]
                # The last part is a class or function, not a module.
                callables = [n for n in public if n not in modules] if is_last else []
                near = nearest(part, callables) or nearest(part, public)
            near = near.replace("mean ", f"mean {owner}.", 1)
            raise ValueError(f"{owner} has no `{part}`.{near}{read}") from None
        depth += 1
    return symbol


class Definition:
    """What a dotted name refers to.

    Attributes:
        path: where it is defined, such as `torch.optim.sgd.SGD` for torch.optim.SGD.
        kind: "value" is anything but a class, function or module.
        file: the file of its source, or None.
    """

    def __init__(self, symbol: Symbol, names: Names):
        self.path, self.kind, self.file = symbol.path, symbol.kind, symbol.file
        self._symbol, self._names = symbol, names

    def bases(self) -> tuple[list[str], bool]:
        """Return the real paths of a class and its ancestors in Python's order, without `object`, and whether they are
        complete: an ancestor may be unknown, and its `__new__` may make another object."""
        if self.kind != "class":
            return [self.path], True
        mro, complete = self._names.mro(self._symbol)
        return [symbol.path for symbol in mro], complete and not self.defines("__new__")

    def signature(self) -> Signature:
        """Return its signature, without `self` for classes and for methods that are called on their class.

        Raises:
            Undecided: only importing would show it.
        """
        try:
            return Signatures(self._names).signature(self._symbol)
        except (ImportFails, Broken, Absent) as error:
            raise Undecided(f"code that it needs cannot be read: {error}") from None
        except RecursionError:
            raise Undecided("its source is nested too deeply") from None

    def defines(self, name: str, outside: str | None = None) -> bool:
        """Return whether a class, or an ancestor with known source outside the package `outside`, defines a name."""
        mro = self._names.mro(self._symbol)[0] if self.kind == "class" else []
        counted = (each for each in mro if outside is None or not each.path.startswith(f"{outside}."))
        return any(self._names.defines(each, name) for each in counted)

    # ---- tasks, callbacks and metrics

    def own_classes(self) -> tuple[list[Symbol], bool]:
        """Return a class and its ancestors, except those of frameworks, and whether they are complete."""
        mro, complete = self._names.mro(self._symbol) if self.kind == "class" else ([], False)
        return [t for t in mro if t.live is None and t.path.partition(".")[0] not in _FRAMEWORKS], complete

    def logged_names(self) -> tuple[set[str], bool]:
        """Return the names that a class and its ancestors pass to `self.log` and `self.log_dict`, and whether they are
        complete.

        A class may declare them in `logged_metrics`, a tuple of literal strings, which is used as it is, placeholders
        included; its ancestors are not read.
        """
        own, complete = self.own_classes()
        words, position = self._declared(own, "logged_metrics")
        if words is not None:
            more, complete = LoggedNames(self._names, own[:position]).names(True)
            return words | more, complete
        return LoggedNames(self._names, own).names(complete)

    def declared_words(self, attribute: str) -> set[str] | None:
        """Return the literal strings that a task assigns to `metric_names` (its default metrics), `network_names` (the
        networks that it needs, () for a single one) or `kind`, or None if unknown."""
        return self._declared(self.own_classes()[0], attribute)[0]

    def _declared(self, own: list[Symbol], attribute: str) -> tuple[set[str] | None, int]:
        """Return the literal strings that the first class with an attribute assigns to it, and its position."""
        for position, each in enumerate(own):
            for option in self._names.scope(each).names.get(attribute, ()):
                if isinstance(option, Assigned):
                    with contextlib.suppress(*RESOLUTION_ERRORS):
                        return Texts(self._names, Frame(self._names.home(each))).items(option.value), position
            if self._names.defines(each, attribute):  # it is a property, or computed
                break
        return None, len(own)

    def uses_manual_optimization(self) -> bool:
        """Return whether `__init__` of a task, or of the nearest ancestor that sets `self.automatic_optimization`, sets
        it to False unconditionally."""
        classes = [each.node for each in self.own_classes()[0]]
        for method in (m for c in classes for m in c.body if isinstance(m, Functions) and m.name == "__init__"):
            switch = f"{first_argument(method)}.automatic_optimization"
            set_to = [n.value for n in method.body if isinstance(n, ast.Assign) and is_name(n.targets[0], switch)]
            known = [v.value for v in set_to if isinstance(v, ast.Constant) and isinstance(v.value, bool)]
            if known:
                return not known[-1]
        return False


# ---- metrics


def _may_log_metrics(receiver: ast.expr, method: Functions) -> bool:
    """Return whether `receiver.log(…)` may log a metric: on `self`, on another argument (such as `pl_module` of a
    callback), or on the module of a trainer. Python's loggers do not; `log` of a tensor takes no arguments."""
    match receiver:
        case ast.Name(id=name):
            return name in [*positional_arguments(method), *(a.arg for a in method.args.kwonlyargs)]
        case ast.Attribute(attr="lightning_module") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def _epoch_suffixes(call: ast.Call) -> tuple[str, ...]:
    """Return the suffixes that Lightning adds to a name that is logged both per step and per epoch."""
    how = [k.value for k in call.keywords if k.arg in ("on_step", "on_epoch")]
    never = any(isinstance(value, ast.Constant) and not value.value for value in how)
    return ("_step", "_epoch") if how and not never else ()


class LoggedNames:
    """Finds the names that the methods of some classes log."""

    def __init__(self, names: Names, classes: list[Symbol]):
        self.source, self.classes = names, classes
        inside = ((each, node) for each in classes for node in each.node.body)
        self.methods = [(each, node) for each, node in inside if isinstance(node, Functions) and first_argument(node)]

    def names(self, complete: bool) -> tuple[set[str], bool]:
        """Return the logged names, and whether they are complete: other code may log more."""
        names: set[str] = set()
        for each, method in self.methods:
            own, called = str(first_argument(method)), {n.func for n in ast.walk(method) if isinstance(n, ast.Call)}
            read, taken = {f"{own}.{other.name}" for _, other in self.methods}, positional_arguments(method)
            # In a hook of a callback, the module is the argument behind the trainer, whatever its name.
            modules = (own, "pl_module", *(taken[2:3] if taken[1:2] == ["trainer"] else ()))
            complete &= method.name not in ("log", "log_dict")  # it may change names that other methods pass to it
            for call in ast.walk(method) if each.path.partition(".")[0] != "deeplightning" else ():
                match call:
                    case ast.Attribute(attr="callback_metrics"):
                        complete = False  # code that reads a trainer's metrics may add to them
                    case ast.Attribute(value=receiver, attr="log" | "log_dict") if is_name(receiver, own):
                        complete &= call in called  # else `self.log` is called under another name
                    case ast.Call(func=func, args=args, keywords=more) if any(
                        is_name(a, n) for a in [*args, *(k.value for k in more)] for n in modules
                    ):  # other functions may log; methods of the class and its bases are read
                        text = ast.unparse(func)
                        complete &= text in read or text.startswith("super().") or hasattr(builtins, text)
            for call in ast.walk(method):
                match call:
                    case ast.Call(func=ast.Attribute(value=receiver, attr="log" | "log_dict" as how)) if (
                        call.args or call.keywords
                    ) and _may_log_metrics(receiver, method):
                        named = [k.value for k in call.keywords if k.arg in ("name", "dictionary")]
                        given, texts = next(iter([*call.args, *named]), None), _MethodTexts(self, each, method)
                        try:
                            found = texts.of(given) if how == "log" else texts.items(given)
                        except RESOLUTION_ERRORS:
                            complete = False
                        else:
                            names |= found | {f"{n}{end}" for n in found for end in _epoch_suffixes(call)}
        return names, complete


class _MethodTexts(Texts):
    """Finds the strings in a method, including those that other methods pass as its arguments."""

    def __init__(self, logged: LoggedNames, each: Symbol, method: Functions):
        super().__init__(logged.source, Frame(logged.source.home(each), function=method))
        self.logged, self.method, self.own = logged, method, str(first_argument(method))

    def options(self, node: ast.Name | ast.Attribute) -> Iterator[tuple[Texts, ast.expr]]:
        name = node.id if isinstance(node, ast.Name) else None
        if name not in self.names.scope_of(self.method, self.frame.module).names:
            yield from super().options(node)
            return
        with self.names.resolving(("text", id(self.method), name)):
            yield from self.arguments_for(str(name))

    def arguments_for(self, name: str) -> Iterator[tuple[Texts, ast.expr]]:
        """Yield the arguments that other methods pass for a parameter."""
        arguments, positional = self.method.args, positional_arguments(self.method)[1:]
        defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
        is_rebound = name in self.names.scope_of(self.method, self.frame.module).rebound
        if is_rebound or name not in (*positional, *(a.arg for a in arguments.kwonlyargs)):
            raise Undecided(f"`{name}` is a variable of {self.method.name}")
        given: ast.expr | None = None
        for each, caller in self.logged.methods:
            calls = {node.func: node for node in ast.walk(caller) if isinstance(node, ast.Call)}
            for node in ast.walk(caller):
                if is_name(node, f"{first_argument(caller)}.{self.method.name}"):
                    call = calls.get(node)  # type: ignore[call-overload]
                    given = next((k.value for k in call.keywords if k.arg == name), None) if call else None
                    if call and given is None and name in positional and positional.index(name) < len(call.args):
                        given = call.args[positional.index(name)]
                    given = given or (defaults.get(name) if call else None)
                    if given is None or (call and any(isinstance(a, ast.Starred) for a in call.args)):
                        raise Undecided(f"`{name}` is known only at run time")
                    yield _MethodTexts(self.logged, each, caller), given
        if given is None:
            raise Undecided(f"`{name}` is passed by other code")
