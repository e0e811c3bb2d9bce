"""Draw classes: confusion matrix, precision and recall, reliability, ROC and PR, samples, and masks over pictures.

K classes, N samples, B pictures of H x W pixels, C channels.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deeplightning.figures import measures
from deeplightning.figures.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    RED,
    WHITE,
    WIDTH,
    Drawing,
    figure,
    label,
    lines,
    on_map,
    place,
    room_for,
    title,
)
from deeplightning.kinds import CLASS_COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_GROUPS = 20
"""From more classes on, those that are confused are put beside each other."""

NAMED = 120
"""Classes whose names stand at a confusion matrix; a matrix of more is as large as of these, without names."""

MOST_IN_MATRIX = 1000
"""Classes of a confusion matrix; of more it would be a point for each sample."""

SHOWN = 30
"""Classes whose precision and recall are shown; of more, those with the lowest F1."""


def confusion_matrix(counts: np.ndarray, names: Sequence[str], of: str) -> Drawing:
    """Draw counts and each row's share, (K, K): rows are true classes, columns predicted ones.

    Args:
        counts: int (K, K).
        names: of the classes.
        of: the set, for the title: "validation" or "test".
    """
    total, right = int(counts.sum()), int(np.trace(counts))
    words = f"Accuracy {right / max(1, total):.4g} on {total:,} {of} samples"

    def draw() -> "Figure":
        classes = len(counts)
        order = measures.in_groups(counts) if classes > IN_GROUPS else np.arange(classes)
        ordered = counts[np.ix_(order, order)]
        shown = [label(names[number], 18) for number in order.tolist()]
        has_names = classes <= NAMED
        size = 7.5 if classes <= 12 else 6.5 if classes <= IN_GROUPS else 5.5
        wide = room_for(shown, size) if has_names else 0.0
        cell = 0.34 if classes <= 12 else 0.28 if classes <= IN_GROUPS else size * 1.25 / 72
        side = max(2.6, cell * min(classes, NAMED))
        cell = side / max(1, classes)
        is_upright = wide < 0.95 * cell
        left, bottom = wide + 0.42, (0.16 if is_upright else wide) + 0.32
        made = figure(side + left + 0.75, side + bottom + 0.55)
        axes = place(made, left, 0.75, 0.55, bottom)
        share = ordered / np.maximum(ordered.sum(1, keepdims=True), 1)
        axes.imshow(
            on_map(share, 0.06 if classes <= IN_GROUPS else 0.2),
            interpolation="none",
            extent=(-0.5, classes - 0.5, classes - 0.5, -0.5),
        )
        ticks, at = (range(classes), shown) if has_names else ([], [])
        axes.set_xticks(ticks, at, rotation=0 if is_upright else 90, fontsize=size)
        axes.set_yticks(ticks, at, fontsize=size)
        axes.tick_params(length=0, pad=2)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        for spine in axes.spines.values():
            spine.set_visible(True)
        if classes <= IN_GROUPS:
            for row, column in np.argwhere(ordered > 0):
                colour = WHITE if share[row, column] > 0.85 else INK
                number = f"{ordered[row, column]:,}"
                if classes <= 12:
                    percent = f"{100 * share[row, column]:.0f} %" if share[row, column] >= 0.005 else "<1 %"
                    above, below = 0.05 / cell, 0.08 / cell
                    axes.text(column, row - above, number, ha="center", va="center", color=colour, fontsize=7)
                    axes.text(column, row + below, percent, ha="center", va="center", color=colour, fontsize=5.5)
                else:
                    axes.text(column, row, number, ha="center", va="center", color=colour, fontsize=6)
        note = "; classes that are confused are neighbours" if classes > IN_GROUPS else ""
        title(made, words, f"colour: share of the true class{note}", left)
        _scale(made, left + side + 0.12, bottom, side)
        return made

    return Drawing(draw, f"Confusion matrix. {words}")


def _scale(made: "Figure", left: float, bottom: float, side: float) -> None:
    """Draw the colour scale beside the matrix. Positions and sizes are in inches."""
    width, height = made.get_size_inches()
    tall = min(side, 3.0)
    bar = made.add_axes((left / width, (bottom + side - tall) / height, 0.1 / width, tall / height))
    steps = np.linspace(1, 0, 50)[:, None]
    bar.imshow(on_map(steps), aspect="auto", extent=(0, 1, 0, 1), interpolation="none")
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    bar.tick_params(length=0, pad=2, labelsize=6.5)
    for spine in bar.spines.values():
        spine.set_visible(True)


def precision_recall(found: measures.PerClass, names: Sequence[str], of: str) -> Drawing:
    """Draw precision and recall of each class as two dots on a line; of many classes, those with the lowest F1."""
    classes = len(names)
    mean = float(found.f1.mean()) if classes else 0.0
    few = f"the {SHOWN} worst of {classes} classes" if classes > SHOWN else f"{classes} classes"
    words = f"Precision and recall of {few}"

    def draw() -> "Figure":
        order = np.argsort(found.f1, kind="stable")[:SHOWN] if len(names) > SHOWN else np.arange(len(names))
        shown = [f"{label(names[n], 18)} ({found.support[n]:,})" for n in order.tolist()]
        left = room_for(shown, 7) + 0.12
        rows = len(order)
        made = figure(max(WIDTH, left + 2.4), max(1.2, 0.19 * rows) + 1.2)
        axes = place(made, left, 0.2, 0.62, 0.58)
        heights = np.arange(rows)
        precision, recall = found.precision[order], found.recall[order]
        axes.hlines(heights, precision, recall, color=GRID, linewidth=2.5)
        axes.plot(precision, heights, "o", color=BLUE, markersize=6, label="precision")
        axes.plot(recall, heights, "D", color=ORANGE, markersize=3.2, label="recall")
        axes.set_yticks(heights, shown, fontsize=7)
        axes.set_ylim(rows - 0.4, -0.6)
        low = float(min(precision.min(), recall.min())) if rows else 0.0
        axes.set_xlim(max(0.0, np.floor(low * 10 - 0.5) / 10), 1.01)
        lines(axes, "x")
        title(made, words, f"{of} set; macro F1 {mean:.4g}; (samples of the class)")
        made.legend(*axes.get_legend_handles_labels(), loc="lower left", ncols=2, bbox_to_anchor=(0.0, 0.0))
        return made

    return Drawing(draw, f"{words} on the {of} set; macro F1 {mean:.4g}")


def reliability(found: measures.Reliability, of: str) -> Drawing:
    """Draw the share of right answers by their probability and, below, the number of answers."""
    words, samples = f"Reliability: ECE {found.error:.4g}", f"{int(found.samples.sum()):,}"

    def draw() -> "Figure":
        made = figure(WIDTH, 4.1)
        above, below = place(
            made, 0.55, 0.2, 0.55, 0.66, nrows=2, sharex=True, gridspec_kw={"height_ratios": [3, 1], "hspace": 0.12}
        )
        bins = len(found.samples)
        middles, there = (np.arange(bins) + 0.5) / bins, found.samples > 0
        above.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        above.bar(
            middles[there], found.accuracy[there], 0.9 / bins, color=BLUE, alpha=0.85, label="share that is right"
        )
        above.plot(
            found.confidence[there], found.accuracy[there], "o", color=ORANGE, markersize=3.5, label="mean probability"
        )
        above.set_ylim(0, 1.02)
        above.set_ylabel("share that is right")
        made.legend(*above.get_legend_handles_labels(), loc="lower left", ncols=2, bbox_to_anchor=(0.06, 0.0))
        below.bar(middles, found.samples, 0.9 / bins, color=MUTED)
        below.set_yscale("symlog", linthresh=1)
        below.set_ylabel("samples")
        below.set_xlabel("probability of the answer")
        below.set_xlim(0, 1)
        below.locator_params(axis="y", numticks=4)
        below.yaxis.set_major_formatter("{x:g}")
        lines(above)
        lines(below, "y")
        for axes in (above, below):
            axes.minorticks_off()
        title(made, words, f"{samples} {of} samples; dashed: as sure as right")
        return made

    return Drawing(draw, f"{words}, the expected calibration error on {samples} {of} samples")


def two_classes(score: np.ndarray, is_positive: np.ndarray, positive: str, of: str) -> Drawing:
    """Draw ROC and precision-recall curves for the second of two classes.

    Args:
        score: its probability, float (N,).
        is_positive: whether a sample is of it, bool (N,); both occur.
        positive: its name.
        of: the set, for the title.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

    area, average = f"{roc_auc_score(is_positive, score):.4g}", f"{average_precision_score(is_positive, score):.4g}"

    def draw() -> "Figure":
        made = figure(WIDTH, 2.75)
        roc, pr = place(made, 0.5, 0.15, 0.55, 0.45, ncols=2, gridspec_kw={"wspace": 0.42})
        false, true, _ = roc_curve(is_positive, score, drop_intermediate=False)
        precision, recall, _ = precision_recall_curve(is_positive, score)
        roc.plot([0, 1], [0, 1], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        roc.plot(false, true, color=BLUE)
        roc.set_xlabel("false positive rate")
        roc.set_ylabel("true positive rate")
        pr.step(recall, precision, where="post", color=GREEN)
        pr.set_xlabel("recall")
        pr.set_ylabel("precision")
        for axes in (roc, pr):
            axes.set_xlim(-0.02, 1.02)
            axes.set_ylim(-0.02, 1.03)
            axes.set_xticks([0, 0.5, 1])
            lines(axes)
        words = f"ROC area {area}; average precision {average}"
        title(made, words, f"{of} set; positive: {label(positive)}")
        return made

    words = f"ROC: area {area}. Precision and recall: average precision {average}"
    return Drawing(draw, f"{words}, of the class {label(positive)} on the {of} set")


class Sample(NamedTuple):
    """One sample on a sheet.

    Attributes:
        image: uint8 (H, W) or (H, W, 3).
        above, below: a line each.
        is_right: whether its answer is right; None: that is not a question of yes and no.
    """

    image: np.ndarray
    above: str
    below: str
    is_right: bool | None


def answer(true: str, predicted: str, probability: float) -> tuple[str, str]:
    """Return the caption of a sample on a sheet, on two lines."""
    return f"true {label(true, 14)}", f"predicted {label(predicted, 10)}, {probability:.0%}"


def sheet(samples: Sequence[Sample], words: str, note: str, columns: int = 4) -> Drawing:
    """Draw samples in rows; a red frame marks a wrong answer."""

    def draw() -> "Figure":
        from matplotlib.patches import Rectangle

        rows = max(1, -(-len(samples) // columns))
        across, down = 1.12, 1.38  # inches of a place, and 0.86 of its picture
        height = rows * down + 0.55
        made, axes = _canvas(columns * across + 0.2, height, words, note)
        for number, sample in enumerate(samples):
            x = 0.1 + (number % columns) * across + across / 2
            y = height - 0.55 - (number // columns) * down - 0.45
            tall, wide = sample.image.shape[:2]
            half_w, half_h = (0.43 * side / max(tall, wide) for side in (wide, tall))
            box = (x - half_w, x + half_w, y - half_h, y + half_h)
            axes.imshow(sample.image, cmap="gray", vmin=0, vmax=255, extent=box, interpolation="none", aspect="auto")
            frame, said, thick = (RED, RED, 2.0) if sample.is_right is False else (GRID, MUTED, 0.8)
            corner = (box[0], box[2])
            axes.add_patch(Rectangle(corner, 2 * half_w, 2 * half_h, fill=False, edgecolor=frame, linewidth=thick))
            axes.text(x, y - 0.54, sample.above, ha="center", va="center", fontsize=6.5, color=INK)
            axes.text(x, y - 0.67, sample.below, ha="center", va="center", fontsize=6.5, color=said)
        return made

    return Drawing(draw, f"{words}. {note}")


def _canvas(width: float, height: float, words: str, note: str) -> "tuple[Figure, Any]":
    """Create a figure with a title and one pair of axes in inches for all of it: sixteen pairs take 0.3 CPU seconds."""
    made = figure(width, height)
    axes: Any = made.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(0, height))
    title(made, words, note)
    return made, axes


# ---- masks

OPACITY = 0.55
"""Of a class over its pixels."""

_SIDE, _GAP = 1.25, 0.08  # inches of a picture, and between two


def overlay(pictures: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return pictures in the colours of their classes, uint8 (B, H, W, 3); ignored pixels are white.

    Args:
        pictures: uint8 (B, H, W, C), C of 1 or 3.
        classes: int (B, H, W); negative: does not count.
    """
    colours = np.array(CLASS_COLOURS, np.float64)[np.maximum(classes, 0) % len(CLASS_COLOURS)]
    colours[classes < 0] = 255
    opacity = np.where(classes < 0, 0.85, OPACITY)[..., None]
    found: np.ndarray = np.rint(opacity * colours + (1 - opacity) * pictures).astype(np.uint8)
    return found


def overlays(
    pictures: np.ndarray, truth: np.ndarray, predicted: np.ndarray, names: Sequence[str], right: np.ndarray
) -> Drawing:
    """Draw a row for each picture: as it is, with its true classes, with the predicted ones.

    Args:
        pictures: uint8 (B, H, W, C), C of 1 or 3.
        truth, predicted: int (B, H, W); negative in the truth: does not count.
        names: of the classes.
        right: the share of pixels that are right, float (B,).
    """
    alt = f"{len(pictures)} validation pictures with true and predicted classes, the least right first"

    def draw() -> "Figure":
        from matplotlib.patches import Rectangle

        rows, height, width = pictures.shape[:3]
        tall, wide = (_SIDE * side / max(height, width) for side in (height, width))
        occurring = [n for n in range(len(names)) if (truth == n).any() or (predicted == n).any()]
        legend = -(-len(occurring) // 3)
        down = rows * (tall + _GAP) + 0.85 + 0.19 * legend + 0.1
        note = "share of the pixels that are right at the right edge"
        made, axes = _canvas(3 * (wide + _GAP) + 0.64, down, "Validation pictures, the least right first", note)
        columns = (
            ("picture", np.broadcast_to(pictures, (*pictures.shape[:3], 3))),
            ("true", overlay(pictures, truth)),
            ("predicted", overlay(pictures, predicted)),
        )
        for column, (word, images) in enumerate(columns):
            x = 0.12 + column * (wide + _GAP)
            axes.text(x + wide / 2, down - 0.65, word, ha="center", va="center", color=MUTED)
            for row, image in enumerate(images):
                y = down - 0.78 - (row + 1) * (tall + _GAP) + _GAP
                axes.imshow(image, extent=(x, x + wide, y, y + tall), interpolation="none", aspect="auto")
                axes.add_patch(Rectangle((x, y), wide, tall, fill=False, edgecolor=GRID, linewidth=0.8))
        for row, share in enumerate(right):
            y = down - 0.78 - (row + 1) * (tall + _GAP) + _GAP + tall / 2
            axes.text(0.12 + 3 * (wide + _GAP), y, f"{share:.0%}", va="center", fontsize=7.5, color=INK)
        for number, which in enumerate(occurring):
            x, y = 0.12 + number % 3 * (wide + _GAP), 0.1 + (legend - 1 - number // 3) * 0.19
            colour = [part / 255 for part in CLASS_COLOURS[which % len(CLASS_COLOURS)]]
            axes.add_patch(Rectangle((x, y), 0.11, 0.11, facecolor=colour, edgecolor=GRID, linewidth=0.8))
            axes.text(x + 0.16, y + 0.05, label(names[which], 16), va="center", fontsize=7)
        return made

    return Drawing(draw, alt)
