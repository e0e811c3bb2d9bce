"""How a function uses a mapping that it is given, mainly its `**kwargs`."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from deeplightning.signatures.symbol import Functions, body_nodes

_CONDITIONAL_NODES = (
    ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.FunctionDef | ast.Lambda | ast.IfExp | ast.BoolOp
    | ast.AsyncFunctionDef | ast.AsyncFor | ast.ClassDef | ast.ListComp | ast.DictComp | ast.GeneratorExp | ast.SetComp
)  # fmt: skip
"""Syntax whose parts may run never or several times."""


@dataclass
class Uses:
    """How a function uses a mapping that it is given.

    Attributes:
        calls: calls that receive it as `**kwargs`, and whether each certainly runs, once.
        words: literal keys that are read from it.
        passed: calls that receive it as a plain argument, with the position of the argument.
        refuses: whether remaining keys raise an error.
        adds: whether keys are added to it.
        dynamic: whether keys that are not literal are read from it.
        other: any other use, as text for a message.
    """

    calls: list[tuple[ast.Call, bool]] = field(default_factory=list)
    words: set[str] = field(default_factory=set)
    passed: list[tuple[ast.Call, int]] = field(default_factory=list)
    refuses: bool = False
    adds: bool = False
    dynamic: bool = False
    other: str | None = None


def uses_of(function: Functions, name: str) -> Uses:
    uses, certain = Uses(), True
    for statement in function.body:
        for path in _occurrences([statement], name):
            if not _is_rejection(path, name, uses):
                _record_use(path, name, uses, certain)
        certain = certain and not any(isinstance(node, ast.Return) for node in body_nodes([statement]))
    return uses


def is_name(node: ast.AST, name: str) -> bool:
    """Return whether an expression is a variable, or an attribute of one (`self.options`)."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and name == f"{node.value.id}.{node.attr}"
    return isinstance(node, ast.Name) and node.id == name


def _occurrences(path: list[ast.AST], name: str) -> Iterator[list[ast.AST]]:
    """Yield each occurrence of a variable below a node as the path of nodes to it, the occurrence last."""
    node = path[-1]
    if is_name(node, name):
        yield path
        return
    if isinstance(node, Functions | ast.Lambda) and name in {
        a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)
    }:
        return
    for child in ast.iter_child_nodes(node):
        yield from _occurrences([*path, child], name)


def _is_rejection(path: list[ast.AST], name: str, uses: Uses) -> bool:
    """Return whether an occurrence belongs to `if kwargs: …`, as its test or in the error that it raises."""
    for depth, node in enumerate(path[:-1]):
        if isinstance(node, ast.If) and is_name(node.test, name):
            raises = isinstance(node.body[-1], ast.Raise)
            uses.refuses |= raises
            return path[depth + 1] is node.test or (raises and path[depth + 1] in node.body)
    return False


def _record_use(path: list[ast.AST], name: str, uses: Uses, certain: bool) -> None:
    """Record how one occurrence uses the mapping."""
    place, above, call = path[-1], path[-2], path[-3] if len(path) > 2 else None
    match above:
        case ast.keyword(arg=None) if isinstance(call, ast.Call):
            uses.calls.append((call, certain and not any(isinstance(node, _CONDITIONAL_NODES) for node in path)))
        case ast.Dict() if isinstance(call, ast.keyword) and call.arg is None and _is_unpacked(place, above):
            uses.calls.append((path[-4], False))  # type: ignore[arg-type]
        case ast.Call(func=ast.Name(id="len" | "bool" | "print" | "str" | "repr" | "isinstance")):
            pass
        case ast.Call() if place in above.args:
            uses.passed.append((above, above.args.index(place)))
        case ast.Attribute(attr=method) if isinstance(call, ast.Call) and call.func is above:
            _record_method(method, call, name, uses)
        case ast.Subscript(slice=ast.Constant(value=str(word)), ctx=ast.Load() | ast.Del()):
            uses.words.add(word)
        case ast.Subscript(ctx=ctx) if above.slice is not place:
            uses.adds |= isinstance(ctx, ast.Store)
            uses.dynamic |= isinstance(ctx, ast.Load)
            if isinstance(ctx, ast.Del):
                uses.other = uses.other or f"removes keys from `{name}` that are known only at run time"
        case ast.Compare(ops=[ast.In() | ast.NotIn()]) | ast.FormattedValue() | ast.Delete():
            pass
        case ast.Assign(value=ast.Name()) if above.value is not place:
            pass
        case _:
            uses.other = uses.other or f"uses `{name}` in a way that is not followed (line {place.lineno})"  # type: ignore[attr-defined]


def _is_unpacked(place: ast.AST, above: ast.Dict) -> bool:
    return any(key is None and value is place for key, value in zip(above.keys, above.values, strict=True))


def _record_method(method: str, call: ast.Call, name: str, uses: Uses) -> None:
    word = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if method not in ("pop", "get", "setdefault", "update"):
        uses.other = uses.other or f"uses `{name}.{method}()`"
    uses.adds |= method in ("setdefault", "update")
    if isinstance(word, str):
        uses.words.add(word)
    elif method != "update":
        uses.dynamic = True
        if method == "pop":
            uses.other = uses.other or f"removes keys from `{name}` that are known only at run time"
