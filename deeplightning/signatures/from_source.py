"""What classes and functions take, read from their source."""

import ast
from collections.abc import Sequence
from dataclasses import replace

from deeplightning.signatures.annotations import allowed, plain
from deeplightning.signatures.names import KEEPING, Names
from deeplightning.signatures.signature import UNKNOWN, Parameter, Signature, Undecided, of_object
from deeplightning.signatures.symbol import (
    UNKNOWABLE,
    Frame,
    Functions,
    Thing,
    first_argument,
    positional_arguments,
    role_of_function,
)
from deeplightning.signatures.uses import Call, is_it, uses_of

_KNOWN_BASES = ("torch", "torchvision", "torchmetrics", "pytorch_lightning", "sklearn", "transformers")
"""Packages whose `__init_subclass__` leaves alone what the constructors of subclasses take."""

_RENAMING = "torchvision.models._utils.handle_legacy_interface"
"""Takes older names of parameters, its texts, beside those of the function."""


class Signatures:
    """Asks what things take: their ancestors too, and the functions that `**kwargs` are handed on to."""

    def __init__(self, names: Names):
        self.names = names

    def signature(self, thing: Thing) -> Signature:
        if thing.live is not None:
            return of_object(thing.live)
        with self.names.asking(("signature", thing.key)):
            if thing.kind == "class":
                return self.of_class(thing)
            if thing.kind == "function":
                return self.of_function(thing)
        raise Undecided(f"it is a {thing.kind}")

    def of_class(self, thing: Thing) -> Signature:
        line, complete = self.names.line(thing)
        odd = self.names.metaclass(line)
        if odd is not None:
            raise Undecided(f"its metaclass {odd} makes its instances")
        if "typing.Protocol" in {t.path for t in line[:2]}:
            raise Undecided("it is a Protocol, of which there are no instances")
        words_beside(self.names, thing.node, Frame(self.names.home(thing)))
        for each in line[1:]:
            if each.path.partition(".")[0] not in _KNOWN_BASES and self.names.own(each, "__init_subclass__"):
                raise Undecided(f"`__init_subclass__` of {each.path} may change what it takes")
        return self.constructor(thing, line, complete)

    def constructor(self, thing: Thing, line: list[Thing], complete: bool, start: int = 0) -> Signature:
        """Return what makes an instance of a class takes; from `start` on in its line, as `super()` asks."""
        new_takes_anything = False  # so that `__init__` decides
        for each in line[start:]:
            if each.live is not None:
                if {"__init__", "__new__"} & vars(each.live).keys():
                    raise Undecided(f"{each.path} is not written in Python")
                continue
            paths = {self.names.real_path(d, Frame(self.names.home(each))) for d in each.node.decorator_list}
            if "dataclasses.dataclass" in paths and not self.names.own(each, "__init__"):
                raise Undecided(f"@dataclass makes the constructor of {each.path}")
            for attribute in ("__init__", "__new__", "__signature__"):
                if (each.node.name, attribute) in self.names.home(each).scope.patched:
                    raise Undecided(f"`{attribute}` of {each.path} is set afterwards")
            if self.names.own(each, "__signature__"):
                raise Undecided(f"{each.path} says itself what it takes")
            if self.names.own(each, "__new__") and not start and not new_takes_anything:
                function = self.own_function(each, "__new__", thing)
                new_takes_anything = bool(function.node.args.vararg and function.node.args.kwarg)
                if not new_takes_anything and _makes_its_own(function.node):
                    raise Undecided("`__new__` and `__init__` both decide what it takes")
                if not new_takes_anything:  # it makes another class, whose `__init__` Python leaves out
                    return self.of_function(function, line, complete, bound=True)
            if self.names.own(each, "__init__"):
                return self.of_function(self.own_function(each, "__init__", thing), line, complete, bound=True)
        if not complete:
            raise Undecided("an ancestor cannot be read")
        if new_takes_anything:
            raise Undecided("its `__new__` takes anything")
        return Signature(())

    def own_function(self, each: Thing, name: str, asked: Thing) -> Thing:
        function = self.names.attribute(each, name, asked=asked)
        if function.kind != "function" or not isinstance(function.node, Functions):
            raise Undecided(f"`{name}` of {each.path} is not a plain function")
        return function

    def of_function(
        self, thing: Thing, line: Sequence[Thing] = (), complete: bool = True, bound: bool = False
    ) -> Signature:
        """Return what a function takes.

        A function that `**kwargs` hand on to is asked in turn, `super()` along the line of the class that is made.

        Args:
            line: of ancestors of the class that a method is called for; (): those of the class that has it.
            bound: without its first argument, as that of a class method always is.
        """
        node, role = thing.node, role_of_function(thing.node)
        if role == "property":
            raise Undecided("it is a property")
        if thing.owner is not None and not line:
            line, complete = self.names.line(thing.owner)
        paths = [f"{each.path}.{node.name}" for each in line]
        position = paths.index(thing.path) if thing.path in paths else 0
        bound = bound or (thing.owner is not None and role == "classmethod")
        frame = Frame(self.names.home(thing), None, node, tuple(line), complete, position)
        extra = words_beside(self.names, node, Frame(frame.module))
        with self.names.asking(("method", thing.key, tuple(t.path for t in line[:1]))):
            taken = Handed(self, frame).signature(bound and role != "staticmethod")
        names = {p.name for p in taken.parameters}
        more = tuple(Parameter(word, position=False) for word in sorted(extra - names))
        return replace(taken, parameters=taken.parameters + more)


class Handed:
    """What one function takes, together with those that it hands `**kwargs` on to."""

    def __init__(self, signatures: Signatures, frame: Frame):
        assert frame.function is not None
        self.signatures, self.names = signatures, signatures.names
        self.frame, self.node = frame, frame.function

    def signature(self, bound: bool) -> Signature:
        own = self.own()
        if bound and own and own[0].position:
            own = own[1:]
        if self.node.args.kwarg is None:
            return Signature(tuple(own))
        uses = uses_of(self.node, self.node.args.kwarg.arg)
        more: dict[str, Parameter] = {}
        first: list[Parameter] = []
        why = [uses.other and f"{self.node.name} {uses.other}"]  # others cannot be judged
        for call in uses.calls:
            try:
                taken, position = self.of_call(call, sure=len(uses.calls) == 1 and not uses.adds)
            except UNKNOWABLE as error:
                why.append(f"`{ast.unparse(call.node.func)[:60]}`, which takes the others, is not known: {error}")
                continue
            why.append(taken.rest)
            for parameter in taken.parameters:
                if (former := more.setdefault(parameter.name, parameter)) != parameter:  # they differ: not known
                    more[parameter.name] = replace(former, required=False, default=UNKNOWN, allowed=None)
            if position and len(uses.calls) == 1:
                first = [p for p in taken.parameters if p.position]
        words = uses.words
        if uses.dynamic:
            why.append(f"{self.node.name} looks up names that show only when it is run")
        for node, at in uses.passed:
            found = self.helper(node, at)
            words |= found or set()
            if found is None:
                why.append(f"{self.node.name} hands `{self.node.args.kwarg.arg}` to `{ast.unparse(node.func)[:40]}`")
        if not uses.calls and not uses.refuses:
            why.append("it takes any other keyword and ignores it")
        for word in sorted(words):
            more[word] = replace(more.get(word, Parameter(word, position=False)), required=False)
        own_names = {p.name for p in own if p.keyword}
        first = [p for p in first if p.name not in own_names]
        known = own_names | {p.name for p in first}
        ordered = [
            *(p for p in own if p.position),
            *first,
            *(p for p in own if not p.position),
            *(replace(p, position=False) for p in more.values() if p.name not in known and p.keyword),
        ]
        return Signature(tuple(ordered), next(filter(None, why), None))

    def own(self) -> list[Parameter]:
        arguments, frame = self.node.args, Frame(self.frame.module)
        positional = [*arguments.posonlyargs, *arguments.args]
        without = [None] * (len(positional) - len(arguments.defaults))
        defaults = [*without, *arguments.defaults, *arguments.kw_defaults]
        return [
            Parameter(
                argument.arg,
                position=number < len(positional),
                keyword=number >= len(arguments.posonlyargs),
                required=default is None,
                default=UNKNOWN if default is None else plain(default),
                allowed=allowed(self.names, argument.annotation, frame),
                annotation=None if argument.annotation is None else _written(argument.annotation),
            )
            for number, (argument, default) in enumerate(
                zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
            )
        ]

    def of_call(self, call: Call, sure: bool) -> tuple[Signature, bool]:
        """Return what a call still takes by `**kwargs`, and whether also by position, because it gets our `*args`."""
        taken = self.callee(call.node.func)
        arguments = list(call.node.args)
        vararg = self.node.args.vararg
        open_end = False
        if arguments and isinstance(arguments[-1], ast.Starred) and vararg and is_it(arguments[-1].value, vararg.arg):
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
        """Return what a called expression takes, without what Python gives it itself."""
        frame, names, signatures = self.frame, self.names, self.signatures
        match function:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__") if frame.line:
                return signatures.constructor(frame.line[0], list(frame.line), frame.complete, frame.position + 1)
            case ast.Name(id=name) if role_of_function(self.node) == "classmethod" and frame.line:
                if name == first_argument(self.node):
                    return signatures.signature(frame.line[0])
        found = names.value(function, frame)
        if found.owner is not None and found.live is None and found.owner.path in {t.path for t in frame.line}:
            if found.kind != "function":
                raise Undecided(f"`{found.name}` is no method")
            return signatures.of_function(found, frame.line, frame.complete)
        return signatures.signature(found)

    def helper(self, call: ast.Call, place: int) -> set[str] | None:
        """Return the literal names that a helper looks up in the mapping, if it does no more with it than that."""
        try:
            found = self.names.value(call.func, self.frame)
        except UNKNOWABLE:
            return None
        if found.kind != "function" or not isinstance(found.node, Functions) or found.node.decorator_list:
            return None
        positional = positional_arguments(found.node)
        if place >= len(positional) or any(isinstance(a, ast.Starred) for a in call.args[:place]):
            return None
        uses = uses_of(found.node, positional[place])
        if uses.other or uses.calls or uses.passed:
            return None
        return uses.words


def _written(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def _makes_its_own(new: Functions) -> bool:
    """Return whether a `__new__` may give an instance of its own class."""
    names = {node.func.id for node in ast.walk(new) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(names & {first_argument(new), "super"}) or any(
        isinstance(node, ast.Attribute) and node.attr == "__new__" for node in ast.walk(new)
    )


def words_beside(names: Names, node: ast.ClassDef | Functions, frame: Frame) -> set[str]:
    """Return the words that a class or function takes by its decorators, beside those that its own source shows.

    Raises:
        Undecided: a decorator may change what it takes.
    """
    words = set[str]()
    for decorator in node.decorator_list:
        path = names.real_path(decorator, frame)
        if path == _RENAMING:
            words |= {n.value for n in ast.walk(decorator) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        elif path not in KEEPING:
            raise Undecided(f"@{ast.unparse(decorator)[:60]} may change what it takes")
    return words
