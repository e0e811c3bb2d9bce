"""Send the unsent data of ended processes, see `deeplightning.tracking.claims`.

A run becomes FAILED if its process ended without logging a status.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from deeplightning.faults import SetupError, count
from deeplightning.runfolder import RunFolder
from deeplightning.tracking import claims
from deeplightning.tracking.claims import artifacts_of, metrics_of, read_claim, read_header, remove_claim, stale_claims
from deeplightning.tracking.client import Client
from deeplightning.tracking.delivery import Delivery
from deeplightning.tracking.entities import Batch, Run, run_of
from deeplightning.tracking.metrics_file import read_lines, safe_position, sent_file
from deeplightning.tracking.store import Store, explain, first_line, is_transient

KILLED_REASON = "the process was killed"
"""Reason of the failure of a run whose process ended without logging a status."""
SILENT_SECONDS = 24 * 3600.0
"""Time without output after which `runs --sync` considers another machine's process dead."""


def send_leftovers(store: Store, silent: float | None = None) -> Iterator[str]:
    """Send the unsent data of ended processes to a store, and yield a line for each run. Runs of running processes are
    skipped.

    Args:
        silent: seconds without output after which another machine's process counts as dead; None: never, and its run is
            not reported.

    Raises:
        SetupError: the store cannot be used, or does not answer; unsent data is kept.
    """
    client: Client | None = None
    for path, descriptor in stale_claims(store):
        run_id = path.name.partition(".")[0]
        try:
            claim = read_claim(descriptor)
            if claim["run"] != run_id:
                raise ValueError(f"its name has the run {run_id:.40}, its content {claim['run']:.40}")
            metrics = metrics_of(store, claim)
            last = (metrics if metrics.exists() else path).stat().st_mtime
            if claims.is_elsewhere(claim) and (silent is None or time.time() - last < silent):
                if silent is not None:
                    yield (
                        f"{run_id}  skipped: its process ran on {claim.get('host')}; run `deeplightning runs` there, "
                        f"or --sync here once it has logged nothing for {silent / 3600:g} hours"
                    )
                continue
            client = client or Client(store)
            outcome = _send(store, client, run_id, metrics, int(last * 1000))
        except Exception as error:  # MLflow, SQLite and the network each have their own errors
            if isinstance(error, SetupError) or (client is not None and is_transient(error)):
                raise SetupError(
                    f"{explain(error, store)} Unsent data is kept; once the store answers, send it: deeplightning "
                    "runs --sync"
                ) from error
            kept = path.with_suffix(".refused")
            outcome = f"refused ({first_line(error)}); kept as {kept}"
            path.rename(kept)
        else:
            remove_claim(path)
        yield f"{run_id}  {outcome}"


def send_leftovers_quietly(store: Store) -> Iterator[str]:
    """Do the same for a command that reads the runs: yield an error of the store as a warning."""
    try:
        yield from send_leftovers(store)
    except SetupError as error:
        yield f"warning: {error}"


def end_run(store: Store, run_id: str, tags: dict[str, str]) -> None:
    """Send the unsent data of a killed process, and mark its run as failed, with tags.

    Raises:
        Exception: an error of the store.
    """
    list(send_leftovers(store))
    client = Client(store)
    if client.run(run_id) is not None:
        client.log_batch(run_id, Batch(tags=tags, status=("FAILED", time.time_ns() // 1_000_000)))


def _send(store: Store, client: Client, run_id: str, metrics: Path, ended: int) -> str:
    """Send the rest of a run, and return the outcome. The run becomes FAILED if its process logged no final status;
    `ended` is when that process ended, in milliseconds since 1970."""
    run, nothing = client.run(run_id), "0 points sent"
    if run is not None and not run.is_active:  # deleted by the user: discard the rest
        return nothing
    header, blank = read_header(metrics), "deleted: its process was killed before it recorded anything"
    if run is None and header.get("run") != run_id:
        if any(line for _, line in read_lines(metrics)):
            raise LookupError(f"the run {run_id} is not in the store")
        return blank
    start = safe_position(metrics) if run is not None else 0
    rest = [line for _, line in read_lines(metrics, start)]
    logged = next((line["status"] for line in reversed(rest) if "status" in line), None)
    was_killed = (logged or (run.status if run else "RUNNING")) == "RUNNING"
    damaged = rest.count({})
    folder = artifacts_of(store, run or run_of(header))
    if logged in (None, "RUNNING") and not damaged and _is_blank(run, folder, metrics):
        # FAILED: set by MLflow's own calls in another rank that outlived the first.
        return blank if run is None or client.delete(run_id, ("RUNNING", "FAILED")) else nothing
    delivery = Delivery(store, run_id, metrics, client)
    delivery.position, delivery.is_leftover = start, True
    delivery.known_position = delivery.known_position if run is not None else 0
    delivery.has_finished = run is not None and run.status == "FINISHED"
    delivery.params = dict(run.params) if run is not None else {}
    delivery.send(metrics.stat().st_size if metrics.exists() else 0)
    outcome = f"{count(delivery.points, 'point')} sent"
    if was_killed and len(claims.claims(store, run_id)) < 2:  # otherwise another process has resumed it meanwhile
        reason = {} if run is not None and "failure" in run.tags else {"failure": KILLED_REASON}
        delivery.deliver([(None, {"tags": reason}), (None, {"status": "FAILED", "time": ended})])
        outcome += f"; FAILED: {KILLED_REASON}"
    if damaged:
        outcome += f"; {count(damaged, 'damaged line')} of its metrics.jsonl not sent"
    return outcome


def _is_blank(run: Run | None, folder: Path | None, metrics: Path) -> bool:
    """Return whether a run has only a name: no parameter, no point, and no file except logs."""
    if folder is None or (run is not None and run.params):
        return False
    if any(line.keys() & {"values", "params", "dataset", "artifact"} for _, line in read_lines(metrics)):
        return False
    ignored = {*RunFolder(folder).unfinished(), metrics, sent_file(metrics)}
    logs = RunFolder(folder).log(0).parent
    return all(path in ignored or logs in path.parents for path in folder.rglob("*") if path.is_file())
