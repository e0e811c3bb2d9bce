"""`runs --watch` on stores: SQLite directly, the same through MLflow's client, and the verb."""

import contextlib
import os
import pty
import select
import sys
import time

import pytest
from commands import LONGEST, environment, read_terminal
from mlflow.tracking import MlflowClient

from deeplightning.cli.watch import Watch
from deeplightning.faults import SetupError
from deeplightning.tracking import MLflowLogger
from deeplightning.tracking.attach import attach
from deeplightning.tracking.names import EPOCH_STEPS, STEPS
from deeplightning.tracking.running import _ByMLflow, reader_of
from deeplightning.tracking.store import locate


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store with a running run of 40 steps and one that has finished."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("done", "wide"):
        logger = MLflowLogger(tracking_uri=tmp_path / "mlruns", run_name=name, system_metrics=False)
        logger.log_tags({STEPS: 40, EPOCH_STEPS: 20})
        for step in range(0, 30, 5):
            logger.log_metrics({"train_loss": 1.0 - step / 100}, step)
            time.sleep(0.002)
        if name == "done":
            logger.finalize("success")
    logger._writer.stop()  # the points of the running one are in the store
    yield tmp_path / "mlruns", logger
    logger.finalize("success")


def test_a_look_has_the_running_runs_and_keeps_those_that_end(store):
    """A run that ended before the first look is not there; one that ends later is, below, until it is deleted."""
    folder, logger = store
    watch = Watch(locate(folder))
    (found,) = watch.look()
    assert (found["name"], found["status"], found["epoch"], found["step"]) == ("wide", "RUNNING", "2", "26/40")
    assert found["metric"] == "train_loss 0.7500"
    assert found["left"]
    logger.log_metrics({"train_loss": 0.1}, 35)
    logger.finalize("failed", "a reason")
    (found,) = watch.look()
    assert (found["status"], found["step"], found["left"]) == ("FAILED", "36/40", "")
    assert Watch(locate(folder)).look() == []
    MlflowClient(attach(locate(folder))).delete_run(logger.run_id)
    assert watch.look() == []


def test_mlflows_client_reads_what_sql_reads(store):
    """For servers, and for schemas that are not known."""
    folder, logger = store
    directly, client = reader_of(locate(folder)), _ByMLflow(locate(folder))
    (one,), (other,) = directly.runs(), client.runs()
    assert (one.id, one.name, one.experiment, one.started, one.tags) == (
        other.id,
        other.name,
        other.experiment,
        other.started,
        other.tags,
    )
    assert [*one.newest] == [*other.newest]
    assert directly.points(logger.run_id, "train_loss", 3) == client.points(logger.run_id, "train_loss", 3)
    assert [point.step for point in directly.points(logger.run_id, "train_loss", 3)] == [15, 20, 25]


def test_a_store_that_disappears_is_named_and_is_read_again(store):
    """The next look works once it is back."""
    folder, _ = store
    watch = Watch(locate(folder))
    assert len(watch.look()) == 1
    (folder / "mlflow.db").rename(folder / "away")
    with pytest.raises(SetupError, match="there are no runs"):
        watch.look()
    (folder / "away").rename(folder / "mlflow.db")
    assert len(watch.look()) == 1


def test_in_a_pipe_it_prints_one_table(store, command, place):
    """Without a terminal nothing can be kept up to date; filters and other options as of the list."""
    folder, _ = store
    said = command("runs", "--watch", "--tracking-uri", folder, cwd=place)
    assert said.code == 0, said
    head, line = said.out.splitlines()
    assert head.split()[:3] == ["name", "experiment", "status"]
    assert line.split()[0] == "wide"
    nothing = command("runs", "--watch", "--name", "nobody", "--tracking-uri", folder, cwd=place)
    assert (nothing.code, nothing.out) == (0, "")
    assert "no run is running" in nothing.err
    refused = command("runs", "--watch", "--last", "--tracking-uri", folder, cwd=place)
    assert refused.code == 2
    missing = command("runs", "--watch", "--tracking-uri", folder / "nowhere", cwd=place)
    assert missing.code == 3
    assert not (folder / "nowhere").exists()


def test_ctrl_c_ends_it_on_a_terminal(store):
    """With exit code 0, as this is the way to end it; the table is drawn before."""
    folder, _ = store
    program = "import sys; from deeplightning.cli.watch import watch; watch(sys.argv[1])"
    child, leader = pty.fork()
    if child == 0:
        os.execve(
            sys.executable,
            [sys.executable, "-c", program, str(folder)],
            {**environment(), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )
    begun = b""
    with contextlib.suppress(OSError):  # it has ended early
        while b"Ctrl-C ends" not in begun and select.select([leader], [], [], LONGEST)[0]:
            begun += os.read(leader, 4096)
    os.write(leader, b"\x03")
    text = (begun + read_terminal(leader)).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, text
    for words in ("wide", "26/40", "1 run running"):
        assert words in text
