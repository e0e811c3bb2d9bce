"""Runs that a tracking store may not have completely, and what a later command sends of them.

A process that logs a run holds a small file locked, its claim, which names the run's `metrics.jsonl` and the machine.
A claim whose lock is free is of a process that has ended: the next command on the store sends the rest, and the run is
FAILED if its process ended without a word. Claims on an SQLite store are beside it (`mlruns/mlflow.db.unsent/`), those
on another one in the user's state folder (`~/.local/state/deeplightning/unsent/`, or below XDG_STATE_HOME).

Claims beside a store may have come with it from somebody else: what another user can have written is left alone, and so
are those of another machine.
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
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deeplightning.checks.trust import is_own
from deeplightning.faults import SetupError, count
from deeplightning.runfolder import FolderLock, RunFolder, make_private, sync_names
from deeplightning.tracking.client import Client
from deeplightning.tracking.delivery import Delivery, run_of
from deeplightning.tracking.entities import Batch, Run
from deeplightning.tracking.metrics_file import Line, read_lines, safe_position, sent_file
from deeplightning.tracking.reader import open_reader
from deeplightning.tracking.store import Store, explain, explained, first_line, is_transient, local_path

log = logging.getLogger("deeplightning.tracking")

ENDED = "the process was killed"
"""The reason of a run whose process ended without a word."""
SILENT_SECONDS = 24 * 3600.0
"""Seconds of silence after which `runs --sync` takes another machine's process for dead."""

_SUFFIX = ".unsent"
_RUN_ID = re.compile(r"[\w-]{1,64}", re.ASCII)  # 32 hexadecimal digits, or what a server gives


def folder_of(store: Store) -> Path:
    """Return the folder of the claims on a store."""
    if store.database is not None:
        return store.database.with_name(f"{store.database.name}{_SUFFIX}")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    address = re.sub(r"://[^/@]*@", "://", store.address or str(store.folder))  # whatever the password is by then
    return state / "deeplightning" / "unsent" / hashlib.sha256(address.encode()).hexdigest()[:16]


class Claim(FolderLock):
    """The claim of this process on a run.

    Args:
        metrics: the run's `metrics.jsonl`.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, store: Store, run_id: str, metrics: Path):
        self.path = folder_of(store) / f"{run_id}.{uuid.uuid4().hex[:8]}{_SUFFIX}"
        content = {"run": run_id, "metrics": str(metrics), "store": store.shown} | _machine()
        make_private(self.path.parent, store.database.parent if store.database else self.path.parent)
        # Locked before it has its name: nobody takes it for one that was left behind.
        beside = self.path.with_suffix(".new")
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _hold(descriptor)
        os.write(descriptor, json.dumps(content).encode() + b"\n")
        os.fsync(descriptor)  # without this nobody could end the run after a loss of power
        beside.rename(self.path)
        sync_names(self.path.parent)
        super().__init__(descriptor)

    def close(self) -> None:
        """Remove it; a second call does nothing, and nor does one in a forked process."""
        if self._descriptor is not None:
            _remove(self.path)
        self.release()


@functools.cache
def _machine() -> dict[str, str]:
    found = {"host": socket.gethostname(), "machine": "", "boot": ""}
    for name, path in (("machine", "/etc/machine-id"), ("boot", "/proc/sys/kernel/random/boot_id")):
        with contextlib.suppress(OSError):
            found[name] = Path(path).read_text().strip()
    return found


def is_elsewhere(claim: Mapping[str, object]) -> bool:
    """Return whether a claim is of another machine, whose locks do not count here. One that was started again is the
    same, and so is another container of it."""
    here = _machine()
    if here["boot"] and (claim.get("boot") == here["boot"] or not here["machine"]):
        return claim.get("boot") != here["boot"]
    return any(claim.get(name) != here[name] for name in ("host", "machine"))


def claims(store: Store) -> list[Path]:
    """Return the claims on the runs of a store, those of running processes too, the oldest first."""
    try:
        found = [(path.stat().st_mtime_ns, path) for path in folder_of(store).iterdir() if path.suffix == _SUFFIX]
    except OSError:
        return []
    return [path for _, path in sorted(found)]


def find_run(store: Store, run_id: str) -> Run | None:
    """Return a run, even if its store does not have it yet; None if it does not exist.

    Raises:
        SetupError: the store cannot be asked.
    """
    with explained(store):
        return open_reader(store).run(run_id) or next(unsent_runs(store, run_id), None)


def unsent_runs(store: Store, run_id: str = "*") -> Iterator[Run]:
    """Yield the runs that may not be in their store yet."""
    for path in folder_of(store).glob(f"{run_id}.*{_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                header = _header(_metrics(store, _read(file.fileno()))) if _is_private(descriptor) else {}
            if header.get("run") == path.name.partition(".")[0]:
                yield run_of(header)


def settle(store: Store, silent: float | None = None) -> Iterator[str]:
    """Send what ended processes have left for a store; running processes are left alone. Yield a line for each run that
    was settled.

    Args:
        silent: seconds after which another machine's process counts as dead if it has written nothing; None: never, and
            nothing is said of it.

    Raises:
        SetupError: the store cannot be used, or does not answer; what is not sent stays.
    """
    client: Client | None = None
    for path, descriptor in _left(store):
        run_id = path.name.partition(".")[0]
        try:
            claim = _read(descriptor)
            if claim["run"] != run_id:
                raise ValueError(f"it is named after the run {run_id:.40}, and of {claim['run']:.40}")
            metrics = _metrics(store, claim)
            last = (metrics if metrics.exists() else path).stat().st_mtime
            if is_elsewhere(claim) and (silent is None or time.time() - last < silent):
                if silent is not None:
                    yield (
                        f"{run_id}  left alone: its process is of {claim.get('host')}, where `deeplightning runs` "
                        f"settles it; here --sync does once it has been silent for {silent / 3600:g} hours"
                    )
                continue
            client = client or Client(store)
            words = _send(store, client, run_id, metrics, int(last * 1000))
        except Exception as error:  # MLflow, SQLite and the network each have their own
            if isinstance(error, SetupError) or (client is not None and is_transient(error)):
                raise SetupError(
                    f"{explain(error, store)} What was left unsent stays; once the store answers: deeplightning "
                    "runs --sync"
                ) from error
            kept = path.with_suffix(".refused")
            words = f"refused ({first_line(error)}); kept as {kept}"
            path.rename(kept)
        else:
            _remove(path)
        yield f"{run_id}  {words}"


def settle_quietly(store: Store) -> Iterator[str]:
    """Do the same for a command that looks at the runs: yield also why none could be settled."""
    try:
        yield from settle(store)
    except SetupError as error:
        yield f"warning: {error}"


def end_run(store: Store, run_id: str, tags: dict[str, str]) -> None:
    """Send what a killed process has left of a run, and mark the run as failed, with tags.

    Raises:
        Exception: the store's own.
    """
    list(settle(store))
    client = Client(store)
    if client.run(run_id) is not None:
        client.log_batch(run_id, Batch(tags=tags, status=("FAILED", time.time_ns() // 1_000_000)))


def take_over(store: Store, run_id: str) -> bool:
    """Remove the claims that ended processes have left of a run which this process claims from now on; return whether
    there was one."""
    found = False
    for path, _ in _left(store, run_id):
        found = True
        _remove(path)
    return found


def _send(store: Store, client: Client, run_id: str, metrics: Path, ended: int) -> str:
    """Send the rest of a run, and return what came of it. It is FAILED if its process, which ended at a time in
    milliseconds since 1970, has not said how."""
    run, nothing = client.run(run_id), "0 points sent"
    if run is not None and not run.is_active:  # deleted by a person: nothing of it is wanted
        return nothing
    header, blank = _header(metrics), "deleted: its process was killed before it recorded anything"
    if run is None and header.get("run") != run_id:
        if any(line for _, line in read_lines(metrics)):
            raise LookupError(f"the run {run_id} is not in the store")
        return blank
    start = safe_position(metrics) if run is not None else 0
    rest = [line for _, line in read_lines(metrics, start)]
    told = next((line["status"] for line in reversed(rest) if "status" in line), None)
    has_died = (told or (run.status if run else "RUNNING")) == "RUNNING"
    damaged = rest.count({})
    folder = local_path((run or run_of(header)).artifact_uri)
    if told in (None, "RUNNING") and not damaged and _is_blank(run, folder, metrics):
        # FAILED: MLflow's own calls in another rank, which has outlived the first, have said so.
        return blank if run is None or client.delete(run_id, ("RUNNING", "FAILED")) else nothing
    delivery = Delivery(store, run_id, metrics, client)
    delivery.position, delivery.is_leftover = start, True
    delivery.known = delivery.known if run is not None else 0
    delivery.has_finished = run is not None and run.status == "FINISHED"
    delivery.params = dict(run.params) if run is not None else {}
    delivery.send(metrics.stat().st_size if metrics.exists() else 0)
    words = f"{count(delivery.points, 'point')} sent"
    if has_died:
        reason = {} if run is not None and "failure" in run.tags else {"failure": ENDED}
        delivery.deliver([(None, {"tags": reason}), (None, {"status": "FAILED", "time": ended})])
        words += f"; FAILED: {ENDED}"
    if damaged:
        words += f"; {count(damaged, 'damaged line')} of its metrics.jsonl not sent"
    return words


def _header(metrics: Path) -> Line:
    """Return what a run is made of, from its file; {} if that does not say."""
    return next((line["run"] for _, line in read_lines(metrics) if "run" in line), {})


def _metrics(store: Store, claim: dict[str, Any]) -> Path:
    """Return the metrics file of a claim.

    Raises:
        ValueError: its folder is neither in the store nor that of a run of this user's.
    """
    path, root = Path(str(claim["metrics"])), store.artifact_root
    is_inside = root is not None and root.resolve() in path.resolve().parents
    if store.database is not None and not is_inside and not is_own(RunFolder(path.parent)):
        raise ValueError(f"{str(path)!r:.80} is neither in the store nor of a run that you started here")
    return path


def _is_blank(run: Run | None, folder: Path | None, metrics: Path) -> bool:
    """Return whether a run holds nothing but its name: no parameter, no point, and no file but logs."""
    if folder is None or (run is not None and run.params):
        return False
    if any(line.keys() & {"values", "params", "dataset", "artifact"} for _, line in read_lines(metrics)):
        return False
    begun = {*RunFolder(folder).unfinished(), metrics, sent_file(metrics)}
    logs = RunFolder(folder).log(0).parent
    return all(path in begun or logs in path.parents for path in folder.rglob("*") if path.is_file())


def _left(store: Store, run_id: str | None = None) -> Iterator[tuple[Path, int]]:
    """Yield the claims on all runs or one that ended processes have left, open and locked meanwhile, the oldest first;
    those that another user can have written are left alone."""
    for path in claims(store):
        if run_id not in (None, path.name.partition(".")[0]):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if not _is_private(descriptor):
                log.warning("%s is left alone: another user could have written it", path)
            elif _hold(descriptor) and os.fstat(descriptor).st_nlink > 0:  # else a process has it, or has removed it
                yield path, descriptor
        finally:
            os.close(descriptor)


def _is_private(descriptor: int) -> bool:
    state = os.fstat(descriptor)
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _hold(descriptor: int) -> bool:
    """Lock a file for as long as it is open; False if a process has it, or nothing can be locked here."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read(descriptor: int) -> dict[str, Any]:
    """Return the content of a claim.

    Raises:
        ValueError: it is none.
    """
    found = json.loads(os.read(descriptor, 100_000) or b"null")
    if not (isinstance(found, dict) and isinstance(found.get("run"), str) and isinstance(found.get("metrics"), str)):
        raise ValueError("it names no run")
    if not _RUN_ID.fullmatch(found["run"]):
        raise ValueError(f"{found['run']!r:.60} is not the id of a run")
    return found


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
