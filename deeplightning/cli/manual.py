"""Print pages of the manual, the Markdown files of `docs` that ship with the package, and their list, llms.txt."""

import re
import shutil
import sys
from dataclasses import dataclass

import click

from deeplightning.config.packages import HOME
from deeplightning.faults import ConfigError, Fault, nearest
from deeplightning.process.terminal import is_interactive, say

FOLDER = HOME / "docs"
PARTS = {"tutorial": "Tutorials", "how-to": "How-to pages", "reference": "Reference", "explanation": "Explanation"}
"""The folders of the manual, in the order of the list, with their headings."""

_PLUGINS = "plugins/*/deeplightning_*" if (HOME / "plugins").is_dir() else "../deeplightning_*"
"""The packages of plug-ins, in a clone and beside the installed package; each may have pages in a folder `docs`."""

WHOLE = "A YAML file becomes a tracked, reproducible, distributed training run, and the run an HTTP endpoint."

_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A page of the manual.

    Attributes:
        name: its path under `docs` without `.md`, such as `how-to/resume`; of a plug-in `plug-ins/push`.
        path: of the file; relative where it is inside the clone or installation.
        title: its first heading.
        text: all of it, in Markdown, without comments.
    """

    name: str
    path: str
    title: str
    text: str

    @property
    def about(self) -> str:
        """The first sentence below the title; "" where no prose follows it."""
        for block in self.text.split("\n\n")[1:]:
            if block[:1].isalpha() or block[:1] in "`[":
                line = " ".join(_LINK.sub(r"\1", block).split())
                return re.split(r"(?<=[.:]) (?=[A-Z`])", line)[0].rstrip(":")
        return ""


def pages() -> list[Page]:
    """Return all pages, part after part, each part by name.

    Raises:
        ConfigError: the installation has no manual.
    """
    files = [(part, file) for part in PARTS for file in sorted((FOLDER / part).glob("*.md")) if file.stem != "index"]
    if not files:
        raise ConfigError(Fault(f"this installation has no manual: {FOLDER} is missing. Install the package again"))
    found = []
    files += [("plug-ins", file) for file in sorted(HOME.glob(f"{_PLUGINS}/docs/*.md"))]
    for part, file in files:
        text = _COMMENT.sub("", file.read_text(encoding="utf-8"))
        title = _TITLE.search(text)
        path = file.relative_to(HOME) if file.is_relative_to(HOME) else file
        found.append(Page(f"{part}/{file.stem}", str(path), title[1] if title else file.stem, text))
    return found


def listing() -> str:
    """Return the list of all pages in the format of llms.txt (https://llmstxt.org): titles, paths, first sentences."""
    lines = ["# Deep Lightning", "", f"> {WHOLE}", ""]
    lines.append("`deeplightning docs NAME` prints a page in the terminal; NAME is its path without `.md`.")
    part = ""
    for page in pages():
        if (its := page.name.partition("/")[0]) != part:
            part = its
            lines += ["", f"## {PARTS.get(part, 'Plug-ins')}", ""]
        about = f": {page.about}" if page.about else ""
        lines.append(f"- [{page.title}]({page.path}){about}")
    return "\n".join(lines) + "\n"


def page(name: str) -> str:
    """Return a page in Markdown.

    Args:
        name: its path under `docs`; the folder and `.md` may be left out.

    Raises:
        ConfigError: there is no such page.
    """
    wanted, found = name.removesuffix(".md").removeprefix("docs/"), pages()
    for each in found:
        if wanted in (each.name, each.name.partition("/")[2]):
            return each.text
    hint = nearest(wanted, [each.name.partition("/")[2] for each in found])
    more = "`deeplightning docs` lists all; `deeplightning explain CONFIG KEY` describes a key, VERB --help a verb"
    raise ConfigError(Fault(f"the manual has no page {name!r}.{hint} {more}"))


def show(text: str) -> None:
    """Print Markdown: rendered on a terminal, in the pager where it is longer; as it is into a file or pipe."""
    if not is_interactive(sys.stdout):
        say(text.rstrip("\n"))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.capture() as captured:
        console.print(Markdown(text, code_theme="ansi_dark", hyperlinks=False))
    rendered = captured.get()
    if rendered.count("\n") < shutil.get_terminal_size().lines:
        print(rendered, end="")  # noqa: T201  (of the manual, with styles)
    else:
        click.echo_via_pager(rendered)
