"""`deeplightning runs --watch`: a table of the runs that are running, which a terminal keeps up to date.

All of it comes from what a run tracks: the newest point of each metric, and tags that say how long training is. Nothing
is written but what killed processes have left, as by `deeplightning runs`.
"""

import itertools
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from deeplightning.callbacks.progress import clock, number, rate
from deeplightning.cli.listing import SHOWN
from deeplightning.faults import SetupError, count
from deeplightning.process.terminal import is_interactive, say
from deeplightning.tracking.journal import dead, settle_quietly
from deeplightning.tracking.names import EPOCH_STEPS, STEP_SAMPLES, STEPS, TRAINING_BEGAN
from deeplightning.tracking.running import Reader, Running, reader_of, require
from deeplightning.tracking.store import Store, explain, locate
from deeplightning.tracking.tracker import EPOCH, SYSTEM, TEST, Point
from deeplightning.words import printable

if TYPE_CHECKING:
    from rich.console import JustifyMethod, RenderableType

PAUSE = 2.0
"""Seconds between two looks at the store."""
TRAIL = 500
"""Points of one metric that a speed is taken from."""
INTERVALS = 20
"""Pauses between points whose median gives the samples a second: a validation or a checkpoint among them changes it
little."""
LEAST_NAME = 12
"""Columns of a name that is cut."""

_COLOURS = {"RUNNING": "green", "FAILED": "red", "DEAD": "red", "KILLED": "yellow", "PRUNED": "yellow"}
_RIGHT = ("epoch", "step", "samples/s", "left", "last point")
_DROPPED = ("id", "experiment", "last point", "step", "samples/s")
"""Columns that are left out where there is no room for all, in this order."""


class Pace(NamedTuple):
    """How fast a run trains.

    Attributes:
        step: seconds of a step, the median; validation and checkpoints apart.
        all: seconds of a step, all that happens between two counted in.
    """

    step: float
    all: float


# ---- a row


def trained(points: Iterable[Point]) -> list[Point]:
    """The points that are counted by steps of training: not those of the machine's load, of a test, or Lightning's
    `epoch`."""
    return [point for point in points if not point.name.startswith((SYSTEM, TEST)) and point.name != EPOCH]


def paced(names: Iterable[str]) -> str | None:
    """The metric whose points tell the speed: one of training, tracked every few steps; None: there is none."""
    steady = sorted(name for name in names if not name.endswith("_epoch") and not name.startswith(("val_", "lr")))
    return next((name for name in ("train_loss", *steady) if name in steady), None)


def pace(points: Sequence[Point], began: int = 0, epoch: int | None = None) -> Pace | None:
    """The pace by the newest points of one metric, sorted by step; None: fewer than two of different steps are known.

    Args:
        began: milliseconds since 1970; earlier points are of an earlier launch of the run.
        epoch: the steps of an epoch; the pace is that of the last one, with its validation. None: of all points.
    """
    known = [(point.step, point.time) for point in points if point.time >= began]
    known = [(step, moment) for step, moment in known if epoch is None or step >= known[-1][0] - epoch]
    if len(known) < 2 or known[-1][0] == known[0][0]:
        return None
    each = [
        (moment - former) / 1000 / (step - before)
        for (before, former), (step, moment) in itertools.pairwise(known)
        if step > before
    ]
    mean = (known[-1][1] - known[0][1]) / 1000 / (known[-1][0] - known[0][0])
    if mean <= 0:  # more than one point in a millisecond, or a clock that was set back
        return None
    return Pace(statistics.median(each[-INTERVALS:]) or mean, mean)


def row(run: Running, points: Sequence[Point], now: int) -> dict[str, str]:
    """What the table shows of a run; what is not known is "".

    Args:
        points: the newest of the metric that tells the speed, sorted by step.
        now: milliseconds since 1970.
    """
    counted = trained(run.newest)
    # Points stand at the step that was under way, from 0 on; validation at the end of an epoch may count one more.
    done = max((point.step + 1 for point in counted if not point.name.startswith("val_")), default=0)
    done = done or max((point.step for point in counted), default=0)
    total, of_epoch = _whole(run.tags, STEPS), _whole(run.tags, EPOCH_STEPS)
    samples, epochs = _whole(run.tags, STEP_SAMPLES), _whole(run.params, "train/num_epochs")
    speed = pace(points, _whole(run.tags, TRAINING_BEGAN) or 0, of_epoch)
    is_running, newest = run.status == "RUNNING", max((point.time for point in run.newest), default=None)
    epoch = math.ceil(done / of_epoch) if of_epoch and done else None
    epoch = min(epoch, epochs) if epoch and epochs else epoch
    left = max(0.0, (total - done) * speed.all) if total and speed and is_running else None
    found = {
        "name": run.name,
        "id": run.id,
        "experiment": run.experiment,
        "status": run.status,
        "epoch": _of(epoch, epochs),
        "step": _of(done or None, total),
        "metric": _metric(run),
        "samples/s": rate(samples / speed.step) if samples and speed else "",
        "left": clock(left) if left is not None else "",
        "last point": f"{clock(max(0, now - newest) / 1000)} ago" if newest is not None and is_running else "",
    }
    return {name: printable(text) for name, text in found.items()}


def _metric(run: Running) -> str:
    """Name and value of the metric that the run monitors; else of the one that tells most."""
    values = {point.name: point.value for point in run.newest}
    watched = [run.params.get(f"train/{key}") for key in ("checkpoint/monitor", "early_stop/metric")]
    name = next((name for name in (*watched, *SHOWN) if name in values), None)
    return f"{name} {number(values[name])}" if name is not None else ""


def _of(part: int | None, whole: int | None) -> str:
    return "" if part is None else f"{part:,}/{whole:,}" if whole else f"{part:,}"


def _whole(texts: Mapping[str, str], name: str) -> int | None:
    """A whole number above 0 among tags or parameters, which anybody may have written; None: there is none."""
    text = texts.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and 0 < len(text) < 19 and int(text) > 0 else None


# ---- the table


def fitting(rows: Sequence[Mapping[str, str]], columns: int | None) -> dict[str, int]:
    """The columns of the table and their widths: those that a terminal has no room for are left out, and a name is cut
    in the end. An empty column, and ids where names tell the runs apart, are left out too.

    Args:
        columns: of the terminal; None: no limit.
    """
    from rich.cells import cell_len

    widths = {name: max(cell_len(each[name]) for each in rows) for name in rows[0]}
    names = {each["name"] for each in rows}
    if len(names) == len(rows) and "" not in names:
        del widths["id"]
    widths = {name: max(size, len(name)) for name, size in widths.items() if size or name == "name"}
    over = 0 if columns is None else _room(widths) - (columns - 1)
    for name in _DROPPED:
        if over > 0 and name in widths:
            over -= widths.pop(name) + 2
    if over > 0:
        widths["name"] = max(min(LEAST_NAME, widths["name"]), widths["name"] - over)
    return widths


def _cut(text: str, size: int) -> str:
    """A text in so many columns: what is too long loses its middle, since names often differ in their ends only."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= size:
        return text
    end = text[len(text) - (size - 1) // 2 :]
    while cell_len(end) > (size - 1) // 2:  # signs of two columns
        end = end[1:]
    return f"{set_cell_size(text, size - 1 - cell_len(end))}…{end}"


def _room(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def table(rows: Sequence[Mapping[str, str]], columns: int | None) -> "RenderableType":
    """The table as rich draws it; of no rows, nothing."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", collapse_padding=True)
    if not rows:
        return Text("")
    widths = fitting(rows, columns)
    for name, size in widths.items():
        justify: JustifyMethod = "right" if name in _RIGHT else "left"
        drawn.add_column(name, width=size, no_wrap=True, overflow="ellipsis", justify=justify)
    for each in rows:
        style = {"status": _COLOURS.get(each["status"], "")}
        cells = [Text(_cut(each[name], size), style=style.get(name, "")) for name, size in widths.items()]
        drawn.add_row(*cells, style="" if each["status"] == "RUNNING" else "dim")
    return drawn


# ---- looking


class Watch:
    """What is known of the runs of a store from look to look.

    Args:
        store: read at each look.
        name: only runs in whose name or experiment's name this is found; * matches anything.
        experiment: only runs of the experiment of this name.
    """

    def __init__(self, store: Store, name: str | None = None, experiment: str | None = None):
        self.store, self.name, self.experiment = store, name, experiment
        self._reader: Reader | None = None
        self._watched: dict[str, None] = {}  # ids, in the order in which they were first seen
        self._points: dict[str, list[Point]] = {}

    def look(self) -> list[dict[str, str]]:
        """The rows of the runs that are running, the oldest first, and below them those that have ended since the first
        look, the newest first.

        Raises:
            SetupError: the store cannot be read.
        """
        try:
            self._reader = self._reader or reader_of(self.store)
            require(self.store)
            for _ in settle_quietly(self.store):
                pass  # a run whose process was killed here is FAILED from now on, which its row shows
            found = [run for run in self._reader.runs(self._watched) if self._is_wanted(run)]
            killed = dead(self.store) if any(run.status == "RUNNING" for run in found) else set()
            now, rows = time.time_ns() // 1_000_000, []
            for run in found:
                self._watched[run.id] = None
                is_dead = run.status == "RUNNING" and run.id in killed  # and the store cannot be written
                rows.append(row(replace(run, status="DEAD") if is_dead else run, self._followed(run), now))
        except Exception as error:  # MLflow, SQLAlchemy, SQLite and the network each have their own
            self._reader = None
            raise explain(error, self.store) from error
        over = [each for each in rows if each["status"] != "RUNNING"]
        return [each for each in rows if each["status"] == "RUNNING"] + over[::-1]

    def _is_wanted(self, run: Running) -> bool:
        is_named = self.name is None or any(fnmatchcase(n, f"*{self.name}*") for n in (run.name, run.experiment))
        return is_named and self.experiment in (None, run.experiment)

    def _followed(self, run: Running) -> list[Point]:
        """The last points of the metric that tells a run's speed: read once, then the newest at each look."""
        newest = {point.name: point for point in trained(run.newest)}
        if (name := paced(newest)) is None:
            return []
        known = self._points.get(run.id)
        if known is None or known[0].name != name:
            assert self._reader is not None
            known = self._reader.points(run.id, name, TRAIL) or [newest[name]]
        elif newest[name].step > known[-1].step:
            known = [*known[1 - TRAIL :], newest[name]]
        self._points[run.id] = known
        return known


def watch(tracking_uri: str | None, name: str | None = None, experiment: str | None = None) -> None:
    """Shows the running runs of a store until Ctrl-C; where stdout is no terminal, once.

    Raises:
        SetupError: the store cannot be read at the first look.
    """
    watched = Watch(locate(tracking_uri), name, experiment)
    rows = watched.look()
    if not is_interactive(sys.stdout):
        _print_once(rows, watched.store)
        return
    try:
        _keep_showing(watched, rows)
    except KeyboardInterrupt:  # the way to end it, so nothing was interrupted
        return


def _print_once(rows: Sequence[Mapping[str, str]], store: Store) -> None:
    from rich.console import Console

    if not rows:
        say(f"{store.shown}: no run is running", err=True)
        return
    width = _room(fitting(rows, None)) + 2
    Console(file=sys.stdout, width=width, highlight=False, color_system=None).print(table(rows, None))


def _keep_showing(watched: Watch, rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.live import Live

    console, problem = Console(file=sys.stdout, highlight=False), ""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(_screen(rows, watched.store, problem), refresh=True)
            time.sleep(PAUSE)
            try:
                rows, problem = watched.look(), ""
            except SetupError as error:  # shown with the last rows until the store is there again
                problem = str(error).splitlines()[0]


def _screen(rows: Sequence[dict[str, str]], store: Store, problem: str) -> "RenderableType":
    """The table with a line of what there is to say below; no higher than the terminal."""
    from rich.console import Group
    from rich.text import Text

    columns, lines = shutil.get_terminal_size()
    room = max(1, lines - 4)
    running = sum(each["status"] == "RUNNING" for each in rows)
    words = [f"{count(running, 'run')} running" if running else "no run is running"]
    words += [f"{len(rows) - room} more rows have no room"] if len(rows) > room else []
    words += [time.strftime("%H:%M:%S"), "Ctrl-C ends"]
    below = Text(f"{', '.join(words)}: {printable(store.shown)}", style="dim", no_wrap=True, overflow="ellipsis")
    if problem:
        below = Text(f"{time.strftime('%H:%M:%S')}: {printable(problem)}", style="red", no_wrap=True)
    below.truncate(columns - 1, overflow="ellipsis")
    return Group(table(rows[:room], columns), below)
