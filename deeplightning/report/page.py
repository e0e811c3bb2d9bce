"""Build the HTML of a report: one file without scripts or network access. All text from a run is escaped and redacted;
pictures are data URLs in `<img>`, where an SVG cannot run scripts; a Content-Security-Policy forbids everything else.
"""

import base64
import re
import shlex
import struct
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from deeplightning.config.tree import line
from deeplightning.figures.style import DARK, GRID, INK, MUTED, PAPER, RED
from deeplightning.report.facts import PNG, Facts, Mistake, without_secrets
from deeplightning.version import __version__
from deeplightning.words import printable

GENERATOR = f"Deep Lightning {__version__}"
MARK = '<meta name="generator" content="Deep Lightning'
"""Tag that identifies a file as a report."""

WIDE_PIXELS = 620
"""Width in CSS pixels above which a picture keeps its size and is scrolled on a narrow page."""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_SVG_WIDTH = re.compile(rb'<svg[^>]*?\swidth="([\d.]+)pt"')


def _style() -> str:
    """Return the style sheet: colours for light and dark mode, then `page.css`."""

    def values(colours: dict[str, str], more: str) -> str:
        names = {"ink": INK, "muted": MUTED, "line": GRID, "paper": PAPER}
        return "".join(f"--{name}: {colours.get(value, value)}; " for name, value in names.items()) + more

    light = values({}, f"--back: #f3f5f8; --accent: #1f6fb5; --bad: {RED};")
    dark = values(DARK, "--back: #0e1116; --accent: #6fb1ec; --bad: #ee7272;")
    colours = f":root {{ color-scheme: light dark; {light} }}\n"
    colours += f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return colours + Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def text(value: object) -> str:
    """Redact and escape text from a run for HTML."""
    return escape(printable(without_secrets(str(value)), "\t\n\r"))


def document(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """Return the complete page; `title` and `subtitle` are text from a run, `sections` are HTML."""
    body = "\n".join(section for section in sections if section)
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{GENERATOR}">
<title>{text(title)}</title>
<style>
{_style()}</style>
</head>
<body>
<header>
<h1>{text(title)}</h1>
<p class="muted">{text(subtitle)}</p>
</header>
<main>
{body}
</main>
<footer>Made by {GENERATOR}. This file needs no network and holds no script.</footer>
</body>
</html>
"""


def section(title: str, *parts: str) -> str:
    """Return a section with a heading around HTML, or "" if it is empty."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def row(parts: Iterable[str]) -> str:
    """Return cards side by side, or "" if there are none."""
    content = "\n".join(part for part in parts if part)
    return f'<div class="row">\n{content}\n</div>' if content else ""


def details(summary: str, content: str, is_open: bool = False) -> str:
    """Return a card that unfolds, or "" if it is empty."""
    return (
        f'<details class="card"{" open" if is_open else ""}><summary>{escape(summary)}</summary>\n{content}\n</details>'
        if content
        else ""
    )


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Return the headline figures; `values` are pairs of name and value."""
    return row(f'<div class="card tile">{text(name)}<b>{text(value)}</b></div>' for name, value in values)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> str:
    """Return a table of text from a run. Columns in `numbers` are right-aligned."""
    given = list(rows)
    if not given:
        return ""

    def cell(tag: str, column: int, value: object) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        shown_ = text(value)
        if column not in numbers:  # keys and paths may break between their parts
            shown_ = re.sub(r"(?<=\w)([._/])(?=\w)", r"\1<wbr>", shown_)
        return f"<{tag}{scope}{_class('n' if column in numbers else '')}>{shown_}</{tag}>"

    lines = [f"<tr>{''.join(cell('th', n, word) for n, word in enumerate(head))}</tr>"]
    lines += [f"<tr>{''.join(cell('td', n, value) for n, value in enumerate(one))}</tr>" for one in given]
    content = "\n".join(lines)
    return f'<div class="scroll" tabindex="0">\n<table>\n{content}\n</table>\n</div>'


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def picture(name: str, content: bytes, alt: str = "", caption: str = "") -> str:
    """Return a PNG or SVG as a card, or "" for other content."""
    is_png = content.startswith(PNG)
    if is_png:
        width = struct.unpack(">I", content[16:20])[0] if len(content) > 24 else 0
    elif (found := _SVG_WIDTH.search(content[:2000])) is not None:
        width = round(float(found[1]) * 4 / 3)
    else:
        return ""
    kind = "wide" if not is_png and width > WIDE_PIXELS else "small" if is_png and width < 300 else ""
    size = f' width="{width}"' if not is_png else f' width="{max(width, 96)}"' if kind == "small" else ""
    data, mime = base64.b64encode(content).decode(), "png" if is_png else "svg+xml"
    described = text(alt or name.replace("_", " "))
    image = f'<img{_class(kind)}{size} alt="{described}" src="data:image/{mime};base64,{data}">'
    if kind == "wide":
        image = f'<div class="scroll" tabindex="0">{image}</div>'
    below = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f'<figure class="card">{image}{below}</figure>'


def mistakes(found: Sequence[Mistake]) -> str:
    """Return the worst answers: pictures side by side, other samples as a table."""
    if not found:
        return ""
    if any(one.image for one in found):
        figures = "\n".join(_mistake(one) for one in found)
        return f'<div class="card mistakes">\n{figures}\n</div>'
    names = dict.fromkeys(name for one in found for name in one.words)
    columns = {"text": [one.text for one in found]}
    columns |= {name: [one.words.get(name, "") for one in found] for name in names}
    columns |= {"sample": [one.name for one in found]}
    kept = {name: cells for name, cells in columns.items() if name in names or any(cells)}
    return f'<div class="card">{table([*kept], zip(*kept.values(), strict=True))}</div>'


def _mistake(one: Mistake) -> str:
    words = ((name, value) for name, value in one.words.items() if name != "index")
    described = ", ".join(f"{text(name)} <b>{text(value)}</b>" for name, value in words)
    name = one.name or f"sample {one.words.get('index', '')}"
    image = base64.b64encode(one.image).decode()
    shown_ = f'<img alt="{text(name)}" src="data:image/png;base64,{image}">' if one.image else ""
    return f"<figure>{shown_}<figcaption>{described}<br>{text(name)}</figcaption></figure>"


def config(run: Facts) -> str:
    """Return the config with the source of each value; keys with default values come last."""
    if not run.config:
        return ""
    if not run.places:
        rows = [(key, _value(value)) for key, value in run.config.items()]
        return details(f"{len(rows)} keys", table(("key", "value"), rows), True)

    def place(key: str) -> str | None:
        return run.places.get(key) or next((p for k, p in run.places.items() if k.startswith(f"{key}.")), None)

    placed = [(key, value, place(key)) for key, value in run.config.items()]
    set_ = [(key, _value(value), where) for key, value, where in placed if where]
    defaults = [(key, _value(value)) for key, value, where in placed if not where]
    return "\n".join(
        [
            details(f"{len(set_)} keys that were set, and where", table(("key", "value", "set by"), set_), True),
            details(f"{len(defaults)} keys with their default", table(("key", "value"), defaults)),
        ]
    )


def _value(value: object) -> str:
    found = line(value)
    return found if len(found) <= 400 else f"{found[:399]}…"


def reproduce(run: Facts) -> str:
    """Return the commands that reproduce, test and serve the run."""
    path = shlex.quote(str(run.folder.path))
    commands = [
        ("run it again and compare weights and results", f"deeplightning reproduce {path}"),
        ("train with the same config", f"deeplightning train {shlex.quote(str(run.folder.config))}"),
        ("test the best weights", f"deeplightning test {path}"),
        ("answer HTTP from it", f"deeplightning serve {path}"),
    ]
    lines = "".join(f"# {escape(words)}\n{text(command)}\n" for words, command in commands)
    return f'<div class="card"><pre>{lines}</pre></div>'
