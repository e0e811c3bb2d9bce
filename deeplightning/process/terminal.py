"""What a stream can show: whether it is a terminal, in colour, and how wide. Text is styled and broken accordingly.

`say` prints: what a store, a run, a bundle or a data file holds reaches stdout and stderr only through it.
"""

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TextIO

from deeplightning.words import printable

LAYOUT = "\n\t"
"""What lines of ours keep, of the characters that could steer a terminal."""


def say(text: object, err: bool = False, nl: bool = True) -> None:
    """Prints lines whose words may come from anywhere, with escapes for what could steer a terminal.

    Args:
        err: on stderr.
        nl: with a line end.
    """
    stream = sys.stderr if err else sys.stdout
    print(printable(str(text), LAYOUT), end="\n" * nl, file=stream, flush=True)


def say_path(path: Path, label: str = "") -> None:
    """Prints a path that another program may read: without escapes into a file or pipe, as `ls` does, unless it has
    control characters."""
    text = str(path)
    is_safe = not sys.stdout.isatty() and re.search(r"[\x00-\x1f\x7f-\x9f]", text) is None
    print(label + (text if is_safe else printable(text)), flush=True)  # noqa: T201


def is_interactive(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colour, and the user has not refused it (https://no-color.org)."""
    return is_interactive(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, code: int, stream: TextIO) -> str:
    """Text with an ANSI style, such as 31 for red, where the stream shows colour."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colour(stream) else text


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, indent: int) -> str:
    """A line broken between words for the terminal, further lines indented; one with a word that is too long for that,
    such as a path, stays whole: a terminal breaks it so that it can be copied."""
    columns = width() - 1
    if any(len(word) > columns - indent for word in text.split(" ")):
        return text
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
