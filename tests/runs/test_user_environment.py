"""User code may import `lightning`, call MLflow's functions and change the working directory."""

import os
import re
import sys
import sysconfig

import pytest
import pytorch_lightning as pl
from commands import real
from mlflow.tracking import MlflowClient

import deeplightning
from deeplightning import own_code
from deeplightning.process import failure
from deeplightning.tracking.mlflow_store import Lazy
from deeplightning.tracking.user_calls import TrackedRun, UserCalls

CODE = """\
import os
import tempfile

import lightning.pytorch as pl
import mlflow
import torch
from torch.utils.data import DataLoader, Dataset

mlflow.pytorch.autolog(log_models=False, checkpoint=False)


class Samples(Dataset):
    def __init__(self, fails=False):
        self.fails = fails

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if self.fails and index == 17:
            raise ValueError("sample 17 is broken")
        return {"x": torch.full((4,), index / 24), "y": torch.tensor(index % 2)}


class Data(pl.LightningDataModule):
    def __init__(self, cfg, fails=False):
        super().__init__()
        self.fails = fails

    def train_dataloader(self):
        workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if self.fails else {}
        return DataLoader(Samples(self.fails), 8, **workers)


class Task(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
        os.chdir(tempfile.mkdtemp(dir=os.environ["ELSEWHERE"]))

    def on_fit_start(self):
        mlflow.log_param("author", "somebody")

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        mlflow.log_metric("own_metric", 7.0, step=self.current_epoch)
        with mlflow.start_run(nested=True, run_name=f"child {self.current_epoch}"):
            mlflow.log_metric("of_child", self.current_epoch)
        with open("note.txt", "w") as file:
            file.write("a note")
        mlflow.log_artifact("note.txt")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""
CONFIG = """\
seed: 1
data: {module: {type: mine.Data}, batch_size: 8}
model: {module: {type: mine.Task}, optimizer: null}
train: {num_epochs: 2, export: false, checkpoint: {monitor: null}}
logger: {pictures: null, params: {tracking_uri: here/store, experiment_name: first, system_metrics: false}}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project") / "their code"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE)
    (folder / "config.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def run(command, project, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def run(*overrides, code=0, start=command):
        outcome = start("train", "config.yaml", *overrides, cwd=project, code=code, ELSEWHERE=str(elsewhere))
        for path in [path for path in elsewhere.rglob("*") if path.is_file()]:
            assert path.name == "note.txt", outcome
            path.unlink()
        return outcome

    return run


@pytest.fixture(scope="module")
def done(run):
    return run()


@pytest.fixture(scope="module")
def client(project, done):
    return MlflowClient(f"sqlite:///{project / 'here' / 'store' / 'mlflow.db'}")


def test_a_run_folder_is_where_the_command_started(done, project):
    """The run's folder does not depend on a directory change by user code; `autolog` does not repeat printed lines."""
    assert done.folder.is_relative_to(project / "here" / "store")
    assert {path.name for path in project.iterdir()} - {"__pycache__"} == {"mine.py", "config.yaml", "here"}
    assert "INFO:deeplightning" not in done.out + done.err
    assert done.out.count("first loss") == 1
    assert re.search(r"^versions .* Lightning [\d.]+ \(and as `lightning`\), Python", done.out, re.MULTILINE)


def test_calls_of_mlflow_reach_the_run(done, client):
    """MLflow calls of the user and autolog write to the run; nested runs are its children, and all are FINISHED."""
    run = client.get_run(done.folder.parent.name)
    assert {"author": "somebody", "optimizer_name": "SGD"}.items() <= run.data.params.items()
    assert [point.value for point in client.get_metric_history(run.info.run_id, "own_metric")] == [7.0, 7.0]
    assert (done.folder / "note.txt").read_text() == "a note"
    assert run.info.status == "FINISHED"
    children = [each for each in client.search_runs([run.info.experiment_id]) if each.info.run_id != run.info.run_id]
    assert {each.data.tags["mlflow.parentRunId"] for each in children} == {run.info.run_id}
    assert {each.info.run_name: each.info.status for each in children} == {"child 0": "FINISHED", "child 1": "FINISHED"}


def test_a_run_is_resumed_under_the_new_name_of_its_experiment_unless_it_was_deleted(done, run, client):
    """`auto` resumes the run of a renamed experiment, with its name and further children, but no deleted run."""
    before = client.get_run(done.folder.parent.name).info
    client.rename_experiment(before.experiment_id, "second")
    more = ["train.num_epochs=3", "train.resume_ckpt=auto", "logger.params.experiment_name=second"]
    assert f"run        {before.run_id} continues" in run(*more).out
    assert client.get_run(before.run_id).info.run_name == before.run_name
    assert "child 2" in {each.info.run_name for each in client.search_runs([before.experiment_id])}
    client.delete_run(before.run_id)
    anew = run(*more)
    assert "resumes    nothing, a new run starts: no run of this experiment" in anew.out
    assert anew.folder != done.folder


@pytest.mark.slow
def test_an_exception_in_a_worker_of_a_loader_is_the_users(run, client):
    """An exception in a spawned worker, which imports `lightning` as the run does, ends the run with exit code 5; the
    last line has file, line and exception."""
    failed = run("data.module.params.fails=true", code=5, start=real)
    line = 1 + CODE.splitlines().index('            raise ValueError("sample 17 is broken")')
    assert failed.err.splitlines()[-1] == f"error: mine.py:{line}: ValueError: sample 17 is broken"
    assert client.get_run(failed.folder.parent.name).info.status == "FAILED"


def test_an_exception_is_attributed_to_the_caller_of_the_library(tmp_path, monkeypatch):
    """The exit code is 5 if user code called the library and 1 if our code did, unless the exception has its own. It is
    5 for arguments that Lightning refuses, and for libraries that only the user's config names."""

    def raised(function):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            function()
        return caught.value

    def fail():
        int("x")

    assert failure.exit_code_of(raised(fail)) == 5
    missing = raised(lambda: Lazy(object).add_image)  # as `self.logger.experiment.add_image` of code for TensorBoard
    assert (failure.exit_code_of(missing), "another `logger.type`" in str(missing)) == (5, True)
    assert failure.exit_code_of(raised(lambda: deeplightning.trian)) == 5
    assert not hasattr(Lazy(object), "add_image")
    assert str(raised(lambda: Lazy(lambda: missing.no_such).add_image)).endswith("no attribute 'no_such'")
    monkeypatch.setattr(failure, "OURS", (os.path.dirname(__file__),))  # noqa: PTH120
    monkeypatch.setattr(failure, "is_user_file", lambda file: False)
    assert failure.exit_code_of(raised(fail)) == 1
    assert failure.exit_code_of(raised(lambda: pl.Trainer(max_epochs=-2))) == 5  # a MisconfigurationException
    assert failure.exit_code_of(raised(lambda: pl.Trainer(precision="none"))) == 5  # a ValueError
    assert failure.exit_code_of(raised(lambda: pl.LightningModule().trainer)) == 5  # a RuntimeError
    assert failure.exit_code_of(raised(lambda: pl.Trainer(logger=False).fit(missing))) == 5  # a TypeError
    for file, code in (("chosen/__init__.py", 5), ("chosen.py", 5), ("torch/optim/sgd.py", 1), ("mlflow/client.py", 1)):
        found = {}
        exec(compile("def step(): int('x')", os.path.join(sysconfig.get_path("purelib"), file), "exec"), found)  # noqa: PTH118
        assert failure.exit_code_of(raised(found["step"])) == code, file
    assert failure.exit_code_of(failure.UserError("no")) == 1
    assert failure.exit_code_of(failure.RankError(failure.Cause(0, "no", 3))) == 3


def test_mlflow_that_is_imported_later_finds_the_run(tmp_path, monkeypatch):
    """Calls find the run even if user code imports MLflow later; the environment is restored at the end."""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = MlflowClient(uri)
    run = client.create_run(client.create_experiment("own")).info
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    mlflow = sys.modules["mlflow"]
    mlflow.set_tracking_uri(uri)  # another test of this process may have set one
    monkeypatch.delitem(sys.modules, "mlflow")
    calls = UserCalls()
    calls.begin(TrackedRun(uri, run.run_id, run.experiment_id))
    assert os.environ["MLFLOW_RUN_ID"] == run.run_id
    sys.modules["mlflow"] = mlflow
    assert own_code._import("mlflow") is mlflow
    assert mlflow.active_run().info.run_id == run.run_id
    calls.end("KILLED")
    assert mlflow.active_run() is None
    assert client.get_run(run.run_id).info.status == "KILLED"
    assert os.environ["MLFLOW_EXPERIMENT_NAME"] == "another"
    assert "MLFLOW_RUN_ID" not in os.environ


def test_another_rank_makes_no_store_while_it_waits_for_the_run(tmp_path, monkeypatch, caplog):
    """Another rank waits for the run without opening the store: MLflow creates an SQLite store when it looks up a run,
    and two processes that do so at once break it."""
    monkeypatch.setattr("deeplightning.tracking.user_calls.WAIT_SECONDS", 0.3)
    database = tmp_path / "mlflow.db"
    database.touch()
    sys.modules["mlflow"].set_tracking_uri(f"sqlite:///{database}")
    calls = UserCalls()
    try:
        calls.begin(TrackedRun(f"sqlite:///{database}", "a" * 32, "0"))
    finally:
        calls.end("FINISHED")
    assert database.stat().st_size == 0
    assert "was not in" in caplog.text
