"""The versions of configs: each row of the table, migration in memory, and `deeplightning migrate`."""

import os
import re
import shutil
import subprocess
import sys
import typing
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from deeplightning.cli import cli
from deeplightning.cli.exit_codes import run_verb
from deeplightning.cli.migrate import migrated
from deeplightning.config import schema, versions
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.config.versions import ROWS, UNNUMBERED, Changed, Removed, Renamed, Reworded
from deeplightning.faults import ConfigError

ROOT = Path(__file__).parents[2]
NEXT = (
    Renamed(1, "train.num_epochs", "train.length.epochs"),
    Renamed(1, "seed", "random_seed"),
    Removed(1, "train.fast", "`train.limit_batches` has the same effect"),
    Reworded(1, "engine.precision", {16: "half"}),
    Changed(1, "train.checkpoint.mode", "train.checkpoint.monitor", "it was min", "min"),
)
"""Rows of a later release."""

OLD = """\
# about this config
seed: 3  # the answer

# how long
train:
  num_epochs: 2   # two
  fast: true
  checkpoint: {monitor: val_acc}
engine: {precision: 16}
"""
PRESENT = {
    "random_seed": 3,
    "train": {"checkpoint": {"monitor": "val_acc", "mode": "min"}, "length": {"epochs": 2}},
    "engine": {"precision": "half"},
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory with a space in its name."""
    folder = tmp_path / "my configs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def later(monkeypatch):
    """A release whose configs have version 2."""
    from deeplightning.cli import migrate

    monkeypatch.setattr(versions, "ROWS", (*NEXT, *ROWS))
    for module in (versions, schema, migrate):
        monkeypatch.setattr(module, "VERSION", 2)


@pytest.fixture
def answer(monkeypatch, capfd):
    """`answer(words)`: the exit code of `deeplightning WORDS`, its stdout and its stderr."""

    def given(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["deeplightning", *words])
        return run_verb(cli), *capfd.readouterr()

    return given


def one(key: str, value: object) -> dict:
    """Nested mappings of a dotted key."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{type(row).__name__} {getattr(row, 'key', None) or row.old}")
def test_each_row_rewrites_a_file(row):
    """And its successor is a key or a value of the present schema."""
    from deeplightning.config.tree import dump

    assert row.until < schema.VERSION
    path = Path("old.yaml")
    if isinstance(row, Renamed):
        path.write_text(dump(one(row.old, 1)))
        assert plain(read(migrated_file(path)).root) == {"version": schema.VERSION} | one(row.new, 1)
    elif isinstance(row, Reworded):
        for old, new in row.words.items():
            path.write_text(dump(one(row.key, old)))
            assert plain(read(migrated_file(path)).root) == {"version": schema.VERSION} | one(row.key, new)
    elif isinstance(row, Changed):
        path.write_text(dump(one(row.sibling, {} if row.sibling == "serve" else "val_acc")))
        assert [note.split(":")[0] for note in migrated(path).notes] == [row.key]
        path.write_text(dump(one(row.key, "max")))
        assert not migrated(path).notes
    else:
        raise AssertionError("write the test of a removed key")
    if not isinstance(row, Removed):
        section = schema.Config
        for name in (row.new if isinstance(row, Renamed) else row.key).split("."):
            assert name in {f.name for f in schema.keys(section)}
            hint = typing.get_type_hints(section)[name]
            section = next((part for part in (hint, *typing.get_args(hint)) if is_dataclass(part)), None)


def migrated_file(path: Path) -> Path:
    """A file with the new text."""
    new = path.with_name("new.yaml")
    new.write_text(migrated(path).after)
    return new


def test_files_of_an_older_version_are_migrated_when_they_are_read(later):
    """Without a key `version` too, and each file of several by its own version; a notice reports each change."""
    Path("old.yaml").write_text(OLD)
    source = read("old.yaml")
    assert plain(source.root) == PRESENT
    assert source.root.value["random_seed"].place == "old.yaml:2:1"
    assert "old.yaml: seed is now random_seed; `deeplightning migrate` rewrites the file" in [
        notice.text for notice in source.notices
    ]
    Path("child.yaml").write_text("version: 2\n_base_: old.yaml\ntrain: {length: {epochs: 5}}\n")
    assert plain(read("child.yaml").root)["train"]["length"] == {"epochs": 5}
    assert plain(read({"version": 1, "seed": 4}).root) == {"version": 2, "random_seed": 4}


def test_the_verb_keeps_comments_and_order(later, answer):
    """It prints a diff that applies; `--write` writes the same text, and the second time nothing."""
    path = Path("old.yaml")
    path.write_text(OLD)
    path.chmod(0o640)
    code, diff, err = answer("migrate", "old.yaml")
    assert (code, path.read_text()) == (0, OLD)
    assert err == "next       --write writes the files\n"
    code, out, err = answer("migrate", "old.yaml", "--write")
    assert (code, out, err) == (0, diff, "wrote      old.yaml\n")
    text = path.read_text()
    assert text.startswith("# about this config\nversion: 2\nrandom_seed: 3 # the answer\n\n# how long\ntrain:\n")
    assert re.search("epochs: 2 +# two", text)
    assert plain(read(path).root) == {"version": 2} | PRESENT
    assert path.stat().st_mode & 0o777 == 0o640
    assert answer("migrate", "old.yaml", "--write") == (0, "", "unchanged  old.yaml\n")
    path.write_text(OLD)
    subprocess.run(["patch", "-p1", "-s"], input=diff, text=True, check=True)
    assert path.read_text() == text


def test_what_a_killed_command_left_is_removed(later, answer, here):
    """A file beside the config whose writer lives stays, and so does any other."""
    Path("old.yaml").write_text(OLD)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    kept = [f".old.yaml.{os.getppid()}", ".old.yaml.swp", ".old.yaml.99999999999999999999", f".other.yaml.{ended.pid}"]
    for name in (*kept, f".old.yaml.{ended.pid}"):
        (here / name).touch()
    assert answer("migrate", "old.yaml", "--write")[0] == 0
    assert sorted(path.name for path in here.iterdir()) == sorted([*kept, "old.yaml"])


def test_a_file_of_the_present_version_gets_the_line_alone():
    """Whatever its layout is; nothing else in the file changes."""
    for text in (
        "# a\n\nseed:   1\nstages: [ train,test ]\n",
        "seed: 1\r\ntrain: {num_epochs: 1e0}\r\n",
        "{seed: 1, stages: [train]}\n",
        "---\n  seed: 0x\n  stages:\n  - train",
    ):
        Path("a.yaml").write_bytes(text.encode())
        found = migrated(Path("a.yaml"))
        lines = [line for line in found.after.splitlines() if line.strip() != "version: 1"]
        assert "\n".join(lines).replace("version: 1, ", "") == "\n".join(text.splitlines())
        assert found.after != text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "version: 99\n",
            "version: this config has version 99, and this release of Deep Lightning reads configs up to",
        ),
        ("version: one\n", "version: must be a whole number from 1 to 1, not the text 'one'"),
        ("version: 0\n", "version: must be a whole number from 1 to 1, not the number 0; write `version: 1`"),
        ("version: true\n", "version: must be a whole number from 1 to 1, not true"),
    ],
)
def test_a_version_that_is_not_known_is_refused(answer, text, message):
    """By every verb that reads a config, with its place and exit code 2; in a base too."""
    Path("a.yaml").write_text(text + "seed: 1\n")
    Path("b.yaml").write_text("_base_: a.yaml\n")
    for words in (["migrate", "a.yaml"], ["check", "a.yaml"], ["check", "b.yaml"]):
        code, _, err = answer(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert f"a.yaml:1:1: {message}" in err


def test_what_cannot_be_migrated_is_reported(answer, here):
    """A key under both names, a file that is no config, a fault in one of several files, the record of a run."""
    Path("both.yaml").write_text("train: {max_epochs: 1, num_epochs: 2}\n")
    Path("good.yaml").write_text("train: {max_epochs: 1}\n")
    code, _, err = answer("migrate", "good.yaml", "both.yaml", "--write")
    assert (code, err.count("\n")) == (2, 1)
    assert "both.yaml:1:9: train.max_epochs: this key and train.num_epochs, its present name, are both set" in err
    assert Path("good.yaml").read_text() == "train: {max_epochs: 1}\n"
    Path("list.yaml").write_text("- 1\n")
    assert answer("migrate", "list.yaml")[0] == 2
    assert "there is no such config file" in answer("migrate", "no.yaml")[2]
    Path("run").mkdir()
    Path("run/environment.json").write_text("{}")
    Path("run/cfg.yaml").write_text("seed: 1\n")
    code, _, err = answer("migrate", "run/cfg.yaml", "--write")
    assert (code, Path("run/cfg.yaml").read_text()) == (2, "seed: 1\n")
    assert "the record of a run" in err
    shutil.copy("run/cfg.yaml", "copy.yaml")
    assert answer("migrate", "copy.yaml", "--write")[0] == 0


def test_a_full_disk_leaves_the_file(answer, monkeypatch):
    """Exit code 3, one sentence, no file beside it."""
    Path("a.yaml").write_text("seed: 1\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    code, _, err = answer("migrate", "a.yaml", "--write")
    assert (code, [path.name for path in Path().iterdir()]) == (3, ["a.yaml"])
    assert "a.yaml: cannot be written: No space left on device; the file is unchanged" in err


def test_only_the_verb_imports_its_library():
    """Reading a config imports no ruamel.yaml."""
    program = "import sys, deeplightning.config.source, deeplightning.cli; sys.exit('ruamel.yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_unnumbered_rows_are_for_the_verb():
    """In memory a file without a version has version 1, so a word of before is reported, not translated."""
    assert all(row.until == UNNUMBERED for row in ROWS)
    Path("a.yaml").write_text("train: {max_epochs: 1}\n")
    assert plain(read("a.yaml").root) == {"train": {"max_epochs": 1}}
    with pytest.raises(ConfigError, match="version"):
        read({"version": 2})
