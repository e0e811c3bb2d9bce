"""What of its runs MLflow's page shows first: the address, and the columns of the table. Importing it is cheap."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deeplightning.tracking.metric_names import DATA, ENGINE, NETWORK
from deeplightning.words import stage_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PORT = 5001
"""Where `deeplightning monitor` listens by default."""

OPENS = "DEEPLIGHTNING_OPENS"
"""The environment variable by which the server learns the address that it is to open in a browser."""

MAX_METRICS = 4
"""Metrics that have a column of their own by default."""

_FIRST = ("acc", "map", "f1", "iou", "dice", "auroc", "r2", "rmse", "mae", "perplexity")
"""What a metric of validation and test is called, the most telling first."""


def runs_page(experiment_id: str) -> str:
    """Return the address, from `#` on, at which MLflow's page shows the runs of an experiment with charts."""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&compareRunsMode=CHART"


def newest_runs(client: "MlflowClient", number: int) -> "list[Run]":
    """Return the latest runs of a store, newest first."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments(max_results=1000)]
    return list(client.search_runs(experiments, max_results=number, order_by=["attributes.start_time DESC"]))


def columns(metrics: Iterable[str]) -> list[str]:
    """Return the columns of a table of runs, besides name, time and duration, as MLflow's page names them.

    Args:
        metrics: the names of the metrics of the runs; those that several runs have come several times.
    """
    often = Counter(name for name in metrics if stage_of(name)[0] in ("val", "test"))
    telling = [name for name in often if not stage_of(name)[1].endswith("loss")] or list(often)
    best = sorted(telling, key=lambda name: (_rank(name), -often[name], stage_of(name)[0] == "test", name))
    shown = [f"metrics.`{name}`" for name in best[:MAX_METRICS]]
    return [*shown, *(f"tags.`{name}`" for name in (NETWORK, DATA, ENGINE)), "attributes.`Duration`"]


def _rank(name: str) -> int:
    of = stage_of(name)[1]
    return _FIRST.index(of) if of in _FIRST else len(_FIRST)
