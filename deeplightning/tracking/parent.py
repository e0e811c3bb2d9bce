"""The parent run of a search, group or bisection: a run in MLflow, and a folder with the results on disk.

It is written without a Lightning logger: ours has a thread, and the search forks.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deeplightning.config.schema import Config
from deeplightning.config.tree import line
from deeplightning.faults import UserError
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.build import experiment_of
from deeplightning.tracking.claims import Claim, artifacts_of, find_run, take_over
from deeplightning.tracking.client import Client
from deeplightning.tracking.entities import MAX_TAG, Batch, Point, flatten
from deeplightning.tracking.environment import run_tags
from deeplightning.tracking.store import Store, check_writable, explain, locate, remove_files

log = logging.getLogger(__name__)

PARENT = "mlflow.parentRunId"
SEARCH, TRIAL = "deeplightning.search", "deeplightning.trial"
"""Tags of runs: the id of the search, for the parent and its trials, and the number of a trial."""


class Stopped(UserError):
    """A signal ended a command that starts runs. Running the same command again continues it."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class Parent:
    """The parent run, in the store of the config's logger; without MLflow just a folder.

    Args:
        cfg: the search's config.
        name: the search's name.
        kind: name of the folder with all searches of a kind.
        suffix: appended to the name of the search's folder, if several searches may have the same name.
    """

    def __init__(self, cfg: Config, name: str, kind: str = "searches", suffix: str = ""):
        self.cfg, self.name, self.kind, self.suffix = cfg, name, kind, suffix
        self.is_tracked = re.search(r"\.(MLflowLogger|MLFlowLogger)$", cfg.logger.type) is not None
        self.experiment = experiment_of(cfg.logger.type, cfg.logger.params)
        self.joined = (os.environ.get("MLFLOW_RUN_ID") or None) if self.is_tracked else None  # under `mlflow run`
        given = os.environ.get("MLFLOW_TRACKING_URI")
        configured = cfg.logger.params.get("tracking_uri") or given or cfg.logger.params.get("save_dir")
        self.address: str | None = (self.joined and given) or configured
        self.store: Store | None = locate(self.address) if self.is_tracked else None
        self.run_id: str | None = None
        self._folder: Path | None = None
        self._client: Client | None = None
        self._claim: Claim | None = None

    @property
    def home(self) -> Path:
        """Folder with the state of the search: next to the tracking store, or below `runs` if the store is remote."""
        base = self.store.folder if self.store is not None else None
        experiment, name = (re.sub(r"[^\w.-]+", "_", raw) or "_" for raw in (self.experiment, self.name + self.suffix))
        return (base or Path("runs")).absolute() / self.kind / experiment / name

    @property
    def folder(self) -> Path:
        """Folder with the results of the search."""
        return self._folder or self.home

    def open(self, run_id: str | None, search_id: str) -> str | None:
        """Start or resume the run.

        Args:
            run_id: run of a resumed search.
            search_id: identifies the runs of the search, even if their ids could not be recorded.

        Returns:
            The run's id, or None without a tracker.

        Raises:
            SetupError: the store cannot be used.
        """
        if self.store is None:
            return None
        with self._opened() as client:
            run_id = run_id or self.joined
            run = client.run(run_id) if run_id is not None else None
            if run is None or not run.is_active:
                run = client.create_run(client.experiment(self.experiment), self.name, self._tags(search_id))
                client.log_batch(run.id, Batch(params=flatten(self.cfg.public())))
            else:
                tags = {SEARCH: search_id, "deeplightning.searched": self.name}
                client.log_batch(run.id, Batch(tags=tags, status=("RUNNING", None)))
                client.drop_tag(run.id, "failure")  # of an earlier command
            self.run_id, self._folder = run.id, artifacts_of(self.store, run)
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, RuntimeError):  # then its status stays RUNNING if this process is killed
            self._claim = Claim(self.store, run.id, RunFolder(self.folder).metrics)
            take_over(self.store, run.id)
        return self.run_id

    def run_exists(self, run_id: str) -> bool:
        """Return whether the parent run of an earlier start exists and was not deleted."""
        run = find_run(self.store, run_id) if self.store is not None else None
        return self.store is None or (run is not None and run.is_active)

    def _tags(self, search_id: str) -> dict[str, str]:
        own = self.cfg.logger.params.get("tags") or {}
        tags = run_tags() | {name: self.cfg.redact(str(value)) for name, value in own.items()}
        return {name: str(value)[:MAX_TAG] for name, value in tags.items()} | {SEARCH: search_id}

    @contextmanager
    def _opened(self) -> Iterator[Client]:
        """Yield a client of the store; report errors inside the block as errors of the store."""
        assert self.store is not None
        try:
            if self._client is None:
                if self.store.database is not None and self.store.database.exists():
                    check_writable(self.store)
                self._client = Client(self.store)
            yield self._client
        except Exception as error:  # MLflow, SQLite and requests each have their own errors
            if isinstance(error, OSError) and error.errno is not None and not self.store.is_remote:
                raise  # a full disk is reported as such
            raise explain(error, self.store) from error

    def environment(self, number: int, search_id: str) -> dict[str, str]:
        """Return environment variables that make a run of another process a child of this run."""
        if self.run_id is None:
            return {}
        given = json.loads(os.environ.get("MLFLOW_RUN_CONTEXT") or "{}")
        return {"MLFLOW_RUN_CONTEXT": json.dumps(given | {PARENT: self.run_id, SEARCH: search_id, TRIAL: str(number)})}

    def overrides(self, name: str) -> list[str]:
        """Return overrides for the tracking of a trial: its name, and its store if that differs."""
        if not self.is_tracked:
            return []
        uri = "${oc.env:MLFLOW_TRACKING_URI}" if "@" in os.environ.get("MLFLOW_TRACKING_URI", "") else self.address
        moved = [f"logger.params.tracking_uri='{uri}'"] if self.joined and self.address else []
        return [f"logger.params.run_name={line(name)}", *moved]

    def log(self, points: list[Point], tags: dict[str, str]) -> None:
        """Write points and tags. Existing points are not duplicated."""
        if self.run_id is not None:
            with self._opened() as client:
                client.log_batch(self.run_id, Batch(points=points, tags=tags))

    def find_runs(self, search_id: str) -> dict[int | None, str]:
        """Return the runs of this search in the store: trials by number, the parent under None. Needed if a kill came
        between creating a run and recording its id. Imports MLflow."""
        if self.store is None or (self.store.database is not None and not self.store.database.exists()):
            return {}
        with self._opened() as client:
            found = client.runs_with_tag(self.experiment, SEARCH, search_id)
        return {None if (number := run.tags.get(TRIAL)) is None else int(number): run.id for run in found}

    def delete(self, run_id: str, folder: Path | None) -> None:
        """Remove the run of a trial that cannot be resumed."""
        if self.store is None:
            return
        with self._opened() as client:
            client.delete(run_id, ("RUNNING", "FAILED", "KILLED"))
        if folder is not None and folder.is_dir() and (why := remove_files(self.store, run_id, folder)):
            log.warning("%s: not removed: %s", folder.parent, why)

    def close(self, status: str, reason: str | None = None) -> None:
        """End the run as FINISHED, FAILED or KILLED. Upload its files if its artifacts are remote."""
        if self.run_id is None:
            return
        with self._opened() as client:
            if self._folder is None:
                for path in sorted(p for p in self.home.iterdir() if p.suffix in (".yaml", ".csv", ".json", ".png")):
                    client.upload(self.run_id, path, None)
            tags = {"failure": reason[:1000]} if reason else {}
            client.log_batch(self.run_id, Batch(tags=tags, status=(status, time.time_ns() // 1_000_000)))
        if self._claim is not None:
            self._claim.close()
