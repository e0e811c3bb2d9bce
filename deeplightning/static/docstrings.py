"""What docstrings say about parameters."""

import ast
import contextlib
import inspect
from collections.abc import Iterator

from deeplightning.static.bindings import Defined
from deeplightning.static.names import Names, Texts
from deeplightning.static.symbol import UNKNOWABLE, Frame, Functions, Thing


def docstrings(names: Names, thing: Thing) -> Iterator[str]:
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


def described(docstring: str, parameter: str) -> str | None:
    """What a docstring of Google's, NumPy's or Sphinx's kind says about a parameter."""
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
