"""List runs, and remove unfinished ones."""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from deeplightning.faults import CheckpointError, SetupError
from deeplightning.process.terminal import styled
from deeplightning.tracking.claims import artifacts_of, is_in_use, unsent_runs
from deeplightning.tracking.client import Client
from deeplightning.tracking.entities import Run
from deeplightning.tracking.reader import open_reader
from deeplightning.tracking.store import Store, explained, locate, remove_files
from deeplightning.words import printable

UNFINISHED = ("FAILED", "KILLED")
REMOVABLE = (*UNFINISHED, "FINISHED", "PRUNED")
SHOWN = ("test_acc", "val_acc", "test_loss", "val_loss", "train_loss")


def listing(
    tracking_uri: str | None,
    statuses: Collection[str] = (),
    metric: str | None = None,
    name: str | None = None,
    experiment: str | None = None,
) -> list[dict[str, str]]:
    """Return the runs of a store, the newest first: id, status, started (UTC), experiment, name, result, folder.

    A trial that its search stopped early is PRUNED here, and KILLED in the store.

    Args:
        tracking_uri: the store; None for MLFLOW_TRACKING_URI, else `mlruns`.
        statuses: only runs with one of these.
        metric: only runs with this metric, which is then shown as the result.
        name: only runs whose name or experiment contains this; * matches anything.
        experiment: only runs of the experiment of this name.

    Raises:
        SetupError: the store cannot be opened.
    """
    name = name and name.replace("[", "[[]").replace("?", "[?]")  # only * is special
    rows = []
    with _store(tracking_uri) as store:
        runs = open_reader(store).listing()
        sent = {run.id for run in runs}
        unsent = [run for run in unsent_runs(store) if run.id not in sent]
        for run in sorted(unsent + runs, key=lambda run: run.started, reverse=True) if unsent else runs:
            status = "PRUNED" if run.is_pruned and run.status == "KILLED" else run.status
            if statuses and status not in statuses:
                continue
            if name is not None and not any(fnmatchcase(n, f"*{name}*") for n in (run.name, run.experiment)):
                continue
            if experiment not in (None, run.experiment) or (metric is not None and metric not in run.metrics):
                continue
            rows.append(_row(store, run, SHOWN if metric is None else (metric,)) | {"status": status})
    return rows


def lines(rows: Sequence[dict[str, str]], columns: int | None) -> Iterator[str]:
    """Yield the rows of `listing` as text that is safe to print.

    Args:
        columns: the width of a terminal, for a table. If it does not fit, folder, experiment and id are dropped, in
            this order; the id is kept if the names are not unique. None for everything, unaligned.
    """
    rows = [{name: printable(text) for name, text in row.items()} for row in rows]
    if columns is None or not rows:
        yield from ("  ".join(row.values()) for row in rows)
        return
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    names = {row["name"] for row in rows}
    for name in ("folder", "experiment", *(["id"] if len(names) == len(rows) and "" not in names else [])):
        if sum(widths.values()) + 2 * (len(widths) - 1) >= columns:
            del widths[name]
    yield styled("  ".join(name.ljust(size) for name, size in widths.items()).rstrip(), 2, sys.stdout)
    yield from ("  ".join(row[name].ljust(size) for name, size in widths.items()).rstrip() for row in rows)


def newest(tracking_uri: str | None, *filters: Any) -> str:
    """Return `runs:/ID` of the run of a store that started last.

    Args:
        filters: arguments of `listing` that select runs.

    Raises:
        CheckpointError: there is no such run.
        SetupError: there is no store, or it cannot be opened.
    """
    rows = listing(tracking_uri, *filters)
    if not rows:
        store, which = locate(tracking_uri).shown, "such run" if any(filters) else "run"
        raise CheckpointError(f"{store}: there is no {which}. `deeplightning runs` lists the runs")
    return f"runs:/{rows[0]['id']}"


def _row(store: Store, run: Run, shown: Sequence[str]) -> dict[str, str]:
    started = datetime.fromtimestamp(run.started / 1000, UTC)
    best = next(((name, run.metrics[name]) for name in shown if name in run.metrics), None)
    return {
        "id": run.id,
        "status": run.status,
        "started": started.isoformat(" ", timespec="seconds").removesuffix("+00:00"),
        "experiment": run.experiment,
        "name": run.name,
        "result": f"{best[0]} {best[1]:.4f}" if best else "",
        "folder": str(artifacts_of(store, run) or run.artifact_uri),
    }


def remove(
    tracking_uri: str | None,
    rows: list[dict[str, str]],
    statuses: Collection[str] = UNFINISHED,
    report: Callable[[str], None] = lambda text: None,
) -> list[dict[str, str]]:
    """Delete runs, with their files if the store keeps these on this machine; keep a run that has started again.

    Args:
        statuses: a run that no longer has one of these is not deleted. RUNNING must not be one of them.
        report: called with a line for each run or folder that is not removed.

    Returns:
        The rows of those that were deleted.
    """
    assert set(statuses) <= set(REMOVABLE)
    deleted = []
    with _store(tracking_uri) as store:
        client, known = Client(store), {"KILLED" if status == "PRUNED" else status for status in statuses}
        for row in rows:
            folder = Path(row["folder"])
            if is_in_use(store, row["id"], folder):  # it may have been resumed, and not be RUNNING in the store yet
                report(f"{row['id']}: not removed: a process uses it, or has left data to send")
            elif client.delete(row["id"], known):
                deleted.append(row)
                if folder.is_dir() and (why := remove_files(store, row["id"], folder)):
                    report(f"{folder.parent}: not removed: {why}")
    return deleted


@contextlib.contextmanager
def _store(tracking_uri: str | None) -> Iterator[Store]:
    """Yield a store that has runs; report an error inside the block as an error of the store."""
    store = locate(tracking_uri)
    if store.database is not None and not store.database.exists():  # MLflow would create one
        raise SetupError(f"{store.shown}: there are no runs yet; `deeplightning train` starts one")
    with explained(store):
        yield store
