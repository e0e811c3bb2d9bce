"""Read `words.tsv`: the keys here for those of other systems, for the conversion and for the manual.

A line has a system, its keys and our key, in the notation that `deeplightning.config.other_tools` explains. That module
has the most common of these keys, for `check`.
"""

from pathlib import Path

from deeplightning.config import other_tools

SYSTEMS: dict[str, dict[str, str]] = {}
"""Our key by the keys of a system, separated by spaces; by system."""
ROWS: dict[str, str] = {}
"""Our key by each key of any system."""

for _line in Path(__file__).with_name("words.tsv").read_text(encoding="utf-8").splitlines():
    _system, _words, _ours = _line.split("\t")
    SYSTEMS.setdefault(_system, {})[_words] = _ours
    ROWS |= other_tools.by_old_word({_ours: _words})


def ours(key: str) -> str | None:
    """Return our key for a dotted key of another system, as `other_tools.ours` does."""
    return other_tools.ours(key, rows=ROWS)
