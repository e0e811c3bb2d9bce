"""Each docstring of a function begins with a verb in the imperative."""

import ast
import re

from test_surface import ROOT, sources

VERBS = frozenset((ROOT / "tests" / "verbs.txt").read_text().split())


def first_words(text: str) -> list[str]:
    """Return the first word of each function's docstring in lower case, without properties."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    functions = [f for f in functions if not any("property" in ast.unparse(each) for each in f.decorator_list)]
    docstrings = map(ast.get_docstring, functions)
    return [re.split(r"[^\w'-]", text.strip(), maxsplit=1)[0].lower() for text in docstrings if text]


def test_docstrings_begin_with_a_verb():
    """`tests/verbs.txt` lists the verbs; a property is read like an attribute, and has a noun phrase."""
    functions = ['def f():\n    """The one."""', '@property\ndef f():\n    """The one."""', "def f(): pass"]
    assert [*map(first_words, functions)] == [["the"], [], []]
    words = {path: set(first_words(path.read_text())) - VERBS for path in sources()}
    assert {path: others for path, others in words.items() if others} == {}
