"""The generated part of docs/architecture.md: which folder imports which, and what each is for.

`python tests/architecture_page.py docs/architecture.md` renews it; the prose around it is written by hand.
"""

import ast
import sys
from pathlib import Path

from test_layers import BASE, ENTRIES, FILES, LAYERS, PARTS, ROOT, imported_by, name_of, room

START = "<!-- From here: python tests/architecture_page.py docs/architecture.md -->"
END = "<!-- To here. -->"
BASE_NAME = "base files"


def imports() -> dict[str, set[str]]:
    """The folders that each folder imports; single files of the base count as one folder, entry points are left out."""
    found: dict[str, set[str]] = {name: set() for name in [*LAYERS, *sorted(PARTS), "serve", BASE_NAME]}
    for file in FILES:
        here = _folder(name_of(file))
        for name in imported_by(file):
            there = _folder(name) if name.split(".")[0] in ("deeplightning", "serve") else None
            if here is not None and there is not None and here != there:
                found[here].add(there)
    return found


def _folder(name: str) -> str | None:
    place = room(name)
    return BASE_NAME if place in BASE else None if place in ENTRIES or name.endswith("pyfunc") else place


def needed(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no chain of others implies (the transitive reduction of a graph without circles)."""

    def reached(start: str) -> set[str]:
        return {start}.union(*(reached(other) for other in graph[start]))

    return [
        (here, there)
        for here, others in graph.items()
        for there in sorted(others)
        if not any(there in reached(other) for other in others - {there})
    ]


def idea(folder: str) -> str:
    """The first sentence or two of a folder, as its `__init__.py` has it."""
    file = ROOT / folder / "__init__.py" if folder == "serve" else ROOT / "deeplightning" / folder / "__init__.py"
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
    """The part of the page, from its first to its last comment."""
    arrows = needed(imports())
    names = {name: name.replace(" ", "_") for name in imports()}
    lines = [START, "", "```mermaid", "flowchart TD"]
    lines += [f'    {names[name]}["{name}"]' for name in imports()]
    lines += [f"    {names[here]} --> {names[there]}" for here, there in arrows]
    lines += ["```", "", "| Folder | Idea |", "|---|---|"]
    lines += [f"| [`{name}`](../deeplightning/{name}) | {idea(name)} |" for name in [*LAYERS, *sorted(PARTS)]]
    lines += [f"| [`serve`](../serve) | {idea('serve')} |", "", END]
    return "\n".join(lines)


def renewed(text: str) -> str:
    """The page with its generated part made anew."""
    return text[: text.index(START)] + page() + text[text.index(END) + len(END) :]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(renewed(target.read_text()))
