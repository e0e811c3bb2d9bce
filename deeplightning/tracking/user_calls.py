"""Direct calls of MLflow's functions in user code (`mlflow.log_metric`, `mlflow.autolog`) to the store and the run.

MLflow reads both from environment variables. If user code imports MLflow, the run also becomes MLflow's active run, so
that `mlflow.start_run(nested=True)` starts a child of it. This module does not import MLflow.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from deeplightning.own_code import ON_IMPORT
from deeplightning.tracking.build import is_a
from deeplightning.tracking.reader import open_reader
from deeplightning.tracking.store import ignore_mlflow_warnings, locate

log = logging.getLogger("deeplightning")

_URI, _RUN = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"
_EXPERIMENT, _EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"
WAIT_SECONDS = 60.0
"""Maximum wait of ranks other than 0 for the run to appear in the store."""
_QUIET = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"  # our line must be the last on stdout


class TrackedRun(NamedTuple):
    """A run, as MLflow's functions identify it."""

    uri: str  # of the store
    run_id: str
    experiment_id: str | None = None  # None: unknown until the run is open


def run_of(loggers: Iterable[Any]) -> TrackedRun | None:
    """Return the run of the first MLflow logger, or None if there is none. Call it on rank 0: it opens the run."""
    for logger in loggers:
        if is_a(logger, "MLflowLogger"):
            return TrackedRun(logger.tracking_uri, logger.run_id, logger.name)
        if is_a(logger, "MLFlowLogger"):
            return TrackedRun(logger.experiment.tracking_uri, logger.run_id, logger.experiment_id)
    return None


def run_maker(loggers: Iterable[Any]) -> Callable[[], object]:
    """Return a function that ensures that the store has the run of `run_of`."""
    return next((logger.make_run for logger in loggers if hasattr(logger, "make_run")), lambda: None)


class UserCalls:
    """Directs calls of MLflow's functions in this process to a run, until `end` is called."""

    _current: "UserCalls | None" = None  # one per process

    def __init__(self) -> None:
        self._run: TrackedRun | None = None
        self._before: dict[str, str | None] | None = None  # the user's values of the variables
        self._is_active = False
        self._make: Callable[[], object] | None = None

    def take_over(self) -> None:
        """End what `trainer.fit` of an earlier run in this process left, before the loggers open this run: they would
        join the run in its environment variables."""
        former, UserCalls._current = UserCalls._current, self
        if former is not None and former is not self:
            former.end("FINISHED")

    def expect(self, run: TrackedRun) -> None:
        """Direct MLflow calls to a run that is not open yet; the first call opens it."""
        if self._run == run:
            return
        names = (_URI, _RUN, _EXPERIMENT, _EXPERIMENT_NAME, _QUIET)
        if self._before is None:
            self._before = {name: os.environ.get(name) for name in names}
        self._run = run
        os.environ |= {_URI: run.uri, _RUN: run.run_id, _QUIET: "true"}
        if run.experiment_id is not None:
            os.environ[_EXPERIMENT] = run.experiment_id
            os.environ.pop(_EXPERIMENT_NAME, None)  # MLflow does not accept both

    def begin(self, run: TrackedRun, make: Callable[[], object] | None = None) -> None:
        """Direct calls to an open run, and make it the active one if user code uses MLflow, now or later.

        Args:
            make: ensures that the store has the run; None: another process does so.
        """
        if self._is_active:
            return
        self.expect(run)
        self._make = make
        if "mlflow" in sys.modules:
            self._activate()
        else:
            ON_IMPORT["mlflow"] = self._activate

    def _activate(self) -> None:
        mlflow: Any = sys.modules["mlflow"]
        run = self._run
        if run is None or self._is_active:
            return
        try:
            if mlflow.get_tracking_uri() != run.uri:
                return  # user code has set another store, where its calls go
            os.environ.pop(_RUN, None)  # otherwise a nested run would continue this one
            if (active := mlflow.active_run()) is None:
                ignore_mlflow_warnings()
                self._wait_for(run)
                active = mlflow.start_run(run_id=run.run_id, log_system_metrics=False)
            self._is_active = active.info.run_id == run.run_id
        except Exception as error:  # MLflow, SQLAlchemy, requests and the file system each have their own errors
            log.warning("mlflow     calls in your code do not reach the run: %s", error)

    def _wait_for(self, run: TrackedRun) -> None:
        """Ensure that the store has the run, or wait for the process that creates it: MLflow would create another."""
        if self._make is not None:
            self._make()
            return
        store, deadline = locate(run.uri), time.monotonic() + WAIT_SECONDS
        while open_reader(store).run(run.run_id) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run {run.run_id} was not in {store.shown} within {WAIT_SECONDS:g} seconds")
            time.sleep(0.2)

    def end(self, status: str) -> None:
        """End the runs that user code has started in this run, and restore the variables.

        Args:
            status: MLflow status of the run. By default, MLflow sets FINISHED when the process ends.
        """
        ON_IMPORT.pop("mlflow", None)
        mlflow: Any = sys.modules.get("mlflow")
        run, self._run, self._is_active = self._run, None, False
        if run is None:
            return
        with suppress(Exception):
            while _RUN not in os.environ and mlflow is not None and (active := mlflow.active_run()) is not None:
                mlflow.end_run(status)
                if active.info.run_id == run.run_id:
                    break
        for name, value in (self._before or {}).items():
            os.environ.pop(name, None)
            os.environ |= {name: value} if value is not None else {}
        self._before = None
