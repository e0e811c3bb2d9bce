"""The capability coverage page is complete and agrees with its table: `coverage_page`."""

import re
from collections import Counter

from coverage_page import PLUGINS, TABLE, TESTS, faults, functions, page, read

PAGE = TESTS / "coverage.md"


def test_every_row_has_a_test_that_is_there_or_a_reason():
    """Each row names existing tests or a reason for having none, and no id occurs twice."""
    assert list(faults(read(TABLE.read_text()), functions(TESTS, PLUGINS))) == []


def test_no_row_is_left_out():
    """The ids of each of the five older systems are complete but for one, and so are the combinations."""
    names = [name for row in read(TABLE.read_text()).rows for name in row.ids]
    systems = Counter(re.sub(r"-?\d.*", "", name) for name in names)
    assert systems == {"DL": 93, "ST": 62, "RS": 38, "BO": 33, "UT": 38, "C": 17, "N": 11, "": 22}
    for system, last in {"DL": 93, "ST": 63, "RS": 35, "BO": 33, "UT": 38}.items():
        assert {f"{system}-{number:02}" for number in range(1, last + 1)} - set(names) <= {"ST-22"}


def test_the_page_is_that_of_the_table():
    """The page is up to date; `.venv/bin/python tests/coverage_page.py tests/coverage.md` regenerates it."""
    assert PAGE.read_text() == page(read(TABLE.read_text()))
