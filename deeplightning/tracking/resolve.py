"""Resolve RUN, as users write it (folder, run id or name, `runs:/ID`, registered model), to a local folder."""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from deeplightning.faults import CheckpointError, SetupError
from deeplightning.runfolder import from_start
from deeplightning.tracking.store import Store, explain, explained, local_path, locate, patient

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUN_ID = r"\w[^/*?\[\]\x00-\x1f]*"  # names of runs too


def resolve_run(run: str | os.PathLike, tracking_uri: str | os.PathLike | None = None) -> Path:
    """Return the absolute local folder of a run's artifacts.

    Args:
        run: the folder itself (then MLflow is not imported), an MLflow run id, a run's name, `runs:/ID`,
            `models:/NAME/VERSION` or `models:/NAME@ALIAS` (the run that the registered version comes from).
        tracking_uri: the store to look up an id or a name in, as in `locate`.

    Raises:
        CheckpointError: there is no such run, several have this name, or its artifacts are gone.
        SetupError: the store cannot be opened.
    """
    text = os.fspath(run)
    if not text.strip():
        raise CheckpointError("No run was given. Name a folder, an MLflow run id, runs:/ID or models:/NAME/VERSION.")
    if text.startswith("models:/"):
        return _model_artifacts(text, locate(tracking_uri))
    if text.startswith("runs:/"):
        run_id, _, inside = text.removeprefix("runs:/").strip("/").partition("/")
        return _run_artifacts(run_id, locate(tracking_uri)) / inside
    folder = (local_path(text) if text.startswith("file:") else None) or from_start(text)
    if os.path.isdir(folder):  # noqa: PTH112 (Path raises for a name that is too long)
        return folder
    if os.path.exists(folder):  # noqa: PTH110
        raise CheckpointError(f"{folder} is a file, not a run. Give the run folder that contains it.")
    if re.fullmatch(_RUN_ID, text):
        return _run_artifacts(text, locate(tracking_uri), also=f"There is no folder {folder} either. ")
    raise CheckpointError(
        f"There is no run folder {folder}. A training prints it as its last line; you can also give an MLflow run id, "
        "runs:/ID or models:/NAME/VERSION."
    )


def _run_artifacts(run_id: str, store: Store, also: str = "") -> Path:
    def missing(why: str) -> CheckpointError:
        return CheckpointError(f"{why} {also}The runs there: deeplightning monitor")

    from deeplightning.tracking.claims import artifacts_of, find_run, is_in_use
    from deeplightning.tracking.reader import open_reader  # not needed for a folder

    _require_store(store, f"the run {run_id}")
    if not re.fullmatch(_RUN_ID, run_id):  # it is used as a file name, and may come from a server
        raise missing(f"{run_id!r} is not a run id.")
    with explained(store):
        found = find_run(store, run_id)
        named = [run.id for run in open_reader(store).listing() if run.name == run_id] if found is None else []
    if len(named) == 1:
        return _run_artifacts(named[0], store)
    if named:
        ids = ", ".join(named[:5])
        raise CheckpointError(f"{len(named)} runs are called {run_id!r}. Name one by its id, the newest first: {ids}")
    if found is None:
        raise missing(f"There is no run {run_id!r} in the tracking store {store.shown}.")
    folder = artifacts_of(store, found)
    if folder is None:
        kept = _cache() / run_id
        return kept if is_in_use(store, run_id, kept) else _download(_client(store), run_id, store, found.artifact_uri)
    if folder.is_dir():
        return folder
    raise missing(f"The run {run_id} is in the tracking store {store.shown}, but its folder {folder} is gone.")


def _model_artifacts(uri: str, store: Store) -> Path:
    named = re.fullmatch(r"models:/+(?P<name>[^@]+?)(/(?P<version>[0-9]+)|@(?P<alias>[^/@]+))/*", uri)
    if named is None:
        raise CheckpointError(
            f"{uri!r} is not a model version. Write models:/NAME/VERSION, with a whole number, or models:/NAME@ALIAS."
        )
    name, version, alias = named["name"], named["version"], named["alias"]
    client = _client(store)
    from mlflow.exceptions import MlflowException

    try:
        model = client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise explain(error, store) from error
        which = f"with the alias {alias!r}" if alias else f"of version {version}"
        raise CheckpointError(f"There is no model {name!r} {which} in {store.shown}.") from None
    if model.run_id:
        return _run_artifacts(model.run_id, store)
    folder = local_path(model.source)
    if folder is None or not folder.is_dir():
        raise CheckpointError(f"{uri} belongs to no run, and its source {model.source} is not a local folder.")
    return folder


def _require_store(store: Store, run: str) -> None:
    """Raise if the store does not exist: looking up a run creates no store."""
    if store.database is not None and not store.database.exists():
        raise CheckpointError(f"There is no tracking store {store.shown} to look {run} up in. Give the run's folder.")


def _client(store: Store) -> "MlflowClient":
    """Return MLflow's client for a store that exists."""
    from deeplightning.tracking.mlflow_store import open_client

    _require_store(store, "a run")
    return open_client(store)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeplightning" / "runs"


def _download(client: "MlflowClient", run_id: str, store: Store, address: str) -> Path:
    """Download a server's artifacts to the user's cache, at each call, because the run may have continued."""
    cache, target = _cache(), _cache() / run_id
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{run_id}.", dir=cache, ignore_cleanup_errors=True) as new, patient():
            client.download_artifacts(run_id, "", new)
            shutil.rmtree(target, ignore_errors=True)
            Path(new).rename(target)
    except OSError as error:
        raise SetupError(f"The artifacts of the run {run_id} cannot be downloaded to {cache}: {error}") from error
    except Exception as error:  # MLflow's artifact stores each have their own errors
        if urlsplit(address).scheme in ("mlflow-artifacts", "http", "https"):  # they are on the tracking server
            raise explain(error, store) from error
        files, why = re.sub(r"://.*@", "://***@", address), " ".join(str(error).split())[:300]
        raise SetupError(f"The files of the run {run_id} are at {files} and cannot be read: {why}") from error
    return target
