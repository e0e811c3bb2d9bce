"""The table of words of other systems, `words.tsv`."""

import re
from pathlib import Path

import reference_pages
from deeplightning_migrate import foreign_words
from test_words import habits, untrue

from deeplightning.checks.signature_check import Meanings
from deeplightning.config import other_tools

PAGES = Path(__file__).resolve().parents[3] / "docs" / "reference"


def test_each_row_of_the_table_is_true():
    """Our side of a row is a key of the schema, or an argument of what takes it; a class in a comment is there."""
    assert untrue(foreign_words.ROWS, Meanings()) == {}


def test_no_two_systems_give_a_word_two_meanings():
    """A word has one row, since a message cannot know which system it comes from."""
    words = [word for rows in foreign_words.SYSTEMS.values() for old in rows for word in old.split()]
    assert sorted(words) == sorted(set(words))


def test_check_gives_a_word_the_meaning_that_the_table_has():
    """Each word that `check` knows is in the table, with the same key."""
    meant = {word: other_tools.key_of(new) for word, new in foreign_words.ROWS.items()}
    assert {word: other_tools.key_of(new) for word, new in other_tools.ROWS.items()}.items() <= meant.items()


def test_the_manual_has_each_word():
    """The two pages have the rows of all systems; `.venv/bin/python tools/reference_pages.py` renews them."""
    names = ("words-of-frameworks", "words-of-older-systems")
    pages = [(PAGES / f"{name}.md").read_text() for name in names]
    assert pages == [reference_pages.renewed(name) for name in names]
    made = "".join(page.partition(reference_pages.START)[2] for page in pages)
    rows = re.findall(r"^\| (`.+`) \| (?:the same in )?(?:`[\w.-]+`|none: .+?)(?: .*)?\|$", made, re.MULTILINE)
    assert {word for old in rows for word in re.findall("`([^`]+)`", old)} == {
        word.lstrip("/") for word in foreign_words.ROWS
    }


def test_the_table_has_the_words_of_habits():
    """In 300 configs with the habits of other tools, at least 400 keys have a row with our key; the rest are values."""
    pairs = [pair for habit in habits() for pair in habit.answers.items()]
    right = [key for key, word in pairs if other_tools.key_of(foreign_words.ours(key) or "none:") == (word or None)]
    assert len(right) >= 400, {key for key, _ in pairs} - {*right}
