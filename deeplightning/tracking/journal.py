"""What a run says and its store may not have yet, on this machine's disk: a process that is killed loses no point.

A process appends each entry before it continues, into a file of its own that it holds locked; a file whose lock is free
is of a process that has ended, and the next run on the store, `deeplightning runs` or `monitor.sh` writes what it
says. For an SQLite store the files are beside it (`mlruns/mlflow.db.journal/`), for another one in the user's state
folder (`~/.local/state/deeplightning/journal/`, or under XDG_STATE_HOME).

Those beside a store may have come with it from somebody else: what another user can have written is left alone, and
the only files that they may send are those of this user's runs.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import time
import uuid
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeplightning.checks.trust import is_own
from deeplightning.faults import SetupError, count
from deeplightning.runfolder import RunFolder, make_private, sync_names
from deeplightning.tracking.journal_owner import has_ended, this_process
from deeplightning.tracking.open import open_tracker
from deeplightning.tracking.store import Store, explain, local_path
from deeplightning.tracking.tracker import SYSTEM, Batch, Dataset, Point, Run, Tracker, stored

try:
    import fcntl
except ImportError:  # Windows has none: there every journal looks alive, and stays
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("deeplightning.tracking")

ENDED = "the process was killed"
"""The reason that a run gets which ended without a word."""

Entry = tuple[Any, ...]
"""One entry: ("points", time, step, {name: value}), ("params", {name: value}), ("tags", {name: value}),
("dataset", the five texts of a `Dataset`), ("status", word, time of the end or None),
("artifact", path, folder or None)."""

STATUSES = ("RUNNING", "FINISHED", "FAILED", "KILLED")

MAX_BYTES = 2_000_000_000
"""A longer journal is refused, not read into memory: 60 bytes a point, so 30 million of them."""

_SUFFIX = ".journal"
_FORMAT = 2
"""Each line ends with the number of its entry and the CRC-32 of all before it; those of format 1 have neither."""
_SUM = b',"%08x"]\n'
_HEX = re.compile(r"[0-9a-f]{8}")
_RUN_ID = re.compile(r"[\w-]{1,64}", re.ASCII)  # 32 hexadecimal digits, or what a server of MLflow's gives
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_open: "weakref.WeakSet[Journal]" = weakref.WeakSet()


def folder_of(store: Store) -> Path:
    """Where the journals of a store are, whoever wrote them."""
    if store.database is not None:
        return store.database.with_name(f"{store.database.name}{_SUFFIX}")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    address = re.sub(r"://[^/@]*@", "://", store.address or str(store.folder))  # whatever the password is by then
    return state / "deeplightning" / "journal" / hashlib.sha256(address.encode()).hexdigest()[:16]


class Journal:
    """The journal that this process writes of one run.

    Each entry is in the system's memory before `append` returns: killing the process loses none, only the machine's own
    end can. Entries are not synced to the disk; that costs milliseconds each time.

    Args:
        store: of the run.
        run_id: the run.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, store: Store, run_id: str):
        self.path = folder_of(store) / f"{run_id}.{uuid.uuid4().hex[:8]}{_SUFFIX}"
        self._number = 0  # of the entry that comes next
        header = self._line(({"run": run_id, "store": store.shown, "format": _FORMAT} | this_process(),))
        self._start, self._length = len(header), len(header)
        # Locked before it has its name: nobody takes it for one that was left behind.
        beside = self.path.with_suffix(".new")
        for _ in range(100):
            make_private(self.path.parent, store.database.parent if store.database else self.path.parent)
            with contextlib.suppress(FileNotFoundError):  # a process that ended has just removed the empty folder
                self._descriptor: int | None = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
                break
        else:
            raise FileNotFoundError(f"{self.path.parent} disappears again and again")
        _hold(self._descriptor)
        os.write(self._descriptor, header)
        os.fsync(self._descriptor)  # there is a run in the store soon, which nobody could end without this
        beside.rename(self.path)
        sync_names(self.path.parent)
        _open.add(self)

    def append(self, entry: Entry) -> None:
        """Adds an entry.

        Raises:
            OSError: the disk is full, or has gone.
        """
        if self._descriptor is not None:
            line = memoryview(self._line(entry))
            while line:  # a disk that is nearly full takes a part
                written = os.write(self._descriptor, line)
                self._length += written
                line = line[written:]

    def _line(self, entry: Entry) -> bytes:
        line = _encode((*entry, self._number)).encode()
        self._number += 1
        return line[:-1] + _SUM % zlib.crc32(line)

    def forget(self) -> None:
        """Empties it: all its entries are in the store. Where it cannot be emptied now, it is the next time."""
        if self._descriptor is not None and self._length > self._start:
            with contextlib.suppress(OSError):  # an entry that is replayed is found in the store
                os.ftruncate(self._descriptor, self._start)
                self._length = self._start

    def end(self, keep: bool = False) -> None:
        """Lets go of it, and removes it unless it is to be kept; a second time does nothing."""
        if self._descriptor is None:
            return
        if not keep:
            _remove(self.path)
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):  # it is closed even so
            os.close(descriptor)


def _let_go() -> None:
    """In a forked process: the lock is the parent's, and would outlive it in a worker of a loader."""
    for journal in list(_open):
        if journal._descriptor is not None:
            os.close(journal._descriptor)
            journal._descriptor = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@dataclass
class Written:
    """What came of a journal that was left behind.

    Attributes:
        run_id: whose it was.
        points: how many the store did not have.
        others: parameters, tags, files and the status.
        damaged: lines at least that could not be read, and are lost.
        problem: why it could not be written; "": it was.
        kept: where it is now, if not all of it is written.
        is_refused: the store will never take it, so it is not tried again.
        has_died: its process was killed, and the run is FAILED from now on.
        is_blank: its process was killed before anything was recorded, and the run is deleted.
        elsewhere: the machine that it is left to, which alone knows whether the process lives; "": none.
    """

    run_id: str
    points: int = 0
    others: int = 0
    damaged: int = 0
    problem: str = ""
    kept: Path | None = None
    is_refused: bool = False
    elsewhere: str = ""
    has_died: bool = False
    is_blank: bool = False

    @property
    def losses(self) -> str:
        """What was lost, for a person; "": nothing."""
        verb = "is" if self.damaged == 1 else "are"
        return f"{count(self.damaged, 'line')} of its journal {verb} damaged and not written" if self.damaged else ""


def left_behind(store: Store) -> list[Path]:
    """The journals of a store, those of running processes too, the oldest first."""
    try:
        found = [(path.stat().st_mtime_ns, path) for path in folder_of(store).iterdir() if path.suffix == _SUFFIX]
    except OSError:
        return []
    return [path for _, path in sorted(found)]


def settle(store: Store, silent: float | None = None) -> Iterator[Written]:
    """Opens a store for which something was left behind, and writes that; see `replay`.

    Raises:
        SetupError: the store cannot be used, or does not answer; what is not written stays.
    """
    if not left_behind(store):
        return
    try:
        tracker = open_tracker(store)
    except Exception as error:  # MLflow and SQLite each have their own
        raise explain(error, store) from error
    try:
        for found in replay(store, tracker, silent=silent):
            if found.problem and not found.is_refused:
                raise SetupError(
                    f"{store.shown} does not take what was left unwritten ({found.problem}). It stays in "
                    f"{folder_of(store)}; once the store answers: deeplightning runs --sync"
                )
            yield found
    finally:
        tracker.close()


def settle_quietly(store: Store) -> Iterator[str]:
    """The same for who wants to look at the runs: a line for each that was settled, or why none could be."""
    try:
        for found in settle(store):
            if found.is_refused:
                yield f"warning: {found.run_id}: refused ({found.problem}); kept as {found.kept}"
            else:
                if found.has_died:
                    yield f"{found.run_id}: {ENDED}; it is FAILED from now on"
                if found.damaged:
                    yield f"warning: {found.run_id}: {found.losses}"
    except SetupError as error:
        yield f"warning: {error}"


def dead(store: Store) -> set[str]:
    """The runs of which a process of this machine was killed, and that is not in the store yet."""
    found: set[str] = set()
    for path in left_behind(store):
        with _claimed(path) as descriptor:
            if descriptor is not None:
                with contextlib.suppress(ValueError):  # not one of ours
                    header, _, _ = _read(descriptor)
                    if has_ended(header):
                        found.add(str(header.get("run")))
    return found


def replay(store: Store, tracker: Tracker, continuing: str | None = None, silent: float | None = None) -> list[Written]:
    """Writes what ended processes have left unwritten; those that run are left alone, and those of other machines.

    A run whose process ended without a word is ended as FAILED.

    Args:
        continuing: the run that this process continues, which sets its status itself.
        silent: seconds after which another machine's process counts as dead if it has written nothing; None: never.
    """
    done = []
    for path in left_behind(store):
        with _claimed(path) as descriptor:
            if descriptor is None:
                continue
            result = Written(path.name.partition(".")[0])
            try:
                header, entries, result.damaged = _read(descriptor)
                run_id, ended = header.get("run"), has_ended(header)
                if run_id not in (None, result.run_id):
                    raise ValueError(f"it is named after the run {result.run_id:.40}, and of the run {run_id:.40}")
                is_continued = run_id is not None and run_id == continuing
                if ended is None and not is_continued:
                    if silent is None or time.time() - _ended(descriptor) / 1000 < silent:
                        result.elsewhere = str(header["host"])
                        done.append(result)
                        continue
                    ended = True
                _write(store, tracker, result, entries, _ended(descriptor), path, is_continued, ended is False)
            except Exception as error:  # MLflow, SQLite and the network each have their own
                result.problem, result.kept = " ".join(str(error).split())[:200] or type(error).__name__, path
                if not tracker.is_transient(error):
                    result.is_refused, result.kept = True, path.with_suffix(".refused")
                    path.rename(result.kept)
            else:
                _remove(path)
            done.append(result)
            if result.problem and not result.is_refused:
                break  # the store does not answer: the others would wait in vain, too
    return done


def _write(
    store: Store,
    tracker: Tracker,
    result: Written,
    entries: list[Entry],
    ended: int,
    path: Path,
    is_continued: bool,
    is_alive: bool,
) -> None:
    run = tracker.run(result.run_id)
    if run is None and not entries:
        return
    if run is None:
        raise LookupError(f"the run {result.run_id} is not in the store")
    if not run.is_active:  # deleted by a person: nothing of it is wanted
        return
    batch, files = _gathered(entries)
    if store.database is not None:
        for source, _ in files:
            if not any(is_own(RunFolder(folder)) for folder in source.resolve().parents):
                raise ValueError(f"{str(source)!r:.80} is in the folder of no run that was started here by you")
    there = _identities(tracker.history(run.id, {point.name for point in batch.points})) if batch.points else set()
    batch.points = [point for point in batch.points if not _identities([point]) <= there]
    batch.params = {name: value for name, value in batch.params.items() if name not in run.params}
    if is_continued or run.status == "FINISHED":
        # A run that has finished stays so, whatever a journal says that was copied here, or came late.
        batch.status = None
        batch.tags.pop("failure", None)
    elif (batch.status or (run.status, None))[0] == "RUNNING":
        batch.status = None
        if not is_alive and not _is_at_work(path, run.id):
            batch.status, result.has_died = ("FAILED", ended), True
            batch.tags.setdefault("failure", ENDED)
    if result.has_died and not entries and not result.damaged and _is_blank(tracker, run):
        result.has_died, result.is_blank = False, tracker.delete(run.id, ("RUNNING",))
        return
    tracker.log_batch(run.id, batch)
    for source, folder in files:
        if source.exists():
            tracker.upload(run.id, source, folder)
    result.points = sum(not point.name.startswith(SYSTEM) for point in batch.points)
    others = (batch.params, batch.tags, batch.datasets, files)
    result.others = sum(map(len, others)) + (batch.status is not None)


def _is_blank(tracker: Tracker, run: Run) -> bool:
    """Whether a run holds nothing but its name: no parameter, no point, and no file but logs."""
    folder = local_path(run.artifact_uri)
    if run.params or folder is None or any(True for _ in tracker.history(run.id)):
        return False
    begun = set(RunFolder(folder).unfinished())
    logs = RunFolder(folder).log(0).parent
    return all(path in begun or logs in path.parents for path in folder.rglob("*") if path.is_file())


def gather(entries: list[Entry]) -> Batch:
    """Entries as one batch; of two entries for one thing, the later."""
    return _gathered(entries)[0]


def _gathered(entries: list[Entry]) -> tuple[Batch, list[tuple[Path, str | None]]]:
    batch, files = Batch(), []
    for entry in entries:
        match entry:
            case ("points", moment, step, values):
                if not (isinstance(moment, int) and isinstance(step, int)):
                    raise ValueError(f"points at the time {moment!r:.40} and the step {step!r:.40}")
                batch.points += [Point(name, value, moment, step) for name, value in values.items()]
            case ("params", values):
                batch.params |= values
            case ("tags", values):
                batch.tags |= values
            case ("dataset", [name, digest, kind, source, profile]):
                texts = (name, digest, kind, source, profile)
                if not all(isinstance(text, str) for text in texts):
                    raise ValueError(f"the data {texts!r:.40} are none")
                batch.datasets.append(Dataset(*texts))
            case ("status", word, ended):
                if word not in STATUSES or not isinstance(ended, int | None):
                    raise ValueError(f"the status {word!r:.40} at {ended!r:.40} is none")
                batch.status = (word, ended)
            case ("artifact", path, folder):
                files.append((Path(path), folder))
    return batch, files


def _identities(points: Any) -> set[tuple[str, int, bool, float]]:
    """What tells points of one run apart: not their time, since a continued run has logged them at another."""
    return {(point.name, point.step, *stored(point.value)) for point in points}


def _is_at_work(path: Path, run_id: str) -> bool:
    """Whether another process, which runs, writes the same run."""
    for other in path.parent.glob(f"{run_id}.*{_SUFFIX}"):
        if other != path:
            with _claimed(other) as descriptor:
                if descriptor is None and other.exists():
                    return True
    return False


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[int | None]:
    """An open journal, locked for us; None: a process has it, or had it and removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        yield None
        return
    try:
        state = os.fstat(descriptor)
        if state.st_uid != _user() or state.st_mode & 0o022:
            log.warning("%s is left alone: another user could have written it", path)
            yield None
            return
        is_ours = stat.S_ISREG(state.st_mode) and _hold(descriptor) and os.fstat(descriptor).st_nlink > 0
        yield descriptor if is_ours else None
    finally:
        os.close(descriptor)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows has no owners to compare


def _hold(descriptor: int) -> bool:
    """Locks a file for as long as it is open; False: a process has it, or nothing can be locked here."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read(descriptor: int) -> tuple[dict[str, object], list[Entry], int]:
    """What a journal tells of its run and process, its entries, and how many lines at least are damaged or missing.

    The last line may be unfinished: its process was killed while it wrote.
    """
    size = os.fstat(descriptor).st_size
    if size > MAX_BYTES:
        raise ValueError(f"it has {size:,} bytes, and at most {MAX_BYTES:,} are read")
    first, *lines = [_parsed(line) for line in os.pread(descriptor, size, 0).split(b"\n")[:-1]] or [None]
    header = first[0][0] if first and isinstance(first[0][0], dict) else {}
    if "format" in header and first and first[1] is None:
        header = {}
    run_id = header.get("run")
    if run_id is not None and not (isinstance(run_id, str) and _RUN_ID.fullmatch(run_id)):
        raise ValueError(f"{run_id!r:.60} is not the id of a run")
    if header and "format" not in header:
        plain = [found for found in lines if found and isinstance(found[0][0], str)]
        return header, [entry for entry, _ in plain], len(lines) - len(plain)
    there = {number: entry for entry, number in filter(None, lines) if number is not None}
    missing = max(there) - min(there) + 1 - len(there) if there else 0
    entries = [there[number] for number in sorted(there)]
    return header, entries, max(missing, len(lines) - len(there)) + (not header)


def _parsed(line: bytes) -> tuple[Entry, int | None] | None:
    """The entry of a line, and its number where its check sum fits; None: it is damaged."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):  # also text that is no UTF-8
        entry = tuple(json.loads(line))
        cut = len(line) + 1 - len(_SUM % 0)
        if len(entry) > 2 and line[cut:] + b"\n" == _SUM % zlib.crc32(line[:cut] + b"]") and isinstance(entry[-2], int):
            return entry[:-2], entry[-2]
        if entry and not (isinstance(entry[-1], str) and _HEX.fullmatch(entry[-1])):
            return entry, None
    return None


def _ended(descriptor: int) -> int:
    """When the last entry was made, milliseconds since 1970."""
    return os.fstat(descriptor).st_mtime_ns // 1_000_000


def _remove(path: Path) -> None:
    """Removes a journal, and the folder with the last one."""
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
