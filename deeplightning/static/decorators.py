"""Which decorators leave alone what a function or class takes.

A decorator of the usual form is read from its source: it returns what it decorates, or a function that
`functools.wraps` makes look like it. Any other one is unchecked.
"""

import ast

from deeplightning.static.names import KEEPING, Names
from deeplightning.static.symbol import UNKNOWABLE, Frame, Functions
from deeplightning.static.syntax import first_argument, inside
from deeplightning.static.uses import is_it, uses_of


def keeps(names: Names, decorator: ast.expr, frame: Frame) -> set[str] | None:
    """Return the words that a decorated function takes beside its own, such as older names; None: it is unchecked."""
    if names.real_path(decorator, frame) in KEEPING:
        return set()
    try:
        found = names.value(decorator.func if isinstance(decorator, ast.Call) else decorator, frame)
    except UNKNOWABLE:
        return None
    if found.module is None or found.kind != "function" or not isinstance(found.node, Functions):
        return None
    given = {n.value for n in ast.walk(decorator) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    inner = {n.name: n for n in inside(found.node.body) if isinstance(n, Functions)}
    is_called = isinstance(decorator, ast.Call)
    makers = [inner.get(name) for name in _names_returned(found.node)] if is_called else [found.node]
    frames = [Frame(found.module, function=maker) for maker in makers]
    parts = [maker and _kept(names, maker, frame, given) for maker, frame in zip(makers, frames, strict=True)]
    return None if not parts or None in parts else set().union(*(part or () for part in parts))


def _kept(names: Names, decorator: Functions, frame: Frame, given: set[str]) -> set[str] | None:
    """Return the words that the results of a decorator take beside; `given`: the texts that it was made with."""
    parameter, words = first_argument(decorator), set[str]()
    inner = {n.name: n for n in inside(decorator.body) if isinstance(n, Functions)}
    returned = _names_returned(decorator)
    for name in returned:
        if name == parameter:
            continue
        wrapper = inner.get(name)
        if wrapper is None:
            return None
        wraps = [d for d in wrapper.decorator_list if names.real_path(d, frame) == "functools.wraps"]
        if not any(isinstance(d, ast.Call) and d.args and is_it(d.args[0], str(parameter)) for d in wraps):
            return None
        for other in wrapper.decorator_list:
            if other not in wraps:
                more = keeps(names, other, frame)
                if more is None:
                    return None
                words |= more
        if wrapper.args.kwarg is not None:
            uses = uses_of(wrapper, wrapper.args.kwarg.arg)
            words |= uses.words | ({word for word in given if word.isidentifier()} if uses.dynamic else set())
    return words if returned else None


def _names_returned(function: Functions) -> list[str]:
    """Return the name in each return statement; "" for any other expression."""
    values = [n.value for n in inside(function.body) if isinstance(n, ast.Return)]
    values = [v.args[1] if isinstance(v, ast.Call) and _is_cast(v) else v for v in values]
    return [value.id if isinstance(value, ast.Name) else "" for value in values]


def _is_cast(call: ast.Call) -> bool:
    return len(call.args) == 2 and ast.unparse(call.func).rpartition(".")[2] == "cast"


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
