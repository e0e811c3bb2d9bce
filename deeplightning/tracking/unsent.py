"""Send what ended processes have left unsent of their runs, see `deeplightning.tracking.claims`.

A run is FAILED if its process ended without a word.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from deeplightning.faults import SetupError, count
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.claims import header_in, is_elsewhere, left_claims, metrics_of, read_claim, remove_claim
from deeplightning.tracking.client import Client
from deeplightning.tracking.delivery import Delivery
from deeplightning.tracking.entities import Batch, Run, run_of
from deeplightning.tracking.metrics_file import read_lines, safe_position, sent_file
from deeplightning.tracking.store import Store, explain, first_line, is_transient, local_path

ENDED = "the process was killed"
"""The reason of a run whose process ended without a word."""
SILENT_SECONDS = 24 * 3600.0
"""Seconds of silence after which `runs --sync` takes another machine's process for dead."""


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
    for path, descriptor in left_claims(store):
        run_id = path.name.partition(".")[0]
        try:
            claim = read_claim(descriptor)
            if claim["run"] != run_id:
                raise ValueError(f"it is named after the run {run_id:.40}, and of {claim['run']:.40}")
            metrics = metrics_of(store, claim)
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
            remove_claim(path)
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


def _send(store: Store, client: Client, run_id: str, metrics: Path, ended: int) -> str:
    """Send the rest of a run, and return what came of it. It is FAILED if its process, which ended at a time in
    milliseconds since 1970, has not said how."""
    run, nothing = client.run(run_id), "0 points sent"
    if run is not None and not run.is_active:  # deleted by a person: nothing of it is wanted
        return nothing
    header, blank = header_in(metrics), "deleted: its process was killed before it recorded anything"
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


def _is_blank(run: Run | None, folder: Path | None, metrics: Path) -> bool:
    """Return whether a run holds nothing but its name: no parameter, no point, and no file but logs."""
    if folder is None or (run is not None and run.params):
        return False
    if any(line.keys() & {"values", "params", "dataset", "artifact"} for _, line in read_lines(metrics)):
        return False
    begun = {*RunFolder(folder).unfinished(), metrics, sent_file(metrics)}
    logs = RunFolder(folder).log(0).parent
    return all(path in begun or logs in path.parents for path in folder.rglob("*") if path.is_file())
