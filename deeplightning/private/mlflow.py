"""Private names of MLflow 3.17."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI


def register_store(scheme: str, build: Callable[..., object]) -> None:
    """Has MLflow open the stores of a scheme, in this process, by a function of ours. The public way is an entry point
    of an installed package for a scheme of its own, and other tools could then not open the same store. Where the name
    has moved, a run fails when it opens its store."""
    from mlflow.tracking._tracking_service import utils

    utils._tracking_store_registry.register(scheme, build)


def autologs() -> bool:
    """Return whether MLflow logs what Lightning trains by itself (`mlflow.autolog`). Where the name has moved, its
    values go to a run of their own, without an error."""
    autologging = sys.modules.get("mlflow.utils.autologging_utils")
    is_disabled = getattr(autologging, "autologging_is_disabled", None)
    return is_disabled is not None and "mlflow.pytorch" in sys.modules and not is_disabled("pytorch")


def latest_schema() -> str:
    """The revision that this MLflow gives a database; publicly, only its command line knows."""
    from mlflow.store.db import utils

    return str(utils._get_latest_schema_revision())


def upgrade_database(uri: str) -> None:
    """Migrates a database to that revision, as `mlflow db upgrade` does."""
    from mlflow.store.db import utils

    utils._upgrade_db(utils.create_sqlalchemy_engine(uri))


PAGE = {
    "workflow": "mlflow.workflowType_v1",
    "assistant": "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1",
    "telemetry": "mlflow.settings.telemetry.enabled_v1",
    "telemetry_note": "mlflow.telemetry.info.alert.dismissed_v1",
    "runs_table": 'MLflowLocalStorage-1.1-ExperimentPage-["{experiment}"]-ReactComponentState',
}
"""The keys under which MLflow's page keeps its settings in the browser (`localStorage`): GenAI or model training,
whether the assistant has shown itself, telemetry and the note on it, and the table of an experiment's runs. MLflow has
no public way to set any of them; the experiment's tag `mlflow.experimentKind` no longer decides (3.17). Where a key has
moved, the page opens as MLflow ships it; the address that `monitor` prints names the view as well."""


def page_settings(columns: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """What MLflow's page is to find under these keys at its first visit.

    Args:
        columns: of the table of runs, by the experiment's id, such as "metrics.`val_acc`".
    """
    first: dict[str, object] = {
        PAGE["workflow"]: "machine_learning",
        PAGE["assistant"]: True,
        PAGE["telemetry"]: False,
        PAGE["telemetry_note"]: True,
    }
    tables = {PAGE["runs_table"].format(experiment=one): {"selectedColumns": list(columns[one])} for one in columns}
    return first | tables


def server_application() -> "FastAPI":
    """The application that `mlflow server` serves by default, to which one of its plugins (the entry points
    `mlflow.app`) may add. Where it has moved, `monitor` shows MLflow's page as it is."""
    from mlflow.server.fastapi_app import app

    return app


def index_page() -> Path:
    """The HTML file that the whole of MLflow's page starts from."""
    import mlflow.server

    return Path(mlflow.server.__file__).parent / mlflow.server.REL_STATIC_DIR / "index.html"
