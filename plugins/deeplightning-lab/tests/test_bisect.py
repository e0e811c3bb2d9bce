"""`bisect` finds which differences make a run worse, by real runs of mixtures."""

import csv
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import forks
import numpy
import pytest
from commands import LIMIT_SECONDS, POLL_SECONDS, answer_of, environment, free_port
from deeplightning_lab.ddmin import Outcome, ddmin, most_tests
from deeplightning_lab.interpreters import interpreters
from deeplightning_lab.trials import UNDERWAY, Trial
from mlflow.tracking import MlflowClient

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
        self.gain = gain if gain <= MOST else 0  # beyond the bound nothing gets through

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
    """A run in a process forked from this one, as `subprocess.Popen` is for a fresh one; it ends with this one."""

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
    """`deeplightning` whose bisections fork their runs; a fresh process spends seconds on imports."""
    from deeplightning_lab import trials

    from deeplightning.cli import main

    trials.start_process = Forked
    main()


class Ends:
    """A good run and a bad one, in a store of their own, and what bisects them."""

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
        done = self.command("train", "c.yaml", *overrides, cwd=place, OWN_TOKEN=PASSWORD, **variables)
        assert done.code == 0, done
        return done.folder

    def start(self, *words, good=None, bad=None):
        runs = good or self.good, bad or self.bad
        main = "test_bisect:forking"
        return self.command.start("bisect", *runs, *words, cwd=self.top, main=main, OWN_TOKEN=PASSWORD)

    def bisect(self, *words, **runs):
        return self.start(*words, **runs).end()

    def children(self, parent):
        """The runs below one, with their tags; the newest first."""
        client = MlflowClient(f"sqlite:///{self.store / 'mlflow.db'}")
        return client.search_runs(["0"], f"tags.`mlflow.parentRunId` = '{parent.parent.name}'")


@pytest.fixture(scope="module")
def twelve(command, tmp_path_factory):
    """Twelve differences, of which a key of the config and a file of code are bad together."""
    files = {"bounds.py": "MOST = 1\n", "own.py": f"{OWN}\n# the same\n"}
    return Ends(command, tmp_path_factory.mktemp("twelve"), BAD, files, PYTHONHASHSEED="1")


@pytest.fixture(scope="module")
def few(command, tmp_path_factory):
    """Three differences: a new param that is bad, the file of code that takes it, and another key."""
    files = {"own.py": OWN.replace("gain, slope)", "gain, slope, off=0)").replace("Gain(gain)", "Gain(gain + off)")}
    bad = {"model.network.params.off": 20, "data.batch_size": 15}
    return Ends(command, tmp_path_factory.mktemp("few"), bad, files, PYTHONHASHSEED="0")


@pytest.fixture(scope="module")
def found(few):
    """How the bisection of the few differences ended."""
    done = few.bisect("--seeds", "2")
    assert done.code == 0, done
    return done


def result(folder):
    return json.loads((folder / "bisect.json").read_text())


def needed_runs():
    """The number of sets that delta debugging tests for the twelve differences."""
    asked = []

    def test(chosen):
        asked.append(chosen)
        return Outcome.BAD if set(CAUSE) <= set(chosen) else Outcome.GOOD

    assert ddmin(NAMES, test) == CAUSE
    return len(asked)


@pytest.mark.slow
def test_two_of_twelve_differences_are_found_by_a_bisection_that_is_killed_three_times(twelve):
    """In exactly the runs that delta debugging needs and those of both ends; none that has finished runs again."""
    for line in ("run 2 ", "run 7 ", "run 12 "):
        running = twelve.start()
        running.says(f"\n{line}", "err")
        running.signal(signal.SIGKILL)
        assert running.end().code == -signal.SIGKILL
    done = twelve.bisect()
    assert done.code == 0, done
    assert re.match(r"model\.network\.params\.gain 1 → 2 and bounds\.py .* → .* together: best val_loss", done.out), (
        done.out
    )
    answer = result(done.folder)
    assert [each["name"] for each in answer["cause"]] == CAUSE
    assert answer["limit"] < answer["value"]
    assert answer["without"] < answer["limit"]
    assert answer["unresolved"] == 0
    ends = 6  # each end with three seeds
    without = 1
    assert answer["runs"] == ends + needed_runs() + without
    assert answer["runs"] < most_tests(12)
    children = twelve.children(done.folder)
    numbers = [child.data.tags["deeplightning.trial"] for child in children]
    assert len(numbers) == len(set(numbers)) == answer["runs"]
    assert {child.info.status for child in children} == {"FINISHED"}
    assert answer["started"] < answer["runs"]
    again = twelve.bisect()
    assert (again.code, again.out) == (0, done.out)
    assert result(done.folder)["started"] == 0


@pytest.mark.slow
def test_a_difference_that_needs_another_is_found_with_it(found):
    """A param that only the new code takes: a mixture that cannot be built is unresolved, which the answer mentions."""
    assert re.match(r"model\.network\.params\.off none → 20 and own\.py .* → .* together: best val_loss ", found.out)
    assert "mixture could not be run, so a smaller set is not excluded" in found.out
    assert "model.network.params.off: unresolved: " in found.err
    assert "own.net has no param `off`" in found.err
    answer = result(found.folder)
    assert [each["name"] for each in answer["cause"]] == ["model.network.params.off", "own.py"]
    assert answer["unresolved"] > 0


def test_each_run_is_in_the_table_and_below_one_parent(few, found):
    """With what was mixed and whether it was good, bad or unresolved; the parent has ended."""
    with (found.folder / "bisect.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["differences"] for row in rows[:4]] == ["GOOD", "BAD", "GOOD with seed 8", "BAD with seed 8"]
    assert [row["outcome"] for row in rows[:4]] == ["good", "bad", "good", "bad"]
    assert rows[-1]["differences"] == "BAD without model.network.params.off, own.py"
    assert rows[-1]["outcome"] == "good"
    finished = [row for row in rows if row["outcome"] != "unresolved"]
    children = few.children(found.folder)
    assert {RunFolder(row["folder"]).path.parent.name for row in finished} == {child.info.run_id for child in children}
    client = MlflowClient(f"sqlite:///{few.store / 'mlflow.db'}")
    assert client.get_run(found.folder.parent.name).info.status == "FINISHED"


def test_a_repeated_bisection_runs_nothing_again(few, found):
    """Another metric and another bound use the same runs; the end and its words are the same."""
    runs = len(list(few.store.glob("0/*")))
    again = few.bisect("--seeds", "2", "--metric", "val_loss", "--by", "0.2")
    assert again.code == 0, again
    assert again.folder == found.folder
    assert [each["name"] for each in result(again.folder)["cause"]] == ["model.network.params.off", "own.py"]
    assert result(again.folder)["started"] == 0
    assert again.err.count("(run before)") >= result(again.folder)["runs"]
    assert len(list(few.store.glob("0/*"))) == runs


def test_a_secret_is_nowhere_in_the_store(few, found):
    """Neither what came from the environment by the config nor what stands in the code."""
    files = [path for path in few.store.rglob("*") if path.is_file()]
    assert len(files) > 50
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []


def test_a_bisection_at_which_another_process_is_waits_for_nobody(few, found):
    """Exit code 3, with the folder."""
    home = next((few.store / "bisections" / "Default").iterdir())
    lock = RunFolder(home).lock()
    try:
        refused = few.bisect("--seeds", "2")
    finally:
        lock.release()
    assert refused.code == 3
    assert f"another process works on this bisection, in {home}" in refused.err


@pytest.mark.slow
def test_a_difference_that_is_noise_is_called_so(few):
    """Two runs that differ by their seed: after the check of both ends, with exit code 5, and nothing is bisected."""
    other = few.train(few.top / "a place", ["seed=11", "data.batch_size=15", "model.network.params.off=0"])
    runs = sorted((few.good, other), key=lambda run: json.loads((run / "best.json").read_text())["value"])
    done = few.bisect(good=runs[0], bad=runs[1])
    assert done.code == 5, done
    assert "the difference in best val_loss is noise, as far as" in done.err
    assert "Nothing was bisected" in done.err
    assert "Traceback" not in done.err
    client = MlflowClient(f"sqlite:///{few.store / 'mlflow.db'}")
    parents = client.search_runs(["0"], "attributes.status = 'FAILED' and tags.failure LIKE '%is noise%'")
    assert len(parents) == 1


def test_no_more_runs_are_started_than_allowed(few, found):
    """The next command starts with what is known then."""
    names = ["--seeds", "1", "train.num_epochs=1"]
    first = few.bisect(*names, "--max-runs", "2")
    assert first.code == 0, first
    assert "best val_loss: the cause is among 3 differences: " in first.out
    assert "stopped after 2 runs (--max-runs): not finished; the same command continues" in first.err
    second = few.bisect(*names, "--max-runs", "1")
    assert second.err.count("(run before)") == 2
    assert result(second.folder)["started"] == 1


def test_a_failure_of_the_machine_ends_the_bisection_once_and_then_counts(few, found):
    """Such as a GPU that is not there or a full disk: exit code 3 and the log at first, so that no answer rests on it;
    the same failure again is taken for that of the run."""
    words = ["--seeds", "1", "engine.gpus=1"]
    first = few.bisect(*words)
    assert first.code == 3, first
    assert re.search(r"run \d+ of the bisection ended: .*engine\.gpus.*\.log\)\. The same command continues", first.err)
    second = few.bisect(*words)
    assert second.code == 5, second
    assert re.search(r"GOOD cannot be run again here: .*engine\.gpus", second.err)
    third = few.bisect(*words)
    assert (third.code, "run before" in third.err) == (5, True), third


def test_bad_words_are_named_before_anything_runs(few, found, command):
    """A metric that is not there, the same run twice, a run that does not exist, a second environment for nothing."""
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
    """A copy of a run with other code: its files are named, and exit code 4 unless it is trusted."""
    copied = RunFolder(tmp_path / "copied")
    shutil.copytree(few.bad, copied.path)
    kept = read_code(copied.code)
    kept.files = {name: content + b"\n" for name, content in kept.files.items()}
    copied.code.write_bytes(kept.pack())
    refused = few.bisect(bad=copied.path)
    assert refused.code == 4, refused
    assert "would be executed: bounds.py, own.py" in refused.err
    trusted = few.bisect("--trust", "--metric", "none", bad=copied.path)
    assert trusted.code == 2


@pytest.mark.slow
def test_runs_that_a_server_keeps_are_bisected_and_tracked_there(few, found, command, tmp_path):
    """By their ids, from any directory; the mixtures are below one parent on the server, and none is repeated."""
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


@pytest.mark.slow
def test_a_run_saves_a_checkpoint_and_ends_when_its_bisection_ends(few, found):
    """On Ctrl-C, which a terminal sends to the bisection alone, with exit code 130; and after SIGKILL. The next command
    resumes it in its folder."""
    words = ["--seeds", "1", "train.num_epochs=100000", "train.val_every_n_epoch=50"]
    command = [sys.executable, "-m", "deeplightning", "bisect", few.good, few.bad, *words]
    name = f"bisect-{few.good.parent.name[:8]}-{few.bad.parent.name[:8]}"
    home = few.store / "bisections" / "Default" / name
    before = {*few.store.glob("0/*")}
    steps = [0]
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        log = few.top / f"{number}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=few.top, stderr=out, stdout=out, env=environment(OWN_TOKEN=PASSWORD)
            )
        try:
            trial = wait_for(lambda: next((t for t in trials_of(home) if t.record["state"] == UNDERWAY), None), log)
            text = trial.file.with_suffix(".log")
            wait_for(functools.partial(says, text, "\nepoch "), log)
            if number == signal.SIGKILL:
                assert says(text, "resumes")
            process.send_signal(number)
            assert process.wait(60) == code, log.read_text()
        finally:
            process.kill()
        (folder,) = {*few.store.glob("0/*")} - before
        run = RunFolder(folder / "artifacts")
        lock = wait_for(run.lock, text)
        lock.release()
        steps.append(read_checkpoint(run.last)["global_step"])
        text.rename(text.with_suffix(f".{number}"))
    assert "interrupted by SIGINT after 0 runs; the same command continues" in (few.top / "2.log").read_text()
    assert steps == sorted(set(steps))


def wait_for(happened, log):
    """Waits until something is there, and returns it."""
    end = time.monotonic() + LIMIT_SECONDS
    while not (found := happened()):
        assert time.monotonic() < end, log.read_text()
        time.sleep(POLL_SECONDS)
    return found


def says(path, text):
    return path.exists() and text in path.read_text()


def trials_of(home):
    return [Trial(file) for file in (home / "trials").glob("*.json")]


@pytest.fixture
def with_packages(tmp_path):
    """Makes a run that has recorded packages, and nothing else."""

    def make(name, packages):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.environment.write_text(json.dumps({"packages": packages}))
        return PastRun(folder, None, None)

    return make


@pytest.fixture
def python(tmp_path):
    """Another interpreter, by what it answers."""

    def make(**versions):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_an_environment_is_that_of_the_run_whose_packages_it_has(with_packages, python):
    """Of either run; this one is that of the other."""
    here = with_packages("here", {"numpy": numpy.__version__, "deeplightning": "1"})
    there = with_packages("there", {"numpy": "0.1", "deeplightning": "2"})
    other = python(numpy="0.1")
    assert interpreters(here, there, other) == (sys.executable, other)
    assert interpreters(there, here, other) == (other, sys.executable)
    assert interpreters(here, there, None) == (sys.executable, sys.executable)


def test_an_environment_that_is_neither_run_s_is_refused(with_packages, python, tmp_path):
    """With the versions of all four; so is one that differs from nothing, and a program that is no interpreter."""
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
    """The runs have another working directory."""
    here, there = with_packages("here", {"numpy": numpy.__version__}), with_packages("there", {"numpy": "0.1"})
    other = python(numpy="0.1")
    monkeypatch.chdir(tmp_path)
    assert interpreters(here, there, "./python") == (sys.executable, other)
