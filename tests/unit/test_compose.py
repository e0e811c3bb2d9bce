"""What a config is composed of: files laid over each other on the command line."""

import sys
from pathlib import Path

import pytest

from deeplightning.cli import cli
from deeplightning.cli.exit_codes import run_verb
from deeplightning.config.source import read
from deeplightning.config.tree import plain

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working directory with a space in its name, and configs that build on the shipped one."""
    folder = tmp_path / "my experiments"
    (folder / "lr=0.1").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("a.yaml").write_text(
        f"_base_: '{ROOT}/configs/base.yaml'\nseed: 1\ndata: {{batch_size: 8, dataset: digits}}\n"
    )
    Path("b.yaml").write_text("seed: 2\ndata: {~dataset: null, batch_size: 16}\n")
    Path("lr=0.1/c.yaml").write_text("seed: 3\n")
    return folder


@pytest.fixture
def answer(monkeypatch, capfd):
    """`answer(words)`: the exit code of `deeplightning WORDS`, its stdout and its stderr."""

    def given(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["deeplightning", *words])
        return run_verb(cli), *capfd.readouterr()

    return given


def test_a_later_file_lies_over_an_earlier_one():
    """As if each built on the one before; overrides come last, wherever they are written; a removed key is gone."""
    source = read("a.yaml", ["b.yaml", "data.batch_size=4", "lr=0.1/c.yaml"])
    found = plain(source.root)
    assert (found["seed"], found["data"]["batch_size"], "dataset" in found["data"]) == (3, 4, False)
    assert found["train"]["num_epochs"] == 15
    assert [folder.name for folder in source.folders] == ["my experiments", "lr=0.1", "configs"]


def test_every_verb_takes_several_files(answer):
    """Words or `--config`, whatever stands first; a KEY of `explain` is no file."""
    code, out, _ = answer("explain", "a.yaml", "b.yaml", "seed")
    assert code == 0
    assert out.splitlines()[4:6] == ["  set by      b.yaml:1:1", "  instead of  1  # a.yaml:2:1"]
    by_option = answer("explain", "data.batch_size=4", "--config", "a.yaml", "seed", "--config=b.yaml")
    assert by_option == (code, out, "")
    for verb in ("check", "plan"):
        assert answer(verb, "--config", "a.yaml", "b.yaml")[0] == 0


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["check"], "Missing argument 'CONFIG'"),
        (["check", "a.yaml", "d.yaml"], "d.yaml: there is no such config file; . holds a.yaml, b.yaml"),
        (["check", "a.yaml", "lr=0.1"], "override lr=0.1: lr: unknown key"),
        (["check", "a.yaml", "seed"], "override seed: an override is key=value, ~key (remove), or +list=[x] (append)"),
        (["check", "a.yaml", "plain"], "override plain: the name of a further config file ends in .yaml or .yml"),
        (["check", "--config", "a.yaml", "--config", "plain"], "a further config file ends in .yaml or .yml"),
        (
            ["test", ".", "b.yaml"],
            "b.yaml: a config file cannot be laid over that of a run; give its keys as key=value",
        ),
    ],
)
def test_a_word_that_is_no_config_is_named(answer, words, note):
    """Exit code 2, with what is allowed."""
    Path("plain").write_text("seed: 4\n")
    code, out, err = answer(*words)
    assert (code, out) == (2, "")
    assert note in err
