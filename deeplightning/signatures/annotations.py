"""Convert annotations and defaults from source to live type hints and values."""

import ast
import types
import typing
from dataclasses import replace
from typing import Any

from deeplightning.signatures.bindings import Module
from deeplightning.signatures.names import Names
from deeplightning.signatures.signature import UNKNOWN, Options, allowed_by, in_config
from deeplightning.signatures.symbol import RESOLUTION_ERRORS, Frame, Symbol, is_type_variable, stdlib_path

TENSOR = types.new_class("Tensor", exec_body=lambda space: space.update(__module__="torch"))
"""Stands for `torch.Tensor`, which is mostly written in C++."""
CONFIG = types.new_class("Config", exec_body=lambda space: space.update(__module__="deeplightning.config.schema"))
"""Stands for our `Config`, which many modules import only for type checkers."""


class ReadClass:
    """The base of the types that represent classes known only from source."""

    paths: tuple[str, ...]  # of the class and its ancestors

    def __class_getitem__(cls, item: object) -> type:
        return cls


def plain(node: ast.expr) -> Any:
    """Return the value of a literal, or UNKNOWN for any other expression."""
    try:
        return in_config(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def allowed(names: Names, node: ast.expr | None, frame: Frame) -> Options:
    """Return what an annotation allows, or None if anything."""
    return None if node is None else allowed_by(hint(names, node, replace(frame, function=None)))


def hint(names: Names, node: ast.expr, frame: Frame) -> Any:
    """Return the live type hint of an annotation, with `Any` for a part that cannot be resolved."""
    try:
        return _hint(names, node, frame)
    except (*RESOLUTION_ERRORS, ValueError, SyntaxError, TypeError):
        return Any


def _hint(names: Names, node: ast.expr, frame: Frame) -> Any:
    match node:
        case ast.Constant(value=None):
            return type(None)
        case ast.Constant(value=str(text)):
            return _hint(names, ast.parse(text.strip(), mode="eval").body, frame)
        case ast.Constant(value=types.EllipsisType()):
            return ...
        case ast.List(elts=items):
            return [hint(names, item, frame) for item in items]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[hint(names, left, frame), hint(names, right, frame)]  # noqa: UP007
        case ast.Subscript(value=outer, slice=inner):
            generic = _hint(names, outer, frame)
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if any(isinstance(part, ast.Starred) or "Unpack" in ast.unparse(part) for part in parts):
                return Any
            if generic is typing.Literal:
                return generic[tuple(ast.literal_eval(part) for part in parts)]
            given = tuple(hint(names, part, frame) for part in parts)
            return generic[given if isinstance(inner, ast.Tuple) else given[0]]
        case ast.Name() | ast.Attribute():
            return _hint_of_name(names, node, frame)
    return Any


def _hint_of_name(names: Names, node: ast.Name | ast.Attribute, frame: Frame) -> Any:
    if (placeholder := _placeholder(ast.unparse(node), frame.module)) is not None:
        return placeholder
    package, _, word = (stdlib_path(node, frame.module) or "").rpartition(".")
    if package == "typing_extensions":
        return getattr(typing, word, Any)
    found = names.value(node, frame)
    if found.live is not None:
        is_hint = isinstance(found.live, type) or type(found.live).__module__ in ("typing", "dataclasses")
        return found.live if is_hint else Any
    key = ("hint", found.key)
    if key not in names.hints:
        with names.resolving(key):
            names.hints[key] = _hint_of_symbol(names, found)
    return names.hints[key]


def _hint_of_symbol(names: Names, found: Symbol) -> Any:
    if found.kind == "class":
        module, _, name = found.path.rpartition(".")
        paths = tuple(each.path for each in names.mro(found)[0])
        return type(name, (ReadClass,), {"__module__": module, "paths": paths})
    if found.kind != "value" or not isinstance(found.node, ast.expr):
        return Any
    if is_type_variable(found.node):
        is_parameters = ast.unparse(found.node).partition("(")[0].endswith("ParamSpec")
        return (typing.ParamSpec if is_parameters else typing.TypeVar)(found.name)
    return _hint(names, found.node, Frame(names.home(found)))


def _placeholder(name: str, module: Module) -> type | None:
    """Return TENSOR or CONFIG if a name refers to torch's tensor or our config, without reading their modules."""
    source = "torch" if name == "torch.Tensor" else module.type_imports.get(name, "")
    if source in ("torch", "torch._tensor"):
        return TENSOR
    return CONFIG if source.startswith("deeplightning.config.") else None
