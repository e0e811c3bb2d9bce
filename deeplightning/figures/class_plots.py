"""Draw classes: confusion matrix, precision and recall, reliability, ROC and PR, samples, and masks over images.

K classes, N samples, B images of H x W pixels, C channels.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deeplightning.figures import measures, style
from deeplightning.kinds import CLASS_COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COUNTED_CLASSES = 20
"""Maximum number of classes of a confusion matrix whose cells show counts."""

MAX_NAMED_CLASSES = 120
"""Maximum number of classes of a confusion matrix with class names; a larger matrix has the same size and no names."""

MAX_MATRIX_CLASSES = 1000
"""Maximum number of classes of a confusion matrix; with more, it would be a dot per sample."""

MAX_CLASSES = 30
"""Maximum number of classes whose precision and recall are shown; of more, those with the lowest F1."""


def confusion_matrix(counts: np.ndarray, names: Sequence[str], of: str) -> style.Drawing:
    """Draw counts, int (K, K), and their share of each row: rows are true classes, columns are predicted ones. `of` is
    the data set, for the title."""
    total, right = int(counts.sum()), int(np.trace(counts))
    heading = f"Accuracy {right / max(1, total):.4g} on {total:,} {of} samples"

    def draw() -> "Figure":
        from matplotlib.colors import ListedColormap, to_rgb

        classes = len(counts)
        # In points and inches.
        size, cell = (7.5, 0.34) if classes <= 12 else (6.5, 0.28) if classes <= MAX_COUNTED_CLASSES else (5.5, 0.095)
        side = max(2.6, cell * min(classes, MAX_NAMED_CLASSES))
        shown = [style.label(name, 18) for name in names] if classes <= MAX_NAMED_CLASSES else []
        longest = max(map(len, shown), default=0) * 0.62 * size / 72  # inches
        is_upright = longest < side / classes
        made = style.figure(side + longest + 1.2, side + (0.16 if is_upright else longest) + 1.15)
        axes = made.subplots()
        share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        opacities = np.linspace(0.06 if classes <= MAX_COUNTED_CLASSES else 0.2, 1, 256)
        colours = ListedColormap([(*to_rgb(style.MAP), opacity) for opacity in opacities])
        image = axes.imshow(np.ma.masked_equal(share, 0), colours, vmin=0, vmax=1, interpolation="none")
        axes.set_xticks(range(len(shown)), shown, rotation=0 if is_upright else 90, fontsize=size)
        axes.set_yticks(range(len(shown)), shown, fontsize=size)
        axes.tick_params(length=0, pad=2)
        axes.set(xlabel="predicted class", ylabel="true class")
        axes.spines[:].set_visible(True)
        for row, column in np.argwhere(counts > 0) if classes <= MAX_COUNTED_CLASSES else ():
            cell_text = f"{counts[row, column]:,}"
            if classes <= 12:
                cell_text += f"\n{share[row, column]:.0%}" if share[row, column] >= 0.005 else "\n<1%"
            colour = style.WHITE if share[row, column] > 0.85 else style.INK
            axes.text(column, row, cell_text, ha="center", va="center", color=colour, fontsize=6)
        bar_axes = axes.inset_axes((1.02, 0, 0.03, 1))  # as tall as the matrix
        made.colorbar(image, cax=bar_axes, ticks=[0, 0.5, 1], format="{x:.0%}").ax.tick_params(length=0)
        style.title(made, heading, "colour: share of the true class")
        return made

    return style.Drawing(draw, f"Confusion matrix. {heading}")


def precision_recall(found: measures.PerClass, names: Sequence[str], of: str) -> style.Drawing:
    """Draw precision and recall of each class as two dots on a line; of many classes, only those with the lowest F1."""
    classes = len(names)
    mean = float(found.f1.mean()) if classes else 0.0
    few = f"the {MAX_CLASSES} worst of {classes} classes" if classes > MAX_CLASSES else f"{classes} classes"
    heading = f"Precision and recall of {few}"

    def draw() -> "Figure":
        order = np.argsort(found.f1, kind="stable")[:MAX_CLASSES] if len(names) > MAX_CLASSES else np.arange(len(names))
        shown = [f"{style.label(names[n], 18)} ({found.support[n]:,})" for n in order.tolist()]
        rows = len(order)
        made = style.figure(style.WIDTH, max(1.2, 0.19 * rows) + 1.2)
        axes = made.subplots()
        heights = np.arange(rows)
        precision, recall = found.precision[order], found.recall[order]
        axes.hlines(heights, precision, recall, color=style.GRID, linewidth=2.5)
        axes.plot(precision, heights, "o", color=style.BLUE, markersize=6, label="precision")
        axes.plot(recall, heights, "D", color=style.ORANGE, markersize=3.2, label="recall")
        axes.set_yticks(heights, shown, fontsize=7)
        low = float(min(precision.min(), recall.min())) if rows else 0.0
        axes.set(xlim=(max(0.0, np.floor(low * 10 - 0.5) / 10), 1.01), ylim=(rows - 0.4, -0.6))
        style.lines(axes, "x")
        style.title(made, heading, f"{of} set; macro F1 {mean:.4g}; (samples of the class)")
        made.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)
        return made

    return style.Drawing(draw, f"{heading} on the {of} set; macro F1 {mean:.4g}")


def reliability(found: measures.Reliability, of: str) -> style.Drawing:
    """Draw accuracy by confidence and, below, the number of samples."""
    heading, samples = f"Reliability: ECE {found.error:.4g}", f"{int(found.samples.sum()):,}"

    def draw() -> "Figure":
        made = style.figure(style.WIDTH, 4.1)
        above, below = made.subplots(2, sharex=True, height_ratios=[3, 1])
        bins = len(found.samples)
        middles, filled = (np.arange(bins) + 0.5) / bins, found.samples > 0
        above.plot([0, 1], [0, 1], color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
        confidence, accuracy = found.confidence[filled], found.accuracy[filled]
        above.bar(middles[filled], accuracy, 0.9 / bins, color=style.BLUE, alpha=0.85, label="accuracy")
        above.plot(confidence, accuracy, "o", color=style.ORANGE, markersize=3.5, label="mean confidence")
        above.set(ylim=(0, 1.02), ylabel="accuracy")
        made.legend(*above.get_legend_handles_labels(), loc="outside lower left", ncols=2)
        below.bar(middles, found.samples, 0.9 / bins, color=style.MUTED)
        below.set_yscale("symlog", linthresh=1)
        below.set(xlabel="confidence", xlim=(0, 1), ylabel="samples")
        below.locator_params(axis="y", numticks=4)
        below.yaxis.set_major_formatter("{x:g}")
        style.lines(above)
        style.lines(below, "y")
        for axes in (above, below):
            axes.minorticks_off()
        style.title(made, heading, f"{samples} {of} samples; dashed: perfect calibration")
        return made

    return style.Drawing(draw, f"{heading}, the expected calibration error on {samples} {of} samples")


def two_classes(score: np.ndarray, is_positive: np.ndarray, positive: str, of: str) -> style.Drawing:
    """Draw ROC and precision-recall curves for the second of two classes.

    Args:
        score: probability of this class, float (N,).
        is_positive: whether a sample belongs to it, bool (N,); both values occur.
        positive: name of this class.
        of: the data set, for the title.
    """
    from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

    area, average = f"{roc_auc_score(is_positive, score):.4g}", f"{average_precision_score(is_positive, score):.4g}"

    def draw() -> "Figure":
        made = style.figure(style.WIDTH, 2.75)
        roc, pr = made.subplots(ncols=2)
        false, true, _ = roc_curve(is_positive, score, drop_intermediate=False)
        precision, recall, _ = precision_recall_curve(is_positive, score)
        roc.plot([0, 1], [0, 1], color=style.MUTED, linewidth=1, linestyle=(0, (4, 3)))
        roc.plot(false, true, color=style.BLUE)
        roc.set(xlabel="false positive rate", ylabel="true positive rate")
        pr.step(recall, precision, where="post", color=style.GREEN)
        pr.set(xlabel="recall", ylabel="precision")
        for axes in (roc, pr):
            axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.03), xticks=[0, 0.5, 1])
            style.lines(axes)
        heading = f"ROC area {area}; average precision {average}"
        style.title(made, heading, f"{of} set; positive: {style.label(positive)}")
        return made

    description = f"ROC: area {area}. Precision and recall: average precision {average}"
    return style.Drawing(draw, f"{description}, of the class {style.label(positive)} on the {of} set")


class Sample(NamedTuple):
    """One sample on a sheet."""

    image: np.ndarray  # uint8 (H, W) or (H, W, 3)
    above: str  # the first line of the caption
    below: str  # the second line
    is_right: bool | None  # whether its answer is right; None: neither right nor wrong


def answer(true: str, predicted: str, probability: float) -> tuple[str, str]:
    """Return the caption of a sample on a sheet, in two lines."""
    return f"true {style.label(true, 14)}", f"predicted {style.label(predicted, 10)}, {probability:.0%}"


def sheet(
    samples: Sequence[Sample],
    heading: str,
    note: str,
    columns: int = 4,
    colours: Mapping[str, tuple[float, float, float]] | None = None,
) -> style.Drawing:
    """Draw samples in rows; a red frame marks a wrong answer.

    Args:
        heading: the title.
        note: the line below the title.
        columns: samples per row.
        colours: legend: red, green and blue from 0 to 1, by name.
    """

    def draw() -> "Figure":
        from matplotlib.patches import Patch, Rectangle

        rows = max(1, -(-len(samples) // columns))
        across, down = 1.12, 1.38  # inches of a cell; its image is 0.86 inches
        legend = -(-len(colours or ()) // columns) * 0.19
        width, height = columns * across + 0.2, rows * down + legend + 0.55
        made = style.figure(width, height, layout=None)
        axes: Any = made.add_axes((0, 0, 1, 1))  # in inches, for the whole sheet: sixteen axes take 0.3 CPU seconds
        axes.set_axis_off()
        axes.set(xlim=(0, width), ylim=(0, height))
        style.title(made, heading, note)
        for number, sample in enumerate(samples):
            x = 0.1 + (number % columns) * across + across / 2
            y = height - 0.55 - (number // columns) * down - 0.45
            tall, wide = sample.image.shape[:2]
            half_w, half_h = (0.43 * side / max(tall, wide) for side in (wide, tall))
            box = (x - half_w, x + half_w, y - half_h, y + half_h)
            axes.imshow(sample.image, cmap="gray", vmin=0, vmax=255, extent=box, interpolation="none", aspect="auto")
            is_wrong = sample.is_right is False
            frame, text_colour, thickness = (style.RED, style.RED, 2.0) if is_wrong else (style.GRID, style.MUTED, 0.8)
            corner = (box[0], box[2])
            axes.add_patch(Rectangle(corner, 2 * half_w, 2 * half_h, fill=False, edgecolor=frame, linewidth=thickness))
            axes.text(x, y - 0.54, sample.above, ha="center", va="center", fontsize=6.5, color=style.INK)
            axes.text(x, y - 0.67, sample.below, ha="center", va="center", fontsize=6.5, color=text_colour)
        if colours:
            patches = [Patch(facecolor=colour, edgecolor=style.GRID, label=name) for name, colour in colours.items()]
            made.legend(handles=patches, loc="lower left", ncols=columns, handlelength=1, borderaxespad=0.1)
        return made

    return style.Drawing(draw, f"{heading}. {note}")


# ---- masks

OPACITY = 0.55
"""Opacity of a class's colour over its pixels."""


def overlay(pictures: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return images overlaid with the colours of their classes, uint8 (…, H, W, 3); ignored pixels are white.

    Args:
        pictures: uint8 (…, H, W, C), C of 1 or 3.
        classes: int (…, H, W); negative: ignored.
    """
    colours = np.array(CLASS_COLOURS, np.float64)[np.maximum(classes, 0) % len(CLASS_COLOURS)]
    colours[classes < 0] = 255
    opacity = np.where(classes < 0, 0.85, OPACITY)[..., None]
    return np.rint(opacity * colours + (1 - opacity) * pictures).astype(np.uint8)


def overlays(
    pictures: np.ndarray, truth: np.ndarray, predicted: np.ndarray, names: Sequence[str], right: np.ndarray
) -> style.Drawing:
    """Draw a row for each image: the image, its true classes and its predicted classes.

    Args:
        pictures: uint8 (B, H, W, C), C of 1 or 3.
        truth, predicted: int (B, H, W); negative in the truth: ignored.
        names: names of the classes.
        right: share of correct pixels, float (B,).
    """
    samples = list[Sample]()
    for picture, true, answered, share in zip(pictures, truth, predicted, right.tolist(), strict=True):
        samples += [
            Sample(np.broadcast_to(picture, (*picture.shape[:2], 3)), "image", "", None),
            Sample(overlay(picture, true), "true", "", None),
            Sample(overlay(picture, answered), "predicted", f"{share:.0%} right", None),
        ]
    occurring = [n for n in range(len(names)) if (truth == n).any() or (predicted == n).any()]
    palette = [(red / 255, green / 255, blue / 255) for red, green, blue in CLASS_COLOURS]
    colours = {style.label(names[number], 16): palette[number % len(palette)] for number in occurring}
    return sheet(samples, "Validation images, least accurate first", "white: ignored", 3, colours)
