"""Private names of MLflow 3.10 to 3.18."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI


def register_store(scheme: str, build: Callable[..., object]) -> None:
    """Make MLflow in this process open the stores of a scheme with `build`. The public way, an entry point for a new
    scheme, would keep other tools from opening the same store. If the name moves, a run fails when it opens its
    store."""
    from mlflow.tracking._tracking_service import utils

    utils._tracking_store_registry.register(scheme, build)


def add_run(store: Any, run: Any) -> None:
    """Add a run, with its id, to MLflow's SQL store, if it is not there; the client's `create_run` draws another id,
    and the id is part of the path of the run's folder, which is there before MLflow is imported. If a column moves,
    runs stay unsent, with a warning."""
    from mlflow.store.tracking.dbmodels.models import SqlRun, SqlTag

    make = store.ManagedSessionMaker
    options = {"read_only": False} if "read_only" in inspect.signature(make).parameters else {}
    ids = {"run_uuid": run.id, "experiment_id": int(run.experiment_id), "artifact_uri": run.artifact_uri}
    names = {"name": run.tags["mlflow.runName"], "user_id": run.tags.get("mlflow.user", "unknown")}
    states = {"status": "RUNNING", "start_time": run.started, "lifecycle_stage": "active"}
    source = {"source_type": "UNKNOWN", "source_name": "", "entry_point_name": "", "source_version": ""}
    with make(**options) as session:
        if session.get(SqlRun, run.id) is None:
            tags = [SqlTag(key=name, value=value) for name, value in run.tags.items()]
            session.add(SqlRun(**ids, **names, **states, **source, tags=tags))


def autologs() -> bool:
    """Return whether `mlflow.autolog` logs Lightning's training. If the name moves, its values go to a separate run,
    without an error."""
    autologging = sys.modules.get("mlflow.utils.autologging_utils")
    is_disabled = getattr(autologging, "autologging_is_disabled", None)
    return is_disabled is not None and "mlflow.pytorch" in sys.modules and not is_disabled("pytorch")


def latest_schema() -> str:
    """Return the schema revision of this MLflow's databases; only its command line offers that publicly."""
    from mlflow.store.db import utils

    return str(utils._get_latest_schema_revision())


def upgrade_database(uri: str) -> None:
    """Migrate a database to the latest schema revision, as `mlflow db upgrade` does."""
    from mlflow.store.db import utils

    utils._upgrade_db(utils.create_sqlalchemy_engine(uri))


PAGE = {
    "workflow": "mlflow.workflowType_v1",
    "assistant": "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1",
    "telemetry": "mlflow.settings.telemetry.enabled_v1",
    "telemetry_note": "mlflow.telemetry.info.alert.dismissed_v1",
    "runs_table": 'MLflowLocalStorage-1.1-ExperimentPage-["{experiment}"]-ReactComponentState',
}
"""Keys under which MLflow's page stores its settings in the browser (`localStorage`): GenAI or model training, whether
the assistant has been shown, telemetry and the note on it, and the table of an experiment's runs. MLflow has no public
way to set any of them; the experiment's tag `mlflow.experimentKind` no longer has an effect (3.17). If a key moves, the
page opens with MLflow's defaults; the address that `monitor` prints names the view as well."""


def page_settings(columns: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return the initial settings of MLflow's page, by the keys of `PAGE`.

    Args:
        columns: columns of the table of runs, such as "metrics.`val_acc`", by the experiment's id.
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
    """Return the application that `mlflow server` serves by default, which plugins (entry points `mlflow.app`) may
    extend. If it moves, `monitor` shows MLflow's page unchanged."""
    from mlflow.server.fastapi_app import app

    return app


def index_page() -> Path:
    """Return the HTML file of MLflow's single-page application."""
    import mlflow.server

    return Path(mlflow.server.__file__).parent / mlflow.server.REL_STATIC_DIR / "index.html"
