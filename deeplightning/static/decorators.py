"""Which decorators leave alone what a function or class takes."""

import ast
from collections.abc import Iterator

from deeplightning.static.bindings import Module
from deeplightning.static.names import KEEPING, Names
from deeplightning.static.symbol import UNKNOWABLE, Frame, Functions
from deeplightning.static.syntax import first_argument, inside
from deeplightning.static.uses import is_it, uses_of


def keeps(names: Names, decorator: ast.expr, frame: Frame, of_class: bool = False) -> set[str] | None:
    """None unless a decorator leaves alone what a function takes; words that it takes beside, as older names."""
    if names.real_path(decorator, frame) in KEEPING:
        return set()
    try:
        return Decorator(names, of_class).keeps(decorator, frame)
    except UNKNOWABLE:
        return None


class Decorator:
    """Shows from its source that a decorator leaves alone what a function takes: that it returns the function, or one
    that `functools.wraps` makes look like it."""

    def __init__(self, names: Names, of_class: bool):
        self.names, self.of_class = names, of_class
        self.literals: set[str] = set()  # words that the decorator itself is given

    def keeps(self, decorator: ast.expr, frame: Frame) -> set[str] | None:
        called = isinstance(decorator, ast.Call)
        if isinstance(decorator, ast.Call):
            self.literals = {
                n.value
                for part in (*decorator.args, *(word.value for word in decorator.keywords))
                for n in ast.walk(part)
                if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value.isidentifier()
            }
        found = self.names.value(decorator.func if isinstance(decorator, ast.Call) else decorator, frame)
        if found.live is not None or found.module is None:
            return None
        if found.kind == "class" and called:
            method = self.names.attribute(found, "__call__")
            if not isinstance(method.node, Functions) or len(method.node.args.args) < 2 or method.module is None:
                return None
            return self.returns(method.node, method.node.args.args[1].arg, method.module)
        if found.kind != "function" or not isinstance(found.node, Functions):
            return None
        if not called:
            first = first_argument(found.node)
            return self.returns(found.node, first, found.module) if first else None
        inner = {n.name: n for n in inside(found.node.body) if isinstance(n, ast.FunctionDef)}
        words: set[str] = set()
        answers = [n.value for n in inside(found.node.body) if isinstance(n, ast.Return)]
        for answer in answers:
            name = answer.id if isinstance(answer, ast.Name) else None
            first = first_argument(inner[name]) if name in inner else None
            more = self.returns(inner[name], first, found.module) if name in inner and first else None
            if more is None:
                return None
            words |= more
        return words if answers else None

    def returns(self, function: Functions, parameter: str, module: Module) -> set[str] | None:
        """Words that are taken beside, if a function surely returns what looks like its parameter."""
        key = ("decorator", module.name, function.lineno)
        self.names.enter(key)
        try:
            words: set[str] = set()
            body = self.given(function, parameter)
            answers = [n.value for n in inside(body) if isinstance(n, ast.Return)]
            for answer in answers:
                more = self.like(answer, parameter, function, module)
                if more is None:
                    return None
                words |= more
            return words if answers else None
        finally:
            self.names.active.discard(key)

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
                return isinstance(op, ast.IsNot) if is_it(left, parameter) else None
            case ast.Call(func=ast.Attribute(attr="isclass") | ast.Name(id="isclass"), args=[given]):
                return self.of_class if is_it(given, parameter) else None
            case ast.Call(func=ast.Name(id="isinstance"), args=[given, ast.Name(id="type")]):
                return self.of_class if is_it(given, parameter) else None
        return None

    def like(self, value: ast.expr | None, parameter: str, function: Functions, module: Module) -> set[str] | None:
        frame = Frame(module, function=function)
        inner = {n.name: n for n in inside(function.body) if isinstance(n, Functions)}
        match value:
            case ast.Name(id=name) if name == parameter:
                return set()
            case ast.Name(id=name) if name in inner:
                return self.wrapper(inner[name], parameter, frame)
            case ast.Name(id=name):  # a variable, where it is nothing else
                made = [
                    n.value
                    for n in inside(self.given(function, parameter))
                    if isinstance(n, ast.Assign) and any(is_it(target, name) for target in n.targets)
                ]
                alike = [None if is_it(m, name) else self.like(m, parameter, function, module) for m in made]
                return None if not alike or None in alike else set().union(*(words for words in alike if words))
            case ast.Call(func=ast.Name(id="cast") | ast.Attribute(attr="cast"), args=[_, given]):
                return self.like(given, parameter, function, module)
            case ast.Call(func=called, args=arguments):
                path = self.names.real_path(called, frame)
                if path == "functools.update_wrapper" and len(arguments) > 1:
                    return self.like(arguments[1], parameter, function, module)
                if isinstance(called, ast.Call) and self.names.real_path(called, frame) == "functools.wraps":
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
                    found = self.names.value(called, frame)
                    target = found.node if found.kind == "function" and isinstance(found.node, Functions) else None
                    if found.module is None:
                        return None
                    home = found.module
                if target is None or position[0] >= len(target.args.args):
                    return None
                return self.returns(target, target.args.args[position[0]].arg, home)
        return None

    def wrapper(self, node: Functions, parameter: str, frame: Frame) -> set[str] | None:
        """A function inside a decorator: whether it says that it is like the parameter."""
        words: set[str] = set()
        wraps = False
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and self.names.real_path(decorator, frame) == "functools.wraps":
                wraps = bool(decorator.args) and is_it(decorator.args[0], parameter)
                if not wraps:
                    return None
                continue
            more = keeps(self.names, decorator, frame)
            if more is None:
                return None
            words |= more
        if not wraps:
            return None
        if node.args.kwarg is not None:
            uses = uses_of(node, node.args.kwarg.arg)
            words |= uses.words
            if uses.dynamic:
                words |= self.literals
        return words


_CONSTRUCTORS = {"__init__", "__new__", "__signature__"}
_HARMLESS = {"super", "setattr"}


def changes_subclasses(node: ast.ClassDef) -> bool:
    """Return whether `__init_subclass__` of a class gives the subclass to a function as a statement of its own, or
    names its constructor."""
    methods = [each for each in node.body if isinstance(each, Functions) and each.name == "__init_subclass__"]
    for part in inside(methods[0].body) if methods else ():
        match part:
            case ast.Attribute(attr=word) | ast.Constant(value=word) if word in _CONSTRUCTORS:
                return True
            case ast.Expr(value=ast.Call() as call) | ast.Assign(value=ast.Call() as call):
                given = {getattr(each, "id", None) for each in call.args}
                if first_argument(methods[0]) in given and getattr(call.func, "id", None) not in _HARMLESS:
                    return True
    return not methods  # it is no plain method
