"""What a function does with a mapping that it was given, above all with its `**kwargs`."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from deeplightning.signatures.symbol import Functions, inside

_PERHAPS = (
    ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.FunctionDef | ast.Lambda | ast.IfExp | ast.BoolOp
    | ast.AsyncFunctionDef | ast.AsyncFor | ast.ClassDef | ast.ListComp | ast.DictComp | ast.GeneratorExp | ast.SetComp
)  # fmt: skip
"""Syntax whose parts may not be run, or not once."""


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
        passed: calls that get it as a plain argument, with the argument's position.
        refuses: whether anything left over is an error.
        adds: whether names are put into it.
        dynamic: whether names are looked up in it that are not literal.
        other: anything else, in words.
    """

    calls: list[Call] = field(default_factory=list)
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
            if not _is_refused(path, name, uses):
                _note(path, name, uses, certain)
        certain = certain and not any(isinstance(node, ast.Return) for node in inside([statement]))
    return uses


def is_it(node: ast.AST, name: str) -> bool:
    """Return whether an expression is a variable, or an attribute of one (`self.options`)."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and name == f"{node.value.id}.{node.attr}"
    return isinstance(node, ast.Name) and node.id == name


def _occurrences(path: list[ast.AST], name: str) -> Iterator[list[ast.AST]]:
    """Yield each place of a variable below a node, as the nodes that lead to it, itself last."""
    node = path[-1]
    if is_it(node, name):
        yield path
        return
    if isinstance(node, Functions | ast.Lambda) and name in {
        a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)
    }:
        return
    for child in ast.iter_child_nodes(node):
        yield from _occurrences([*path, child], name)


def _is_refused(path: list[ast.AST], name: str, uses: Uses) -> bool:
    """Return whether a place is of `if kwargs: …`, as its test or in the error that follows."""
    for depth, node in enumerate(path[:-1]):
        if isinstance(node, ast.If) and is_it(node.test, name):
            raises = isinstance(node.body[-1], ast.Raise)
            uses.refuses |= raises
            return path[depth + 1] is node.test or (raises and path[depth + 1] in node.body)
    return False


def _note(path: list[ast.AST], name: str, uses: Uses, certain: bool) -> None:
    """Note what is done with the mapping in one place."""
    place, above, call = path[-1], path[-2], path[-3] if len(path) > 2 else None
    match above:
        case ast.keyword(arg=None) if isinstance(call, ast.Call):
            uses.calls.append(Call(call, certain and not any(isinstance(node, _PERHAPS) for node in path)))
        case ast.Dict() if isinstance(call, ast.keyword) and call.arg is None and _is_unpacked(place, above):
            uses.calls.append(Call(path[-4], False))  # type: ignore[arg-type]
        case ast.Call(func=ast.Name(id="len" | "bool" | "print" | "str" | "repr" | "isinstance")):
            pass
        case ast.Call() if place in above.args:
            uses.passed.append((above, above.args.index(place)))
        case ast.Attribute(attr=method) if isinstance(call, ast.Call) and call.func is above:
            _note_method(method, call, name, uses)
        case ast.Subscript(slice=ast.Constant(value=str(word)), ctx=ast.Load() | ast.Del()):
            uses.words.add(word)
        case ast.Subscript(ctx=ctx) if above.slice is not place:
            uses.adds |= isinstance(ctx, ast.Store)
            uses.dynamic |= isinstance(ctx, ast.Load)
            if isinstance(ctx, ast.Del):
                uses.other = uses.other or f"takes names out of `{name}` that show only when it is run"
        case ast.Compare(ops=[ast.In() | ast.NotIn()]) | ast.FormattedValue() | ast.Delete():
            pass
        case ast.Assign(value=ast.Name()) if above.value is not place:
            pass
        case _:
            uses.other = uses.other or f"uses `{name}` in a way of its own (line {place.lineno})"  # type: ignore[attr-defined]


def _is_unpacked(place: ast.AST, above: ast.Dict) -> bool:
    return any(key is None and value is place for key, value in zip(above.keys, above.values, strict=True))


def _note_method(method: str, call: ast.Call, name: str, uses: Uses) -> None:
    word = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if method not in ("pop", "get", "setdefault", "update"):
        uses.other = uses.other or f"uses `{name}.{method}()`"
    uses.adds |= method in ("setdefault", "update")
    if isinstance(word, str):
        uses.words.add(word)
    elif method != "update":
        uses.dynamic = True
        if method == "pop":
            uses.other = uses.other or f"takes names out of `{name}` that show only when it is run"
