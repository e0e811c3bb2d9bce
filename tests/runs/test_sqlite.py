"""MLflow's database written directly: row for row what MLflow itself writes, and read by it."""

import math
import os
import random
import sqlite3
import subprocess
import sys
import time
import zipfile
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
import pytest
from mlflow.entities import Metric, Param, RunTag
from mlflow.store.db.utils import _get_latest_schema_revision
from mlflow.tracking import MlflowClient

from deeplightning.faults import SetupError
from deeplightning.tracking import MLflowLogger, sqlite
from deeplightning.tracking.client import Client
from deeplightning.tracking.mlflow_store import attach
from deeplightning.tracking.open import open_tracker
from deeplightning.tracking.store import locate, quiet_mlflow
from deeplightning.tracking.tracker import Batch, Dataset, Point

ROOT = Path(__file__).parents[2]
POINTS = [
    Point("x", 1.0, 1000, 0),
    Point("x", 3.0, 1000, 2),
    Point("x", 2.0, 2000, 2),
    Point("x", 9.0, 3000, 1),
    Point("x", 9.0, 3000, 1),  # twice
    Point("nan", 5.0, 1000, 0),
    Point("nan", math.nan, 2000, 1),
    Point("nan", math.nan, 2000, 1),
    Point("tie", -1.0, 1000, 0),
    Point("tie", math.nan, 1000, 0),
    Point("up", math.inf, 1000, 0),
    Point("down", -math.inf, 1000, 0),
    Point("system/cpu", 7.0, 1000, 0),
    Point("words of all kinds/a.b-c é", 0.1, 1000, 0),
]
LISTED = "model_id IN (SELECT model_id FROM logged_models WHERE lifecycle_stage = 'active')"
MORE = [Point("x", 4.0, 500, 2), Point("x", 5.0, 500, 3), Point("nan", 1.0, 1, 1), Point("tie", 2.0, 1000, 0)]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A database that MLflow's own migrations have made, its artifacts beside it."""
    quiet_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = tmp_path_factory.mktemp("made")
    SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", folder.as_uri())
    return folder / "mlflow.db"


def rows(database, statement, *values):
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(statement, values).fetchall()


def lines(statement):
    """The lines of SQL in an order of ours: MLflow's migrations write a table's constraints in any order."""
    return sorted(line.strip().rstrip(",") for line in statement.splitlines())


def test_the_recorded_schema_is_that_of_the_installed_mlflow(made):
    """What ships is what MLflow's migrations leave; after an update of MLflow it is recorded anew, and compared."""
    assert lines(sqlite.recorded(made)) == lines(sqlite.SCHEMA.read_text())
    assert _get_latest_schema_revision() == sqlite.REVISION
    assert sqlite.mlflow_is_known()


def test_a_store_made_directly_is_one_made_by_mlflow(made, tmp_path):
    """The same tables, indices, triggers and rows, pragmas included; only places and times differ."""
    store = locate(tmp_path / "odd #1?x=%20é")
    sqlite.make(store)
    every = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    ours, theirs = ([(*row[:3], lines(row[3] or "")) for row in rows(d, every)] for d in (store.database, made))
    assert ours == theirs
    for table in sorted(row[1] for row in theirs if row[0] == "table"):
        here, there = (rows(database, f'SELECT * FROM "{table}"') for database in (store.database, made))
        if table == "experiments":
            (here,), (there,) = here, there
            assert here[:2] + here[3:4] + here[6:] == there[:2] + there[3:4] + there[6:]
            assert here[2] == f"{store.artifact_root.as_uri()}/0"
            assert here[4] == here[5] <= time.time() * 1000
        else:
            assert here == there
    for pragma in ("journal_mode", "page_size", "encoding", "auto_vacuum", "user_version"):
        assert rows(store.database, f"PRAGMA {pragma}") == rows(made, f"PRAGMA {pragma}")


def test_what_is_written_directly_is_what_mlflow_writes(tmp_path):
    """The same calls through both leave the same rows, but for the ids and the times of starting."""
    found = []
    for number, way in enumerate((sqlite.Tracker, Client)):
        store = locate(tmp_path / str(number))
        sqlite.make(store)
        tracker = way(store)
        experiment = tracker.experiment("mine")
        assert tracker.experiment("mine") == experiment
        assert experiment.artifact_location == f"{store.artifact_root.as_uri()}/1"
        run = tracker.create_run(experiment, "named", {"mlflow.user": "me", "mlflow.source.name": "x", "a": "b"})
        first = Batch(points=POINTS, params={"lr": "0.1"}, tags={"a": "c", "failure": "it"}, status=("KILLED", 7))
        used = Batch(datasets=[Dataset("Digits", "0a", "local", '{"uri": "/data"}', '{"files": 3}')])
        judged = Batch(points=[Point("test_acc", 0.5, 1000, 0), Point("test_acc", 0.75, 2000, 0)])
        second = Batch(points=MORE, params={"lr": "0.1", "b": ""})
        for batch in (first, second, used, used, judged, Batch(status=("RUNNING", None))):
            tracker.log_batch(run.id, batch)
        model = Path(unquote(urlsplit(run.artifact_uri).path)) / "model"
        model.mkdir(parents=True)
        (model / "MLmodel").write_text("flavors: {}")
        for _ in range(2):
            tracker.log_model(run.id, "net", model, "image_classification")
        tracker.drop_tag(run.id, "failure")
        tracker.rename(run.id, "other")
        with pytest.raises(Exception, match="param") as caught:
            tracker.log_batch(run.id, Batch(params={"lr": "0.2"}, tags={"never": "there"}))
        assert not tracker.is_transient(caught.value)
        seen = tracker.run(run.id)
        assert tracker.run("f" * 32) is None
        assert (seen.id, seen.artifact_uri) == (run.id, run.artifact_uri)
        assert run.artifact_uri == f"{experiment.artifact_location}/{run.id}/artifacts"
        assert tracker.name_of(seen.experiment_id) == "mine"
        told = sorted(map(str, tracker.history(run.id))), sorted(map(str, tracker.history(run.id, {"x"})))
        content = [
            rows(store.database, f"SELECT {columns} FROM {table} ORDER BY {columns}")
            for table, columns in (
                ("metrics", "key, value, timestamp, step, is_nan"),
                ("latest_metrics", "key, value, timestamp, step, is_nan"),
                ("params", "key, value"),
                ("tags", "key, value"),
                (
                    "runs",
                    "name, source_type, source_name, entry_point_name, user_id, status, end_time, source_version,"
                    " lifecycle_stage, experiment_id, deleted_time",
                ),
                ("experiments", "experiment_id, name, lifecycle_stage, workspace"),
                ("datasets", "experiment_id, name, digest, dataset_source_type, dataset_source, dataset_profile"),
                ("input_tags", "name, value"),
                ("inputs WHERE source_type = 'DATASET'", "source_type, destination_type, step"),
                ("logged_models WHERE lifecycle_stage = 'active'", "name, status, model_type, experiment_id"),
                (f"logged_model_params WHERE {LISTED}", "param_key, param_value"),
                (f"logged_model_metrics WHERE {LISTED}", "metric_name, metric_timestamp_ms, metric_step, metric_value"),
            )
        ]
        tracker.close()
        found.append((content, told, seen._replace(id="", started=0, artifact_uri="")))
    assert found[0] == found[1]


def test_mlflow_reads_what_is_written_directly(tmp_path):
    """Status, parameters, every point, the latest ones, tags, name and artifacts, by client and by search."""
    logger = MLflowLogger("mine", tmp_path, run_name="first", tags={"note": "x"}, system_metrics=False)
    logger.log_hyperparams({"lr": 0.1})
    for step in range(100):
        logger.log_metrics({"loss": 1.0 / (step + 1)}, step)
    logger.log("note", {"a": 1})
    logger.finalize("success")
    client = MlflowClient(attach(locate(tmp_path)))
    run = client.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name, run.data.params) == ("FINISHED", "first", {"lr": "0.1"})
    assert (run.data.metrics, run.data.tags["note"]) == ({"loss": 0.01}, "x")
    history = client.get_metric_history(logger.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(step, 1.0 / (step + 1)) for step in range(100)]
    assert [file.path for file in client.list_artifacts(logger.run_id)] == ["note.yaml"]
    mlflow.set_tracking_uri(attach(locate(tmp_path)))
    try:
        table = mlflow.search_runs(experiment_names=["mine"], filter_string="metrics.loss < 0.02 and params.lr = '0.1'")
    finally:
        mlflow.set_tracking_uri(None)
    assert list(table.run_id) == [logger.run_id]


def test_mlflow_writes_beside_it(tmp_path):
    """Into the same store and the same run, while ours is open; ours reads what it wrote, and goes on with its runs."""
    logger = MLflowLogger(tracking_uri=tmp_path, system_metrics=False)
    logger.log_metrics({"x": 1.0}, 0)
    client = logger.experiment
    assert isinstance(client, MlflowClient)
    batch = {"metrics": [Metric("x", 2.0, 1, 1)], "params": [Param("p", "1")], "tags": [RunTag("t", "1")]}
    client.log_batch(logger.run_id, **batch)
    logger.log_metrics({"x": 3.0}, 2)
    logger.finalize("success")
    assert sorted(point.step for point in client.get_metric_history(logger.run_id, "x")) == [0, 1, 2]
    theirs = client.create_run(client.create_experiment("theirs")).info.run_id
    client.log_batch(theirs, **batch)
    ours = MLflowLogger("theirs", tmp_path, system_metrics=False)
    ours.go_on(theirs, [])
    ours.log_hyperparams({"p": 2, "q": 3})
    for step in range(3):
        ours.log_metrics({"x": float(step)}, step)
    ours.finalize("success")
    assert client.get_run(theirs).data.params == {"p": "1", "q": "3"}
    points = sorted((point.step, point.value) for point in client.get_metric_history(theirs, "x"))
    assert points == [(0, 0.0), (1, 2.0), (2, 2.0)]


def test_the_tags_of_a_run_are_those_that_mlflow_resolves(tmp_path, monkeypatch):
    """User, source, what MLFLOW_RUN_CONTEXT adds; the name is readable, and no seed makes two alike."""
    from mlflow.tracking.context.registry import resolve_tags

    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", '{"from": "a queue"}')
    names = []
    for _ in range(2):
        random.seed(7)
        logger = MLflowLogger(tracking_uri=tmp_path, system_metrics=False)
        tags = logger.experiment.get_run(logger.run_id).data.tags
        logger.finalize("success")
        names.append(tags.pop("mlflow.runName"))
        assert random.random() == random.Random(7).random()
        expected = {name: value for name, value in resolve_tags().items() if ".git." not in name}
        assert {name: value for name, value in tags.items() if ".git." not in name} == expected
    assert names[0] != names[1]
    assert all(len(name.split("-")) == 3 for name in names)


@pytest.mark.slow
def test_tracking_imports_no_mlflow():
    """A run on a directory, from the first word to the last, needs neither MLflow nor what it stands on."""
    program = (
        "import sys, tempfile; from deeplightning.tracking import MLflowLogger; before = set(sys.modules)\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    logger = MLflowLogger(tracking_uri=folder)\n"
        "    logger.log_hyperparams({'lr': 0.1}); logger.log_metrics({'x': 1.0}, 0); logger.log('cfg', {'a': 1})\n"
        "    assert logger.experiment is not None; logger.finalize('success')\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before | {'mlflow'} & set(sys.modules)})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"deeplightning", "filelock", "psutil", "pynvml", *sys.stdlib_module_names}


def test_another_schema_is_left_to_mlflow(tmp_path, monkeypatch):
    """A database of another revision, or another MLflow, goes through MLflow's client, which migrates it."""
    store = locate(tmp_path)
    sqlite.make(store)
    assert isinstance(open_tracker(store), sqlite.Tracker)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "MIGRATIONS", 1)
        assert isinstance(open_tracker(store), Client)
    with closing(sqlite3.connect(store.database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'another'")
        connection.commit()
    assert isinstance(open_tracker(store), Client)


def test_files_elsewhere_are_left_to_mlflow(tmp_path):
    """An experiment whose artifacts are not on this machine needs MLflow to bring them there."""
    store = locate(tmp_path)
    sqlite.make(store)
    client = MlflowClient(attach(store))
    run = client.create_run(client.create_experiment("away", artifact_location="s3://bucket/x")).info.run_id
    assert isinstance(open_tracker(store, experiment="away"), Client)
    assert isinstance(open_tracker(store, run), Client)
    assert isinstance(open_tracker(store, experiment="Default"), sqlite.Tracker)


def test_a_foreign_database_is_no_store_of_ours(tmp_path):
    """A database with other tables is left to MLflow as well: nothing is made in it by us."""
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute("CREATE TABLE mine (x)")
    assert isinstance(open_tracker(locate(tmp_path)), Client)
    assert rows(tmp_path / "mlflow.db", "SELECT name FROM sqlite_master") == [("mine",)]


def test_the_schema_is_part_of_the_package(tmp_path):
    """The SQL text travels with the code."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert zipfile.ZipFile(wheel).read("deeplightning/tracking/schema.sql") == sqlite.SCHEMA.read_bytes()


def test_an_ended_run_holds_nothing_open(tmp_path):
    """The database is let go of with the end of a stage, and taken up again by the next."""
    logger = MLflowLogger(tracking_uri=tmp_path, system_metrics=False)

    def held():
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sorted(link.name for link in links if link.is_relative_to(tmp_path))

    for step in range(2):
        logger.log_metrics({"x": 1.0}, step)
        assert held() != []
        logger.finalize("success")
        assert held() == []


def test_a_locked_database_is_a_note(tmp_path, monkeypatch):
    """It is waited for, then said, with exit code 3; what another process writes meanwhile is whole."""
    monkeypatch.setenv("DEEPLIGHTNING_TRACKING_WAIT", "0.5")
    sqlite.make(locate(tmp_path))
    with closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        start = time.monotonic()
        with pytest.raises(SetupError, match=r"has been locked by another process for 0\.5 seconds") as caught:
            MLflowLogger(tracking_uri=tmp_path).log_metrics({"x": 1}, 0)
        assert time.monotonic() - start < 5
    assert caught.value.exit_code == 3


def one(folder, number):
    """What one of the 64 does."""
    logger = MLflowLogger(tracking_uri=folder, system_metrics=False)
    logger.log_hyperparams({"number": number})
    for step in range(20):
        logger.log_metrics({"x": float(number), "y": float(step)}, step)
    logger.finalize("success")


@pytest.mark.slow
def test_64_runs_started_together_on_no_store_all_record(tmp_path, capsys):
    """Five times over: 64 finished runs with all their points, one Default experiment, nothing left lying about."""
    for repeat in range(5):
        folder = tmp_path / str(repeat)
        begun = time.monotonic()
        children = []
        for number in range(64):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    one(folder, number)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        with capsys.disabled():
            print(f"\n    64 runs on no store: {time.monotonic() - begun:.1f} s", end="", flush=True)
        assert codes == [0] * 64
        database = folder / "mlflow.db"
        assert rows(database, "SELECT name FROM experiments") == [("Default",)]
        assert rows(database, "SELECT status, count(*) FROM runs GROUP BY status") == [("FINISHED", 64)]
        assert rows(database, "SELECT count(*), count(DISTINCT run_uuid) FROM metrics") == [(64 * 40, 64)]
        assert rows(database, "SELECT count(DISTINCT value) FROM params") == [(64,)]
        assert rows(database, "PRAGMA integrity_check") == [("ok",)]
        assert {path.name for path in folder.iterdir()} == {"mlflow.db", "0"}
