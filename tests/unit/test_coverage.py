"""The page of what is shown by which test is whole and as new as its table: `coverage_page`."""

import re
from collections import Counter

import pytest
from coverage_page import PLUGINS, TABLE, TESTS, faults, functions, page, read

PAGE = TESTS / "coverage.md"


def test_every_row_has_a_test_that_is_there_or_a_reason():
    """The tests that a row names exist by file and name; what has none says why; no id stands twice."""
    assert list(faults(read(TABLE.read_text()), functions(TESTS, PLUGINS))) == []


def test_no_row_is_left_out():
    """So many ids has each of the five systems, counted through but for one, and so many combinations there are."""
    names = [name for row in read(TABLE.read_text()).rows for name in row.ids]
    systems = Counter(re.sub(r"-?\d.*", "", name) for name in names)
    assert systems == {"DL": 93, "ST": 62, "RS": 38, "BO": 33, "UT": 38, "C": 17, "N": 11, "": 22}
    for system, last in {"DL": 93, "ST": 63, "RS": 35, "BO": 33, "UT": 38}.items():
        assert {f"{system}-{number:02}" for number in range(1, last + 1)} - set(names) <= {"ST-22"}


def test_the_page_is_that_of_the_table():
    """`.venv/bin/python tests/coverage_page.py tests/coverage.md` renews it."""
    assert PAGE.read_text() == page(read(TABLE.read_text()))


KNOWN = {"test_a.py::test_one", "test_gpu.py::test_two"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("== A\nX-1 | w | test_a.py::test_two |", "line 2, X-1: there is no test test_a.py::test_two"),
        ("== A\nX-1 | w | test_b.py::test_one |", "there is no test test_b.py::test_one"),
        ("== A\nX-1 | w | |", "no test, and no reason that begins with `later:` or `missing:`"),
        ("== A\nX-1 | w | | because", "no test, and no reason"),
        ("== A\nX-1 | w | | gpu: it is fast", "no test, and no reason"),
        ("== A\nX-1 | w | | missing:", "missing, without a reason"),
        ("== A\nX-1 | w | test_gpu.py::test_two |", "only tests that need a GPU"),
        ("== A\nX-1, X-2 | w | test_a.py::test_one |\nX-2 | w | test_a.py::test_one |", "X-2 stands in 2 rows"),
        ("X-1 | w | test_a.py::test_one |", "no words, or no section"),
        ("== A\nX-1 | w | test_a.py::test_one", "line 2: 3 parts between |, 4 expected"),
    ],
)
def test_what_is_wrong_with_the_table_is_told(text, words):
    """With its line; a right row has no fault."""
    (fault,) = faults(read(text), KNOWN)
    assert words in fault
    assert list(faults(read("== A\nX-1 | w | test_a.py::test_one | gpu: the rest\nX-2 | w | | later: x"), KNOWN)) == []
