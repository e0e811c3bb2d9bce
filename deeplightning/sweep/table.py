"""Format a table of runs in columns, for a terminal."""

import math
from collections.abc import Sequence

from deeplightning.words import printable

MOST_ROWS = 30

RUNS_FILE = "runs.csv"
"""Table with a row for each run that `train --seeds` and `train --multirun` write to their folder."""


def text(table: Sequence[Sequence[str]], file: str) -> str:
    """Format a table in columns.

    Args:
        file: the one that has the rows that are left out here.
    """
    left_out = len(table) - 1 - MOST_ROWS
    shown = [[printable(cell) for cell in row] for row in table[: MOST_ROWS + 1]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(table[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return "\n".join(lines + ([f"… and {left_out} more, in {file}"] if left_out > 0 else []))


def number(value: float, like: float | None = None) -> str:
    """Format a number with as many decimals as three significant digits of `like` have (default: of itself)."""
    size = abs(value if like is None else like)
    if not math.isfinite(value):
        return "-"
    if not size or not math.isfinite(size):
        return f"{value:.4g}"
    decimals = 2 - math.floor(math.log10(size))
    return f"{value:.{max(0, decimals)}f}" if decimals <= 8 else f"{value:.3g}"
