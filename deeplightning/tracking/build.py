"""Prepare, open and end loggers, and find the run folder. Lightning's own MLflow logger gets our kind of store."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deeplightning.config.schema import Target
from deeplightning.faults import ConfigError, Fault
from deeplightning.private.lightning import has_run
from deeplightning.runfolder import from_start
from deeplightning.tracking.claims import artifacts_of, find_run
from deeplightning.tracking.mlflow_store import attach
from deeplightning.tracking.store import local_path, locate
from deeplightning.words import is_address

_OUR_LOGGER = re.compile(r"deeplightning\.tracking(\.logger)?\.MLflowLogger")
_LIGHTNING_LOGGER = re.compile(r"(pytorch_lightning|lightning\.pytorch)\.loggers(\.mlflow)?\.MLFlowLogger")


def prepare(type_name: str, params: dict[str, Any]) -> dict[str, object]:
    """Return the arguments to build a logger with; a relative `save_dir` becomes absolute.

    Those of Lightning's own `MLFlowLogger` are translated: a directory as `tracking_uri` means the same store as for
    our logger, and under `mlflow run` the logger joins the active run. Writes nothing: the logger creates the store,
    under its lock, on first use.

    Raises:
        SetupError: the `tracking_uri` is of an unknown kind.
    """
    if isinstance(folder := params.get("save_dir"), str) and not is_address(folder):
        params = params | {"save_dir": str(from_start(folder))}
    if not _LIGHTNING_LOGGER.fullmatch(type_name):
        return params
    run_id = os.environ.get("MLFLOW_RUN_ID")
    address = params.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or params.get("save_dir") or "mlruns"
    if run_id and not params.get("run_id"):
        address = os.environ.get("MLFLOW_TRACKING_URI") or address
        params = params | {"run_id": run_id}
    return params | {"tracking_uri": attach(locate(address))}


def experiment_of(type_name: str, params: Mapping[str, Any]) -> str:
    """Return the name of the experiment that a logger of this type logs to, given its arguments."""
    return params.get("experiment_name") or ("lightning_logs" if _LIGHTNING_LOGGER.fullmatch(type_name) else "Default")


def refusal(type_name: str, params: Mapping[str, Any], run_id: str, folder: Path) -> str | None:
    """Return why a logger of this type, given its arguments, cannot continue a run, or None if it can.

    Args:
        run_id: the run.
        folder: absolute folder of the run's files.

    Raises:
        SetupError: the store cannot be queried.
    """
    if not _OUR_LOGGER.fullmatch(type_name):
        return f"{type_name.rpartition('.')[2]} cannot continue a run"
    requested = params.get("run_id") or os.environ.get("MLFLOW_RUN_ID") or None
    if requested not in (None, run_id):
        return f"the run {requested} is requested instead"
    store = locate(params.get("tracking_uri"))
    run = find_run(store, run_id)
    if run is None or not run.is_active:
        return f"the tracking store {store.shown} does not have its run {run_id}, or it was deleted"
    if run.experiment != experiment_of(type_name, params):
        return f"its run {run_id} belongs to the experiment {run.experiment!r}"
    artifacts = artifacts_of(store, run)
    if artifacts is not None and not (artifacts.is_dir() and artifacts.samefile(folder)):
        return f"it is not in the folder of its run, {artifacts}"
    return None


def open_runs(loggers: Iterable[Any], targets: Iterable[Target]) -> None:
    """Open the run of each logger that has an `experiment`. Some loggers forward their other params only then.

    Args:
        targets: targets in the config that the loggers were built from.

    Raises:
        ConfigError: the library does not accept such a param.
    """
    for logger, target in zip(loggers, targets, strict=True):
        try:
            getattr(logger, "experiment", None)  # Lightning's Logger does not require one
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            message = f"{target.type} rejects a param: {error}; remove it"
            raise ConfigError(Fault(message, f"{target.name}.params", target.place)) from error


def run_folder(loggers: Iterable[object], fallback: str | os.PathLike) -> Path:
    """Return the absolute folder for the run's files. Call it on rank 0 only: it opens the run.

    This is the local artifact folder of the first MLflow logger that has one, else the folder of the first logger that
    writes files, else `fallback`.
    """
    loggers = list[Any](loggers)
    for logger in loggers[:1]:
        if hasattr(logger, "set_run_folder"):
            logger.set_run_folder(from_start(fallback))
    for logger in loggers:
        folder = logger.artifact_folder if is_a(logger, "MLflowLogger") else None
        if is_a(logger, "MLFlowLogger"):
            folder = local_path(logger.experiment.get_run(logger.run_id).info.artifact_uri)
        if folder is not None:
            return folder
    return from_start(next(filter(None, (getattr(logger, "log_dir", None) for logger in loggers)), fallback))


def is_a(logger: object, name: str) -> bool:
    """Return whether a logger has a class of this name: `MLflowLogger` is ours, `MLFlowLogger` is Lightning's."""
    return any(base.__name__ == name for base in type(logger).__mro__)


def end(loggers: Iterable[Any], status: str, reason: str, others: bool) -> None:
    """Set the final status of each run, `failed` or `killed`, and the reason; `others`: finalize other loggers too."""
    for logger in loggers:
        if is_a(logger, "MLflowLogger"):
            logger.finalize(status, reason)
        elif is_a(logger, "MLFlowLogger"):
            if has_run(logger):
                logger.experiment.set_tag(logger.run_id, "failure", reason[:1000])
                logger.experiment.set_terminated(logger.run_id, status.upper())
        elif others:
            logger.finalize(status)


def publish(loggers: Iterable[Any], folder: Path) -> None:
    """Upload the run's files to trackers with remote artifacts, and mark their runs as finished."""
    for logger in loggers:
        if is_a(logger, "MLflowLogger") and logger.artifact_folder is None:
            for path in sorted(folder.iterdir()):
                logger.log_artifact(path)
            logger.finalize("success")
