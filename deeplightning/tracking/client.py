"""Read and write a tracking store with MLflow's own client. Creating a `Client` imports MLflow."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deeplightning.tracking.entities import (
    RUN_NAME,
    SYSTEM,
    Batch,
    Experiment,
    Point,
    Run,
    as_logged,
    is_test_metric,
    name_of,
    storable,
)
from deeplightning.tracking.mlflow_store import make_run, open_client
from deeplightning.tracking.store import Store, patient

MAX_MODEL_PARAMS = 100
"""Maximum number of parameters of a model that MLflow accepts in one call."""

_MISSING_CODES = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's error codes for an object that does not exist."""


class Client:
    """Client of a store. Its methods raise the store's own errors, which `is_transient` classifies.

    Args:
        store: created on first use, if it does not exist.
    """

    def __init__(self, store: Store):
        self._store, self._client = store, open_client(store)

    def experiment(self, name: str) -> Experiment:
        """Return the experiment with this name; create it if necessary."""
        found: Any = self._client.get_experiment_by_name(name)
        if found is None:
            with _ignoring("RESOURCE_ALREADY_EXISTS"):  # another process was first
                self._client.create_experiment(name)
            found = self._client.get_experiment_by_name(name)
        return Experiment(found.experiment_id, found.artifact_location, found.lifecycle_stage == "active")

    def make_run(self, run: Run) -> None:
        """Create a run with a given id, unless it exists. For SQLite stores."""
        make_run(self._store, run)

    def create_run(self, experiment: Experiment, name: str | None, tags: dict[str, str], prefix: str = "") -> Run:
        """Create a run with the status RUNNING. Its default name is `prefix` and the first digits of its id."""
        given = storable(name or tags.get(RUN_NAME, ""))
        # MLflow draws names with Python's `random`: all runs with the same seed would get the same name.
        run = _to_run(self._client.create_run(experiment.id, tags=tags, run_name=given or "run"))
        if not given:
            run.tags[RUN_NAME] = name_of(prefix, run.id)
            self._client.update_run(run.id, name=run.tags[RUN_NAME])
        return run

    def run(self, run_id: str) -> Run | None:
        """Return a run, even a deleted one; None if it does not exist."""
        with _ignoring(*_MISSING_CODES):
            run = self._client.get_run(run_id)
            return _to_run(run, self._client.get_experiment(run.info.experiment_id).name)
        return None

    def listing(self) -> list[Run]:
        """Return all runs that were not deleted, newest first."""
        return self._search({e.experiment_id: e.name for e in self._client.search_experiments()})

    def _search(self, experiments: Mapping[str, str], condition: str = "") -> list[Run]:
        """Return the runs of experiments, given as names by id, that meet a condition, newest first."""
        runs: list[Run] = []
        token: str | None = ""
        while experiments and token is not None:  # MLflow returns at most 1,000 at once
            page = self._client.search_runs(
                list(experiments), condition, order_by=["start_time DESC"], page_token=token or None
            )
            runs += [_to_run(run, experiments[run.info.experiment_id]) for run in page]
            token = page.token or None
        return runs

    def runs_with_tag(self, experiment: str, tag: str, value: str) -> list[Run]:
        """Return the runs of an experiment whose tag has this value."""
        found = self._client.get_experiment_by_name(experiment)
        return self._search({found.experiment_id: found.name}, f"tags.`{tag}` = '{value}'") if found else []

    def history(self, run_id: str, names: Collection[str] | None = None) -> Iterator[Point]:
        """Yield the points of these metrics of a run; None: of all but system metrics."""
        if names is None:
            recorded = self._client.get_run(run_id).data.metrics
            names = [name for name in recorded if not name.startswith(SYSTEM)]
        for name in names:
            for point in self._client.get_metric_history(run_id, name):
                yield Point(point.key, as_logged(point.value), point.timestamp, point.step)

    def delete(self, run_id: str, statuses: Collection[str]) -> bool:
        """Mark a run as deleted if it has one of these statuses; return whether it had."""
        run = self.run(run_id)
        is_wanted = run is not None and run.is_active and run.status in statuses
        if is_wanted:
            self._client.delete_run(run_id)
        return is_wanted

    def drop_tag(self, run_id: str, name: str) -> None:
        """Remove a tag of a run, if it exists."""
        with _ignoring(*_MISSING_CODES):
            self._client.delete_tag(run_id, name)

    def log_batch(self, run_id: str, batch: Batch) -> None:
        """Write a batch. Points that exist are not duplicated; tags replace those of the same name.

        Raises:
            Exception: the run does not exist or was deleted, or a parameter has another value.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

        params = [Param(*map(storable, item)) for item in batch.params.items()]
        tags = [RunTag(*map(storable, item)) for item in batch.tags.items()]
        self._client.log_batch(run_id, [Metric(*point) for point in batch.points], params, tags)
        if RUN_NAME in batch.tags:
            self._client.update_run(run_id, name=storable(batch.tags[RUN_NAME]))
        if batch.datasets:
            context = [InputTag("mlflow.data.context", "training")]  # what the run uses the data for
            inputs = [DatasetInput(Dataset(*one[:4], profile=one.profile), context) for one in batch.datasets]
            self._client.log_inputs(run_id, inputs)
        if batch.status is not None:
            status, ended = batch.status
            if ended is None:
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status, ended)

    def upload(self, run_id: str, path: Path, folder: str | None) -> None:
        """Upload a file or folder to the remote artifacts of a run."""
        send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        with patient():
            send(run_id, os.fspath(path), folder)

    def log_model(self, run_id: str, path: Path, name: str, kind: str) -> None:
        """Log an MLflow model to the run's experiment, with the run's parameters and test metrics (validation metrics
        belong to other weights than the best). It replaces the run's former model.

        Args:
            path: the model's folder.
            kind: kind of the task.
        """
        from mlflow.entities import LoggedModelOutput, Metric

        run = self._client.get_run(run_id)
        for former in run.outputs.model_outputs if run.outputs else ():
            self._client.delete_logged_model(former.model_id)
        experiment = run.info.experiment_id
        model = self._client.create_logged_model(experiment, name=name, source_run_id=run_id, model_type=kind)
        with patient():
            self._client.log_model_artifacts(model.model_id, os.fspath(path))
        params = list(run.data.params.items())
        for first in range(0, len(params), MAX_MODEL_PARAMS):
            self._client.log_model_params(model.model_id, dict(params[first : first + MAX_MODEL_PARAMS]))
        self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
        tested = {name for name in run.data.metrics if is_test_metric(name)}
        latest = {point.name: point for point in sorted(self.history(run_id, tested), key=lambda p: (p.step, p.time))}
        self._client.log_batch(run_id, [Metric(*point, model_id=model.model_id) for point in latest.values()])
        self._client.finalize_logged_model(model.model_id, "READY")


@contextmanager
def _ignoring(*codes: str) -> Iterator[None]:
    """Suppress MLflow errors with one of these codes."""
    try:
        yield
    except Exception as error:
        if getattr(error, "error_code", None) not in codes:
            raise


def _to_run(run: Any, experiment: str = "") -> Run:
    info, data = run.info, run.data
    first = (info.run_id, info.experiment_id, info.status, info.start_time, info.artifact_uri)
    of_data = (dict(data.params), dict(data.tags), experiment, dict(data.metrics))
    return Run(*first, info.lifecycle_stage == "active", *of_data)
