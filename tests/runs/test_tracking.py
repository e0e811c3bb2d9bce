"""Tracking with real SQLite stores, a real MLflow server and real loggers of Lightning."""

import json
import logging
import math
import os
import pickle
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import answer_of, free_port
from matplotlib.figure import Figure
from mlflow.tracking import MlflowClient
from PIL import Image
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from served import wait_until
from tiny import git

from deeplightning.cli.listing import listing
from deeplightning.config.schema import Target
from deeplightning.config.target import build
from deeplightning.faults import CheckpointError, ConfigError, SetupError
from deeplightning.reproduce.past import past_run
from deeplightning.runfolder import RunFolder
from deeplightning.tracking import MLflowLogger, resolve_run
from deeplightning.tracking.build import end, open_runs, prepare, refusal, run_folder
from deeplightning.tracking.claims import Claim, artifacts_of, claims, find_run, metrics_of
from deeplightning.tracking.client import Client
from deeplightning.tracking.entities import Dataset, Run, flatten
from deeplightning.tracking.metrics_file import read_series
from deeplightning.tracking.mlflow_store import attach
from deeplightning.tracking.monitor import runs_page
from deeplightning.tracking.picture import to_pixels
from deeplightning.tracking.reader import open_reader
from deeplightning.tracking.resolve import _run_artifacts
from deeplightning.tracking.store import locate

OURS, LIGHTNINGS = "deeplightning.tracking.MLflowLogger", "pytorch_lightning.loggers.MLFlowLogger"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """No MLflow variables of the caller, and a working directory that must stay empty."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert not list((tmp_path / "cwd").iterdir())


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A directory that becomes a store at its first use; shared, since creating one takes two seconds."""
    return tmp_path_factory.mktemp("tracking") / "mlruns"


@pytest.fixture
def logger(store):
    logger = MLflowLogger(tracking_uri=store, system_metrics=False)
    yield logger
    logger.finalize("success")


def finished(store, **settings):
    """Return a logger whose run logged one point and finished."""
    logger = MLflowLogger(tracking_uri=store, system_metrics=False, **settings)
    logger.log_metrics({"x": 1}, 0)
    logger.finalize("success")
    return logger


def client_of(store):
    return MlflowClient(attach(locate(store)))


def run_of(logger):
    return logger.experiment.get_run(logger.run_id)


def status(logger):
    return run_of(logger).info.status


def history(logger, name):
    return [(point.step, point.value) for point in logger.experiment.get_metric_history(logger.run_id, name)]


def test_making_a_logger_does_nothing(tmp_path):
    """A logger creates no folder and no run before its first use; `save_dir`, finalizing and pickling are no use."""
    logger = MLflowLogger(tracking_uri=tmp_path / "mlruns")
    assert logger.save_dir == str(tmp_path / "mlruns")
    logger.finalize("failed", "before it began")
    assert pickle.loads(pickle.dumps(logger)).save_dir == str(tmp_path / "mlruns")
    assert not (tmp_path / "mlruns").exists()


def test_a_run_is_tracked_completely(store, logger):
    """A run keeps all parameters and points, and its artifacts are next to the database."""
    logger.log_hyperparams({"model": {"optimizer": {"params": {"lr": 0.1}}}, "stages": ["train", "test"], "none": None})
    for step in range(2500):
        logger.log_metrics({"train_loss": torch.tensor(1.0 / (step + 1)), "lr": 0.1}, step)
    logger.log_metrics({"val_acc": 0.5})
    logger.finalize("success")
    run = run_of(logger)
    assert run.info.status == "FINISHED"
    assert run.data.params["model/optimizer/params/lr"] == "0.1"
    assert (run.data.params["stages/1"], run.data.params["none"]) == ("test", "None")
    expected = [(step, pytest.approx(1.0 / (step + 1), rel=1e-6)) for step in range(2500)]
    assert sorted(history(logger, "train_loss")) == expected
    assert history(logger, "val_acc") == [(2499, 0.5)]  # without a step: the latest one
    assert logger.artifact_folder == store / logger.name / logger.run_id / "artifacts"
    assert (store / "mlflow.db").is_file()


def test_a_store_is_made_where_another_process_was_killed_while_it_made_it(tmp_path):
    """A store is created although a killed process has left part of a database under a temporary name."""
    store = tmp_path / "half"
    store.mkdir()
    (store / ".mlflow.db.new").write_bytes(b"SQLite format 3\0 torn")
    (store / ".mlflow.db.new-journal").write_bytes(b"\xd9\xd5\x05\xf9 torn")
    (store / "mlflow.db").touch()
    assert history(finished(store), "x") == [(0, 1)]
    assert not list(store.glob(".mlflow.db.new*"))


def test_a_transaction_in_which_a_process_was_killed_is_undone(tmp_path):
    """Any process that opens the store rolls back the transaction, even one that only reads."""
    store = tmp_path / "killed"
    logger = finished(store)
    kill = (
        "import os, sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('PRAGMA cache_size = 1')\n"  # writes pages to the file before the transaction ends
        "connection.execute('BEGIN')\n"
        "connection.execute('DELETE FROM metrics')\n"
        "connection.execute('UPDATE tags SET value = hex(randomblob(2000))')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", kill, store / "mlflow.db"])
    assert killed.returncode == -signal.SIGKILL
    address = (store / "mlflow.db").as_uri() + "?mode=ro"
    with (
        closing(sqlite3.connect(address, uri=True)) as connection,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        connection.execute("SELECT 1 FROM metrics").fetchall()
    assert open_reader(locate(store)).run(logger.run_id).name == logger.run_name


def test_the_first_run_of_a_store_does_not_wait_for_the_store(tmp_path):
    """A run starts before MLflow's 67 migrations, which take up to two seconds, and other commands list it at once."""
    store = tmp_path / "new"
    logger = MLflowLogger(tracking_uri=store, system_metrics=False)
    assert logger.artifact_folder == store / "0" / logger.run_id / "artifacts"
    assert (store / "mlflow.db").stat().st_size == 0
    assert [(row["id"], row["status"]) for row in listing(str(store))] == [(logger.run_id, "RUNNING")]
    logger.log_metrics({"x": 1}, 0)
    logger.finalize("success")
    client = client_of(store)
    run = client.get_run(logger.run_id)
    assert (run.info.status, run.info.artifact_uri) == ("FINISHED", logger.artifact_folder.as_uri())
    default = client.get_experiment_by_name("Default")
    assert (default.experiment_id, default.artifact_location) == ("0", f"{store.as_uri()}/0")


def test_a_point_is_durable_in_the_file_before_the_store_has_it(logger, monkeypatch):
    """A point is synced to the file before it is sent: a run that resumes after a power loss would log it twice."""
    durable, fsync, log_batch, early = 0, os.fsync, Client.log_batch, []

    def synced(descriptor):
        nonlocal durable
        fsync(descriptor)
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "metrics.jsonl":
            durable = os.fstat(descriptor).st_size

    def logged(client, run_id, batch):
        lines = (logger.artifact_folder / "metrics.jsonl").read_bytes()[:durable].decode()
        early.extend(point for point in batch.points if f'"{point.name}":' not in lines)
        log_batch(client, run_id, batch)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Client, "log_batch", logged)
    for step in range(20):
        logger.log_metrics({f"x{step}": 1}, step)
        time.sleep(0.1)
    logger.finalize("success")
    assert not early
    assert history(logger, "x19") == [(19, 1)]


def test_warnings_of_mlflow_in_a_thread_are_not_shown(logger):
    """Warnings of libraries are hidden without a temporary filter, which another thread would reset."""
    logger.log_metrics({"x": 1}, 0)
    for module in ("mlflow", "sqlalchemy.orm.session", "urllib3.contrib.socks", "requests"):
        warnings.warn_explicit("of a library", UserWarning, "there.py", 1, module)
    with pytest.raises(UserWarning, match="of own code"):
        warnings.warn_explicit("of own code", UserWarning, "here.py", 1, "requests_of_mine")
    logger.finalize("success")


def test_nan_and_infinities_are_tracked(store, logger, caplog):
    """NaN and infinities are tracked; text is skipped with a warning; invalid names are replaced. MLflow stores an
    infinity as the largest float; our client and the file keep it."""
    large = {"up": math.inf, "down": -math.inf, "most": 1e308}
    logger.log_metrics({"loss": math.nan, **large, "word": "high", "acc@1": 0.5, "/a//b/": 1}, 3)
    logger.finalize("success")
    metrics = run_of(logger).data.metrics
    assert math.isnan(metrics.pop("loss"))
    stored = {"up": sys.float_info.max, "down": -sys.float_info.max, "most": 1e308}
    assert metrics == {**stored, "acc_1": 0.5, "_/a/_/b/_": 1}
    assert "word is not tracked: 'high' is not a number." in caplog.text
    series = read_series(logger.artifact_folder / "metrics.jsonl")
    points = {point.name: (point.step, point.value) for point in Client(locate(store)).history(logger.run_id)}
    for name, value in large.items():
        assert series[name] == [points[name]] == [(3, value)]


def test_the_status_is_honest(logger):
    """A run is FINISHED after a stage, RUNNING during the next, and finally FAILED or KILLED with the reason."""
    logger.log_metrics({"train_loss": 1.0}, 0)
    assert status(logger) == "RUNNING"
    logger.finalize("success")
    assert status(logger) == "FINISHED"
    logger.log_metrics({"test_acc": 1.0}, 1)
    logger.log_tags({"stage": "test", "long": "x" * 9000})
    wait_until(lambda: status(logger) == "RUNNING")
    logger.finalize("failed", "train_loss is not finite at step 12")
    run = run_of(logger)
    assert (run.info.status, run.data.tags["failure"]) == ("FAILED", "train_loss is not finite at step 12")
    assert (run.data.tags["stage"], len(run.data.tags["long"])) == ("test", 5000)
    logger.finalize("killed", "SIGTERM")
    assert status(logger) == "KILLED"
    assert not [thread for thread in threading.enumerate() if thread.name == "tracking"]


def test_a_run_is_continued(store, logger, caplog):
    """`run_id` continues a run: points are appended, and changed parameters keep their first values with a warning."""
    logger.log_hyperparams({"lr": 0.1, "epochs": 1})
    logger.log_metrics({"train_loss": 1.0}, 0)
    logger.finalize("killed")
    again = MLflowLogger(tracking_uri=store, run_id=logger.run_id, system_metrics=False)
    again.log_hyperparams({"lr": 0.1, "epochs": 2, "new": True})
    again.log_metrics({"train_loss": 0.5}, 1)
    again.finalize("success")
    assert again.artifact_folder == logger.artifact_folder
    assert history(again, "train_loss") == [(0, 1.0), (1, 0.5)]
    assert run_of(again).data.params == {"lr": "0.1", "epochs": "1", "new": "True"}
    assert "keeps the first values of 1 parameter of the continued run: epochs." in caplog.text


def test_all_pages_of_a_search_are_read(tmp_path, monkeypatch):
    """A search returns the runs of all pages: MLflow returns at most 1,000 runs at once."""
    ids = {finished(tmp_path, tags={"search": "s"}).run_id for _ in range(3)}
    client = Client(locate(tmp_path))
    monkeypatch.setattr(client._client, "search_runs", partial(client._client.search_runs, max_results=1))
    assert {run.id for run in client.runs_with_tag("Default", "search", "s")} == ids
    assert len(client.listing()) == 3
    assert client.runs_with_tag("none", "search", "s") == []


def test_a_run_resumes_from_an_earlier_point_with_each_point_once(store, logger):
    """A resumed run skips the steps that the store has, whatever their values, and sends the points that it lacks."""
    for step in range(3):
        logger.log_metrics({"train_loss": step, "lr": 0.1}, step)
    logger.finalize("killed", "SIGKILL")
    again = MLflowLogger(tracking_uri=store, system_metrics=False)
    again.resume_run(logger.run_id, [("train_loss", 1.0, 7, 1), ("val_loss", 0.5, 7, 2), ("val_loss", 0.25, 8, 3)])
    for step in range(2, 5):
        again.log_metrics({"train_loss": step, "lr": 0.2}, step)
    again.finalize("success")
    assert (again.run_id, again.experiment_id) == (logger.run_id, logger.name)
    assert history(again, "train_loss") == [(step, step) for step in range(5)]
    assert history(again, "lr") == [(0, 0.1), (1, 0.1), (2, 0.1), (3, 0.2), (4, 0.2)]
    assert history(again, "val_loss") == [(2, 0.5), (3, 0.25)]
    run = run_of(again)
    assert (run.info.status, "failure" in run.data.tags) == ("FINISHED", False)


def test_what_repeats_the_last_point_of_a_metric_is_left_out(logger):
    """A repeated step and value, also NaN, is one point; another value at the same step is another point."""
    for value in (1.0, 1.0, 2.0, math.nan, math.nan):
        logger.log_metrics({"x": value}, 3)
    logger.log_metrics({"x": 2.0}, 4)
    logger.finalize("success")
    values = sorted((step, str(value)) for step, value in history(logger, "x"))
    assert values == [(3, "1.0"), (3, "2.0"), (3, "nan"), (4, "2.0")]


@pytest.mark.parametrize(
    ("type_name", "params", "words"),
    [
        (OURS, {}, None),
        (LIGHTNINGS, {}, "MLFlowLogger cannot continue a run"),
        (OURS, {"run_id": "abc"}, "the run abc is requested instead"),
        (OURS, {"experiment_name": "Other"}, "belongs to the experiment 'Default'"),
        (OURS, {"tracking_uri": "nowhere"}, "does not have its run"),
    ],
)
def test_why_a_run_cannot_be_resumed_is_said(type_name, params, words, store, logger, tmp_path):
    """`refusal` returns why a run cannot be resumed, such as another experiment or store; None if it can."""
    params = {"tracking_uri": str(store)} | params
    found = refusal(type_name, params, logger.run_id, logger.artifact_folder)
    assert (found is None) if words is None else (words in found)
    if words is None:
        assert "is not in the folder of its run" in refusal(OURS, params, logger.run_id, tmp_path)
        logger.finalize("success")
        logger.experiment.delete_run(logger.run_id)
        assert "was deleted" in refusal(OURS, params, logger.run_id, logger.artifact_folder)


def test_a_run_names_the_commit_it_was_started_at(store, tmp_path, monkeypatch):
    """MLflow's tags have commit and branch of the working directory's repository, but not the URL of its remote."""
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    git(Path(), "init", "-q", "-b", "trunk")
    git(Path(), "commit", "-q", "--allow-empty", "-m", "first")
    git(Path(), "remote", "add", "origin", "https://me:secret@host/x.git")
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    logger = MLflowLogger(tracking_uri=store, tags={"note": "mine"}, run_name="first", system_metrics=False)
    tags = run_of(logger).data.tags
    logger.finalize("success")
    expected = {"mlflow.source.git.commit": head, "mlflow.source.git.branch": "trunk"}
    assert {name: value for name, value in tags.items() if "git" in name} == expected
    assert (tags["note"], tags["mlflow.runName"]) == ("mine", "first")


def test_a_missing_run_is_named(store):
    """Continuing a missing run ends with exit code 3; the error names run and store."""
    with pytest.raises(SetupError, match=r"The run 'abc' is not in the tracking store .*mlruns") as caught:
        MLflowLogger(tracking_uri=store, run_id="abc").log_metrics({"x": 1}, 0)
    assert caught.value.exit_code == 3


def test_mlflow_run_is_joined(store, logger, monkeypatch):
    """Under `mlflow run` our logger and Lightning's write to the run that MLflow has opened, in its store."""
    run_id = logger.run_id
    logger.finalize("success")
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
    joined = MLflowLogger(tracking_uri="elsewhere", system_metrics=False)
    assert joined.run_id == run_id
    assert status(joined) == "RUNNING"
    joined.finalize("success")
    params = prepare(LIGHTNINGS, {"tracking_uri": "elsewhere"})
    assert params == {"tracking_uri": f"sqlite:///{store}/mlflow.db", "run_id": run_id}


def test_only_rank_0_tracks(tmp_path, monkeypatch):
    """On other ranks every method does nothing."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = MLflowLogger(tracking_uri=tmp_path / "mlruns")
    logger.log_hyperparams({"a": 1})
    logger.log_metrics({"a": 1}, 0)
    logger.log_picture("p", np.zeros((2, 2), np.uint8))
    logger.log("a", {"b": 1})
    logger.finalize("success")
    assert (logger.run_id, logger.name, logger.artifact_folder) == (None, None, None)
    assert not (tmp_path / "mlruns").exists()


def end_without_finalize():
    """Track a run, and end by an exception or after a finished stage."""
    store, how = sys.argv[1:]
    logger = MLflowLogger(tracking_uri=store, system_metrics=False)
    logger.log_metrics({"train_loss": 1.0}, 0)
    if how == "quiet":
        logger.finalize("success")
        logger.log_metrics({"test_loss": 1.0}, 0)
    print(logger.run_id)
    if how == "raise":
        raise RuntimeError("no memory left")


def test_a_process_that_dies_leaves_no_running_run(store, logger, command, tmp_path):
    """An uncaught exception sets a run to FAILED with its message; a normal exit after a finished stage to FINISHED."""
    assert logger.run_id
    main = "test_tracking:end_without_finalize"
    ended = [command(store, how, cwd=tmp_path, main=main, code=code) for how, code in (("raise", 1), ("quiet", 0))]
    crashed, quiet = (client_of(store).get_run(outcome.out.strip()) for outcome in ended)
    assert (crashed.info.status, crashed.data.tags["failure"]) == ("FAILED", "RuntimeError: no memory left")
    assert crashed.data.metrics == {"train_loss": 1.0}
    assert (quiet.info.status, quiet.data.metrics["test_loss"]) == ("FINISHED", 1.0)


def test_a_locked_database_is_waited_for(store, logger, monkeypatch, caplog):
    """The wait for a lock is logged; it succeeds when the lock is released, and fails after the time limit."""
    assert logger.run_id
    with closing(sqlite3.connect(store / "mlflow.db", isolation_level=None, check_same_thread=False)) as holder:
        monkeypatch.setenv("DEEPLIGHTNING_TRACKING_WAIT", "0.6")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(SetupError, match=r"mlflow\.db has been locked by another process for 0\.6 seconds"):
            MLflowLogger(tracking_uri=store).log_metrics({"x": 1}, 0)
        assert "Waiting for the tracking database" in caplog.text

        monkeypatch.setenv("DEEPLIGHTNING_TRACKING_WAIT", "30")
        release = threading.Timer(0.5, holder.execute, ["ROLLBACK"])
        release.start()
        other = finished(store)
        release.join()
        assert status(other) == "FINISHED"


def test_a_database_with_invalid_utf_8_is_named(tmp_path):
    """Invalid UTF-8 in a database is reported as damage, though SQLite's message cannot be decoded (storm, seed 6)."""
    finished(tmp_path)
    path = tmp_path / "mlflow.db"
    path.write_bytes(path.read_bytes().replace(b"CONSTRAINT", b"CONSTR\xffINT"))
    with pytest.raises(SetupError, match=r"mlflow\.db is damaged or not an SQLite database.*Move it aside"):
        listing(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "uri", "words"),
    [
        ("mlflow.db", ".", r"mlflow\.db is damaged or not an SQLite database.*Move it aside"),
        ("file", "file/mlruns", r"file.mlruns.mlflow\.db cannot be used"),
    ],
)
def test_a_file_that_is_no_store_is_named(file, uri, words, tmp_path):
    """A file that is no database, or in the place of a folder, is reported at once and not changed."""
    content = b"this is not a database at all" * 100
    (tmp_path / file).write_bytes(content)
    start = time.monotonic()
    with pytest.raises(SetupError, match=words):
        MLflowLogger(tracking_uri=tmp_path / uri).log_metrics({"x": 1}, 0)
    assert time.monotonic() - start < 5
    assert (tmp_path / file).read_bytes() == content


READ_ONLY = """
import sys
from mlflow.tracking import MlflowClient
from deeplightning.faults import SetupError
from deeplightning.tracking import MLflowLogger
from deeplightning.tracking.mlflow_store import attach
from deeplightning.tracking.store import locate
for uri in (sys.argv[1], sys.argv[1] + "/new"):
    try:
        MLflowLogger(tracking_uri=uri).log_metrics({"x": 1}, 0)
    except SetupError as error:
        print(error.exit_code, error)
print(MlflowClient(attach(locate(sys.argv[1]))).get_run(sys.argv[2]).info.run_id)
"""


@pytest.mark.slow
def test_a_read_only_store_is_named(store, logger, tmp_path):
    """A store or folder without write permission ends a run with exit code 3, creates nothing, and can be read. Under
    root the test drops the capabilities that override permissions."""
    powerless = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if powerless and (
        shutil.which("setpriv") is None or subprocess.run([*powerless, "true"], check=False, stderr=-3).returncode
    ):
        pytest.skip("root may write anything, and there is no setpriv to take that from it")
    assert logger.run_id
    logger.finalize("success")
    folder = tmp_path / "read only"
    folder.mkdir()
    with closing(sqlite3.connect(store / "mlflow.db")) as source:
        source.execute("VACUUM INTO ?", [str(folder / "mlflow.db")])
    (folder / "mlflow.db").chmod(0o444)
    folder.chmod(0o555)
    command = [*powerless, sys.executable, "-W", "ignore", "-c", READ_ONLY, str(folder), logger.run_id]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    folder.chmod(0o755)
    there, new, found = done.stdout.splitlines()
    assert there.startswith(f"3 The tracking store {folder / 'mlflow.db'} cannot be written")
    assert new.startswith(f"3 The tracking store {folder / 'new' / 'mlflow.db'} cannot be written")
    assert found == logger.run_id
    assert [path.name for path in folder.iterdir()] == ["mlflow.db"]


def test_odd_folder_names_work(tmp_path, monkeypatch):
    """A store in a relative path with spaces, `#`, `?` and `%` works, for artifacts and look-ups as well."""
    monkeypatch.chdir(tmp_path)
    name = "my runs 50%20 #1?x=é"
    logger = MLflowLogger(tracking_uri=name, system_metrics=False)
    logger.log("note", {"a": 1})
    logger.finalize("success")
    assert (tmp_path / name / "0" / logger.run_id / "artifacts" / "note.yaml").read_text() == "a: 1\n"
    assert {path.name for path in tmp_path.iterdir()} == {"cwd", name}
    assert resolve_run(logger.run_id, name) == logger.artifact_folder
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.mark.parametrize(
    ("uri", "database", "root"),
    [
        ("~/runs", "/home/someone/runs/mlflow.db", "/home/someone/runs"),
        ("runs/../mlruns", "mlruns/mlflow.db", "mlruns"),
        ("file:./a%20b", "a b/mlflow.db", "a b"),
        ("file:///a/b", "/a/b/mlflow.db", "/a/b"),
        ("sqlite:///x.db", "x.db", "mlruns"),
        ("sqlite:////a/x.db", "/a/x.db", "/a/mlruns"),
    ],
)
def test_where_a_store_is(uri, database, root, tmp_path, monkeypatch):
    """A directory contains its database and artifacts; the artifacts of a database URI are in `mlruns` next to it."""
    monkeypatch.setenv("HOME", "/home/someone")
    store = locate(uri)
    assert (store.database, store.artifact_root) == (tmp_path / "cwd" / database, tmp_path / "cwd" / root)


@pytest.mark.parametrize("uri", ["ftp://host/x", "sqlite://", "sqlite:///:memory:"])
def test_a_store_that_cannot_be_is_named(uri):
    """An unsupported URI is refused with the supported ones; a URI is shown without its password."""
    with pytest.raises(SetupError, match=r"directory"):
        locate(uri)
    assert locate("https://me:secret@host/x").shown == locate("https://me:p@ss@host/x").shown == "https://***@host/x"
    assert locate("https://me:p#ss@host/x").shown == locate("https://me:p?ss@host/x").shown == "https://***@host/x"
    assert locate("https://host/a@b").shown == "https://host/a@b"


@pytest.mark.parametrize("uri", ["me:pa/ss@h/db", "me:p@ss@h/db", "h/db?user=me&password=ss"])
def test_no_message_has_the_password_of_a_store(uri):
    """Neither the shown address nor the error about an unknown kind has any part of it."""
    assert "ss" not in locate(f"postgresql://{uri}").shown.partition("://")[2]
    with pytest.raises(SetupError, match="no store of the kind 'postgres'") as refused:
        locate(f"postgres://{uri}")
    assert not re.search("ss@|=ss", str(refused.value))


@pytest.mark.filterwarnings("ignore:codecs.open:DeprecationWarning")  # MLflow calls it, also on Python 3.14
def test_an_old_file_store_is_opened(tmp_path, monkeypatch, caplog):
    """A file store of an older MLflow works; the log has the command that migrates it."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MlflowClient(tmp_path.as_uri() + "/old").create_experiment("before")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    logger = finished(tmp_path / "old", experiment_name="before")
    assert history(logger, "x") == [(0, 1)]
    assert logger.artifact_folder == tmp_path / "old" / logger.name / logger.run_id / "artifacts"
    assert not (tmp_path / "old" / "mlflow.db").exists()
    assert "mlflow migrate-filestore --source" in caplog.text


def test_lightnings_logger_leads_to_the_same_store_as_ours(store, tmp_path):
    """Lightning's logger has the same layout, points and statuses in a store as ours. Without an MLflow logger a run
    uses the folder of the first logger that writes files, or else the fallback."""
    logger = MLFlowLogger(**prepare(LIGHTNINGS, {"experiment_name": "Default", "tracking_uri": str(store)}))
    for step in range(4):
        logger.log_metrics({"train_loss": 1 / (step + 1)}, step)
    logger.finalize("success")
    assert client_of(store).get_run(logger.run_id).info.status == "FINISHED"
    assert history(logger, "train_loss") == [(step, 1 / (step + 1)) for step in range(4)]
    loggers = [CSVLogger(tmp_path), logger]
    assert run_folder(loggers, "x") == store / "0" / logger.run_id / "artifacts"
    end(loggers, "killed", "SIGTERM", True)
    run = client_of(store).get_run(logger.run_id)
    assert (run.info.status, run.data.tags["failure"]) == ("KILLED", "SIGTERM")
    assert run_folder(loggers[:1], "x") == Path(loggers[0].log_dir)
    assert run_folder([], "x") == tmp_path / "cwd" / "x"


def test_a_param_that_the_writer_of_a_logger_rejects_is_an_error_of_the_config(tmp_path):
    """A keyword that TensorBoardLogger accepts but its writer rejects is reported with key and line."""
    params = {"save_dir": str(tmp_path), "flush_secs": 1, "tracking_uri": "mlruns"}
    name = "pytorch_lightning.loggers.TensorBoardLogger"
    target = Target(type=name, params=params, name="logger", place="c.yaml:9:3")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'tracking_uri'; remove it") as caught:
        open_runs([build(target)], [target])
    assert [(fault.key, fault.place) for fault in caught.value.faults] == [("logger.params", "c.yaml:9:3")]
    del params["tracking_uri"]
    open_runs([build(target)], [target])


def test_other_loggers_are_built_as_they_are(tmp_path):
    """Only the arguments of Lightning's MLflow logger are translated; folders become absolute; nothing is written."""
    assert prepare("pytorch_lightning.loggers.CSVLogger", {"save_dir": "x"}) == {"save_dir": str(Path.cwd() / "x")}
    params = prepare("lightning.pytorch.loggers.MLFlowLogger", {"tracking_uri": str(tmp_path / "new")})
    end([MLFlowLogger(**params), MLflowLogger(tracking_uri=tmp_path / "new")], "failed", "before it began", True)
    assert not (tmp_path / "new").exists()


def test_artifacts_are_put_beside_the_rest(logger, tmp_path):
    """A file or folder is copied to the artifacts, unless it is there; a missing file or a path outside is an error."""
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "a.txt").write_text("a")
    logger.log_artifact(tmp_path / "bundle")
    logger.log_artifact(tmp_path / "bundle" / "a.txt", folder="notes")
    logger.log_artifact(logger.artifact_folder / "notes" / "a.txt", folder="notes")
    found = sorted(str(path.relative_to(logger.artifact_folder)) for path in logger.artifact_folder.rglob("*.*"))
    assert found == ["bundle/a.txt", "metrics.jsonl", "notes/a.txt"]
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        logger.log_artifact(tmp_path / "nothing.txt")
    with pytest.raises(ValueError, match="not a name inside"):
        logger.log_artifact(tmp_path / "bundle", folder="../..")


RED = [255, 0, 0]


@pytest.mark.parametrize(
    ("image", "pixel", "shape"),
    [
        (torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1).expand(3, 4, 5), RED, (4, 5, 3)),
        (torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1).expand(3, 4, 5).bfloat16(), RED, (4, 5, 3)),
        (torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 4, 3), RED, (4, 3, 3)),
        (np.full((4, 5, 3), RED, np.uint8), RED, (4, 5, 3)),
        (np.full((3, 5, 3), RED, np.uint8), RED, (3, 5, 3)),
        (np.full((4, 5, 3), [2.0, -1.0, np.nan]), RED, (4, 5, 3)),
        (np.full((4, 5), 0.5), [128], (4, 5, 1)),
        (np.full((4, 5), True), [255], (4, 5, 1)),
        (np.full((4, 5), 7), [7], (4, 5, 1)),
    ],
)
def test_pixels_keep_their_colour(image, pixel, shape):
    """Arrays with channels first or last, of integers, floats or booleans, give the same image."""
    pixels = to_pixels(image)
    assert (pixels.dtype, pixels.shape) == (np.uint8, shape)
    assert pixels[0, 0].tolist() == pixel


@pytest.mark.parametrize("image", [np.zeros((5, 6, 7)), np.zeros(3), np.zeros((0, 4)), np.full((2, 2), 300), "text"])
def test_what_is_no_picture_is_refused(image):
    """An array with another shape or range is refused with the accepted forms."""
    with pytest.raises(ValueError, match="A picture"):
        to_pixels(image)


def test_each_kind_has_its_place(logger, tmp_path):
    """`log` tracks configs, images, figures, histograms, numbers and files; another kind is an error."""
    figure = Figure()
    figure.add_subplot().plot([1, 2])
    (tmp_path / "file.txt").write_text("x")
    logger.log("cfg", {"b": 1, "a": {"c": [1, 2]}})
    logger.log("data.json", {"b": 1})
    logger.log("figure", figure)
    logger.log("image", torch.zeros(3, 4, 5))
    logger.log("pillow.png", Image.new("RGB", (5, 4), (255, 0, 0)), step=7)
    logger.log("weights", torch.arange(64.0), step=2)
    logger.log("matrix", torch.zeros(8, 8), kind="histogram")
    logger.log("val_acc", 0.5, step=3)
    logger.log("file", tmp_path / "file.txt")
    logger.finalize("success")
    folder = logger.artifact_folder
    assert (folder / "cfg.yaml").read_text() == "b: 1\na:\n  c:\n  - 1\n  - 2\n"
    assert json.loads((folder / "data.json").read_text()) == {"b": 1}
    with Image.open(folder / "figure.png") as picture:
        assert min(picture.size) > 100
    with Image.open(folder / "image.png") as picture:
        assert picture.size == (5, 4)
    with Image.open(folder / "pillow_7.png") as picture:
        assert picture.getpixel((0, 0)) == (255, 0, 0)
    bins = json.loads((folder / "weights_2.json").read_text())
    assert (sum(bins["counts"]), len(bins["edges"]), bins["edges"][-1]) == (64, 65, 63.0)
    assert (folder / "weights_2.png").exists()
    assert (folder / "matrix.png").exists()
    assert history(logger, "val_acc") == [(3, 0.5)]
    assert (folder / "file.txt").read_text() == "x"
    for value in ("text", None, torch.zeros(2, 2, 2, 2)):
        with pytest.raises(ValueError, match="Kinds: metric, config, image"):
            logger.log("x", value)
    with pytest.raises(ValueError, match="'sound'"):
        logger.log("x", 1.0, kind="sound")


def test_metrics_whose_names_mlflow_cannot_store_stay_apart(store, caplog):
    """Metrics whose names become equal after replacement or cutting stay separate; the log has the new names."""
    caplog.set_level(logging.INFO, "deeplightning.tracking")
    logger, long = MLflowLogger(tracking_uri=store), "x" * 250
    values = {"AP@50": 1.0, "AP_50": 2.0, "AP#50": 3.0, f"{long}1": 4.0, f"{long}2": 5.0}
    for step in range(2):
        logger.log_metrics(values, step)
    logger.finalize("success")
    renamed = dict(re.findall(r"metric     (\S+) is tracked as (\S+)", caplog.text))
    tracked = {name: renamed.get(name, name) for name in values}
    assert len(set(tracked.values())) == 5
    assert tracked["AP@50"] == "AP_50"
    for name, value in values.items():
        assert history(logger, tracked[name]) == [(0, value), (1, value)]


def test_long_and_odd_parameters_fit():
    """Values are cut at MLflow's limit, and invalid characters in names are replaced."""
    flat = flatten({"a": {}, "b": [], "c$d": 1, "e": {"..": "x" * 7000}, "f": (1, {"g": None})})
    assert flat == {"a": "{}", "b": "[]", "c_d": "1", "e/_": "x" * 6000, "f/0": "1", "f/1/g": "None"}


def test_mlflow_sends_no_telemetry(tmp_path):
    """Opening a store does not start the telemetry that MLflow starts at import, with a file about the installation."""
    program = "from deeplightning.tracking import mlflow_store, store; mlflow_store.open_client(store.locate())"
    disabling = ("PYTEST", "CI", "MLFLOW", "DO_NOT_TRACK", "GITHUB")  # these variables turn telemetry off
    kept = {name: value for name, value in os.environ.items() if not name.startswith(disabling)}
    env = kept | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / ".config").exists()


def test_the_load_of_the_machine_is_tracked(store, monkeypatch):
    """CPU and memory usage are logged by second of the run; the thread ends with the stage."""
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    logger = MLflowLogger(tracking_uri=store)
    logger.log_metrics({"x": 1}, 0)
    metrics, deadline = RunFolder(logger.artifact_folder).metrics, time.monotonic() + 60
    while metrics.read_text().count("cpu_utilization") < 3 and time.monotonic() < deadline:
        sum(range(10_000))  # keeps the CPU busy
    logger.finalize("success")
    load = [value for _, value in history(logger, "system/cpu_utilization_percentage")]
    assert len(load) >= 3
    assert 0 < max(load) <= 100
    memory = history(logger, "system/system_memory_usage_percentage")
    assert all(0 < value < 100 and 0 <= step < 60 for step, value in memory)
    assert not [thread for thread in threading.enumerate() if thread.name == "tracking"]


def test_a_run_is_found_in_any_spelling(store, logger):
    """A run is found by folder, URI, id or name, also in a moved store; an ambiguous name is refused with the ids."""
    folder, run_id = logger.artifact_folder, logger.run_id
    logger.finalize("success")
    logger.experiment.create_registered_model("digits")
    logger.experiment.create_model_version("digits", str(folder), run_id)
    name = run_of(logger).info.run_name
    spellings = [str(folder), folder, folder.as_uri(), run_id, name, f"runs:/{run_id}", "models:/digits/1"]
    assert {resolve_run(run, store) for run in spellings} == {folder}
    logger.experiment.create_run("0", run_name=name)
    with pytest.raises(CheckpointError, match=rf"2 runs are called '{name}'. Name one by its id, .*{run_id}"):
        resolve_run(name, store)
    moved = store.with_name("moved runs")
    store.rename(moved)
    try:
        assert resolve_run(run_id, moved) == moved / "0" / run_id / "artifacts"
        (moved / "0" / run_id / "artifacts").rename(moved / "0" / run_id / "gone")
        with pytest.raises(CheckpointError, match=r"artifacts is gone"):
            resolve_run(run_id, moved)
    finally:
        moved.rename(store)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("", "No run was given"),
        ("no/such/folder", r"There is no run folder .*no/such/folder"),
        ("0123456789abcdef", r"There is no run '0123456789abcdef' in the tracking store .*mlruns.*no folder"),
        ("runs:/abc", r"There is no run 'abc'"),
        ("models:/digits/99", r"There is no model 'digits' of version 99"),
        ("models:/digits", r"Write models:/NAME/VERSION"),
        (__file__, r"test_tracking\.py is a file, not a run"),
    ],
)
def test_a_run_that_is_not_there_is_named(run, words, store, logger):
    """A missing run ends with exit code 4; the error has the run and the store. A missing store is not created."""
    assert logger.run_id
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve_run(run, store)
    assert caught.value.exit_code == 4
    with pytest.raises(CheckpointError, match="There is no tracking store"):
        resolve_run("abc", store / "none")
    assert not (store / "none").exists()


def test_a_run_id_from_a_server_cannot_name_another_folder(monkeypatch, tmp_path):
    """A registered model's run id is validated: it names a folder in the user's cache, which is replaced."""

    class Hostile:
        get_model_version = staticmethod(lambda *_: SimpleNamespace(run_id="..", source=""))
        run = staticmethod(lambda _: SimpleNamespace(artifact_uri="s3://there/artifacts", experiment_id="0"))
        download_artifacts = staticmethod(lambda *_: None)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("deeplightning.tracking.resolve._client", lambda _: Hostile)
    monkeypatch.setattr("deeplightning.tracking.reader.open_reader", lambda *_: Hostile)
    kept = tmp_path / "deeplightning" / "images" / "kept"
    kept.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"'\.\.' is not a run id"):
        resolve_run("models:/digits/1", "http://localhost:1")
    assert kept.exists()


@pytest.mark.parametrize(
    ("address", "module", "words"),
    [
        ("s3://bucket/run/artifacts", "botocore", "botocore"),
        ("sftp://me:secret@127.0.0.1:1/run", "paramiko", "paramiko"),
        ("odd://there/run", None, "Could not find a registered artifact repository for: odd"),
    ],
)
def test_a_run_whose_files_are_elsewhere_is_named(monkeypatch, store, logger, tmp_path, address, module, words):
    """If a run's files cannot be downloaded, the error (exit code 3) has their address without its password, and
    MLflow's reason, such as a missing package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if module:
        monkeypatch.setitem(sys.modules, module, None)
    assert logger.run_id
    logger.finalize("success")
    with closing(sqlite3.connect(store / "mlflow.db")) as database, database:
        database.execute("UPDATE runs SET artifact_uri = ? WHERE run_uuid = ?", (address, logger.run_id))
    for run in (logger.run_id, f"runs:/{logger.run_id}"):
        with pytest.raises(SetupError) as caught:
            resolve_run(run, store)
        message = str(caught.value)
        assert f"The files of the run {logger.run_id} are at {address.partition(':')[0]}://" in message
        assert words in message
        assert "secret" not in message
        assert "mlflow.db" not in message
        assert caught.value.exit_code == 3


def test_a_server_that_does_not_answer_is_named():
    """A server that does not answer is reported with its address within seconds."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # but does not listen
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(SetupError, match=rf"The tracking server {address} cannot be used: .*\. Start it"):
            MLflowLogger(tracking_uri=address).log_metrics({"x": 1}, 0)
        assert time.monotonic() - start < 15


def test_test_metrics_are_at_step_0_and_the_epoch_is_no_metric(store, logger):
    """Test metrics are at step 0, which MLflow draws as bars, also in a continued run; `epoch` is not tracked."""
    logger.log_metrics({"train_loss": 1.0, "epoch": 3}, 40)
    logger.log_metrics({"test_acc": 0.5, "epoch": 4}, 50)
    logger.log_metrics({"epoch": 4}, 50)
    logger.finalize("success")
    again = MLflowLogger(tracking_uri=store, system_metrics=False)
    again.resume_run(logger.run_id, [])
    again.log_metrics({"test_acc": 0.25}, 60)
    again.finalize("success")
    assert run_of(again).data.metrics == {"train_loss": 1.0, "test_acc": 0.25}
    assert history(again, "test_acc") == [(0, 0.5), (0, 0.25)]


def test_a_description_is_renewed_until_somebody_writes_another(store, logger):
    """A run updates its description, unless the user has set one in MLflow's page or by `logger.params.tags`."""
    note = "mlflow.note.content"
    for text in ("first", "second"):
        logger.describe(text)
    logger.finalize("success")
    again = MLflowLogger(tracking_uri=store, run_id=logger.run_id)
    again.describe("third")
    again.finalize("success")
    assert client_of(store).get_run(logger.run_id).data.tags[note] == "third"
    client_of(store).set_tag(logger.run_id, note, "a person's")
    later = MLflowLogger(tracking_uri=store, run_id=logger.run_id)
    own = MLflowLogger(tracking_uri=store, tags={note: "x"})
    for each, expected in ((later, "a person's"), (own, "x")):
        each.describe("ours")
        each.log_metrics({"x": 1}, 0)
        each.finalize("success")
        assert client_of(store).get_run(each.run_id).data.tags[note] == expected


def test_a_data_set_that_is_logged_after_the_end_leaves_the_run_ended(store, logger):
    """A data set whose digest is known only after the end is logged, and the run stays FINISHED."""
    logger.log_metrics({"x": 1}, 0)
    logger.finalize("success")
    logger.log_dataset(Dataset("Digits", "0a1b", "code", "{}", "{}"))
    logger.flush_ended()
    run = client_of(store).get_run(logger.run_id)
    (used,) = run.inputs.dataset_inputs
    assert (run.info.status, used.dataset.name, used.dataset.digest) == ("FINISHED", "Digits", "0a1b")
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "training")]
    assert claims(locate(store)) == []


def monitor_of(store, port):
    where = ["--tracking-uri", str(store), "--port", port]
    return [sys.executable, "-m", "deeplightning", "monitor", *where]


def start_monitor(store, port):
    command = monitor_of(store, port)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    answer_of(process, f"http://127.0.0.1:{port}/health")
    return process


def interrupt(process):
    """Send SIGINT to the process group, as Ctrl-C does; assert that all its processes end; return the output."""
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=30)[0].decode()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return output


def answer(port, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body and json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read()


@pytest.mark.slow
def test_the_monitor_shows_runs_and_a_run_outlives_its_server(store, logger, caplog):
    """The monitor serves MLflow's page, metrics and artifacts; a run loses no point while its server is down."""
    logger.log_metrics({"val_acc": 0.75}, 0)
    logger.log_picture("picture", np.full((4, 5, 3), RED, np.uint8))
    logger.finalize("success")
    port = free_port()
    server = start_monitor(store, port)
    try:
        assert answer(port, "/").decode().lower().startswith("<!doctype html>")
        query = {"experiment_ids": ["0"], "max_results": 100}
        runs = json.loads(answer(port, "/api/2.0/mlflow/runs/search", query))["runs"]
        shown = next(run for run in runs if run["info"]["run_id"] == logger.run_id)
        assert [(point["key"], point["value"]) for point in shown["data"]["metrics"]] == [("val_acc", 0.75)]
        listed = json.loads(answer(port, f"/api/2.0/mlflow/artifacts/list?run_id={logger.run_id}"))["files"]
        assert {file["path"] for file in listed} == {"metrics.jsonl", ".metrics.sent", "picture.png"}
        assert answer(port, f"/get-artifact?run_uuid={logger.run_id}&path=picture.png").startswith(b"\x89PNG")

        refused = subprocess.run(monitor_of(store, port), capture_output=True, text=True)
        assert (refused.returncode, refused.stdout) == (3, "")
        assert f"Cannot listen on 127.0.0.1:{port}: Address already in use" in refused.stderr
        assert "--port" in refused.stderr

        remote = MLflowLogger(tracking_uri=f"http://127.0.0.1:{port}", system_metrics=False)
        remote.log_hyperparams({"lr": 0.1})
        remote.log_metrics({"x": 0}, 0)
    finally:
        output = interrupt(server)
    assert f"at http://127.0.0.1:{port}/{runs_page('0')}\n" in output
    assert "GET /" not in output  # no line for each request

    start = time.monotonic()
    for step in range(1, 100):
        remote.log_metrics({"x": step}, step)
    assert time.monotonic() - start < 1.0
    wait_until(lambda: "does not accept what is logged" in caplog.text, 60)
    server = start_monitor(store, port)
    try:
        remote.finalize("success")
    finally:
        interrupt(server)
    run = client_of(store).get_run(remote.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
    points = client_of(store).get_metric_history(remote.run_id, "x")
    assert sorted(point.value for point in points) == list(range(100))
    assert "accepts what is logged again" in caplog.text


def test_a_database_that_stays_locked_costs_seconds_and_no_point(store, logger, monkeypatch, caplog):
    """A locked database does not delay training; the end waits up to a limit, and a later end sends the points."""
    assert logger.run_id
    logger.finalize("success")
    monkeypatch.setenv("DEEPLIGHTNING_TRACKING_DRAIN", "0.5")
    with closing(sqlite3.connect(store / "mlflow.db", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        start = time.monotonic()
        for step in range(99):
            logger.log_metrics({"x": step}, step)
        assert time.monotonic() - start < 1.0
        start = time.monotonic()
        logger.finalize("success")
        assert time.monotonic() - start < 2
        assert "could not be sent to" in caplog.text
        holder.execute("ROLLBACK")
    monkeypatch.setenv("DEEPLIGHTNING_TRACKING_DRAIN", "30")
    logger.log_metrics({"x": 99}, 99)
    logger.finalize("success")
    assert sorted(history(logger, "x")) == [(step, step) for step in range(100)]


@pytest.mark.parametrize("name", ["DEEPLIGHTNING_TRACKING_WAIT", "DEEPLIGHTNING_TRACKING_DRAIN"])
def test_an_invalid_time_limit_is_named_before_training(name, tmp_path, store, monkeypatch):
    """An invalid time limit is reported when the run opens, not when it ends; 0 is valid."""
    for text in ("10s", "-1", "nan"):
        monkeypatch.setenv(name, text)
        with pytest.raises(SetupError, match=f"{name}='{text}' is not a number of seconds"):
            assert MLflowLogger(tracking_uri=tmp_path, system_metrics=False).run_id
    monkeypatch.setenv(name, "0")  # does not wait
    logger = MLflowLogger(tracking_uri=store, system_metrics=False)
    assert logger.run_id
    logger.finalize("success")


def test_a_run_of_a_moved_store_continues_in_its_folder(store):
    """A run that is joined, and a new one, write to the moved store; the former path is not created again."""
    first = finished(store)
    moved = store.rename(store.with_name("moved on"))
    try:
        again = finished(moved, run_id=first.run_id)
        assert again.artifact_folder == moved / "0" / first.run_id / "artifacts"
        assert finished(moved).artifact_folder.is_relative_to(moved)
        assert not store.exists()
    finally:
        moved.rename(store)


@pytest.mark.parametrize("name", ["wide net", "v2.1", "über", "batch_size=32 seed=0"])
def test_any_name_of_a_run_is_a_run(store, name):
    """Names may have blanks, dots and letters of any language."""
    made = finished(store, run_name=name)
    assert resolve_run(name, store) == made.artifact_folder


def test_runs_that_mlflow_creates_in_a_moved_store_are_in_its_new_place(store):
    """The folder of a run that does not exist yet, and the metrics of a claim, are those of the moved store."""
    first = finished(store)
    moved = store.rename(store.with_name("moved again"))
    try:
        there = locate(moved)
        run = find_run(there, first.run_id)
        fresh = run._replace(id="new", artifact_uri=run.artifact_uri.replace(run.id, "new"))
        assert artifacts_of(there, fresh) == moved / "0" / "new" / "artifacts"
        former = store / "0" / first.run_id / "artifacts" / "metrics.jsonl"
        assert metrics_of(there, {"metrics": str(former)}) == moved / "0" / first.run_id / "artifacts/metrics.jsonl"
    finally:
        moved.rename(store)


def test_the_status_of_a_loaded_run_is_that_of_now(store, logger):
    """A run that was loaded while it ran is FINISHED once it has ended."""
    logger.log_metrics({"x": 1.0}, 0)
    logger.make_run()
    past = past_run(str(logger.artifact_folder))
    assert past.status == "RUNNING"
    logger.finalize("success")
    assert past.status == "FINISHED"


def test_a_copy_that_a_process_logs_to_is_not_replaced(monkeypatch, tmp_path):
    """A server's run is downloaded again at each call, except while a process logs to the copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = SimpleNamespace(download_artifacts=lambda run_id, path, into: Path(into, "last.ckpt").touch())
    store, run_id = locate("http://localhost:1"), "a" * 32
    run = Run(run_id, "0", "RUNNING", 1, "mlflow-artifacts:/0/a/artifacts", True, {}, {})
    monkeypatch.setattr("deeplightning.tracking.claims.find_run", lambda store, run_id: run)
    monkeypatch.setattr("deeplightning.tracking.resolve._client", lambda store: server)
    metrics = _run_artifacts(run_id, store) / "metrics.jsonl"
    metrics.touch()
    claim, lock = Claim(store, run_id, metrics), RunFolder(metrics.parent).lock()
    for held in (claim.close, lock.release):
        assert _run_artifacts(run_id, store) == metrics.parent
        assert metrics.exists()
        held()
    other = Claim(store, run_id, tmp_path / "runs" / "metrics.jsonl")
    _run_artifacts(run_id, store)
    assert not metrics.exists()
    other.close()


def test_a_deleted_experiment_can_be_restored_as_told(tmp_path):
    """The command in the message names the store; MLflow would look into its own default store."""
    store = tmp_path / "a store"
    finished(store, experiment_name="gone")
    client = MlflowClient(f"sqlite:///{store}/mlflow.db")
    client.delete_experiment(client.get_experiment_by_name("gone").experiment_id)
    with pytest.raises(SetupError) as refused:
        finished(store, experiment_name="gone")
    (told,) = re.findall(r"\((MLFLOW_TRACKING_URI=.*)\)", str(refused.value))
    assert told.startswith(f"MLFLOW_TRACKING_URI='sqlite:///{store}/mlflow.db' mlflow experiments restore ")


def test_an_empty_run_id_requests_no_run(store, logger, monkeypatch):
    """An empty MLFLOW_RUN_ID is as good as none: the run continues."""
    run_id, folder = logger.run_id, logger.artifact_folder
    monkeypatch.setenv("MLFLOW_RUN_ID", "")
    assert refusal(OURS, {"tracking_uri": str(store)}, run_id, folder) is None


def test_arrays_of_one_element_are_tracked(logger):
    """Arrays of any shape with one element are numbers; larger ones are left out with a warning."""
    logger.log_metrics({"a": np.array([0.5]), "b": np.array([[2]]), "c": np.float32(3), "two": np.ones(2)}, 0)
    logger.finalize("success")
    assert run_of(logger).data.metrics == {"a": 0.5, "b": 2.0, "c": 3.0}


def test_an_error_of_another_cell_does_not_fail_a_finished_run(logger, monkeypatch):
    """A notebook keeps the last error of any cell, and its process continues."""
    logger.log_metrics({"x": 1}, 0)
    logger.finalize("success")
    logger.log_metrics({"x": 2}, 1)
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    monkeypatch.setattr(sys, "last_value", NameError("a typo"), raising=False)
    logger._at_exit()
    assert status(logger) == "FINISHED"


def test_a_forked_process_does_not_wait_for_the_thread_of_its_parent(logger):
    """Code in a loader's worker may use MLflow: only the process that opened the run sends its data."""
    logger.log_metrics({"x": 1.0}, 0)
    if (child := os.fork()) == 0:
        logger.make_run()
        os._exit(0)
    try:
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0])  # raises if it does not end
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def test_a_model_has_a_name_that_mlflow_accepts(store, logger, tmp_path):
    """Names of timm's weights have dots, which MLflow's models may not have."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "MLmodel").write_text("{}")
    logger.log_metrics({"x": 1}, 0)
    logger.log_model(tmp_path / "model", "resnet50.a1_in1k-a:b/c", "image_classification")
    logger.finalize("success")
    (output,) = run_of(logger).outputs.model_outputs
    assert client_of(store).get_logged_model(output.model_id).name == "resnet50_a1_in1k-a_b_c"


@pytest.mark.parametrize("name", [pytest.param("Default", marks=pytest.mark.slow), "mine"])
def test_a_store_that_was_removed_is_made_again(name, tmp_path):
    """A notebook may remove the store between two runs of its process."""
    store = tmp_path / "removed"
    for _ in range(2):
        assert history(finished(store, experiment_name=name), "x") == [(0, 1)]
        shutil.rmtree(store)


def test_a_copied_store_is_used_in_its_own_place(store, tmp_path):
    """Runs of a copy are in the copy, new and old ones, although the original still exists."""
    first = finished(store)
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    assert finished(copy).artifact_folder.is_relative_to(copy)
    found = artifacts_of(locate(copy), find_run(locate(copy), first.run_id))
    assert found == copy / "0" / first.run_id / "artifacts"
    link = tmp_path / "link"
    link.symlink_to(store)
    assert artifacts_of(locate(link), find_run(locate(link), first.run_id)) == first.artifact_folder


def test_a_store_that_is_named_by_its_database_stays_where_it_is(store, tmp_path):
    """`sqlite:///mlruns/mlflow.db` is the store `mlruns`; its runs stay in their folders, present or removed."""
    first = finished(store)
    named = f"sqlite:///{locate(store).database}"
    assert finished(named).artifact_folder.parents[2] == first.artifact_folder.parents[2]
    assert artifacts_of(locate(named), find_run(locate(named), first.run_id)) == first.artifact_folder
    shutil.rmtree(first.artifact_folder)
    assert artifacts_of(locate(named), find_run(locate(named), first.run_id)) == first.artifact_folder


def test_a_copy_of_the_layout_of_mlflow_is_used_in_its_own_place(tmp_path):
    """MLflow's own layout has the database next to the folder `mlruns`."""
    for name in ("original", "copy"):
        first = finished(f"sqlite:///{tmp_path / name / 'mlflow.db'}")
        assert first.artifact_folder.is_relative_to(tmp_path / name / "mlruns")
        if name == "original":
            shutil.copytree(tmp_path / "original", tmp_path / "copy")
