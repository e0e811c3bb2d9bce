"""`bisect` finds the differences that make a run worse, by training mixtures of two runs."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import forks
import numpy
import pytest
from commands import answer_of, environment, free_port, wait_for
from deeplightning_lab.ddmin import Outcome, ddmin, most_tests
from deeplightning_lab.interpreters import interpreters
from deeplightning_lab.trials import UNDERWAY, Trial
from mlflow.tracking import MlflowClient
from tiny import csv_rows

from deeplightning.engine.checkpoint_reading import read_checkpoint
from deeplightning.faults import SetupError
from deeplightning.process.die_with_parent import end_with
from deeplightning.reproduce.past import PastRun
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.code import read_code

PASSWORD = "correct-horse-battery"  # comes from the environment
CONFIG = """\
seed: 7
data:
  module: {type: own.Guarded, params: {limit: 150, token: "${oc.env:OWN_TOKEN}"}}
  batch_size: 16
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: own.net, params: {width: 16, gain: 1, slope: 0.0}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9, weight_decay: 0.0}}
  loss: {type: torch.nn.CrossEntropyLoss, params: {label_smoothing: 0.0}}
train: {num_epochs: 2, export: false, checkpoint: {monitor: val_loss}}
logger: {params: {tracking_uri: STORE, system_metrics: false}, pictures: null}
"""
OWN = f"""\
from torch import nn

from deeplightning.data.digits import Digits
from bounds import MOST


class Guarded(Digits):
    def __init__(self, cfg, token, **params):
        super().__init__(cfg, **params)
        assert token == "{PASSWORD}"


class Gain(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain if gain <= MOST else 0  # above the bound the network gets no input

    def forward(self, images):
        return images * self.gain


def net(width, gain, slope):
    layers = [nn.Flatten(), Gain(gain), nn.Linear(64, width), nn.LeakyReLU(slope), nn.Linear(width, 10)]
    return nn.Sequential(*layers)
"""
BAD = {
    "seed": 8,
    "data.batch_size": 12,
    "model.network.params.width": 18,
    "model.network.params.gain": 2,
    "model.network.params.slope": 0.01,
    "model.optimizer.params.lr": 0.04,
    "model.optimizer.params.momentum": 0.85,
    "model.optimizer.params.weight_decay": 0.0001,
    "model.loss.params.label_smoothing": 0.01,
}
NAMES = [*BAD, "bounds.py", "own.py", "PYTHONHASHSEED"]
CAUSE = ["model.network.params.gain", "bounds.py"]


class Forked:
    """Replace `subprocess.Popen` by a fork for the process of a run; it ends with this one."""

    def __init__(self, plan, python, log):
        driver = os.getpid()
        self.child = os.fork()
        if self.child == 0:
            end_with(driver)
            written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(written, 1)
            os.dup2(written, 2)
            os.chdir(plan.directory)
            forks.become(["train", str(plan.config), *plan.overrides], plan.variables)

    def send_signal(self, number):
        os.kill(self.child, number)

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def forking():
    """Run `deeplightning` so that bisections fork their runs: a new process spends seconds on imports."""
    from deeplightning_lab import trials

    from deeplightning.cli import main

    trials.start_process = Forked
    main()


class Ends:
    """A good and a bad run in a separate store, and methods that bisect them."""

    def __init__(self, command, top, bad, files, **variables):
        self.command, self.top, self.store = command, top, top / "a store"
        place = top / "a place"
        place.mkdir()
        (place / "c.yaml").write_text(CONFIG.replace("STORE", f"'{self.store}'"))
        (place / "own.py").write_text(OWN)
        (place / "bounds.py").write_text("MOST = 10\n")
        self.good = self.train(place, (), PYTHONHASHSEED="0")
        for name, content in files.items():
            (place / name).write_text(content)
        self.bad = self.train(place, [f"{key}={value}" for key, value in bad.items()], **variables)

    def train(self, place, overrides, **variables):
        return self.command("train", "c.yaml", *overrides, cwd=place, OWN_TOKEN=PASSWORD, **variables, code=0).folder

    def start(self, *words, good=None, bad=None):
        runs = good or self.good, bad or self.bad
        main = "test_bisect:forking"
        return self.command.start("bisect", *runs, *words, cwd=self.top, main=main, OWN_TOKEN=PASSWORD)

    def bisect(self, *words, code=None, **runs):
        return self.start(*words, **runs).end(code)

    def children(self, parent):
        """Return the child runs of a run, the newest first."""
        client = MlflowClient(f"sqlite:///{self.store / 'mlflow.db'}")
        return client.search_runs(["0"], f"tags.`mlflow.parentRunId` = '{parent.parent.name}'")


@pytest.fixture(scope="module")
def twelve(command, tmp_path_factory):
    """Twelve differences, of which a key of the config and a code file together are the cause."""
    files = {"bounds.py": "MOST = 1\n", "own.py": f"{OWN}\n# the same\n"}
    return Ends(command, tmp_path_factory.mktemp("twelve"), BAD, files, PYTHONHASHSEED="1")


@pytest.fixture(scope="module")
def few(command, tmp_path_factory):
    """Three differences: a new param that makes the run worse, the code file that accepts it, and another key."""
    files = {"own.py": OWN.replace("gain, slope)", "gain, slope, off=0)").replace("Gain(gain)", "Gain(gain + off)")}
    bad = {"model.network.params.off": 20, "data.batch_size": 15}
    return Ends(command, tmp_path_factory.mktemp("few"), bad, files, PYTHONHASHSEED="0")


@pytest.fixture(scope="module")
def found(few):
    """Outcome of the bisection of the three differences."""
    return few.bisect("--seeds", "2", code=0)


def result(folder):
    return json.loads((folder / "bisect.json").read_text())


def needed_runs():
    """Return the number of sets that delta debugging tests for the twelve differences."""
    tested = []

    def test(chosen):
        tested.append(chosen)
        return Outcome.BAD if set(CAUSE) <= set(chosen) else Outcome.GOOD

    assert ddmin(NAMES, test) == CAUSE
    return len(tested)


def test_two_of_twelve_differences_are_found_by_a_bisection_that_is_killed_three_times(twelve):
    """It takes exactly the runs that delta debugging needs and those of both ends; no finished run is repeated."""
    for line in ("run 2 ", "run 7 ", "run 12 "):
        running = twelve.start()
        running.says(f"\n{line}", "err")
        running.signal(signal.SIGKILL)
        assert running.end().code == -signal.SIGKILL
    done = twelve.bisect(code=0)
    assert re.match(r"model\.network\.params\.gain 1 → 2 and bounds\.py .* → .* together: best val_loss", done.out)
    answer = result(done.folder)
    assert [each["name"] for each in answer["cause"]] == CAUSE
    assert answer["without"] < answer["limit"] < answer["value"]
    assert answer["unresolved"] == 0
    assert answer["runs"] == 6 + needed_runs() + 1 < most_tests(12)  # both ends with three seeds; BAD without the cause
    children = twelve.children(done.folder)
    numbers = [child.data.tags["deeplightning.trial"] for child in children]
    assert len(numbers) == len(set(numbers)) == answer["runs"]
    assert {child.info.status for child in children} == {"FINISHED"}
    assert answer["started"] < answer["runs"]
    again = twelve.bisect()
    assert (again.code, again.out) == (0, done.out)
    assert result(done.folder)["started"] == 0


def test_a_difference_that_needs_another_is_found_with_it(found):
    """A mixture that cannot be built, here with a param that only the new code accepts, is reported as unresolved."""
    assert re.match(r"model\.network\.params\.off none → 20 and own\.py .* → .* together: best val_loss ", found.out)
    assert "mixture could not be run, so a smaller set is not excluded" in found.out
    assert "model.network.params.off: unresolved: " in found.err
    assert "own.net has no param `off`" in found.err
    answer = result(found.folder)
    assert [each["name"] for each in answer["cause"]] == ["model.network.params.off", "own.py"]
    assert answer["unresolved"] > 0


def test_each_run_is_in_the_table_and_below_one_parent(few, found):
    """Each run is a row of the table, with its differences and outcome, and a child of one FINISHED parent."""
    rows = csv_rows(found.folder / "bisect.csv")
    assert [(row["differences"], row["outcome"]) for row in [*rows[:4], rows[-1]]] == [
        *(("GOOD", "good"), ("BAD", "bad"), ("GOOD with seed 8", "good"), ("BAD with seed 8", "bad")),
        ("BAD without model.network.params.off, own.py", "good"),
    ]
    finished = [row for row in rows if row["outcome"] != "unresolved"]
    children = few.children(found.folder)
    assert {RunFolder(row["folder"]).path.parent.name for row in finished} == {child.info.run_id for child in children}
    client = MlflowClient(f"sqlite:///{few.store / 'mlflow.db'}")
    assert client.get_run(found.folder.parent.name).info.status == "FINISHED"


def test_a_repeated_bisection_runs_nothing_again(few, found):
    """A bisection with another metric or bound uses the same runs, and finds the same cause."""
    runs = len(list(few.store.glob("0/*")))
    again = few.bisect("--seeds", "2", "--metric", "val_loss", "--by", "0.2", code=0)
    assert again.folder == found.folder
    assert [each["name"] for each in result(again.folder)["cause"]] == ["model.network.params.off", "own.py"]
    assert result(again.folder)["started"] == 0
    assert again.err.count("(run before)") >= result(again.folder)["runs"]
    assert len(list(few.store.glob("0/*"))) == runs


def test_a_secret_is_nowhere_in_the_store(few, found):
    """Neither the config, which refers to an environment variable, nor the code, which contains it, reveals it."""
    files = [path for path in few.store.rglob("*") if path.is_file()]
    assert len(files) > 50
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []


def test_a_bisection_that_another_process_runs_is_rejected(few, found):
    """The exit code is 3, and the error names the folder."""
    home = next((few.store / "bisections" / "Default").iterdir())
    lock = RunFolder(home).lock()
    try:
        refused = few.bisect("--seeds", "2")
    finally:
        lock.release()
    assert refused.code == 3
    assert f"another process works on this bisection, in {home}" in refused.err


def test_a_difference_that_is_noise_is_called_so(few):
    """For two runs that differ in the seed, the check of both ends fails with exit code 5, and nothing is bisected."""
    other = few.train(few.top / "a place", ["seed=11", "data.batch_size=15", "model.network.params.off=0"])
    runs = sorted((few.good, other), key=lambda run: json.loads((run / "best.json").read_text())["value"])
    done = few.bisect(good=runs[0], bad=runs[1], code=5)
    assert "the difference in best val_loss is noise, as far as" in done.err
    assert "Nothing was bisected" in done.err
    assert "Traceback" not in done.err
    client = MlflowClient(f"sqlite:///{few.store / 'mlflow.db'}")
    parents = client.search_runs(["0"], "attributes.status = 'FAILED' and tags.failure LIKE '%is noise%'")
    assert len(parents) == 1


def test_no_more_runs_are_started_than_allowed(few, found):
    """A command stops after `--max-runs` runs, and the next one reuses them."""
    names = ["--seeds", "1", "train.num_epochs=1"]
    first = few.bisect(*names, "--max-runs", "2", code=0)
    assert "best val_loss: the cause is among 3 differences: " in first.out
    assert "stopped after 2 runs (--max-runs): not finished; the same command continues" in first.err
    second = few.bisect(*names, "--max-runs", "1")
    assert second.err.count("(run before)") == 2
    assert result(second.folder)["started"] == 1


def test_a_failure_of_the_machine_ends_the_bisection_once_and_then_counts(few, found):
    """The first failure, such as a missing GPU or a full disk, ends with exit code 3 and the log; if it happens again,
    it counts as a failure of the run."""
    words = ["--seeds", "1", "engine.gpus=1"]
    first = few.bisect(*words, code=3)
    assert re.search(r"run \d+ of the bisection ended: .*engine\.gpus.*\.log\)\. The same command continues", first.err)
    second = few.bisect(*words, code=5)
    assert re.search(r"GOOD cannot be run again here: .*engine\.gpus", second.err)
    assert "run before" in few.bisect(*words, code=5).err


def test_wrong_arguments_are_reported_before_any_run(few, found, command):
    """A missing metric, the same run twice, a missing run, a useless environment and a wrong number are covered."""
    runs = len(list(few.store.glob("0/*")))
    store = {"cwd": few.top, "OWN_TOKEN": PASSWORD}
    for code, words, text in (
        (2, (few.good, few.bad, "--metric", "val_ac"), "has no such metric; both runs have "),
        (2, (few.good, few.good), "so neither is worse"),
        (4, (few.good, few.top / "none"), "none"),
        (3, (few.good, few.bad, "--environment", sys.executable), "both runs were made with the same packages"),
        (2, (few.good, few.bad, "--by", "0"), "--by"),
    ):
        refused = command("bisect", *words, **store)
        assert (refused.code, "Traceback" in refused.err) == (code, False), refused
        assert text in refused.err
    assert len(list(few.store.glob("0/*"))) == runs


def test_code_from_elsewhere_is_not_executed(few, command, tmp_path):
    """A copied run with other code ends with exit code 4 and the names of its files, unless it is trusted."""
    copied = RunFolder(tmp_path / "copied")
    shutil.copytree(few.bad, copied.path)
    kept = read_code(copied.code)
    kept.files = {name: content + b"\n" for name, content in kept.files.items()}
    copied.code.write_bytes(kept.pack())
    refused = few.bisect(bad=copied.path, code=4)
    assert "would be executed: bounds.py, own.py" in refused.err
    few.bisect("--trust", "--metric", "none", bad=copied.path, code=2)


def test_runs_that_a_server_keeps_are_bisected_and_tracked_there(few, found, command, tmp_path):
    """Runs are found by id from any directory; the mixtures are children of one run on the server, none is repeated."""
    address = f"http://127.0.0.1:{free_port()}"
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", f"{tmp_path}/kept"]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--port", address.rpartition(":")[2], "--workers", "1", *store],
        env=environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        answer_of(server, f"{address}/health")
        place = few.top / "a place"
        tracked = f"logger.params.tracking_uri={address}"
        files = [*place.glob("*.py")]
        contents = [file.read_text() for file in files]
        (place / "own.py").write_text(OWN)
        few.train(place, [tracked], PYTHONHASHSEED="0")
        for file, content in zip(files, contents, strict=True):
            file.write_text(content)
        few.train(place, [tracked, "model.network.params.off=20"], PYTHONHASHSEED="0")
        client = MlflowClient(address)
        bad, good = (run.info.run_id for run in client.search_runs(["0"]))
        variables = {"OWN_TOKEN": PASSWORD, "MLFLOW_TRACKING_URI": address, "cwd": tmp_path}
        for started in (True, False):
            done = command("bisect", good, bad, "--seeds", "1", main="test_bisect:forking", **variables, code=0)
            assert done.out.startswith("model.network.params.off none → 20 and own.py ")
            answer = result(done.folder)
            assert (answer["started"] > 0) == started
        children = client.search_runs(["0"], "tags.`deeplightning.trial` LIKE '%'")
        assert len(children) == 3  # the ends and own.py alone; the new param alone cannot be built
        (parent,) = {child.data.tags["mlflow.parentRunId"] for child in children}
        assert {file.path for file in client.list_artifacts(parent)} >= {"bisect.csv", "bisect.json"}
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        shutil.rmtree(place / "runs", ignore_errors=True)


def test_a_run_saves_a_checkpoint_and_ends_when_its_bisection_ends(few, found):
    """This holds for SIGINT to the bisection alone, with exit code 130, and for SIGKILL. The next command resumes the
    run in its folder."""
    words = ["--seeds", "1", "train.num_epochs=100000", "train.val_every_n_epoch=50"]
    command = [sys.executable, "-m", "deeplightning", "bisect", few.good, few.bad, *words]
    name = f"bisect-{few.good.parent.name[:8]}-{few.bad.parent.name[:8]}"
    home = few.store / "bisections" / "Default" / name
    before = {*few.store.glob("0/*")}
    steps = [0]
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        log = few.top / f"{number}.log"
        with log.open("wb") as out:
            env = environment(OWN_TOKEN=PASSWORD)
            process = subprocess.Popen(command, cwd=few.top, stderr=out, stdout=out, env=env)
        try:
            trial = wait_for(lambda: next((t for t in trials_of(home) if t.record["state"] == UNDERWAY), None), log)
            text = trial.file.with_suffix(".log")
            wait_for(functools.partial(says, text, "\nepoch "), text)
            if number == signal.SIGKILL:
                assert says(text, "resumes")
            process.send_signal(number)
            assert process.wait(60) == code, log.read_text()
        finally:
            process.kill()
        (folder,) = {*few.store.glob("0/*")} - before
        run = RunFolder(folder / "artifacts")
        lock = wait_for(run.lock, "the lock")
        lock.release()
        steps.append(read_checkpoint(run.last)["global_step"])
        text.rename(text.with_suffix(f".{number}"))
    assert "interrupted by SIGINT after 0 runs; the same command continues" in (few.top / "2.log").read_text()
    assert steps == sorted(set(steps))


def says(path, text):
    return path.exists() and text in path.read_text()


def trials_of(home):
    return [Trial(file) for file in (home / "trials").glob("*.json")]


@pytest.fixture
def with_packages(tmp_path):
    """`with_packages(name, packages)` makes a run that has only recorded packages."""

    def make(name, packages):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.environment.write_text(json.dumps({"packages": packages}))
        return PastRun(folder, None, None)

    return make


@pytest.fixture
def python(tmp_path):
    """`python(package=version, …)` makes a fake interpreter with these packages."""

    def make(**versions):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_an_environment_is_that_of_the_run_whose_packages_it_has(with_packages, python):
    """Either run may have the packages of the given environment; the other one gets this interpreter."""
    here = with_packages("here", {"numpy": numpy.__version__, "deeplightning": "1"})
    there = with_packages("there", {"numpy": "0.1", "deeplightning": "2"})
    other = python(numpy="0.1")
    assert interpreters(here, there, other) == (sys.executable, other)
    assert interpreters(there, here, other) == (other, sys.executable)
    assert interpreters(here, there, None) == (sys.executable, sys.executable)


def test_an_environment_that_is_neither_run_s_is_refused(with_packages, python, tmp_path):
    """The error has all versions; an unnecessary environment and a program that is no interpreter are refused too."""
    here = with_packages("here", {"numpy": numpy.__version__})
    there = with_packages("there", {"numpy": "0.1"})
    with pytest.raises(SetupError, match=r"BAD: numpy 0\.1;.*: numpy 0\.2"):
        interpreters(here, there, python(numpy="0.2"))
    with pytest.raises(SetupError, match="the same packages; leave it out"):
        interpreters(here, here, python())
    for wrong in (str(tmp_path / "none"), "/bin/true"):
        with pytest.raises(SetupError, match="this Python interpreter cannot be used"):
            interpreters(here, there, wrong)


def test_a_relative_interpreter_is_that_of_this_directory(with_packages, python, tmp_path, monkeypatch):
    """A relative path becomes absolute, because the runs may have another working directory."""
    here, there = with_packages("here", {"numpy": numpy.__version__}), with_packages("there", {"numpy": "0.1"})
    other = python(numpy="0.1")
    monkeypatch.chdir(tmp_path)
    assert interpreters(here, there, "./python") == (sys.executable, other)
