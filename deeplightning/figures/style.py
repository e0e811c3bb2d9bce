"""The style of all figures, and their conversion to SVG and PNG.

A figure is drawn once, in the colours of a light page. In an SVG, the colours of text, lines and background are CSS
variables with a second value for `prefers-color-scheme: dark`; other colours are readable on both. A PNG has a light
background. Text from users, such as class names, is never parsed as mathematics.
"""

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deeplightning.runfolder import whole, write_whole
from deeplightning.words import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1b1f25", "#59636f", "#d9dee5", "#fefefe"
DARK = {INK: "#e6eaef", MUTED: "#9aa5b1", GRID: "#363d46", PAPER: "#15191e"}
"""Replacements of the colours on a dark page."""

BLUE, ORANGE, GREEN, RED, PURPLE = "#2f7fc8", "#d2721a", "#2f9a63", "#d64545", "#8a6bd1"
"""Colours of lines. Each has a contrast of at least 3 on both backgrounds."""

MAP, WHITE = "#2672b8", "#ffffff"
"""Full colour of a colour map and of text on it, the same on both backgrounds."""

WIDTH = 4.0
"""Default width in inches. Text of 8 points stays legible on a phone that shows the figure 330 pixels wide."""

DPI = 144
MAX_LABEL_CHARACTERS = 24
"""Maximum length of a label."""

_CSS_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "deeplightning",
}


@dataclass(frozen=True)
class Drawing:
    """A figure that is not drawn yet; `draw` returns it."""

    draw: "Callable[[], Figure]"
    alt: str = ""  # alternative text: one sentence that describes the figure


@contextmanager
def style() -> Iterator[None]:
    """Apply the style inside the block and restore matplotlib's settings afterwards."""
    import matplotlib

    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            yield
    finally:
        log.setLevel(level)


def figure(
    width: float = WIDTH, height: float = 3.2, layout: Literal["constrained"] | None = "constrained"
) -> "Figure":
    """Create an empty figure, with sizes in inches, without pyplot, which would keep it open.

    Args:
        layout: None: the caller positions all elements.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def title(figure: "Figure", text: str, note: str = "") -> None:
    """Write a title at the top of a figure, and a note below it."""
    width, height = figure.get_size_inches()
    figure.text(0.12 / width, 1 - 0.18 / height, text, weight="bold", fontsize=9, va="center")
    figure.text(0.12 / width, 1 - 0.37 / height, note, color=MUTED, fontsize=7, va="center")
    engine: Any = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, 0, 1, 1 - 0.5 / height))


def lines(axes: "Axes", which: str = "both") -> None:
    """Draw thin lines behind the data and remove the ticks."""
    axes.grid(True, axis=which)  # type: ignore[arg-type]
    axes.tick_params(length=0)


def label(text: object, longest: int = MAX_LABEL_CHARACTERS) -> str:
    """Format a name for a figure: one line, no control characters, and the middle shortened if it is too long."""
    name = printable(str(text))
    if len(name) <= longest:
        return name
    end = longest // 3
    return f"{name[: longest - end - 1]}…{name[-end:]}"


def to_svg(figure: "Figure", alt: str = "") -> str:
    """Render a figure as SVG that adapts to light and dark pages. Equal figures give equal text."""
    stream = io.StringIO()
    with style():
        title = {"Title": label(alt, 200)} if alt else {}
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, **title})
    text = stream.getvalue()
    for light, name in _CSS_NAMES.items():
        text = text.replace(light, f"var(--{name})")
    light_values = "".join(f"--{name}:{value};" for value, name in _CSS_NAMES.items())
    dark_values = "".join(f"--{name}:{DARK[value]};" for value, name in _CSS_NAMES.items())
    css = f"svg{{{light_values}}}@media(prefers-color-scheme:dark){{svg{{{dark_values}}}}}"
    text = text.replace("<defs>", f"<style>{css}</style>\n <defs>", 1)
    return text[text.index("<svg") :]


def drawn(drawing: Drawing) -> "Figure":
    """Return the figure, drawn in the style and laid out."""
    with style():
        figure = drawing.draw()
        if (engine := figure.get_layout_engine()) is not None:
            engine.execute(figure)
            figure.set_layout_engine("none")  # not again for each file
    return figure


def save(drawing: Drawing, path: Path) -> str:
    """Draw once, write `path` with the suffixes .svg and .png, and return the SVG."""
    figure = drawn(drawing)
    text = to_svg(figure, drawing.alt)
    with style(), whole(path.with_name(f"{path.name}.png")) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    write_whole(path.with_name(f"{path.name}.svg"), text)
    return text
