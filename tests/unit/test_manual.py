"""The manual as text: its reference matches the code, pages are short, and every page can be found."""

import re
from pathlib import Path

import pytest
import reference_pages
from click.testing import CliRunner
from test_surface import exit_codes, variables

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
    """Return the number of words that a reader sees: those with a letter or a digit."""
    return len(re.findall(r"\S*\w\S*", text))


@pytest.mark.parametrize("name", [name for name in reference_pages.PAGES if name != reference_pages.WORDS])
def test_the_reference_is_that_of_the_code(name):
    """`.venv/bin/python tools/reference_pages.py` renews it. The tests of `migrate` check its own page."""
    assert (REFERENCE / f"{name}.md").read_text() == reference_pages.updated(name)


def test_the_list_of_pages_names_each_page():
    """llms.txt, which `.venv/bin/python tools/reference_pages.py` renews, lists all but the index pages."""
    text = (ROOT / "llms.txt").read_text()
    assert text == reference_pages.list_of_pages()
    named = re.findall(r"\]\(([^)]+)\)", text)
    there = [*(page for page in DOCS.glob("*/*.md") if page.stem != "index"), *PLUGINS]
    assert sorted(named) == sorted(str(page.relative_to(ROOT)) for page in there)


def test_the_list_in_the_terminal_has_a_line_for_each_page():
    """`deeplightning docs` without a name prints the name and title of each page."""
    lines = manual.listing().splitlines()
    assert [line.split()[0] for line in lines] == [*manual.pages()]
    assert "Resume a run" in next(line for line in lines if line.startswith("how-to/resume "))


@pytest.mark.parametrize("name", ["resume", "how-to/resume", "docs/how-to/resume.md"])
def test_a_page_is_found_by_its_name_or_path(name):
    """The name may have its folder, as in the list, or be the path of a link."""
    assert manual.page(name).startswith("# Resume a run")


def test_a_page_that_is_not_there_has_a_proposal():
    """The error has the nearest name, and the command that describes keys."""
    with pytest.raises(faults.ConfigError, match=r"Did you mean resume.*deeplightning explain CONFIG KEY"):
        manual.page("resumee")


def test_an_installation_without_the_manual_is_a_fault(tmp_path, monkeypatch):
    """The error has the path of the missing folder."""
    monkeypatch.setattr(manual, "FOLDER", tmp_path / "docs")
    with pytest.raises(faults.ConfigError, match=str(tmp_path)):
        manual.page("resume")


def test_no_line_of_the_help_is_cut():
    """The first sentence of each verb fits into a terminal of 80 columns."""
    output = CliRunner().invoke(cli, ["--help"]).output
    assert "..." not in output.partition("Commands:")[2]
    assert all(len(line) <= 80 for line in output.splitlines())


def test_every_exit_code_is_explained():
    """The table has a row for each exit code of an error class."""
    found = re.findall(r"^\| `?(\d+)`? \|", (REFERENCE / "environment.md").read_text(), re.MULTILINE)
    assert {*exit_codes(), 0, 1, 130, 141, 143} == {*map(int, found)}


def test_every_file_of_a_run_is_named():
    """The page lists each file that `RunFolder` names."""
    text = (REFERENCE / "files.md").read_text()
    files = [path.name for path in vars(RunFolder("/run")).values() if path.name != "run"]
    assert len(files) > 15
    assert [name for name in files if name not in text] == []


def test_every_variable_of_ours_is_named():
    """The page lists each `DEEPLIGHTNING_…` that the code or a script reads or sets."""
    text = (REFERENCE / "environment.md").read_text()
    assert [name for name in variables() if f"`{name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_is_long(page):
    """A page has at most 1,500 words, including blocks and tables."""
    assert words(page.read_text()) <= 1500


def test_the_readme_is_short():
    """It has at most 700 words, and lines of at most 100 columns outside of tables."""
    text = README.read_text()
    assert words(text) <= 700
    assert [line for line in text.splitlines() if len(line) > 100 and line[0] not in "|<"] == []


@pytest.mark.parametrize("index", sorted(DOCS.rglob("index.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_an_index_links_to_every_page_of_its_folder(index):
    """The links are the navigation of the site."""
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+\.md)", index.read_text())}
    beside = {page for page in PAGES if page.parent == index.parent} | set(index.parent.glob("*/index.md"))
    assert sorted(page.name for page in beside - linked - {index}) == []


def test_the_scripts_and_configs_are_named():
    """The README names every script, and the page of config files names every shipped config."""
    assert [file.name for file in ROOT.glob("*.sh") if file.name not in README.read_text()] == []
    text = (REFERENCE / "config-files.md").read_text()
    assert [file.name for file in ROOT.glob("configs/*.yaml") if f"configs/{file.name}" not in text] == []
