"""`train CONFIG --seeds N` groups runs with different seeds under one parent; `compare A B` compares groups."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from commands import environment
from scipy import stats
from tiny import csv_rows

from deeplightning.runfolder import RunFolder
from deeplightning.tracking.client import Client
from deeplightning.tracking.parent import PARENT
from deeplightning.tracking.reader import open_reader
from deeplightning.tracking.store import locate
from deeplightning.tracking.unsent import send_leftovers

SHORT = ["train.num_epochs=1", "stages=[train,test]"]


def rows(folder: Path, file: str = "runs.csv") -> list[dict[str, str]]:
    return csv_rows(folder / file)


def tracked(store: Path, run_id: str):
    """Return a run of the store, and the last values of its metrics."""
    reader = open_reader(locate(store))
    return reader.run(run_id), {point.name: point.value for point in Client(locate(store)).history(run_id)}


def children(store: Path, parent: str) -> list[str]:
    """Return the runs of a parent that are not deleted."""
    reader = open_reader(locate(store))
    return [run.id for run in reader.listing() if reader.run(run.id).tags.get(PARENT) == parent]


@pytest.fixture(scope="module")
def group(train):
    """Three seeds by the option `--seeds`; two runs at the same time."""
    return train(*SHORT, "--seeds", "3", "--jobs", "2")


@pytest.fixture(scope="module")
def better(train):
    """The same three seeds, trained longer, by the key `train.seeds`."""
    return train("train.num_epochs=8", "stages=[train,test]", "train.seeds=3", "logger.params.run_name=longer")


def test_a_seed_is_a_run_under_one_parent(group, store):
    """The seeds count up from that of the config; the config of each run has its seed, and no `train.seeds`."""
    found = rows(group.folder)
    assert [(row["seed"], row["state"]) for row in found] == [(seed, "finished") for seed in "789"]
    parent = group.folder.parent.name
    run, _ = tracked(store, parent)
    assert run.status == "FINISHED"
    assert run.params["train/seeds"] == "3"
    assert sorted(children(store, parent)) == sorted(row["id"] for row in found)
    for row in found:
        config = yaml.safe_load(RunFolder(row["folder"]).config.read_text())
        assert (str(config["seed"]), config["train"]["seeds"]) == (row["seed"], None)
        child, _ = tracked(store, row["id"])
        assert child.tags["mlflow.runName"] == f"{run.tags['mlflow.runName']}-seed-{row['seed']}"


def test_mean_and_interval_are_in_the_terminal_and_in_the_tracker(group, store):
    """The interval of each metric is that of Student's t; the files have all digits."""
    values = [json.loads(RunFolder(r["folder"]).results("test").read_text())["test_acc"] for r in rows(group.folder)]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    summary = {row["metric"]: row for row in rows(group.folder, "summary.csv")}
    row = summary["test_acc"]
    assert [float(row[name]) for name in ("mean", "95 % from", "to")] == pytest.approx([sum(values) / 3, low, high])
    assert {"test_loss", "val_acc", "val_loss", "train_loss_epoch"} <= summary.keys()
    assert not {"lr", "train_loss", "epoch"} & summary.keys()
    _, found = tracked(store, group.folder.parent.name)
    names = ("test_acc", "test_acc_low", "test_acc_high")
    assert [found[name] for name in names] == pytest.approx([sum(values) / 3, low, high])
    assert found["test_acc_std"] == pytest.approx(stats.tstd(values))
    (line,) = [line for line in group.out.splitlines() if line.startswith("test_acc ")]
    assert line.split()[-1] == "3"
    assert float(line.split()[1]) == pytest.approx(sum(values) / 3, abs=0.01)


def test_the_same_command_repeats_nothing_and_more_seeds_are_added(group, train, store):
    """Further seeds join the same parent, which has the means of all runs."""
    before = rows(group.folder)
    again = train(*SHORT, "--seeds", "3")
    assert "3 runs, 3 of them finished before" in again.out
    assert rows(again.folder) == before
    more = train(*SHORT, "train.seeds=4")
    assert more.folder == group.folder
    assert rows(more.folder)[:3] == before
    assert rows(more.folder)[3]["seed"] == "10"
    run, found = tracked(store, more.folder.parent.name)
    assert run.status == "FINISHED"
    assert found["test_acc"] == pytest.approx(sum(float(row["test_acc"]) for row in rows(more.folder)) / 4, abs=1e-5)
    assert len(children(store, more.folder.parent.name)) == 4


def test_two_groups_are_compared_by_their_names(group, better, command, place, store):
    """The result is text or JSON; runs with the same seed, and so the same splits, are paired."""
    name = tracked(store, group.folder.parent.name)[0].tags["mlflow.runName"]
    words = ("compare", name, "longer", "--metric", "test_acc")
    outcome = command(*words, cwd=place, MLFLOW_TRACKING_URI=str(store), code=0)
    assert outcome.out.splitlines()[1] == "B  longer (3 runs, seeds 7 to 9)"
    assert "B is better than A: test_acc of B is " in outcome.out
    assert "bootstrap over 3 pairs of runs with the same seed" in outcome.out
    assert "The evidence is enough" in outcome.out
    assert "McNemar's p is below 0.05 in 3 of 3 pairs" in outcome.out
    found = json.loads(command("compare", group.folder, better.folder, "--format", "json", cwd=place).out)
    (row,) = [row for row in found["rows"] if row["metric"] == "test_acc"]
    assert (row["state"], row["pairs"], row["mode"]) == ("higher", 3, "max")
    assert row["low"] > 0.1


def test_runs_are_chosen_as_runs_chooses(better, command, place, store):
    """Runs are chosen by filters or by their ids; a run that passes a filter with its group counts once."""
    variables = {"MLFLOW_TRACKING_URI": str(store)}
    ids = ",".join(row["id"] for row in rows(better.folder)[:2])
    outcome = command("compare", ids, "name=longer", "--by", "2", cwd=place, **variables, code=0)
    assert f"A  {ids} (2 runs, seeds 7, 8)" in outcome.out
    assert "B  name=longer (3 runs, seeds 7 to 9)" in outcome.out
    assert "note: A and B share runs" in outcome.out
    many = ",".join([ids] * 4)  # longer than the limit of file names
    outcome = command("compare", many, "name=longer", cwd=place, **variables, code=0)
    assert "(2 runs, seeds 7, 8)" in outcome.out
    for words, code, note in (
        (["nam=x", "longer"], 2, "'nam=x': filters are name=, experiment=, status=, metric="),
        (["name=nothing-like-this", "longer"], 4, "name=nothing-like-this: there is no such run"),
        (["longer", "longer", "--metric", "test_ac"], 2, "Did you mean test_acc?"),
        (["longer,,", "longer"], 2, "there is no run between two commas"),
        (["longer", "longer", "--by", "0"], 2, "--by"),
        (["longer", "no-such-run"], 4, "no-such-run"),
    ):
        refused = command("compare", *words, cwd=place, **variables)
        assert (refused.code, note in refused.err) == (code, True), refused


def test_one_run_each_is_compared_by_its_answers(group, better, command, place):
    """The output explains that another seed may reverse the order, and suggests `--seeds`."""
    one, two = (rows(outcome.folder)[0]["folder"] for outcome in (group, better))
    outcome = command("compare", one, two, "--metric", "test_acc", cwd=place, code=0)
    assert "A and B have one seed each, and another seed may reverse the order" in outcome.out
    assert "on the 150 test samples" in outcome.out
    assert "McNemar's p = " in outcome.out
    assert "train both with `--seeds 5`" in outcome.out


@pytest.mark.parametrize("kill", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_group_continues(command, train, tiny, store, place, tmp_path, kill):
    """After SIGINT or SIGKILL the same command resumes the runs under the same parent; after SIGKILL, the next command
    on the store first marks the parent as failed."""
    waits = f"train.callbacks=[{{type: own.Waits, params: {{until: '{tmp_path / 'go'}'}}}}]"
    words = [waits, "--seeds", "2", f"logger.params.experiment_name=Cut{kill.name}"]
    running = command.start("train", tiny, *words, cwd=place)
    notes = store / "seeds" / f"Cut{kill.name}"
    running._wait(
        lambda: (
            any('"folder"' in file.read_text() for file in notes.glob("*/points/*.json"))
            and any("\nwaits\n" in file.read_text() for file in notes.glob("*/points/*.log"))
        ),
        "the second epoch of the first run",
    )
    running.signal(kill)
    if kill == signal.SIGINT:
        (tmp_path / "go").touch()
    cut = running.end()
    (tmp_path / "go").touch()
    (home,) = notes.glob("*")
    parent = json.loads((home / "group.json").read_text())["run"]
    if kill == signal.SIGINT:
        assert cut.code == 130, cut
        assert "interrupted by SIGINT after 0 of 2 runs; the same command continues" in cut.err
        assert tracked(store, parent)[0].status == "KILLED"
        assert [row["state"] for row in rows(cut.folder)] == ["under way", "to come"]
    else:
        assert any(line.startswith(f"{parent}  0 points sent; FAILED") for line in send_leftovers(locate(store)))
        assert tracked(store, parent)[0].status == "FAILED"
    again = train(*words)
    assert "seed=7  (continues)" in again.out
    assert [row["state"] for row in rows(again.folder)] == ["finished", "finished"]
    assert again.folder.parent.name == parent
    assert tracked(store, parent)[0].status == "FINISHED"
    assert len(children(store, parent)) == 2


def test_a_failed_seed_is_named_and_the_others_count(command, train, tiny, place, store):
    """The exit code is 5, the means are those of the finished runs, the parent is FAILED, and the same command repeats
    the failed seed."""
    once = "train.callbacks=[{type: own_seeds.FailsOnce}]"
    (tiny.parent / "own_seeds.py").write_text(
        "import pathlib\nimport pytorch_lightning as pl\n\n\nclass FailsOnce(pl.Callback):\n"
        "    def on_train_start(self, trainer, module):\n"
        f"        mark = pathlib.Path({str(tiny.parent / 'own_seeds.failed')!r})\n"
        "        if not mark.exists():\n"
        "            mark.touch()\n"
        "            raise RuntimeError('the disk was full')\n"
    )
    words = [once, *SHORT, "--seeds", "3", "logger.params.run_name=half"]
    outcome = train(*words, code=5)
    assert "1 of 3 runs failed: " in outcome.err
    assert "the disk was full" in outcome.err
    assert [row["state"] for row in rows(outcome.folder)] == ["failed", "finished", "finished"]
    assert {row["runs"] for row in rows(outcome.folder, "summary.csv")} == {"2"}
    assert tracked(store, outcome.folder.parent.name)[0].status == "FAILED"
    compared = command("compare", outcome.folder, outcome.folder, cwd=place)
    assert "note: A: 1 of its 3 runs left out: not finished" in compared.out
    again = train(*words)
    assert "3 runs, 2 of them finished before" in again.out
    assert {row["runs"] for row in rows(again.folder, "summary.csv")} == {"3"}


@pytest.mark.slow
def test_a_deleted_parent_begins_the_group_anew(train, store):
    """The runs of a deleted parent are not used again."""
    words = [*SHORT, "--seeds", "2", "logger.params.experiment_name=Deleted"]
    first = train(*words)
    assert Client(locate(store)).delete(first.folder.parent.name, ["FINISHED"])
    again = train(*words)
    assert "was deleted; its runs start again" in again.err + again.out
    assert again.folder != first.folder
    assert not {row["id"] for row in rows(first.folder)} & {row["id"] for row in rows(again.folder)}


def test_without_a_tracker_the_group_has_a_folder(command, tiny, place, tmp_path):
    """The folder has the same two tables, and `compare` accepts it."""
    logger = f"logger={{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{tmp_path}'}}}}"
    outcome = command("train", tiny, logger, *SHORT, "--seeds", "2", cwd=tmp_path, code=0)
    assert outcome.folder.is_relative_to(tmp_path / "runs" / "seeds")
    assert rows(outcome.folder, "summary.csv")[0]["runs"] == "2"
    assert command("compare", outcome.folder, outcome.folder, cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--seeds", "2", "--multirun"], "--seeds cannot be combined with --multirun"),
        (["train.seeds=2", "seed=1,2", "--multirun"], "train.seeds: cannot be combined with --multirun"),
        (["--jobs", "2"], "--jobs requires --multirun or --seeds"),
        (["--seeds", "2", "seed=4294967295"], "counts from seed=4294967295 to 4294967296"),
        (["--seeds", "2", "train.resume_ckpt=auto"], "train.seeds: 2 cannot be combined with train.resume_ckpt: auto"),
        (["train.seeds=many"], "train.seeds"),
    ],
)
def test_invalid_seeds_are_refused(train, words, note):
    """They are refused with exit code 2."""
    assert note in train(*words, code=2).err


def test_one_seed_is_an_ordinary_run(train):
    """`--seeds 1` makes no group, so a script may pass any number."""
    assert RunFolder(train(*SHORT, "--seeds", "1").folder).config.is_file()


ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "kfold" / "kfold.yaml"


def test_folds_are_listed_side_by_side(command, tmp_path):
    """The name of each run has the number of its fold, and `runs` shows the chosen metric."""
    small = ["train.num_epochs=1", "data.module.params={limit: 100}", "logger.params.experiment_name=folds"]
    for fold in (0, 4):
        command("train", EXAMPLE, f"data.fold={fold}", *small, cwd=tmp_path, code=0)
    outcome = command("runs", "--name", "folds", "--metric", "val_acc", cwd=tmp_path)
    fields = [line.split("  ") for line in outcome.out.splitlines()]
    assert [of[4] for of in fields] == ["fold 4", "fold 0"]
    assert all(re.fullmatch(r"val_acc [01]\.\d{4}", of[5]) for of in fields)


@pytest.mark.slow
def test_the_script_trains_on_all_folds_and_tells_the_mean(tmp_path):
    """It prints a line per fold, and the mean and standard deviation of their metric."""
    script = ["bash", str(EXAMPLE.with_name("kfold.sh")), "train.num_epochs=1", "data.module.params={limit: 100}"]
    done = subprocess.run(script, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    values = [float(re.fullmatch(rf"fold {4 - n}: val_acc (\d\.\d{{4}})", line)[1]) for n, line in enumerate(lines[:5])]
    mean = sum(values) / 5
    spread = (sum(value**2 for value in values) / 5 - mean**2) ** 0.5
    assert lines[5] == f"mean {mean:.4f}, standard deviation {spread:.4f}"
