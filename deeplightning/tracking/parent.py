"""The run above those of a search or a bisection: in MLflow their parent, on disk the folder of what was found.

It is written without a logger of Lightning's: such a one has a thread of its own, and the search forks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deeplightning.config.schema import Config
from deeplightning.config.tree import line
from deeplightning.faults import UserError
from deeplightning.tracking.build import experiment_of
from deeplightning.tracking.claims import find_run
from deeplightning.tracking.client import Client
from deeplightning.tracking.entities import MAX_TAG, Batch, Point, flatten
from deeplightning.tracking.environment import run_tags
from deeplightning.tracking.store import Store, check_writable, explain, local_path, locate, remove_files

log = logging.getLogger(__name__)

PARENT = "mlflow.parentRunId"
SEARCH, TRIAL = "deeplightning.search", "deeplightning.trial"
"""Tags of runs: the search's own sign, on the parent and on its trials; and a trial's number."""


class Stopped(UserError):
    """A signal ended a command that starts runs, which the same command continues."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class Parent:
    """The parent run, in the store that the config's logger tracks into; without MLflow just a folder.

    Args:
        cfg: the search's config.
        name: the search's name.
        kind: the folder of the store that has those of all searches.
        mark: what its folder's name has more than its own, where several may have the same name.
    """

    def __init__(self, cfg: Config, name: str, kind: str = "searches", mark: str = ""):
        self.cfg, self.name, self.kind, self.mark = cfg, name, kind, mark
        self.is_tracked = re.search(r"\.(MLflowLogger|MLFlowLogger)$", cfg.logger.type) is not None
        self.experiment = experiment_of(cfg.logger.type, cfg.logger.params)
        self.joined = os.environ.get("MLFLOW_RUN_ID") if self.is_tracked else None  # under `mlflow run`
        given = os.environ.get("MLFLOW_TRACKING_URI")
        asked = cfg.logger.params.get("tracking_uri") or given or cfg.logger.params.get("save_dir")
        self.address: str | None = (self.joined and given) or asked
        self.store: Store | None = locate(self.address) if self.is_tracked else None
        self.run_id: str | None = None
        self._folder: Path | None = None
        self._client: Client | None = None

    @property
    def home(self) -> Path:
        """Where the search keeps what it remembers: beside the tracking store, or below `runs` where that is not on
        this machine."""
        base = self.store.folder if self.store is not None else None
        experiment, name = (re.sub(r"[^\w.-]+", "_", text) or "_" for text in (self.experiment, self.name + self.mark))
        return (base or Path("runs")).absolute() / self.kind / experiment / name

    @property
    def folder(self) -> Path:
        """Where what the search found is written, and stays."""
        return self._folder or self.home

    def open(self, run_id: str | None, sign: str) -> str | None:
        """Begin the run, or resume it.

        Args:
            run_id: of a search that is resumed.
            sign: the search's own, by which its runs are known where it could not write their ids down.

        Returns:
            The run's id; None where none is tracked.

        Raises:
            SetupError: the store cannot be used.
        """
        if self.store is None:
            return None
        with self._opened() as client:
            run_id = run_id or self.joined
            run = client.run(run_id) if run_id is not None else None
            if run is None or not run.is_active:
                experiment = client.experiment(self.experiment)
                run = client.create_run(experiment, self.name, self._tags(sign))
                client.log_batch(run.id, Batch(params=flatten(self.cfg.public())))
            else:
                tags = {SEARCH: sign, "deeplightning.searched": self.name}
                client.log_batch(run.id, Batch(tags=tags, status=("RUNNING", None)))
            self.run_id, self._folder = run.id, local_path(run.artifact_uri)
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
        return self.run_id

    def is_there(self, run_id: str) -> bool:
        """Return whether the parent run of a former start is in the store and was not deleted."""
        run = find_run(self.store, run_id) if self.store is not None else None
        return self.store is None or (run is not None and run.is_active)

    def _tags(self, sign: str) -> dict[str, str]:
        own = self.cfg.logger.params.get("tags") or {}
        tags = run_tags() | {name: self.cfg.redact(str(value)) for name, value in own.items()}
        return {name: str(value)[:MAX_TAG] for name, value in tags.items()} | {SEARCH: sign}

    @contextmanager
    def _opened(self) -> Iterator[Client]:
        """Yield a client of the store; report what goes wrong inside as a fault of the store."""
        assert self.store is not None
        try:
            if self._client is None:
                if self.store.database is not None and self.store.database.exists():
                    check_writable(self.store)
                self._client = Client(self.store)
            yield self._client
        except Exception as error:  # MLflow, SQLite and requests each have their own
            if isinstance(error, OSError) and error.errno is not None and not self.store.is_remote:
                raise  # a full disk is reported as such
            raise explain(error, self.store) from error

    def environment(self, number: int, sign: str) -> dict[str, str]:
        """Return variables that make a run of another process a child of this one."""
        if self.run_id is None:
            return {}
        given = json.loads(os.environ.get("MLFLOW_RUN_CONTEXT") or "{}")
        return {"MLFLOW_RUN_CONTEXT": json.dumps(given | {PARENT: self.run_id, SEARCH: sign, TRIAL: str(number)})}

    def overrides(self, name: str) -> list[str]:
        """Return what a trial's config says differently of its tracking: among others its name."""
        if not self.is_tracked:
            return []
        moved = [f"logger.params.tracking_uri='{self.address}'"] if self.joined and self.address else []
        return [f"logger.params.run_name={line(name)}", *moved]

    def log(self, points: list[Point], tags: dict[str, str]) -> None:
        """Write points and tags; what is there already stays once."""
        if self.run_id is not None:
            with self._opened() as client:
                client.log_batch(self.run_id, Batch(points=points, tags=tags))

    def known(self, sign: str) -> dict[int | None, str]:
        """Return the runs of this search in the store: of trials by their numbers, its own under None. For the rare
        kill between the making of a run and the note of its id; imports MLflow."""
        if self.store is None or (self.store.database is not None and not self.store.database.exists()):
            return {}
        with self._opened() as client:
            found = client.tagged(self.experiment, SEARCH, sign)
        numbers = [(run.tags.get(TRIAL), run.id) for run in found]
        return {None if number is None else int(number): run_id for number, run_id in numbers}

    def delete(self, run_id: str, folder: Path | None) -> None:
        """Remove the run of a trial that left nothing to resume from."""
        if self.store is None:
            return
        with self._opened() as client:
            client.delete(run_id, ("RUNNING", "FAILED", "KILLED"))
        if folder is not None and folder.is_dir() and (why := remove_files(self.store, run_id, folder)):
            log.warning("%s: left as it is: %s", folder.parent, why)

    def close(self, status: str, reason: str | None = None) -> None:
        """End the run: FINISHED, FAILED or KILLED; files reach a server that keeps them elsewhere."""
        if self.run_id is None:
            return
        with self._opened() as client:
            if self._folder is None:
                for path in sorted(p for p in self.home.iterdir() if p.suffix in (".yaml", ".csv", ".json", ".png")):
                    client.upload(self.run_id, path, None)
            tags = {"failure": reason[:1000]} if reason else {}
            client.log_batch(self.run_id, Batch(tags=tags, status=(status, time.time_ns() // 1_000_000)))
