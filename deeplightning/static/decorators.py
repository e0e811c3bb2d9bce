"""Which decorators leave alone what a function or class takes.

A decorator of the usual form is read from its source: it returns what it decorates, or a function that
`functools.wraps` makes look like it. Any other one is unchecked.
"""

import ast
from dataclasses import replace

from deeplightning.static.names import KEEPING, Names
from deeplightning.static.signature import Undecided
from deeplightning.static.symbol import UNKNOWABLE, Frame, Functions, first_argument, inside
from deeplightning.static.uses import uses_of


def role_of(decorator: ast.expr) -> str | None:
    match decorator:
        case ast.Name(id="staticmethod" | "classmethod" | "property" as word):
            return word
        case ast.Attribute(attr="setter" | "getter" | "deleter") | ast.Name(id="cached_property"):
            return "property"
        case ast.Attribute(attr="cached_property" | "abstractproperty"):
            return "property"
    return None


def role_of_function(node: Functions) -> str | None:
    roles = [role for d in node.decorator_list if (role := role_of(d))]
    if node.name in ("__init_subclass__", "__class_getitem__"):
        roles.append("classmethod")
    return roles[0] if roles else None


def words_beside(names: Names, node: ast.ClassDef | Functions, frame: Frame) -> set[str]:
    """Return the words that a class or function takes by its decorators, beside those that its own source shows.

    Raises:
        Undecided: a decorator may change what it takes.
    """
    words = set[str]()
    for decorator in node.decorator_list:
        if role_of(decorator) is None and names.real_path(decorator, frame) != "dataclasses.dataclass":
            more = keeps(names, decorator, frame)
            if more is None:
                raise Undecided(f"@{ast.unparse(decorator)[:60]} may change what it takes")
            words |= more
    return words


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
    return _kept(names, found.node, Frame(found.module), given, isinstance(decorator, ast.Call))


def _kept(names: Names, function: Functions, frame: Frame, given: set[str], makes_decorators: bool) -> set[str] | None:
    """Return the words that the results of a decorator take beside; `given`: the texts that it was made with."""
    inner = {n.name: n for n in inside(function.body) if isinstance(n, Functions)}
    frame, words = replace(frame, function=function), set[str]()
    returned = _names_returned(function)
    for name in returned:
        if name == first_argument(function) and not makes_decorators:
            continue
        if (made := inner.get(name)) is None:
            return None
        more = _kept(names, made, frame, given, False) if makes_decorators else _wrapped(names, made, frame, given)
        if more is None:
            return None
        words |= more
    return words if returned else None


def _wrapped(names: Names, wrapper: Functions, frame: Frame, given: set[str]) -> set[str] | None:
    """Return the words that a wrapper takes beside those of the function that `functools.wraps` shows as its own."""
    wraps = [d for d in wrapper.decorator_list if names.real_path(d, frame) == "functools.wraps"]
    others = [keeps(names, d, frame) for d in wrapper.decorator_list if d not in wraps]
    if not wraps or None in others:
        return None
    words = set[str]().union(*(more or () for more in others))
    if wrapper.args.kwarg is not None:
        uses = uses_of(wrapper, wrapper.args.kwarg.arg)
        words |= uses.words | ({word for word in given if word.isidentifier()} if uses.dynamic else set())
    return words


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
