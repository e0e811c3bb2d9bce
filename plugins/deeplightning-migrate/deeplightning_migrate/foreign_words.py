"""Read `words.tsv`: what keys of other systems are called here, for the conversion and for the manual.

A line has a system, its words and ours, with the signs that `deeplightning.config.other_tools` explains. `check` knows
the commonest of these words, which are there.
"""

from pathlib import Path

from deeplightning.config import other_tools

SYSTEMS: dict[str, dict[str, str]] = {}
"""Our word by the words of a system, which spaces separate; by system."""
ROWS: dict[str, str] = {}
"""Our word by each word of any system."""

for _line in Path(__file__).with_name("words.tsv").read_text(encoding="utf-8").splitlines():
    _system, _words, _ours = _line.split("\t")
    SYSTEMS.setdefault(_system, {})[_words] = _ours
    ROWS |= other_tools.by_old_word({_ours: _words})


def ours(key: str) -> str | None:
    """Return what a dotted key of another system is called here, as `other_tools.ours` does."""
    return other_tools.ours(key, rows=ROWS)
