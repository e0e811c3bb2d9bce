"""Send the lines of a run's `metrics.jsonl` to its tracking store, in the run's own thread or by a later command."""

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
from deeplightning.tracking.metrics_file import Line, note_sent, points_of, read_lines, sent_position, sync
from deeplightning.tracking.mlflow_store import NO_FORK
from deeplightning.tracking.store import Store, first_line, is_transient, raise_if_locked

log = logging.getLogger("deeplightning.tracking")

BATCH = 1000
"""The most points that are sent together."""
_AGAIN = {"run", "values", "params", "dataset"}
_ALONE = {"run", "untag", "artifact", "model"}


class Delivery:
    """Send one run.

    Args:
        store: where the run is, or is to be made.
        metrics: the run's file.
        client: of the store, if it is open already.
    """

    def __init__(self, store: Store, run_id: str, metrics: Path, client: Client | None = None):
        self.store, self.run_id, self.metrics, self.client = store, run_id, metrics, client
        self.position = sent_position(metrics)  # from which to send
        self.known = self.position  # bytes that the store has; of lines before, points and parameters alone go again
        self.points = 0  # that were sent
        self.params: dict[str, str] = {}  # that the store has
        self.is_leftover = False  # of an ended process: only files of this user's runs are sent
        self.has_finished = False  # it stays FINISHED, whatever a file says that was copied here, or comes late

    def send(self, until: int) -> None:
        """Send the lines up to a position of the file.

        What the store refuses is reported and given up, so that a parameter costs no point.

        Raises:
            Exception: the store does not answer now; what it has not got is sent by the next call.
        """
        sync(self.metrics)  # else the store may keep a point which a loss of power takes from the file
        self.deliver(read_lines(self.metrics, self.position, until))
        self.position = max(self.position, until)  # also behind a last line that is torn

    def deliver(self, lines: Iterable[tuple[int | None, Line]]) -> None:
        """Send lines in their order.

        Args:
            lines: with the position behind each; None: they are not in the file.
        """
        client = self.client = self.client or Client(self.store)
        batch, behind = Batch(), self.position
        for position, line in lines:
            if position is not None and position <= self.known and not line.keys() & _AGAIN:
                continue
            is_alone = bool(line.keys() & _ALONE)
            if is_alone or len(batch.points) >= BATCH:
                self._flush(batch, behind)
                batch = Batch()
            if is_alone:
                self._do(client, line)
            else:
                self._add(batch, line)
            behind = behind if position is None else position
        self._flush(batch, behind)

    def _add(self, batch: Batch, line: Line) -> None:
        """Add what a line says to a batch."""
        if "status" in line and not self.has_finished:
            batch.status = (line["status"], line.get("time"))
        elif "params" in line:
            batch.params |= {name: v for name, v in line["params"].items() if self.params.get(name) != v}
        elif "tags" in line:
            batch.tags |= {n: v for n, v in line["tags"].items() if not (self.has_finished and n == "failure")}
        elif "dataset" in line:
            batch.datasets.append(Dataset(*line["dataset"]))
        batch.points += points_of(line)

    def _do(self, client: Client, line: Line) -> None:
        """Do what a line asks for that is no part of a batch."""
        if "run" in line:
            if line["run"].get("run") == self.run_id:
                with self._alone():  # what the store refuses here is an error, since it has nothing to add to
                    client.make_run(run_of(line["run"]))
            return
        if "untag" in line:
            self._try(f"the tag {line['untag']}", partial(client.drop_tag, self.run_id, line["untag"]))
            return
        kind = "artifact" if "artifact" in line else "model"
        path, *rest = line[kind]
        source = Path(path).resolve()
        is_foreign = self.is_leftover and self.store.database is not None  # it may have come with the store
        if not source.exists():
            return
        if is_foreign and not any(is_own(RunFolder(folder)) for folder in (source, *source.parents)):
            log.warning("%s is not sent: it is not in the folder of a run that you started here", source)
            return
        do = client.upload if kind == "artifact" else client.log_model
        self._try(f"the {kind} {source.name}", partial(do, self.run_id, source, *rest))

    def _flush(self, batch: Batch, position: int) -> None:
        """Send a batch, part by part, so that a parameter which the store refuses costs no point."""
        assert self.client is not None
        others = (Batch(params=batch.params), Batch(tags=batch.tags), Batch(datasets=batch.datasets))
        for part in (*others, Batch(batch.points), Batch(status=batch.status)):
            if part != Batch():
                self._try(str(part)[:200], partial(self.client.log_batch, self.run_id, part))
        self.params |= batch.params
        self.points += sum(not point.name.startswith(SYSTEM) for point in batch.points)
        if position != self.position:
            self.position = position
            note_sent(self.metrics, position)

    def _try(self, words: str, do: Callable[[], object]) -> None:
        """Report what the store refuses; raise an error that may pass."""
        try:
            with self._alone():
                do()
        except Exception as error:  # MLflow, SQLAlchemy and the network each have their own
            if is_transient(error):
                raise
            log.warning("Not tracked in %s: %s (%s)", self.store.shown, words, first_line(error))

    def _alone(self) -> Any:
        """Forbid a fork inside a transaction of SQLite; a server has its own, and may take long."""
        if self.store.database is None:
            return nullcontext()
        raise_if_locked(self.store.database)  # instead of waiting for 20 seconds with the lock
        return NO_FORK
