"""What a run has left: status, weights, the best, and every point, as plain values that can be compared."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiny import digest

from storm.place import expect


@dataclass
class End:
    """How a run ended.

    Attributes:
        weights: the digest of the weights in each checkpoint file.
        series: steps and values of each metric, without the machine's load.
    """

    status: str
    weights: dict[str, str]
    best: dict[str, Any]
    series: dict[str, list[list[float]]]

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "End":
        return cls(**plain)


def end_of(store: Path, experiment: str) -> End:
    """The end of the only run of an experiment.

    Raises:
        Broken: there is not one.
    """
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    found = client.get_experiment_by_name(experiment)
    runs = [] if found is None else client.search_runs([found.experiment_id])
    expect(len(runs) == 1, f"there are {len(runs)} runs in the store instead of one")
    (run,) = runs
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    names = sorted(name for name in run.data.metrics if not name.startswith("system/"))
    series = {name: [[p.step, p.value] for p in client.get_metric_history(run.info.run_id, name)] for name in names}
    weights = {path.name: digest(path) for path in sorted(folder.glob("*.ckpt"))}
    return End(run.info.status, weights, json.loads((folder / "best.json").read_text()), series)
