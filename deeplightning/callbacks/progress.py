"""What a terminal shows while a run trains: a bar, and a table with a row for each epoch.

Plain numbers go in, lines of text come out; nothing here knows a Trainer. rich is imported when a bar is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

MIN_BAR = 10  # columns of the bar itself; where there are fewer, the numbers move to a second line
MAX_BAR = 80
GAP = "  "  # between two numbers, and between two columns of the table
BEST = "*"
"""Marks the rows of the table whose epoch was the best so far."""


def number(value: float) -> str:
    """A metric in at most ten characters: four decimals, or an exponent where these would show nothing or too much."""
    return f"{value:.4f}" if value != value or value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def rate(value: float) -> str:
    """A speed: decimals only where they count."""
    return f"{value:,.{0 if value >= 10 else 2}f}"


def clock(seconds: float) -> str:
    """`0:12`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ---- the bar


@dataclass
class Bar:
    """The state of an epoch, which rich draws on one line, or on two where one is too narrow.

    Attributes:
        epoch: from 1 on.
        epochs: in all; None: not known.
        step: batches of the epoch that are done.
        steps: batches of the epoch; None: not known.
        steps_per_second, samples_per_second: of training alone; of all processes. 0: not known yet.
        left: seconds to the end of training; None: not known.
        values: names and values of loss and monitored metric.
        validates: whether a validation runs now.
    """

    epoch: int = 1
    epochs: int | None = None
    step: int = 0
    steps: int | None = None
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    left: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    validates: bool = False

    def parts(self) -> tuple[str, str, list[str]]:
        """The text before the bar, the text behind it, and the numbers."""
        epoch = f"epoch {self.epoch}" + (f"/{self.epochs}" if self.epochs else "")
        step = f"{self.step}/{self.steps}" if self.steps else f"step {self.step}"
        left = "validating" if self.validates else f"{clock(self.left)} left" if self.left is not None else ""
        speeds = {"it/s": self.steps_per_second, "samples/s": self.samples_per_second}
        numbers = [f"{rate(speed)} {unit}" for unit, speed in speeds.items() if speed > 0]
        numbers += [f"{name} {number(value)}" for name, value in self.values.items()]
        return epoch, GAP.join(part for part in (step, left) if part), numbers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        before, behind, numbers = self.parts()
        # The last column stays free: some terminals break the line behind a character there.
        room = options.max_width - 1 - len(before) - len(behind) - 2
        inline = GAP + GAP.join(numbers) if numbers else ""
        is_one_line = room - len(inline) >= MIN_BAR
        bar = ProgressBar(
            total=self.steps,
            completed=self.step,
            width=min(max(room - len(inline) * is_one_line, 1), MAX_BAR),
            pulse=self.steps is None,
        )
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_row(Text(before), bar, Text(behind + inline * is_one_line, no_wrap=True))
        yield grid
        if numbers and not is_one_line:
            below = Text(" " * (len(before) + 1) + GAP.join(numbers))
            below.truncate(options.max_width - 1, overflow="ellipsis")
            yield below


# ---- the table of epochs


class EpochTable:
    """A table whose columns keep their places from epoch to epoch. The header is printed again where metrics join.

    Args:
        epochs: in all; None: not known.
        first: metrics that are shown before others where the terminal is too narrow for all.
    """

    def __init__(self, epochs: int | None, first: Sequence[str] = ()):
        self.epochs, self.first = epochs, first
        self.names: list[str] = []
        self.has_best = False  # whether a row has been marked
        self._shown: list[str] = []

    def rows(
        self, epoch: int, values: Mapping[str, float], seconds: float, speed: float, is_best: bool, columns: int
    ) -> list[str]:
        """The row of an epoch, behind the header where that is due.

        Args:
            epoch: from 1 on.
            values: metrics by name.
            seconds: that the epoch took.
            speed: samples a second; 0: not known.
            columns: of the terminal.
        """
        lines = []
        self.has_best |= is_best
        if not set(values) <= set(self.names):
            self.names = sorted({*self.names, *values})
            self._shown = self._fitting(columns)
            hidden = " …" if len(self._shown) < len(self.names) else ""
            cells = [f"{name:>{self._width(name)}}" for name in self._shown]
            lines.append(self._row("epoch", cells, "time", "samples/s", "").rstrip() + hidden)
        cells = [f"{number(values[n]) if n in values else '':>{self._width(n)}}" for n in self._shown]
        of = f"{epoch}/{self.epochs}" if self.epochs else str(epoch)
        took = f"{seconds:.1f} s" if seconds < 100 else clock(seconds)
        row = self._row(of, cells, took, rate(speed) if speed > 0 else "", BEST if is_best else "")
        return [*lines, row.rstrip()]

    def _row(self, epoch: str, cells: Sequence[str], seconds: str, speed: str, mark: str) -> str:
        first = max(5, 2 * len(str(self.epochs or "")) + 1)
        return GAP.join([f"{epoch:>{first}}", *cells, f"{seconds:>7}", f"{speed:>9}"]) + f" {mark}"

    def _width(self, name: str) -> int:
        return max(len(name), 8)

    def _fitting(self, columns: int) -> list[str]:
        """The metrics that have room; the order is that of their names."""
        room = columns - len(self._row("", [], "", "", BEST)) - len(" …")
        chosen: list[str] = []
        for name in sorted(self.names, key=lambda n: (self._place(n), n)):
            if (room := room - self._width(name) - len(GAP)) < 0:
                break
            chosen.append(name)
        return sorted(chosen)

    def _place(self, name: str) -> int:
        return self.first.index(name) if name in self.first else len(self.first)


def live(bar: Bar) -> Any:
    """Draws a bar at the bottom of the terminal, below what else is printed; `start`, `refresh` and `stop` it."""
    from rich.console import Console
    from rich.live import Live

    return Live(bar, console=Console(file=sys.stdout, highlight=False), auto_refresh=False, transient=True)
