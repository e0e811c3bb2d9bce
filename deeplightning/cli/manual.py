"""Print pages of the manual, the Markdown files of `docs` that ship with the package, and their list."""

import re
from pathlib import Path

from deeplightning.config.packages import HOME
from deeplightning.faults import ConfigError, Fault, nearest

FOLDER = HOME / "docs"
PARTS = ("tutorial", "how-to", "reference", "explanation")
"""The folders of the manual, in the order of the list."""

_PLUGINS = "plugins/*/deeplightning_*" if (HOME / "plugins").is_dir() else "../deeplightning_*"
"""The packages of plug-ins, in a clone or next to the installed package; each may have pages in a folder `docs`."""


def pages() -> dict[str, Path]:
    """Return the file of each page by its name, such as `how-to/resume`, or `plug-ins/push` for a plug-in.

    Raises:
        ConfigError: the installation has no manual.
    """
    files = [(part, file) for part in PARTS for file in sorted((FOLDER / part).glob("*.md")) if file.stem != "index"]
    if not files:
        raise ConfigError(Fault(f"this installation has no manual: {FOLDER} is missing. Install the package again"))
    files += [("plug-ins", file) for file in sorted(HOME.glob(f"{_PLUGINS}/docs/*.md"))]
    return {f"{part}/{file.stem}": file for part, file in files}


def text_of(file: Path) -> str:
    """Return a page in Markdown, without comments."""
    return re.sub(r"<!--.*?-->\n*", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def listing() -> str:
    """Return the name and the title of each page, on one line."""
    titles = {name: text_of(file).partition("\n")[0].removeprefix("# ") for name, file in pages().items()}
    return "\n".join(f"{name:{max(map(len, titles))}}  {title}" for name, title in titles.items())


def page(name: str) -> str:
    """Return a page in Markdown.

    Args:
        name: its path under `docs`; the folder and `.md` are optional.

    Raises:
        ConfigError: there is no such page.
    """
    wanted, found = name.removesuffix(".md").removeprefix("docs/"), pages()
    for each, file in found.items():
        if wanted in (each, each.partition("/")[2]):
            return text_of(file)
    hint = nearest(wanted, [each.partition("/")[2] for each in found])
    more = "`deeplightning docs` lists all; `deeplightning explain CONFIG KEY` describes a key, VERB --help a verb"
    raise ConfigError(Fault(f"the manual has no page {name!r}.{hint} {more}"))
