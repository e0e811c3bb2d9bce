"""Read the result of a run (status, weights, best.json, bundle, points) as plain values that can be compared."""

import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commands import Outcome
from tiny import digest

from storm.place import Place, expect

FILES = ("bundle/weights.safetensors", "bundle/model.onnx", "test_predictions.csv", "val_results.json")
"""Files of a run that must be identical byte for byte, if it has them."""


@dataclass
class End:
    """Result of a run.

    Attributes:
        weights: the digest of the weights in each checkpoint file.
        files: the digest of each of `FILES`.
        series: steps and values of each metric in the store, except system metrics.
        points: the same, from `metrics.jsonl` in the run's folder.
    """

    status: str
    weights: dict[str, str]
    best: dict[str, Any]
    files: dict[str, str]
    series: dict[str, list[list[float]]]
    points: Any

    def differs(self, other: "End") -> str:
        """Describe the differences; "" if there are none."""
        mine, theirs = self._values(), other._values()
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        return "; ".join(f"{name}: {mine.get(name)} instead of {theirs.get(name)}"[:600] for name in names)

    def _values(self) -> dict[str, object]:
        """Return the status and each value of the mappings, by unique names."""
        parts = [(name, part) for name, part in asdict(self).items() if name != "status"]
        return {"status": self.status} | {f"{name}/{key}": value for name, part in parts for key, value in part.items()}


@dataclass
class Reference:
    """Undisturbed run, to compare with: its folder, duration and result."""

    folder: Path
    seconds: float
    end: End


def undisturbed(
    place: Place, experiment: str, run: Callable[[Path], Sequence[Outcome]], name: str = "reference"
) -> Reference:
    """Return an undisturbed run, which the first case that needs it makes for all cases of the kind.

    Args:
        run: makes it in a folder, with the store `mlruns` there.

    Raises:
        Broken: the run fails.
    """

    def make(folder: Path) -> None:
        begun = time.monotonic()
        ended = run(folder)
        seconds = time.monotonic() - begun
        expect(all(each.code == 0 for each in ended), f"the undisturbed run ({name}) fails", *ended)
        end = asdict(end_of(folder / "mlruns", experiment))
        (folder / "end.json").write_text(json.dumps({"end": end, "seconds": seconds}))

    folder = place.once(name, make)
    known = json.loads((folder / "end.json").read_text())
    return Reference(folder, known["seconds"], End(**known["end"]))


def expect_readable(paths: Iterable[Path], *seen: object) -> None:
    """Raise `Broken` if one of these files is torn; files that are still being written have a leading dot."""
    for path in paths:
        fault: object = None
        try:
            if path.suffix in (".json", ".ipynb"):
                json.loads(path.read_text())
            elif path.suffix in (".zip", ".ckpt"):
                with zipfile.ZipFile(path) as archive:
                    fault = archive.testzip()
            elif path.name == "cfg.yaml" and not ("logger:" in (text := path.read_text()) and text.endswith("\n")):
                fault = "its end is missing"
        except (ValueError, zipfile.BadZipFile) as error:
            fault = error
        expect(fault is None, f"{path} is torn: {fault}", *seen)


def end_of(store: Path, experiment: str = "Default", run_id: str | None = None) -> End:
    """Return the result of the only run of an experiment, or of the run `run_id`.

    Raises:
        Broken: there is not exactly one.
    """
    client, runs = _runs(store, experiment)
    runs = [run for run in runs if run_id in (None, run.info.run_id)]
    expect(len(runs) == 1, f"there are {len(runs)} runs in the store instead of one")
    (run,) = runs
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    names = sorted(name for name in run.data.metrics if not name.startswith("system/"))
    # Sorted: points of a killed process may precede those that its successor writes again.
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
    """Return the status of each run of an experiment by its id."""
    if not (store / "mlflow.db").exists():
        return {}
    _, runs = _runs(store, experiment)
    return {run.info.run_id: run.info.status for run in runs}


def folder_of(store: Path, run_id: str) -> Path:
    """Return the folder of a run."""
    return next(store.glob(f"*/{run_id}/artifacts"))


def names_of(folder: Path) -> list[str]:
    """Return the relative paths of the files of a run."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _runs(store: Path, experiment: str) -> tuple[Any, list[Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    found = client.get_experiment_by_name(experiment)
    return client, [] if found is None else list(client.search_runs([found.experiment_id]))


def _points(path: Path) -> Any:
    """Return the points without times, which differ."""
    from deeplightning.tracking.metrics_file import read_series

    return {name: [list(point) for point in points] for name, points in read_series(path).items()}
