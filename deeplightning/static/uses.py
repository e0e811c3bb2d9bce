"""What a function does with a mapping that it was given, above all with its `**kwargs`."""

import ast
from dataclasses import dataclass, field

from deeplightning.static.symbol import Functions
from deeplightning.static.syntax import inside


@dataclass
class Call:
    """A call that gets `**kwargs`."""

    node: ast.Call
    certain: bool


@dataclass
class Uses:
    """What a function does with a mapping that it was given.

    Attributes:
        calls: those that get it as `**kwargs`.
        words: literal names that are taken out of it.
        passed: calls that get it as a plain argument, with the argument's position or name.
        refuses: whether anything left over is an error.
        adds: whether names are put into it.
        dynamic: whether names are looked up in it that are not literal.
        kept: attributes of the instance that it becomes.
        other: anything else, in words.
    """

    calls: list[Call] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    passed: list[tuple[ast.Call, int | str]] = field(default_factory=list)
    refuses: bool = False
    adds: bool = False
    dynamic: bool = False
    kept: set[str] = field(default_factory=set)
    other: str | None = None


def uses_of(function: Functions, name: str) -> Uses:
    uses = Uses()
    certain = True
    for statement in function.body:
        _look(statement, name, uses, certain)
        if any(isinstance(node, ast.Return) for node in inside([statement])):
            certain = False
    return uses


def is_it(node: ast.AST, name: str) -> bool:
    """Whether an expression is a variable, or an attribute of one (`self.options`)."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and name == f"{node.value.id}.{node.attr}"
    return isinstance(node, ast.Name) and node.id == name


def _look(node: ast.AST, name: str, uses: Uses, certain: bool) -> None:
    """Notes every use of a mapping in a statement or expression."""
    match node:
        case ast.Name() | ast.Attribute() if is_it(node, name):
            uses.other = uses.other or f"uses `{name}` in a way of its own (line {node.lineno})"
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            inner = node.args
            if name in {
                a.arg for a in (*inner.posonlyargs, *inner.args, *inner.kwonlyargs, inner.vararg, inner.kwarg) if a
            }:
                return
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert() if _asks(node.test, name):
            body = getattr(node, "body", [])
            if isinstance(body, list) and body and isinstance(body[-1], ast.Raise):
                uses.refuses = True
                body = []
            if isinstance(node, ast.Assert):
                uses.refuses = True
            for part in [*(body if isinstance(body, list) else [body]), *_listed(getattr(node, "orelse", []))]:
                _look(part, name, uses, False)
            return
        case ast.Call():
            _look_at_call(node, name, uses, certain)
            return
        case ast.Subscript(value=value, slice=index) if is_it(value, name):
            if isinstance(node.ctx, ast.Store):
                uses.adds = True
            elif isinstance(index, ast.Constant) and isinstance(index.value, str):
                uses.words.add(index.value)
            elif isinstance(node.ctx, ast.Del):
                uses.other = uses.other or f"takes names out of `{name}` that show only when it is run"
            else:
                uses.dynamic = True
            _look(index, name, uses, False)
            return
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[right]) if is_it(right, name):
            _look(left, name, uses, False)
            return
        case ast.FormattedValue(value=value) if is_it(value, name):
            return
        case (
            ast.Assign(targets=[ast.Attribute() as target], value=value)
            | ast.AnnAssign(target=ast.Attribute() as target, value=value)
        ) if value is not None and is_it(value, name) and isinstance(target.value, ast.Name):
            uses.kept.add(f"{target.value.id}.{target.attr}")
            return
        case ast.Assign(targets=[target], value=ast.Name()) if is_it(target, name):
            return
        case ast.Delete(targets=[target]) if is_it(target, name):
            return
    inside = certain and not isinstance(
        node,
        ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.FunctionDef | ast.Lambda | ast.IfExp | ast.BoolOp
        | ast.AsyncFunctionDef | ast.AsyncFor | ast.ClassDef | ast.ListComp | ast.DictComp | ast.GeneratorExp
        | ast.SetComp,
    )  # fmt: skip
    for child in ast.iter_child_nodes(node):
        _look(child, name, uses, inside)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _asks(test: ast.expr, name: str) -> bool:
    """Whether a condition does no more with a mapping than to ask whether it is empty."""
    match test:
        case ast.Name():
            return is_it(test, name)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _asks(inner, name)
        case ast.Call(func=ast.Name(id="bool" | "len"), args=[inner]):
            return is_it(inner, name)
        case ast.Compare(left=ast.Call() as inner, comparators=[ast.Constant()]):
            return _asks(inner, name)
        case ast.BoolOp(values=parts):
            asking = [part for part in parts if any(is_it(n, name) for n in ast.walk(part))]
            return bool(asking) and all(_asks(part, name) for part in asking)
    return False


def _look_at_call(node: ast.Call, name: str, uses: Uses, certain: bool) -> None:
    match node.func:
        case ast.Attribute(value=owner, attr=method) if is_it(owner, name):
            literal = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if method in ("pop", "get", "setdefault"):
                if isinstance(literal, str):
                    uses.words.add(literal)
                elif method == "pop":
                    uses.dynamic = True
                    uses.other = uses.other or f"takes names out of `{name}` that show only when it is run"
                else:
                    uses.dynamic = True
                uses.adds = uses.adds or method == "setdefault"
            elif method == "update":
                uses.adds = True
            else:
                uses.other = uses.other or f"uses `{name}.{method}()`"
        case ast.Name(id="len" | "bool" | "print" | "str" | "repr" | "isinstance"):
            if any(is_it(argument, name) for argument in node.args):
                return
        case _:
            _look(node.func, name, uses, certain)
    for index, argument in enumerate(node.args):
        if is_it(argument, name):
            uses.passed.append((node, index))
        else:
            _look(argument, name, uses, certain)
    for word in node.keywords:
        match word:
            case ast.keyword(arg=None, value=value) if is_it(value, name):
                uses.calls.append(Call(node, certain))
            case ast.keyword(arg=None, value=ast.Dict(keys=keys, values=values)) if any(
                key is None and is_it(value, name) for key, value in zip(keys, values, strict=True)
            ):
                uses.calls.append(Call(node, False))
            case ast.keyword(arg=str(given), value=value) if is_it(value, name):
                uses.passed.append((node, given))
            case _:
                _look(word.value, name, uses, certain)
