"""Annotations and defaults in the form of `config.signature`."""

import ast
import builtins
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from deeplightning.static.bindings import Broken, Imported, Module
from deeplightning.static.names import Names
from deeplightning.static.signature import (
    COLLECTIONS,
    UNKNOWN,
    Factory,
    Options,
    TheConfig,
    Undecided,
    collection,
    instance,
)
from deeplightning.static.symbol import UNKNOWABLE, Absent, Failing, Frame, Thing
from deeplightning.static.syntax import is_type_variable, nominal


def plain(names: Names, node: ast.expr, frame: Frame) -> Any:
    """A plain value, also one that a module gives a name; else UNKNOWN."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        if not isinstance(node, ast.Name):
            return UNKNOWN
        try:
            found = names.named(node.id, replace(frame, function=None))
            value = ast.literal_eval(found.node) if found.kind == "value" and found.live is None else UNKNOWN
        except (ValueError, TypeError, Undecided, Absent, Failing, Broken):
            return UNKNOWN
    return value if isinstance(value, bool | int | float | str | None) else UNKNOWN


def allowed(names: Names, node: ast.expr | None, frame: Frame) -> Options:
    """What an annotation allows, as `signature.allowed_by` gives it of a live one."""
    return Types(names, replace(frame, function=None)).part(node, {})


class Types:
    """Annotations as what they allow.

    Args:
        around: the aliases whose meaning is being found out, one inside the other.
    """

    def __init__(self, names: Names, frame: Frame, around: frozenset[object] = frozenset()):
        self.names, self.frame, self.around = names, frame, around

    def part(self, node: ast.expr | None, variables: dict[str, Options]) -> Options:
        """What an annotation, or a part of one, allows; anything where that is not known."""
        try:
            return self.of(node, variables)
        except (*UNKNOWABLE, ValueError, SyntaxError, TypeError):
            return None

    def of(self, node: ast.expr | None, variables: dict[str, Options]) -> Options:
        match node:
            case ast.Constant(value=None):
                return (type(None),)
            case ast.Constant(value=str(text)):
                return self.of(ast.parse(text.strip(), mode="eval").body, variables)
            case ast.BinOp(op=ast.BitOr()):
                return self.union(sides(node), variables)
            case ast.Subscript(value=outer, slice=inner):
                return self.subscript(outer, inner, variables)
            case ast.Name() | ast.Attribute():
                return self.named(node, variables)
        return None

    def subscript(self, outer: ast.expr, inner: ast.expr, variables: dict[str, Options]) -> Options:
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        match self.typing(outer):
            case "Optional":
                return self.union([inner, ast.Constant(None)], variables)
            case "Union":
                return self.union(parts, variables)
            case "Literal":
                values = [p.value if isinstance(p, ast.Constant) else ast.literal_eval(p) for p in parts]
                return tuple(values)
            case "Annotated":
                return self.of(parts[0], variables)
            case "Callable":
                arguments = len(parts[0].elts) if isinstance(parts[0], ast.List) else None
                return (Factory.of(arguments, self.classes(parts[-1])),)
            case str(name):
                if any(isinstance(part, ast.Starred) or "Unpack" in ast.unparse(part) for part in parts):
                    return None
                ellipsis = [isinstance(part, ast.Constant) and part.value is ... for part in parts]
                return collection(
                    name, [... if e else self.part(p, variables) for p, e in zip(parts, ellipsis, strict=True)]
                )
        found = self.names.value(outer, self.frame)
        if self.is_alias(found) and len(parts) == 1:
            free = [n.id for n in ast.walk(found.node) if isinstance(n, ast.Name)]
            given = self.part(parts[0], variables)
            inside = self.inside(found)
            return inside.of(found.node, {name: given for name in free if inside.is_variable(name)})
        return self.instance(found)

    def classes(self, node: ast.expr) -> Iterator[str]:
        """Yield the dotted paths of the classes that an annotation names: one, or those of a union."""
        match node:
            case ast.BinOp(op=ast.BitOr()):
                parts = sides(node)
            case ast.Subscript(value=outer, slice=inner) if self.typing(outer) in ("Optional", "Union"):
                parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            case _:
                with contextlib.suppress(*UNKNOWABLE):
                    found = self.names.value(node, self.frame)
                    if found.kind == "class":
                        yield found.path
                return
        for part in parts:
            yield from self.classes(part)

    def is_alias(self, found: Thing) -> bool:
        return found.kind == "value" and isinstance(found.node, ast.expr) and found.module is not None

    def inside(self, alias: Thing) -> "Types":
        """Annotations where an alias is defined."""
        if alias.key in self.around or len(self.around) > 10:
            raise Undecided(f"{alias.path} goes round in a circle")
        return Types(self.names, Frame(self.names.home(alias)), self.around | {alias.key})

    def instance(self, found: Thing) -> Options:
        if found.kind != "class":
            return None
        return instance([each.path for each in self.names.line(found)[0]])

    def is_variable(self, name: str) -> bool:
        try:
            return is_type_variable(self.names.named(name, self.frame).node)
        except UNKNOWABLE:
            return False

    def typing(self, node: ast.expr) -> str | None:
        """The last word of a name in `typing`, `collections.abc` or `builtins`."""
        path = nominal(node, self.frame.module)
        if path is None:
            found = self.names.value(node, self.frame)
            if found.live is None:
                return None
            path = found.path
        head, _, word = path.rpartition(".")
        return word if head in ("typing", "typing_extensions", *COLLECTIONS) else None

    def named(self, node: ast.Name | ast.Attribute, variables: dict[str, Options]) -> Options:
        if isinstance(node, ast.Name) and node.id in variables:
            return variables[node.id]
        if is_tensor(node, self.frame.module):
            return None
        if is_config(node, self.frame.module):
            return (TheConfig,)
        name = self.typing(node)
        if name in ("int", "float", "bool", "str"):
            return (vars(builtins)[name],)
        if name is not None:
            return collection(name, ())
        if nominal(node, self.frame.module) is not None:
            return None
        found = self.names.value(node, self.frame)
        return self.inside(found).of(found.node, {}) if self.is_alias(found) else self.instance(found)

    def union(self, parts: list[ast.expr], variables: dict[str, Options]) -> Options:
        options = []
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                part = ast.parse(part.value.strip(), mode="eval").body
            options.append((part, self.part(part, variables)))
        numbers = any(option and {int, float} & set(option) for _, option in options)
        kept: list[object] = []
        for part, option in options:
            if option is None:
                if numbers and is_tensor(part, self.frame.module):
                    continue
                return None
            kept += [each for each in option if each not in kept or isinstance(each, bool)]
        return tuple(kept)


def is_tensor(node: ast.expr, module: Module) -> bool:
    """`Tensor` of torch, without reading torch."""
    match node:
        case ast.Name(id=name):
            options = module.scope.names.get(name, ())
            return any(
                isinstance(o, Imported) and o.module in ("torch", "torch._tensor") and o.name == "Tensor"
                for o in options
            )
        case ast.Attribute(value=ast.Name(id=name), attr="Tensor"):
            options = module.scope.names.get(name, ())
            return any(isinstance(o, Imported) and o.module == "torch" and o.name is None for o in options)
    return False


def is_config(node: ast.expr, module: Module) -> bool:
    """Return whether a name is imported as the type of our config, also under `TYPE_CHECKING`."""
    return isinstance(node, ast.Name) and any(
        alias.name in ("Config", "PartConfig") and (alias.asname or alias.name) == node.id
        for found in ast.walk(module.tree)
        if isinstance(found, ast.ImportFrom) and str(found.module).startswith("deeplightning.config.")
        for alias in found.names
    )


def sides(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*sides(node.left), *sides(node.right)]
    return [node]
