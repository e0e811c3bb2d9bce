"""What a search found, for people: a table of its trials, the best config, and two pictures."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from deeplightning.checks.space import Dimension
from deeplightning.config.target import is_installed
from deeplightning.config.tree import line
from deeplightning.tune.study import Study

log = logging.getLogger("deeplightning")

WORDS = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "interrupted",
    TrialState.WAITING: "to come",
}


def rows(study: Study) -> list[list[str]]:
    """A head and a row for each trial, the best first: rank, trial, state, value, epochs, the values of the space."""
    table = [["rank", "trial", "state", study.tune.metric, "epochs", *(d.key for d in study.space)]]
    for rank, trial in enumerate(study.ranked(), start=1):
        value = trial.value if trial.value is not None else study.last_value(trial)
        place = str(rank) if trial.state == TrialState.COMPLETE else "-"
        epochs = str(max(trial.intermediate_values, default=0))
        shown = "-" if value is None else f"{value:.6g}"
        point = study.point(trial)
        values = [_short(point[d.key]) for d in study.space]
        table.append([place, str(trial.number), WORDS[trial.state], shown, epochs, *values])
    return table


def as_csv(study: Study) -> str:
    """The trials as CSV, with the values of the space in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["trial", "state", study.tune.metric, "epochs", *(d.key for d in study.space), "failure", "run"])
    for trial in study.trials():
        value = trial.value if trial.value is not None else study.last_value(trial)
        point = study.point(trial)
        values = [line(point[d.key]) for d in study.space]
        epochs = max(trial.intermediate_values, default=0)
        failure, run = trial.user_attrs.get("failure", ""), trial.user_attrs.get("run") or ""
        writer.writerow([trial.number, WORDS[trial.state], value, epochs, *values, failure, run])
    return out.getvalue()


def draw(study: Study, folder: Path) -> list[Path]:
    """Pictures of what was found: each trial as a line through its values, and how much each key matters."""
    done = [t for t in study.trials() if t.state == TrialState.COMPLETE]
    if len(done) < 2:
        return []
    if not is_installed("matplotlib"):
        log.warning("pictures   none: matplotlib is not installed; pip install matplotlib")
        return []
    from deeplightning.figures.style import style
    from deeplightning.tracking import picture

    made = []
    with style():
        figures: dict[str, object] = {"parallel_coordinates.png": _parallel(study, done)}
        if importances := study.importances():
            figures["importances.png"] = _bars(importances, study.tune.metric)
        contents = {name: picture.to_png(figure) for name, figure in figures.items()}
    for name, content in contents.items():
        path = folder / name
        beside = path.with_name(f".{name}.partial")
        beside.write_bytes(content)
        beside.replace(path)
        made.append(path)
    return made


def _parallel(study: Study, done: Sequence[FrozenTrial]) -> object:
    """Parallel coordinates: an axis for each key and one for the metric, a line for each finished trial.

    Inselberg: The plane with parallel coordinates. The Visual Computer 1, 1985.
    """
    from matplotlib.figure import Figure

    space, metric = study.space, study.tune.metric
    values = [float(t.value or 0) for t in done]
    low, high = min(values), max(values)
    figure = Figure(figsize=(2.2 * (len(space) + 1) + 1, 4.2), layout="constrained")
    axes = figure.add_subplot()
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    better_last = sorted(done, key=lambda t: t.value or 0, reverse=study.tune.mode == "min")
    for trial in better_last:
        point = study.point(trial)
        value = float(trial.value or 0)
        heights = [_height(d, point[d.key]) for d in space] + [_part(value, low, high)]
        good = _part(value, low, high) if study.tune.mode == "max" else 1 - _part(value, low, high)
        axes.plot(range(len(space) + 1), heights, color=colours(good), linewidth=1.2, alpha=0.8)
    for column, dimension in enumerate(space):
        axes.axvline(column, color="0.7", linewidth=0.8, zorder=0)
        for height, words in _ticks(dimension):
            axes.annotate(words, (column, height), xytext=(3, 0), textcoords="offset points", fontsize=7, color="0.3")
    axes.axvline(len(space), color="0.7", linewidth=0.8, zorder=0)
    for height in (0.0, 0.5, 1.0):
        words = f"{low + height * (high - low):.4g}"
        axes.annotate(words, (len(space), height), xytext=(3, 0), textcoords="offset points", fontsize=7, color="0.3")
    labels = [_label(d.key) for d in space] + [metric]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(-0.05, 1.05)
    axes.set_xlim(-0.2, len(space) + 0.5)
    axes.set_title(f"{len(done)} finished trials; bright: better", fontsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def _height(dimension: Dimension, value: Any) -> float:
    """The position of a value on its axis, 0 to 1."""
    if dimension.kind == "choice":
        number = next(n for n, choice in enumerate(dimension.choices) if line(choice) == line(value))
        return _part(number, 0, len(dimension.choices) - 1)
    if dimension.is_log:
        return _part(math.log(value), math.log(dimension.low), math.log(dimension.high))
    return _part(value, dimension.low, dimension.high)


def _ticks(dimension: Dimension) -> list[tuple[float, str]]:
    if dimension.kind == "choice":
        return [(_height(dimension, choice), _short(choice)) for choice in dimension.choices]
    middle = math.sqrt(dimension.low * dimension.high) if dimension.is_log else (dimension.low + dimension.high) / 2
    return [(height, f"{value:.3g}") for height, value in ((0, dimension.low), (0.5, middle), (1, dimension.high))]


def _part(value: float, low: float, high: float) -> float:
    return 0.5 if high <= low else (value - low) / (high - low)


def _bars(importances: dict[str, float], metric: str) -> object:
    from matplotlib.figure import Figure

    from deeplightning.figures.style import BLUE

    names = sorted(importances, key=lambda name: importances[name])
    figure = Figure(figsize=(6, 1.2 + 0.4 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(range(len(names)), [importances[name] for name in names], color=BLUE)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), [_label(name) for name in names], fontsize=8)
    axes.set_xlim(0, 1.1)
    axes.set_title(f"How much of the differences in {metric} each key explains (fANOVA)", fontsize=9)
    return figure


def _label(key: str) -> str:
    """The last words of a key."""
    return ".".join(part for part in key.split(".") if part != "params")[-28:]


def _short(value: object) -> str:
    words = f"{value:.4g}" if isinstance(value, float) else line(value)
    return words if len(words) <= 40 else f"{words[:39]}…"
