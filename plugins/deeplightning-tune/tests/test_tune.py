"""`deeplightning tune` samples, runs, evaluates and records trials, and resumes interrupted searches."""

import contextlib
import os
import re
import shlex
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from commands import LIMIT_SECONDS, Outcome, Running
from conftest import TINY, digest
from deeplightning_tune.outcome import draw
from deeplightning_tune.resume import changed_settings
from deeplightning_tune.search import _Search, search
from deeplightning_tune.section import Tune
from deeplightning_tune.space import faults, space_of
from deeplightning_tune.study import Study, begin, notes_of
from PIL import Image
from tiny import csv_rows

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
    """An unchanged task."""


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


@pytest.fixture(scope="module")
def config(tmp_path_factory, store) -> Path:
    """Config of a search of three short trials."""
    path = tmp_path_factory.mktemp("search") / "lr.yaml"
    path.write_text(TINY.replace("STORE", str(store)) + SEARCH)
    path.with_name("broken.py").write_text(BROKEN)
    return path


@pytest.fixture(scope="module")
def searched(command, config, place) -> Outcome:
    """Outcome of the search of `config`."""
    return patiently(command.start("tune", config, "tune.name=three", cwd=place))


def table(outcome: Outcome) -> list[dict[str, str]]:
    return csv_rows(outcome.folder / "trials.csv")


def children(store: Path, parent: str) -> dict[str, str]:
    """Return id and name of the child runs of a run."""
    query = "SELECT run_uuid, name FROM runs JOIN tags USING (run_uuid) WHERE key = 'mlflow.parentRunId' AND value = ?"
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as database:
        return dict(database.execute(f"{query} AND lifecycle_stage = 'active'", (parent,)).fetchall())


def run(store: Path, run_id: str):
    return open_reader(locate(store)).run(run_id)


def study_file(store: Path, name: str) -> Path:
    return store / "searches" / "Default" / name / "study.db"


# ---- results of a search


def test_three_trials_are_three_child_runs(searched, store):
    """Each trial is a child run of the search's run, with its number in the name, and its sampled values as params."""
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
    """stdout and best.yaml have the best trial; best.yaml and the cfg.yaml of the trial's run train to the same
    metric."""
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
    """The plot shows parallel coordinates; the table on stdout has a row for each trial, the best first."""
    assert (searched.folder / "parallel_coordinates.png").read_bytes().startswith(b"\x89PNG")
    ranks = re.findall(r"^(\d) +\d +finished +(\S+)", searched.out, re.MULTILINE)
    assert [rank for rank, _ in ranks] == ["1", "2", "3"]
    assert [float(value) for _, value in ranks] == sorted((float(value) for _, value in ranks), reverse=True)


def test_a_finished_search_repeats_nothing(searched, command, config, place):
    """Repeating the command runs no trial, and prints the results."""
    again = command("tune", config, "tune.name=three", cwd=place, code=0)
    assert again.folder == searched.folder
    assert "trial 0 " not in again.out.split("rank")[0]
    assert table(again) == table(searched)


def test_a_search_with_another_space_is_another_search(searched, command, config, place):
    """A changed space is rejected with both values and a remedy."""
    changed = config.with_name("changed.yaml")
    changed.write_text(config.read_text().replace("[8, 32], step: 8", "[8, 64], step: 8"))
    outcome = patiently(command.start("tune", changed, "tune.name=three", cwd=place), code=2)
    assert "{int: [8, 32], step: 8} when the search three began, and is {int: [8, 64], step: 8}" in outcome.err
    assert "tune.name=NEW" in outcome.err
    assert outcome.err.count("error:") == 1


# ---- interrupted searches


def num_events(database: Path) -> int:
    """Return the number of events that a search has recorded: started trials, reports and ended trials."""
    if not database.exists():
        return 0
    query = "SELECT (SELECT count(*) FROM trials) + (SELECT count(*) FROM trial_intermediate_values)"
    query += " + (SELECT count(*) FROM trials WHERE state != 'RUNNING')"
    # Writable, because a kill may leave a journal to roll back.
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=rw", uri=True, timeout=60)) as connection:
        return connection.execute(query).fetchone()[0]


def has_recorded(running: Running, database: Path, count: int) -> bool:
    """Wait until a search has recorded `count` events; return False if it ended before."""
    end = time.monotonic() + LIMIT_SECONDS
    while num_events(database) < count:
        if running._read("code"):
            return False
        assert time.monotonic() < end, running._read("err")
        time.sleep(0.01)
    return True


def test_a_killed_search_resumes_with_its_original_code_and_config(searched, command, config, store, place):
    """A search is killed in its second trial after code and config were edited. Resumed with the frozen config, it has
    the trials and weights of an undisturbed search: the finished trial is not repeated, the other one is the same run,
    and each trial's code.zip has the original code."""
    code, edited = config.with_name("edited.py"), config.with_name("edited.yaml")
    code.write_text(BROKEN)
    edited.write_text(config.read_text())
    words = ("tune.name=edited", "model.module.type=edited.Learns")
    database = study_file(store, "edited")
    began = command.start("tune", edited, *words, cwd=place)
    assert has_recorded(began, database, 1)
    code.write_text("no code at all\n")
    edited.write_text("nothing: at all\n")
    assert has_recorded(began, database, 5)  # trial 0 started, reported twice, ended; trial 1 started
    began.signal(9)
    assert began.end().code == -9
    outcome = patiently(command.start("tune", database.with_name("search.yaml"), cwd=place))
    assert f"code       {code} has changed since the search edited began" in outcome.err
    assert not re.search(r"^trial 0 ", outcome.out, re.MULTILINE)
    below = children(store, outcome.folder.parent.name)
    assert sorted(below.values()) == ["trial-0", "trial-1", "trial-2"]
    assert {run(store, run_id).status for run_id in below} == {"FINISHED"}
    assert [row | {"run": None} for row in table(outcome)] == [row | {"run": None} for row in table(searched)]
    for row, other in zip(table(outcome), table(searched), strict=True):
        one, two = (next(store.glob(f"*/{each['run']}/artifacts")) for each in (row, other))
        assert digest(one / "last.ckpt") == digest(two / "last.ckpt")
        kept = read_code(one / "code.zip")
        assert (kept.roots, kept.names()) == ([str(config.parent)], {"edited.py": BROKEN.encode()})


def test_ctrl_c_ends_a_search_with_the_command_to_resume(command, config, store, place):
    """The trial ends after its batch as KILLED, the exit code is 130, and the printed command resumes the trial."""
    waits = "train.callbacks=[{type: own.Waits, params: {until: " + str(config.with_name("go")) + "}}]"
    words = ("tune", config, "tune.name=interrupted", "tune.num_trials=1", waits)
    running = command.start(*words, cwd=place)
    assert has_recorded(running, study_file(store, "interrupted"), 2)
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
    assert "(continues)" in outcome.out
    assert children(store, parent) == {trial: "trial-0"}
    found = run(store, parent)
    assert (found.status, "failure" in found.tags) == ("FINISHED", False)


def patiently(running: Running, code: int | None = 0) -> Outcome:
    """Wait for the end of a search, longer than `Running.end`; return its outcome, whose exit code must be `code`."""
    running.ended(8 * LIMIT_SECONDS)
    return running.end(code)


# ---- trials that fail


def test_a_failing_trial_does_not_win(command, config, store, place):
    """A task that raises, one that logs no metric, and one whose metric is NaN are FAILED with their reasons; the task
    that learns wins. Each is tried once, although `num_trials` allows more."""
    grid = "tune.sampler={type: optuna.samplers.GridSampler}"
    space = "tune.space={model.module.type: {choice: [broken.Raises, broken.Silent, broken.NoNumber, broken.Learns]}}"
    outcome = patiently(command.start("tune", config, "tune.name=failing", "tune.num_trials=9", grid, space, cwd=place))
    assert "the space has no more points; tune.num_trials is 9" in outcome.out
    found = {row["model.module.type"].removeprefix("broken."): row for row in table(outcome)}
    states = {name: row["state"] for name, row in found.items()}
    assert states == {"Raises": "failed", "Silent": "failed", "NoNumber": "failed", "Learns": "finished"}
    assert found["Raises"]["failure"].endswith("broken.py:10: KeyError: 'a fault of the user'")
    assert found["Silent"]["failure"].startswith("val_acc was not logged; logged metrics: ")
    assert found["NoNumber"]["failure"] == "val_acc is nan"
    assert run(store, found["Raises"]["run"]).status == "FAILED"
    assert re.search(rf"^best +trial {found['Learns']['trial']}, ", outcome.out, re.MULTILINE)


def damage_pages(file: Path) -> None:
    intact, page = file.read_bytes(), 4096
    file.write_bytes(intact[: 8 * page] + bytes(8 * page) + intact[16 * page :])


def damaged_by(statement: str) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            assert database.execute(statement).rowcount

    return damage


DAMAGES = {
    "pages": damage_pages,
    "params": damaged_by("UPDATE trial_params SET distribution_json = '{'"),
    "settings": damaged_by("UPDATE study_user_attributes SET value_json = '1' WHERE key = 'settings'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_a_search_is_named(name, searched, command, config, place, store):
    """Damage of the database ends with exit code 3 and the file; once it is restored, the search is unchanged."""
    file = study_file(store, "three")
    intact = file.read_bytes()
    try:
        DAMAGES[name](file)
        outcome = patiently(command.start("tune", config, "tune.name=three", cwd=place), code=3)
    finally:
        file.write_bytes(intact)
    assert f"{file}: the file of this search cannot be read or written" in outcome.err
    assert "Traceback" not in outcome.err
    again = patiently(command.start("tune", config, "tune.name=three", cwd=place))
    assert table(again) == table(searched)


@pytest.fixture(scope="module")
def failed(command, config, place) -> Outcome:
    """Search of two trials that both fail, with separate user code."""
    config.with_name("spoilt.py").write_text(BROKEN)
    return patiently(command.start("tune", config, *FAILING, "tune.num_trials=2", cwd=place), code=5)


FAILING = ("tune.name=none", "model.module.type=spoilt.Raises")


def test_no_trial_finishes(failed):
    """A search without a finished trial ends with exit code 5, and the error has the reason once."""
    last = failed.err.splitlines()[-1]
    assert re.fullmatch(r"error: none of 2 trials finished: \S+spoilt.py:10: KeyError: 'a fault of the user'", last)
    assert not (failed.folder / "best.yaml").exists()
    assert [row["state"] for row in table(failed)] == ["failed", "failed"]


def test_a_search_continues_with_the_code_that_it_began_with(failed, command, config, place):
    """An edited file, which no longer compiles, is named; an added trial runs with the code of the first two, and
    another search with the edited code."""
    code = config.with_name("spoilt.py")
    code.write_text(BROKEN.replace("a fault of the user", "another fault") + "no code at all\n")
    outcome = patiently(command.start("tune", config, *FAILING, "tune.num_trials=3", cwd=place), code=5)
    last = outcome.err.splitlines()[-1]
    assert re.match(r"error: none of 3 trials finished: \S+spoilt.py:10: KeyError: 'a fault of the user'", last)
    notice = re.search(r"^warning: code +(.+)$", outcome.out + outcome.err, re.MULTILINE)[1]
    assert f"{code} has changed since the search none began: it continues with the code that it began with" in notice
    assert "tune.name=NEW" in notice
    other = command("tune", config, *FAILING, "tune.name=other", cwd=place, code=2)
    assert "spoilt" in other.err
    assert not [*study_file(failed.folder.parents[3], "other").parent.glob(".sealed/*")]


def test_a_seal_that_somebody_has_changed_is_not_executed(failed, command, config, store, place):
    """If the frozen copy was modified and the original file differs too, the exit code is 2 with the file; once the
    original is restored, the code is copied again, and other copies are removed."""
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


def test_a_trial_of_two_processes(command, config, store, place):
    """Both processes of a trial end when it is pruned, and the trial is one run."""
    pruner = "tune.pruner={type: optuna.pruners.ThresholdPruner, params: {lower: 2.0}}"
    words = ("engine.processes=2", "engine.backend=ddp", "tune.num_trials=1", "tune.name=two", pruner)
    outcome = patiently(command.start("tune", config, *words, cwd=place, main="test_tune:exec_deeplightning"), code=5)
    assert [(row["state"], row["epochs"]) for row in table(outcome)] == [("pruned", "1")]
    assert len(children(store, outcome.folder.parent.name)) == 1


def test_two_trials_at_a_time(command, config, store, place):
    """With `tune.parallel: 2` each trial runs once, with the value of the same point trained alone."""
    two = ("tune.parallel=2", "tune.num_trials=4", "tune.name=parallel")
    outcome = patiently(command.start("tune", config, *two, cwd=place))
    rows = table(outcome)
    assert [(row["trial"], row["state"]) for row in rows] == [(str(number), "finished") for number in range(4)]
    assert children(store, outcome.folder.parent.name) == {row["run"]: f"trial-{row['trial']}" for row in rows}
    again = command("train", outcome.folder / "best.yaml", cwd=place, code=0)
    assert last_value(store, again.folder.parent.name) == max(float(row["val_acc"]) for row in rows)


@pytest.mark.skipif(not is_installed("ray"), reason="Ray is not installed: pip install 'deeplightning[ray]'")
@pytest.mark.skipif(not is_installed("deeplightning_ray"), reason="not installed: pip install 'deeplightning[ray]'")
def test_trials_on_a_ray_cluster(command, config, store, place):
    """With Ray as launcher, trials train and report from workers of a cluster, and are child runs of the search."""
    launcher = "engine.launcher={type: Ray, params: {address: local}}"
    words = ("tune", config, "tune.name=ray", "tune.num_trials=2", launcher)
    outcome = patiently(command.start(*words, cwd=place, main="test_tune:exec_deeplightning"))
    rows = table(outcome)
    assert [(row["state"], row["epochs"]) for row in rows] == [("finished", "2")] * 2
    assert children(store, outcome.folder.parent.name) == {row["run"]: f"trial-{row['trial']}" for row in rows}


def exec_deeplightning() -> None:
    """Replace this process by `python -m deeplightning …`: Lightning starts more processes with the same command."""
    os.execv(sys.executable, [sys.executable, "-m", "deeplightning", *sys.argv[1:]])


# ---- invalid input

# Spaces and errors: found by the check of the complete config, and by the check of the space alone.
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
    """There is one error, at the position of the space, with the nearest valid name."""
    space, message = WRONG[name]
    report = examine(config, [f"tune.space={space}", "model.scheduler={type: torch.optim.lr_scheduler.ConstantLR}"])
    assert report.exit_code == 2
    (fault,) = report.faults
    assert message in str(fault)
    assert str(fault).startswith(f"override tune.space={space}: tune.space")


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_invalid_space_is_rejected(name):
    """There is one error, independent of the config."""
    space, expected = IMPOSSIBLE[name]
    ((_, message),) = faults(yaml.safe_load(space), needs_grid=False)
    assert expected in message


def test_an_error_of_a_dimension_has_its_position(tmp_path, config):
    """It has file, line and column of the key of the space."""
    path, wrong = tmp_path / "c.yaml", "data.batch_sise: {int: [1, 2]}"
    path.write_text(config.read_text().replace("data.batch_size: {int: [8, 32], step: 8}", wrong))
    line = 1 + path.read_text().splitlines().index(f"    {wrong}")
    (fault,) = examine(path).faults
    assert fault.place.endswith(f"c.yaml:{line}:5")
    assert fault.key == "tune.space.data.batch_sise"
    assert fault.to_dict()["suggestion"] == "batch_size"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tune.metric=val_ac", "Did you mean val_acc?"),
        ("tune.sampler={type: optuna.samplers.TPESamplerr}", "Did you mean optuna.samplers.TPESampler?"),
        ("tune.sampler={type: optuna.pruners.MedianPruner}", "is not an Optuna sampler"),
        ("tune.pruner={type: optuna.pruners.MedianPruner, params: {n_warmup: 1}}", "has no param `n_warmup`"),
        ("tune.sampler={type: optuna.samplers.GridSampler}", "a grid needs a finite number of values"),
        ("tune.space={model.optimizer.params.lr: {uniform: [2, 1]}}", "tune.space.model.optimizer.params.lr: the ends"),
        ("tune={metric: lr, mode: null}", "tune.mode: missing: its name does not show whether a lower or a higher lr"),
        ("tune.num_trials=0", "at least 1"),
        ("tune.mode=maximum", "one of min, max"),
    ],
)
def test_invalid_settings_of_a_search_are_rejected(override, message, config):
    """These are the other keys of `tune`, and keys that contradict a search."""
    report = examine(config, [override])
    assert report.exit_code == 2
    assert message in "\n".join(map(str, report.faults))


def test_no_search_in_the_config(config):
    """A config without a search is rejected with an example of the section."""
    with pytest.raises(ConfigError, match=r"tune: there is no search in this config: for example tune: \{metric"):
        search(config, ["tune=null"], lambda words: 0)


RATE = "{model.optimizer.params.lr: {uniform: [0.1, 0.2]}}"


def test_a_space_is_checked_beside_other_faults(config):
    """One report has the errors of the space and of the other sections."""
    space = "tune.space={model.optimizer.params.lrr: {choice: [0.1]}}"
    found = [str(fault) for fault in examine(config, ["data.batch_size=0", space]).faults]
    assert any("tune.space.model.optimizer.params.lrr" in fault and "Did you mean lr?" in fault for fault in found)
    assert any("data.batch_size: must be at least 1" in fault for fault in found)


@pytest.mark.parametrize(("metric", "mode"), [("val_acc", "max"), ("val_loss", "min")])
def test_the_better_way_of_the_metric_is_found(metric, mode, config):
    """A missing `mode` follows from the metric, and `explain` shows why."""
    report = examine(config, [f"tune={{metric: {metric}, space: {RATE}}}"])
    assert (report.faults, report.config.tune.mode) == ([], mode)
    assert f"then null → {mode} (" in explain(report, "tune.mode")


def test_only_one_process_runs_a_search(tmp_path, config, store):
    """A second start of the same search is rejected."""
    home = store / "searches" / "Default" / "held"
    home.mkdir(parents=True)
    hold = RunFolder(home).lock()
    with pytest.raises(SetupError, match="another process runs the search held"):
        search(config, ["tune.name=held"], lambda words: 0)
    hold.release()


# ---- sampling

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
    """Return the points of `number` finished trials; `reopened`: open the study again before each, as after a kill."""
    tune = Tune(metric="loss", space=space, num_trials=number, sampler=Target(**yaml.safe_load(sampler)))
    if not path.exists():
        begin(path, tune.mode, {})
    study = Study(path, tune, space_of(space), seed=3)
    for _ in range(number):
        if reopened:
            study.disconnect()
            study = Study(path, tune, space_of(space), seed=3)
        trial = study.draw()
        value = sum(v if isinstance(v, float) else 0.5 for v in study.point(trial).values())
        study.report(trial.number, 1, value)
        study.finish(trial.number, is_best_kept=False)
    points = [study.point(trial) for trial in study.trials()]
    study.disconnect()
    return points


@pytest.mark.parametrize("name", [n if n in ("TPE", "Grid") else pytest.param(n, marks=SLOW) for n in SAMPLERS])
def test_a_kill_does_not_change_what_is_drawn(name, tmp_path):
    """A search that is reopened before each trial samples the same points as an undisturbed one, and none twice."""
    space = COUNTED if name == "Grid" else FINE
    undisturbed = drawn(tmp_path / "undisturbed.db", SAMPLERS[name], space, 5, reopened=False)
    assert drawn(tmp_path / "reopened.db", SAMPLERS[name], space, 5, reopened=True) == undisturbed
    assert len({line(point) for point in undisturbed}) == 5
    assert all(0 <= point["a"] <= 5 for point in undisturbed)


@pytest.mark.parametrize("name", ["TPE", pytest.param("Grid", marks=SLOW)])
def test_a_space_that_can_be_counted_is_gone_through_once(name, tmp_path):
    """Six points give six different trials; choices of any type keep their value."""
    space = {"a": {"choice": [[1], {"x": True}, 1]}, "b": {"int": [1, 4], "step": 3}}
    points = drawn(tmp_path / "s.db", SAMPLERS[name], space, 6, reopened=False)
    every = [{"a": a, "b": b} for a in ([1], {"x": True}, 1) for b in (1, 4)]
    assert sorted(map(line, points)) == sorted(map(line, every))


def test_trials_with_different_values_have_two_plots(tmp_path):
    """These are importances and parallel coordinates; a choice with dollar signs is not parsed as a formula."""
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
    """Each choice passes the check of the complete config."""
    sgd = "{type: torch.optim.SGD, params: {lr: 0.1}}"
    adam = "{type: torch.optim.Adam, params: {lr: 0.1, betas: [0.8, 0.9]}}"
    space = f"tune.space={{model.optimizer: {{choice: [{sgd}, {adam}]}}}}"
    assert examine(config, [space, "model.scheduler={type: torch.optim.lr_scheduler.ConstantLR}"]).faults == []


def test_an_impossible_launcher_begins_no_search(config, store):
    """The arguments of an impossible launcher can be corrected under the same name of the search."""
    pytest.importorskip("deeplightning_slurm")
    with pytest.raises(ConfigError, match="time is 2"):
        search(config, ["tune.name=soon", "engine.launcher={type: Slurm, params: {time: 2}}"], lambda words: 0)
    assert not study_file(store, "soon").exists()


def test_the_frozen_config_has_no_secrets(command, config, place, store):
    """A secret in clear is in no file that a search keeps."""
    words = ["tune.name=hides", "tune.num_trials=1", "logger.params.tags={password: hunter-47-clear}"]
    done = command("tune", config, *words, cwd=place, code=0)
    kept = [*(store / "searches/Default/hides").rglob("*"), *done.folder.rglob("*")]
    assert len(kept) > 3
    assert not [path for path in kept if path.is_file() and b"hunter-47" in path.read_bytes()]


def test_train_resumes_with_the_same_config(config):
    """`train` accepts a config with a search; only the search refuses what contradicts it."""
    assert examine(config, ["train.resume_ckpt=auto"]).faults == []
    refused = {"train.resume_ckpt=auto": "starts from scratch", "stages=[validate]": "a search trains"}
    for override, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            search(config, [override, "test.ckpt=last"], lambda words: 0)


def test_a_group_is_no_key_of_a_space(tmp_path):
    """The config of a search is merged once, so its trials cannot choose options of a group."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "_base_: pkg://deeplightning/configs/images.yaml\n"
        "tune: {metric: val_acc, space: {model: {choice: [cnn, resnet18]}}}\n"
    )
    assert "tune.space.model: a search cannot choose options of a group" in "\n".join(map(str, examine(path).faults))


def test_a_trial_has_the_value_of_its_best_weights(tmp_path):
    """It may be from a validation inside an epoch, which is not reported."""
    tune = Tune(metric="acc", mode="max", space={"a": {"uniform": [0, 1]}})
    begin(tmp_path / "study.db", "max", {})
    study = Study(tmp_path / "study.db", tune, space_of(tune.space), seed=3)
    study.report(number := study.draw().number, 1, 0.8)
    assert study.finish(number, True, 0.9) == study.best().value == 0.9


def test_a_pruned_trial_is_no_best_of_the_parent_run(tmp_path):
    """Optuna keeps the last value of a pruned trial; the parent run has points of finished trials only."""
    tune = Tune(metric="loss", mode="min", space={"a": {"uniform": [0, 1]}})
    begin(tmp_path / "study.db", "min", {})
    study = Study(tmp_path / "study.db", tune, space_of(tune.space), seed=3)
    study.report(first := study.draw().number, 1, 0.9)
    study.finish(first, False)
    study.report(second := study.draw().number, 1, 0.6)
    study.prune(second)
    points = _Search._points(SimpleNamespace(study=study, tune=tune))
    assert [(p.name, p.value, p.step) for p in points] == [("loss", 0.9, 0), ("trial_loss", 0.9, 0)]


@pytest.mark.parametrize("name", ["what?", "feature%2Fx", "{run}"])
def test_a_search_in_a_folder_with_signs_of_a_url(name, tmp_path):
    """The file of a search is where it should be, whatever the folder is called."""
    (tmp_path / name).mkdir()
    begin(tmp_path / name / "study.db", "max", {"a": "b"})
    assert notes_of(tmp_path / name / "study.db") == {"a": "b"}
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_draw_writes_no_choice_for_each_earlier_trial(tmp_path, monkeypatch):
    """Otherwise a large search keeps its running trials waiting for longer than they do."""
    space, calls = {key: {"choice": [*"abcdef"]} for key in "xy"}, []
    drawn(tmp_path / "study.db", SAMPLERS["Random"], space, 30, reopened=False)
    tune = Tune(metric="loss", space=space, num_trials=36, sampler=Target(**yaml.safe_load(SAMPLERS["Random"])))
    study = Study(tmp_path / "study.db", tune, space_of(space), seed=3)
    for module in ("study", "space"):
        monkeypatch.setattr(f"deeplightning_tune.{module}.line", lambda value: calls.append(value) or line(value))
    drawn_now = study.draw().params
    assert drawn_now not in [trial.params for trial in study.trials()[:-1]]
    assert len(calls) < 50


def test_a_trial_that_ends_late_can_be_the_best(tmp_path):
    """MLflow shows the point with the largest (step, time, value)."""
    tune = Tune(metric="loss", mode="min", space={"a": {"uniform": [0, 1]}})
    begin(tmp_path / "study.db", "min", {})
    study = Study(tmp_path / "study.db", tune, space_of(tune.space), seed=3)
    numbers, points = [study.draw().number, study.draw().number], []
    for number, value in ((numbers[1], 0.9), (numbers[0], 0.5)):
        study.report(number, 1, value)
        study.finish(number, False)
        points += _Search._points(SimpleNamespace(study=study, tune=tune))
        time.sleep(0.01)
    assert max((p.step, p.time, p.value) for p in points if p.name == "loss")[2] == 0.5


@pytest.mark.slow
def test_the_value_of_a_training_metric_is_that_of_the_last_epoch(command, config, store, place):
    """`train_loss_epoch`, which the task logs after the hooks of callbacks, is reported for each of three epochs,
    whether or not it is validated."""
    words = ("tune.name=of-training", "tune.metric=train_loss_epoch", "tune.mode=min", "tune.num_trials=1")
    more = ("train.num_epochs=3", "train.val_every_n_epoch=2")
    (row,) = table(patiently(command.start("tune", config, *words, *more, cwd=place)))
    points = [*Client(locate(store)).history(row["run"], ["train_loss_epoch"])]
    last = max(points, key=lambda point: point.step).value
    assert (row["epochs"], float(row["train_loss_epoch"])) == ("3", pytest.approx(last))


def test_a_param_that_a_search_did_not_have_is_a_change():
    """A key that only a newer version has is none."""
    before = {"model": {"optimizer": {"type": "torch.optim.SGD", "params": {"lr": 0.1}}}}
    optimizer = {"type": "torch.optim.SGD", "params": {"lr": 0.1, "weight_decay": 0.01}}
    (fault,) = changed_settings(before, {"model": {"optimizer": optimizer, "newer": 1}}, "s", Path("search.yaml"))
    assert (fault.key, fault.allowed) == ("model.optimizer.params.weight_decay", "absent")


def test_an_untried_point_is_found_without_comparing_all(tmp_path, monkeypatch):
    """Otherwise a large search keeps its running trials waiting for longer than they do."""
    space = {key: {"int": [1, 20]} for key in "xyz"}
    tune, calls, same = Tune(metric="loss", space=space, num_trials=50), [], Study._same
    begin(tmp_path / "study.db", tune.mode, {})
    study = Study(tmp_path / "study.db", tune, space_of(space), seed=3)
    tried = [{"x": 1, "y": 1, "z": z} for z in range(1, 21)]
    monkeypatch.setattr(Study, "_same", staticmethod(lambda *two: calls.append(two) or same(*two)))
    assert study._move_to_untried(SimpleNamespace(params=tried[0]), tried, 20).params not in tried
    assert len(calls) < 1000
    study.disconnect()


def test_an_unfinished_trial_of_a_moved_store_continues(tmp_path):
    """Its folder in the search's file is the former one; its run is not deleted."""
    run_id = "a" * 32
    artifacts = tmp_path / "moved" / "1" / run_id / "artifacts"
    artifacts.mkdir(parents=True)
    (artifacts / "last.ckpt").touch()
    parent = SimpleNamespace(store=locate(tmp_path / "moved"), delete=lambda *_: pytest.fail("deleted"))
    former = tmp_path / "former" / "1" / run_id / "artifacts"
    one = SimpleNamespace(parent=parent, _run_of=lambda number: (run_id, former))
    assert _Search._resume_overrides(one, 0, {}) == [f"train.resume_ckpt={artifacts / 'last.ckpt'}"]
