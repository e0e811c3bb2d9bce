"""Verbs that take a RUN: which run a name means, which code they use, and predictions of many files."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import click
import pytest
from tiny import csv_rows

from deeplightning.cli import cli, deploy
from deeplightning.config.own_runs import note_own
from deeplightning.faults import ConfigError
from deeplightning.image_spec import ImageSpec
from deeplightning.run import predict
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.client import Client
from deeplightning.tracking.store import local_path, locate
from serve import answers as local

LOSING = """\
import pytorch_lightning as pl
import torch

from deeplightning.data.digits import Digits


class Loss(torch.nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__(weight=torch.ones(10))


class Data(Digits): ...
class Optimizer(torch.optim.SGD): ...
class Callback(pl.Callback): ...
"""
LOST = {
    "data.module": "losing.Data",
    "model.loss.second": "losing.Loss",
    "model.optimizer": "losing.Optimizer",
    "train.callbacks.0": "losing.Callback",
}
PICTURE = Path(__file__).parents[2] / "examples" / "digits" / "0.png"


@pytest.fixture(scope="module")
def gone(command, tiny, tmp_path_factory):
    """A finished run whose code, except the network, is in a folder that is no longer the working directory."""
    folder = tmp_path_factory.mktemp("gone")
    (folder / "losing.py").write_text(LOSING)
    overrides = (
        "data.module.type=losing.Data",
        "model.loss={first: {type: torch.nn.CrossEntropyLoss}, second: {type: losing.Loss, weight: 2}}",
        "model.optimizer={type: losing.Optimizer, params: {lr: 0.05}}",
        "train.callbacks=[{type: losing.Callback}]",
        "train.num_epochs=1",
        "logger.params.tracking_uri=mlruns",
    )
    return command("train", tiny, *overrides, cwd=folder, code=0)


def test_weights_are_used_without_parts_that_are_gone(gone, command, tmp_path):
    """A verb builds only what it needs; if that is missing, the error says how to use the code that the run stored."""
    for verb, pictures in (("export", []), ("predict", [PICTURE])):
        outcome = command(verb, gone.folder, *pictures, cwd=tmp_path, code=0)
        for key, name in LOST.items():
            note = f"{key}.type: there is no module losing to import (for `{name}`); {verb} ignores it"
            assert outcome.err.count(note) == 1, outcome
    for verb, needed in (("test", ("data.module", "model.loss.second")), ("predict", ("data.module",))):
        outcome = command(verb, gone.folder, cwd=tmp_path, code=2)
        for key in needed:
            assert f"{key}.type: there is no module losing" in outcome.err
        assert f"deeplightning {verb} {gone.folder} --code run uses it" in outcome.err, outcome


def test_the_code_that_a_run_kept_is_used_where_it_is_asked_for(gone, command, tmp_path):
    """`--code run` reports the code that it uses, and does not change it. The code of another user's run needs
    `--allow` for each module."""
    kept = (gone.folder / "code.zip").read_bytes()
    (tmp_path / "losing.py").write_text("raise RuntimeError('another one')\n")
    for verb in ("test", "predict"):
        outcome = command(verb, gone.folder, "--code", "run", cwd=tmp_path, code=0)
        assert f"using the code that the run stored, from {gone.folder / 'code.zip'}: losing.py" in outcome.err
    assert (gone.folder / "code.zip").read_bytes() == kept
    state = {"XDG_STATE_HOME": str(tmp_path / "of another user")}
    refused = command("export", gone.folder, "--code", "run", cwd=tmp_path, **state, code=4)
    assert "If you trust it: --allow losing" in refused.err
    command("export", gone.folder, "--code", "run", "--allow", "losing", cwd=tmp_path, **state, code=0)


def test_an_unknown_key_of_an_old_config_does_not_block_its_weights(gone, command, tmp_path):
    """`export` warns of a key of `cfg.yaml` that this version does not know; `deploy` accepts `~KEY` to remove it."""
    folder = shutil.copytree(gone.folder, tmp_path / "run")
    config = (folder / "cfg.yaml").read_text()
    for section in ("serve", "train"):
        assert f"\n{section}:\n" in config
        config = config.replace(f"\n{section}:\n", f"\n{section}:\n  colour: red\n")
    (folder / "cfg.yaml").write_text(config)
    note_own(folder / "cfg.yaml")
    outcome = command("export", folder, cwd=tmp_path, code=0)
    for section in ("serve", "train"):
        assert f"{section}.colour: unknown key; export ignores it" in outcome.err

    with pytest.raises(ConfigError, match=r"serve\.colour: unknown key"):
        deploy.command(str(folder))
    assert deploy.command(str(folder), ["~serve.colour"])[-1] == str(folder / "bundle")


def test_the_newest_run_needs_no_name(gone, command, tmp_path, monkeypatch):
    """`runs --last` prints only its folder; every verb that takes a RUN accepts `last`."""
    for arguments in (("runs", "--last"), ("export", "last")):
        outcome = command(*arguments, cwd=tmp_path)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (3, "", 1), outcome
        assert "there are no runs" in outcome.err

    here = gone.folder.parents[3]
    (here / "last").mkdir(exist_ok=True)  # `./last`
    client = Client(locate(here / "mlruns"))
    other = client.create_run(client.experiment("Other"), None, {})
    folder = local_path(other.artifact_uri)
    folder.mkdir(parents=True)
    for found, *options in (
        *((folder,), (folder, "--experiment", "Other"), (folder, "--status", "running")),
        *((gone.folder, "--experiment", "Default"), (gone.folder, "--status", "finished")),
    ):
        outcome = command("runs", "--last", *options, cwd=here)
        assert (outcome.code, outcome.out, outcome.err) == (0, f"{found}\n", ""), outcome
    outcome = command("runs", "--last", "--experiment", "Other", "--status", "failed", cwd=here)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (4, "", 1), outcome
    assert "there is no such run" in outcome.err
    command("runs", "--last", "--clean", cwd=here, code=2)

    monkeypatch.chdir(here)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    verbs = set()
    cli.import_rest()
    for verb, found in cli.commands.items():
        for param in found.params:
            if param.make_metavar(context := click.Context(found)) == "RUN":
                verbs.add(verb)
                assert param.process_value(context, "last") == f"runs:/{other.id}"
    assert verbs == {"test", "predict", "export", "serve", "reproduce", "report", "diff"}
    client.delete(other.id, {"RUNNING"})
    outcome = command("predict", "last", PICTURE, cwd=here, code=0)
    assert outcome.out.splitlines()[0] == "path,predicted_class,predicted_label,predicted_probability"
    outcome = command("diff", "last", gone.folder, "--exit-code", cwd=here)
    assert (outcome.code, outcome.out) == (0, ""), outcome


@pytest.fixture
def album(tmp_path):
    """A folder with 75 images at several depths, and two files that are no images."""
    digits = sorted(PICTURE.parent.glob("*.png"))
    for number in range(75):
        picture = tmp_path / "album" / f"year {number % 3}" / ("" if number % 2 else "inner") / f"{number:02}.PNG"
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(digits[number % 10], picture)
    (tmp_path / "album" / "notes.txt").write_text("no picture")
    (tmp_path / "album" / ".hidden.png").write_text("no picture")
    return tmp_path / "album"


def test_pictures_of_a_folder_are_answered(gone, album, command, tmp_path):
    """Images at any depth get the answers that they get by name; `--out` writes CSV or JSON lines; a damaged image is
    named."""
    files = sorted(map(str, album.rglob("*.PNG")))
    named = command("predict", gone.folder, *files, cwd=tmp_path, code=0)
    rows = list(csv.DictReader(named.out.splitlines()))
    assert [row["path"] for row in rows] == files

    (album / "damaged.jpg").write_text("no picture")
    outcome = command("predict", gone.folder, album, "--out", "a.csv", cwd=tmp_path)
    assert (outcome.code, outcome.out) == (3, ""), outcome
    assert outcome.err.splitlines()[-1].startswith(f"error: {album / 'damaged.jpg'}: "), outcome
    assert sorted(csv_rows(tmp_path / "a.csv"), key=lambda row: row["path"]) == rows
    (album / "damaged.jpg").unlink()

    outcome = command("predict", gone.folder, "album", "--out", "a.jsonl", cwd=tmp_path)
    assert (outcome.code, outcome.out) == (0, ""), outcome
    assert outcome.err.splitlines()[-1] == "75 answers in a.jsonl"  # without a progress bar
    found = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    found = [{name: str(value) for name, value in row.items()} for row in found]
    assert sorted(found, key=lambda row: row["path"]) == [
        row | {"path": str(Path(row["path"]).relative_to(tmp_path))} for row in rows
    ]

    (tmp_path / "empty").mkdir()
    for arguments, code, words in (
        (["empty"], 3, "error: empty: this folder and its subfolders have no files"),
        (["album", "--out", "a.txt"], 2, "the extension sets the format"),
        (["--out", "a.csv"], 2, "--out requires files or folders"),
        (["album", "--out", "nowhere/a.csv"], 3, "nowhere/a.csv: cannot be written"),
    ):
        outcome = command("predict", gone.folder, *arguments, cwd=tmp_path)
        assert (outcome.code, outcome.out) == (code, ""), outcome
        assert words in outcome.err
    assert {path.name for path in tmp_path.iterdir()} == {"album", "empty", "a.csv", "a.jsonl"}


def test_pictures_are_answered_as_they_are_read(gone, album, tmp_path, monkeypatch):
    """At most a batch of images is in memory; a terminal shows a progress bar on stderr."""
    monkeypatch.chdir(tmp_path)
    decode, table, terminal = ImageSpec.decode, predict._table, io.StringIO()
    decoded = written = most = 0

    def counted(*arguments, **more):
        nonlocal decoded, most
        decoded += 1
        most = max(most, decoded - written)
        return decode(*arguments, **more)

    def counting(out):
        write_row = table(out)

        def write(row):
            nonlocal written
            written += 1
            write_row(row)

        return write

    terminal.isatty = lambda: True
    monkeypatch.setattr(ImageSpec, "decode", counted)
    monkeypatch.setattr(predict, "_table", counting)
    monkeypatch.setattr(local, "BATCH_SIZE", 8)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert predict.predict_files(RunFolder(gone.folder), [album], tmp_path / "a.csv") == 75
    assert (decoded, written, most) == (75, 75, 8)
    assert "files" in terminal.getvalue()
    assert "100%" in terminal.getvalue()
