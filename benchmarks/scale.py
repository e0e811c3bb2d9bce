"""Measure how cost grows with the size of the work: samples, runs, points, classes, trials, weights, clients, and more.

    .venv/bin/python benchmarks/scale.py

measures each row at five sizes in fresh processes, and prints Markdown with CPU seconds (or MiB) and two slopes in
log-log: of the figures as they are, and of their growth beyond the smallest size, which a long start cannot hide. A
growth of less than a tenth is `flat`. Ends with 1 when a slope is above its bound, or a growth above 1.2: the figures
of one round are not exact enough to ask for less. `--only runs points`
measures parts of it; `--full` takes the largest sizes, which need an hour, 24 GB of memory and 20 of disk. What fails
at a size is written in its place, with the larger sizes left out: it is what breaks first.
"""

import argparse
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import side_by_side
from scale_rows import ROWS, Place, Row

FLAT = 0.1
STEEP = 1.2
NOISE_MIB = 60.0


@dataclass
class Measured:
    """One figure at each size.

    Attributes:
        row: that it is of.
        values: by size; as many as could be had.
        failure: of the first size that failed.
    """

    row: Row
    name: str
    values: dict[int, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def slope(self) -> float | None:
        """Of the figures, by least squares over all sizes; None: too few."""
        return _slope([*self.values], [*self.values.values()])

    @property
    def growth(self) -> float | None:
        """Of what is more than at the smallest size, over the three largest sizes; 0: flat; None: too few."""
        sizes, values = [*self.values], [*self.values.values()]
        if len(sizes) < 4:
            return None
        more = [value - values[0] for value in values[-3:]]
        noise = NOISE_MIB if self.name.endswith("MiB") else self.row.noise
        if more[-1] < FLAT * values[0] or more[-1] < noise:
            return 0.0
        return _slope([size - sizes[0] for size in sizes[-3:]], [max(part, noise) for part in more])

    @property
    def kept(self) -> bool:
        if self.failure or self.slope is None or self.growth is None:
            return False
        return self.slope <= self.bound and (self.growth <= STEEP or self.bound < 1)

    @property
    def bound(self) -> float:
        """The steepest slope."""
        return self.row.bounds.get(self.name, self.row.bound)

    def cells(self, sizes: Sequence[int]) -> list[str]:
        growth = self.growth
        told = "" if growth is None else "flat" if growth == 0 else f"{growth:.2f}"
        shown = [_short(self.values[size]) if size in self.values else "" for size in sizes]
        if self.failure and len(self.values) < len(sizes):
            shown[len(self.values)] = self.failure
        slope = "" if self.slope is None else f"{self.slope:.2f}"
        return [self.name, *shown, slope, told, f"{self.bound:g}", "kept" if self.kept else "NOT kept"]


def _slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    if len(sizes) < 2 or min(values) <= 0:
        return None
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values]).slope


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def measure(row: Row, base: Path, full: bool, say: Callable[[str], None]) -> list[Measured]:
    """Measure all figures of a row at each of its sizes."""
    sizes = row.full if full else row.sizes
    found: dict[str, Measured] = {}
    place = Place(base / row.name)
    place.folder.mkdir(parents=True)
    for size in sizes:
        begun = time.monotonic()
        try:
            figures = row.measure(size, place)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            say(f"{row.name}, {size:,}: {error}")
            words = " ".join(str(error).split())[-120:]
            for measured in found.values():
                measured.failure = words
            break
        for name, value in figures.items():
            found.setdefault(name, Measured(row, name)).values[size] = value
        shown = ", ".join(f"{name} {_short(value)}" for name, value in figures.items())
        say(f"{row.name}, {size:,}: {shown} ({time.monotonic() - begun:.0f} s)")
    if stack := place.kept.get("stack"):
        stack.close()
    shutil.rmtree(place.folder, ignore_errors=True)
    return [*found.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], help="parts")
    parser.add_argument("--full", action="store_true", help="the largest sizes")
    parser.add_argument("--place", type=Path, help="a folder on a large disk (default: a temporary one)")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    print(f"{time.strftime('%d %B %Y')}, {os.cpu_count()} cores, Python {platform.python_version()}, one thread.")
    broken: list[str] = []
    with tempfile.TemporaryDirectory(dir=options.place) as name:
        for row in rows:
            found = measure(row, Path(name), options.full, lambda text: print(text, file=sys.stderr, flush=True))
            sizes = row.full if options.full else row.sizes
            head = [row.unit, *(f"{size:,}" for size in sizes), "slope", "of the growth", "bound", ""]
            print(f"\n## {row.title}\n\n{row.note}\n", flush=True)
            print(side_by_side.table(head, [measured.cells(sizes) for measured in found]), flush=True)
            broken += [f"{row.name}: {measured.name}" for measured in found if not measured.kept]
    if broken:
        print(f"\nNot kept: {'; '.join(broken)}.", flush=True)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
