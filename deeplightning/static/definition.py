"""What a dotted name means, and what it takes, found in source text: nothing of the target is imported.

`look_up` follows a name through re-exports to its class or function; `Definition` answers what `check` and `explain`
ask of it. What only running the code would tell is `Undecided`, never guessed. `target` does the same by importing,
and says what is missing in the same words.

`bindings` reads one file, `names` follows names through files, `signatures` asks what things take.
"""

import ast
import contextlib
import inspect
import keyword
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deeplightning import own_code
from deeplightning.faults import Missing, nearest, no_module, refuse_moved
from deeplightning.static.annotations import instance, returned
from deeplightning.static.bindings import Broken, Defined, Module, contains_word
from deeplightning.static.from_source import Signatures
from deeplightning.static.names import Names, Texts
from deeplightning.static.signature import Instance, Signature, Undecided
from deeplightning.static.symbol import UNKNOWABLE, Absent, Failing, Frame, Functions, Kind, Lacking, Thing
from deeplightning.static.task_source import TaskSource


def look_up(name: str, names: Names | None = None) -> "Definition":
    """Return what a dotted name means.

    Args:
        names: what earlier look-ups have found, which need not be found again.

    Raises:
        ValueError: there is certainly nothing of this name, in the words of `target.find`; `Missing` where a package
            is not installed that it needs.
        Undecided: that cannot be known without importing.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(p.isidentifier() and not keyword.iskeyword(p) for p in parts):
        raise ValueError(f"`{name}` is no MODULE.NAME such as torch.optim.SGD.")
    refuse_moved(name)
    names = names or Names()
    try:
        thing = _find(parts, names)
    except RecursionError:
        raise Undecided("its source is nested too deeply") from None
    except (Failing, Broken) as error:
        words = f"failed: {error}" if isinstance(error, Broken) else str(error)
        kind = Missing if isinstance(error, Lacking) else ValueError
        raise kind(f"importing {'.'.join(parts[:-1])} (for `{name}`) {words}") from None
    return Definition(name, thing.path, thing.kind, thing.file, thing, names)


def _find(parts: list[str], names: Names) -> Thing:
    name = ".".join(parts)
    module, depth = None, 0
    for depth in range(min(len(parts) - 1, 50), 0, -1):
        module = names.module(own_code.full_name(".".join(parts[:depth])))
        if module is not None:
            break
    if module is None:
        known = [m.name for m in pkgutil.iter_modules()] if len(parts[0]) > 2 else []
        raise no_module(parts[0], name, known, own_code.roots())
    read = own_code.read_from(name, str(module.file) if module.file else None)
    thing = Thing("module", module, "")
    for part in parts[depth:]:
        try:
            thing = names.member(thing, part)
        except Undecided:
            # What has something behind it is a module or class. A module is a file: where one of nearly this name lies,
            # and this name is written nowhere in the package's own file, it is that one misspelt.
            if depth == len(parts) - 1 or thing.kind != "module" or not _is_misspelt(part, thing.module):
                raise
            owner = ".".join(parts[:depth])
            assert thing.module is not None
            near = nearest(part, thing.module.submodules()).replace("mean ", f"mean {owner}.", 1)
            raise ValueError(f"{owner} has no `{part}`.{near}{read}") from None
        except Absent as absent:
            if absent.name != part:
                raise Undecided(f"{absent.name} cannot be found where it is imported from") from None
            owner = ".".join(parts[:depth])
            public = [n for n in absent.known if not n.startswith("_")]
            # The last part is something to call, and no module.
            modules = thing.module.submodules() if thing.kind == "module" and thing.module else []
            things = [n for n in public if n not in modules] if depth == len(parts) - 1 else []
            near = (nearest(part, things) or nearest(part, public)).replace("mean ", f"mean {owner}.", 1)
            raise ValueError(f"{owner} has no `{part}`.{near}{read}") from None
        depth += 1
    return thing


def _is_misspelt(part: str, owner: Module | None) -> bool:
    if owner is None or not owner.folders or part.startswith("_"):
        return False
    near = nearest(part, [n for n in owner.submodules() if not n.startswith("_")])
    return bool(near) and not contains_word(owner.text, part)


@dataclass(eq=False)
class Definition(TaskSource):
    """What a dotted name means.

    Attributes:
        name: as it was asked.
        path: where it is really defined, `torch.optim.sgd.SGD` of torch.optim.SGD.
        kind: "value" is anything that is no class, function or module.
        file: where its source is, if it has any.
    """

    name: str
    path: str
    kind: Kind
    file: Path | None
    _thing: Thing = field(repr=False)
    _names: Names = field(repr=False)

    def bases(self) -> tuple[list[str], bool]:
        """Return the real paths of itself and its ancestors in Python's order, without `object`; False where an
        ancestor cannot be followed, so that there may be more."""
        if self.kind != "class":
            return [self.path], True
        line, complete = self._names.line(self._thing)
        return [thing.path for thing in line], complete

    def makes(self) -> list[Instance]:
        """Return what calling it gives: an instance of the class, or of each class that a function's annotation names.

        Raises:
            Undecided: that cannot be known without calling it.
        """
        if self.kind == "class":
            return [instance(self._names, self._thing)]
        made = self._names.guarded(lambda: returned(self._names, self._thing))
        return [instance(self._names, thing) for thing in made]

    def signature(self) -> Signature:
        """Return what may be given to it; of classes and of methods that are called on their class, without `self`.

        Raises:
            Undecided: that cannot be known without importing.
        """
        if self.kind == "module" or (self.kind == "value"):
            raise Undecided(f"it is a {self.kind}")
        return self._names.guarded(lambda: Signatures(self._names).signature(self._thing))

    def documentation(self, parameter: str) -> str | None:
        """Return what a docstring says about a parameter: its own, or the ancestor's that takes it."""
        for text in _docstrings(self._names, self._thing):
            found = _described(text, parameter)
            if found:
                return found
        return None

    def defines(self, name: str, outside: str | None = None) -> bool:
        """Return whether a class, or an ancestor whose source is known, defines a name.

        Args:
            outside: a package whose classes do not count.
        """
        line = self._names.line(self._thing)[0] if self.kind == "class" else []
        counted = (each for each in line if outside is None or not each.path.startswith(f"{outside}."))
        return any(self._names.own(each, name) for each in counted)


def _docstrings(names: Names, thing: Thing) -> Iterator[str]:
    """Yield the docstrings that may describe a parameter: its own, those of ancestors and of constructors."""
    if thing.live is not None:
        yield getattr(thing.live, "__doc__", None) or ""
        return
    things = [thing]
    if thing.kind == "class":
        things = [t for t in names.line(thing)[0] if t.live is None]
    for each in things:
        if each.module is not None:
            for value in each.module.scope.documents.get(each.name, ()):
                with contextlib.suppress(*UNKNOWABLE):
                    (text,) = Texts(names, Frame(each.module)).of(value)
                    yield inspect.cleandoc(text)
        if isinstance(each.node, ast.ClassDef | Functions):
            yield ast.get_docstring(each.node) or ""
        if each.kind == "class" and names.own(each, "__init__"):
            for option in names.scope(each).names["__init__"]:
                if isinstance(option, Defined):
                    yield ast.get_docstring(option.node) or ""


def _described(docstring: str, parameter: str) -> str | None:
    """Return what a docstring of Google's, NumPy's or Sphinx's kind says about a parameter."""
    if parameter not in docstring:
        return None
    import logging

    import griffe  # 0.04 CPU seconds, needed by `explain` alone

    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    for style in ("google", "numpy", "sphinx"):
        for section in griffe.Docstring(docstring).parse(style):
            if section.kind.value not in ("parameters", "other parameters", "attributes"):
                continue
            for item in section.value:
                names = [name.strip("*` ") for name in item.name.split(",")]
                if parameter in names and item.description:
                    return " ".join(item.description.split())
    return None
