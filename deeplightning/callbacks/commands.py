"""Commands that a person can paste: how to watch a run and how to serve it. A clone has scripts for them, an installed
package the command `deeplightning`."""

import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deeplightning.config.packages import HOME
from deeplightning.runfolder import start_folder
from deeplightning.tracking.mlflow_columns import PORT
from deeplightning.tracking.store import locate


def command(verb: str, script: str, *words: str) -> str:
    """A command as one line of a shell, to be typed in the working directory."""
    file = HOME / script
    start = f"bash {shlex.quote(seen_from_here(file))}" if file.is_file() else f"deeplightning {verb}"
    return " ".join([start, *map(shlex.quote, words)])


def serve(folder: Path) -> str:
    """The command that answers HTTP from a run."""
    return command("serve", "deploy.sh", seen_from_here(folder))


def monitor(tracking_uri: str | os.PathLike | None) -> str | None:
    """The command that shows a store in the browser; None: the store is a server with pages of its own."""
    store = locate(tracking_uri)
    if store.address is not None and store.address.startswith("http"):
        return None
    words = (
        []
        if store == locate("mlruns")
        else ["--tracking-uri", os.fspath(tracking_uri or os.environ["MLFLOW_TRACKING_URI"])]
    )
    return command("monitor", "monitor.sh", *words)


def page(loggers: Iterable[Any], tracking_uri: str | os.PathLike | None) -> str | None:
    """The address of a run's page in MLflow; None: it is tracked elsewhere.

    Args:
        loggers: of the run, which is open.
        tracking_uri: of its store.
    """
    for logger in loggers:
        if type(logger).__name__ in ("MLflowLogger", "MLFlowLogger"):
            store = locate(tracking_uri)
            is_server = store.address is not None and store.address.startswith("http")
            top = store.shown.rstrip("/") if is_server else f"http://127.0.0.1:{PORT}"
            return f"{top}/#/experiments/{_experiment(logger)}/runs/{logger.run_id}"
    return None


def _experiment(logger: Any) -> str | None:
    """The experiment's id, which is the `name` of our logger; Lightning's has an attribute for it."""
    own: str | None = getattr(logger, "experiment_id", None) or logger.name
    return own


def seen_from_here(path: Path) -> str:
    """A path below the working directory is relative to it, any other is absolute."""
    try:
        return str(path.relative_to(start_folder())) or "."
    except ValueError:
        return str(path)
