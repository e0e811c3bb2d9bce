"""Give a tracking store that is not there yet as a copy of an empty one, which the first process of a session makes.

MLflow makes the schema of a database by forty migrations, which take one to two seconds of CPU time; a copy takes some
milliseconds and holds the same. Programs that tests start as a person would, and the tests of how a store is made
(`test_tracking`), make their own.
"""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

VARIABLE = "EMPTY_STORE"
"""Variable with the path of the session's empty database, for all of its processes."""


def copying() -> Callable[[Path, str], None]:
    """Return a function for the place of `mlflow_store._make_database`."""
    from deeplightning.tracking import mlflow_store

    return _Copying(mlflow_store._make_database, Path(os.environ[VARIABLE]))


class _Copying:
    """Stand in for the function that makes a database.

    Args:
        makes: that function.
        empty: an empty database that it has made, or where to make one.
    """

    def __init__(self, makes: Callable[[Path, str], None], empty: Path):
        self.makes, self.empty = makes, empty

    def __call__(self, database: Path, artifact_root: str) -> None:
        from mlflow.utils.uri import append_to_uri_path

        if not self.empty.exists():
            own = self.empty.with_name(f"{self.empty.name}.{os.getpid()}")
            self.makes(own, "file:///nowhere")
            own.replace(self.empty)
        beside = database.with_name(f".{database.name}.new")
        beside.touch()
        shutil.copyfile(self.empty, beside)
        with closing(sqlite3.connect(beside)) as connection, connection:
            values = (append_to_uri_path(artifact_root, "0"), int(time.time() * 1000))
            changed = "artifact_location = ?1, creation_time = ?2, last_update_time = ?2"
            connection.execute(f"UPDATE experiments SET {changed} WHERE experiment_id = 0", values)
        beside.replace(database)
