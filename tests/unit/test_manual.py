"""The manual as text: its reference is that of the code, no page is long, and every page is found."""

import inspect
import re
from pathlib import Path

import pytest
import reference_pages
from click.testing import CliRunner

from deeplightning import faults
from deeplightning.cli import cli, manual
from deeplightning.runfolder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PLUGINS = sorted(ROOT.glob("plugins/*/*/docs/*.md"))
PAGES = sorted([*DOCS.rglob("*.md"), *PLUGINS])
README = ROOT / "README.md"


def words(text: str) -> int:
    """How many words a reader sees: what has a letter or a digit."""
    return len(re.findall(r"\S*\w\S*", text))


def rows(page: str) -> list[str]:
    """The first cells of the rows of the tables of a page of the reference."""
    return re.findall(r"^\| ([^|]+) \|", (REFERENCE / f"{page}.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in reference_pages.PAGES if name != reference_pages.WORDS])
def test_the_reference_is_that_of_the_code(name):
    """`.venv/bin/python tools/reference_pages.py` renews it. The words of others are in the tests of `migrate`."""
    assert (REFERENCE / f"{name}.md").read_text() == reference_pages.updated(name)


def test_the_list_of_pages_names_each_page():
    """In llms.txt, which `.venv/bin/python tools/reference_pages.py` renews; index pages have no entry."""
    text = (ROOT / "llms.txt").read_text()
    assert text == reference_pages.list_of_pages()
    named = re.findall(r"\]\(([^)]+)\)", text)
    there = [*(page for page in DOCS.glob("*/*.md") if page.stem != "index"), *PLUGINS]
    assert sorted(named) == sorted(str(page.relative_to(ROOT)) for page in there)


def test_the_list_in_the_terminal_has_a_line_for_each_page():
    """Name and title, as `deeplightning docs` prints them without a name."""
    lines = manual.listing().splitlines()
    assert [line.split()[0] for line in lines] == [*manual.pages()]
    assert "Resume a run" in next(line for line in lines if line.startswith("how-to/resume "))


@pytest.mark.parametrize("name", ["resume", "how-to/resume", "docs/how-to/resume.md"])
def test_a_page_is_found_by_its_name_or_path(name):
    """With its folder or without, as the list or a link has it."""
    assert manual.page(name).startswith("# Resume a run")


def test_a_page_that_is_not_there_has_a_proposal():
    """A misspelled name, and the verbs that describe keys and verbs."""
    with pytest.raises(faults.ConfigError, match=r"Did you mean resume.*deeplightning explain CONFIG KEY"):
        manual.page("resumee")


def test_an_installation_without_the_manual_is_a_fault(tmp_path, monkeypatch):
    """It names the folder that is missing."""
    monkeypatch.setattr(manual, "FOLDER", tmp_path / "docs")
    with pytest.raises(faults.ConfigError, match=str(tmp_path)):
        manual.page("resume")


def test_no_line_of_the_help_is_cut():
    """The first sentence of each verb is whole, where the terminal has 80 columns."""
    said = CliRunner().invoke(cli, ["--help"]).output
    assert "..." not in said.partition("Commands:")[2]
    assert all(len(line) <= 80 for line in said.splitlines())


def test_every_exit_code_is_explained():
    """Each code that an error of ours ends with has its row."""
    codes = {c.exit_code for _, c in inspect.getmembers(faults, inspect.isclass) if hasattr(c, "exit_code")}
    found = {int(cell.strip("`")) for cell in rows("environment") if cell.strip("`").isdigit()}
    assert codes | {0, 1, 130, 141, 143} == found


def test_every_file_of_a_run_is_named():
    """What `RunFolder` has a name for."""
    text = (REFERENCE / "files.md").read_text()
    files = [path.name for path in vars(RunFolder("/run")).values() if path.name != "run"]
    assert len(files) > 15
    assert [name for name in files if name not in text] == []


def test_every_variable_of_ours_is_named():
    """Each `DEEPLIGHTNING_…` that the code or a script reads or sets."""
    sources = [*(ROOT / "deeplightning").rglob("*.py"), *(ROOT / "serve").rglob("*.py"), *ROOT.glob("*.sh")]
    found = {name for file in sources for name in re.findall(r"\bDEEPLIGHTNING_[A-Z_]*[A-Z]\b", file.read_text())}
    text = (REFERENCE / "environment.md").read_text()
    assert len(found) > 10
    assert sorted(name for name in found if f"`{name}" not in text) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_is_long(page):
    """At most 1,500 words, blocks and tables included."""
    assert words(page.read_text()) <= 1500


def test_the_readme_is_short():
    """At most 700 words, and lines of 100 columns outside of tables."""
    text = README.read_text()
    assert words(text) <= 700
    assert [line for line in text.splitlines() if len(line) > 100 and line[0] not in "|<"] == []


@pytest.mark.parametrize("index", sorted(DOCS.rglob("index.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_an_index_links_to_every_page_of_its_folder(index):
    """The list is the navigation of the site."""
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+\.md)", index.read_text())}
    beside = {page for page in PAGES if page.parent == index.parent} | set(index.parent.glob("*/index.md"))
    assert sorted(page.name for page in beside - linked - {index}) == []


def test_the_scripts_and_configs_are_named():
    """The README names every script; the page of config files has every shipped config."""
    assert [file.name for file in ROOT.glob("*.sh") if file.name not in README.read_text()] == []
    text = (REFERENCE / "config-files.md").read_text()
    assert [file.name for file in ROOT.glob("configs/*.yaml") if f"configs/{file.name}" not in text] == []
