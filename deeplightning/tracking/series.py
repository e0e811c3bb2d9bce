"""The series of a run's metrics, read from its store or from the file that the run leaves, and compared point by point.

A series is a list of (step, value), in the order of the steps. Times, speeds and the load of the machine are left out:
no run repeats them; so is Lightning's `epoch`, which is no metric. Metrics of a test stand at step 0, whatever step an
earlier version gave them. No torch, no numpy.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from deeplightning.tracking.open import open_tracker
from deeplightning.tracking.store import Store
from deeplightning.tracking.tracker import EPOCH, SYSTEM, Point, is_of_test

Series = dict[str, list[tuple[int, float]]]
"""By the metric's name."""

MAX_POINTS = 200_000
"""Points that a run's file holds; more are in the store only."""

_FLEETING = re.compile(
    rf"{SYSTEM}|(^|.*[_/])(time|duration|seconds|secs|ms|eta|throughput|speed|fps|memory|mem)(_.*)?$|.*(_per_|/)s(ec(ond)?)?$"
)


def is_repeatable(name: str) -> bool:
    """Whether a metric can be the same in another run: it is no time, speed or load."""
    return not _FLEETING.match(name)


def series_in(points: Iterable[Point]) -> Series:
    """Points as they come from a store."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for name, value, moment, step in points:
        if is_repeatable(name) and name != EPOCH:
            found.setdefault(name, []).append((_step(name, step), moment, value))
    return {name: [(step, value) for step, _, value in sorted(found[name])] for name in sorted(found)}


def read_series(store: Store, run_id: str) -> Series | None:
    """The series of a run; None: the store does not have it.

    Raises:
        Exception: the store's own, where it cannot be asked.
    """
    if store.database is not None and not store.database.exists():
        return None
    tracker = open_tracker(store, run_id)
    try:
        return series_in(tracker.history(run_id)) if tracker.run(run_id) is not None else None
    finally:
        tracker.close()


def to_text(series: Series) -> str:
    """JSON, a line for each metric; NaN and infinities in words."""
    lines = [f"{json.dumps(name)}: {json.dumps([[s, _word(v)] for s, v in series[name]])}" for name in series]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_file(path: Path) -> Series:
    """What `to_text` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        read = json.loads(path.read_text())
        return {
            str(name): [(_step(name, int(s)), float(v)) for s, v in points]
            for name, points in read.items()
            if name != EPOCH
        }
    except (OSError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def _step(name: str, step: int) -> int:
    return 0 if is_of_test(name) else step


def _word(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


class Apart(NamedTuple):
    """Where two series part.

    Attributes:
        name: of the metric.
        step: of the first point that differs.
        one, two: its value in the first and the second; None: there is none.
    """

    name: str
    step: int
    one: float | None
    two: float | None

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {_shown(self.one)} → {_shown(self.two)}"


def parted(one: Series, two: Series) -> list[Apart]:
    """Of each metric that differs, the first point that does; the earliest of all first."""
    found = []
    for name in {*one, *two}:
        first, second = one.get(name, []), two.get(name, [])
        place = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if not _same(a, b)), None)
        if place is None and len(first) != len(second):
            place = min(len(first), len(second))
        if place is None:
            continue
        a, b = (series[place] if place < len(series) else None for series in (first, second))
        step = min(point[0] for point in (a, b) if point is not None)
        values = (point[1] if point is not None and point[0] == step else None for point in (a, b))
        found.append(Apart(name, step, *values))
    return sorted(found, key=lambda apart: (apart.step, apart.name != "train_loss", apart.name))


def last_values(series: Mapping[str, list[tuple[int, float]]]) -> dict[str, float]:
    """The last value of each metric."""
    return {name: points[-1][1] for name, points in series.items() if points}


def _same(one: tuple[int, float], two: tuple[int, float]) -> bool:
    return one == two or (one[0] == two[0] and math.isnan(one[1]) and math.isnan(two[1]))


def _shown(value: float | None) -> str:
    return "none" if value is None else repr(value)
