"""What TAB offers behind `deeplightning VERB`: `deeplightning.cli.group`, through click's own completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class

from deeplightning.cli import cli

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "_DEEPLIGHTNING_COMPLETE"


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A working directory with a config."""
    before = Path.cwd()
    folder = tmp_path_factory.mktemp("place")
    (folder / "c.yaml").write_text("seed: 7\n")
    os.chdir(folder)
    yield folder
    os.chdir(before)


def offered(shell: str, words: str, number: int) -> list[str]:
    """The lines that a shell gets for its words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMP_WORDS", words)
        patch.setenv("COMP_CWORD", str(number))
        found = get_completion_class(shell)
        assert found is not None
        return found(cli, {}, "deeplightning", VARIABLE).complete().splitlines()


def test_the_shell_offers_files():
    """For a config and a run, by a word for the shell, which knows files and folders itself."""
    assert offered("bash", "deeplightning\ntrain\nmore/", 2) == ["file,more/"]
    assert offered("bash", "deeplightning\ncheck\nc.yaml\n--config\nd", 4) == ["file,d"]
    assert offered("bash", "deeplightning\ntest\nrun", 2) == ["file,run"]


def test_verbs_and_options_are_offered():
    """By click, which knows them."""
    assert offered("bash", "deeplightning\ntra", 1) == ["plain,train"]
    assert "plain,--dry-run" in offered("bash", "deeplightning\ncheck\nc.yaml\n--d", 3)


def test_completion_imports_nothing_heavy():
    """It answers while one waits, so it loads neither torch nor any of the other big libraries."""
    variables = {VARIABLE: "bash_complete", "COMP_WORDS": "deeplightning train c", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "deeplightning"],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "file,c" in done.stdout.splitlines()
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert loaded & {"torch", "pytorch_lightning", "mlflow", "numpy", "torchvision"} == set()
