"""The architecture page shows the current imports, and every file that it names exists."""

import re

import architecture_page
import pytest
from architecture_page import PAGE, PICTURE
from test_layers import ROOT

TEXT = PAGE.read_text()


def test_the_picture_is_that_of_the_imports():
    """The import graph on the page is up to date; `python tests/architecture_page.py` regenerates it."""
    assert architecture_page.renewed(TEXT) == TEXT
    assert architecture_page.picture() == PICTURE.read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)*\w+\.(?:py|sh))`", TEXT))))
def test_each_file_that_it_names_is_there(name):
    """Paths on the page are relative to the repository root."""
    assert (ROOT / name).is_file()
