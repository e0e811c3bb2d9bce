"""What can be done with runs that are over: list, tell two apart, run one again and compare, remove failed ones, and
write down what a killed one or a dead server has left unwritten."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deeplightning.config.fault import RunError, SetupError
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.configure import load_config
from deeplightning.run import launch
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.journal import folder_of, left_behind, replay
from deeplightning.tracking.store import attach, explain, local_path, locate
from deeplightning.tracking.tracker import open_tracker

REMOVABLE = ("FAILED", "KILLED")


def listing(tracking_uri: str | None, unfinished: bool = False) -> list[dict[str, str]]:
    """The runs of a store, the newest first: id, status, started (UTC), experiment, result, folder.

    Args:
        tracking_uri: the store; None: MLFLOW_TRACKING_URI, else `mlruns`.
        unfinished: only runs that failed or were killed.

    Raises:
        SetupError: the store cannot be opened.
    """
    from mlflow.entities import ViewType

    rows = []
    with _client(tracking_uri) as client:
        experiments = {e.experiment_id: e.name for e in client.search_experiments(view_type=ViewType.ACTIVE_ONLY)}
        token: str | None = None
        while experiments:
            page = client.search_runs(list(experiments), order_by=["start_time DESC"], page_token=token)
            rows += [_row(run, experiments) for run in page]
            token = page.token
            if not token:
                break
    return [row for row in rows if not unfinished or row["status"] in REMOVABLE]


def _row(run: Any, experiments: Mapping[str, str]) -> dict[str, str]:
    started = datetime.fromtimestamp(run.info.start_time / 1000, UTC)
    folder = local_path(run.info.artifact_uri)
    shown = ("test_acc", "val_acc", "test_loss", "val_loss", "train_loss")
    best = next(((name, run.data.metrics[name]) for name in shown if name in run.data.metrics), None)
    return {
        "id": run.info.run_id,
        "status": run.info.status,
        "started": started.isoformat(" ", timespec="seconds").removesuffix("+00:00"),
        "experiment": experiments[run.info.experiment_id],
        "result": f"{best[0]} {best[1]:.4f}" if best else "",
        "folder": str(folder or run.info.artifact_uri),
    }


def remove(tracking_uri: str | None, rows: list[dict[str, str]]) -> None:
    """Deletes runs that failed or were killed, with their files; a run that has started again since is left alone."""
    with _client(tracking_uri) as client:
        for row in rows:
            if client.get_run(row["id"]).info.status not in REMOVABLE:
                continue
            client.delete_run(row["id"])
            folder = Path(row["folder"])
            if folder.name == "artifacts" and folder.parent.name == row["id"]:
                shutil.rmtree(folder.parent, ignore_errors=True)


def sync(tracking_uri: str | None) -> Iterator[str]:
    """Writes the journals that ended processes have left for a store; a line for each run, as it is written.

    Raises:
        SetupError: the store cannot be used, or does not answer; what is not written stays.
    """
    store = locate(tracking_uri)
    if not left_behind(store):
        return
    try:
        tracker = open_tracker(store)
    except Exception as error:  # MLflow and SQLite each have their own
        raise explain(error, store) from error
    for found in replay(store, tracker):
        if not found.problem:
            yield f"{found.run_id}  {found.points} points and {found.others} other entries written"
        elif found.is_refused:
            yield f"{found.run_id}  refused ({found.problem}); kept as {found.kept}"
        else:
            raise SetupError(
                f"{store.shown} does not take what was left unwritten ({found.problem}). It stays in "
                f"{folder_of(store)}; once the store answers: deeplightning runs --sync"
            )


class _client:
    """MLflow's client on a store; what goes wrong inside the block is told as a fault of the store."""

    def __init__(self, tracking_uri: str | None):
        self.store = locate(tracking_uri)

    def __enter__(self) -> Any:
        if self.store.database is not None and not self.store.database.exists():
            raise SetupError(f"{self.store.shown}: there are no runs; the first `bash train.sh` makes the store")
        uri = attach(self.store)
        from mlflow.tracking import MlflowClient

        return MlflowClient(uri)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and not hasattr(error, "exit_code"):
            raise explain(error, self.store) from error


def differences(first: RunFolder, second: RunFolder) -> Iterator[tuple[str, str, str]]:
    """Where two runs differ: config keys, then results; (name, value in the first, value in the second)."""
    for find in (_config, _results):
        one, two = find(first), find(second)
        for name in sorted(one.keys() | two.keys()):
            if one.get(name) != two.get(name):
                yield name, str(one.get(name, "none")), str(two.get(name, "none"))


def _config(folder: RunFolder) -> dict[str, Any]:
    return dict(_flat(plain(read(folder.config).root)))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}".lstrip("."))
    else:
        yield name, value


def _results(folder: RunFolder) -> dict[str, Any]:
    """What came out: the best value and the metrics of each evaluation that was made."""
    found: dict[str, Any] = {}
    if folder.best_score.is_file():
        best = json.loads(folder.best_score.read_text())
        found[f"best {best['metric']}"] = best["value"]
        found["best step"] = best["step"]
    for stage in ("validate", "test"):
        if folder.results(stage).is_file():
            found |= json.loads(folder.results(stage).read_text())
    return found


def reproduce(folder: RunFolder) -> RunFolder:
    """Runs a run's config once more, as a new run, and compares weights and results.

    Returns:
        The new run's folder.

    Raises:
        RunError: the new run came out differently; says in what.
    """
    again = launch(load_config(folder.config))
    different = [f"{name}: {a} → {b}" for name, a, b in differences(folder, again) if name in _results(folder)]
    if folder.last.is_file() and _weights(folder) != _weights(again):
        different.append("the weights of last.ckpt differ")
    if different:
        raise RunError(f"{again.path} does not agree with {folder.path}: {'; '.join(different)}")
    return again


def _weights(folder: RunFolder) -> str:
    """A digest of all tensors of a run's last checkpoint, with their names."""
    import torch

    from deeplightning.engine.checkpoint_io import read_checkpoint

    digest = hashlib.sha256()
    for name, tensor in sorted(read_checkpoint(folder.last)["state_dict"].items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
