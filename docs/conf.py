"""The manual as a site, by Sphinx with MyST and Furo: `bash test.sh --docs` builds dist/site from Markdown.

The source folder is the repository, so that a link from one file to another is the same on the site and beside the
code. The pages of a folder are listed in its `index.md`: the links of that list, in their order, are the navigation.
Every key of the reference is an object of the search index, which a browser reads without a network.
"""

import re
import shutil
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from docutils import nodes

project = "Deep Lightning"
author = "the authors of Deep Lightning"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "examples/*/README.md", "benchmarks/*.md", "deploy/*.md"]
include_patterns += ["plugins/*/README.md", "plugins/*/*/docs/*.md"]
exclude_patterns = ["docs/_*"]
extensions = ["myst_parser"]
myst_heading_anchors = 4
smartquotes = False  # `--option` stays two dashes
nitpicky = True
linkcheck_ignore = [r"http://127\.0\.0\.1", r"https://example\.com"]
html_theme = "furo"
html_title = project
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # a page that is read as a file may not fetch others
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"

LINK = re.compile(r"\]\(((?!\w+:|#)[^)\s#]+\.md)\)")
DOTTED = re.compile(r'(?<=<span class="pre">)[\w.]+\.\w+')
KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*")


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """Gives an index page the hidden table of contents that its list of links describes."""
    if page.startswith("docs/") and page.endswith("index"):
        found = [normpath(join(dirname(page), link)) for link in LINK.findall(source[0])]
        # The first page also links to pages that the index of their part has.
        inside = ("docs/tutorial/",) if page == root_doc else (dirname(page), "plugins/")
        part = [name for name in dict.fromkeys(found) if name.startswith(inside) or name.endswith("/index.md")]
        own = [f"/{Path(name).with_suffix('')}" for name in part]
        source[0] += "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(own) + "\n```\n"


def index_keys(app: Any, tree: nodes.document) -> None:
    """Lets the search find each key by its name, and lead to its row."""
    page = app.env.docname
    if not Path(page).name.startswith(("keys", "tune")):
        return
    standard = app.env.get_domain("std")
    for row in tree.findall(nodes.row):
        literal = next(iter(row.findall(nodes.literal)), None)
        if literal is not None and KEY.fullmatch(key := literal.astext()):
            row["ids"].append(f"key-{key.replace('.', '-')}")
            standard.note_object("confval", key, row["ids"][-1], location=row)


def orphaned(app: Any, page: str, source: list[str]) -> None:
    """Pages beside the manual, such as the examples', are reached by links, not by navigation or search."""
    if not page.startswith("docs/") and "/docs/" not in page:
        source[0] = f"---\norphan: true\nnosearch: true\n---\n{source[0]}"


ACCESS = {
    '<aside class="sidebar-drawer">': '<aside class="sidebar-drawer" aria-label="Pages">',
    '<aside class="toc-drawer': '<aside aria-label="Sections of this page" class="toc-drawer',
    "<pre><span>": '<pre tabindex="0"><span>',
    '<div class="table-wrapper': '<div tabindex="0" class="table-wrapper',
    '<div id="search-results"></div>': '<h1>Search</h1><div id="search-results"></div>',
}
"""What the theme leaves out for people who use a keyboard or a screen reader; axe-core finds nothing else."""


def finish(app: Any, error: Exception | None) -> None:
    """Leads from the site's address to its first page, makes each page accessible, and adds the pages as Markdown."""
    if error is None and app.builder.format == "html":
        for file in Path(app.outdir).rglob("*.html"):
            text = file.read_text()
            for theirs, ours in ACCESS.items():
                text = text.replace(theirs, ours)
            file.write_text(DOTTED.sub(lambda key: key[0].replace(".", ".<wbr>"), text))
        # Programs read Markdown: llms.txt, the list of the pages, leads to them.
        top = Path(app.srcdir)
        for file in [top / "llms.txt", *top.glob("docs/*/*.md"), *top.glob("plugins/*/*/docs/*.md")]:
            shutil.copy(file, Path(app.outdir) / file.relative_to(top))
        page = f'<!doctype html><title>{project}</title><meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Any) -> None:
    """Connects the functions above."""
    app.connect("source-read", add_navigation)
    app.connect("source-read", orphaned)
    app.connect("doctree-read", index_keys)
    app.connect("build-finished", finish)
