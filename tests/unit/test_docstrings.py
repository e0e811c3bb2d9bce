"""Docstrings say what functions do: the first word of each is a verb in the imperative."""

import ast
import re

import pytest
from test_surface import ROOT, sources

VERBS = frozenset((ROOT / "tests" / "verbs.txt").read_text().split())


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read like an attribute, whose docstring is a noun phrase."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def first_words(text: str) -> list[str]:
    """Return the first word of each docstring of a function, in lower case, but for those of properties."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    docstrings = [ast.get_docstring(function) for function in functions if not is_property(function)]
    return [re.split(r"[^\w'-]", text.strip(), maxsplit=1)[0].lower() for text in docstrings if text]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('def f():\n    """Return one."""', ["return"]),
        ('def f():\n    """The one."""', ["the"]),
        ('@property\ndef f():\n    """The one."""', []),
        ('async def f():\n    """\n    Raises:\n        ValueError: always.\n    """', ["raises"]),
        ("def f(): pass", []),
    ],
)
def test_the_first_word_is_found(text, words):
    assert first_words(text) == words


def test_docstrings_begin_with_a_verb():
    """`tests/verbs.txt` has the verbs."""
    words = {path: set(first_words(path.read_text())) - VERBS for path in sources()}
    assert {path: others for path, others in words.items() if others} == {}
