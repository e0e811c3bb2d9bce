"""Claims mark runs that may be incomplete in their tracking store.

A process that logs a run keeps a small file locked, its claim, which names the run's `metrics.jsonl` and the machine.
A claim that is not locked belongs to a process that has ended: the next command on the store sends the rest, see
`deeplightning.tracking.unsent`. Claims on an SQLite store are next to it (`mlruns/mlflow.db.unsent/`), those on other
stores in the user's state folder (`~/.local/state/deeplightning/unsent/`, or below XDG_STATE_HOME).

Claims next to a store may have been copied with it. Those that another user could have written are ignored, and so are
those of another machine.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import socket
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deeplightning.config.own_runs import is_own
from deeplightning.runfolder import FolderLock, RunFolder, make_private, sync_names
from deeplightning.tracking.entities import Run, run_of
from deeplightning.tracking.metrics_file import Line, read_lines, sent_file
from deeplightning.tracking.reader import open_reader
from deeplightning.tracking.store import Store, explained, is_former, local_path

log = logging.getLogger("deeplightning.tracking")

_SUFFIX = ".unsent"
_RUN_ID = re.compile(r"[\w-]{1,64}", re.ASCII)  # 32 hexadecimal digits, or the ID that a server assigns


def folder_of(store: Store) -> Path:
    """Return the folder of the claims on a store."""
    if store.database is not None:
        return store.database.with_name(f"{store.database.name}{_SUFFIX}")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    address = re.sub(r"://[^/@]*@", "://", store.address or str(store.folder))  # the password may change
    return state / "deeplightning" / "unsent" / hashlib.sha256(address.encode()).hexdigest()[:16]


class Claim(FolderLock):
    """This process's claim on a run.

    Args:
        metrics: the run's `metrics.jsonl`.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, store: Store, run_id: str, metrics: Path):
        self.path = folder_of(store) / f"{run_id}.{uuid.uuid4().hex[:8]}{_SUFFIX}"
        content = {"run": run_id, "metrics": str(metrics), "store": store.shown} | _machine()
        make_private(self.path.parent, store.database.parent if store.database else self.path.parent)
        # Lock it before it gets its name, so that no process takes it for an orphaned claim.
        temporary = self.path.with_suffix(".new")
        super().__init__(descriptor := os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            _try_lock(descriptor)
            os.write(descriptor, json.dumps(content).encode() + b"\n")
            os.fsync(descriptor)  # otherwise no process could end the run after a power failure
            temporary.rename(self.path)
        except OSError:
            self.release()
            remove_claim(temporary)
            raise
        sync_names(self.path.parent)

    def close(self) -> None:
        """Remove the claim. A second call does nothing, and neither does a call in a forked process."""
        if self._descriptor is not None:
            remove_claim(self.path)
        self.release()


@functools.cache
def _machine() -> dict[str, str]:
    found = {"host": socket.gethostname(), "machine": "", "boot": ""}
    for name, path in (("machine", "/etc/machine-id"), ("boot", "/proc/sys/kernel/random/boot_id")):
        with contextlib.suppress(OSError):
            found[name] = Path(path).read_text().strip()
    return found


def is_elsewhere(claim: Mapping[str, object]) -> bool:
    """Return whether a claim is of another machine, whose locks are not visible here. A machine stays the same after a
    reboot and in another container."""
    here = _machine()
    if here["boot"] and (claim.get("boot") == here["boot"] or not here["machine"]):
        return claim.get("boot") != here["boot"]
    return any(claim.get(name) != here[name] for name in ("host", "machine"))


def claims(store: Store, run_id: str = "*") -> list[Path]:
    """Return the claims on all runs of a store or on one, including those of running processes, oldest first."""
    found = []
    for path in folder_of(store).glob(f"{run_id}.*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # its process removed it meanwhile
            found.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def is_in_use(store: Store, run_id: str, folder: Path) -> bool:
    """Return whether a process uses the folder of a run, or has left unsent data in it."""
    try:
        if (lock := RunFolder(folder).lock()) is None:
            return True
    except OSError:  # it does not exist, or may not be read
        return False
    lock.release()
    for _, descriptor in _own_claims(store, run_id):
        with contextlib.suppress(ValueError):
            if Path(read_claim(descriptor)["metrics"]).parent == folder:
                return True
    return False


def find_run(store: Store, run_id: str) -> Run | None:
    """Return a run, even if its store does not have it yet; None if it does not exist.

    Raises:
        SetupError: the store cannot be queried.
    """
    with explained(store):
        return open_reader(store).run(run_id) or next(unsent_runs(store, run_id), None)


def unsent_runs(store: Store, run_id: str = "*") -> Iterator[Run]:
    """Yield the runs that may not be in their store yet."""
    for path, descriptor in _own_claims(store, run_id):
        with contextlib.suppress(Exception):  # a prepared header may raise anything
            header = read_header(metrics_of(store, read_claim(descriptor)))
            if header.get("run") == path.name.partition(".")[0]:
                yield run_of(header)


def take_over(store: Store, run_id: str) -> bool:
    """Remove the orphaned claims on a run that this process now claims; return whether there was one."""
    found = False
    for path, _ in stale_claims(store, run_id):
        found = True
        remove_claim(path)
    return found


def artifacts_of(store: Store, run: Run) -> Path | None:
    """Return the local folder of a run, also in a store that was moved or copied; None if its artifacts are remote."""
    folder, root = local_path(run.artifact_uri), store.artifact_root
    if folder is None or root is None or folder.parts[-3:-1] != (run.experiment_id, run.id):
        return folder
    moved = root / run.experiment_id / run.id / "artifacts"
    is_here = moved.is_dir() or not os.access(folder, os.R_OK)
    return moved if is_here and is_former(folder.parents[2], store) else folder


def read_header(metrics: Path) -> Line:
    """Return the description of a run in its metrics file, or {} if it has none."""
    return next((line["run"] for _, line in read_lines(metrics) if "run" in line), {})


def metrics_of(store: Store, claim: dict[str, Any]) -> Path:
    """Return the metrics file of a claim.

    Raises:
        ValueError: its folder is neither in the store nor the folder of a run of this user.
    """
    path, root = Path(str(claim["metrics"])), store.artifact_root
    moved = (root or path).joinpath(*path.parts[-4:])  # EXPERIMENT/RUN/artifacts/metrics.jsonl in the store of now
    is_gone = not os.access(path, os.R_OK) or (len(path.parents) > 3 and is_former(path.parents[3], store))
    path = moved if is_gone and moved.is_file() else path
    files = (path.resolve(), sent_file(path).resolve())  # read and written; links may lead out
    if any(file.exists() and not file.is_file() for file in files):
        raise ValueError(f"{str(path)!r:.80} or its position is not a regular file")
    is_inside = root is not None and all(root.resolve() in file.parents for file in files)
    if store.database is not None and not is_inside and not is_own(RunFolder(path.parent)):
        raise ValueError(f"{str(path)!r:.80} is neither in the store nor of a run that you started here")
    return path


def stale_claims(store: Store, run_id: str = "*") -> Iterator[tuple[Path, int]]:
    """Yield the claims of ended processes on all runs or on one, as open and locked files, oldest first."""
    for path, descriptor in _own_claims(store, run_id):
        if _try_lock(descriptor) and os.fstat(descriptor).st_nlink > 0:  # otherwise a process has locked or removed it
            yield path, descriptor


def _own_claims(store: Store, run_id: str) -> Iterator[tuple[Path, int]]:
    """Yield the claims that no other user could have written, as open files."""
    for path in claims(store, run_id):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            state = os.fstat(descriptor)
            if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022:
                yield path, descriptor
            else:
                _warn_ignored(path)
        finally:
            os.close(descriptor)


@functools.cache
def _warn_ignored(path: Path) -> None:
    log.warning("%s is ignored: another user could have written it", path)


def _try_lock(descriptor: int) -> bool:
    """Lock a file until it is closed; return False if another process has the lock, or locks are not supported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def read_claim(descriptor: int) -> dict[str, Any]:
    """Return the content of a claim.

    Raises:
        ValueError: it is not a claim.
    """
    found = json.loads(os.read(descriptor, 100_000) or b"null")
    if not (isinstance(found, dict) and isinstance(found.get("run"), str) and isinstance(found.get("metrics"), str)):
        raise ValueError("it does not name a run")
    if not _RUN_ID.fullmatch(found["run"]):
        raise ValueError(f"{found['run']!r:.60} is not the id of a run")
    return found


def remove_claim(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
