"""MLflow's SQLite database spoken to directly: the same rows that MLflow 3.17 would write, without importing it.

MLflow, SQLAlchemy and Alembic cost 1.2 CPU seconds to import and 2 to make a store; this some milliseconds. It is used
where both the database and the installed MLflow are of the one schema that is known here; `open_directly` sees to that,
and a test compares schema and rows with MLflow's own.

`python -m deeplightning.tracking.sqlite > deeplightning/tracking/schema.sql` records the schema anew from MLflow.
"""

import importlib.util
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from deeplightning.private.messages import Sentence, says
from deeplightning.runfolder import make_private, permissions_of
from deeplightning.tracking.mlflow_tags import RUN_NAME, USER, name_of, run_name
from deeplightning.tracking.store import Store, Wait, explain, is_locked, lock_of, locked
from deeplightning.tracking.tracker import (
    DATA_CONTEXT,
    SYSTEM,
    Batch,
    Dataset,
    Experiment,
    Point,
    Run,
    as_logged,
    is_of_test,
    stored,
)

REVISION = "dc11669786a5"
"""The schema that is known here, by Alembic's name: that of MLflow 3.17."""
MIGRATIONS = 67
"""How many migrations MLflow has when this is the last."""
SCHEMA = Path(__file__).with_name("schema.sql")
PATIENCE = 20.0
"""Seconds that a background write waits for a lock before it is put off; as long as MLflow waits."""

_SHORT = 0.2  # seconds that SQLite itself waits for a lock; the rest of the waiting is ours
_T = TypeVar("_T")

# A child that is forked inside a transaction would have a connection that believes to be in it, and closing that would
# roll the parent's transaction back. So no fork happens inside one.
_whole = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_whole.acquire, after_in_parent=_whole.release, after_in_child=_whole.release)


PRUNED = ("trial.state", "pruned")
"""The tag of a trial that its search has given up."""


class Listed(NamedTuple):
    """A run as a list of runs shows it: `started` in milliseconds since 1970, of each metric the last value, and
    whether it is a trial that its search has given up."""

    id: str
    name: str
    status: str
    started: int
    experiment: str
    artifact_uri: str
    metrics: dict[str, float]
    is_pruned: bool = False


class Refused(Exception):
    """The store does not take it, now or later."""


def open_directly(store: Store) -> "Tracker | None":
    """The tracker of an SQLite store, which is made if it is not there; None: it is not of the schema known here.

    Raises:
        SetupError: the store cannot be made, or is locked for too long, read-only or damaged.
    """
    assert store.database is not None
    if not mlflow_is_known():
        return None
    try:
        if is_empty(store.database):
            with locked(store):
                if is_empty(store.database):
                    make(store)
                lock_of(store.database).unlink(missing_ok=True)
        tracker = Tracker(store)
        if tracker.revision() == REVISION:
            return tracker
        tracker.close()
        return None
    except (sqlite3.Error, OSError) as error:
        raise explain(error, store) from error


def mlflow_is_known() -> bool:
    """Whether the installed MLflow reads and writes the schema known here; MLflow is not imported."""
    found = importlib.util.find_spec("mlflow")
    for place in (found.submodule_search_locations or []) if found else []:
        try:
            names = [name for name in os.listdir(Path(place, "store/db_migrations/versions")) if name.endswith(".py")]  # noqa: PTH208
        except OSError:
            continue
        names = [name for name in names if name != "__init__.py"]
        return len(names) == MIGRATIONS and any(name.startswith(f"{REVISION}_") for name in names)
    return False


def recent(database: Path, limit: int) -> list[tuple[str, str, str, int]]:
    """Id, name, status and start (milliseconds since 1970) of the newest runs, for a shell that completes a word: it
    waits for nobody, and writes nothing.

    Raises:
        sqlite3.Error: there is no database, or another process holds it.
    """
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=_SHORT)) as connection:
        return connection.execute(
            "SELECT run_uuid, coalesce(name, ''), status, coalesce(start_time, 0) FROM runs"
            " WHERE lifecycle_stage = 'active' ORDER BY start_time DESC LIMIT ?",
            (limit,),
        ).fetchall()


def is_empty(database: Path) -> bool:
    """Whether there is no database, or nothing in it."""
    return not database.exists() or database.stat().st_size == 0


def make(store: Store) -> None:
    """Makes the database of a store, with the default experiment, in one transaction, unless another process has."""
    assert store.database is not None
    assert store.artifact_root is not None
    make_private(store.database.parent, store.database.parent)
    with permissions_of(store.database.parent):
        store.database.touch()  # SQLite gives its further files the permissions of this one
    with closing(_connect(store.database)) as connection:
        try:
            connection.executescript(f"BEGIN IMMEDIATE;\n{SCHEMA.read_text(encoding='utf-8')}")
        except sqlite3.OperationalError as error:
            if says(error, Sentence.TABLE_EXISTS):  # another process has, all of it
                return
            raise
        now = _now()
        connection.execute(
            "INSERT INTO experiments (experiment_id, name, artifact_location, lifecycle_stage, creation_time,"
            " last_update_time) VALUES (0, 'Default', ?, 'active', ?, ?)",
            (f"{store.artifact_root.as_uri()}/0", now, now),
        )
        connection.execute("COMMIT")


class Tracker:
    """See `deeplightning.tracking.tracker.Tracker`; used by several threads.

    Args:
        store: with a database of the revision known here.
    """

    def __init__(self, store: Store):
        assert store.database is not None
        assert store.artifact_root is not None
        self._database, self._root = store.database, store.artifact_root
        self._main = threading.current_thread()
        self._connection: sqlite3.Connection | None = None

    def make_ready(self) -> None:
        """Each transaction waits for itself."""

    def revision(self) -> str | None:
        """The schema of the database, by Alembic's name; None: it has none."""
        try:
            found = self._find("SELECT version_num FROM alembic_version")
        except sqlite3.OperationalError as error:
            if not says(error, Sentence.NO_TABLE):
                raise
            return None
        return found[0][0] if found else None

    def location_of(self, experiment: str) -> str | None:
        """Where the runs of an experiment have their files; None: there is no such experiment."""
        found = self._find("SELECT artifact_location FROM experiments WHERE name = ?", experiment)
        return found[0][0] if found else None

    def experiment(self, name: str) -> Experiment:
        def make_it(connection: sqlite3.Connection) -> None:
            now = _now()
            number = connection.execute(
                "INSERT INTO experiments (name, lifecycle_stage, creation_time, last_update_time)"
                " VALUES (?, 'active', ?, ?) ON CONFLICT DO NOTHING RETURNING experiment_id",
                (name, now, now),
            ).fetchone()
            if number is not None:  # else another process was first
                location = f"{self._root.as_uri()}/{number[0]}"
                connection.execute(
                    "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (location, number[0])
                )

        asked = "SELECT experiment_id, artifact_location, lifecycle_stage FROM experiments WHERE name = ?"
        if not (found := self._find(asked, name)):
            self._change(make_it)
            found = self._find(asked, name)
        number, location, stage = found[0]
        return Experiment(str(number), location, stage == "active")

    def name_of(self, experiment_id: str) -> str:
        return self._find("SELECT name FROM experiments WHERE experiment_id = ?", int(experiment_id))[0][0]

    def new_id(self) -> str:
        return uuid.uuid4().hex

    def create_run(
        self, experiment: Experiment, name: str | None, tags: dict[str, str], stem: str = "", run_id: str | None = None
    ) -> Run:
        run_id, now = run_id or self.new_id(), _now()
        tags = tags | {RUN_NAME: name or tags.get(RUN_NAME) or (name_of(stem, run_id) if stem else run_name())}
        location = f"{experiment.artifact_location.rstrip('/')}/{run_id}/artifacts"

        def make_it(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id, status,"
                " start_time, source_version, lifecycle_stage, artifact_uri, experiment_id)"
                " VALUES (?, ?, 'UNKNOWN', '', '', ?, 'RUNNING', ?, '', 'active', ?, ?)",
                (run_id, tags[RUN_NAME], tags.get(USER, "unknown"), now, location, int(experiment.id)),
            )
            _set_tags(connection, run_id, tags)

        self._change(make_it)
        return Run(run_id, experiment.id, "RUNNING", now, location, True, {}, tags)

    def run(self, run_id: str) -> Run | None:
        found = self._find(
            "SELECT experiment_id, status, start_time, artifact_uri, lifecycle_stage FROM runs WHERE run_uuid = ?",
            run_id,
        )
        if not found:
            return None
        number, status, started, location, stage = found[0]
        params = dict(self._find("SELECT key, value FROM params WHERE run_uuid = ?", run_id))
        tags = dict(self._find("SELECT key, value FROM tags WHERE run_uuid = ?", run_id))
        return Run(run_id, str(number), status, started, location, stage == "active", params, tags)

    def rename(self, run_id: str, name: str) -> None:
        self._change(lambda connection: _set_tags(connection, run_id, {RUN_NAME: name}))

    def drop_tag(self, run_id: str, name: str) -> None:
        self._change(lambda connection: connection.execute(_DROP_TAG, (run_id, name)))

    def listing(self) -> list[Listed]:
        """All runs that were not deleted, the newest first."""
        metrics: dict[str, dict[str, float]] = {}
        for run_id, name, value, is_nan in self._find("SELECT run_uuid, key, value, is_nan FROM latest_metrics"):
            metrics.setdefault(run_id, {})[name] = as_logged(value, is_nan)
        pruned = {row[0] for row in self._find("SELECT run_uuid FROM tags WHERE key = ? AND value = ?", *PRUNED)}
        rows = self._find(
            "SELECT r.run_uuid, r.name, r.status, r.start_time, e.name, r.artifact_uri FROM runs r"
            " JOIN experiments e ON e.experiment_id = r.experiment_id"
            " WHERE r.lifecycle_stage = 'active' AND e.lifecycle_stage = 'active'"
            " ORDER BY r.start_time DESC, r.run_uuid"
        )
        return [Listed._make([*row, metrics.get(row[0], {}), row[0] in pruned]) for row in rows]

    def delete(self, run_id: str, statuses: Collection[str]) -> bool:
        """Marks a run as deleted, as MLflow does, if its status is one of these; whether it was."""
        marks = ", ".join("?" * len(statuses))
        statement = (
            "UPDATE runs SET lifecycle_stage = 'deleted', deleted_time = ? WHERE run_uuid = ?"
            f" AND lifecycle_stage = 'active' AND status IN ({marks})"
        )
        changed: list[int] = []

        def mark(connection: sqlite3.Connection) -> None:
            changed.append(connection.execute(statement, (_now(), run_id, *statuses)).rowcount)
            if changed[-1]:  # its files go as well
                connection.execute(
                    "UPDATE logged_models SET lifecycle_stage = 'deleted' WHERE source_run_id = ?", (run_id,)
                )

        self._change(mark)
        return changed[-1] > 0

    def history(self, run_id: str, names: Collection[str] | None = None) -> Iterator[Point]:
        rows = self._find("SELECT key, value, timestamp, step, is_nan FROM metrics WHERE run_uuid = ?", run_id)
        for name, value, moment, step, is_nan in rows:
            if name in names if names is not None else not name.startswith(SYSTEM):
                yield Point(name, as_logged(value, is_nan), moment, step)

    def log_batch(self, run_id: str, batch: Batch) -> None:
        def write(connection: sqlite3.Connection) -> None:
            run = connection.execute("SELECT lifecycle_stage FROM runs WHERE run_uuid = ?", (run_id,)).fetchone()
            if run is None or run[0] != "active":
                raise Refused(f"the run {run_id} {'is not there' if run is None else 'was deleted'}")
            _add_params(connection, run_id, batch.params)
            _add_points(connection, run_id, batch.points)
            _set_tags(connection, run_id, batch.tags)
            for dataset in batch.datasets:
                _add_dataset(connection, run_id, dataset)
            if batch.status is not None:
                word, ended = batch.status
                connection.execute(_SET_STATUS, (word, ended, run_id))

        self._change(write)

    def upload(self, run_id: str, path: Path, folder: str | None) -> None:
        raise AssertionError("the artifacts of these runs are on this machine")

    def log_model(self, run_id: str, name: str, path: Path, kind: str) -> None:
        def list_it(connection: sqlite3.Connection) -> None:
            number = connection.execute("SELECT experiment_id FROM runs WHERE run_uuid = ?", (run_id,)).fetchone()[0]
            _drop_models(connection, run_id)
            model, now = f"m-{uuid.uuid4().hex}", _now()
            connection.execute(_ADD_MODEL, (model, number, name, path.as_uri(), now, now, kind, run_id))
            connection.execute(_ADD_OUTPUT, (uuid.uuid4().hex, run_id, model))
            connection.execute(_ADD_MODEL_PARAMS, (model, number, run_id))
            used = connection.execute(_DATASETS_OF, (run_id,)).fetchone() or (None, None, None)
            found = connection.execute(_LATEST_OF, (run_id,)).fetchall()
            judged = [point for point in found if is_of_test(point[0])]
            connection.executemany(_ADD_MODEL_METRIC, [(model, *point, number, run_id, *used) for point in judged])

        self._change(list_it)

    def is_transient(self, error: Exception) -> bool:
        # OperationalError: locked, disk full, read-only for now.
        return isinstance(error, sqlite3.OperationalError | OSError)

    def close(self) -> None:
        with _whole:
            if self._connection is not None:
                self._connection.close()
            self._connection = None  # the next use opens it again

    def _find(self, statement: str, *values: object) -> list[Any]:
        return self._patiently(lambda connection: connection.execute(statement, values).fetchall())

    def _change(self, do: Callable[[sqlite3.Connection], object]) -> None:
        """Does something in one transaction, whole or not at all."""

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            try:
                do(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

        self._patiently(change)

    def _patiently(self, do: Callable[[sqlite3.Connection], _T]) -> _T:
        """Does something once no other process holds the database, within bounds."""
        in_background = threading.current_thread() is not self._main
        waited = Wait(f"the tracking database {self._database}", PATIENCE if in_background else None)
        while True:
            try:
                with _whole:
                    if self._connection is None:
                        self._connection = _connect(self._database)
                    return do(self._connection)
            except sqlite3.OperationalError as error:
                if not is_locked(error) or not waited.again():
                    raise
            except UnicodeDecodeError as error:  # sqlite3 decodes what the database holds, also for its own messages
                raise sqlite3.DatabaseError(f"malformed: it holds a text that is none ({error})") from error


_SET_STATUS = "UPDATE runs SET status = ?, end_time = coalesce(?, end_time) WHERE run_uuid = ?"
_SET_TAG = (
    "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)"
    " ON CONFLICT (key, run_uuid) DO UPDATE SET value = excluded.value"
)
_DROP_TAG = "DELETE FROM tags WHERE run_uuid = ? AND key = ?"
_ADD_PARAM = "INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
_ADD_POINT = (
    "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, ?)"
    " ON CONFLICT DO NOTHING"
)
_ADD_MODEL = (
    "INSERT INTO logged_models (model_id, experiment_id, name, artifact_location, creation_timestamp_ms,"
    " last_updated_timestamp_ms, status, lifecycle_stage, model_type, source_run_id)"
    " VALUES (?, ?, ?, ?, ?, ?, 2, 'active', ?, ?)"  # 2: READY
)
_ADD_OUTPUT = (
    "INSERT INTO inputs (input_uuid, source_type, source_id, destination_type, destination_id)"
    " VALUES (?, 'RUN_OUTPUT', ?, 'MODEL_OUTPUT', ?)"
)
_ADD_MODEL_PARAMS = (
    "INSERT INTO logged_model_params (model_id, experiment_id, param_key, param_value)"
    " SELECT ?, ?, key, value FROM params WHERE run_uuid = ?"
)
_LATEST_OF = "SELECT key, timestamp, step, value FROM latest_metrics WHERE run_uuid = ?"
_DATASETS_OF = (
    "SELECT d.dataset_uuid, d.name, d.digest FROM datasets d JOIN inputs i ON i.source_id = d.dataset_uuid"
    " WHERE i.source_type = 'DATASET' AND i.destination_id = ?"
)
_ADD_MODEL_METRIC = (
    "INSERT INTO logged_model_metrics (model_id, metric_name, metric_timestamp_ms, metric_step, metric_value,"
    " experiment_id, run_id, dataset_uuid, dataset_name, dataset_digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT DO NOTHING"
)
_ADD_DATASET = (
    "INSERT INTO datasets (dataset_uuid, experiment_id, name, digest, dataset_source_type, dataset_source,"
    " dataset_profile) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_ADD_INPUT = (
    "INSERT INTO inputs (input_uuid, source_type, source_id, destination_type, destination_id)"
    " VALUES (?, 'DATASET', ?, 'RUN', ?) ON CONFLICT DO NOTHING"
)
_SET_LATEST = (
    "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (key, run_uuid) DO UPDATE SET"
    " value = excluded.value, timestamp = excluded.timestamp, step = excluded.step, is_nan = excluded.is_nan"
    " WHERE (excluded.step, excluded.timestamp, excluded.value) > (step, timestamp, value)"
)


def _add_params(connection: sqlite3.Connection, run_id: str, params: dict[str, str]) -> None:
    if not params:
        return
    connection.executemany(_ADD_PARAM, [(name, value, run_id) for name, value in params.items()])
    there = dict(connection.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run_id,)))
    if changed := [name for name, value in params.items() if there[name] != value]:
        raise Refused(f"parameters keep their first value: {', '.join(changed[:5])}")


def _add_points(connection: sqlite3.Connection, run_id: str, points: Iterable[Point]) -> None:
    """Adds points, and remembers of each metric the last by step, time and value, as MLflow does."""
    rows: list[tuple[object, ...]] = []
    latest: dict[str, tuple[int, int, float, bool]] = {}
    for name, value, moment, step in points:
        is_nan, number = stored(value)
        rows.append((name, number, moment, run_id, step, is_nan))
        order = (step, moment, number, is_nan)
        if name not in latest or order[:3] > latest[name][:3]:
            latest[name] = order
    connection.executemany(_ADD_POINT, rows)
    connection.executemany(
        _SET_LATEST,
        [(name, number, moment, step, is_nan, run_id) for name, (step, moment, number, is_nan) in latest.items()],
    )


def _add_dataset(connection: sqlite3.Connection, run_id: str, dataset: Dataset) -> None:
    """Adds a dataset to the experiment, if it is not there, and the run's use of it."""
    number = connection.execute("SELECT experiment_id FROM runs WHERE run_uuid = ?", (run_id,)).fetchone()[0]
    asked = "SELECT dataset_uuid FROM datasets WHERE experiment_id = ? AND name = ? AND digest = ?"
    if (found := connection.execute(asked, (number, dataset.name, dataset.digest)).fetchone()) is None:
        found = (uuid.uuid4().hex,)
        connection.execute(_ADD_DATASET, (*found, number, *dataset))
    used = uuid.uuid4().hex
    if connection.execute(_ADD_INPUT, (used, *found, run_id)).rowcount:
        connection.execute("INSERT INTO input_tags (input_uuid, name, value) VALUES (?, ?, ?)", (used, *DATA_CONTEXT))


def _drop_models(connection: sqlite3.Connection, run_id: str) -> None:
    """Takes the models that a run has made off the list: their files are about to be replaced."""
    of_run = "SELECT model_id FROM logged_models WHERE source_run_id = ?"
    connection.execute(
        f"DELETE FROM inputs WHERE source_type = 'RUN_OUTPUT' AND destination_id IN ({of_run})", (run_id,)
    )
    connection.execute(f"DELETE FROM logged_model_params WHERE model_id IN ({of_run})", (run_id,))
    connection.execute(f"DELETE FROM logged_model_metrics WHERE model_id IN ({of_run})", (run_id,))
    connection.execute("UPDATE logged_models SET lifecycle_stage = 'deleted' WHERE source_run_id = ?", (run_id,))


def _set_tags(connection: sqlite3.Connection, run_id: str, tags: dict[str, str]) -> None:
    connection.executemany(_SET_TAG, [(name, value, run_id) for name, value in tags.items()])
    if RUN_NAME in tags:
        connection.execute("UPDATE runs SET name = ? WHERE run_uuid = ?", (tags[RUN_NAME], run_id))


def _connect(database: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(database, timeout=_SHORT, isolation_level=None, check_same_thread=False)
    # A commit lasts through a loss of power only when its folder is synced behind the removal of SQLite's own journal:
    # points that the store has taken are in no checkpoint, and nobody would log them again.
    connection.execute("PRAGMA synchronous = EXTRA")
    return connection


def _now() -> int:
    return time.time_ns() // 1_000_000


def recorded(database: Path) -> str:
    """The schema of a database that MLflow has made, and the rows in it that no machine or moment changes, as SQL."""
    with closing(_connect(database)) as connection:
        # Tables first; the migrations make some indices in no fixed order.
        objects = connection.execute(
            "SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY type = 'table' DESC, type, name"
        ).fetchall()
        version = connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
        spaces = connection.execute("SELECT name, description FROM workspaces").fetchall()
    lines = [f"{normal(text)};" for (text,) in objects]
    lines.append(f"INSERT INTO alembic_version (version_num) VALUES ('{version}');")
    lines += [f"INSERT INTO workspaces (name, description) VALUES ('{name}', '{text}');" for name, text in spaces]
    return "\n".join(
        ["-- What the migrations of MLflow leave; made by `python -m deeplightning.tracking.sqlite`.", *lines]
    )


def normal(statement: str) -> str:
    """A statement without blanks at the ends of its lines. The lines stay: SQLAlchemy reads constraints by them."""
    return "\n".join(line.rstrip() for line in statement.splitlines())


def _record() -> None:
    """Prints the schema that the installed MLflow makes."""
    import tempfile

    from deeplightning.tracking.store import quiet_mlflow

    quiet_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    with tempfile.TemporaryDirectory() as folder:
        SqlAlchemyStore(f"sqlite:///{folder}/mlflow.db", Path(folder).as_uri())
        print(recorded(Path(folder, "mlflow.db")))  # noqa: T201


if __name__ == "__main__":
    _record()
