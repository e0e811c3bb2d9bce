"""What a stream can show: whether it is a terminal, in colour, and how wide. Text is styled and broken accordingly."""

import os
import shutil
import textwrap
from typing import TextIO


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
