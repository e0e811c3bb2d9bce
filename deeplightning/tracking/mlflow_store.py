"""MLflow's client opens a store of ours: an SQLite database that is made or migrated at its first use, under a lock."""

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

# A process that is forked while another thread imports, or is inside a transaction, would have a module that is never
# complete, or a connection that rolls the transaction back. So no fork happens meanwhile.
NO_FORK = threading.RLock()
os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=NO_FORK.release)

_attached: dict[str, Store] = {}
_stores: "dict[str, Lazy]" = {}


def attach(store: Store) -> str:
    """Prepare this process for the store and return the URI to hand to `MlflowClient`. Still nothing is written.

    MLflow's client would make an SQLite store at once, without a lock, with its artifacts in `mlruns` under the
    working directory. So its registry gets a store of ours that opens late, under a lock, with the right folder.
    """
    quiet_mlflow()
    uri = uri_of(store)
    if store.address is not None:
        return uri
    if store.database is None:
        assert store.folder is not None
        # MLflow 3.17 refuses its old file stores without this switch, which its own error message names.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        log.warning(
            "%s is a file store of an older MLflow. It works, but slowly; to migrate it: "
            "mlflow migrate-filestore --source '%s' --target 'sqlite:///%s'",
            *(store.shown, store.folder, store.folder / DATABASE),
        )
        return uri
    _attached[uri] = store
    register_store("sqlite", _build_late)
    return uri


def open_client(store: Store) -> "MlflowClient":
    """Return MLflow's own client on a store.

    Raises:
        SetupError: MLflow cannot be imported, or the store not be used.
    """
    with NO_FORK, explained(store):
        uri = attach(store)  # quiets MLflow before more of it is imported
        from mlflow.tracking import MlflowClient

        return MlflowClient(uri)


def uri_of(store: Store) -> str:
    """Return the URI by which MLflow opens a store."""
    if store.database is not None:
        return _sqlite_uri(store.database)
    assert store.address is not None or store.folder is not None
    return store.address or store.folder.as_uri()  # type: ignore[union-attr]


def make_run(store: Store, run: Run) -> None:
    """Make a run whose id is known, in an SQLite store; do nothing if it is there."""
    add_run(_build_late(attach(store)).made(), run)


class Lazy:
    """An object that is made when an attribute of it is first used."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._making = make, threading.Lock()
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    def made(self) -> Any:
        """Return the object; make it first, if it is not there."""
        with self._making:
            if self._made is None:
                self._made = self._make()
        return self._made


def _build_late(store_uri: str, artifact_uri: str | None = None) -> Lazy:
    """Return MLflow's SQL store, opened late: its client builds the store when the client is made."""
    return _stores.setdefault(store_uri, Lazy(partial(_open_database, store_uri, artifact_uri)))


def _open_database(uri: str, artifact_uri: str | None):
    """Create or migrate the database where needed, and open it.

    Raises:
        SetupError: the folder cannot be made, the database is locked for too long, damaged, or of a newer MLflow.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    store = _attached.get(uri)
    if store is None:  # someone else's database, opened in this process: as MLflow does it
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
    """Return the address of a file. SQLAlchemy has no escape for `?`, and its releases differ at `%`: of a folder with
    one in its name it is that of a link."""
    if not {"?", "%"} & {*str(database)}:
        return f"sqlite:///{database}"
    if database.parent not in _links:
        holder = Path(tempfile.mkdtemp(prefix="deeplightning-"))
        atexit.register(shutil.rmtree, holder, ignore_errors=True)
        (holder / "store").symlink_to(database.parent, target_is_directory=True)
        _links[database.parent] = holder / "store"
    return f"sqlite:///{_links[database.parent] / database.name}"


def _make_database(database: Path, artifact_root: str) -> None:
    """Make it under another name first: a process that is killed leaves no half of a database. Needs the lock."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    beside = database.with_name(f".{database.name}.new")
    for suffix in ("", "-journal", "-wal", "-shm"):  # what a process that was killed has left
        Path(f"{beside}{suffix}").unlink(missing_ok=True)
    beside.touch()  # SQLite itself would give it no more than 644
    SqlAlchemyStore(_sqlite_uri(beside), artifact_root)
    beside.replace(database)
    sync_names(database.parent)


def _migrate(database: Path, uri: str, revision: str) -> None:
    """Migrate a database of another MLflow version to this one's schema; a copy of it stays beside it."""
    copy = database.with_name(f"{database.name}.{revision}.bak")
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
