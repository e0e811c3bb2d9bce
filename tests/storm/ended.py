"""What a run has left: status, weights, the best, the bundle and every point, as plain values that can be compared."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiny import digest

from storm.place import expect

FILES = ("bundle/weights.safetensors", "bundle/model.onnx", "test_predictions.csv", "val_results.json")
"""That are the same byte for byte, where a run has them."""


@dataclass
class End:
    """How a run ended.

    Attributes:
        weights: the digest of the weights in each checkpoint file.
        files: the digest of each of `FILES`.
        series: steps and values of each metric, without the machine's load.
        points: the same, as `metrics.jsonl` in the run's folder has them.
    """

    status: str
    weights: dict[str, str]
    best: dict[str, Any]
    files: dict[str, str]
    series: dict[str, list[list[float]]]
    points: Any

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def differs(self, other: "End") -> str:
        """Where it differs, in words."""
        mine, theirs = self.plain(), other.plain()
        found = []
        for name in mine:
            if mine[name] == theirs[name]:
                continue
            if not isinstance(mine[name], dict) or not isinstance(theirs[name], dict):
                found.append(f"{name}: {mine[name]} instead of {theirs[name]}")
                continue
            for key in mine[name].keys() | theirs[name].keys():
                if (one := mine[name].get(key)) != (two := theirs[name].get(key)):
                    found.append(f"{name}/{key}: {one} instead of {two}")
        return "; ".join(text[:600] for text in found)


def end_of(store: Path, experiment: str = "Default", run_id: str | None = None) -> End:
    """The end of the only run of an experiment, or of the one that is named.

    Raises:
        Broken: there is not one.
    """
    client, runs = _runs(store, experiment)
    runs = [run for run in runs if run_id in (None, run.info.run_id)]
    expect(len(runs) == 1, f"there are {len(runs)} runs in the store instead of one")
    (run,) = runs
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    names = sorted(name for name in run.data.metrics if not name.startswith("system/"))
    # By steps: a point of a process that was killed may be in the store before those that its successor writes again.
    series = {
        name: sorted([p.step, p.value] for p in client.get_metric_history(run.info.run_id, name)) for name in names
    }
    weights = {path.name: digest(path) for path in sorted(folder.glob("*.ckpt"))}
    files = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES if (folder / name).exists()
    }
    best = json.loads((folder / "best.json").read_text()) if (folder / "best.json").exists() else {}
    return End(run.info.status, weights, best, files, series, _points(folder / "metrics.jsonl"))


def statuses(store: Path, experiment: str = "Default") -> dict[str, str]:
    """The status of each run of an experiment, by the run's id."""
    if not (store / "mlflow.db").exists():
        return {}
    _, runs = _runs(store, experiment)
    return {run.info.run_id: run.info.status for run in runs}


def folder_of(store: Path, run_id: str) -> Path:
    """The folder of a run."""
    return next(store.glob(f"*/{run_id}/artifacts"))


def names_of(folder: Path) -> list[str]:
    """The files that a run has left."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _runs(store: Path, experiment: str) -> tuple[Any, list[Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    found = client.get_experiment_by_name(experiment)
    return client, [] if found is None else list(client.search_runs([found.experiment_id]))


def _points(path: Path) -> Any:
    """Without times, which differ."""
    from deeplightning.tracking.metrics_file import read_series

    return {name: [list(point) for point in points] for name, points in read_series(path).items()}
