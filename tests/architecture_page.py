"""Generate the table of folders and the import graph in docs/explanation/architecture.md.

`PYTHONPATH=tests/unit:tests python tests/architecture_page.py` updates both; the text around them is written by hand.
"""

import ast
import re

from test_layers import BASE, ENTRIES, FILES, LAYERS, PARTS, ROOT, imported_by, layer, name_of

PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"
START = "<!-- From here: python tests/architecture_page.py -->"
END = "<!-- To here. -->"
BASE_NAME = "base files"
WIDTH, STEP, BOX = 720, 62, (104, 30)
"""Width of the picture, height of a row, and size of a box, in pixels."""


def imports() -> dict[str, set[str]]:
    """Return the folders that each folder imports; single files of the base count as one folder, entry points are
    omitted."""
    found: dict[str, set[str]] = {name: set() for name in [*LAYERS, *sorted(PARTS), "serve", BASE_NAME]}
    for file in FILES:
        here = _folder(name_of(file))
        for name in imported_by(file):
            there = _folder(name) if name.split(".")[0] in ("deeplightning", "serve") else None
            if here is not None and there is not None and here != there:
                found[here].add(there)
    return found


def _folder(name: str) -> str | None:
    place = layer(name)
    return BASE_NAME if place in BASE else None if place in ENTRIES or name.endswith("pyfunc") else place


def needed(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Return the arrows that no chain of others implies (the transitive reduction of an acyclic graph)."""

    def reached(start: str) -> set[str]:
        return {start}.union(*(reached(other) for other in graph[start]))

    return [
        (here, there)
        for here, others in graph.items()
        for there in sorted(others)
        if not any(there in reached(other) for other in others - {there})
    ]


def idea(folder: str) -> str:
    """Return the first sentence of the docstring of a folder's `__init__.py`."""
    file = ROOT / folder / "__init__.py" if folder == "serve" else ROOT / "deeplightning" / folder / "__init__.py"
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(text.split("\n\n")[0].split()))[0]


def picture() -> str:
    """Draw the graph as SVG: a folder is above all folders that it imports; colours follow light or dark mode."""
    arrows = needed(imports())
    heights = {name: _height(name, arrows) for name in imports()}
    rows: dict[int, list[str]] = {}
    for name, above in heights.items():
        rows.setdefault(max(heights.values()) - above, []).append(name)
    at = {
        name: (WIDTH * (place + 1) // (len(row) + 1), STEP * depth + STEP // 2)
        for depth, row in rows.items()
        for place, name in enumerate(row)
    }
    width, height = BOX
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {STEP * len(rows)}" role="img">',
        "<title>Which folder imports which</title>",
        "<style>path{fill:none;stroke:#888}rect{fill:#f4f6fa;stroke:#5b7db1}text{fill:#1c2733;font:13px sans-serif;"
        "text-anchor:middle}marker path{fill:#888}@media(prefers-color-scheme:dark){rect{fill:#1d2733;stroke:#7fa3d8}"
        "text{fill:#e4e9f0}}</style>",
        '<marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 6 3 0 6z"/></marker>',
    ]
    for here, there in arrows:
        (x, y), (to_x, to_y) = at[here], at[there]
        start, end = y + height // 2, to_y - height // 2
        middle = (start + end) // 2
        curve = f"M{x} {start}C{x} {middle} {to_x} {middle} {to_x} {end}"
        lines.append(f'<path d="{curve}" marker-end="url(#tip)"><title>{here} imports {there}</title></path>')
    for name, (x, y) in at.items():
        lines.append(f'<rect x="{x - width // 2}" y="{y - height // 2}" width="{width}" height="{height}" rx="6"/>')
        lines.append(f'<text x="{x}" y="{y + 5}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _height(name: str, arrows: list[tuple[str, str]]) -> int:
    """Return how many rows a folder is above the last row: one more than the highest folder that it imports."""
    return max((1 + _height(there, arrows) for here, there in arrows if here == name), default=0)


def page() -> str:
    """Return the generated part of the page, from its first to its last comment."""
    lines = [START, "", "![Which folder imports which](../pictures/architecture.svg)", ""]
    lines += ["| Folder | Idea |", "|---|---|"]
    lines += [f"| `deeplightning/{name}` | {idea(name)} |" for name in [*LAYERS, *sorted(PARTS)]]
    lines += [f"| `serve` | {idea('serve')} |", "", END]
    return "\n".join(lines)


def renewed(text: str) -> str:
    """Replace the generated part of the page."""
    return text[: text.index(START)] + page() + text[text.index(END) + len(END) :]


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
    PICTURE.write_text(picture())
