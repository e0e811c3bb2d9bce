"""What MLflow's client says of a run by itself, without MLflow: who started it, and from what."""

import getpass
import json
import logging
import os
import sys

from deeplightning.tracking.environment import git_state
from deeplightning.tracking.store import quiet_mlflow

log = logging.getLogger("deeplightning.tracking")

USER = "mlflow.user"
RUN_NAME = "mlflow.runName"


def name_of(stem: str, run_id: str) -> str:
    """Return a descriptive name of a run, `SimpleCNN-Digits-a3f1`, with the first digits of its id."""
    return f"{stem}-{run_id[:4]}"


def run_tags() -> dict[str, str]:
    """Return the tags that MLflow's client resolves.

    In a notebook MLflow is asked itself: only there it finds the notebook's name. It describes the repository of the
    started file, which is ours, and its address, perhaps with a password; so git is asked here for that of the user.
    """
    git = git_state() or {}
    repository = {f"mlflow.source.git.{name}": git[name] for name in ("commit", "branch") if git.get(name)}
    if "ipykernel" in sys.modules or "DATABRICKS_RUNTIME_VERSION" in os.environ:
        quiet_mlflow()
        from mlflow.tracking.context.registry import resolve_tags

        resolved = resolve_tags()
        return {name: resolved[name] for name in resolved if not name.startswith("mlflow.source.git.")} | repository
    script = sys.argv[0] if sys.argv and sys.argv[0] else "<console>"
    tags = {USER: _user(), "mlflow.source.name": script, "mlflow.source.type": "LOCAL"} | repository
    if given := os.environ.get("MLFLOW_RUN_CONTEXT"):
        try:
            tags |= {str(name): str(value) for name, value in dict(json.loads(given)).items()}
        except (ValueError, TypeError) as error:
            log.warning("The variable MLFLOW_RUN_CONTEXT is not used, it is no JSON object: %s", error)
    return tags


def _user() -> str:
    """Return the user name for MLflow's servers, else the user of this machine."""
    try:
        return os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    except (ImportError, KeyError, OSError):  # a user whom the machine has no name for
        return "unknown"
