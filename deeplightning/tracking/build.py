"""Around building loggers: Lightning's own MLflow logger gets our kind of store, and the run folder is found."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deeplightning.config.schema import Target
from deeplightning.faults import ConfigError, Fault
from deeplightning.private.lightning import has_run
from deeplightning.runfolder import from_start
from deeplightning.tracking.claims import find_run
from deeplightning.tracking.mlflow_store import attach
from deeplightning.tracking.store import local_path, locate
from deeplightning.words import is_address

_OURS = re.compile(r"deeplightning\.tracking(\.logger)?\.MLflowLogger")
_LIGHTNINGS = re.compile(r"(pytorch_lightning|lightning\.pytorch)\.loggers(\.mlflow)?\.MLFlowLogger")


def prepare(type_name: str, params: dict[str, Any]) -> dict[str, object]:
    """Return the arguments to build a logger with, a relative `save_dir` made absolute.

    Those of Lightning's own `MLFlowLogger` are translated: a directory as `tracking_uri` means the same store as with
    ours, and under `mlflow run` the run that is there is joined. Writes nothing: the store is made, under its lock,
    when the logger first uses it.

    Raises:
        SetupError: the `tracking_uri` is of no known kind.
    """
    if isinstance(folder := params.get("save_dir"), str) and not is_address(folder):
        params = params | {"save_dir": str(from_start(folder))}
    if not _LIGHTNINGS.fullmatch(type_name):
        return params
    run_id = os.environ.get("MLFLOW_RUN_ID")
    address = params.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or params.get("save_dir") or "mlruns"
    if run_id and not params.get("run_id"):
        address = os.environ.get("MLFLOW_TRACKING_URI") or address
        params = params | {"run_id": run_id}
    return params | {"tracking_uri": attach(locate(address))}


def experiment_of(type_name: str, params: Mapping[str, Any]) -> str:
    """Return the name of the experiment that a logger of this type and these arguments tracks into."""
    return params.get("experiment_name") or ("lightning_logs" if _LIGHTNINGS.fullmatch(type_name) else "Default")


def refusal(type_name: str, params: Mapping[str, Any], run_id: str, folder: Path) -> str | None:
    """Return why a logger of this type and these arguments cannot continue a run; None: it can.

    Args:
        run_id: the run.
        folder: where the files of the run lie, absolute.

    Raises:
        SetupError: the store cannot be asked.
    """
    if not _OURS.fullmatch(type_name):
        return f"{type_name.rpartition('.')[2]} cannot continue a run"
    named = params.get("run_id") or os.environ.get("MLFLOW_RUN_ID")
    if named not in (None, run_id):
        return f"the run {named} is asked for"
    store = locate(params.get("tracking_uri"))
    run = find_run(store, run_id)
    if run is None or not run.is_active:
        return f"the tracking store {store.shown} does not have its run {run_id}, or it was deleted"
    if run.experiment != experiment_of(type_name, params):
        return f"its run {run_id} is of the experiment {run.experiment!r}"
    its = local_path(run.artifact_uri)
    if its is not None and not (its.is_dir() and its.samefile(folder)):
        return f"it does not lie in the folder of its run, {its}"
    return None


def open_runs(loggers: Iterable[Any], targets: Iterable[Target]) -> None:
    """Let each logger that has an `experiment` open its run, in which it passes the rest of its params on.

    Args:
        targets: what the loggers were built from.

    Raises:
        ConfigError: what it passes them on to takes no such param.
    """
    for logger, target in zip(loggers, targets, strict=True):
        try:
            getattr(logger, "experiment", None)  # Lightning's Logger does not ask for one
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            message = f"{target.type} refuses a param: {error}; remove it"
            raise ConfigError(Fault(message, f"{target.name}.params", target.place)) from error


def run_folder(loggers: Iterable[object], fallback: str | os.PathLike) -> Path:
    """Return where the files of the run go, absolute; to be called on rank 0, since it opens the run.

    It is the local artifact folder of the first MLflow logger that has one, else the folder of the first logger that
    writes files, else `fallback`.
    """
    loggers = list[Any](loggers)
    for logger in loggers[:1]:
        if hasattr(logger, "keep_in"):
            logger.keep_in(from_start(fallback))
    for logger in loggers:
        folder = logger.artifact_folder if is_a(logger, "MLflowLogger") else None
        if is_a(logger, "MLFlowLogger"):
            folder = local_path(logger.experiment.get_run(logger.run_id).info.artifact_uri)
        if folder is not None:
            return folder
    for logger in loggers:
        if folder := getattr(logger, "log_dir", None):
            return from_start(folder)
    return from_start(fallback)


def is_a(logger: object, name: str) -> bool:
    """Return whether a logger is of a class of this name: `MLflowLogger` is ours, `MLFlowLogger` Lightning's."""
    return any(base.__name__ == name for base in type(logger).__mro__)


def end(loggers: Iterable[Any], status: str, reason: str, others: bool) -> None:
    """Give each run its last status, `failed` or `killed`, and the reason; `others`: also where none is kept."""
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
    """Send the files of the run to trackers that keep their artifacts elsewhere; end their runs as finished."""
    for logger in loggers:
        if is_a(logger, "MLflowLogger") and logger.artifact_folder is None:
            for path in sorted(folder.iterdir()):
                logger.log_artifact(path)
            logger.finalize("success")
