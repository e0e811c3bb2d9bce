"""`train CONFIG key=a,b --multirun`: one run per grid point and one table; the same command resumes the grid."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import csv_rows

from deeplightning.config.source import read
from deeplightning.faults import ConfigError
from deeplightning.runfolder import RunFolder
from deeplightning.sweep import worker
from deeplightning.sweep.multirun import Grid, Point, points, values_of


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1,0.01", ["0.1", "0.01"]),
        ("adam, sgd", ["adam", "sgd"]),
        ("range(3)", ["0", "1", "2"]),
        ("range(2,8,3)", ["2", "5"]),
        ("range(0.1, 0.4, 0.1)", ["0.1", "0.2", "0.3"]),
        ("range(3,0,-1)", ["3", "2", "1"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("plain", ["plain"]),
        ("", [""]),
    ],
)
def test_a_comma_outside_brackets_divides_values(text, values):
    """Values are read as in a Hydra sweep; a range has the numbers of Python's `range`, and may have decimal steps."""
    assert values_of(text) == values


def test_the_last_key_varies_first():
    """The grid has all combinations, in the order of the arguments; arguments with one value are in each point."""
    keys, grid = points(["c.yaml", "a=1,2", "~b", "d=x", "e=range(2)"])
    assert keys == ["a", "e"]
    assert [point[1] + point[4] for point in grid] == ["a=1e=0", "a=1e=1", "a=2e=0", "a=2e=1"]
    assert grid[0] == ["c.yaml", "a=1", "~b", "d=x", "e=0"]


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["a=1,,2"], "override a=1,,2: a: there is no value between two commas, or at an end: 1,,2"),
        (["a=range()"], "there is no value"),
        (["a=range(x)"], "range takes one to three numbers, range(STOP) or range(START,STOP,STEP), not range(x)"),
        (["a=range(3,0)"], "range(3,0) contains no number"),
        (["a=range(9999)"], "range(9999) contains no number, or more than 1000"),
        (["a=range(100)", "b=range(100)"], "this grid has 10000 points, more than 1000; `deeplightning tune` samples"),
    ],
)
def test_what_cannot_be_swept_is_named(overrides, note):
    """The error names the override and the reason."""
    with pytest.raises(ConfigError) as caught:
        points(overrides)
    assert note in str(caught.value)


@pytest.fixture(scope="module")
def arguments(tiny):
    """The arguments of a grid of two points, one epoch each."""
    return ["train", tiny, "train.num_epochs=1", "stages=[train,test]", "data.batch_size=16,32", "--multirun"]


@pytest.fixture(scope="module")
def first(command, arguments, place):
    """The first call, with both runs in parallel."""
    return command(*arguments, "--jobs", "2", cwd=place, code=0)


def rows(outcome):
    return csv_rows(outcome.folder / "runs.csv")


def test_each_point_is_a_run_and_a_row(first):
    """Each point is an ordinary run with the point's values in its config, and a row with its results in the table."""
    found = rows(first)
    expected = [("0", "finished", "16"), ("1", "finished", "32")]
    assert [(row["run"], row["state"], row["data.batch_size"]) for row in found] == expected
    for row in found:
        folder = RunFolder(Path(row["folder"]))
        assert f"batch_size: {row['data.batch_size']}\n" in folder.config.read_text()
        assert f"run_name: batch_size={row['data.batch_size']}\n" in folder.config.read_text()
        assert f'"test_acc": {row["test_acc"]}'[:16] in folder.results("test").read_text()
    table = first.out.splitlines()[-4:-1]
    assert table[0].split()[:3] == ["run", "state", "data.batch_size"]
    assert table[2].split()[:3] == ["1", "finished", "32"]


def test_the_same_command_repeats_nothing(first, command, arguments, place):
    """The same command runs only points without a finished run; an invalid value is refused before any run."""
    before = rows(first)
    again = command(*arguments, cwd=place, code=0)
    assert "2 runs, 2 of them finished before" in again.out
    assert rows(again) == before
    larger = command(*arguments[:-2], "data.batch_size=16,32,64", "--multirun", cwd=place, code=0)
    assert [row["folder"] for row in rows(larger)][:2] == [row["folder"] for row in before]
    assert rows(larger)[2]["state"] == "finished"
    wrong = command(*arguments[:-2], "data.batch_size=16,many", "--multirun", cwd=place, code=2)
    assert "data.batch_size: must be a whole number or null, not the text 'many'" in wrong.err
    assert command(*arguments[:-1], cwd=place).code == 2  # without --multirun a comma is text


def test_an_edit_does_not_reach_the_runs_that_follow(command, tiny, tmp_path):
    """The second run imports a module as it was when the command started, although the first run edits it."""
    (tmp_path / "edits.py").write_text(EDITS)
    (tmp_path / "edited.py").write_text("VALUE = 1\n")
    settings = ("train.callbacks=[{type: edits.Edits}]", "logger.params.tracking_uri=mlruns", "seed=1,2")
    outcome = command("train", tiny, *settings, "--multirun", cwd=tmp_path, code=0)
    assert (tmp_path / "edited.py").read_text() == "VALUE = 2\n"
    assert [row["state"] for row in rows(outcome)] == ["finished"] * 2
    assert not [*outcome.folder.glob(".sealed/*")]


EDITS = """\
import pathlib

import pytorch_lightning as pl


class Edits(pl.Callback):
    def on_train_start(self, trainer, module):
        import edited

        assert edited.VALUE == 1
        pathlib.Path("edited.py").write_text("VALUE = 2\\n")
"""


def test_a_point_that_starts_anew_forgets_its_former_run(tmp_path):
    """If the code has changed, an interrupted point does not resume its previous run."""
    point = Point(["lr=1"], "seed: 1\n", tmp_path / "p.json")
    point.update_record(state="finished", code={"own.py": "old"}, run="a", folder=str(tmp_path / "a"))
    log = point.file.with_suffix(".log")
    log.write_text("Artifact storage path: /a\n")

    def start(number, arguments, file, environment):
        with file.open("a") as output:
            output.write("interrupted\n")

    train = SimpleNamespace(checkpoint=SimpleNamespace(monitor=None))
    grid = SimpleNamespace(
        points=[point],
        code={"own.py": "new"},
        tag="",
        _start_times={},
        _tracking_overrides=lambda point: [],
        cfg=SimpleNamespace(train=train, redact=str),
        server=SimpleNamespace(address_for=lambda *_: "{}"),
        parent=SimpleNamespace(environment=lambda *_: {}),
        workers=SimpleNamespace(start=start, signal=2),
    )
    grid._resume_overrides = lambda point: Grid._resume_overrides(grid, point)
    Grid._start(grid, 0)
    Grid._record_end(grid, 0, 130)
    assert (point.record["state"], point.record["run"], point.record["folder"]) == ("under way", None, None)
    assert grid._resume_overrides(point) == []


def test_a_signal_during_a_start_reaches_the_run(monkeypatch, tmp_path):
    """A signal that arrives after the fork and before the process id is recorded is sent to the run."""
    sent, workers = [], worker.Forked(lambda args: 0, None)

    def fork(work):
        workers.signal = signal.SIGINT
        return 4711

    monkeypatch.setattr(worker, "fork", fork)
    monkeypatch.setattr(worker.os, "kill", lambda *args: sent.append(args))
    workers.start(0, [], tmp_path / "log", {})
    assert sent == [(4711, signal.SIGINT)]


def test_a_value_of_the_environment_may_occur_elsewhere(command, tiny, place):
    """Only values become references to a variable, not keys or numbers that are equal to its value."""
    words = ["model.optimizer.params={lr: '${oc.decode:${oc.env:RATE}}', weight_decay: 0.001}"]
    words += ["logger.params.experiment_name=${oc.env:NAME}", "train.num_epochs=1", "seed=1,2", "--multirun"]
    command("train", tiny, *words, cwd=place, code=0, RATE="0.001", NAME="train")


def test_a_run_that_ends_before_it_opens_its_log_is_recorded(monkeypatch, tmp_path):
    """A run that a signal ends at its start has an empty log, so that its end can be recorded."""
    workers = worker.Forked(lambda arguments: 0, None)
    monkeypatch.setattr(worker, "fork", lambda work: 4711)
    workers.start(0, [], tmp_path / "log", {})
    assert worker.failure_in(tmp_path / "log", -signal.SIGINT) == "killed by SIGINT"


@pytest.mark.slow
def test_an_edit_of_the_code_of_a_later_point_repeats_it(command, tiny, tmp_path):
    """The code of all points counts, not only that of the first; another order repeats nothing."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("import pytorch_lightning as pl\n\n\nclass Mark(pl.Callback):\n    pass\n")
    words = ("train", tiny, "train.num_epochs=1", "logger.params.tracking_uri=mlruns", "--multirun")
    a, b = "[{type: one.Mark}]", "[{type: two.Mark}]"
    first = rows(command(*words, f"train.callbacks={a},{b}", cwd=tmp_path, code=0))
    assert "2 of them finished before" in command(*words, f"train.callbacks={b},{a}", cwd=tmp_path, code=0).out
    (tmp_path / "two.py").write_text((tmp_path / "two.py").read_text() + "# edited\n")
    again = rows(command(*words, f"train.callbacks={a},{b}", cwd=tmp_path, code=0))
    assert again[1]["folder"] != first[1]["folder"]


@pytest.mark.slow
def test_another_value_of_the_environment_is_another_point(command, tiny, place):
    """Two values of a variable are two grids, although the configs are written alike."""
    words = ["model.optimizer.params={lr: '${oc.decode:${oc.env:RATE}}'}", "train.num_epochs=1"]
    words += ["logger.params.experiment_name=rates", "seed=1,2", "--multirun"]
    first = rows(command("train", tiny, *words, cwd=place, code=0, RATE="0.011"))
    second = rows(command("train", tiny, *words, cwd=place, code=0, RATE="0.012"))
    assert not {row["folder"] for row in first} & {row["folder"] for row in second}


def test_points_that_would_continue_one_run_are_refused(command, tiny, place):
    """Each point would resume the newest run of the experiment: that of the point before."""
    words = ("train", tiny, "train.resume_ckpt=auto", "seed=1,2", "--multirun")
    assert "all runs would continue the same one" in command(*words, cwd=place, code=2).err


def test_a_value_of_the_environment_is_replaced_neither_in_keys_nor_in_other_texts(monkeypatch, tmp_path):
    """A swept key keeps its name, and the config of a point its types."""
    monkeypatch.setenv("NAME", "dropout")
    path = tmp_path / "c.yaml"
    path.write_text("model: {network: {type: a.dropout}}\nlogger: {params: {experiment_name: '${oc.env:NAME}'}}\n")
    secrets, key = read(path).secrets, "model.network.params.dropout"
    cfg = SimpleNamespace(secrets=secrets, redact=secrets.redact, unread=None)
    point = Grid._point(SimpleNamespace(path=path, keys=[key], home=tmp_path, cfg=cfg), [f"{key}=0.5"])
    assert point.words == [f"{key}=0.5"]
    assert "type: a.dropout\n" in point.config
    assert "${oc.env:NAME}" in point.config


def test_a_finished_point_of_a_moved_store_is_not_repeated(tmp_path):
    """The record has the former folder; the run is found in the store around the record."""
    file, run = tmp_path / "mlruns/multiruns/Default/grid/points/p.json", tmp_path / "mlruns/1/a/artifacts"
    for folder in (file.parent, run):
        folder.mkdir(parents=True)
    (run / "cfg.yaml").touch()
    point = Point([], "", file)
    point.update_record(state="finished", code={}, run="a", folder="/former/mlruns/1/a/artifacts")
    assert point.is_finished({})
    assert point.record["folder"] == str(run)
