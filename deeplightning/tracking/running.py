"""The running runs of a store, with what a live table of them shows: the newest point of each metric, some tags
and parameters, and the last points of one metric, for a speed.

An SQLite database of the known schema is read without a lock that a run would wait for; other stores are asked through
MLflow's client. Nothing is written.
"""

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deeplightning.faults import SetupError
from deeplightning.tracking.attach import attach
from deeplightning.tracking.names import EPOCH_STEPS, STEP_SAMPLES, STEPS, TRAINING_BEGAN
from deeplightning.tracking.sqlite import PRUNED, REVISION, mlflow_is_known
from deeplightning.tracking.store import Store
from deeplightning.tracking.tracker import Point, as_logged

TAGS = (STEPS, EPOCH_STEPS, STEP_SAMPLES, TRAINING_BEGAN, PRUNED[0])
PARAMS = ("train/num_epochs", "train/checkpoint/monitor", "train/early_stop/metric")

PATIENCE = 2.0
"""Seconds that a look at the database waits for a process that writes."""
MOST_ENDED = 100
"""Runs that have ended since the first look, of which a look still asks."""


@dataclass(frozen=True)
class Running:
    """A run that is running, or was at an earlier look.

    Attributes:
        status: RUNNING, FINISHED, FAILED, KILLED or PRUNED.
        started: milliseconds since 1970.
        tags, params: those of `TAGS` and `PARAMS` that it has.
        newest: the newest point of each metric, those of the machine's load too.
    """

    id: str
    name: str
    experiment: str
    status: str
    started: int
    tags: Mapping[str, str]
    params: Mapping[str, str]
    newest: Sequence[Point]


class Reader(Protocol):
    """Looks at the runs of a store."""

    def runs(self, also: Collection[str] = ()) -> list[Running]:
        """The runs that are running, the oldest first.

        Args:
            also: ids of runs that are wanted whatever their status is; a deleted one is left out.

        Raises:
            Exception: the store's own, where it cannot be asked.
        """
        ...

    def points(self, run_id: str, name: str, most: int) -> list[Point]:
        """The points of a metric with the highest steps, by step."""
        ...


def reader_of(store: Store) -> Reader:
    """The reader of a store.

    Raises:
        SetupError: there is no store.
        Exception: the store's own, where it cannot be asked.
    """
    if store.database is None:
        return _ByMLflow(store)
    require(store)
    with closing(_connect(store.database)) as connection:
        is_known = mlflow_is_known() and _revision(connection) == REVISION
    return _Directly(store) if is_known else _ByMLflow(store)


def require(store: Store) -> None:
    """
    Raises:
        SetupError: the SQLite database of a store is not there; MLflow would make one.
    """
    if store.database is not None and not store.database.exists():
        raise SetupError(f"{store.shown}: there are no runs; the first `bash train.sh` makes the store")


class _Directly:
    """By SQL. The database is opened for each look: one that was removed or replaced is noticed."""

    def __init__(self, store: Store):
        self._store = store

    def runs(self, also: Collection[str] = ()) -> list[Running]:
        require(self._store)
        also = [*also][-MOST_ENDED:]
        assert self._store.database is not None
        with closing(_connect(self._store.database)) as connection:
            connection.execute("BEGIN")  # what is read belongs together
            rows = connection.execute(
                "SELECT r.run_uuid, coalesce(r.name, ''), e.name, r.status, coalesce(r.start_time, 0) FROM runs r"
                " JOIN experiments e ON e.experiment_id = r.experiment_id"
                " WHERE r.lifecycle_stage = 'active' AND e.lifecycle_stage = 'active'"
                f" AND (r.status = 'RUNNING' OR r.run_uuid IN ({_marks(also)})) ORDER BY r.start_time, r.run_uuid",
                also,
            ).fetchall()
            ids = [row[0] for row in rows]
            tags = _values(connection, "tags", ids, TAGS)
            params = _values(connection, "params", ids, PARAMS)
            newest: dict[str, list[Point]] = {}
            for run_id, name, value, moment, step, is_nan in connection.execute(
                "SELECT run_uuid, key, value, timestamp, step, is_nan FROM latest_metrics"
                f" WHERE run_uuid IN ({_marks(ids)})",
                ids,
            ):
                point = Point(name, as_logged(value, is_nan), moment, step)
                newest.setdefault(run_id, []).append(point)
        return [
            Running(run_id, name, of, _status(status, tags[run_id]), started, tags[run_id], params[run_id], points)
            for run_id, name, of, status, started in rows
            for points in [newest.get(run_id, [])]
        ]

    def points(self, run_id: str, name: str, most: int) -> list[Point]:
        require(self._store)
        assert self._store.database is not None
        with closing(_connect(self._store.database)) as connection:
            rows = connection.execute(
                "SELECT key, value, timestamp, step, is_nan FROM metrics WHERE run_uuid = ? AND key = ?"
                " ORDER BY step DESC, timestamp DESC LIMIT ?",
                (run_id, name, most),
            ).fetchall()
        return [Point(key, as_logged(value, nan), moment, step) for key, value, moment, step, nan in rows][::-1]


class _ByMLflow:
    """By MLflow's client, of any store."""

    def __init__(self, store: Store):
        from mlflow.tracking import MlflowClient

        self._store, self._client = store, MlflowClient(attach(store))

    def runs(self, also: Collection[str] = ()) -> list[Running]:
        require(self._store)
        experiments = {e.experiment_id: e.name for e in self._client.search_experiments()}
        found = {run.info.run_id: run for run in self._running([*experiments])}
        for run_id in [*also][-MOST_ENDED:]:
            if run_id not in found and (run := self._run(run_id)) is not None:
                found[run_id] = run
        rows = []
        for run in found.values():
            if (of := experiments.get(run.info.experiment_id)) is None:
                continue
            tags = {name: run.data.tags[name] for name in TAGS if name in run.data.tags}
            params = {name: run.data.params[name] for name in PARAMS if name in run.data.params}
            newest = [Point(m.key, as_logged(m.value), m.timestamp, m.step) for m in run.data.to_proto().metrics]
            status = _status(run.info.status, tags)
            first = (run.info.run_id, run.info.run_name or "", of, status, run.info.start_time or 0)
            rows.append(Running(*first, tags, params, newest))
        return sorted(rows, key=lambda row: (row.started, row.id))

    def points(self, run_id: str, name: str, most: int) -> list[Point]:
        found = self._client.get_metric_history(run_id, name)
        points = [Point(m.key, as_logged(m.value), m.timestamp, m.step) for m in found]
        return sorted(points, key=lambda point: (point.step, point.time))[-most:]

    def _running(self, experiments: list[str]) -> Iterator[Any]:
        token: str | None = None
        while experiments:
            page = self._client.search_runs(experiments, "attributes.status = 'RUNNING'", page_token=token)
            yield from page
            token = page.token
            if not token:
                break

    def _run(self, run_id: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None


def _status(status: str, tags: Mapping[str, str]) -> str:
    return "PRUNED" if status == "KILLED" and tags.get(PRUNED[0]) == PRUNED[1] else status


def _connect(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=PATIENCE, isolation_level=None)


def _revision(connection: sqlite3.Connection) -> str | None:
    try:
        found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.OperationalError:  # no such table, or locked: MLflow settles it
        return None
    return found[0] if found else None


def _values(
    connection: sqlite3.Connection, table: str, ids: Sequence[str], names: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Some tags or parameters of runs."""
    found: dict[str, dict[str, str]] = {run_id: {} for run_id in ids}
    for run_id, name, value in connection.execute(
        f"SELECT run_uuid, key, value FROM {table} WHERE run_uuid IN ({_marks(ids)}) AND key IN ({_marks(names)})",
        (*ids, *names),
    ):
        found[run_id][name] = value
    return found


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))
