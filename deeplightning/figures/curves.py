"""Draw curves of metrics over steps, and predictions against true values. N samples, T targets."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deeplightning.figures import style
from deeplightning.words import stage_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Lists of (step, value), sorted by step, by the name of the metric."""

MAX_POINTS = 600
"""Maximum number of points of a curve; of more, every n-th and the last are drawn."""

_COLOUR = {"train": style.BLUE, "val": style.ORANGE}
_STAGE_NAME = {"train": "training", "val": "validation"}


@dataclass
class Chart:
    """Curves in one plot: a metric of training and validation, or another series."""

    name: str  # of the metric, without its stage
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # by stage, or "" if it has none


def charts(series: Series) -> list[Chart]:
    """Group series into charts: losses first, then metrics, then learning rates and others by name. Means over epochs
    are preferred to values of steps; series of one point are left out."""
    found: dict[str, Chart] = {}
    for name, given in series.items():
        stage, metric = stage_of(name)
        points = [(step, value) for step, value in given if math.isfinite(value)]
        if name == "epoch" or stage == "test" or len(points) < 2:
            continue
        rest = metric.removesuffix("_epoch").removesuffix("_step") if stage else name
        chart = found.setdefault(rest, Chart(rest))
        if metric.endswith("_epoch") or stage not in chart.curves:
            chart.curves[stage] = points
    return sorted(found.values(), key=_rank)


def _rank(chart: Chart) -> tuple[bool | str, ...]:
    is_rate = re.match(r"lr($|[-_/])", chart.name) is not None
    return "" in chart.curves, chart.name != "loss", not chart.name.endswith("loss"), not is_rate, chart.name


def curve(chart: Chart, best: int | None = None) -> style.Drawing:
    """Draw one chart; mark the validation of the best checkpoint, at the step `best`, if there is one."""
    ends = ", ".join(f"{_STAGE_NAME.get(stage, 'last')} {points[-1][1]:.4g}" for stage, points in chart.curves.items())
    return style.Drawing(lambda: _draw(chart, best), f"{style.label(chart.name)} over the steps: {ends} at the end")


def _draw(chart: Chart, best: int | None) -> "Figure":
    made = style.figure(style.WIDTH, 2.55)
    axes = made.subplots()
    for stage, points in chart.curves.items():
        every = max(1, math.ceil(len(points) / MAX_POINTS))  # at most `MAX_POINTS`, with the last one
        steps, values = zip(*points[::every], *([points[-1]] if (len(points) - 1) % every else []), strict=True)
        marker = "o" if len(steps) <= 30 else None
        colour = _COLOUR.get(stage, style.PURPLE)
        axes.plot(steps, values, color=colour, label=_STAGE_NAME.get(stage), marker=marker, markersize=2.5)
    axes.set_title(style.label(chart.name, 40))
    heights = [value for points in chart.curves.values() for _, value in points]
    # A logarithmic scale for a loss that spans more than two decades
    if heights and chart.name.endswith("loss") and min(heights) > 0 and max(heights) / min(heights) > 200:
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("step")
    validated = [step for step, _ in chart.curves.get("val", []) if best is not None and step <= best]
    if validated:  # a checkpoint counts completed steps, a series starts at 0
        axes.axvline(max(validated), color=style.MUTED, linewidth=1, linestyle=(0, (2, 2)), label="best")
    if "" not in chart.curves:
        axes.legend(loc="best", handlelength=1.4)
    style.lines(axes)
    return made


MAX_DOTS = 3000
"""Maximum number of dots in a plot; of more samples, this many, evenly spaced, are drawn."""


def truth_against_prediction(truth: np.ndarray, predicted: np.ndarray, names: Sequence[str], of: str) -> style.Drawing:
    """Draw predictions against true values, float (N, T) each: a plot per target, for at most six targets."""
    truth, predicted = truth[:, :6], predicted[:, :6]
    spread, errors = truth - truth.mean(0), predicted - truth
    with np.errstate(divide="ignore", invalid="ignore"):  # R² of a constant target is NaN
        r2 = np.where((spread**2).sum(0) > 0, 1 - (errors**2).sum(0) / (spread**2).sum(0), np.nan)
    scores = [f"RMSE {rmse:.4g}, R² {r:.4g}" for rmse, r in zip(np.sqrt((errors**2).mean(0)), r2, strict=True)]
    parts = [f"{style.label(name)}: {score}" for name, score in zip(names, scores, strict=False)]

    def draw() -> "Figure":
        columns = min(2, len(parts))
        rows = -(-len(parts) // columns)
        made = style.figure(style.WIDTH * columns, 3.9 * rows)
        grid = made.subplots(rows, columns, squeeze=False).flatten()
        for axes in grid[len(parts) :]:
            axes.set_axis_off()
        some = np.linspace(0, len(truth) - 1, min(len(truth), MAX_DOTS)).astype(int)
        alpha, is_dense = 0.8 if len(some) < 300 else 0.4, len(some) > 500
        for axes, name, score, x, y in zip(grid, names, scores, truth[some].T, predicted[some].T, strict=False):
            low, high = float(min(x.min(), y.min())), float(max(x.max(), y.max()))
            axes.plot([low, high], [low, high], color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
            axes.plot(x, y, "o", color=style.BLUE, markersize=3, alpha=alpha, markeredgewidth=0, rasterized=is_dense)
            axes.set_title(f"{style.label(name)}\n", color=style.INK)
            note = f"{score}; {len(truth):,} {of} samples"
            axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=7, color=style.MUTED)
            axes.set(xlabel="truth", ylabel="prediction")
            axes.set_aspect("equal", adjustable="datalim")
            style.lines(axes)
            axes.grid(True, color=style.GRID)
        return made

    return style.Drawing(draw, f"Truth against prediction on {len(truth):,} {of} samples. {'; '.join(parts)}")
