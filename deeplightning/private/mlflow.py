"""Private names of MLflow 3.17."""

from collections.abc import Callable


def register_store(scheme: str, build: Callable[..., object]) -> None:
    """Has MLflow open the stores of a scheme, in this process, by a function of ours. The public way is an entry point
    of an installed package for a scheme of its own, and other tools could then not open the same store. Where the name
    has moved, a run fails when it opens its store."""
    from mlflow.tracking._tracking_service import utils

    utils._tracking_store_registry.register(scheme, build)


def latest_schema() -> str:
    """The revision that this MLflow gives a database; publicly, only its command line knows."""
    from mlflow.store.db import utils

    return str(utils._get_latest_schema_revision())


def upgrade_database(uri: str) -> None:
    """Migrates a database to that revision, as `mlflow db upgrade` does."""
    from mlflow.store.db import utils

    utils._upgrade_db(utils.create_sqlalchemy_engine(uri))
