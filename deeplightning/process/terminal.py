"""What a stream can show (terminal, colour, width), and text styled and wrapped accordingly.

Text from a store, a run, a bundle or a data file reaches stdout and stderr only through `say`, or through a log that
escapes them likewise, so that its control characters cannot steer a terminal.
"""

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from deeplightning.words import printable

LAYOUT = "\n\t"
"""Control characters that printed text keeps."""
MAX_ROWS = 30
"""Maximum number of table rows printed."""


def say(text: object, err: bool = False, nl: bool = True) -> None:
    """Print text of any origin, with control characters that could steer a terminal escaped; `nl`: end the line."""
    stream = sys.stderr if err else sys.stdout
    print(printable(str(text), LAYOUT), end="\n" * nl, file=stream, flush=True)


def escape_warnings() -> None:
    """Escape control characters in the warnings of a process that has not configured logging."""
    import logging  # imported lazily: `--help` does not need it

    class Printable(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return printable(super().format(record), LAYOUT)

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Printable())


def say_path(path: Path, label: str = "") -> None:
    """Print a path that another program may read: into a file or pipe it is not escaped, as with `ls`, unless it has
    control characters."""
    text = str(path)
    is_safe = not sys.stdout.isatty() and re.search(r"[\x00-\x1f\x7f-\x9f]", text) is None
    print(label + (text if is_safe else printable(text)), flush=True)  # noqa: T201


def is_interactive(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with colour that the user has not disabled (https://no-color.org)."""
    return is_interactive(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, code: int, stream: TextIO) -> str:
    """Return text with an ANSI style, such as 31 for red, if the stream shows colour."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colour(stream) else text


def width() -> int:
    """Return the number of columns of the terminal."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, indent: int) -> str:
    """Wrap a line at spaces to the width of the terminal, and indent continuation lines. A line that contains a longer
    word, such as a path, is not wrapped, so that it can be copied."""
    columns = width() - 1
    if any(len(word) > columns - indent for word in text.split(" ")):
        return text
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def show(text: str, indent: int | None = None) -> None:
    """Print YAML; a terminal gets colours and wrapped lines.

    Args:
        indent: columns by which continuation lines are indented; None to leave lines whole, so they can be copied.
    """
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.syntax import Syntax

        if indent is not None:
            text = "\n".join(wrapped(row, indent) for row in text.splitlines())
        text = printable(text.rstrip("\n"), LAYOUT)
        Console().print(Syntax(text, "yaml", background_color="default"), soft_wrap=True)
    else:
        say(text, nl=False)


def in_columns(table: Sequence[Sequence[str]], file: str) -> str:
    """Return a table with aligned columns and at most `MAX_ROWS` rows; `file` contains the remaining ones."""
    left_out = len(table) - 1 - MAX_ROWS
    shown = [[printable(cell) for cell in row] for row in table[: MAX_ROWS + 1]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(table[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return "\n".join(lines + ([f"… and {left_out} more, in {file}"] if left_out > 0 else []))


def number(value: float, like: float | None = None) -> str:
    """Format a number with the decimals that three significant digits of `like` need (default: of the number)."""
    size = abs(value if like is None else like)
    if not math.isfinite(value):
        return "-"
    if not size or not math.isfinite(size):
        return f"{value:.4g}"
    decimals = 2 - math.floor(math.log10(size))
    return f"{value:.{max(0, decimals)}f}" if decimals <= 8 else f"{value:.3g}"
