"""Rules for the tests: the assertion of each is visible in its body, and the list of journeys has existing tests."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
FILES = sorted([*TESTS.rglob("test_*.py"), *TESTS.parent.glob("plugins/*/tests/**/test_*.py")])
ASSERTING = ("raises", "warns", "fail", "assert_array_equal", "assert_allclose")


def _asserts(function: ast.FunctionDef, path: Path) -> bool:
    """Return whether a test has an assertion, an expected exit `code`, a call of a function named `assert_…`, or a
    comment about the exception that would be raised."""
    for node in ast.walk(function):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        coded = isinstance(node, ast.keyword) and node.arg == "code"
        if isinstance(node, ast.Assert) or coded or name in ASSERTING or name.lstrip("_").startswith("assert_"):
            return True
    return "# raises " in (ast.get_source_segment(path.read_text(), function) or "").lower()


def test_every_test_names_what_it_asserts():
    """A helper that asserts is named `assert_…`; a test that only an exception can fail has a comment about it."""
    silent = [
        f"{path.name}::{function.name}"
        for path in FILES
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_")
        if not _asserts(function, path)
    ]
    assert silent == []


def test_the_list_of_journeys_names_what_is_there():
    """Each file and test is listed once, so that a renamed test does not leave its size unnoticed."""
    lines = [line.split("#")[0].strip() for line in (TESTS / "journeys.txt").read_text().splitlines()]
    tests = [line for line in lines if line]
    assert len(set(tests)) == len(tests)
    for test in tests:
        path, _, function = test.partition("::")
        assert not function or f"\ndef {function}(" in (TESTS.parent / path).read_text(), test
        assert (TESTS.parent / path).is_file(), test
