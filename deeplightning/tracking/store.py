"""Locate, check and lock the store of a `tracking_uri`: a directory with an SQLite database, or another MLflow store.

`deeplightning.tracking.mlflow_store` passes it to MLflow. Only `quiet_mlflow` imports MLflow here.
"""

import logging
import os
import re
import shutil
import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deeplightning.faults import SetupError, UserError, seconds_of
from deeplightning.runfolder import RUNS_FILE, RunFolder, from_start, make_private

log = logging.getLogger("deeplightning.tracking")

DATABASE = "mlflow.db"
WAIT_SECONDS = 60.0
"""Maximum wait for a database that another process has locked; `DEEPLIGHTNING_TRACKING_WAIT` overrides it."""
NOTICE_SECONDS = 3.0
"""A longer wait is logged."""

_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_REMOTE = ("http", "https", "databricks", "databricks-uc", "uc")
_DATABASES = ("postgresql", "mysql", "mssql")
_REFUSED = "readonly|read-only|permission denied|unable to open|not permitted"
_DAMAGED = "not a database|malformed|corrupt"
_TRANSIENT_CODES = (
    *("TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"),
    *("DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"),
)
"""MLflow's codes of transient errors; a token may have expired."""
_OF_BUCKETS = {"ConnectionError", "HTTPClientError", "TransportError", "ServiceRequestError"}
"""Network errors of the libraries of S3, Google and Azure, which are no OSErrors."""

_SUPER_JOURNAL = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"  # the end of a journal that names another file


def refuse_journal(database: Path) -> None:
    """Refuse a journal that names another file: SQLite would delete that file."""
    journal = Path(f"{os.path.realpath(database)}-journal")
    if journal.is_file():
        with suppress(OSError), journal.open("rb") as file:  # it is shorter, or gone
            file.seek(-len(_SUPER_JOURNAL), os.SEEK_END)
            if file.read() == _SUPER_JOURNAL:
                raise SetupError(f"{journal} would make SQLite delete a file that it names; remove it")


@dataclass(frozen=True)
class Store:
    """One tracking store."""

    shown: str  # its address for messages, without a password
    address: str | None = None  # its URI for MLflow; None for an SQLite file or a file store
    folder: Path | None = None  # folder of the store, if it is local
    database: Path | None = None  # the SQLite file, if it is one
    artifact_root: Path | None = None  # of a local store; it contains `<experiment_id>/<run_id>/artifacts`

    def __post_init__(self) -> None:
        if self.database is not None:
            refuse_journal(self.database)

    @property
    def is_remote(self) -> bool:
        return self.folder is None


def locate(tracking_uri: str | os.PathLike | None = None) -> Store:
    """Resolve a `tracking_uri` to a store. Reads the disk, but changes nothing.

    Args:
        tracking_uri: a directory, a `file:` URI of one, `sqlite:///FILE`, `http(s)://…`, or another URI that MLflow
            supports. None: the variable `MLFLOW_TRACKING_URI`, else `mlruns`.

    Raises:
        SetupError: MLflow does not support this kind of URI.
    """
    text = os.fspath(tracking_uri) if tracking_uri else os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
    scheme = match[1].lower() if (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", text)) else ""
    if scheme == "file":
        parts = urlsplit(text)
        return _directory_store(_absolute(unquote(parts.netloc + parts.path)))
    if scheme == "sqlite":
        name = text.removeprefix("sqlite:///")
        if name == text or not name or name.startswith((":memory:", "file:")):
            raise SetupError(f"tracking_uri {text!r}: write the database as sqlite:///FILE, or give a plain directory.")
        database = _absolute(name)
        if not database.exists() and (meant := _absolute(unquote(name))).exists():
            database = meant  # `mlflow run` passes its default store with a space as %20 (MLflow 3.17)
        return Store(text, folder=database.parent, database=database, artifact_root=database.parent / "mlruns")
    hidden = "[^/]*" if scheme in ("http", "https") else ".*"  # SQLAlchemy allows a slash in a password
    shown = re.sub(f"://{hidden}@", "://***@", text).partition("?")[0]
    if scheme in _REMOTE or text in _REMOTE or scheme.split("+")[0] in _DATABASES:
        return Store(shown, address=text)
    if scheme and "://" in text:
        raise SetupError(
            f"tracking_uri {shown!r}: MLflow has no store of the kind {scheme!r}. Give a directory (mlruns), "
            "sqlite:///FILE, or the address of a tracking server (http://HOST:PORT)."
        )
    return _directory_store(_absolute(text))


def quiet_mlflow() -> None:
    """Configure MLflow: no telemetry, few messages, and a dead server is detected in seconds instead of minutes.

    Variables set by the user take precedence. MLflow's defaults are 7 retries with doubling pauses and 120 seconds.
    """
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_AGENT_HINT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        _TIMEOUT: "10",
        "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # a forked process inherits no connection
    }.items():
        os.environ.setdefault(name, value)
    ignore_mlflow_warnings()
    import mlflow.tracking  # noqa: F401  (configures its logging when imported; ours must come after)

    for name in ("mlflow.store", "mlflow.tracking", "mlflow.system_metrics", "alembic"):
        # Errors are raised, and we report them once; MLflow would also print a traceback for each.
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def patient() -> Iterator[None]:
    """Wait longer for answers: a server answers a transfer only once its bucket has the file, or has given it."""
    had = os.environ.get(_TIMEOUT)
    if had == "10":
        os.environ[_TIMEOUT] = "600"
    try:
        yield
    finally:
        if had == "10":  # another thread may have set it
            os.environ[_TIMEOUT] = had


def explain(error: Exception, store: Store) -> SetupError:
    """Convert an error of MLflow, SQLite or the network to a message about the store with the next step."""
    if isinstance(error, SetupError):
        return error
    text = first_line(error)
    if store.is_remote:
        return SetupError(
            f"The tracking server {store.shown} cannot be used: {text}. "
            "Start it or correct its address, or track into a directory: logger.params.tracking_uri=mlruns"
        )
    wait = f"has been locked by another process for {wait_seconds():g} seconds"
    notes = (
        ("locked", wait, "End that process, wait longer (DEEPLIGHTNING_TRACKING_WAIT=SECONDS)"),
        (_REFUSED, "cannot be written", "Make the folder and the files in it writable for this user"),
        (_DAMAGED, "is damaged or not an SQLite database", "Move it aside or restore a copy of it"),
        ("", "cannot be used", "Repair it"),
    )
    what, hint = next((what, hint) for pattern, what, hint in notes if re.search(pattern, text.lower()))
    where = store.database or store.folder
    return SetupError(f"The tracking store {where} {what}. {hint}, or set another logger.params.tracking_uri. ({text})")


@contextmanager
def explained(store: Store) -> Iterator[None]:
    """Raise an error of MLflow, SQLite, the network or the file system inside the block as the error from `explain`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise explain(error, store) from error


def first_line(error: Exception) -> str:
    """Return the message of an error, shortened to one line."""
    return " ".join(str(error).split("\n[SQL")[0].split())[:200] or type(error).__name__


def wait_seconds() -> float:
    return seconds_of("DEEPLIGHTNING_TRACKING_WAIT", WAIT_SECONDS)


def check_writable(store: Store) -> None:
    """Ensure that the SQLite database can be written now; wait for a limited time for a process that has locked it.

    Raises:
        SetupError: it is locked for too long, read-only, or not a database.
    """
    if store.database is None:
        return None
    options = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
    if not all(os.access(path, os.W_OK, **options) for path in (store.database, store.database.parent)):
        raise explain(PermissionError("readonly database"), store)
    waited = Wait(f"the tracking database {store.database}")
    while True:
        try:
            return _try_to_write(store.database, 0)
        except sqlite3.Error as error:
            if not is_locked(error) or not waited.again():
                raise explain(error, store) from None


def raise_if_locked(database: Path) -> None:
    """Raise SQLite's error if another process keeps a database locked for more than five seconds."""
    if not database.exists():
        return
    try:
        _try_to_write(database, 5)
    except sqlite3.Error as error:
        if is_locked(error):
            raise


def _try_to_write(database: Path, seconds: float) -> None:
    with closing(sqlite3.connect(database, timeout=seconds, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        connection.execute("ROLLBACK")


def revision_of(database: Path) -> str | None:
    """Return Alembic's revision of a database; None if the database is missing or empty; "" if it is not MLflow's."""
    if not database.exists() or database.stat().st_size == 0:
        return None
    with closing(sqlite3.connect(database, timeout=wait_seconds())) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'").fetchone():
            return ""
        return str((connection.execute("SELECT version_num FROM alembic_version").fetchone() or ("",))[0])


def is_locked(error: Exception) -> bool:
    """Return whether an error means that another process has locked the database."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte of an extended code is its primary code
    return isinstance(error, sqlite3.OperationalError) and code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_transient(error: Exception) -> bool:
    """Return whether the same call may succeed later."""
    if (code := getattr(error, "error_code", None)) is not None:  # of an MlflowException
        return code in _TRANSIENT_CODES and not isinstance(error.__cause__, ValueError)  # a text that SQL cannot store
    status = getattr(getattr(error, "response", None), "status_code", 500)
    is_permanent = (status < 500 and status not in (401, 408, 429)) or isinstance(error, FileNotFoundError)
    is_network = isinstance(error, OSError) or not _OF_BUCKETS.isdisjoint(one.__name__ for one in type(error).__mro__)
    return is_locked(error) or (is_network and not is_permanent)


def is_former(folder: Path, store: Store) -> bool:
    """Return whether a local store was at `folder` earlier: it was moved, or copied from a store there."""
    if not os.access(folder, os.R_OK | os.X_OK):  # gone, or another user's
        return True
    own, root = store.database, store.artifact_root
    if own is None:  # a file store
        return root is not None and any(folder.glob("*/meta.yaml")) and not folder.samefile(root)
    beside = [] if root == own.parent else [folder.parent / own.name]  # of sqlite:///FILE
    found = [file for file in (folder / DATABASE, *beside) if file.is_file()]
    return bool(found) and not any(own.exists() and file.samefile(own) for file in found)


def _directory_store(folder: Path) -> Store:
    if not (folder / DATABASE).exists() and any(folder.glob("*/meta.yaml")):
        return Store(str(folder), folder=folder, artifact_root=folder)
    return Store(str(folder), folder=folder, database=folder / DATABASE, artifact_root=folder)


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(from_start(path)))  # noqa: PTH100  (also folds `..`, without following links)


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Let one process at a time create or migrate the database. Without a lock, twelve processes at once all failed.

    Raises:
        SetupError: another process keeps the lock or the database locked for too long, or the database is damaged.
    """
    from filelock import FileLock, Timeout  # takes 20 ms, and only a new store needs it

    assert store.database is not None
    make_private(store.database.parent, store.database.parent)
    lock = FileLock(lock_of(store.database), mode=0o666)  # minus the umask: other users of a shared store lock it too
    waited = Wait(f"the tracking store {store.shown}, which another process is preparing")
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except Timeout:
            if not waited.again():
                raise SetupError(
                    f"{lock_of(store.database)} has been locked by another process for {wait_seconds():g} seconds. End "
                    "that process, or set another logger.params.tracking_uri."
                ) from None
        except OSError:
            if not store.database.exists():
                raise
            yield  # a read-only store exists already: nothing to protect
            return
    try:
        if not store.database.exists():
            store.database.touch()  # SQLite gives its other files the same permissions
        # Check an existing file before MLflow opens it: MLflow would retry a damaged one for a minute.
        check_writable(store)
        yield
    finally:
        lock.release()


def ignore_mlflow_warnings() -> None:
    """Ignore Python warnings from MLflow and its dependencies, which users cannot fix.

    The filter stays in place: MLflow runs in a thread, where `warnings.catch_warnings` is not safe.
    """
    warnings.filterwarnings("ignore", module=r"(alembic|mlflow|requests|sqlalchemy|urllib3)(\.|$)")


def lock_of(database: Path) -> Path:
    """Return the lock file for creating or migrating a database."""
    return database.with_name(f"{database.name}.lock")


class Wait:
    """Waits a little at each `again()`, logs it once, and returns False after the time limit.

    Args:
        what: awaited object, for the message.
        seconds: time limit of a wait that is not logged; None: the user's limit.
    """

    def __init__(self, what: str, seconds: float | None = None):
        self.what, self.start, self.is_logged = what, time.monotonic(), seconds is not None
        self.longest = wait_seconds() if seconds is None else seconds

    def again(self) -> bool:
        waited = time.monotonic() - self.start
        if waited >= self.longest:
            return False
        if waited >= min(NOTICE_SECONDS, self.longest / 2) and not self.is_logged:
            self.is_logged = True
            log.warning("Waiting for %s (at most %.0f seconds).", self.what, self.longest)
        time.sleep(min(0.05, self.longest / 10))
        return True


def remove_files(store: Store, run_id: str, artifacts: Path) -> str:
    """Remove the folder of a run, given its subfolder `artifacts`. A store and its rows may come from anywhere: only a
    folder that the store created for this run is removed.

    Returns:
        Why the folder was not removed, or "" if it was.
    """
    folder = artifacts.parent
    if not re.fullmatch(r"[0-9a-f]{32}", run_id) or artifacts.name != "artifacts" or folder.name != run_id:
        return f"it is not the folder of a run {run_id!r}"
    resolved, root = folder.resolve(), store.artifact_root and store.artifact_root.resolve()
    if root is None or root not in resolved.parents or resolved.name != run_id or artifacts.is_symlink():
        return f"it is not in {root}, where this store keeps its runs" if root else "the store is on a server"
    configs = (RunFolder(artifacts).config, *(artifacts / name for name in ("search.yaml", RUNS_FILE, "bisect.json")))
    if not any(path.is_file() for path in configs) and any(artifacts.iterdir()):
        return f"it has no {configs[0].name}, unlike the folder of a run"
    try:
        shutil.rmtree(resolved)
    except OSError as error:
        return f"it cannot be removed: {error.strerror}"
    return ""


def local_path(uri: str) -> Path | None:
    """Return the local path of a path or `file:` URI, or None for another URI."""
    scheme = urlsplit(uri).scheme
    return Path(unquote(urlsplit(uri).path)) if scheme == "file" else None if scheme else _absolute(uri)
