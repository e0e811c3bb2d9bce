"""What classes and functions take, read from their source."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from deeplightning.static.annotations import allowed, plain
from deeplightning.static.decorators import changes_subclasses, keeps
from deeplightning.static.names import Names
from deeplightning.static.signature import UNKNOWN, Parameter, Signature, Undecided, of_object
from deeplightning.static.symbol import UNKNOWABLE, Absent, Frame, Functions, Thing
from deeplightning.static.syntax import first_argument
from deeplightning.static.uses import Call, Uses, is_it, uses_of


class Signatures:
    """Asks what things take: their ancestors too, and the functions that `**kwargs` are handed on to."""

    def __init__(self, names: Names):
        self.names = names

    def signature(self, thing: Thing) -> Signature:
        if thing.live is not None:
            return of_object(thing.live)
        key = ("signature", thing.key)
        self.names.enter(key)
        try:
            if thing.kind == "class":
                return self.of_class(thing)
            if thing.kind == "function":
                return self.of_function(thing)
        finally:
            self.names.active.discard(key)
        raise Undecided(f"it is a {thing.kind}")

    def of_class(self, thing: Thing) -> Signature:
        line, complete = self.names.line(thing)
        odd = self.names.metaclass(line)
        if odd is not None:
            raise Undecided(f"its metaclass {odd} makes its instances")
        if "typing.Protocol" in {t.path for t in line[:2]}:
            raise Undecided("it is a Protocol, of which there are no instances")
        self.undecorated(thing)
        for each in line[1:]:
            if each.live is None and self.names.own(each, "__init_subclass__") and changes_subclasses(each.node):
                raise Undecided(f"`__init_subclass__` of {each.path} may change what it takes")
        return self.constructor(thing, line, complete)

    def constructor(self, thing: Thing, line: list[Thing], complete: bool, start: int = 0) -> Signature:
        """What makes an instance of a class takes; from `start` on in its line, as `super()` asks."""
        new: Signature | None = None
        open_new: tuple[Thing, int] | None = None  # takes anything, and leaves it to `__init__` what that may be
        for position, each in enumerate(line):
            if position < start:
                continue
            if each.live is not None:
                if not {"__init__", "__new__"} & vars(each.live).keys():
                    continue
                raise Undecided(f"{each.path} is not written in Python")
            words = self.dataclass_words(each)
            if words is not None and words.get("init", True) and not self.names.own(each, "__init__"):
                return self.of_fields(line[position:])
            for attribute in ("__init__", "__new__", "__signature__"):
                if (each.node.name, attribute) in self.names.home(each).scope.patched:
                    raise Undecided(f"`{attribute}` of {each.path} is set afterwards")
            if self.names.own(each, "__signature__"):
                raise Undecided(f"{each.path} says itself what it takes")
            if self.names.own(each, "__new__") and new is None and not start:
                function = self.names.attribute(each, "__new__", asked=thing)
                if function.kind != "function" or not isinstance(function.node, Functions):
                    raise Undecided(f"`__new__` of {each.path} is not a plain function")
                arguments = function.node.args
                if arguments.vararg and arguments.kwarg:
                    open_new = open_new or (function, position)
                else:
                    new = self.of_method(function, line, position, complete, bound=True)
                    if not _makes_its_own(function.node):
                        return new  # an instance of another class, whose `__init__` Python leaves out
            if self.names.own(each, "__init__"):
                function = self.names.attribute(each, "__init__", asked=thing)
                if function.kind != "function":
                    raise Undecided(f"`__init__` of {each.path} is not a plain function")
                taken = self.of_method(function, line, position, complete, bound=True)
                if new is not None and [p.name for p in new.parameters] != [p.name for p in taken.parameters]:
                    raise Undecided("its `__new__` and `__init__` differ")
                return taken
        if not complete:
            raise Undecided("an ancestor cannot be read")
        if new is None and open_new is not None:
            return self.of_method(open_new[0], line, open_new[1], complete, bound=True)
        return new if new is not None else Signature(())

    def undecorated(self, thing: Thing) -> None:
        for decorator in thing.node.decorator_list:
            frame = Frame(self.names.home(thing))
            if (
                self.names.real_path(decorator, frame) != "dataclasses.dataclass"
                and keeps(self.names, decorator, frame) is None
            ):
                raise Undecided(f"@{ast.unparse(decorator)[:60]} may change what it takes")

    def of_function(self, thing: Thing) -> Signature:
        if thing.owner is None:
            return self.of_method(thing, [], 0, True, bound=False)
        line, complete = self.names.line(thing.owner)
        position = next((n for n, each in enumerate(line) if thing.path == f"{each.path}.{thing.node.name}"), 0)
        return self.of_method(thing, line, position, complete, bound=role_of_function(thing.node) == "classmethod")

    def of_method(self, thing: Thing, line: list[Thing], position: int, complete: bool, bound: bool) -> Signature:
        """What a function takes; `bound`: without its first argument.

        A function that `**kwargs` hand on to is asked in turn, `super()` along the line of the class that is made.
        """
        if thing.live is not None:
            return of_object(thing.live)
        node = thing.node
        role = role_of_function(node)
        if role == "property":
            raise Undecided("it is a property")
        frame = Frame(self.names.home(thing), None, node, tuple(line), complete, position, role == "staticmethod")
        extra: set[str] = set()
        for decorator in reversed(node.decorator_list):
            if role_of(decorator) is not None:
                continue
            words = keeps(self.names, decorator, Frame(frame.module))
            if words is None:
                raise Undecided(f"@{ast.unparse(decorator)[:60]} may change what it takes")
            extra |= words
        key = ("method", thing.key, tuple(t.path for t in line[:1]))
        self.names.enter(key)
        try:
            taken = Handed(self, frame).signature(bound and role != "staticmethod")
        finally:
            self.names.active.discard(key)
        names = {p.name for p in taken.parameters}
        more = tuple(Parameter(word, position=False) for word in sorted(extra - names))
        return replace(taken, parameters=taken.parameters + more)

    def dataclass_words(self, thing: Thing) -> dict[str, Any] | None:
        """Return the literal arguments of `@dataclass`; None: the class is no dataclass."""
        frame = Frame(self.names.home(thing))
        found = [d for d in thing.node.decorator_list if self.names.real_path(d, frame) == "dataclasses.dataclass"]
        return _literal_words(found[0]) if found else None

    # ---- generated constructors

    def of_fields(self, line: list[Thing]) -> Signature:
        """Return what the constructor takes that a dataclass gets."""
        fields: dict[str, Parameter] = {}
        for each in reversed(line):
            if each.live is not None or (words := self.dataclass_words(each)) is None:
                continue
            frame = Frame(self.names.home(each), scope=self.names.scope(each), line=(each,))
            keyword_only = words.get("kw_only") is True
            for statement in each.node.body:
                if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                    continue
                name, annotation = statement.target.id, statement.annotation
                written = ast.unparse(annotation).strip("'\"")
                head = written.partition("[")[0].rpartition(".")[2]
                if head == "ClassVar":
                    continue
                if head == "KW_ONLY":
                    keyword_only = True
                    continue
                if head == "InitVar":
                    annotation = annotation.slice if isinstance(annotation, ast.Subscript) else annotation
                made = self.of_field(statement, frame)
                if made is None:
                    fields.pop(name, None)
                    continue
                required, default, only = made
                only = keyword_only if only is None else only
                types = allowed(self.names, annotation, frame)
                fields[name] = Parameter(name, not only, True, required, default, types, ast.unparse(annotation))
        ordered = sorted(fields.values(), key=lambda p: not p.position)
        return Signature(tuple(ordered))

    def of_field(self, statement: ast.AnnAssign, frame: Frame) -> tuple[bool, object, bool | None] | None:
        """Whether a field is required, its default, and whether it is given by name only; None: not at all."""
        value = statement.value
        if value is None:
            return True, UNKNOWN, None
        if isinstance(value, ast.Call):
            path = self.names.real_path(value, Frame(frame.module))
            if path == "dataclasses.field":
                given = {word.arg: word.value for word in value.keywords}
                literal = _literal_words(value)
                if literal.get("init") is False:
                    return None
                only = literal.get("kw_only")
                if "default" in given:
                    return False, plain(self.names, given["default"], frame), only
                if None in given:
                    raise Undecided(f"the field `{ast.unparse(statement.target)}` takes more than is written")
                return "default_factory" not in given, UNKNOWN, only
            function = self.names.value(value.func, Frame(frame.module))
            if function.kind != "class":  # a function of its own may make a field
                raise Undecided(f"{function.path} makes one of its fields")
        return False, plain(self.names, value, frame), None


class Handed:
    """What one function takes, together with those that it hands `**kwargs` on to."""

    def __init__(self, signatures: Signatures, frame: Frame):
        assert frame.function is not None
        self.signatures, self.names = signatures, signatures.names
        self.frame, self.node = frame, frame.function

    def signature(self, bound: bool) -> Signature:
        own = self.own()
        if bound and own and own[0].position:
            own = own[1:]
        is_lightnings = self.frame.module.name.startswith("pytorch_lightning")  # whose constructors ignore arguments
        variadic = self.node.args.vararg is not None and not is_lightnings
        if self.node.args.kwarg is None:
            return Signature(tuple(own), variadic=variadic)
        uses = uses_of(self.node, self.node.args.kwarg.arg)
        more: dict[str, Parameter] = {}
        first: list[Parameter] = []
        rest: str | None = None
        words = set(uses.words)
        other = uses.other or ("looks up names that show only when it is run" if uses.dynamic else None)
        asked: list[tuple[Handed, Call]] = [(self, call) for call in uses.calls]
        passed = [(self, *item) for item in uses.passed]
        for attribute in uses.kept:
            for place, inside in self.later(attribute):
                asked += [(place, replace(call, certain=False)) for call in inside.calls]
                passed += [(place, *item) for item in inside.passed]
                words |= inside.words
                other = other or inside.other or ("looks up names that show later" if inside.dynamic else None)
            if not asked:
                other = other or f"keeps `{self.node.args.kwarg.arg}` for later"
        for where, call, place_ in passed:
            found = where.helper(call, place_)
            if found is None:
                other = other or f"hands `{self.node.args.kwarg.arg}` to `{ast.unparse(call.func)[:40]}`"
            else:
                words |= found
        for where, call_ in asked:
            try:
                taken, position = where.of_call(call_, sure=len(asked) == 1 and not uses.adds)
            except UNKNOWABLE as error:
                rest = rest or f"`{ast.unparse(call_.node.func)[:60]}`, which takes the others, is not known: {error}"
                continue
            rest = rest or taken.rest
            for parameter in taken.parameters:
                known = more.get(parameter.name)
                more[parameter.name] = parameter if known is None else _either(known, parameter)
            if position and where is self and len(asked) == 1:
                first = [p for p in taken.parameters if p.position]
                variadic = taken.variadic
        for word in sorted(words):
            known = more.get(word)
            more[word] = Parameter(word, position=False) if known is None else replace(known, required=False)
        taken_already = {p.name for p in own if p.keyword}
        handed = [p for p in more.values() if p.name not in taken_already and p.keyword]
        names = {p.name for p in first}
        ordered = [
            *(p for p in own if p.position),
            *(p for p in first if p.name not in taken_already),
            *(p for p in own if not p.position),
            *(replace(p, position=False) for p in handed if p.name not in names),
        ]
        if other is not None:
            rest = rest or f"{self.node.name} {other}"
        elif rest is None and not asked and not uses.refuses:
            rest = "it takes any other keyword and ignores it"
        return Signature(tuple(ordered), rest, variadic)

    def later(self, attribute: str) -> Iterator[tuple["Handed", Uses]]:
        """What the methods of the class do with `**kwargs` that have become an attribute."""
        for position, each in enumerate(self.frame.line):
            if each.live is not None:
                continue
            for node in each.node.body:
                if not isinstance(node, Functions) or (first := first_argument(node)) is None:
                    continue
                uses = uses_of(node, f"{first}.{attribute.rpartition('.')[2]}")
                frame = replace(self.frame, module=self.names.home(each), function=node, position=position)
                yield Handed(self.signatures, frame), uses

    def own(self) -> list[Parameter]:
        arguments = self.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
        made = []
        for number, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
            made.append(self.parameter(argument, default, True, number >= len(arguments.posonlyargs)))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            made.append(self.parameter(argument, default, False, True))
        return made

    def parameter(self, argument: ast.arg, default: ast.expr | None, position: bool, keyword_: bool) -> Parameter:
        frame = Frame(self.frame.module)
        return Parameter(
            argument.arg,
            position,
            keyword_,
            required=default is None,
            default=UNKNOWN if default is None else plain(self.names, default, frame),
            allowed=allowed(self.names, argument.annotation, frame),
            annotation=None if argument.annotation is None else _written(argument.annotation),
        )

    def of_call(self, call: Call, sure: bool) -> tuple[Signature, bool]:
        """What a call still takes by `**kwargs`, and whether also by position: our `*args` are handed on to it."""
        taken = self.callee(call.node.func)
        arguments = list(call.node.args)
        vararg = self.node.args.vararg
        open_end = False
        if arguments and isinstance(arguments[-1], ast.Starred) and vararg and is_it(arguments[-1].value, vararg.arg):
            arguments.pop()
            open_end = True
        if any(isinstance(argument, ast.Starred) for argument in arguments):
            sure = False
        given = len([argument for argument in arguments if not isinstance(argument, ast.Starred)])
        words = {word.arg for word in call.node.keywords if word.arg}
        sure = sure and call.certain and sum(word.arg is None for word in call.node.keywords) == 1
        left = [p for p in taken.parameters if p.position][given:]
        left += [p for p in taken.parameters if not p.position]
        kept = [
            replace(p, required=p.required and sure, position=p.position and open_end)
            for p in left
            if p.name not in words and (p.keyword or (p.position and open_end))
        ]
        return Signature(tuple(kept), taken.rest), open_end

    def callee(self, function: ast.expr) -> Signature:
        """What a called expression takes, without what Python gives it itself."""
        frame, names, signatures = self.frame, self.names, self.signatures
        match function:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                if not frame.line:
                    raise Undecided("its class is not known")
                if name == "__init__":
                    return signatures.constructor(frame.line[0], list(frame.line), frame.complete, frame.position + 1)
                try:
                    found = names.attribute(frame.line[0], name, frame.position + 1)
                except Absent:
                    if name == "__new__":
                        return Signature((Parameter("cls", keyword=False),))
                    raise
                return self.method(found, bound=name != "__new__")
            case ast.Name(id=name) if name == frame.first and self.role() in ("classmethod", "__new__"):
                return signatures.signature(frame.line[0])
            case ast.Attribute(value=ast.Name(id=name), attr="__class__") if name == frame.first:
                return signatures.signature(frame.line[0])
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == frame.first:
                return self.method(names.attribute(frame.line[0], attribute), bound=True)
        found = names.value(function, frame)
        if found.live is not None and found.live is object.__init__:
            return Signature((Parameter("self", keyword=False),))
        if found.kind == "function" and found.owner is not None:
            return self.method(
                found, bound=role_of_function(found.node) == "classmethod" if found.node is not None else False
            )
        return signatures.signature(found)

    def method(self, found: Thing, bound: bool) -> Signature:
        if found.kind != "function" or found.live is not None or found.owner is None:
            raise Undecided(f"`{found.name}` is no method written in Python")
        line, complete = self.names.line(found.owner)
        if self.frame.line and found.owner.path in {t.path for t in self.frame.line}:
            line, complete = list(self.frame.line), self.frame.complete
        position = next((n for n, each in enumerate(line) if found.path == f"{each.path}.{found.node.name}"), 0)
        return self.signatures.of_method(found, line, position, complete, bound)

    def role(self) -> str | None:
        return "__new__" if self.node.name == "__new__" else role_of_function(self.node)

    def helper(self, call: ast.Call, place: int | str) -> set[str] | None:
        """The literal names that a helper looks up in the mapping, if it does no more with it than that."""
        try:
            found = self.names.value(call.func, self.frame)
        except UNKNOWABLE:
            return None
        if found.kind != "function" or not isinstance(found.node, Functions) or found.node.decorator_list:
            return None
        arguments = found.node.args
        positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        if isinstance(place, int):
            if place >= len(positional) or any(isinstance(a, ast.Starred) for a in call.args[:place]):
                return None
            place = positional[place]
        uses = uses_of(found.node, place)
        if uses.other or uses.calls or uses.passed:
            return None
        return uses.words


def _either(one: Parameter, other: Parameter) -> Parameter:
    """A parameter that two functions have."""
    if one == other:
        return one
    same = one.default == other.default and type(one.default) is type(other.default)
    return replace(
        one,
        required=False,
        default=one.default if same else UNKNOWN,
        allowed=one.allowed if one.allowed == other.allowed else None,
    )


def _written(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value
    return ast.unparse(annotation)


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


def _literal_words(call: ast.expr) -> dict[str, Any]:
    """The keywords of a call that are literal."""
    if not isinstance(call, ast.Call):
        return {}
    return {w.arg: w.value.value for w in call.keywords if w.arg and isinstance(w.value, ast.Constant)}


def _makes_its_own(new: Functions) -> bool:
    """Whether a `__new__` may give an instance of its own class."""
    names = {node.func.id for node in ast.walk(new) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(names & {first_argument(new), "super"}) or any(
        isinstance(node, ast.Attribute) and node.attr == "__new__" for node in ast.walk(new)
    )
