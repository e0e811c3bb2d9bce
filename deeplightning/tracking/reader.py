"""Read a tracking store: an SQLite file directly, any other store with MLflow's client.

Importing MLflow costs 1.2 CPU seconds, which commands that only read runs can save.
"""

import importlib.util
import os
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.faults import SetupError
from deeplightning.runfolder import make_private
from deeplightning.tracking.entities import Experiment, Run, as_logged
from deeplightning.tracking.store import Store, Wait, explained, is_locked, revision_of

if TYPE_CHECKING:
    from deeplightning.tracking.client import Client

_RUN = (
    "SELECT r.run_uuid, r.experiment_id, r.status, r.start_time, r.artifact_uri, r.lifecycle_stage, e.name FROM runs r"
    " JOIN experiments e ON e.experiment_id = r.experiment_id"
)
_ACTIVE_RUNS = (
    f"{_RUN} WHERE r.lifecycle_stage = 'active' AND e.lifecycle_stage = 'active' ORDER BY r.start_time DESC, r.run_uuid"
)


def open_reader(store: Store) -> "DatabaseReader | Client":
    """Return a reader of a store; create no store. The reader raises the store's own errors, see `explain`.

    Raises:
        SetupError: the store cannot be read.
    """
    if store.database is not None:
        reader = DatabaseReader(store.database)
        with explained(store):
            if reader.is_readable():
                return reader
    return client_of(store)


def client_of(store: Store) -> "Client":
    """Return MLflow's client on a store, which can also write; import MLflow."""
    from deeplightning.tracking.client import Client

    return Client(store)


def find_experiment(store: Store, name: str) -> Experiment | None:
    """Return an experiment of a local store. `Default` exists even before the database, which MLflow creates with it;
    in this case, an empty file tells other processes that the store is about to be created."""
    if (found := open_reader(store).experiment(name)) is not None or name != "Default":
        return found
    assert store.database is not None
    assert store.artifact_root is not None
    if revision_of(store.database) is not None:
        return None
    make_private(store.database.parent, store.database.parent)
    store.database.touch()
    return Experiment("0", f"{store.artifact_root.as_uri()}/0", True)


class DatabaseReader:
    """Reads an SQLite database with the tables and columns of MLflow 3.10 to 3.18.

    Args:
        database: a missing or empty file has no runs.
        seconds: maximum wait for a process that has locked the database; None: the user's limit.
    """

    def __init__(self, database: Path, seconds: float | None = None):
        self._database, self._seconds = database, seconds

    def is_readable(self) -> bool:
        """Return whether the database has the expected tables and columns; raise SQLite's error if it is unreadable."""
        try:
            self._query(f"{_ACTIVE_RUNS} LIMIT 0")
        except sqlite3.OperationalError as error:
            if is_locked(error) or "no such" not in str(error):
                raise
            return False  # MLflow has renamed a table or column
        return True

    def run(self, run_id: str) -> Run | None:
        """Return a run, even a deleted one, without its metrics; None if it does not exist."""
        found = self._query(f"{_RUN} WHERE r.run_uuid = ?", run_id)
        params = dict(self._query("SELECT key, value FROM params WHERE run_uuid = ?", run_id))
        tags = dict(self._query("SELECT key, value FROM tags WHERE run_uuid = ?", run_id))
        return _to_run(found[0], params, tags, {}) if found else None

    def experiment(self, name: str) -> Experiment | None:
        """Return the experiment with this name, or None."""
        query = "SELECT experiment_id, artifact_location, lifecycle_stage FROM experiments WHERE name = ?"
        found = self._query(query, name)
        return Experiment(str(found[0][0]), found[0][1], found[0][2] == "active") if found else None

    def listing(self) -> list[Run]:
        """Return all runs that were not deleted, newest first, without their parameters."""
        metrics, tags = defaultdict[str, dict[str, float]](dict), defaultdict[str, dict[str, str]](dict)
        for run_id, name, value, is_nan in self._query("SELECT run_uuid, key, value, is_nan FROM latest_metrics"):
            metrics[run_id][name] = as_logged(value, is_nan)
        for run_id, name, value in self._query("SELECT run_uuid, key, value FROM tags"):
            tags[run_id][name] = value
        return [_to_run(row, {}, tags[row[0]], metrics[row[0]]) for row in self._query(_ACTIVE_RUNS)]

    def _query(self, statement: str, *values: object) -> list[Any]:
        """Run a query; wait for a limited time for a process that has locked the database."""
        waited = Wait(f"the tracking database {self._database}", self._seconds)
        # An empty database is being created: its tables may exist a moment later.
        if not self._database.exists() or self._database.stat().st_size == 0:
            return []
        while True:
            try:
                # Not read-only: SQLite may have to roll back the transaction of a killed process.
                address = f"{self._database.absolute().as_uri()}?mode=rw"
                with closing(sqlite3.connect(address, uri=True, timeout=0.2)) as connection:
                    return connection.execute(statement, values).fetchall()
            except sqlite3.OperationalError as error:
                query = "SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"
                if "no such table" in str(error) and not self._query(query):
                    return []
                if not is_locked(error) or not waited.again():
                    raise
            except UnicodeDecodeError as error:  # sqlite3 decodes the texts of the database, even in its own messages
                raise sqlite3.DatabaseError(f"malformed: it contains text that is not UTF-8 ({error})") from error


def _to_run(row: Sequence[Any], params: dict[str, str], tags: dict[str, str], metrics: dict[str, float]) -> Run:
    run_id, number, status, started, location, stage, experiment = row
    return Run(run_id, str(number), status, started, location, stage == "active", params, tags, experiment, metrics)


def raise_if_newer(store: Store) -> None:
    """Check, without importing MLflow, that the installed version has the schema of a database.

    Raises:
        SetupError: a newer MLflow has migrated the database, or it cannot be read.
    """
    assert store.database is not None
    with explained(store):
        revision = revision_of(store.database)
    found = importlib.util.find_spec("mlflow")
    for place in (found.submodule_search_locations or []) if found and revision else []:
        names = os.listdir(Path(place, "store/db_migrations/versions"))  # noqa: PTH208
        if not any(name.startswith(f"{revision}_") for name in names):
            raise SetupError(
                f"{store.database} was made by a newer version of MLflow: its schema {revision} is unknown to the "
                "installed one. Update MLflow (pip install -U mlflow), or set another logger.params.tracking_uri."
            )
