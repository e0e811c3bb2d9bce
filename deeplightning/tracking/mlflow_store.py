"""Open our stores with MLflow's client: an SQLite database is created or migrated on first use, under a lock."""

import atexit
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.faults import SetupError
from deeplightning.private.mlflow import add_run, latest_schema, register_store, upgrade_database
from deeplightning.runfolder import sync_names
from deeplightning.tracking.entities import Run
from deeplightning.tracking.store import DATABASE, Store, explained, lock_of, locked, quiet_mlflow, revision_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("deeplightning.tracking")

# Held during imports and transactions: a process forked meanwhile would have a module that is never complete, or a
# connection that rolls the transaction back.
NO_FORK = threading.RLock()
os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=NO_FORK.release)

_attached: dict[str, Store] = {}
_stores: "dict[str, Lazy]" = {}


def attach(store: Store) -> str:
    """Prepare this process for the store and return the URI for `MlflowClient`. Nothing is written yet.

    MLflow's client would create an SQLite store at once, without a lock, with its artifacts in `mlruns` under the
    working directory. So our own store is registered, which opens lazily, under a lock, with the right folder.
    """
    quiet_mlflow()
    uri = uri_of(store)
    if store.address is not None:
        return uri
    if store.database is None:
        assert store.folder is not None
        # MLflow 3.17 refuses its old file stores without this variable, which its error message names.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        log.warning(
            "%s is a file store of an older MLflow. It works, but slowly; to migrate it: "
            "mlflow migrate-filestore --source '%s' --target 'sqlite:///%s'",
            *(store.shown, store.folder, store.folder / DATABASE),
        )
        return uri
    _attached[uri] = store
    if uri in _stores and not (store.database.exists() and store.database.stat().st_size):
        _stores[uri]._made = None  # the user has removed the store since this process opened it
    register_store("sqlite", _lazy_store)
    return uri


def open_client(store: Store) -> "MlflowClient":
    """Return MLflow's own client on a store.

    Raises:
        SetupError: MLflow cannot be imported, or the store cannot be used.
    """
    with NO_FORK, explained(store):
        uri = attach(store)  # quiets MLflow before more of it is imported
        from mlflow.tracking import MlflowClient

        return MlflowClient(uri)


def uri_of(store: Store) -> str:
    """Return the URI with which MLflow opens a store."""
    if store.database is not None:
        return _sqlite_uri(store.database)
    assert store.address is not None or store.folder is not None
    return store.address or store.folder.as_uri()  # type: ignore[union-attr]


def make_run(store: Store, run: Run) -> None:
    """Create a run with a given id in an SQLite store, unless it exists."""
    add_run(_lazy_store(attach(store)).instance(), run)


class Lazy:
    """An object that is created when an attribute of it is first used."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._making = make, threading.Lock()
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        made = self.instance()
        try:
            return getattr(made, name)
        except AttributeError as error:  # `self.logger.experiment.add_image` of code for TensorBoard
            message = f"{error}; another `logger.type` of the config, such as TensorBoardLogger, may have it"
            raise AttributeError(message) from None

    def instance(self) -> Any:
        """Return the object; create it on the first call."""
        with self._making:
            if self._made is None:
                self._made = self._make()
        return self._made


def _lazy_store(store_uri: str, artifact_uri: str | None = None) -> Lazy:
    """Return MLflow's SQL store, opened lazily: MLflow's client builds it when the client is created."""
    return _stores.setdefault(store_uri, Lazy(partial(_open_database, store_uri, artifact_uri)))


def _open_database(uri: str, artifact_uri: str | None):
    """Create or migrate the database where needed, and open it.

    Raises:
        SetupError: the folder cannot be created, or the database is locked for too long, damaged, or of a newer MLflow.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = _attached.get(uri)
    if store is None:  # a database that user code opens in this process, as MLflow would open it
        from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH

        return SqlAlchemyStore(uri, artifact_uri or DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
    assert store.database is not None
    assert store.artifact_root is not None
    with explained(store):
        root = artifact_uri or store.artifact_root.as_uri()
        if revision_of(store.database) != latest_schema():
            with locked(store):
                if (revision := revision_of(store.database)) is None:
                    _make_database(store.database, root)
                elif revision not in ("", latest_schema()):
                    _migrate(store.database, uri, revision)
                lock_of(store.database).unlink(missing_ok=True)
        return SqlAlchemyStore(uri, root)


_links: dict[Path, Path] = {}


def _sqlite_uri(database: Path) -> str:
    """Return the URI of a file. SQLAlchemy cannot escape `?`, and its releases treat `%` differently: if the folder's
    name has one, this is the URI of a link."""
    if not {"?", "%"} & {*str(database)}:
        return f"sqlite:///{database}"
    if database.parent not in _links:
        links = Path(tempfile.mkdtemp(prefix="deeplightning-"))
        atexit.register(shutil.rmtree, links, ignore_errors=True)
        (links / "store").symlink_to(database.parent, target_is_directory=True)
        _links[database.parent] = links / "store"
    return f"sqlite:///{_links[database.parent] / database.name}"


def _make_database(database: Path, artifact_root: str) -> None:
    """Create a database atomically, so that a killed process does not leave half of one. Needs the lock."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    temporary = database.with_name(f".{database.name}.new")
    for suffix in ("", "-journal", "-wal", "-shm"):  # left by a killed process
        Path(f"{temporary}{suffix}").unlink(missing_ok=True)
    temporary.touch()  # SQLite would limit its permissions to 644
    SqlAlchemyStore(_sqlite_uri(temporary), artifact_root)
    temporary.replace(database)
    sync_names(database.parent)


def _migrate(database: Path, uri: str, revision: str) -> None:
    """Migrate a database of another MLflow version to the schema of this one; keep a copy next to it."""
    copy = database.with_name(f"{database.name}.{revision}.bak")
    copy.unlink(missing_ok=True)  # a link would lead elsewhere
    with closing(sqlite3.connect(database)) as connection, closing(sqlite3.connect(copy)) as backup:
        connection.backup(backup)
    log.warning("%s is of another MLflow version: migrating it; a copy stays in %s", database, copy)
    try:
        upgrade_database(uri)
    except Exception as error:
        raise SetupError(
            f"{database} was made by another version of MLflow and cannot be migrated ({str(error)[:200]}). "
            f"Install that version, or set another logger.params.tracking_uri. A copy is in {copy}."
        ) from error
