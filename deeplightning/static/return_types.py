"""What a function returns: by its annotation, or where it has none by its return statements."""

import ast
import types
from dataclasses import replace

from deeplightning.static.annotations import Types, is_tensor, sides
from deeplightning.static.decorators import keeps
from deeplightning.static.from_source import role_of, role_of_function
from deeplightning.static.names import Names
from deeplightning.static.signature import Instance, Undecided
from deeplightning.static.symbol import UNKNOWABLE, Frame, Functions, Thing, live_class
from deeplightning.static.syntax import inside
from deeplightning.static.uses import is_it

_LITERALS: dict[type[ast.expr], type] = {
    ast.List: list, ast.ListComp: list, ast.Dict: dict, ast.DictComp: dict, ast.Set: set, ast.SetComp: set,
    ast.Tuple: tuple, ast.JoinedStr: str, ast.Lambda: types.FunctionType, ast.GeneratorExp: types.GeneratorType,
}  # fmt: skip

_TENSOR = Thing(
    "class", None, "Tensor", live=types.new_class("Tensor", exec_body=lambda space: space.update(__module__="torch"))
)
"""`torch.Tensor`, which is mostly written in C++."""


def instance(names: Names, thing: Thing) -> Instance:
    """What is known of the instances of a class."""
    line, complete = names.line(thing)
    return Instance(tuple(t.path for t in line), complete, lambda: _forward(names, thing))


def _forward(names: Names, thing: Thing) -> tuple[int, float] | None:
    """The least and the largest number of positional arguments that a module's `forward` takes; None: unknown."""
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
        """The classes of all that a function may return.

        Raises:
            Undecided: that cannot be read.
        """
        node = thing.node
        if thing.live is not None or not isinstance(node, Functions) or role_of_function(node) == "property":
            raise Undecided("it does not tell what it returns")
        if isinstance(node, ast.AsyncFunctionDef):
            return [live_class(types.CoroutineType)]
        key = ("made", thing.key)
        self.names.enter(key)
        try:
            line = tuple(self.names.line(thing.owner)[0]) if thing.owner is not None else ()
            frame = Frame(
                self.names.home(thing), function=node, line=line, static=role_of_function(node) == "staticmethod"
            )
            annotated = self.annotated(node.returns, frame) if node.returns is not None else None
            return annotated if annotated is not None else self.returned(node, frame)
        finally:
            self.names.active.discard(key)

    def annotated(self, node: ast.expr, frame: Frame) -> list[Thing] | None:
        """The classes that an annotation names; None where it leaves open what comes."""
        outside = replace(frame, function=None)
        match node:
            case ast.Constant(value=None):
                return [live_class(type(None))]
            case ast.Constant(value=str(text)):
                try:
                    return self.annotated(ast.parse(text.strip(), mode="eval").body, frame)
                except SyntaxError:
                    return None
            case ast.BinOp(op=ast.BitOr()):
                return self.each(sides(node), frame)
            case ast.Subscript(value=outer, slice=inner):
                word = self.word(outer, outside)
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                if word in ("Optional", "Union"):
                    return self.each([*parts, *([ast.Constant(None)] if word == "Optional" else [])], frame)
                return self.annotated(parts[0] if word == "Annotated" else outer, frame)
            case ast.Name() | ast.Attribute():
                if is_tensor(node, frame.module):
                    return [_TENSOR]
                word = self.word(node, outside)
                if word == "Self":
                    return [frame.line[0]] if frame.line else None
                try:
                    found = self.names.value(node, outside)
                except UNKNOWABLE:
                    return None
                if found.kind == "value" and found.live is None and found.module is not None:
                    return self.annotated(found.node, Frame(found.module)) if isinstance(found.node, ast.expr) else None
                return [found] if found.kind == "class" and self.is_telling(found) else None
        return None

    def each(self, parts: list[ast.expr], frame: Frame) -> list[Thing] | None:
        found = [self.annotated(part, frame) for part in parts]
        return None if None in found else [thing for part in found for thing in part or ()]

    def word(self, node: ast.expr, frame: Frame) -> str | None:
        try:
            return Types(self.names, frame).typing(node)
        except UNKNOWABLE:
            return None

    def is_telling(self, found: Thing) -> bool:
        """Whether an instance of a class is of no other branch of the hierarchy: no protocol and no abstract class."""
        if found.live is not None:
            return found.live is not object and found.live.__module__ not in ("typing", "collections.abc", "abc")
        return not {"typing.Protocol", "abc.ABC"} & {base.path for base in self.names.line(found)[0]}

    # ---- return statements

    def returned(self, node: ast.FunctionDef, frame: Frame) -> list[Thing]:
        for decorator in node.decorator_list:
            path = self.names.real_path(decorator, Frame(frame.module))
            makes_another = path is not None and path.startswith("contextlib.")
            if role_of(decorator) is None and (
                makes_another or keeps(self.names, decorator, Frame(frame.module)) is None
            ):
                raise Undecided(f"@{ast.unparse(decorator)[:60]} may change what it returns")
        body = list(inside(node.body))
        if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in body):
            return [live_class(types.GeneratorType)]
        values = [each.value for each in body if isinstance(each, ast.Return)]
        if not values and isinstance(node.body[-1], ast.Raise | ast.Expr) and _is_stub(node.body[-1]):
            raise Undecided("it is written elsewhere")
        return [thing for value in values or [None] for thing in self.given(value, frame)]

    def given(self, node: ast.expr | None, frame: Frame) -> list[Thing]:
        """The classes of what an expression may give.

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
            case ast.Name(id=name) if (
                frame.function is not None and (bound := _bound(frame.function, name)) is not None
            ):
                self.names.enter(key := ("local", id(frame.function), name))
                try:
                    return [thing for value in bound for thing in self.given(value, frame)]
                finally:
                    self.names.active.discard(key)
            case ast.Name() | ast.Attribute():
                found = self.names.guarded(lambda: self.names.value(node, frame))
                known = {"class": type, "function": types.FunctionType, "module": types.ModuleType}
                if found.kind in known:
                    return [live_class(known[found.kind])]
        raise Undecided(f"`{ast.unparse(node)[:60]}` shows only when it is run")

    def called(self, function: ast.expr, frame: Frame) -> list[Thing]:
        """What a call of an expression gives."""
        node = frame.function
        if node is not None and is_it(function, str(frame.first)) and role_of_function(node) == "classmethod":
            return [frame.line[0]]
        try:
            found = self.names.value(function, frame)
        except UNKNOWABLE as why:
            if not isinstance(function, ast.Attribute):
                raise Undecided(str(why)) from None
            owners = self.given(function.value, frame)  # a method of what a local name holds: `network.eval()`
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
    """Whether a body ends as those do that others fill in: `...`, `raise NotImplementedError`."""
    return isinstance(last, ast.Raise) or (isinstance(last.value, ast.Constant) and last.value.value is ...)


def _bound(function: Functions, name: str) -> list[ast.expr] | None:
    """The expressions that are assigned to a local name; None: it is not local, or bound in other ways as well."""
    found: list[ast.expr] = []
    stores = 0
    for node in inside(function.body):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                found += [value] * is_it(target, name)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store | ast.Del):
            stores += 1
    arguments = function.args
    given = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    if not found or stores != len(found) or any(a is not None and a.arg == name for a in given):
        return None
    return found
