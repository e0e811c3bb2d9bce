"""The names of the metrics that a task logs."""

import ast
import builtins

from deeplightning.static.annotations import plain
from deeplightning.static.bindings import Assigned
from deeplightning.static.names import Names
from deeplightning.static.signature import UNKNOWN, Undecided
from deeplightning.static.symbol import Frame, Functions, Thing
from deeplightning.static.syntax import first_argument
from deeplightning.static.uses import is_it

_FRAMEWORKS = ("torch", "pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics", "torchvision")


def logged_names(names: Names, thing: Thing) -> tuple[set[str], bool]:
    """What a class declares in `logged_metrics`, and what is logged by it and its ancestors up to that declaration."""
    own, complete = _line(names, thing)
    words, position = _declared(names, own, "logged_metrics")
    if words is not None:
        more, complete = Logged(names, own[:position]).names(True)
        return words | more, complete
    return Logged(names, own).names(complete)


def declared_words(names: Names, thing: Thing, attribute: str) -> set[str] | None:
    """Return the literal words that a class or an ancestor assigns to an attribute; None: none does."""
    return _declared(names, _line(names, thing)[0], attribute)[0]


def constant(names: Names, thing: Thing, attribute: str) -> object:
    """The plain value of an attribute of a class, its own or the next ancestor's; None where none has it.

    Raises:
        Undecided: an ancestor cannot be followed, or the value is none that can be read.
    """
    line, complete = names.line(thing)
    for each in line:
        if each.live is not None:
            if attribute in vars(each.live):
                return vars(each.live)[attribute]
        elif options := names.scope(each).names.get(attribute, ()):
            only = options[0] if len(options) == 1 else None
            value = plain(names, only.value, Frame(names.home(each))) if isinstance(only, Assigned) else UNKNOWN
            if value is UNKNOWN:
                raise Undecided(f"what `{attribute}` is")
            return value
    if not complete:
        raise Undecided(f"what `{attribute}` is")
    return None


def _line(names: Names, thing: Thing) -> tuple[list[Thing], bool]:
    """A class and its ancestors, frameworks' left out; False if there may be others."""
    line, complete = names.line(thing)
    return [t for t in line if t.live is None and t.path.partition(".")[0] not in _FRAMEWORKS], complete


def _declared(names: Names, own: list[Thing], attribute: str) -> tuple[set[str] | None, int]:
    """The words of the first class that assigns literal words to an attribute, and its position."""
    for position, each in enumerate(own):
        for option in names.scope(each).names.get(attribute, ()):
            if isinstance(option, Assigned):
                words = names.words(option.value, Frame(names.home(each)))
                if words is not None:
                    return words, position
    return None, len(own)


def _is_a_module(receiver: ast.expr, method: Functions) -> bool:
    """Whether `receiver.log(…)` may log a metric: of the class itself, of what a method is given (a callback's
    `pl_module`), or of a trainer's module. A logger of Python's is neither; a tensor's `log` takes nothing."""
    match receiver:
        case ast.Name(id=name):
            return name in [a.arg for a in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)]
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
        self.asked: set[tuple[int, str]] = set()

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
                        given = call.args[0] if call.args else next(
                            (k.value for k in call.keywords if k.arg in ("name", "dictionary")), None
                        )  # fmt: skip
                        found = self.text(given, each, method) if how == "log" else self.keys(given, each, method)
                        if found is None:
                            complete = False
                        else:
                            names |= found | {f"{n}{end}" for n in found for end in _forked(call)}
        return names, complete

    def text(self, node: ast.expr | None, each: Thing, method: Functions) -> set[str] | None:
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
            case ast.Attribute(value=ast.Name(id=word), attr=name) if word == first_argument(method):
                return self.of_class(name)
        return None

    def product(self, parts: list[ast.expr], each: Thing, method: Functions) -> set[str] | None:
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
            for option in self.source.scope(each).names.get(name, ()):
                if isinstance(option, Assigned) and isinstance(option.value, ast.Constant):
                    return {str(option.value.value)}
        return None

    def items(self, node: ast.expr, each: Thing, method: Functions) -> set[str] | None:
        """The literal items of a loop."""
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            found: set[str] = set()
            for item in node.elts:
                texts = self.text(item, each, method)
                if texts is None:
                    return None
                found |= texts
            return found
        if isinstance(node, ast.Attribute) and is_it(node.value, str(first_argument(method))):
            for owner in self.classes:
                for option in self.source.scope(owner).names.get(node.attr, ()):
                    if isinstance(option, Assigned):
                        return self.source.words(option.value, Frame(self.source.home(owner)))
            return None
        if isinstance(node, ast.Call):
            return None
        return self.source.words(node, Frame(self.source.home(each), function=method))

    def variable(self, name: str, each: Thing, method: Functions) -> set[str] | None:
        key = (id(method), name)
        if key in self.asked:
            return None
        self.asked.add(key)
        try:
            return self._variable(name, each, method)
        finally:
            self.asked.discard(key)

    def _variable(self, name: str, each: Thing, method: Functions) -> set[str] | None:
        found: list[set[str] | None] = []
        arguments = [a.arg for a in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)]
        if name in arguments:
            found.append(self.argument(name, method))
        for node in ast.walk(method):
            match node:
                case ast.For(target=target, iter=items) | ast.comprehension(target=target, iter=items):
                    if is_it(target, name):
                        found.append(self.items(items, each, method))
                    elif any(is_it(n, name) for n in ast.walk(target)):
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
                if not is_it(node.value, str(first_argument(caller))):
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

    def keys(self, node: ast.expr | None, each: Thing, method: Functions) -> set[str] | None:
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

    def mapping(self, name: str, each: Thing, method: Functions) -> set[str] | None:
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
