"""What a dotted name means, and what it takes, found in source text: nothing of the target is imported.

`look_up` follows a name through re-exports to its class or function; `Definition` answers what `check` and `explain`
ask of it. What only running the code would tell is `Undecided`, never guessed. `target` does the same by importing,
and says what is missing in the same words.

`bindings` reads one file, `names` follows names through files, `signatures` asks what things take.
"""

import ast
import builtins
import contextlib
import keyword
import pkgutil
import re
from collections.abc import Iterator

from deeplightning import own_code
from deeplightning.faults import Missing, nearest, no_module, refuse_moved
from deeplightning.signatures.bindings import Assigned, Broken
from deeplightning.signatures.from_source import Signatures
from deeplightning.signatures.names import Names, Texts
from deeplightning.signatures.signature import Signature, Undecided
from deeplightning.signatures.symbol import (
    UNKNOWABLE,
    Absent,
    Failing,
    Frame,
    Functions,
    Lacking,
    Thing,
    first_argument,
    positional_arguments,
)
from deeplightning.signatures.uses import is_it

_FRAMEWORKS = ("torch", "pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics", "torchvision")


def look_up(name: str, names: Names | None = None) -> "Definition":
    """Return what a dotted name means.

    Args:
        names: what earlier look-ups have found, which need not be found again.

    Raises:
        ValueError: there is certainly nothing of this name, in the words of `target.find`; `Missing` where a package
            is not installed that it needs.
        Undecided: that cannot be known without importing.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(p.isidentifier() and not keyword.iskeyword(p) for p in parts):
        raise ValueError(f"`{name}` is not a MODULE.NAME such as torch.optim.SGD.")
    refuse_moved(name)
    names = names or Names()
    try:
        thing = _find(parts, names)
    except RecursionError:
        raise Undecided("its source is nested too deeply") from None
    except (Failing, Broken) as error:
        words = f"failed: {error}" if isinstance(error, Broken) else str(error)
        kind = Missing if isinstance(error, Lacking) else ValueError
        raise kind(f"importing {'.'.join(parts[:-1])} (for `{name}`) {words}") from None
    return Definition(thing, names)


def _names(text: bytes, word: str) -> bool:
    return re.search(rb"\b%b\b" % re.escape(word.encode()), text) is not None


def _find(parts: list[str], names: Names) -> Thing:
    name = ".".join(parts)
    module, depth = None, 0
    for depth in range(min(len(parts) - 1, 50), 0, -1):
        module = names.module(own_code.full_name(".".join(parts[:depth])))
        if module is not None:
            break
    if module is None:
        known = [m.name for m in pkgutil.iter_modules()] if len(parts[0]) > 2 else []
        raise no_module(parts[0], name, known, own_code.roots())
    read = own_code.read_from(name, str(module.file) if module.file else None)
    thing = Thing("module", module, "")
    for part in parts[depth:]:
        try:
            thing = names.member(thing, part)
        except (Undecided, Absent) as error:
            owner, is_last = ".".join(parts[:depth]), depth == len(parts) - 1
            home = thing.module if thing.kind == "module" else None
            modules = home.submodules if home is not None else []
            if isinstance(error, Undecided):
                # What has something behind it is a module or class. A module is a file: where one of nearly this name
                # lies, and this name is written nowhere in the package's own file, it is that one misspelt.
                near = nearest(part, [n for n in modules if not n.startswith("_")])
                if is_last or not near or home is None or part.startswith("_") or _names(home.text, part):
                    raise
            elif error.name != part:
                raise Undecided(f"{error.name} cannot be found where it is imported from") from None
            else:
                public = [n for n in error.known if not n.startswith("_")]
                # The last part is something to call, and no module.
                things = [n for n in public if n not in modules] if is_last else []
                near = nearest(part, things) or nearest(part, public)
            near = near.replace("mean ", f"mean {owner}.", 1)
            raise ValueError(f"{owner} has no `{part}`.{near}{read}") from None
        depth += 1
    return thing


class Definition:
    """What a dotted name means.

    Attributes:
        path: where it is really defined, `torch.optim.sgd.SGD` of torch.optim.SGD.
        kind: "value" is anything that is no class, function or module.
        file: where its source is, if it has any.
    """

    def __init__(self, thing: Thing, names: Names):
        self.path, self.kind, self.file = thing.path, thing.kind, thing.file
        self._thing, self._names = thing, names

    def bases(self) -> tuple[list[str], bool]:
        """Return the real paths of itself and its ancestors in Python's order, without `object`; False where an
        ancestor cannot be followed, so that there may be more."""
        if self.kind != "class":
            return [self.path], True
        line, complete = self._names.line(self._thing)
        return [thing.path for thing in line], complete

    def signature(self) -> Signature:
        """Return what may be given to it; of classes and of methods that are called on their class, without `self`.

        Raises:
            Undecided: that cannot be known without importing.
        """
        try:
            return Signatures(self._names).signature(self._thing)
        except (Failing, Broken, Absent) as error:
            raise Undecided(f"what it needs cannot be read: {error}") from None
        except RecursionError:
            raise Undecided("its source is nested too deeply") from None

    def defines(self, name: str, outside: str | None = None) -> bool:
        """Return whether a class, or an ancestor whose source is known, defines a name.

        Args:
            outside: a package whose classes do not count.
        """
        line = self._names.line(self._thing)[0] if self.kind == "class" else []
        counted = (each for each in line if outside is None or not each.path.startswith(f"{outside}."))
        return any(self._names.own(each, name) for each in counted)

    # ---- of a task, a callback or a metric

    def line(self) -> tuple[list[Thing], bool]:
        """Return a class and its ancestors, frameworks' left out; False if there may be others."""
        line, complete = self._names.line(self._thing) if self.kind == "class" else ([], False)
        return [t for t in line if t.live is None and t.path.partition(".")[0] not in _FRAMEWORKS], complete

    def logged_names(self) -> tuple[set[str], bool]:
        """Return the names that a class and its ancestors give to `self.log` and `self.log_dict`; False if there may be
        others.

        What a class says itself in `logged_metrics`, a tuple of literal words, is taken as it is, placeholders
        included; ancestors above it are not read.
        """
        own, complete = self.line()
        words, position = self._declared(own, "logged_metrics")
        if words is not None:
            more, complete = Logged(self._names, own[:position]).names(True)
            return words | more, complete
        return Logged(self._names, own).names(complete)

    def declared_words(self, attribute: str) -> set[str] | None:
        """Return the literal words that a task assigns to `metric_names` (its metrics where a config names none),
        `network_names` (the networks that it needs, () for a single one) or `kind`; None: it does not say."""
        return self._declared(self.line()[0], attribute)[0]

    def _declared(self, own: list[Thing], attribute: str) -> tuple[set[str] | None, int]:
        """Return the literal words that the first class with an attribute assigns to it, and its position."""
        for position, each in enumerate(own):
            for option in self._names.scope(each).names.get(attribute, ()):
                if isinstance(option, Assigned):
                    with contextlib.suppress(*UNKNOWABLE):
                        return Texts(self._names, Frame(self._names.home(each))).items(option.value), position
            if self._names.own(each, attribute):  # it is a property, or computed
                break
        return None, len(own)

    def steps_itself(self) -> bool:
        """Return whether `__init__` of a task, or of the nearest ancestor that says anything of it, sets
        `self.automatic_optimization` to False, under no condition."""
        classes = [each.node for each in self.line()[0]]
        for method in (m for c in classes for m in c.body if isinstance(m, Functions) and m.name == "__init__"):
            switch = f"{first_argument(method)}.automatic_optimization"
            set_to = [n.value for n in method.body if isinstance(n, ast.Assign) and is_it(n.targets[0], switch)]
            known = [v.value for v in set_to if isinstance(v, ast.Constant) and isinstance(v.value, bool)]
            if known:
                return not known[-1]
        return False


# ---- metrics


def _is_a_module(receiver: ast.expr, method: Functions) -> bool:
    """Return whether `receiver.log(…)` may log a metric: of the class itself, of what a method is given (a callback's
    `pl_module`), or of a trainer's module. A logger of Python's is neither; a tensor's `log` takes nothing."""
    match receiver:
        case ast.Name(id=name):
            return name in [*positional_arguments(method), *(a.arg for a in method.args.kwonlyargs)]
        case ast.Attribute(attr="lightning_module"):
            return True
    return False


def _forked(call: ast.Call) -> tuple[str, ...]:
    """Return what Lightning puts behind a name that is logged at steps and as the mean of an epoch."""
    how = [k.value for k in call.keywords if k.arg in ("on_step", "on_epoch")]
    never = any(isinstance(value, ast.Constant) and not value.value for value in how)
    return ("_step", "_epoch") if how and not never else ()


class Logged:
    """The names that the methods of some classes log."""

    def __init__(self, names: Names, classes: list[Thing]):
        self.source, self.classes = names, classes
        self.methods = [
            (each, node)
            for each in classes
            for node in each.node.body
            if isinstance(node, Functions) and first_argument(node)
        ]

    def names(self, complete: bool) -> tuple[set[str], bool]:
        """Return the names that are logged, and whether these are all: code elsewhere may log others."""
        names: set[str] = set()
        for each, method in self.methods:
            own, called = str(first_argument(method)), {n.func for n in ast.walk(method) if isinstance(n, ast.Call)}
            for call in ast.walk(method) if each.path.partition(".")[0] != "deeplightning" else ():
                match call:
                    case ast.Attribute(attr="callback_metrics"):
                        complete = False  # who asks a trainer for its metrics may add to them
                    case ast.Attribute(value=receiver, attr="log" | "log_dict") if is_it(receiver, own):
                        complete &= call in called  # else `self.log` is called under another name
                    case ast.Call(func=func, args=args) if any(is_it(arg, own) for arg in args):
                        complete &= isinstance(func, ast.Name) and hasattr(builtins, func.id)
            for call in ast.walk(method):
                match call:
                    case ast.Call(func=ast.Attribute(value=receiver, attr="log" | "log_dict" as how)) if (
                        call.args or call.keywords
                    ) and _is_a_module(receiver, method):
                        named = [k.value for k in call.keywords if k.arg in ("name", "dictionary")]
                        given, texts = next(iter([*call.args, *named]), None), _MethodTexts(self, each, method)
                        try:
                            found = texts.of(given) if how == "log" else texts.items(given)
                        except UNKNOWABLE:
                            complete = False
                        else:
                            names |= found | {f"{n}{end}" for n in found for end in _forked(call)}
        return names, complete


class _MethodTexts(Texts):
    """Finds texts in a method, also those that other methods give for its parameters."""

    def __init__(self, logged: Logged, each: Thing, method: Functions):
        super().__init__(logged.source, Frame(logged.source.home(each), function=method))
        self.logged, self.method, self.own = logged, method, str(first_argument(method))

    def options(self, node: ast.Name | ast.Attribute) -> Iterator[tuple[Texts, ast.expr]]:
        name = node.id if isinstance(node, ast.Name) else None
        if name not in self.names.scope_of(self.method, self.frame.module).names:
            yield from super().options(node)
            return
        with self.names.asking(("text", id(self.method), name)):
            yield from self.argument(str(name))

    def argument(self, name: str) -> Iterator[tuple[Texts, ast.expr]]:
        """Yield what other methods give for a parameter."""
        arguments, positional = self.method.args, positional_arguments(self.method)[1:]
        defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
        if name not in (*positional, *(a.arg for a in arguments.kwonlyargs)):
            raise Undecided(f"`{name}` is a variable of {self.method.name}")
        given: ast.expr | None = None
        for each, caller in self.logged.methods:
            calls = {node.func: node for node in ast.walk(caller) if isinstance(node, ast.Call)}
            for node in ast.walk(caller):
                if is_it(node, f"{first_argument(caller)}.{self.method.name}"):
                    call = calls.get(node)  # type: ignore[call-overload]
                    given = next((k.value for k in call.keywords if k.arg == name), None) if call else None
                    if call and given is None and name in positional and positional.index(name) < len(call.args):
                        given = call.args[positional.index(name)]
                    given = given or (defaults.get(name) if call else None)
                    if given is None or (call and any(isinstance(a, ast.Starred) for a in call.args)):
                        raise Undecided(f"`{name}` shows only when it is run")
                    yield _MethodTexts(self.logged, each, caller), given
        if given is None:
            raise Undecided(f"`{name}` is given by others")
