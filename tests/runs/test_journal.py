"""What a run says is never lost: not where its process is killed, not where its server dies; and it is there once."""

import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
from commands import environment
from mlflow.tracking import MlflowClient

from deeplightning.cli.listing import listing, sync
from deeplightning.faults import SetupError
from deeplightning.tracking import MLflowLogger, sqlite
from deeplightning.tracking.journal import Journal, folder_of, left_behind
from deeplightning.tracking.journal_owner import has_ended, this_process
from deeplightning.tracking.mlflow_store import attach
from deeplightning.tracking.sqlite import Tracker
from deeplightning.tracking.store import locate
from deeplightning.tracking.tracker import Dataset


@pytest.fixture(autouse=True)
def own_state(monkeypatch, tmp_path):
    """No MLflow variable of the caller's, and a state folder of the test's own."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "mlruns"


def client(store):
    return MlflowClient(attach(locate(store)))


def history(store, run_id, name):
    return sorted((point.step, point.value) for point in client(store).get_metric_history(run_id, name))


def killed(store, *said, run_id=None):
    """The id of a run whose process said something and was killed at once, before a second was over."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        logger = MLflowLogger(tracking_uri=store, system_metrics=False, run_id=run_id)
        os.write(writing, logger.run_id.encode())
        for metrics, step in said:
            logger.log_metrics(metrics, step)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    with os.fdopen(reading) as told:
        found = told.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return found


def journals(store):
    return left_behind(locate(store))


SAID = [({"x": float(step), "y": math.nan}, step) for step in range(200)]


def test_a_killed_process_loses_no_point(folder):
    """What it had said is in the folder once the next run on it has begun; its run is FAILED, and says why."""
    run_id = killed(folder, *SAID)
    assert history(folder, run_id, "x") == []
    assert [path.name.partition(".")[0] for path in journals(folder)] == [run_id]
    after = MLflowLogger(tracking_uri=folder, system_metrics=False)
    after.log_metrics({"x": 1.0}, 0)
    after.finalize("success")
    assert history(folder, run_id, "x") == [(step, float(step)) for step in range(200)]
    run = client(folder).get_run(run_id)
    assert math.isnan(run.data.metrics["y"])
    assert (run.info.status, run.data.tags["failure"]) == ("FAILED", "the process was killed")
    assert run.info.start_time <= run.info.end_time <= time.time() * 1000
    assert not folder_of(locate(folder)).exists()


def test_a_run_whose_process_was_killed_before_it_recorded_anything_is_deleted(folder, command, place):
    """It holds nothing but its name; one that was killed as it went on is FAILED."""
    run_id = killed(folder)
    assert list(sync(folder)) == [f"{run_id}  deleted: its process was killed before it recorded anything"]
    assert listing(str(folder)) == []
    assert client(folder).get_run(run_id).info.lifecycle_stage == "deleted"
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize("killed")
    killed(folder, run_id=logger.run_id)
    assert client(folder).get_run(logger.run_id).info.status == "RUNNING"
    assert len(list(sync(folder))) == 1
    assert [(row["id"], row["status"]) for row in listing(str(folder))] == [(logger.run_id, "FAILED")]


def test_a_journal_is_written_twice_and_is_there_once(folder):
    """Killed between the folder's taking and the journal's end, a second writing changes nothing."""
    run_id = killed(folder, *SAID)
    (path,) = journals(folder)
    content = path.read_bytes()
    assert list(sync(folder)) == [f"{run_id}  400 points and 2 other entries written"]
    four = "; 4 lines of its journal are damaged and not written"
    for damage, told in ((b"", ""), (b'["points",1,2,{"x":', ""), (b"\xff\n{}\n[]\n7\n", four)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content + damage)
        assert list(sync(folder)) == [f"{run_id}  0 points and 0 other entries written{told}"]
    assert history(folder, run_id, "x") == [(step, float(step)) for step in range(200)]
    assert len(history(folder, run_id, "y")) == 200
    assert list(sync(folder)) == []


@pytest.mark.parametrize(
    ("damage", "lost", "points"),
    [
        (lambda text: text.replace(b'"x":7.0', b'"x":9.0'), 1, 199),
        (lambda text: text.replace(b'["points"', b'["pomnts"', 3), 3, 197),
        (lambda text: b"".join(text.splitlines(keepends=True)[:5] + text.splitlines(keepends=True)[7:]), 2, 198),
        (lambda text: text.replace(b'"run"', b'"rum"'), 1, 200),
        (lambda text: b"", 1, 0),
        (lambda text: text[:-9], 0, 199),  # the process was killed while it wrote
    ],
    ids=["a number", "words", "lines that are gone", "the head", "all", "the end of a line"],
)
def test_what_is_damaged_in_a_journal_is_told_and_not_believed(folder, damage, lost, points):
    """No point reaches the store that nobody has said."""
    run_id = killed(folder, *SAID)
    (path,) = journals(folder)
    path.write_bytes(damage(path.read_bytes()))
    (line,) = sync(folder)
    lines = "line of its journal is" if lost == 1 else "lines of its journal are"
    assert line.endswith(f"; {lost} {lines} damaged and not written") == bool(lost), line
    found = history(folder, run_id, "x")
    assert set(found) <= {(step, float(step)) for step in range(200)}
    assert len(found) == points
    assert client(folder).get_run(run_id).info.status == "FAILED"


def test_the_journal_of_a_living_process_is_left_alone(folder):
    """It is locked, also for the process itself; and a run that another process is at work on is not FAILED."""
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    (path,) = journals(folder)
    assert list(sync(folder)) == []
    killed(folder, ({"x": 2.0}, 1), run_id=logger.run_id)
    assert len(list(sync(folder))) == 1
    assert journals(folder) == [path]
    assert client(folder).get_run(logger.run_id).info.status == "RUNNING"
    logger.finalize("success")
    assert client(folder).get_run(logger.run_id).info.status == "FINISHED"
    assert history(folder, logger.run_id, "x") == [(0, 1.0), (1, 2.0)]
    assert not path.parent.exists()


def test_a_killed_run_that_goes_on_has_its_points_first(folder):
    """What it said after its checkpoint is there before it says it again, so that it is there once; it never FAILED."""
    run_id = killed(folder, *SAID)
    again = MLflowLogger(tracking_uri=folder, system_metrics=False)
    again.go_on(run_id, [("x", 3.0, 7, 3)])
    for step in range(150, 250):
        again.log_metrics({"x": float(step)}, step)
    again.finalize("success")
    assert history(folder, run_id, "x") == [(step, float(step)) for step in range(250)]
    run = client(folder).get_run(run_id)
    assert (run.info.status, "failure" in run.data.tags) == ("FINISHED", False)


def test_a_finished_run_leaves_no_journal(folder):
    """Nor does it grow while the folder takes what is said: it is emptied each time."""
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    (path,) = journals(folder)
    head = json.loads(path.read_text().splitlines()[0])
    assert (head[0]["run"], head[0]["store"]) == (logger.run_id, str(folder))
    assert path.read_text().count("\n") == 2
    deadline = time.monotonic() + 20
    while path.read_text().count("\n") > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.read_text().count("\n") == 1
    logger.finalize("success")
    assert not path.parent.exists()


def test_what_another_thread_says_while_a_run_ends_does_not_keep_it(folder, monkeypatch, caplog):
    """The digest of the data may be known just then: it is written, and the end does not wait for more."""
    writing, said = threading.Event(), threading.Event()

    def slowly(head):
        writing.set()
        assert said.wait(60)
        return write(head)

    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"loss": 1.0}, 0)
    write = logger._writer._write
    monkeypatch.setattr(logger._writer, "_write", slowly)
    ending = threading.Thread(target=logger.finalize, args=("success",))
    begun = time.monotonic()
    ending.start()
    assert writing.wait(60)
    logger.log_dataset(Dataset("digits", "abc", "local", "{}", "{}"))
    said.set()
    ending.join(60)
    assert time.monotonic() - begun < 10
    assert not left_behind(locate(folder))
    assert not caplog.records
    run = client(folder).get_run(logger.run_id)
    assert (run.info.status, run.inputs.dataset_inputs[0].dataset.digest) == ("FINISHED", "abc")


def test_a_journal_of_a_deleted_or_unknown_run_is_no_obstacle(folder, caplog):
    """Of a deleted run nothing is written; of one that is not in the folder the journal is kept aside, and said."""
    gone = killed(folder, *SAID)
    client(folder).delete_run(gone)
    journal = Journal(locate(folder), "0" * 32)
    journal.append(("points", 1, 2, {"x": 3.0}))
    journal.end(keep=True)
    told = list(sync(folder))
    assert told[0] == f"{gone}  0 points and 0 other entries written"
    assert "refused (the run 00000000000000000000000000000000 is not in the store); kept as " in told[1]
    assert list(sync(folder)) == []
    assert [path.suffix for path in folder_of(locate(folder)).iterdir()] == [".refused"]


def test_a_place_that_cannot_be_written_costs_the_journal_only(folder, monkeypatch, caplog):
    """Then a line says so, and the run is tracked."""
    monkeypatch.setattr("deeplightning.tracking.journal.folder_of", lambda store: store.database)
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize("success")
    assert history(folder, logger.run_id, "x") == [(0, 1.0)]
    assert "No journal of the run is kept" in caplog.text


def test_what_memory_cannot_hold_stays_in_the_journal(folder, monkeypatch, caplog):
    """While the store does not answer, memory is bounded and the journal is not; after the end it is written once."""
    monkeypatch.setattr("deeplightning.tracking.writer.MAX_POINTS", 10)
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 0.0}, 0)
    logger.finalize("success")
    with closing(sqlite3.connect(folder / "mlflow.db", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        for step in range(1, 100):
            logger.log_metrics({"x": float(step)}, step)
        assert [step for _, _, _, step in logger.unwritten()] == list(range(90, 100))
        holder.execute("ROLLBACK")
    logger.finalize("success")
    assert len(history(folder, logger.run_id, "x")) <= 100
    assert "the oldest points are only in" in caplog.text
    assert "89 points are only in" in caplog.text
    list(sync(folder))
    assert history(folder, logger.run_id, "x") == [(step, float(step)) for step in range(100)]
    assert client(folder).get_run(logger.run_id).info.status == "FINISHED"


def test_what_is_refused_costs_nothing_else(folder, caplog):
    """A parameter that another process has set differently is named; points and tags said with it are written."""
    first = MLflowLogger(tracking_uri=folder, system_metrics=False)
    second = MLflowLogger(tracking_uri=folder, system_metrics=False, run_id=first.run_id)
    assert second.run_id == first.run_id
    first.log_hyperparams({"lr": 1})
    first.finalize("success")
    second.log_hyperparams({"lr": 2})
    second.log_metrics({"x": 1.0}, 0)
    second.log_tags({"note": "here"})
    second.finalize("success")
    run = client(folder).get_run(first.run_id)
    assert (run.data.params, run.data.metrics, run.data.tags["note"]) == ({"lr": "1"}, {"x": 1.0}, "here")
    assert "1 parameter (parameters keep their first value: lr)" in caplog.text
    assert not folder_of(locate(folder)).exists()


def test_one_interval_is_one_transaction(folder, monkeypatch):
    """Parameters, tags, points and the status that are said within a second are written together."""
    written = []
    real = Tracker.log_batch
    monkeypatch.setattr(Tracker, "log_batch", lambda *args: written.append(args[2]) or real(*args))
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_hyperparams({"lr": 1})
    logger.log_tags({"note": "here"})
    for step in range(50):
        logger.log_metrics({"x": float(step)}, step)
    logger.finalize("success")
    assert len(written) <= 2, "a slow machine may need more than a second for this"
    assert sum(len(batch.points) for batch in written) == 50


def test_what_was_left_is_written_by_a_command(folder, command, place):
    """`deeplightning runs --sync` says what it wrote, or that there was nothing; both end with 0."""
    run_id = killed(folder, *SAID)
    told = command("runs", "--sync", "--tracking-uri", folder, cwd=place)
    assert (told.code, told.out) == (0, f"{run_id}  400 points and 2 other entries written\n")
    told = command("runs", "--sync", "--tracking-uri", folder, cwd=place)
    assert (told.code, told.out) == (0, "nothing was left unwritten\n")
    told = command("runs", "--sync", "--tracking-uri", folder.with_name("none"), cwd=place)
    assert (told.code, told.out) == (0, "nothing was left unwritten\n")
    assert not folder.with_name("none").exists()


class Server:
    """An MLflow server on loopback that can die and come back."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        self.process = None

    def start(self):
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        store += ["--artifacts-destination", str(self.folder / "kept")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1", *store],
            env=environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None
                time.sleep(0.1)

    def die(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    server.start()
    yield server
    server.die()


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_has_every_point_once(server):
    """Killed and started again in mid-run, twice: nothing is missing, nothing is there twice."""
    logger = MLflowLogger(tracking_uri=server.address, system_metrics=False)
    logger.log_hyperparams({"lr": 0.1})
    step = 0
    for _ in range(2):
        for _ in range(300):
            logger.log_metrics({"x": float(step)}, step)
            step += 1
            time.sleep(0.005)
        server.die()
        for _ in range(100):
            logger.log_metrics({"x": float(step)}, step)
            step += 1
            time.sleep(0.005)
        server.start()
    logger.finalize("success")
    assert history(server.address, logger.run_id, "x") == [(number, float(number)) for number in range(step)]
    run = client(server.address).get_run(logger.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
    assert journals(server.address) == []


def bind_when_free(hole, port):
    """Takes a port of this machine; a server that was killed may hold it for a moment more."""
    deadline = time.monotonic() + 60
    while True:
        try:
            hole.bind(("127.0.0.1", port))
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.mark.slow
def test_a_dead_server_costs_no_more_than_one_that_answers(server, monkeypatch):
    """CPU time of all that tracking does, ten points a second: of a server that answers, of refused connections, then
    of one that never answers."""
    monkeypatch.setenv("DEEPLIGHTNING_TRACKING_DRAIN", "1")
    logger = MLflowLogger(tracking_uri=server.address, system_metrics=False)
    logger.log_metrics({"x": 0.0}, 0)
    step = 1

    def spent():
        """CPU seconds of ten seconds."""
        nonlocal step
        begun = time.process_time()
        for _ in range(100):
            logger.log_metrics({"x": float(step)}, step)
            step += 1
            time.sleep(0.1)
        return time.process_time() - begun

    answered = spent()
    server.die()
    for silent in (False, True):
        with socket.socket() as hole:
            hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bind_when_free(hole, server.port)
            if silent:
                hole.listen(50)
            assert spent() <= answered
    start = time.monotonic()
    logger.finalize("success")
    assert time.monotonic() - start < 5
    server.start()
    deadline = time.monotonic() + 60
    while journals(server.address) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert history(server.address, logger.run_id, "x") == [(number, float(number)) for number in range(step)]


@pytest.mark.slow
def test_a_server_that_stays_dead_gets_all_later(server, command, tiny, tmp_path, monkeypatch):
    """The run ends with 0 and a notice; `runs --sync` keeps the journal while the server is dead, then fills it."""
    here = tmp_path / "here"
    here.mkdir()
    settings = (f"logger.params.tracking_uri={server.address}", "train.num_epochs=6", "logger.log_every_n_steps=1")
    (here / "own.py").write_text(WAITS)
    state = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"], "DEEPLIGHTNING_TRACKING_DRAIN": "2"}
    callback = "train.callbacks=[{type: own.Waits}]"
    running = command.start("train", tiny, *settings, callback, cwd=here, **state)
    running.says("waits")
    server.die()
    (here / "go").touch()
    done = running.end()
    assert done.code == 0, done
    assert "deeplightning runs --sync" in done.err

    asked = ("runs", "--sync", "--tracking-uri", server.address)
    refused = command(*asked, cwd=here, **state)
    assert refused.code == 3, refused
    assert "does not take what was left unwritten" in refused.err
    with pytest.raises(SetupError):
        list(sync(server.address))
    assert len(journals(server.address)) == 1
    server.start()
    told = command(*asked, cwd=here, **state)
    assert told.code == 0, told
    assert "points and" in told.out
    run = client(server.address).search_runs(["0"])[0]
    assert run.info.status == "FINISHED"
    steps = [step for step, _ in history(server.address, run.info.run_id, "train_loss")]
    assert steps == list(range(6 * 9))
    assert (tmp_path / "kept" / "0" / run.info.run_id / "artifacts" / "last.ckpt").is_file()
    assert journals(server.address) == []


WAITS = '''\
import pathlib
import time

import pytorch_lightning as pl


class Waits(pl.Callback):
    """Stops in the second epoch until a file is there."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2:
            print("waits", flush=True)
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
'''


# ---- a run whose process was killed


def head(store, **changed):
    """What the only journal of a store tells of its process; after a change of that."""
    (path,) = journals(store)
    first, *rest = path.read_text().splitlines(keepends=True)
    told = json.loads(first)[0] | changed
    if changed:
        told.pop("format", None)  # which asks for a check sum
        path.write_text(json.dumps([told]) + "\n" + "".join(rest))
    return told


def test_runs_settles_a_killed_run_by_itself(folder, command, place):
    """The list shows it as FAILED, and stderr says what happened; a second list says nothing."""
    run_id = killed(folder, *SAID)
    told = command("runs", "--tracking-uri", folder, cwd=place)
    assert told.code == 0
    assert told.out.split()[:2] == [run_id, "FAILED"]
    assert told.err == f"{run_id}: the process was killed; it is FAILED from now on\n"
    assert command("runs", "--tracking-uri", folder, cwd=place).err == ""
    assert client(folder).get_run(run_id).data.tags["failure"] == "the process was killed"


def test_the_monitor_settles_a_killed_run_by_itself(folder, monkeypatch, capsys):
    """Before it shows the runs."""
    from deeplightning.tracking import monitor

    run_id = killed(folder, *SAID)
    monkeypatch.setattr("os.execv", lambda *_: 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert monitor.main(["--tracking-uri", str(folder), "--port", str(port)]) == 0
    assert client(folder).get_run(run_id).info.status == "FAILED"
    assert f"{run_id}: the process was killed" in capsys.readouterr().err


def test_a_dead_run_that_cannot_be_settled_is_shown_as_such(folder, monkeypatch, command, place):
    """While another program holds the store for long, the list says DEAD and why."""
    run_id = killed(folder, *SAID)
    with closing(sqlite3.connect(folder / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        told = command("runs", "--tracking-uri", folder, cwd=place, DEEPLIGHTNING_TRACKING_WAIT="0.5")
    assert (told.code, told.out.split()[:2]) == (0, [run_id, "DEAD"]), told
    assert "does not take what was left unwritten" in told.err


def test_a_number_that_was_used_again_is_not_the_run(folder):
    """The process of that number started later than the run's: the run is FAILED. The very process is not."""
    killed(folder, *SAID)
    mine = this_process()
    head(folder, process=mine["process"], start=mine["start"])
    path = journals(folder)[0]
    content = path.read_bytes()
    assert len(list(sync(folder))) == 1  # its points
    assert [row["status"] for row in listing(str(folder))] == ["RUNNING"]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    head(folder, start=mine["start"] - 1)
    assert len(list(sync(folder))) == 1
    assert [row["status"] for row in listing(str(folder))] == ["FAILED"]


def test_another_machines_run_is_left_to_it(folder, command, place):
    """Its free lock proves nothing here: `runs`, the next run and `--sync` leave it alone, until it was silent for a
    day. After a restart of its own machine, or where the very run goes on, it is settled."""
    run_id = killed(folder, *SAID)
    head(folder, host="elsewhere", machine="b" * 32, boot="c" * 36)
    assert command("runs", "--tracking-uri", folder, cwd=place).out.split()[:2] == [run_id, "RUNNING"]
    after = MLflowLogger(tracking_uri=folder, system_metrics=False)
    after.log_metrics({"x": 1.0}, 0)
    after.finalize("success")
    assert history(folder, run_id, "x") == []
    (line,) = sync(folder)
    assert line.startswith(f"{run_id}  left alone: its process is of elsewhere")
    (path,) = journals(folder)
    long_ago = time.time() - 25 * 3600
    os.utime(path, (long_ago, long_ago))
    assert command("runs", "--tracking-uri", folder, cwd=place).out.count("RUNNING") == 1
    assert list(sync(folder)) == [f"{run_id}  400 points and 2 other entries written"]
    assert client(folder).get_run(run_id).info.status == "FAILED"


def test_what_a_process_of_another_machine_left_is_there_where_its_run_goes_on(folder):
    """A job that was sent to another machine has the points of the first one."""
    run_id = killed(folder, *SAID)
    head(folder, host="elsewhere", machine="b" * 32, boot="c" * 36)
    again = MLflowLogger(tracking_uri=folder, system_metrics=False)
    again.go_on(run_id, [])
    again.log_metrics({"x": 200.0}, 200)
    again.finalize("success")
    assert history(folder, run_id, "x") == [(step, float(step)) for step in range(201)]


def test_a_machine_that_was_started_again_settles_its_runs():
    """Nothing of it lives on; without an id of the machine the name alone proves nothing."""
    mine = this_process()
    assert has_ended(mine) is False
    assert has_ended({**mine, "start": mine["start"] + 1}) is True
    assert has_ended({**mine, "boot": "c" * 36, "machine": ""}) is None
    assert has_ended({**mine, "boot": "c" * 36}) is (True if mine["machine"] else None)
    assert has_ended({**mine, "boot": "c" * 36, "host": "elsewhere"}) is None
    assert has_ended({"run": "a" * 32, "process": 1}) is True


def test_a_run_is_in_the_store_only_once_its_journal_outlasts_a_loss_of_power(folder, monkeypatch):
    """The content is synced before the file has its name, and the name before the run is created."""
    order = []

    def fsync(descriptor, real=os.fsync):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        order.append("names" if path.is_dir() else path.suffix)
        real(descriptor)

    def create_run(self, *arguments, real=Tracker.create_run, **options):
        order.append("run")
        return real(self, *arguments, **options)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Tracker, "create_run", create_run)
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize("success")
    before = order[: order.index("run")]
    assert ".new" in before
    assert "names" in before[before.index(".new") :]


def test_what_the_store_has_committed_outlasts_a_loss_of_power(folder):
    """SQLite also syncs the folder behind the removal of its journal: its level EXTRA, the third."""
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize("success")
    with closing(sqlite._connect(folder / "mlflow.db")) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)
