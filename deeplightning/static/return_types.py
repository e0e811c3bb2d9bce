"""What a function returns: by its annotation, or where it has none by its return statements."""

import ast
import types
import typing
from dataclasses import replace
from typing import Any

from deeplightning.static.annotations import ReadClass, hint
from deeplightning.static.bindings import Assigned
from deeplightning.static.decorators import role_of_function, words_beside
from deeplightning.static.names import Names
from deeplightning.static.signature import Instance, Undecided
from deeplightning.static.symbol import UNKNOWABLE, Frame, Functions, Thing, inside, live_class
from deeplightning.static.uses import is_it

_LITERALS: dict[type[ast.expr], type] = {
    ast.List: list, ast.ListComp: list, ast.Dict: dict, ast.DictComp: dict, ast.Set: set, ast.SetComp: set,
    ast.Tuple: tuple, ast.JoinedStr: str, ast.Lambda: types.FunctionType, ast.GeneratorExp: types.GeneratorType,
}  # fmt: skip

_VAGUE = ("typing", "collections.abc", "abc")


def instance(names: Names, thing: Thing) -> Instance:
    """Return what is known of the instances of a class."""
    line, complete = names.line(thing)
    return Instance(tuple(t.path for t in line), complete, lambda: _forward(names, thing))


def _forward(names: Names, thing: Thing) -> tuple[int, float] | None:
    """Return the least and the largest number of positional arguments of a module's `forward`; None: unknown."""
    try:
        found = names.attribute(thing, "forward")
    except UNKNOWABLE:
        return None
    if found.live is not None or not isinstance(found.node, ast.FunctionDef) or found.node.decorator_list:
        return None
    arguments = found.node.args
    positional = len(arguments.posonlyargs) + len(arguments.args) - 1  # without self
    if None in arguments.kw_defaults:
        return None
    return positional - len(arguments.defaults), float("inf") if arguments.vararg else positional


class Made:
    """Reads what functions return, and those that they call."""

    def __init__(self, names: Names):
        self.names = names

    def of(self, thing: Thing) -> list[Thing]:
        """Return the classes of all that a function may return.

        Raises:
            Undecided: that cannot be read.
        """
        node = thing.node
        if thing.live is not None or not isinstance(node, Functions) or role_of_function(node) == "property":
            raise Undecided("it does not tell what it returns")
        if isinstance(node, ast.AsyncFunctionDef):
            return [live_class(types.CoroutineType)]
        line = tuple(self.names.line(thing.owner)[0]) if thing.owner is not None else ()
        is_static = role_of_function(node) == "staticmethod"
        frame = Frame(self.names.home(thing), function=node, line=line, static=is_static)
        with self.names.asking(("made", thing.key)):
            return self.annotated(node.returns, frame) or self.returned(node, frame)

    def annotated(self, node: ast.expr | None, frame: Frame) -> list[Thing] | None:
        """Return the classes that an annotation names; None where it leaves open what comes."""
        if node is None:
            return None
        found = hint(self.names, node, replace(frame, function=None))
        if found is typing.Self:
            return [*frame.line[:1]]
        options = typing.get_args(found) if typing.get_origin(found) in (typing.Union, types.UnionType) else [found]
        things = [self.class_of(option) for option in options]
        return None if None in things else [thing for thing in things if thing is not None]

    def class_of(self, option: Any) -> Thing | None:
        """Return the class that an instance certainly has: no protocol and no abstract class."""
        option = typing.get_origin(option) or option
        if not isinstance(option, type):
            return None
        if not issubclass(option, ReadClass):
            return None if option.__module__ in _VAGUE or option is object else live_class(option)
        return None if {"typing.Protocol", "abc.ABC"} & {*option.paths} else option.thing

    # ---- return statements

    def returned(self, node: ast.FunctionDef, frame: Frame) -> list[Thing]:
        words_beside(self.names, node, Frame(frame.module))
        paths = [self.names.real_path(decorator, Frame(frame.module)) for decorator in node.decorator_list]
        if any(path is not None and path.startswith("contextlib.") for path in paths):
            raise Undecided("its decorator makes a context of what it returns")
        body = list(inside(node.body))
        if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in body):
            return [live_class(types.GeneratorType)]
        values = [each.value for each in body if isinstance(each, ast.Return)]
        if not values and isinstance(node.body[-1], ast.Raise | ast.Expr) and _is_stub(node.body[-1]):
            raise Undecided("it is written elsewhere")
        return [thing for value in values or [None] for thing in self.given(value, frame)]

    def given(self, node: ast.expr | None, frame: Frame) -> list[Thing]:
        """Return the classes of what an expression may give.

        Raises:
            Undecided: that shows only when it is run.
        """
        if node is None:
            return [live_class(type(None))]
        if type(node) in _LITERALS:
            return [live_class(_LITERALS[type(node)])]
        match node:
            case ast.Constant(value=value):
                return [live_class(type(value))]
            case ast.IfExp(body=one, orelse=other):
                return self.given(one, frame) + self.given(other, frame)
            case ast.Call(func=function):
                return self.called(function, frame)
            case ast.Name(id=name) if frame.function is not None:
                local = self.names.locals(frame.function, frame.module)
                match local.names.get(name, ()):
                    case (Assigned(value=assigned),) if name not in local.rebound:
                        return self.given(assigned, frame)
                    case ():
                        return self.constant(node, frame)
            case ast.Attribute():
                return self.constant(node, frame)
        raise Undecided(f"`{ast.unparse(node)[:60]}` shows only when it is run")

    def constant(self, node: ast.expr, frame: Frame) -> list[Thing]:
        """Return the type of the object that a module-level name refers to."""
        known = {"class": type, "function": types.FunctionType, "module": types.ModuleType}
        found = self.names.guarded(lambda: self.names.value(node, frame))
        if found.kind not in known:
            raise Undecided(f"`{ast.unparse(node)[:60]}` shows only when it is run")
        return [live_class(known[found.kind])]

    def called(self, function: ast.expr, frame: Frame) -> list[Thing]:
        """Return what a call of an expression gives."""
        node = frame.function
        if node is not None and is_it(function, str(frame.first)) and role_of_function(node) == "classmethod":
            return [frame.line[0]]
        try:
            found = self.names.value(function, frame)
        except UNKNOWABLE as why:
            if not isinstance(function, ast.Attribute):
                raise Undecided(str(why)) from None
            owners = self.given(function.value, frame)  # a method of what a local name stands for: `network.eval()`
            methods = [self.names.guarded(lambda o=owner: self.names.attribute(o, function.attr)) for owner in owners]  # type: ignore[misc]
            return [thing for method in methods for thing in self.of(method)]
        if found.kind == "function":
            return self.of(found)
        if found.kind != "class" or found.live is type:
            raise Undecided(f"`{ast.unparse(function)[:60]}` is a {found.kind}")
        line, _ = self.names.line(found)
        if any(self.names.own(each, "__new__") for each in line):
            raise Undecided(f"`__new__` of {found.path} decides what it makes")
        return [found]


def _is_stub(last: ast.Raise | ast.Expr) -> bool:
    """Return whether a body ends as those do that others fill in: `...`, `raise NotImplementedError`."""
    return isinstance(last, ast.Raise) or (isinstance(last.value, ast.Constant) and last.value.value is ...)
