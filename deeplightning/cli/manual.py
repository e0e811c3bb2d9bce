"""The manual in the terminal: a page, the section of a verb, the row of a key, or the pages in which words occur.

The pages are the Markdown files of `docs`, which ship with the package. Their list is also the file llms.txt of the
site, which programs read (https://llmstxt.org).
"""

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from deeplightning.config.packages import HOME
from deeplightning.faults import ConfigError, Fault, nearest
from deeplightning.process.terminal import is_interactive, say

FOLDER = HOME / "docs"
PARTS = {"tutorial": "Tutorials", "how-to": "How-to pages", "reference": "Reference", "explanation": "Explanation"}
"""The folders of the manual, in the order of the list, with their headings."""

WHOLE = "A YAML file becomes a tracked, reproducible, distributed training run, and the run an HTTP endpoint."

_VERBS = ("reference/verbs-of-configs", "reference/verbs-of-runs")
_KEYS = "reference/keys"
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_HEADING = re.compile(r"^(#{2,3}) (.+)$")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_MOST = 12  # pages that a search lists


@dataclass(frozen=True)
class Page:
    """A page of the manual.

    Attributes:
        name: its path under `docs` without `.md`, such as `how-to/resume`.
        title: its first heading.
        text: all of it, in Markdown, without comments.
    """

    name: str
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

    def sections(self) -> Iterator[tuple[str, str]]:
        """Heading and text of each section of the second and third level; the text begins with the heading."""
        heading, lines, is_code = self.title, list[str](), False
        for line in self.text.splitlines():
            is_code ^= line.startswith("```")
            if not is_code and (found := _HEADING.match(line)):
                yield heading, "\n".join(lines)
                heading, lines = found[2], []
            lines.append(line)
        yield heading, "\n".join(lines)


def pages() -> list[Page]:
    """All pages, part after part, each part by name.

    Raises:
        ConfigError: the installation has no manual.
    """
    found = []
    for part in PARTS:
        for file in sorted((FOLDER / part).glob("*.md")):
            if file.stem != "index":
                text = _COMMENT.sub("", file.read_text(encoding="utf-8"))
                title = _TITLE.search(text)
                found.append(Page(f"{part}/{file.stem}", title[1] if title else file.stem, text))
    if not found:
        raise ConfigError(Fault(f"this installation has no manual: {FOLDER} is missing. Install the package again"))
    return found


def listing() -> str:
    """The list of all pages in the format of llms.txt: their titles, paths and first sentences."""
    lines = [
        "# Deep Lightning",
        "",
        f"> {WHOLE}",
        "",
        "`deeplightning docs NAME` prints a page in the terminal; NAME is its path without `.md`. It also takes",
        "a key of a config, a verb, or words to look for.",
    ]
    part = ""
    for page in pages():
        if (its := page.name.partition("/")[0]) != part:
            part = its
            lines += ["", f"## {PARTS[part]}", ""]
        about = f": {page.about}" if page.about else ""
        lines.append(f"- [{page.title}](docs/{page.name}.md){about}")
    return "\n".join(lines) + "\n"


def answer(words: Sequence[str]) -> str:
    """What the manual has about words, in Markdown.

    Args:
        words: none (the list of pages), a page's name with or without its folder, a verb, a key of a config, or words
            to look for.

    Raises:
        ConfigError: no page has all of the words.
    """
    if not words:
        return listing()
    every, word = pages(), words[0].removesuffix(".md").removeprefix("docs/")
    if len(words) == 1:
        for page in every:
            if word in (page.name, page.name.partition("/")[2]):
                return page.text
        for page in every:
            if page.name in _VERBS:
                for heading, text in page.sections():
                    if heading == word:
                        return text
        if row := _row_of(word, every):
            return "\n\n".join([row, "Pages with this key:", *_search([word], every)])
    found = _search(words, every)
    if not found:
        names = [page.name.partition("/")[2] for page in every]
        hint = nearest(word, [*names, *_verbs(every), *_keys(every)])
        raise ConfigError(Fault(f"no page of the manual has {' '.join(words)!r}.{hint} `deeplightning docs` lists all"))
    return "\n\n".join(found)


def _search(words: Sequence[str], every: Sequence[Page]) -> list[str]:
    """A list of the sections that have all words, those with a word in the heading first; nothing: none has."""
    patterns = [re.compile(rf"(?<!\w){re.escape(word)}", re.IGNORECASE) for word in words]
    best: list[tuple[tuple[int, int], str, str]] = []
    for page in every:
        scored = []
        for heading, text in page.sections():
            counts = [len(pattern.findall(text)) for pattern in patterns]
            if all(counts):
                in_heading = sum(bool(pattern.search(f"{page.title} {heading}")) for pattern in patterns)
                scored.append(((in_heading, min(counts)), heading))
        if scored:
            score, heading = max(scored)
            at = f" ({heading})" if heading != page.title else ""
            best.append((score, page.name, f"- `deeplightning docs {page.name}`: {page.title}{at}"))
    if not best:
        return []
    best.sort(key=lambda each: ((-each[0][0], -each[0][1]), each[1]))
    left = len(best) - _MOST
    rest = [f"\nand {left} more; more words find fewer"] if left > 0 else []
    return ["\n".join([line for _, _, line in best[:_MOST]] + rest)]


def _rows(every: Sequence[Page]) -> Iterator[list[str]]:
    """The cells of the tables of keys."""
    for page in every:
        if page.name.startswith(_KEYS):
            for line in page.text.splitlines():
                if line.startswith("| `"):
                    yield [cell.replace(r"\|", "|") for cell in re.split(r" (?<!\\)\| ", line[2:-2])]


def _row_of(key: str, every: Sequence[Page]) -> str:
    """The row of a key as sentences; "": no page has it."""
    for name, value, default, meaning in (row for row in _rows(every) if len(row) == 4):
        if name == f"`{key}`":
            given = f"\n\n- Value: {value}\n- Default: {default}" if default else f"\n\n- Value: {value}"
            return _LINK.sub(r"\1", f"## {name}\n\n{meaning[:1].upper()}{meaning[1:]}.{given}")
    return ""


def _keys(every: Sequence[Page]) -> list[str]:
    return [row[0].strip("`") for row in _rows(every)]


def _verbs(every: Sequence[Page]) -> list[str]:
    return [heading for page in every if page.name in _VERBS for heading, _ in page.sections() if heading != page.title]


def show(text: str) -> None:
    """Prints Markdown: rendered on a terminal, in the pager where it is longer; as it is into a file or pipe."""
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
