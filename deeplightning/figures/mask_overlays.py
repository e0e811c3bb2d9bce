"""Pictures with the class of each pixel laid over them. B pictures of H x W pixels, C channels."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deeplightning.figures.style import GRID, INK, MUTED, Drawing, figure, label, title
from deeplightning.kinds import CLASS_COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    return Drawing(lambda: _overlays(pictures, truth, predicted, names, right), alt)


def _overlays(
    pictures: np.ndarray, truth: np.ndarray, predicted: np.ndarray, names: Sequence[str], right: np.ndarray
) -> "Figure":
    from matplotlib.patches import Rectangle

    rows, height, width = pictures.shape[:3]
    tall, wide = (_SIDE * side / max(height, width) for side in (height, width))
    occurring = [n for n in range(len(names)) if (truth == n).any() or (predicted == n).any()]
    legend = -(-len(occurring) // 3)
    made = figure(3 * (wide + _GAP) + 0.24 + 0.4, rows * (tall + _GAP) + 0.85 + 0.19 * legend + 0.1)
    axes: Any = made.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    across, down = made.get_size_inches()
    title(made, "Validation pictures, the least right first", "share of the pixels that are right at the right edge")
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
    axes.set_xlim(0, across)
    axes.set_ylim(0, down)
    return made
