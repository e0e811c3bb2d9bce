"""A tracking store through MLflow's own client: servers, databases on servers, file stores, and SQLite of another
version than `deeplightning.tracking.sqlite` knows."""

import contextlib
import os
import random
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.entities import Dataset as MLflowDataset
from mlflow.entities import DatasetInput, InputTag, LoggedModelOutput, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from deeplightning.tracking.mlflow_store import attach
from deeplightning.tracking.mlflow_tags import RUN_NAME, name_of
from deeplightning.tracking.store import Store, check_writable
from deeplightning.tracking.tracker import DATA_CONTEXT, SYSTEM, Batch, Experiment, Point, Run, as_logged, is_of_test

if TYPE_CHECKING:
    import mlflow

MAX_ENTRIES, MAX_OTHERS = 1000, 100
"""The most that MLflow takes at once, of all, and of parameters or tags."""

_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
_TRANSIENT = (
    "TEMPORARILY_UNAVAILABLE",
    "INTERNAL_ERROR",
    "REQUEST_LIMIT_EXCEEDED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "CANCELLED",
)


class Client:
    """See `deeplightning.tracking.tracker.Tracker`.

    Args:
        store: made at the first use, if it is not there.
    """

    def __init__(self, store: Store):
        self._store, self._client = store, MlflowClient(attach(store))

    def make_ready(self) -> None:
        if self._store.database is not None and self._store.database.exists():
            check_writable(self._store)

    def experiment(self, name: str) -> Experiment:
        found: Any = self._client.get_experiment_by_name(name)
        if found is None:
            # Another process may be first: then the experiment is there after all.
            with contextlib.suppress(MlflowException):
                self._client.create_experiment(name)
            found = self._client.get_experiment_by_name(name)
        if found is None:
            self._client.create_experiment(name)  # raises, with the reason
            found = self._client.get_experiment_by_name(name)
        return Experiment(found.experiment_id, found.artifact_location, found.lifecycle_stage == "active")

    def name_of(self, experiment_id: str) -> str:
        return self._client.get_experiment(experiment_id).name

    def new_id(self) -> None:
        return None

    def create_run(
        self, experiment: Experiment, name: str | None, tags: dict[str, str], stem: str = "", run_id: str | None = None
    ) -> Run:
        state = random.getstate()
        random.seed()  # MLflow draws the run's name from it: with the run's seed every run would be named alike
        try:
            run = _run(self._client.create_run(experiment.id, tags=tags, run_name=name))
        finally:
            random.setstate(state)
        if stem and not name and RUN_NAME not in tags:
            self.rename(run.id, name_of(stem, run.id))
        return run

    def delete(self, run_id: str, statuses: Collection[str]) -> bool:
        run = self.run(run_id)
        is_wanted = run is not None and run.is_active and run.status in statuses
        if is_wanted:
            self._client.delete_run(run_id)
        return is_wanted

    def run(self, run_id: str) -> Run | None:
        try:
            return _run(self._client.get_run(run_id))
        except MlflowException as error:
            if error.error_code not in _ABSENT:
                raise
            return None

    def rename(self, run_id: str, name: str) -> None:
        self._client.update_run(run_id, name=name)

    def drop_tag(self, run_id: str, name: str) -> None:
        self._client.delete_tag(run_id, name)

    def history(self, run_id: str, names: Collection[str] | None = None) -> Iterable[Point]:
        if names is None:
            there = self._client.get_run(run_id).data.metrics
            names = [name for name in there if not name.startswith(SYSTEM)]
        for name in names:
            for point in self._client.get_metric_history(run_id, name):
                yield Point(point.key, as_logged(point.value), point.timestamp, point.step)

    def log_batch(self, run_id: str, batch: Batch) -> None:
        params = [Param(*item) for item in batch.params.items()]
        tags = [RunTag(*item) for item in batch.tags.items()]
        points = [Metric(*point) for point in batch.points]
        while params or tags or points:
            few = params[:MAX_OTHERS], tags[:MAX_OTHERS]
            room = MAX_ENTRIES - len(few[0]) - len(few[1])
            self._client.log_batch(run_id, points[:room], *few)
            params, tags, points = params[MAX_OTHERS:], tags[MAX_OTHERS:], points[room:]
        if batch.datasets:
            context = [InputTag(*DATA_CONTEXT)]
            inputs = [
                DatasetInput(MLflowDataset(d.name, d.digest, d.source_type, d.source, profile=d.profile), context)
                for d in batch.datasets
            ]
            self._client.log_inputs(run_id, inputs)
        if batch.status is not None:
            word, ended = batch.status
            if ended is None:
                self._client.update_run(run_id, status=word)
            else:
                self._client.set_terminated(run_id, word, ended)

    def upload(self, run_id: str, path: Path, folder: str | None) -> None:
        send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        send(run_id, os.fspath(path), folder)

    def log_model(self, run_id: str, name: str, path: Path, kind: str) -> None:
        run = self._client.get_run(run_id)
        for former in run.outputs.model_outputs if run.outputs else ():
            self._client.delete_logged_model(former.model_id)
        experiment = run.info.experiment_id
        model = self._client.create_logged_model(experiment, name=name, source_run_id=run_id, model_type=kind)
        self._client.log_model_artifacts(model.model_id, os.fspath(path))
        params = list(run.data.params.items())
        for first in range(0, len(params), MAX_OTHERS):
            self._client.log_model_params(model.model_id, dict(params[first : first + MAX_OTHERS]))
        self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
        judged = {name for name in run.data.metrics if is_of_test(name)}
        latest = {point.name: point for point in sorted(self.history(run_id, judged), key=lambda p: (p.step, p.time))}
        self._client.log_batch(run_id, [Metric(*point, model_id=model.model_id) for point in latest.values()])
        self._client.finalize_logged_model(model.model_id, "READY")

    def is_transient(self, error: Exception) -> bool:
        if isinstance(error, MlflowException):
            return error.error_code in _TRANSIENT
        return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)  # OSError: also the network's

    def close(self) -> None:
        pass


def _run(run: "mlflow.entities.Run") -> Run:
    info, data = run.info, run.data
    is_active = info.lifecycle_stage == "active"
    return Run(
        *(info.run_id, info.experiment_id, info.status, info.start_time, info.artifact_uri, is_active),
        *(data.params, data.tags),
    )
