"""Figures of what a classifier sees and answers. Matplotlib's figures only, no window and no global state."""

from matplotlib.figure import Figure
from torch import Tensor


def confusion_matrix(counts: Tensor, names: list[str]) -> object:
    """A figure of counts (K, K): rows are labels, columns answers."""
    size = min(4 + 0.25 * len(names), 20)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.subplots()
    share = counts / counts.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("answered")
    axes.set_ylabel("label")
    if len(names) <= 60:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
    if len(names) <= 20:
        for row, column in counts.nonzero().tolist():
            color = "white" if share[row, column] > 0.5 else "black"
            axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", color=color)
    return figure


def sheet(samples: dict[str, Tensor], names: list[str]) -> object:
    """A figure of up to 16 pictures with what the network says of each, red where it is wrong."""
    figure = Figure(figsize=(7, 7.5), layout="constrained")
    grid = figure.subplots(4, 4, squeeze=False).flatten()
    for axes in grid:
        axes.axis("off")
    for axes, image, label, predicted, p in zip(grid, *samples.values(), strict=False):
        picture = image.permute(1, 2, 0).numpy()
        axes.imshow(picture if picture.shape[2] == 3 else picture[:, :, 0], cmap="gray", vmin=0, vmax=255)
        right = bool(label == predicted)
        said = f"{names[predicted]} ({p:.0%})" if right else f"{names[predicted]} ({p:.0%}), is {names[label]}"
        axes.set_title(said, fontsize=8, color="black" if right else "red")
    return figure
