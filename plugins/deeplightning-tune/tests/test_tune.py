"""`deeplightning tune`: trials are drawn, run, judged and kept, whatever happens to the search."""

import contextlib
import csv
import os
import re
import shlex
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import LIMIT_SECONDS, Outcome, Running
from conftest import TINY, digest
from deeplightning_tune.outcome import draw
from deeplightning_tune.search import search
from deeplightning_tune.section import Tune
from deeplightning_tune.space import faults, space_of
from deeplightning_tune.study import Study, begin
from PIL import Image

from deeplightning.config.examine import examine
from deeplightning.config.explain import explain
from deeplightning.config.schema import Target
from deeplightning.config.target import is_installed
from deeplightning.config.tree import line
from deeplightning.faults import ConfigError, SetupError
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.client import Client
from deeplightning.tracking.code import read_code
from deeplightning.tracking.reader import open_reader
from deeplightning.tracking.store import locate

SEARCH = """\
tune:
  metric: val_acc
  mode: max
  num_trials: 3
  space:
    model.optimizer.params.lr: {log_uniform: [1e-4, 0.1]}
    data.batch_size: {int: [8, 32], step: 8}
"""
BROKEN = '''\
from deeplightning.task.img_classif import ImageClassification


class Learns(ImageClassification):
    """As ever."""


class Raises(ImageClassification):
    def training_step(self, batch, batch_idx):
        raise KeyError("a fault of the user")


class Silent(ImageClassification):
    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        pass


class NoNumber(Silent):
    def on_validation_epoch_end(self):
        self.log("val_acc", float("nan"))
'''
PRUNER = "tune.pruner={type: optuna.pruners.MedianPruner, params: {n_startup_trials: 2}}"


@pytest.fixture(scope="module")
def config(tmp_path_factory, store) -> Path:
    """A search of three trials, each as short as a run can be."""
    path = tmp_path_factory.mktemp("search") / "lr.yaml"
    path.write_text(TINY.replace("STORE", str(store)) + SEARCH)
    path.with_name("broken.py").write_text(BROKEN)
    return path


@pytest.fixture(scope="module")
def searched(command, config, place) -> Outcome:
    """The search of `config`, to its end."""
    return patiently(command.start("tune", config, "tune.name=three", cwd=place))


def table(outcome: Outcome) -> list[dict[str, str]]:
    with (outcome.folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def children(store: Path, parent: str) -> dict[str, str]:
    """Id and name of the runs that MLflow shows below another one."""
    with sqlite3.connect(store / "mlflow.db") as database:
        found = database.execute(
            "SELECT run_uuid, name FROM runs JOIN tags USING (run_uuid) WHERE key = 'mlflow.parentRunId' AND value = ?"
            " AND lifecycle_stage = 'active'",
            (parent,),
        ).fetchall()
    database.close()
    return dict(found)


def run(store: Path, run_id: str):
    return open_reader(locate(store)).run(run_id)


def study_file(store: Path, name: str) -> Path:
    return store / "searches" / "Default" / name / "study.db"


# ---- what a search leaves


def test_three_trials_are_three_child_runs(searched, store):
    """Each trial is a run of its own below the search's, with its number as name, its values and its metric."""
    assert searched.code == 0, searched
    rows, below = table(searched), children(store, searched.folder.parent.name)
    assert [row["state"] for row in rows] == ["finished"] * 3
    assert below == {row["run"]: f"trial-{row['trial']}" for row in rows}
    for row in rows:
        found = run(store, row["run"])
        assert found.status == "FINISHED"
        assert float(found.params["model/optimizer/params/lr"]) == float(row["model.optimizer.params.lr"])
        assert found.params["data/batch_size"] == row["data.batch_size"]
    assert run(store, searched.folder.parent.name).status == "FINISHED"


def test_the_best_is_reported_and_runs_again(searched, command, store, place):
    """The best trial's values stand on stdout and in best.yaml; that file, and the cfg.yaml of the trial's run, train
    to the same metric."""
    best = max(table(searched), key=lambda row: float(row["val_acc"]))
    assert re.search(rf"^best +trial {best['trial']}, val_acc ", searched.out, re.MULTILINE)
    assert f"deeplightning train {shlex.quote(str(searched.folder / 'best.yaml'))}\n" in searched.out
    written = yaml.safe_load((searched.folder / "best.yaml").read_text())
    assert written["model"]["optimizer"]["params"]["lr"] == float(best["model.optimizer.params.lr"])
    assert written["data"]["batch_size"] == int(best["data.batch_size"])
    assert "tune" not in written
    trial = next(store.glob(f"*/{best['run']}/artifacts/cfg.yaml"))
    for config in (searched.folder / "best.yaml", trial):
        again = command("train", config, cwd=place, code=0)
        assert last_value(store, again.folder.parent.name) == float(best["val_acc"])


def last_value(store: Path, run_id: str) -> float:
    points = list(Client(locate(store)).history(run_id, ["val_acc"]))
    return max(points, key=lambda point: point.step).value


def test_the_search_is_pictured(searched):
    """There is a picture with a line for each trial; the table on stdout has a row for each, the best first."""
    assert (searched.folder / "parallel_coordinates.png").read_bytes().startswith(b"\x89PNG")
    ranks = re.findall(r"^(\d) +\d +finished +(\S+)", searched.out, re.MULTILINE)
    assert [rank for rank, _ in ranks] == ["1", "2", "3"]
    assert [float(value) for _, value in ranks] == sorted((float(value) for _, value in ranks), reverse=True)


def test_a_finished_search_repeats_nothing(searched, command, config, place):
    """The same command once more runs no trial, and shows what was found."""
    again = command("tune", config, "tune.name=three", cwd=place, code=0)
    assert again.folder == searched.folder
    assert "trial 0 " not in again.out.split("rank")[0]
    assert table(again) == table(searched)


def test_a_search_with_another_space_is_another_search(searched, command, config, place):
    """A changed space is refused with both values and the ways out; nothing is run."""
    changed = config.with_name("changed.yaml")
    changed.write_text(config.read_text().replace("[8, 32], step: 8", "[8, 64], step: 8"))
    outcome = patiently(command.start("tune", changed, "tune.name=three", cwd=place))
    assert outcome.code == 2, outcome
    assert "{int: [8, 32], step: 8} when the search three began, and is {int: [8, 64], step: 8}" in outcome.err
    assert "tune.name=NEW" in outcome.err
    assert outcome.err.count("error:") == 1


# ---- interrupted searches


def happened(database: Path) -> int:
    """How much a search has written down: trials, reports and ends."""
    if not database.exists():
        return 0
    connection = sqlite3.connect(f"file:{database}?mode=rw", uri=True, timeout=60)  # a kill may leave a journal to undo
    counts = (
        "SELECT (SELECT count(*) FROM trials) + (SELECT count(*) FROM trial_intermediate_values)"
        " + (SELECT count(*) FROM trials WHERE state != 'RUNNING')"
    )
    (count,) = connection.execute(counts).fetchone()
    connection.close()
    return count


def until(running: Running, database: Path, count: int) -> bool:
    """Waits until a search has written so much down; False: it has ended before."""
    end = time.monotonic() + LIMIT_SECONDS
    while happened(database) < count:
        if running._read("code"):
            return False
        assert time.monotonic() < end, running._read("err")
        time.sleep(0.01)
    return True


def test_a_killed_search_goes_on_with_what_it_began_with(searched, command, config, store, place):
    """Code and config are edited while the first trial runs, and the search is killed in the second; resumed with the
    frozen config, it ends with the trials of an undisturbed search, value for value and weight for weight: what was
    over is not run again, what was under way is the same run, and the code that each trial keeps is the unedited."""
    code, edited = config.with_name("edited.py"), config.with_name("edited.yaml")
    code.write_text(BROKEN)
    edited.write_text(config.read_text())
    words = ("tune.name=edited", "model.module.type=edited.Learns")
    database = study_file(store, "edited")
    began = command.start("tune", edited, *words, cwd=place)
    assert until(began, database, 1)
    code.write_text("no code at all\n")
    edited.write_text("nothing: at all\n")
    assert until(began, database, 5)  # trial 0 drawn, two reports, over; trial 1 drawn
    began.signal(9)
    assert began.end().code == -9
    outcome = patiently(command.start("tune", database.with_name("search.yaml"), cwd=place))
    assert outcome.code == 0, outcome
    assert f"code       {code} has changed since the search edited began" in outcome.err
    assert not re.search(r"^trial 0 ", outcome.out, re.MULTILINE)
    below = children(store, outcome.folder.parent.name)
    assert sorted(below.values()) == ["trial-0", "trial-1", "trial-2"]
    assert {run(store, run_id).status for run_id in below} == {"FINISHED"}
    different = {"run": None}
    assert [row | different for row in table(outcome)] == [row | different for row in table(searched)]
    for row, other in zip(table(outcome), table(searched), strict=True):
        one, two = (next(store.glob(f"*/{each['run']}/artifacts")) for each in (row, other))
        assert digest(one / "last.ckpt") == digest(two / "last.ckpt")
        kept = read_code(one / "code.zip")
        assert (kept.roots, kept.names()) == ([str(config.parent)], {"edited.py": BROKEN.encode()})


def test_ctrl_c_ends_a_search_politely(command, config, store, place):
    """The trial ends at the end of its batch as KILLED, the exit code is 130, and a note says how to go on."""
    waits = "train.callbacks=[{type: own.Waits, params: {until: " + str(config.with_name("go")) + "}}]"
    words = ("tune", config, "tune.name=interrupted", "tune.num_trials=1", waits)
    running = command.start(*words, cwd=place)
    assert until(running, study_file(store, "interrupted"), 2)
    running.signal(2)
    config.with_name("go").touch()
    outcome = running.end(code=130)
    again = shlex.join(["deeplightning", *map(str, words)])
    assert f"error: interrupted by SIGINT after 0 of 1 trials; to continue: {again}\n" in outcome.err
    assert outcome.out.count("Artifact storage path: ") == 1
    parent = outcome.folder.parent.name
    (trial,) = children(store, parent)
    assert [run(store, parent).status, run(store, trial).status] == ["KILLED", "KILLED"]
    outcome = patiently(command.start(*words, cwd=place))
    assert outcome.code == 0, outcome
    assert "(continues)" in outcome.out
    assert children(store, parent) == {trial: "trial-0"}


def patiently(running: Running) -> Outcome:
    """How a search of many trials ends."""
    end = time.monotonic() + 8 * LIMIT_SECONDS
    while not running._read("code") and time.monotonic() < end:
        time.sleep(0.1)
    return running.end()


# ---- trials that fail


def test_a_failing_trial_does_not_win(command, config, store, place):
    """Of tasks that raise, that log no metric, whose metric is no number, and that learn, each is tried once: the first
    three are marked with their reasons, and the last wins."""
    grid = "tune.sampler={type: optuna.samplers.GridSampler}"
    space = "tune.space={model.module.type: {choice: [broken.Raises, broken.Silent, broken.NoNumber, broken.Learns]}}"
    outcome = patiently(command.start("tune", config, "tune.name=failing", "tune.num_trials=9", grid, space, cwd=place))
    assert outcome.code == 0, outcome
    assert "the space has no more points; tune.num_trials is 9" in outcome.out
    found = {row["model.module.type"].removeprefix("broken."): row for row in table(outcome)}
    states = {name: row["state"] for name, row in found.items()}
    assert states == {"Raises": "failed", "Silent": "failed", "NoNumber": "failed", "Learns": "finished"}
    assert found["Raises"]["failure"].endswith("broken.py:10: KeyError: 'a fault of the user'")
    assert found["Silent"]["failure"].startswith("val_acc was not logged; logged metrics: ")
    assert found["NoNumber"]["failure"] == "val_acc is nan"
    assert run(store, found["Raises"]["run"]).status == "FAILED"
    assert re.search(rf"^best +trial {found['Learns']['trial']}, ", outcome.out, re.MULTILINE)


def damaged_pages(file: Path) -> None:
    whole, page = file.read_bytes(), 4096
    file.write_bytes(whole[: 8 * page] + bytes(8 * page) + whole[16 * page :])


def damaged_texts(change: str) -> Callable[[Path], None]:
    def change_it(file: Path) -> None:
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            assert database.execute(change).rowcount

    return change_it


DAMAGES = {
    "pages": damaged_pages,
    "values of trials": damaged_texts("UPDATE trial_params SET distribution_json = '{'"),
    "a note is no mapping": damaged_texts("UPDATE study_user_attributes SET value_json = '1' WHERE key = 'settings'"),
}


@pytest.mark.parametrize(
    "damage",
    [pytest.param(damage, marks=[pytest.mark.slow] * (name != "pages"), id=name) for name, damage in DAMAGES.items()],
)
def test_a_damaged_file_of_a_search_is_named(damage, searched, command, config, place, store):
    """Damage that shows when the trials are read; where it is mended, the search is what it was."""
    file = study_file(store, "three")
    whole = file.read_bytes()
    try:
        damage(file)
        outcome = patiently(command.start("tune", config, "tune.name=three", cwd=place))
    finally:
        file.write_bytes(whole)
    assert outcome.code == 3, outcome
    assert f"{file}: the file of this search cannot be read or written" in outcome.err
    assert "Traceback" not in outcome.err
    again = patiently(command.start("tune", config, "tune.name=three", cwd=place))
    assert (again.code, table(again)) == (0, table(searched))


@pytest.fixture(scope="module")
def failed(command, config, place) -> Outcome:
    """A search of two trials that both fail, by code of its own."""
    config.with_name("spoilt.py").write_text(BROKEN)
    return patiently(command.start("tune", config, *FAILING, "tune.num_trials=2", cwd=place))


FAILING = ("tune.name=none", "model.module.type=spoilt.Raises")


def test_no_trial_finishes(failed):
    """Where all trials fail, the exit code is 5, and the reasons are told once."""
    assert failed.code == 5, failed
    last = failed.err.splitlines()[-1]
    assert re.fullmatch(r"error: none of 2 trials finished: \S+spoilt.py:10: KeyError: 'a fault of the user'", last)
    assert not (failed.folder / "best.yaml").exists()
    assert [row["state"] for row in table(failed)] == ["failed", "failed"]


def test_a_search_continues_with_the_code_that_it_began_with(failed, command, config, place):
    """A file of the user's code that was edited, and no longer compiles, is named; the trial that is added runs with
    the code of the first two, and another search with the code as it is."""
    code = config.with_name("spoilt.py")
    code.write_text(BROKEN.replace("a fault of the user", "another fault") + "no code at all\n")
    outcome = patiently(command.start("tune", config, *FAILING, "tune.num_trials=3", cwd=place))
    assert outcome.code == 5, outcome
    last = outcome.err.splitlines()[-1]
    assert re.match(r"error: none of 3 trials finished: \S+spoilt.py:10: KeyError: 'a fault of the user'", last)
    notice = re.search(r"^warning: code +(.+)$", outcome.out + outcome.err, re.MULTILINE)[1]
    assert f"{code} has changed since the search none began: it continues with the code that it began with" in notice
    assert "tune.name=NEW" in notice
    other = command("tune", config, *FAILING, "tune.name=other", cwd=place, code=2)
    assert "spoilt" in other.err
    assert not [*study_file(failed.folder.parents[3], "other").parent.glob(".sealed/*")]


def test_a_seal_that_somebody_has_changed_is_not_executed(failed, command, config, store, place):
    """A copy of the code that is not what the search has sealed: while the files of the code differ as well, exit code
    2 with the file; once they are as they were, they are sealed anew, and what was left of other seals is removed."""
    code = config.with_name("spoilt.py")
    (copy,) = study_file(store, "none").parent.glob(".sealed/*/code/**/spoilt.py")
    copy.chmod(0o600)
    copy.write_text("raise SystemExit('executed')\n")
    code.write_text(BROKEN.replace("a fault of the user", "another fault"))
    refused = command("tune", config, *FAILING, "tune.num_trials=2", cwd=place, code=2)
    assert f"{code}: this code has changed since the search none began" in refused.err
    code.write_text(BROKEN)
    command("tune", config, *FAILING, "tune.num_trials=2", cwd=place, code=5)
    (copy,) = study_file(store, "none").parent.glob(".sealed/*/code/**/spoilt.py")
    assert copy.read_text() == BROKEN


@pytest.mark.slow
def test_a_trial_of_two_processes(command, config, store, place):
    """A trial may be a job of several processes: both end where the pruner says so, and the run is one."""
    pruner = "tune.pruner={type: optuna.pruners.ThresholdPruner, params: {lower: 2.0}}"
    words = ("engine.processes=2", "engine.backend=ddp", "tune.num_trials=1", "tune.name=two", pruner)
    outcome = patiently(command.start("tune", config, *words, cwd=place, main="test_tune:as_a_person_starts_it"))
    assert outcome.code == 5, outcome
    assert [(row["state"], row["epochs"]) for row in table(outcome)] == [("pruned", "1")]
    assert len(children(store, outcome.folder.parent.name)) == 1


@pytest.mark.slow
def test_two_trials_at_a_time(command, config, store, place):
    """`tune.parallel: 2`: each trial once, and its value is that of the same point trained by itself."""
    two = ("tune.parallel=2", "tune.num_trials=4", "tune.name=parallel")
    outcome = patiently(command.start("tune", config, *two, cwd=place))
    assert outcome.code == 0, outcome
    rows = table(outcome)
    assert [(row["trial"], row["state"]) for row in rows] == [(str(number), "finished") for number in range(4)]
    assert children(store, outcome.folder.parent.name) == {row["run"]: f"trial-{row['trial']}" for row in rows}
    again = command("train", outcome.folder / "best.yaml", cwd=place, code=0)
    assert last_value(store, again.folder.parent.name) == max(float(row["val_acc"]) for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("ray"), reason="Ray is not installed: pip install 'deeplightning[ray]'")
@pytest.mark.skipif(not is_installed("deeplightning_ray"), reason="not installed: pip install 'deeplightning[ray]'")
def test_trials_on_a_ray_cluster(command, config, store, place):
    """With Ray as launcher the trials train on workers of a cluster, report from there, and are runs below the search's
    all the same."""
    launcher = "engine.launcher={type: Ray, params: {address: local}}"
    words = ("tune", config, "tune.name=ray", "tune.num_trials=2", launcher)
    outcome = patiently(command.start(*words, cwd=place, main="test_tune:as_a_person_starts_it"))
    assert outcome.code == 0, outcome
    rows = table(outcome)
    assert [(row["state"], row["epochs"]) for row in rows] == [("finished", "2")] * 2
    assert children(store, outcome.folder.parent.name) == {row["run"]: f"trial-{row['trial']}" for row in rows}


def as_a_person_starts_it() -> None:
    """`python -m deeplightning …` in place of this process: Lightning starts further processes by its command."""
    os.execv(sys.executable, [sys.executable, "-m", "deeplightning", *sys.argv[1:]])


# ---- bad input

# By space: what the check of the whole config says of it, and what can be said of it alone.
WRONG = {
    "unknown section": ("{model.optimiser.params.lr: {uniform: [0, 1]}}", "unknown key. Did you mean optimizer?"),
    "unknown param": ("{model.optimizer.params.lrr: {uniform: [0, 1]}}", "has no param `lrr`. Did you mean lr?"),
    "type": (
        "{data.batch_size: {uniform: [8, 16]}}",
        "8.0: must be a whole number or null, not the number 8.0; use int",
    ),
    "low end": ("{train.num_epochs: {int: [-1, 3]}}", "-1: must be at least 0, not -1"),
    "param's type": ("{model.network.params.num_classes: {choice: [10, many]}}", "many: deeplightning.model.cnn"),
    "word": ("{model.scheduler.call.interval: {choice: [epoch, batch]}}", "batch: "),
    "target": ("{model.optimizer.type: {choice: [torch.optim.SGD, torch.optim.SDG]}}", "Did you mean torch.optim.SGD?"),
}

IMPOSSIBLE = {
    "no distribution": ("{data.batch_size: [8, 16]}", "perhaps {choice: [8, 16]}"),
    "value": ("{data.batch_size: 8}", "perhaps {choice: [8]}"),
    "distribution": ("{data.batch_size: {loguniform: [8, 16]}}", "Did you mean log_uniform?"),
    "typo": ("{data.batch_size: {chioce: [8, 16]}}", "Did you mean choice?"),
    "two": ("{data.batch_size: {int: [8, 16], choice: [8]}}", "must be one of uniform, log_uniform, int, log_int"),
    "order": ("{data.batch_size: {int: [16, 8]}}", "the ends are in the wrong order: [16, 8]; write [8, 16]"),
    "one end": ("{data.batch_size: {int: [16]}}", "must be its two ends"),
    "infinite": ("{model.optimizer.params.lr: {uniform: [0, .inf]}}", "must be its two ends"),
    "log of 0": ("{model.optimizer.params.lr: {log_uniform: [0, 1]}}", "needs ends above 0"),
    "step": ("{data.batch_size: {int: [8, 16], step: 0}}", "step must be a whole number above 0"),
    "step of choice": ("{data.batch_size: {choice: [8, 16], step: 2}}", "`step` goes with uniform and int"),
    "twice": ("{data.batch_size: {choice: [8, 16, 8]}}", "the choice 8 occurs twice"),
    "no choice": ("{data.batch_size: {choice: []}}", "choice must be a list of values"),
    "empty": ("{}", "there is nothing to search over"),
    "itself": ("{tune.num_trials: {int: [1, 9]}}", "`tune` cannot be searched over"),
    "section and key": (
        "{model.optimizer: {choice: [{type: a.B}]}, model.optimizer.params.lr: {uniform: [0, 1]}}",
        "`model.optimizer`, which is also searched over",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_space_that_does_not_fit_the_config_is_refused(name, config):
    """One fault, at the place of the space, with the nearest right word, before anything is spent."""
    space, told = WRONG[name]
    report = examine(config, [f"tune.space={space}", "model.scheduler={type: torch.optim.lr_scheduler.ConstantLR}"])
    assert report.exit_code == 2
    (fault,) = report.faults
    assert told in str(fault)
    assert str(fault).startswith(f"override tune.space={space}: tune.space")


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_space_that_cannot_be_is_refused(name):
    """One fault, whatever the config holds besides."""
    space, told = IMPOSSIBLE[name]
    ((_, message),) = faults(yaml.safe_load(space), needs_grid=False)
    assert told in message


def test_the_place_of_a_dimension_is_told(tmp_path, config):
    """File, line and column of the key of the space."""
    path = tmp_path / "c.yaml"
    path.write_text(
        config.read_text().replace("data.batch_size: {int: [8, 32], step: 8}", "data.batch_sise: {int: [1, 2]}")
    )
    line = 1 + path.read_text().splitlines().index("    data.batch_sise: {int: [1, 2]}")
    (fault,) = examine(path).faults
    assert fault.place.endswith(f"c.yaml:{line}:5")
    assert fault.key == "tune.space.data.batch_sise"
    assert fault.to_dict()["suggestion"] == "batch_size"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("tune.metric=val_ac", "Did you mean val_acc?"),
        ("tune.sampler={type: optuna.samplers.TPESamplerr}", "Did you mean optuna.samplers.TPESampler?"),
        ("tune.sampler={type: optuna.pruners.MedianPruner}", "is not an Optuna sampler"),
        ("tune.pruner={type: optuna.pruners.MedianPruner, params: {n_warmup: 1}}", "has no param `n_warmup`"),
        ("tune.sampler={type: optuna.samplers.GridSampler}", "a grid needs a finite number of values"),
        ("train.resume_ckpt=auto", "each trial of a search starts from scratch"),
        ("stages=[test]", "a search trains"),
        ("tune.space={model.optimizer.params.lr: {uniform: [2, 1]}}", "tune.space.model.optimizer.params.lr: the ends"),
        ("tune={metric: lr, mode: null}", "tune.mode: missing: its name does not show whether a lower or a higher lr"),
        ("tune.num_trials=0", "at least 1"),
        ("tune.mode=maximum", "one of min, max"),
    ],
)
def test_a_block_that_cannot_be_is_refused(override, told, config):
    """The keys of the block beside its space."""
    report = examine(config, [override])
    assert report.exit_code == 2
    assert told in "\n".join(map(str, report.faults))


def test_no_search_in_the_config(config):
    """A config without the block: exit code 2, and what the block looks like."""
    with pytest.raises(ConfigError, match=r"tune: there is no search in this config: for example tune: \{metric"):
        search(config, ["tune=null"], lambda words: 0)


RATE = "{model.optimizer.params.lr: {uniform: [0.1, 0.2]}}"


def test_a_space_is_checked_beside_other_faults(config):
    """An unknown key of the space is in the first report."""
    space = "tune.space={model.optimizer.params.lrr: {choice: [0.1]}}"
    told = [str(fault) for fault in examine(config, ["data.batch_size=0", space]).faults]
    assert any("tune.space.model.optimizer.params.lrr" in note and "Did you mean lr?" in note for note in told)
    assert any("data.batch_size: must be at least 1" in note for note in told)


@pytest.mark.parametrize(("metric", "mode"), [("val_acc", "max"), ("val_loss", "min")])
def test_the_better_way_of_the_metric_is_found(metric, mode, config):
    """A `mode` that is not given follows from the metric, and a notice says why."""
    report = examine(config, [f"tune={{metric: {metric}, space: {RATE}}}"])
    assert (report.faults, report.config.tune.mode) == ([], mode)
    assert f"then null → {mode} (" in explain(report, "tune.mode")


def test_a_key_that_could_be_set_is_explained(config):
    """In a section that is null."""
    told = explain(examine(config, ["tune=null"]), "tune.num_trials")
    assert told.splitlines() == [
        "tune.num_trials: not set",
        "  type        a whole number, at least 1",
        "  meaning     total number of trials, including those of an interrupted search",
        "  default     20",
        "  set by      nothing; the default applies",
    ]


def test_one_process_is_at_a_search(tmp_path, config, store):
    """A second start of the same search is refused with exit code 3."""
    home = store / "searches" / "Default" / "held"
    home.mkdir(parents=True)
    hold = RunFolder(home).lock()
    with pytest.raises(SetupError, match="another process runs the search held"):
        search(config, ["tune.name=held"], lambda words: 0)
    hold.release()


# ---- what is drawn

SLOW = pytest.mark.slow
SAMPLERS = {
    "TPE": "{type: optuna.samplers.TPESampler, params: {n_startup_trials: 2}}",
    "Random": "{type: optuna.samplers.RandomSampler, params: {seed: 1}}",
    "Grid": "{type: optuna.samplers.GridSampler}",
    "QMC": "{type: optuna.samplers.QMCSampler}",
}
COUNTED = {
    "a": {"int": [1, 5]},
    "b": {"choice": [[1], {"x": True}, "on", 1, None]},
    "c": {"uniform": [0, 1], "step": 0.5},
}
FINE = {"a": {"uniform": [0.0, 1.0]}, "b": {"log_uniform": [1e-4, 1.0]}}


def drawn(path: Path, sampler: str, space: dict, number: int, reopened: bool) -> list[dict]:
    """The points of so many trials, each ended with a value; opened anew before each, as after a kill, or not."""
    tune = Tune(metric="loss", space=space, num_trials=number, sampler=Target(**yaml.safe_load(sampler)))
    if not path.exists():
        begin(path, tune.mode, {})
    study = Study(path, tune, space_of(space), seed=3)
    for _ in range(number):
        if reopened:
            study.disconnect()
            study = Study(path, tune, space_of(space), seed=3)
        trial = study.draw()
        study.report(
            trial.number, 1, sum(float(v) if isinstance(v, float) else 0.5 for v in study.point(trial).values())
        )
        study.finish(trial.number, is_best_kept=False)
    points = [study.point(trial) for trial in study.trials()]
    study.disconnect()
    return points


@pytest.mark.parametrize("name", [n if n in ("TPE", "Grid") else pytest.param(n, marks=SLOW) for n in SAMPLERS])
def test_a_kill_does_not_change_what_is_drawn(name, tmp_path):
    """A search that was opened anew before each trial draws what an undisturbed one draws, and no point twice."""
    space = COUNTED if name == "Grid" else FINE
    whole = drawn(tmp_path / "whole.db", SAMPLERS[name], space, 5, reopened=False)
    assert drawn(tmp_path / "torn.db", SAMPLERS[name], space, 5, reopened=True) == whole
    assert len({line(point) for point in whole}) == 5
    assert all(0 <= point["a"] <= 5 for point in whole)


@pytest.mark.parametrize("name", ["TPE", pytest.param("Grid", marks=SLOW)])
def test_a_space_that_can_be_counted_is_gone_through_once(name, tmp_path):
    """Six points are six trials, none of them twice, choices as they were written, whatever they are."""
    space = {"a": {"choice": [[1], {"x": True}, 1]}, "b": {"int": [1, 4], "step": 3}}
    points = drawn(tmp_path / "s.db", SAMPLERS[name], space, 6, reopened=False)
    every = [{"a": a, "b": b} for a in ([1], {"x": True}, 1) for b in (1, 4)]
    assert sorted(map(line, points)) == sorted(map(line, every))


def test_what_matters_is_pictured(tmp_path):
    """Finished trials whose values differ make two pictures; a choice with dollar signs is text."""
    space = {"a": FINE["a"], "b": {"choice": ["$x_$", "$y"]}}
    drawn(tmp_path / "s.db", SAMPLERS["Random"], space, 5, reopened=False)
    study = Study(tmp_path / "s.db", Tune(metric="loss", space=space), space_of(space), seed=3)
    draw(study, tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("*.png"))] == ["importances.png", "parallel_coordinates.png"]
    for path in tmp_path.glob("*.png"):
        with Image.open(path) as picture:
            assert len(picture.getcolors(1 << 20)) > 9
            assert min(picture.size) > 100
    study.disconnect()


def test_choices_may_be_whole_targets_and_lists(config):
    """Each goes through the check of the whole config."""
    sgd, adam = (
        "{type: torch.optim.SGD, params: {lr: 0.1}}",
        "{type: torch.optim.Adam, params: {lr: 0.1, betas: [0.8, 0.9]}}",
    )
    given = [
        f"tune.space={{model.optimizer: {{choice: [{sgd}, {adam}]}}}}",
        "model.scheduler={type: torch.optim.lr_scheduler.ConstantLR}",
    ]
    assert examine(config, given).faults == []


def test_an_impossible_launcher_begins_no_search(config, store):
    """Its arguments may be corrected under the same name."""
    pytest.importorskip("deeplightning_slurm")
    with pytest.raises(ConfigError, match="time is 2"):
        search(config, ["tune.name=soon", "engine.launcher={type: Slurm, params: {time: 2}}"], lambda words: 0)
    assert not study_file(store, "soon").exists()
