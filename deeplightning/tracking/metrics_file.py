"""`metrics.jsonl` in the run folder: everything that a run logs, one line per call, before training continues.

    {"step": 12, "time": 1764288000123, "values": {"train_loss": 0.53, "lr": 0.001}}

`time` is in milliseconds since 1970; NaN and infinities are the texts "nan", "inf" and "-inf". Other lines contain
all other data for a tracking store, see `KINDS`. A killed process loses no line. `.metrics.sent` next to it contains
the number of bytes that the store has. Imports neither torch nor numpy nor MLflow.
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
from deeplightning.tracking.entities import EPOCH, SYSTEM, Point, clean, is_test_metric

Line = dict[str, Any]
Series = dict[str, list[tuple[int, float]]]
"""Lists of (step, value), sorted by step, by the name of the metric."""

STATUSES = ("RUNNING", "FINISHED", "FAILED", "KILLED")

_UNREPEATABLE = re.compile(
    rf"{SYSTEM}|(^|.*[_/])(time|duration|seconds|secs|ms|eta|throughput|speed|fps|memory|mem)(_.*)?$|.*(_per_|/)s(ec(ond)?)?$"
)
_MAX_LINE_BYTES = 4 << 20
_MAX_UNDONE_BYTES = 1 << 20
_MAX_NUMBER = 1 << 62  # maximum of milliseconds and steps, which databases accept
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def _is_text_mapping(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _list_of(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and [*map(type, value)] == [*kinds]


KINDS: dict[str, Callable[[object], bool]] = {
    "values": lambda value: isinstance(value, dict),  # points; with `step` and `time`
    "run": lambda value: isinstance(value, dict),  # description of the run, see `entities.run_of`
    "params": _is_text_mapping,
    "tags": _is_text_mapping,
    "untag": lambda value: isinstance(value, str),  # name of a tag to remove
    "dataset": _list_of(str, str, str, str, str),  # the texts of a `Dataset`
    "artifact": lambda value: _list_of(str, str)(value) or _list_of(str, type(None))(value),  # path, folder
    "model": _list_of(str, str, str),  # path, name, kind
    "status": lambda value: value in STATUSES,  # with `time` of the end, or null
}
"""Kinds of lines, by the key that identifies them, with a check of its value."""


class MetricsFile:
    """The file of a run that this process logs to.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, path: Path):
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        # A killed process may have left part of a line.
        self._is_torn = os.pread(self._descriptor, 1, max(0, self.size - 1)) not in (b"\n", b"")

    @property
    def size(self) -> int:
        """Size in bytes. Another process may log to the file too."""
        return os.fstat(self._descriptor).st_size

    def append(self, line: Line) -> None:
        """Append a line.

        Raises:
            OSError: the disk is full, or was removed.
        """
        rest = memoryview(b"\n" * self._is_torn + _encode(line).encode() + b"\n")
        while rest:  # a nearly full disk accepts only a part
            written = os.write(self._descriptor, rest)
            self._is_torn = written < len(rest)
            rest = rest[written:]

    def close(self) -> None:
        """Close the file. Its descriptor is closed even if the file system reports an error."""
        with suppress(OSError):
            os.close(self._descriptor)


def sync(path: Path) -> None:
    """Wait until the lines of a file would survive a power failure."""
    with suppress(OSError), path.open("rb") as file:
        os.fsync(file.fileno())
    sync_names(path.parent)


def points_line(moment: int, step: int, values: Mapping[str, float]) -> Line:
    """Return a line with points."""
    shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    return {"step": step, "time": moment, "values": shown}


def points_of(line: Line) -> list[Point]:
    """Return the points of a line."""
    return [Point(name, float(value), line["time"], line["step"]) for name, value in line.get("values", {}).items()]


def read_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Line]]:
    """Yield the lines of a file, each with the position after it; {} for a damaged line.

    Args:
        start, end: positions of lines; None: the end of the last complete line.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        position = file.seek(start)
        while end is None or position < end:
            text = file.readline(_MAX_LINE_BYTES)
            if not text.endswith(b"\n") and len(text) < _MAX_LINE_BYTES:
                return
            position += len(text)
            yield position, _parse(text)


def _parse(text: bytes) -> Line:
    with suppress(ValueError, TypeError, KeyError, RecursionError, OverflowError):
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
    """Return the position from which to send after a process was killed: 1 MiB before `sent_position`, since a power
    failure may have undone the last transactions of the store."""
    start = sent_position(path) - _MAX_UNDONE_BYTES
    if start <= 0:
        return 0
    with path.open("rb") as file:
        file.seek(start)
        file.readline()
        return file.tell()


def save_sent_position(path: Path, position: int) -> None:
    """Save how many bytes of a file the tracking store has. Sending lines twice does not duplicate them."""
    with suppress(OSError):
        sent_file(path).write_bytes(b"%d\n" % position)


def sent_file(path: Path) -> Path:
    """Return the file next to a metrics file with the number of its bytes that the tracking store has."""
    return path.with_name(f".{path.stem}.sent")


def is_repeatable(name: str) -> bool:
    """Return whether a metric can be equal in another run: it is not a time, speed or load."""
    return not _UNREPEATABLE.match(name)


def read_series(path: Path) -> Series:
    """Return the series of a metrics file without times, speeds, system metrics and Lightning's `epoch`.

    Test metrics are at step 0. Of several values at one step, the last one counts.

    Raises:
        ValueError: the file does not exist.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    return series_of(read_points(path))


def series_of(points: Iterable[Point]) -> Series:
    """Convert points to series, see `read_series`."""
    found: dict[str, dict[int, float]] = {}
    for name, value, _, step in points:
        if is_repeatable(name) and name != EPOCH:
            found.setdefault(name, {})[0 if is_test_metric(name) else step] = value
    return {name: sorted(found[name].items()) for name in sorted(found)}


class Difference(NamedTuple):
    """The first difference between two series of a metric."""

    name: str
    step: int
    one: float | None  # None: the first series has no such point
    two: float | None

    def __str__(self) -> str:
        return f"{self.name} at step {self.step}: {_format(self.one)} → {_format(self.two)}"


def first_differences(one: Series, two: Series) -> list[Difference]:
    """Return the first difference of each metric that differs, sorted by step."""
    found = []
    for name in {*one, *two}:
        first, second = one.get(name, []), two.get(name, [])
        index = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if not _is_same(a, b)), None)
        if index is None and len(first) != len(second):
            index = min(len(first), len(second))
        if index is None:
            continue
        a, b = (series[index] if index < len(series) else None for series in (first, second))
        step = min(point[0] for point in (a, b) if point is not None)
        values = (point[1] if point is not None and point[0] == step else None for point in (a, b))
        found.append(Difference(name, step, *values))
    return sorted(found, key=lambda each: (each.step, each.name != "train_loss", each.name))


def last_values(series: Mapping[str, list[tuple[int, float]]]) -> dict[str, float]:
    """Return the last value of each metric."""
    return {name: points[-1][1] for name, points in series.items() if points}


def _is_same(one: tuple[int, float], two: tuple[int, float]) -> bool:
    return one == two or (one[0] == two[0] and math.isnan(one[1]) and math.isnan(two[1]))


def _format(value: float | None) -> str:
    return "none" if value is None else repr(value)
