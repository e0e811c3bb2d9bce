"""Data that a run has logged survives the loss of its process or server, and is in the store exactly once."""

import json
import math
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import requests
from commands import answer_of, environment, free_port, python
from conftest import OWN
from mlflow.exceptions import MlflowException, get_error_code
from mlflow.tracking import MlflowClient

from deeplightning.cli.listing import listing
from deeplightning.faults import SetupError
from deeplightning.tracking import MLflowLogger, monitor
from deeplightning.tracking.claims import Claim, _machine, claims, folder_of, is_elsewhere
from deeplightning.tracking.client import Client
from deeplightning.tracking.delivery import Delivery
from deeplightning.tracking.entities import Dataset, run_of
from deeplightning.tracking.metrics_file import points_line, read_lines, sent_position
from deeplightning.tracking.mlflow_store import attach
from deeplightning.tracking.store import is_transient, locate
from deeplightning.tracking.unsent import SILENT_SECONDS, send_leftovers

pytestmark = pytest.mark.usefixtures("own_state")


def sync(store):
    """Send what `runs --sync` sends."""
    return send_leftovers(locate(store), silent=SILENT_SECONDS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The database of a store without runs; creating one takes a second of CPU time."""
    folder = tmp_path_factory.mktemp("store")
    client(folder).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def folder(made, tmp_path):
    """The folder of a store without runs."""
    folder = tmp_path / "mlruns"
    folder.mkdir()
    shutil.copyfile(made, folder / "mlflow.db")
    with closing(sqlite3.connect(folder / "mlflow.db")) as connection, connection:
        connection.execute("UPDATE experiments SET artifact_location = ?", [f"{folder.as_uri()}/0"])
    return folder


def client(store):
    return MlflowClient(attach(locate(store)))


def history(store, run_id, name):
    return sorted((point.step, point.value) for point in client(store).get_metric_history(run_id, name))


def killed(store, *points, run_id=lambda: None, ends=()):
    """Return the id of a run whose process logged points and was killed within a second.

    Args:
        ends: the statuses that it was about to set.
        run_id: returns the run to continue. It is called after the fork: otherwise the child would have copies of a
            thread's locks, which are never released.
    """
    (reading, writing), (child_reading, parent_writing) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(parent_writing)
        with os.fdopen(child_reading) as pipe:
            logger = MLflowLogger(tracking_uri=store, system_metrics=False, run_id=pipe.read() or None)
        os.write(writing, logger.run_id.encode())
        for metrics, step in points:
            logger.log_metrics(metrics, step)
        for status in ends:
            logger.finalize(status, "KeyboardInterrupt")
        if ends:
            logger.flush_ended()  # as `Record.close` does
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.close(child_reading)
    with os.fdopen(parent_writing, "w") as pipe:
        pipe.write(run_id() or "")
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return found


def finished(store, how="success"):
    """Return the logger of a run that logged one point and ended."""
    logger = MLflowLogger(tracking_uri=store, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    logger.finalize(how)
    return logger


def claimed(store):
    return claims(locate(store))


def change(store, **changed):
    """Change entries of the only claim on a store."""
    (path,) = claimed(store)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


ELSEWHERE = {"host": "elsewhere", "machine": "b" * 32, "boot": "c" * 36}


def metrics_of(folder, run_id):
    (path,) = folder.glob(f"*/{run_id}/artifacts/metrics.jsonl")
    return path


KILLED = "; FAILED: the process was killed"
POINTS = [({"x": float(step), "y": math.nan}, step) for step in range(200)]


def test_a_killed_process_loses_no_point(folder):
    """The next run on a store sends all points of a killed run, and sets it to FAILED with the reason."""
    run_id = killed(folder, *POINTS)
    assert [path.name.partition(".")[0] for path in claimed(folder)] == [run_id]
    finished(folder)
    assert history(folder, run_id, "x") == [(step, float(step)) for step in range(200)]
    run = client(folder).get_run(run_id)
    assert math.isnan(run.data.metrics["y"])
    assert (run.info.status, run.data.tags["failure"]) == ("FAILED", "the process was killed")
    assert run.info.start_time <= run.info.end_time <= time.time() * 1000
    assert claimed(folder) == []


@pytest.mark.parametrize("case", ["kill -9", "Ctrl-C", "a status by another rank"])
def test_a_run_that_recorded_nothing_is_deleted(case, folder):
    """A run that was killed before it recorded anything is deleted, except after a resume, when it is FAILED."""
    run_id = killed(folder, ends=["killed", "failed"] if case == "Ctrl-C" else [])
    if case == "a status by another rank":
        (_, head), *_ = read_lines(metrics_of(folder, run_id))
        Client(locate(folder)).make_run(run_of(head["run"]))
        client(folder).set_terminated(run_id, "FAILED")
    assert list(sync(folder)) == [f"{run_id}  deleted: its process was killed before it recorded anything"]
    assert listing(str(folder)) == []
    logger = finished(folder, "killed")
    killed(folder, run_id=lambda: logger.run_id)
    assert len(list(sync(folder))) == 1
    assert [(row["id"], row["status"]) for row in listing(str(folder))] == [(logger.run_id, "FAILED")]


def test_what_is_sent_twice_is_there_once(folder):
    """Points that are sent again, since their process was killed before it recorded the first time, are stored once."""
    run_id = killed(folder, *POINTS)
    (path,) = claimed(folder)
    content, metrics = path.read_bytes(), metrics_of(folder, run_id)
    assert list(sync(folder)) == [f"{run_id}  400 points sent{KILLED}"]
    five = "; 5 damaged lines of its metrics.jsonl not sent"  # with the partial line of the second case
    for damage, notice in ((b"", ""), (b'{"step":1,"time":2,"values":{"x":', ""), (b"\n\xff\n{}\n[]\n7\n", five)):
        path.write_bytes(content)
        path.chmod(0o600)
        metrics.with_name(".metrics.sent").write_text("0")
        metrics.write_bytes(metrics.read_bytes() + damage)
        assert list(sync(folder)) == [f"{run_id}  400 points sent{notice}"]
    assert history(folder, run_id, "x") == [(step, float(step)) for step in range(200)]
    assert len(history(folder, run_id, "y")) == 200
    assert list(sync(folder)) == []


@pytest.mark.parametrize(
    ("damage", "lost", "points"),
    [
        (lambda text: text.replace(b'"values"', b'"valves"', 3), 3, 197),
        (lambda text: text.replace(b'"run"', b'"rum"'), 1, 0),
        (lambda text: text[:-9], 0, 199),  # the process was killed while it wrote
    ],
    ids=["keys", "the head", "the end of a line"],
)
def test_a_damaged_line_is_reported_and_not_sent(folder, damage, lost, points):
    """A damaged line is reported, and all others are sent; without the first line, which has the run, none is sent."""
    run_id = killed(folder, *POINTS)
    metrics = metrics_of(folder, run_id)
    metrics.write_bytes(damage(metrics.read_bytes()))
    (line,) = sync(folder)
    if not points:
        assert "refused (the run" in line
        assert listing(str(folder)) == []
        return
    lines = "damaged line" if lost == 1 else "damaged lines"
    assert line.endswith(f"; {lost} {lines} of its metrics.jsonl not sent") == bool(lost), line
    found = history(folder, run_id, "x")
    assert set(found) <= {(step, float(step)) for step in range(200)}
    assert len(found) == points
    assert client(folder).get_run(run_id).info.status == "FAILED"


@pytest.mark.parametrize(
    "damage",
    [
        (b'"x":7.0', b'"x":"high"'),
        (b'"x":7.0', b'"{":7.0'),  # MLflow would refuse all that is sent with it
        (b'"step":5,', b'"step":null,'),
        (b'"step":5,', b'"step":%d,' % 10**25),
    ],
)
def test_a_line_of_points_that_a_store_cannot_take_is_damaged(damage, tmp_path):
    """A line with a text as value, an invalid name, no step, or a step beyond the database's range is damaged."""
    line = points_line(1, 5, {"x": 7.0})
    path = tmp_path / "metrics.jsonl"
    text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(text + text.replace(*damage))
    assert [found for _, found in read_lines(path)] == [line, {}]


@pytest.mark.parametrize("is_of_another", [False, True], ids=["here", "of another machine"])
def test_a_killed_run_that_resumes_has_its_points_first(is_of_another, folder):
    """A resumed run, also of another machine, has the points after its checkpoint exactly once, and is not FAILED."""
    run_id = killed(folder, *POINTS)
    if is_of_another:
        change(folder, **ELSEWHERE)
    again = MLflowLogger(tracking_uri=folder, system_metrics=False)
    again.resume_run(run_id, [("x", 3.0, 7, 3)])
    for step in range(150, 250):
        again.log_metrics({"x": float(step)}, step)
    again.finalize("success")
    assert history(folder, run_id, "x") == [(step, float(step)) for step in range(250)]
    run = client(folder).get_run(run_id)
    assert (run.info.status, "failure" in run.data.tags) == ("FINISHED", False)


def test_a_finished_run_leaves_no_claim(folder):
    """The claim of a running run has the path of its file and is locked, also for its own process. After the end claim
    and file are closed, and the claim is removed."""

    def open_files():
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sorted(link.name for link in links if link.is_relative_to(folder))

    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    for step in range(2):
        logger.log_metrics({"x": 1.0}, step)
        (path,) = claimed(folder)
        claim = json.loads(path.read_text())
        metrics = logger.artifact_folder / "metrics.jsonl"
        assert (claim["run"], claim["store"], claim["metrics"]) == (logger.run_id, str(folder), str(metrics))
        assert open_files() == sorted([path.name, "metrics.jsonl"])
        assert list(sync(folder)) == []
        assert claimed(folder) == [path]
        logger.finalize("success")
        assert open_files() == []
        assert sent_position(metrics) == metrics.stat().st_size
        assert claimed(folder) == []


def test_logging_by_another_thread_does_not_delay_the_end_of_a_run(folder, monkeypatch, caplog):
    """A data set that another thread logs during the end is stored, and the end does not wait for more."""
    writing, logged = threading.Event(), threading.Event()

    def slowly(delivery, until):
        writing.set()
        assert logged.wait(60)
        send(delivery, until)

    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"loss": 1.0}, 0)
    send = Delivery.send
    monkeypatch.setattr(Delivery, "send", slowly)
    ending = threading.Thread(target=logger.finalize, args=("success",))
    begun = time.monotonic()
    ending.start()
    assert writing.wait(60)
    logger.log_dataset(Dataset("digits", "abc", "local", "{}", "{}"))
    logged.set()
    ending.join(60)
    assert time.monotonic() - begun < 10
    assert not claimed(folder)
    assert not caplog.records
    run = client(folder).get_run(logger.run_id)
    assert (run.info.status, run.inputs.dataset_inputs[0].dataset.digest) == ("FINISHED", "abc")


def test_a_deleted_or_unknown_run_is_no_obstacle(folder):
    """A deleted run gets no points; the claim on a run that is not in the store is renamed and reported."""
    logger = finished(folder)
    gone = killed(folder, *POINTS, run_id=lambda: logger.run_id)
    client(folder).delete_run(gone)
    metrics = folder / "0" / ("0" * 32) / "artifacts" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text(json.dumps(points_line(1, 2, {"x": 3.0})) + "\n")
    if (child := os.fork()) == 0:
        Claim(locate(folder), "0" * 32, metrics)
        os._exit(0)
    os.waitpid(child, 0)
    lines = list(sync(folder))
    assert lines[0] == f"{gone}  0 points sent"
    assert "refused (the run 00000000000000000000000000000000 is not in the store); kept as " in lines[1]
    assert list(sync(folder)) == []
    assert [path.suffix for path in folder_of(locate(folder)).iterdir()] == [".refused"]


def test_a_claim_that_is_removed_meanwhile_hides_no_other(folder):
    """A claim that is removed while the claims are listed, here a broken link, does not hide another."""
    run_id = killed(folder, *POINTS[:5])
    (folder_of(locate(folder)) / "gone.abc.unsent").symlink_to("nowhere")
    assert [line.partition(" ")[0] for line in sync(folder)] == [run_id]


def test_a_run_without_a_writable_place_for_claims_is_tracked(folder, monkeypatch, caplog):
    """If its claim cannot be written, a warning is logged, and the run is tracked."""
    monkeypatch.setattr("deeplightning.tracking.claims.folder_of", lambda store: store.database)
    assert history(folder, finished(folder).run_id, "x") == [(0, 1.0)]
    assert "The run is not claimed" in caplog.text


def test_points_that_a_full_disk_does_not_take_are_sent_from_memory(folder, monkeypatch, caplog):
    """A full disk causes one warning; a store on another disk gets all points and the status."""
    from deeplightning.tracking.metrics_file import MetricsFile

    def full(self, line):
        raise OSError(28, "No space left on device")

    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 0.0}, 0)
    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "append", full)
        for step in range(1, 50):
            logger.log_metrics({"x": float(step)}, step)
        logger.finalize("success")
    assert history(folder, logger.run_id, "x") == [(step, float(step)) for step in range(50)]
    assert client(folder).get_run(logger.run_id).info.status == "FINISHED"
    assert caplog.text.count("No space left on device") == 1


def test_what_is_refused_costs_nothing_else(folder, caplog):
    """A parameter that another process has set differently is reported; points and tags logged with it are stored."""
    first = finished(folder)
    second = MLflowLogger(tracking_uri=folder, system_metrics=False, run_id=first.run_id)
    assert second.run_id == first.run_id
    client(folder).log_param(first.run_id, "lr", 1)
    second.log_hyperparams({"lr": 2})
    second.log_metrics({"y": 1.0}, 0)
    second.log_tags({"note": "here"})
    second.finalize("success")
    run = client(folder).get_run(first.run_id)
    assert (run.data.params, run.data.metrics["y"], run.data.tags["note"]) == ({"lr": "1"}, 1.0, "here")
    assert "Not tracked" in caplog.text
    assert "lr" in caplog.text
    assert claimed(folder) == []


def test_points_of_one_interval_are_sent_together(folder, monkeypatch):
    """The points of a second are sent in one or two calls."""
    written, log_batch = [], Client.log_batch
    monkeypatch.setattr(Client, "log_batch", lambda *args: written.append(args[2]) or log_batch(*args))
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_hyperparams({"lr": 1})
    logger.log_tags({"note": "here"})
    for step in range(50):
        logger.log_metrics({"x": float(step)}, step)
    logger.finalize("success")
    assert len([batch for batch in written if batch.points]) <= 2, "a slow machine may need more than a second for this"
    assert sum(len(batch.points) for batch in written) == 50


def test_runs_sync_sends_leftovers(folder, command, place):
    """`deeplightning runs --sync` prints what it sent, or that there was nothing to send, and creates no store."""
    run_id, none = killed(folder, *POINTS), folder.with_name("none")
    nothing = "nothing to send\n"
    for store, words in ((folder, f"{run_id}  400 points sent{KILLED}\n"), (folder, nothing), (none, nothing)):
        assert command("runs", "--sync", "--tracking-uri", store, cwd=place, code=0).out == words
    assert not none.exists()


class Server:
    """An MLflow server on loopback that can be killed and restarted."""

    def __init__(self, folder):
        self.port, self.folder, self.process = free_port(), folder, None
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self):
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        store += ["--artifacts-destination", str(self.folder / "kept")]
        command = [sys.executable, "-m", "mlflow", "server", "--port", self.port, "--workers", "1", *store]
        env, null = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"), subprocess.DEVNULL
        self.process = subprocess.Popen(command, env=env, stdout=null, stderr=null, start_new_session=True)
        answer_of(self.process, f"{self.address}/health")

    def kill(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.mark.slow
def test_a_server_that_stays_dead_gets_all_later(server, command, tiny, tmp_path):
    """A run whose server is down ends with exit code 0 and a notice; `runs --sync` sends its data later."""
    here = tmp_path / "here"
    here.mkdir()
    settings = (f"logger.params.tracking_uri={server.address}", "train.num_epochs=6", "logger.log_every_n_steps=1")
    (here / "own.py").write_text(OWN)
    state = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"], "DEEPLIGHTNING_TRACKING_DRAIN": "2"}
    callback = f"train.callbacks=[{{type: own.Waits, params: {{until: '{here / 'go'}'}}}}]"
    running = command.start("train", tiny, *settings, callback, cwd=here, **state)
    running.says("waits")
    server.kill()
    (here / "go").touch()
    assert "deeplightning runs --sync" in running.end(code=0).err
    sync_command = ("runs", "--sync", "--tracking-uri", server.address)
    assert "Unsent data is kept" in command(*sync_command, cwd=here, **state, code=3).err
    with pytest.raises(SetupError):
        list(sync(server.address))
    assert len(claimed(server.address)) == 1
    server.start()
    assert "points sent" in command(*sync_command, cwd=here, **state, code=0).out
    run = client(server.address).search_runs(["0"])[0]
    assert run.info.status == "FINISHED"
    steps = [step for step, _ in history(server.address, run.info.run_id, "train_loss")]
    assert steps == list(range(6 * 9))
    assert (tmp_path / "kept" / "0" / run.info.run_id / "artifacts" / "last.ckpt").is_file()
    assert claimed(server.address) == []


def test_the_server_has_all_files_of_a_run_and_a_run_is_found_there(command, tiny, server, tmp_path):
    """After the end the server has every file of the run's local folder, and `predict` finds the run by its id."""
    here = tmp_path / "here"
    here.mkdir()
    settings = ("stages=[train,test]", "train.export=true", f"logger.params.tracking_uri={server.address}")
    trained = command("train", tiny, *settings, cwd=here, code=0)
    assert trained.folder.is_relative_to(here / "runs")
    (kept,) = (tmp_path / "kept" / "0").glob("*/artifacts")
    sent, local = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (kept, trained.folder)
    )
    assert sent == local
    assert "bundle/model.onnx" in sent
    shutil.rmtree(here / "runs")
    digit = Path(__file__).parents[2] / "examples" / "digits" / "3.png"
    done = command("predict", kept.parent.name, digit, cwd=here, MLFLOW_TRACKING_URI=server.address, code=0)
    assert done.out.splitlines()[1].startswith(f"{digit},")


# ---- a run whose process was killed


def test_runs_settles_a_killed_run_by_itself(folder, command, place):
    """`runs` sets a killed run to FAILED and reports it once; while the store is locked, the run stays RUNNING."""
    run_id = killed(folder, *POINTS)
    with closing(sqlite3.connect(folder / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        done = command("runs", "--tracking-uri", folder, cwd=place, code=0, DEEPLIGHTNING_TRACKING_WAIT="0.5")
    assert done.out.split()[:2] == [run_id, "RUNNING"], done
    assert "Unsent data is kept" in done.err
    done = command("runs", "--tracking-uri", folder, cwd=place, code=0)
    assert done.out.split()[:2] == [run_id, "FAILED"]
    assert done.err == f"{run_id}  400 points sent{KILLED}\n"
    assert command("runs", "--tracking-uri", folder, cwd=place).err == ""
    assert client(folder).get_run(run_id).data.tags["failure"] == "the process was killed"


def test_the_monitor_settles_a_killed_run_by_itself(folder, monkeypatch, capsys):
    """The monitor sets a killed run to FAILED and sends its points before it starts."""
    run_id = killed(folder, *POINTS)
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # which `monitor` sets; restored after the test
    monkeypatch.setattr("os.execv", lambda *_: 0)
    monitor.monitor(str(folder), "127.0.0.1", int(free_port()))
    assert client(folder).get_run(run_id).info.status == "FAILED"
    assert f"{run_id}  400 points sent{KILLED}" in capsys.readouterr().err


def test_another_machines_run_is_left_to_it(folder, command, place):
    """A run of another machine, whose lock cannot be checked here, is not changed by `runs` or the next run; `--sync`
    settles it after a day without activity."""
    run_id = killed(folder, *POINTS)
    change(folder, **ELSEWHERE)
    assert command("runs", "--tracking-uri", folder, cwd=place).out.split()[:2] == [run_id, "RUNNING"]
    finished(folder)
    assert [row["status"] for row in listing(str(folder))] == ["FINISHED", "RUNNING"]
    (line,) = sync(folder)
    assert line.startswith(f"{run_id}  skipped: its process ran on elsewhere")
    (path,) = claimed(folder)
    long_ago = time.time() - 25 * 3600
    for file in (path, metrics_of(folder, run_id)):
        os.utime(file, (long_ago, long_ago))
    assert command("runs", "--tracking-uri", folder, cwd=place).out.count("RUNNING") == 1
    assert list(sync(folder)) == [f"{run_id}  400 points sent{KILLED}"]
    assert client(folder).get_run(run_id).info.status == "FAILED"


def test_a_machine_that_was_started_again_settles_its_runs():
    """A machine is recognized after a reboot by host name and machine id, and in a container by its boot id."""
    mine = _machine()
    assert not is_elsewhere(mine)
    assert is_elsewhere({**mine, "boot": "c" * 36}) is (not mine["machine"])
    assert not is_elsewhere({**mine, "host": "a-container"})
    assert is_elsewhere({**mine, "boot": "c" * 36, "host": "elsewhere"})
    assert is_elsewhere({**mine, "boot": "c" * 36, "machine": "b" * 32})
    assert is_elsewhere({"run": "a" * 32})


def test_a_run_is_in_the_store_only_once_its_claim_outlasts_a_loss_of_power(folder, monkeypatch):
    """The claim's content is synced before the file is renamed, and the rename before the run is created."""
    order = []

    def fsync(descriptor, real=os.fsync):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        order.append("names" if path.is_dir() else path.suffix)
        real(descriptor)

    def make_run(self, *arguments, real=Client.make_run):
        order.append("run")
        return real(self, *arguments)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(Client, "make_run", make_run)
    finished(folder)
    before = order[: order.index("run")]
    assert ".new" in before
    assert "names" in before[before.index(".new") :]


def test_the_tags_of_a_run_are_those_that_mlflow_resolves(folder, monkeypatch):
    """The tags have user, source and MLFLOW_RUN_CONTEXT; the run's name is random whatever the seed."""
    from mlflow.tracking.context.registry import resolve_tags

    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", '{"from": "a queue"}')
    names = []
    for _ in range(2):
        random.seed(7)
        logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
        tags = logger.experiment.get_run(logger.run_id).data.tags
        logger.finalize("success")
        names.append(tags.pop("mlflow.runName"))
        assert random.random() == random.Random(7).random()
        expected = {name: value for name, value in resolve_tags().items() if ".git." not in name}
        assert {name: value for name, value in tags.items() if ".git." not in name} == expected
    assert names[0] != names[1]
    assert all(re.fullmatch("run-[0-9a-f]{4}", name) for name in names)


def test_mlflow_is_imported_after_the_first_point(folder):
    """In an existing store a run opens and logs its parameters without importing MLflow."""
    killed(folder)
    program = (
        "import sys; from deeplightning.tracking import MLflowLogger; before = set(sys.modules)\n"
        "logger = MLflowLogger(tracking_uri=sys.argv[1]); logger.log_hyperparams({'lr': 0.1})\n"
        "logger.log('cfg', {'a': 1}); assert logger.experiment is not None and logger.run_id\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before | {'mlflow'} & set(sys.modules)})\n"
        "logger.log_metrics({'x': 1.0}, 0); logger.finalize('success'); assert 'mlflow' in sys.modules"
    )
    done = python("-c", program, folder)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"deeplightning", "filelock", "psutil", "pynvml", *sys.stdlib_module_names}


def rows(folder, statement):
    with closing(sqlite3.connect(folder / "mlflow.db")) as connection:
        return connection.execute(statement).fetchall()


@pytest.mark.slow
def test_64_runs_started_together_on_no_store_all_record(tmp_path):
    """64 concurrent runs on no store finish with all points in one experiment, and leave no temporary files."""
    folder = tmp_path / "mlruns"
    children = []
    for number in range(64):
        if (child := os.fork()) == 0:
            code = 1
            try:
                logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
                logger.log_hyperparams({"number": number})
                for step in range(20):
                    logger.log_metrics({"x": float(number), "y": float(step)}, step)
                logger.finalize("success")
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * 64
    list(sync(folder))
    assert rows(folder, "SELECT name FROM experiments") == [("Default",)]
    assert rows(folder, "SELECT status, count(*) FROM runs GROUP BY status") == [("FINISHED", 64)]
    assert rows(folder, "SELECT count(*), count(DISTINCT run_uuid) FROM metrics") == [(64 * 40, 64)]
    assert rows(folder, "SELECT count(DISTINCT value) FROM params") == [(64,)]
    assert rows(folder, "PRAGMA integrity_check") == [("ok",)]
    assert claimed(folder) == []
    assert {path.name for path in folder.iterdir()} <= {"mlflow.db", "mlflow.db.lock", "mlflow.db.unsent", "0"}


@pytest.mark.slow
def test_the_monitor_starts_beside_a_random_py(folder, monkeypatch, tmp_path):
    """A file of the working directory does not shadow a module of MLflow."""
    killed(folder, *POINTS)
    started = []
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # restored after the test
    monkeypatch.setattr("os.execv", lambda _, command: started.extend(command))
    monitor.monitor(str(folder), "127.0.0.1", int(free_port()))
    (tmp_path / "random.py").write_text("raise SystemExit(9)")
    assert subprocess.run([*started[:3], "--version"], cwd=tmp_path).returncode == 0
    assert "--app-dir=/" in started[-1]


def test_a_run_that_resumes_while_its_rest_is_sent_is_not_failed(folder, monkeypatch):
    """A command that sends the rest of a killed run does not end the process that has continued the run meanwhile."""
    run_id, send = killed(folder, *POINTS), Delivery.send
    again = MLflowLogger(tracking_uri=folder, system_metrics=False)
    again.resume_run(run_id, [])

    def resumed(delivery, until):
        monkeypatch.setattr(Delivery, "send", send)
        again.log_metrics({"x": 200.0}, 200)
        again.make_run()
        send(delivery, until)

    monkeypatch.setattr(Delivery, "send", resumed)
    assert "FAILED" not in "".join(sync(folder))
    again.finalize("success")
    run = client(folder).get_run(run_id)
    assert (run.info.status, "failure" in run.data.tags) == ("FINISHED", False)


def test_a_text_that_is_not_utf_8_is_escaped(folder):
    """A name of a file may have any bytes; they cost neither points nor status."""
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False, tags={"source": "caf\udce9.py"})
    logger.log_metrics({"x": 1.0}, 0)
    logger.log_tags({"first": "caf\udce9.png"})
    logger.log_hyperparams({"path": "caf\udce9.png"})
    logger.finalize("failed", "no label for caf\udce9.png")
    run = client(folder).get_run(logger.run_id)
    assert (run.info.status, run.data.tags["failure"]) == ("FAILED", r"no label for caf\udce9.png")
    assert run.data.tags["source"] == r"caf\udce9.py"
    assert (run.data.tags["first"], run.data.params["path"]) == (r"caf\udce9.png", r"caf\udce9.png")
    assert history(folder, logger.run_id, "x") == [(0, 1.0)]


@pytest.mark.parametrize("status", [401, 429])
def test_points_wait_for_a_new_token_and_for_a_rate_limit(folder, monkeypatch, status):
    """A run keeps what a server refuses for now, because the token has expired or there were too many requests."""
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_metrics({"x": 0.0}, 0)

    def refuse(*_):
        raise MlflowException("not now", error_code=get_error_code(status))

    with monkeypatch.context() as patched:
        patched.setenv("DEEPLIGHTNING_TRACKING_DRAIN", "0.5")
        patched.setattr(Client, "log_batch", refuse)
        logger.finalize("success")
    assert history(folder, logger.run_id, "x") == []
    logger.log_metrics({"x": 1.0}, 1)
    logger.finalize("success")
    assert history(folder, logger.run_id, "x") == [(0, 0.0), (1, 1.0)]


@pytest.mark.parametrize(("status", "again"), [(413, False), (403, False), (401, True), (429, True), (503, True)])
def test_an_upload_is_repeated_only_if_it_may_pass(status, again):
    """The sender drops a file that a proxy refuses permanently, and sends the data behind it."""
    answer = requests.Response()
    answer.status_code = status
    assert is_transient(requests.HTTPError("refused", response=answer)) is again
    assert is_transient(requests.ConnectionError("gone"))


def test_a_bucket_that_cannot_be_reached_is_tried_again():
    """Network errors of the libraries of S3 and others are no OSErrors."""
    base = type("ConnectionError", (Exception,), {})
    assert is_transient(type("EndpointConnectionError", (base,), {})("Could not connect to the endpoint URL"))
    assert not is_transient(type("S3UploadFailedError", (Exception,), {})("AccessDenied"))


def test_an_upload_may_take_long(folder, monkeypatch):
    """A server answers an upload once its bucket has the file; other answers come soon or never."""
    seen = []
    tracked = Client(locate(folder))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

    def note(*_):
        seen.append(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])

    monkeypatch.setattr(tracked._client, "log_artifact", note)
    tracked.upload("a run", folder / "mlflow.db", None)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "33")  # the user's own
    tracked.upload("a run", folder / "mlflow.db", None)
    assert (seen, os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) == (["600", "33"], "33")


def test_the_claim_of_a_copied_store_is_settled_in_the_copy(folder, tmp_path):
    """The original's metrics stay unread and its position unwritten; each store gets the points."""
    run_id = killed(folder, *POINTS)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert list(sync(copy)) == [f"{run_id}  400 points sent{KILLED}"]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert list(sync(folder)) == [f"{run_id}  400 points sent{KILLED}"]
