"""Around building loggers: Lightning's own MLflow logger gets our kind of store, and the run folder is found."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deeplightning.tracking.store import attach, local_path, locate


def prepare(type_name: str, params: dict[str, Any]) -> dict[str, Any]:
    """The arguments to build a logger with.

    Those of Lightning's own `MLFlowLogger` are translated: a directory as `tracking_uri` means the same store as with
    ours, and under `mlflow run` the run that is there is joined. Others are returned as they are. Writes nothing: the
    store is made, under its lock, when the logger first uses it.

    Raises:
        SetupError: the `tracking_uri` is of no known kind.
    """
    if not re.fullmatch(r"(pytorch_lightning|lightning\.pytorch)\.loggers(\.mlflow)?\.MLFlowLogger", type_name):
        return params
    run_id = os.environ.get("MLFLOW_RUN_ID")
    address = params.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or params.get("save_dir") or "mlruns"
    if run_id and not params.get("run_id"):
        address = os.environ.get("MLFLOW_TRACKING_URI") or address
        params = params | {"run_id": run_id}
    return params | {"tracking_uri": attach(locate(address))}


def run_folder(loggers: Iterable[Any], fallback: str | os.PathLike) -> Path:
    """Where the files of the run go, absolute; ask on rank 0, for it opens the run.

    It is the local artifact folder of the first MLflow logger that has one, else the folder of the first logger that
    writes files, else `fallback`.
    """
    loggers = list(loggers)
    for logger in loggers:
        if (folder := _artifact_folder(logger)) is not None:
            return folder
    for logger in loggers:
        if folder := getattr(logger, "log_dir", None):
            return Path(folder).expanduser().absolute()
    return Path(fallback).expanduser().absolute()


def _artifact_folder(logger: Any) -> Path | None:
    names = {base.__name__ for base in type(logger).__mro__}
    if "MLflowLogger" in names:
        return logger.artifact_folder
    if "MLFlowLogger" in names:
        return local_path(logger.experiment.get_run(logger.run_id).info.artifact_uri)
    return None


def end(loggers: Iterable[Any], status: str, reason: str) -> None:
    """Gives each run its last status, `failed` or `killed`, and the reason where a logger keeps one."""
    for logger in loggers:
        names = {base.__name__ for base in type(logger).__mro__}
        if "MLflowLogger" in names:
            logger.finalize(status, reason)
        elif "MLFlowLogger" in names:
            if not getattr(logger, "_initialized", True):  # Lightning 2.6: asking for more would open a run
                continue
            logger.experiment.set_tag(logger.run_id, "failure", reason[:1000])
            logger.experiment.set_terminated(logger.run_id, status.upper())
        else:
            logger.finalize(status)


def publish(loggers: Iterable[Any], folder: Path) -> None:
    """Sends the files of the run to trackers that keep their artifacts elsewhere; ends their runs as finished."""
    for logger in loggers:
        if "MLflowLogger" in {base.__name__ for base in type(logger).__mro__} and logger.artifact_folder is None:
            for path in sorted(folder.iterdir()):
                logger.log_artifact(path)
            logger.finalize("success")
