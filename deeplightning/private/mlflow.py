"""Private names of MLflow 3.10 to 3.18."""

import inspect
import sys
from collections.abc import Callable
from typing import Any


def register_store(scheme: str, build: Callable[..., object]) -> None:
    """Make MLflow in this process open stores of a URI scheme with `build`. The public interface, an entry point for a
    new scheme, would prevent other tools from opening the same store. If the name moves, a run fails when it opens its
    store."""
    from mlflow.tracking._tracking_service import utils

    utils._tracking_store_registry.register(scheme, build)


def add_run(store: Any, run: Any) -> None:
    """Add a run with its id to MLflow's SQL store, if it is missing. The client's `create_run` draws another id, and
    the id is part of the path of the run's folder, which exists before MLflow is imported. If a column moves, runs
    remain unsent, with a warning."""
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
    """Return whether `mlflow.autolog` is on for Lightning. If the name moves, its values are logged to a separate run,
    without an error."""
    autologging = sys.modules.get("mlflow.utils.autologging_utils")
    is_disabled = getattr(autologging, "autologging_is_disabled", None)
    return is_disabled is not None and "mlflow.pytorch" in sys.modules and not is_disabled("pytorch")


def latest_schema() -> str:
    """Return the schema revision of this MLflow's databases, which publicly only its command line offers."""
    from mlflow.store.db import utils

    return str(utils._get_latest_schema_revision())


def upgrade_database(uri: str) -> None:
    """Migrate a database to the latest schema revision, as `mlflow db upgrade` does."""
    from mlflow.store.db import utils

    utils._upgrade_db(utils.create_sqlalchemy_engine(uri))
