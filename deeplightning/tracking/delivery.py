"""Send the lines of a run's `metrics.jsonl` to its tracking store, in a thread of the run or by a later command."""

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from deeplightning.config.own_runs import is_own
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.client import Client
from deeplightning.tracking.entities import SYSTEM, Batch, Dataset, run_of
from deeplightning.tracking.metrics_file import Line, points_of, read_lines, save_sent_position, sent_position, sync
from deeplightning.tracking.mlflow_store import NO_FORK
from deeplightning.tracking.store import Store, first_line, is_transient, raise_if_locked

log = logging.getLogger("deeplightning.tracking")

MAX_BATCH_POINTS = 1000
"""Maximum number of points per request."""
_RESENT_KEYS = {"run", "values", "params", "dataset"}
_UNBATCHED_KEYS = {"run", "untag", "artifact", "model"}


class Delivery:
    """Sends the lines of one run.

    Args:
        store: store of the run, which may not have it yet.
        metrics: the run's `metrics.jsonl`.
        client: client of the store, if there is one.
    """

    def __init__(self, store: Store, run_id: str, metrics: Path, client: Client | None = None):
        self.store, self.run_id, self.metrics, self.client = store, run_id, metrics, client
        self.position = sent_position(metrics)  # in the file, where sending starts
        self.known_position = self.position  # the store has all lines before it; `_RESENT_KEYS` go again
        self.points = 0  # number of points sent
        self.params: dict[str, str] = {}  # parameters that the store has
        self.is_leftover = False  # left by an ended process: send only files of this user's runs
        self.has_finished = False  # it stays FINISHED, whatever a copied file or a late line says

    def send(self, until: int) -> None:
        """Send the lines up to a position of the file.

        Data that the store rejects is reported and dropped, so that a bad parameter does not cost points.

        Raises:
            Exception: the store does not answer now; the next call sends the rest.
        """
        sync(self.metrics)  # otherwise the store may have points that a power failure removes from the file
        self.deliver(read_lines(self.metrics, self.position, until))
        self.position = max(self.position, until)  # even past an incomplete last line

    def deliver(self, lines: Iterable[tuple[int | None, Line]]) -> None:
        """Send lines in order.

        Args:
            lines: each with the position after it, or None if it is not in the file.
        """
        client = self.client = self.client or Client(self.store)
        batch, end = Batch(), self.position
        for position, line in lines:
            if position is not None and position <= self.known_position and not line.keys() & _RESENT_KEYS:
                continue
            is_unbatched = bool(line.keys() & _UNBATCHED_KEYS)
            if is_unbatched or len(batch.points) >= MAX_BATCH_POINTS:
                self._flush(batch, end)
                batch = Batch()
            if is_unbatched:
                self._send_unbatched(client, line)
            else:
                self._add(batch, line)
            end = end if position is None else position
        self._flush(batch, end)

    def _add(self, batch: Batch, line: Line) -> None:
        """Add the content of a line to a batch."""
        if "status" in line and not self.has_finished:
            batch.status = (line["status"], line.get("time"))
        elif "params" in line:
            batch.params |= {name: v for name, v in line["params"].items() if self.params.get(name) != v}
        elif "tags" in line:
            batch.tags |= {n: v for n, v in line["tags"].items() if not (self.has_finished and n == "failure")}
        elif "dataset" in line:
            batch.datasets.append(Dataset(*line["dataset"]))
        batch.points += points_of(line)

    def _send_unbatched(self, client: Client, line: Line) -> None:
        """Send a line that cannot be part of a batch."""
        if "run" in line:
            if line["run"].get("run") == self.run_id:
                with self._forbid_fork():  # a rejection is an error here: without the run, nothing can be sent
                    client.make_run(run_of(line["run"]))
            return
        if "untag" in line:
            self._try(f"the tag {line['untag']}", partial(client.drop_tag, self.run_id, line["untag"]))
            return
        kind = "artifact" if "artifact" in line else "model"
        path, *rest = line[kind]
        source = Path(path).resolve()
        is_foreign = self.is_leftover and self.store.database is not None  # it may have been copied with the store
        if not source.exists():
            return
        if is_foreign and not any(is_own(RunFolder(folder)) for folder in (source, *source.parents)):
            log.warning("%s is not sent: it is not in the folder of a run that you started here", source)
            return
        do = client.upload if kind == "artifact" else client.log_model
        self._try(f"the {kind} {source.name}", partial(do, self.run_id, source, *rest))

    def _flush(self, batch: Batch, position: int) -> None:
        """Send a batch in parts, so that a rejected parameter does not cost points."""
        assert self.client is not None
        others = (Batch(params=batch.params), Batch(tags=batch.tags), Batch(datasets=batch.datasets))
        for part in (*others, Batch(batch.points), Batch(status=batch.status)):
            if part != Batch():
                self._try(str(part)[:200], partial(self.client.log_batch, self.run_id, part))
        self.params |= batch.params
        self.points += sum(not point.name.startswith(SYSTEM) for point in batch.points)
        if position != self.position:
            self.position = position
            save_sent_position(self.metrics, position)

    def _try(self, description: str, do: Callable[[], object]) -> None:
        """Report data that the store rejects; raise transient errors."""
        try:
            with self._forbid_fork():
                do()
        except Exception as error:  # MLflow, SQLAlchemy and the network each have their own errors
            if is_transient(error):
                raise
            log.warning("Not tracked in %s: %s (%s)", self.store.shown, description, first_line(error))

    def _forbid_fork(self) -> Any:
        """Forbid forks during an SQLite transaction. A server has its own transactions, which may take long."""
        if self.store.database is None:
            return nullcontext()
        raise_if_locked(self.store.database)  # instead of holding the lock for 20 seconds
        return NO_FORK
