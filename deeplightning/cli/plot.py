"""The curves of a run in a terminal: a chart for each metric, of Braille dots, two by four in a character.

rich, which the project has, draws no charts. Piped or without Braille the same in plain characters.
"""

import itertools
import math
import os
import shutil
import sys
from collections.abc import Sequence

from deeplightning.faults import CheckpointError
from deeplightning.figures.curves import Chart, charts, is_logarithmic
from deeplightning.tracking.series import Series, read_series
from deeplightning.tracking.store import explain, locate
from deeplightning.words import printable

HEIGHT = 8
"""Lines of a chart."""

LEAST, MOST = 40, 100
"""Columns of a chart."""

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_COLOURS = {"train": "34", "val": "33", "": "35"}
_SIGNS = {"train": ".", "val": "o", "": "*"}
_WORDS = {"train": "train", "val": "val", "": ""}


def plot_run(run: str, tracking_uri: str | None) -> str:
    """The curves of a run of a store as text with line ends.

    Args:
        run: `runs:/ID`.

    Raises:
        CheckpointError: it has logged nothing that makes a curve.
        SetupError: the store cannot be asked.
    """
    store, run_id = locate(tracking_uri), run.removeprefix("runs:/")
    try:
        series = read_series(store, run_id)
    except Exception as error:  # MLflow, SQLAlchemy and the file system each have their own
        raise explain(error, store) from error
    stream = sys.stdout
    columns = shutil.get_terminal_size((80, 24)).columns if stream.isatty() else 80
    is_plain = "utf" not in (stream.encoding or "").lower()
    in_colour = stream.isatty() and not os.environ.get("NO_COLOR")
    text = plotted(series or {}, columns, in_colour, is_plain)
    if not text:
        raise CheckpointError(f"run {run_id}: there is no curve, since no metric has two points")
    return f"run {run_id}\n{text}"


def plotted(series: Series, columns: int = 80, in_colour: bool = False, is_plain: bool = False) -> str:
    """Charts below each other, two beside each other from 120 columns on; "": there is no curve.

    Args:
        is_plain: without Braille.
    """
    found = charts(series)
    beside = 2 if columns >= 120 else 1
    width = max(LEAST, min(MOST, (columns - 2 * (beside - 1)) // beside))
    drawn = [_chart(chart, width, in_colour, is_plain) for chart in found]
    rows = [drawn[start : start + beside] for start in range(0, len(drawn), beside)]
    return "\n".join("".join(f"{_beside(row, width)}\n" for row in zip(*rank, strict=True)) for rank in rows)


def _beside(parts: Sequence[tuple[str, int]], width: int) -> str:
    """Lines side by side; each comes with its length in columns, colours apart."""
    padded = [f"{text}{' ' * (width - length)}" for text, length in parts[:-1]]
    return "  ".join([*padded, parts[-1][0]]).rstrip()


def _chart(chart: Chart, width: int, in_colour: bool, is_plain: bool) -> list[tuple[str, int]]:
    """The lines of a chart, each with its length."""
    points = [point for curve in chart.curves.values() for point in curve]
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    is_log = is_logarithmic(chart.name, values)
    scale = math.log if is_log else float
    bottom, top = scale(low), scale(high)
    labels = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}
    margin = max(map(len, labels.values())) + 1
    room = width - margin - 1
    across, down = (1, 1) if is_plain else (2, 4)
    cells = [[(0, "")] * room for _ in range(HEIGHT)]

    def dot(x: int, y: int, stage: str) -> None:
        column, line = x // across, y // down
        bits = 1 if is_plain else _DOTS[y % down][x % across]
        before = cells[line][column][0]
        cells[line][column] = (before | bits, stage)

    for stage, curve in chart.curves.items():
        places = [
            (
                round((step - min(steps)) / max(1, max(steps) - min(steps)) * (room * across - 1)),
                round((top - scale(value)) / ((top - bottom) or 1) * (HEIGHT * down - 1)),
            )
            for step, value in curve
        ]
        along, is_dashed = 0, stage == "train" and len(chart.curves) > 1 and not (is_plain or in_colour)
        for (x, y), (next_x, next_y) in itertools.pairwise(places):
            length = max(abs(next_x - x), abs(next_y - y), 1)
            for part in range(length + 1):
                along += 1
                if is_dashed and along % 8 >= 4:
                    continue
                dot(x + round((next_x - x) * part / length), y + round((next_y - y) * part / length), stage)
    signs = _SIGNS if is_plain else {"train": "━" if in_colour else "╍", "val": "━", "": "━"}
    legend = [
        (" ".join(filter(None, (signs[stage], _WORDS[stage], f"{curve[-1][1]:.4g}"))), stage)
        for stage, curve in chart.curves.items()
    ]
    name = printable(chart.name)[: width // 3] + (" (log)" if is_log else "")
    head = f"{name}  {'  '.join(_coloured(words, stage, in_colour) for words, stage in legend)}"
    lines = [(head, len(name) + sum(2 + len(words) for words, _ in legend))]
    for number, row in enumerate(cells):
        drawn = "".join(_coloured(_sign(bits, stage, is_plain), stage, in_colour and bits > 0) for bits, stage in row)
        lines.append((f"{labels.get(number, ''):>{margin - 1}} {'|' if is_plain else '┤'}{drawn}", width))
    first, last = f"step {min(steps)}", str(max(steps))
    lines.append((f"{' ' * margin}{first}{last:>{max(1, width - margin - len(first))}}", width))
    return lines


def _sign(bits: int, stage: str, is_plain: bool) -> str:
    if not bits:
        return " "
    return _SIGNS[stage] if is_plain else chr(0x2800 + bits)


def _coloured(text: str, stage: str, in_colour: bool) -> str:
    return f"\x1b[{_COLOURS[stage]}m{text}\x1b[0m" if in_colour else text
