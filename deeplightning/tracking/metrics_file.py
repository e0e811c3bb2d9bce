"""`metrics.jsonl` in a run's folder: all that a run logs, a line for each call, before training continues.

    {"step": 12, "time": 1764288000123, "values": {"train_loss": 0.53, "lr": 0.001}}

`time` is in milliseconds since 1970; NaN and infinities are the texts "nan", "inf" and "-inf". Other lines have
everything else that goes to a tracking store, see `KINDS`. A killed process loses no line. `.metrics.sent` beside it
holds the number of bytes that the store has. No torch, no numpy, no MLflow.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from deeplightning.runfolder import sync_names
from deeplightning.tracking.entities import EPOCH, SYSTEM, Point, clean, is_of_test

Line = dict[str, Any]
Series = dict[str, list[tuple[int, float]]]
"""Lists of (step, value) in the order of the steps, by the metric's name."""

STATUSES = ("RUNNING", "FINISHED", "FAILED", "KILLED")

_FLEETING = re.compile(
    rf"{SYSTEM}|(^|.*[_/])(time|duration|seconds|secs|ms|eta|throughput|speed|fps|memory|mem)(_.*)?$|.*(_per_|/)s(ec(ond)?)?$"
)
_MAX_LINE_BYTES = 4 << 20
_MAX_UNDONE_BYTES = 1 << 20
_MAX_NUMBER = 1 << 62  # of milliseconds and steps, which databases take
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _list_of(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and [*map(type, value)] == [*kinds]


KINDS: dict[str, Callable[[object], bool]] = {
    "values": lambda value: isinstance(value, dict),  # points; with `step` and `time`
    "run": lambda value: isinstance(value, dict),  # what the run is made of, see `entities.run_of`
    "params": _texts,
    "tags": _texts,
    "untag": lambda value: isinstance(value, str),  # the name of a tag that is removed
    "dataset": _list_of(str, str, str, str, str),  # the texts of a `Dataset`
    "artifact": lambda value: _list_of(str, str)(value) or _list_of(str, type(None))(value),  # path, folder
    "model": _list_of(str, str, str),  # path, name, kind
    "status": lambda value: value in STATUSES,  # with `time`, that of the end, or null
}
"""The kinds of lines, by the key that tells them apart, with a check of its value."""


class MetricsFile:
    """The file of a run that this process logs to.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        # A process that was killed may have left a part of a line.
        with path.open("rb") as file:
            file.seek(max(0, self.size - 1))
            self._is_torn = file.read(1) not in (b"\n", b"")

    @property
    def size(self) -> int:
        """The bytes of the file; another process may log to it, too."""
        return os.fstat(self._descriptor).st_size

    def append(self, line: Line) -> None:
        """Append a line.

        Raises:
            OSError: the disk is full, or has gone.
        """
        rest = memoryview(b"\n" * self._is_torn + _encode(line).encode() + b"\n")
        while rest:  # a disk that is nearly full takes a part
            written = os.write(self._descriptor, rest)
            self._is_torn = written < len(rest)
            rest = rest[written:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def sync(path: Path) -> None:
    """Wait until the lines of a file outlast a loss of power."""
    with suppress(OSError), path.open("rb") as file:
        os.fsync(file.fileno())
    sync_names(path.parent)


def points_line(moment: int, step: int, values: Mapping[str, float]) -> Line:
    """Return the line of points."""
    shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    return {"step": step, "time": moment, "values": shown}


def points_of(line: Line) -> list[Point]:
    """Return the points of a line."""
    return [Point(name, float(value), line["time"], line["step"]) for name, value in line.get("values", {}).items()]


def read_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Line]]:
    """Yield the lines of a file with the position behind each; {} for a line that is damaged.

    Args:
        start, end: positions of lines; None: the last complete line.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(start)
        position = start
        while end is None or position < end:
            text = file.readline(_MAX_LINE_BYTES)
            if not text.endswith(b"\n") and len(text) < _MAX_LINE_BYTES:
                return
            position += len(text)
            yield position, _parsed(text)


def _parsed(text: bytes) -> Line:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        line = json.loads(text)
        kind = next((kind for kind in line if kind in KINDS), "")
        is_right = KINDS[kind](line[kind]) and all(clean(point.name) == point.name for point in points_of(line))
        is_placed = isinstance(line.get("time"), int | None) and isinstance(line.get("step", 0), int)
        if is_right and is_placed and max(line.get("time") or 0, abs(line.get("step", 0))) < _MAX_NUMBER:
            return line
    return {}


def read_points(path: Path) -> Iterator[Point]:
    """Yield all points of a file."""
    for _, line in read_lines(path):
        yield from points_of(line)


def sent_position(path: Path) -> int:
    """Return how many bytes of a file the tracking store has."""
    try:
        found = int(sent_file(path).read_bytes())
        return found if 0 <= found <= path.stat().st_size else 0
    except (OSError, ValueError):
        return 0


def safe_position(path: Path) -> int:
    """Return a position from which to send after a process was killed: a MiB before `sent_position`, since a loss of
    power may have undone the last transaction of the store."""
    start = sent_position(path) - _MAX_UNDONE_BYTES
    if start <= 0:
        return 0
    with path.open("rb") as file:
        file.seek(start)
        file.readline()
        return file.tell()


def note_sent(path: Path, position: int) -> None:
    """Keep how many bytes of a file the tracking store has; what is sent twice is there once."""
    with suppress(OSError):
        sent_file(path).write_bytes(b"%d\n" % position)


def sent_file(path: Path) -> Path:
    """Return the file beside a metrics file that holds how many bytes of it the tracking store has."""
    return path.with_name(f".{path.stem}.sent")


def is_repeatable(name: str) -> bool:
    """Return whether a metric can be the same in another run: it is no time, speed or load."""
    return not _FLEETING.match(name)


def read_series(path: Path) -> Series:
    """Return the series of a metrics file; times, speeds, the load of the machine and Lightning's `epoch` are left out.

    Metrics of a test are at step 0; of several values at one step the last one counts.

    Raises:
        ValueError: there is no such file.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    return series_of(read_points(path))


def series_of(points: Iterable[Point]) -> Series:
    """Return points as series, see `read_series`."""
    found: dict[str, dict[int, float]] = {}
    for name, value, _, step in points:
        if is_repeatable(name) and name != EPOCH:
            found.setdefault(name, {})[0 if is_of_test(name) else step] = value
    return {name: sorted(found[name].items()) for name in sorted(found)}


class Apart(NamedTuple):
    """Where two series of a metric differ first."""

    name: str
    step: int
    one: float | None  # None: the first series has no such point
    two: float | None

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {_shown(self.one)} → {_shown(self.two)}"


def parted(one: Series, two: Series) -> list[Apart]:
    """Return the first point that differs of each metric that does, the earliest first."""
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
    """Return the last value of each metric."""
    return {name: points[-1][1] for name, points in series.items() if points}


def _same(one: tuple[int, float], two: tuple[int, float]) -> bool:
    return one == two or (one[0] == two[0] and math.isnan(one[1]) and math.isnan(two[1]))


def _shown(value: float | None) -> str:
    return "none" if value is None else repr(value)
