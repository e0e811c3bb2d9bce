"""Render a report, `page.html`: one file without scripts or network access. All text is redacted, and escaped by Jinja;
pictures are data URLs in `<img>`, where an SVG cannot run scripts; a Content-Security-Policy forbids everything else.
"""

import base64
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from deeplightning.figures.style import DARK, GRID, INK, MUTED, PAPER, RED
from deeplightning.report.facts import PNG, Mistake, without_secrets
from deeplightning.version import __version__
from deeplightning.words import printable

MARK = '<meta name="generator" content="Deep Lightning'
"""Tag that identifies a file as a report."""

WIDE_PIXELS = 620
"""Width in CSS pixels above which a picture keeps its size and is scrolled on a narrow page."""

_SVG_WIDTH = re.compile(rb'<svg[^>]*?\swidth="([\d.]+)pt"')


@dataclass
class Picture:
    """A PNG or SVG of a page."""

    url: Markup
    alt: str
    caption: str
    kind: str  # "wide" for a drawing that is scrolled, "small" for a PNG that is enlarged, else ""
    width: int | None  # in CSS pixels; None: as large as it is


def picture(name: str, content: bytes, alt: str = "", caption: str = "") -> list[Picture]:
    """Return a PNG or SVG for a page; [] for other content."""
    kind, width, alt = "", None, alt or name.replace("_", " ")
    if content.startswith(PNG):
        size = struct.unpack(">I", content[16:20])[0] if len(content) > 24 else 0
        if size < 300:
            kind, width = "small", max(size, 96)
    elif (found := _SVG_WIDTH.search(content[:2000])) is not None:
        width = round(float(found[1]) * 4 / 3)
        kind = "wide" if width > WIDE_PIXELS else ""
    else:
        return []
    return [Picture(_as_url(content), alt, caption, kind, width)]


def _as_url(content: bytes) -> Markup:
    kind = "png" if content.startswith(PNG) else "svg+xml"
    return Markup(f"data:image/{kind};base64,{base64.b64encode(content).decode()}")


def _as_table(mistakes: Sequence[Mistake]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return head and rows of a table of the worst answers, without empty columns."""
    names = dict.fromkeys(name for one in mistakes for name in one.words)
    columns = {"text": [one.text for one in mistakes]}
    columns |= {name: [one.words.get(name, "") for one in mistakes] for name in names}
    columns |= {"sample": [one.name for one in mistakes]}
    kept = {name: cells for name, cells in columns.items() if name in names or any(cells)}
    return [*kept], list(zip(*kept.values(), strict=True))


def _to_text(value: object) -> str:
    """Redact a value and make it printable, unless it is HTML."""
    return value if isinstance(value, Markup) else printable(without_secrets(str(value)), "\t\n\r")


def _to_breakable(value: object) -> Markup:
    """Return the HTML of a text, such as a key or a path, whose lines may break between its parts."""
    return Markup(re.sub(r"(?<=\w)([._/])(?=\w)", r"\1<wbr>", str(escape(_to_text(value)))))


def _style() -> str:
    """Return the style sheet: colours for light and dark mode, then `page.css`."""
    names = {"ink": INK, "muted": MUTED, "line": GRID, "paper": PAPER}
    light = "".join(f"--{name}: {value}; " for name, value in names.items())
    dark = "".join(f"--{name}: {DARK[value]}; " for name, value in names.items())
    light += f"--back: #f3f5f8; --accent: #1f6fb5; --bad: {RED};"
    dark += "--back: #0e1116; --accent: #6fb1ec; --bad: #ee7272;"
    colours = f":root {{ color-scheme: light dark; {light} }}\n"
    colours += f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return colours + Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def document(title: str, subtitle: str, **values: Any) -> str:
    """Return the page. The template uses the values in its sections, and leaves out sections without content."""
    templates = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=templates, autoescape=True, finalize=_to_text, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"as_table": _as_table, "as_url": _as_url, "breakable": _to_breakable}
    fixed = {"style": Markup(_style()), "generator": f"Deep Lightning {__version__}"}
    return jinja.get_template("page.html").render(title=title, subtitle=subtitle, **fixed, **values) + "\n"
