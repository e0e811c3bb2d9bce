"""Read the signatures of classes and functions, with their annotations and defaults, from their source."""

import ast
import types
import typing
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deeplightning.signatures.bindings import Module
from deeplightning.signatures.names import PRESERVING_DECORATORS, Names
from deeplightning.signatures.signature import (
    UNKNOWN,
    Options,
    Parameter,
    Signature,
    Undecided,
    allowed_by,
    factory_of,
    in_config,
    of_object,
)
from deeplightning.signatures.symbol import (
    RESOLUTION_ERRORS,
    Frame,
    Functions,
    Symbol,
    first_argument,
    is_type_variable,
    method_kind,
    positional_arguments,
    stdlib_path,
)
from deeplightning.signatures.uses import is_name, uses_of

_KNOWN_BASES = ("torch", "torchvision", "torchmetrics", "pytorch_lightning", "sklearn", "transformers")
"""Packages whose `__init_subclass__` does not change the constructors of subclasses."""

_RENAMING = "torchvision.models._utils.handle_legacy_interface"
"""A decorator whose string arguments are older names of parameters, which it accepts too."""


class Signatures:
    """Reads signatures, including those of ancestors and of the functions that receive `**kwargs`."""

    def __init__(self, names: Names):
        self.names = names

    def signature(self, symbol: Symbol) -> Signature:
        if symbol.live is not None:
            return of_object(symbol.live)
        with self.names.resolving(("signature", symbol.key)):
            if symbol.kind == "class":
                return self.of_class(symbol)
            if symbol.kind == "function":
                return self.of_function(symbol)
        raise Undecided(f"it is a {symbol.kind}")

    def of_class(self, symbol: Symbol) -> Signature:
        mro, complete = self.names.mro(symbol)
        odd = self.names.metaclass(mro)
        if odd is not None:
            raise Undecided(f"its metaclass {odd} creates its instances")
        if "typing.Protocol" in {t.path for t in mro[:2]}:
            raise Undecided("it is a Protocol, which cannot be instantiated")
        decorator_keywords(self.names, symbol.node, Frame(self.names.home(symbol)))
        for each in mro[1:]:
            if each.path.partition(".")[0] not in _KNOWN_BASES and self.names.defines(each, "__init_subclass__"):
                raise Undecided(f"`__init_subclass__` of {each.path} may change what it takes")
        return self.constructor(symbol, mro, complete)

    def constructor(self, symbol: Symbol, mro: list[Symbol], complete: bool, start: int = 0) -> Signature:
        """Return the signature of a class's constructor, searched from position `start` of the MRO, as by `super()`."""
        new_takes_anything = False  # so `__init__` decides
        for each in mro[start:]:
            if each.live is not None:
                if {"__init__", "__new__"} & vars(each.live).keys():
                    raise Undecided(f"{each.path} is not written in Python")
                continue
            home, kept = Frame(self.names.home(each)), PRESERVING_DECORATORS - {"dataclasses.dataclass"}
            paths = {self.names.real_path(d, home) or ast.unparse(d) for d in each.node.decorator_list}
            odd = {path[path.partition("(")[0].rfind(".") + 1 :] for path in paths - kept}
            if odd and not self.names.defines(each, "__init__"):
                raise Undecided(f"@{min(odd)} generates the constructor of {each.path}")
            for attribute in ("__init__", "__new__", "__signature__"):
                if (each.node.name, attribute) in self.names.home(each).scope.patched:
                    raise Undecided(f"`{attribute}` of {each.path} is assigned outside the class")
            if self.names.defines(each, "__signature__"):
                raise Undecided(f"{each.path} defines `__signature__`")
            if self.names.defines(each, "__new__") and not start and not new_takes_anything:
                function = self.own_function(each, "__new__", symbol)
                new_takes_anything = bool(function.node.args.vararg and function.node.args.kwarg)
                if not new_takes_anything and _may_return_own_class(function.node):
                    raise Undecided("`__new__` and `__init__` both decide what it takes")
                if not new_takes_anything:  # it returns another class, so Python skips `__init__`
                    return self.of_function(function, mro, complete, bound=True)
            if self.names.defines(each, "__init__"):
                return self.of_function(self.own_function(each, "__init__", symbol), mro, complete, bound=True)
        if not complete:
            raise Undecided("an ancestor cannot be read")
        if new_takes_anything:
            raise Undecided("its `__new__` takes anything")
        return Signature(())

    def own_function(self, each: Symbol, name: str, through: Symbol) -> Symbol:
        function = self.names.attribute(each, name, through=through)
        if function.kind != "function" or not isinstance(function.node, Functions):
            raise Undecided(f"`{name}` of {each.path} is not a plain function")
        return function

    def of_function(
        self, symbol: Symbol, mro: Sequence[Symbol] = (), complete: bool = True, bound: bool = False
    ) -> Signature:
        """Return the signature of a function, with the parameters of the functions that receive its `**kwargs`.

        Args:
            mro: that of the class that a method is called on, for `super()`; (): that of the class that defines it.
            bound: leave out the first parameter, as always for a class method.
        """
        node, role = symbol.node, method_kind(symbol.node)
        if role == "property":
            raise Undecided("it is a property")
        if symbol.owner is not None and not mro:
            mro, complete = self.names.mro(symbol.owner)
        paths = [f"{each.path}.{node.name}" for each in mro]
        position = paths.index(symbol.path) if symbol.path in paths else 0
        bound = bound or (symbol.owner is not None and role == "classmethod")
        frame = Frame(self.names.home(symbol), None, node, tuple(mro), complete, position)
        extra = decorator_keywords(self.names, node, Frame(frame.module))
        with self.names.resolving(("method", symbol.key, tuple(t.path for t in mro[:1]))):
            taken = FunctionReader(self, frame).signature(bound and role != "staticmethod")
        more = tuple(Parameter(word, position=False) for word in sorted(extra - {p.name for p in taken.parameters}))
        return replace(taken, parameters=taken.parameters + more)


class FunctionReader:
    """Reads the signature of one function, with the parameters of the functions that receive its `**kwargs`."""

    def __init__(self, signatures: Signatures, frame: Frame):
        assert frame.function is not None
        self.signatures, self.names = signatures, signatures.names
        self.frame, self.node = frame, frame.function

    def signature(self, bound: bool) -> Signature:
        own = self.own_parameters()
        if bound and own and own[0].position:
            own = own[1:]
        if self.node.args.kwarg is None:
            return Signature(tuple(own))
        uses = uses_of(self.node, self.node.args.kwarg.arg)
        more, first = dict[str, Parameter](), list[Parameter]()
        why = [uses.other and f"{self.node.name} {uses.other}"]  # other keywords cannot be checked
        for call, certain in uses.calls:
            try:
                changed = uses.adds or uses.passed or uses.other  # which may add what is required
                taken, position = self.of_call(call, sure=certain and len(uses.calls) == 1 and not changed)
            except RESOLUTION_ERRORS as error:
                why.append(f"`{ast.unparse(call.func)[:60]}`, which takes the rest, cannot be resolved: {error}")
                continue
            why.append(taken.rest)
            for parameter in taken.parameters:
                if (former := more.setdefault(parameter.name, parameter)) != parameter:  # they differ
                    more[parameter.name] = replace(former, required=False, default=UNKNOWN, allowed=None)
            if position and len(uses.calls) == 1:
                first = [p for p in taken.parameters if p.position]
        words = uses.words
        if uses.dynamic:
            why.append(f"{self.node.name} reads keys that are known only at run time")
        for node, at in uses.passed:
            found = self.helper(node, at)
            words |= found or set()
            if found is None:
                why.append(f"{self.node.name} passes `{self.node.args.kwarg.arg}` to `{ast.unparse(node.func)[:40]}`")
        if not uses.calls and not uses.refuses:
            why.append("it takes any other keyword and ignores it")
        for word in sorted(words):
            more[word] = replace(more.get(word, Parameter(word, position=False)), required=False)
            if uses.adds and factory_of(more[word].allowed) is None:  # it may be converted
                more[word] = replace(more[word], allowed=None, default=UNKNOWN)
        own_names = {p.name for p in own if p.keyword}
        first = [p for p in first if p.name not in own_names]
        known = own_names | {p.name for p in first}
        ordered = [
            *(p for p in own if p.position),
            *first,
            *(p for p in own if not p.position),
            *(replace(p, position=False) for p in more.values() if p.name not in known and p.keyword),
        ]
        return Signature(tuple(ordered), next(filter(None, why), None))

    def own_parameters(self) -> list[Parameter]:
        arguments, frame = self.node.args, Frame(self.frame.module)
        positional = [*arguments.posonlyargs, *arguments.args]
        without = [None] * (len(positional) - len(arguments.defaults))
        defaults = [*without, *arguments.defaults, *arguments.kw_defaults]
        pairs = zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
        return [
            Parameter(
                argument.arg,
                position=number < len(positional),
                keyword=number >= len(arguments.posonlyargs),
                required=default is None,
                default=UNKNOWN if default is None else plain(default),
                allowed=allowed(self.names, argument.annotation, frame),
                annotation=None if argument.annotation is None else _annotation_text(argument.annotation),
            )
            for number, (argument, default) in enumerate(pairs)
        ]

    def of_call(self, call: ast.Call, sure: bool) -> tuple[Signature, bool]:
        """Return what a call still takes by `**kwargs`, and whether it also receives our `*args`."""
        taken = self.callee(call.func)
        arguments, vararg, open_end = list(call.args), self.node.args.vararg, False
        if arguments and isinstance(arguments[-1], ast.Starred) and vararg and is_name(arguments[-1].value, vararg.arg):
            arguments.pop()
            open_end = True
        given = len([argument for argument in arguments if not isinstance(argument, ast.Starred)])
        words = {word.arg for word in call.keywords if word.arg}
        sure = sure and given == len(arguments) and sum(word.arg is None for word in call.keywords) == 1
        remaining = [p for p in taken.parameters if p.position][given:]
        remaining += [p for p in taken.parameters if not p.position]
        free = [p for p in remaining if p.name not in words and (p.keyword or (p.position and open_end))]
        kept = [replace(p, required=p.required and sure, position=p.position and open_end) for p in free]
        return Signature(tuple(kept), taken.rest), open_end

    def callee(self, function: ast.expr) -> Signature:
        """Return the signature of a called expression, without the arguments that Python passes itself."""
        frame, names, signatures = self.frame, self.names, self.signatures
        match function:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__") if frame.mro:
                return signatures.constructor(frame.mro[0], list(frame.mro), frame.complete, frame.position + 1)
            case ast.Name(id=name) if method_kind(self.node) == "classmethod" and frame.mro:
                if name == first_argument(self.node):
                    return signatures.signature(frame.mro[0])
        found = names.value(function, frame)
        if found.owner is not None and found.live is None and found.owner.path in {t.path for t in frame.mro}:
            if found.kind != "function":
                raise Undecided(f"`{found.name}` is not a method")
            return signatures.of_function(found, frame.mro, frame.complete)
        return signatures.signature(found)

    def helper(self, call: ast.Call, place: int) -> set[str] | None:
        """Return the literal keys that a helper reads from the mapping, or None if it uses the mapping otherwise."""
        try:
            found = self.names.value(call.func, self.frame)
        except RESOLUTION_ERRORS:
            return None
        if found.kind != "function" or not isinstance(found.node, Functions) or found.node.decorator_list:
            return None
        positional = positional_arguments(found.node)
        if place >= len(positional) or any(isinstance(a, ast.Starred) for a in call.args[:place]):
            return None
        uses = uses_of(found.node, positional[place])
        return None if uses.other or uses.calls or uses.passed else uses.words


def _annotation_text(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


def _may_return_own_class(new: Functions) -> bool:
    """Return whether a `__new__` may return an instance of its own class."""
    names = {node.func.id for node in ast.walk(new) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(names & {first_argument(new), "super"}) or any(
        isinstance(node, ast.Attribute) and node.attr == "__new__" for node in ast.walk(new)
    )


def decorator_keywords(names: Names, node: ast.ClassDef | Functions, frame: Frame) -> set[str]:
    """Return the keywords that the decorators of a class or function add to its own.

    Raises:
        Undecided: a decorator may change what it takes.
    """
    words = set[str]()
    for decorator in node.decorator_list:
        path = names.real_path(decorator, frame)
        if path == _RENAMING:
            words |= {n.value for n in ast.walk(decorator) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        elif path not in PRESERVING_DECORATORS:
            raise Undecided(f"@{ast.unparse(decorator)[:60]} may change what it takes")
    return words


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
