"""What a tracking store holds, as plain values; its names and texts in the form that MLflow takes."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from deeplightning.words import stage_of

SYSTEM = "system/"
"""How the names of metrics of the machine's load begin."""
RUN_NAME = "mlflow.runName"
"""The tag with a run's name."""
EPOCH = "epoch"
"""What Lightning adds to all that it logs; no metric."""
PRUNED = ("trial.state", "pruned")
"""The tag of a trial that its search has stopped early."""
MAX_NAME, MAX_PARAM, MAX_TAG, MAX_REASON = 250, 6000, 5000, 1000
"""Characters that MLflow takes in a name, a parameter and a tag; and those kept of the reason of a failure."""
NETWORK, DATA, ENGINE = "network", "data", "engine"
"""The tags that say what a run has trained, from what and on what: columns of the table of runs."""
NOTE = "mlflow.note.content"
"""The tag that MLflow shows as the description of a run, in Markdown."""


def name_of(stem: str, run_id: str) -> str:
    """Return a descriptive name of a run, `SimpleCNN-Digits-a3f1`, with the first digits of its id; of `run` without a
    stem."""
    return f"{stem or 'run'}-{run_id[:4]}"


def is_of_test(name: str) -> bool:
    """Return whether a metric is of a test. It is of a whole run and stands at step 0, where MLflow compares runs by
    bars; at a later step it draws a line of one point."""
    return stage_of(name)[0] == "test"


class Point(NamedTuple):
    """One value of a metric, which may be NaN or infinite."""

    name: str
    value: float
    time: int  # milliseconds since 1970
    step: int  # of the training, or the second of the run for the machine's load


class Dataset(NamedTuple):
    """The data of a run, as MLflow's pages show and compare them."""

    name: str  # of the kind of data
    digest: str  # at most 36 characters; other content has another one
    source_type: str  # MLflow's word for where they are: "local", "http", "code"
    source: str  # JSON, such as {"uri": "/data/flowers"}
    profile: str  # JSON, what is known of their size


class Run(NamedTuple):
    """A run in its store."""

    id: str  # 32 hexadecimal digits
    experiment_id: str  # a number as text
    status: str  # RUNNING, FINISHED, FAILED or KILLED
    started: int  # milliseconds since 1970
    artifact_uri: str  # where its files are
    is_active: bool  # False if it was deleted
    params: dict[str, str]
    tags: dict[str, str]
    experiment: str = ""  # the name of its experiment
    metrics: Mapping[str, float] = MappingProxyType({})  # the last value of each

    @property
    def name(self) -> str:
        return self.tags.get(RUN_NAME, "")

    @property
    def is_pruned(self) -> bool:
        """Whether it is a trial that its search has stopped early."""
        return PRUNED in self.tags.items()


def run_of(header: Mapping[str, Any]) -> Run:
    """Return the run that the first line of a file describes."""
    ids, tags = (str(header["run"]), str(header["experiment_id"])), {str(n): str(v) for n, v in header["tags"].items()}
    place, name = str(header["artifact_uri"]), str(header["experiment"])
    return Run(*ids, "RUNNING", int(header["started"]), place, True, {}, tags, name)


def header_of(run: Run) -> dict[str, Any]:
    """Return what the first line of a file says of a run that its store may not have yet."""
    ids = {"run": run.id, "experiment_id": run.experiment_id, "experiment": run.experiment}
    return ids | {"artifact_uri": run.artifact_uri, "started": run.started, "tags": run.tags}


class Experiment(NamedTuple):
    """An experiment in its store."""

    id: str
    artifact_location: str
    is_active: bool


@dataclass
class Batch:
    """What is written together; `status` is a word and the time of the end in milliseconds, None if it has none."""

    points: list[Point] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[Dataset] = field(default_factory=list)
    status: tuple[str, int | None] | None = None


def as_logged(value: float, is_nan: bool = False) -> float:
    """Return the value that was logged: MLflow's databases hold an infinity as the largest float."""
    if is_nan:
        return math.nan
    return math.copysign(math.inf, value) if abs(value) == sys.float_info.max else value


def flatten(params: Mapping[str, object]) -> dict[str, str]:
    """Flatten nested mappings and lists into one mapping of text, keys joined by `/`, within MLflow's limits."""
    flat: dict[str, str] = {}

    def visit(path: tuple[str, ...], value: object) -> None:
        items = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if not isinstance(items, Mapping) or (not items and path):
            flat[clean("/".join(path))] = str(value)[:MAX_PARAM]
            return
        for key, inner in items.items():
            visit((*path, str(key)), inner)

    visit((), params)
    return flat


@lru_cache(maxsize=4096)
def clean(name: str) -> str:
    """Make a name valid for MLflow: letters, digits and `_-. :/`, no empty or dotted part, at most 250 characters."""
    parts = re.sub(r"[^\w.\- :/]", "_", str(name)).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:MAX_NAME]


def inside(name: str) -> Path:
    """Return a path below the run's artifacts.

    Raises:
        ValueError: it would lead out of them.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is not a name inside the run's artifacts: write a relative path without '..'.")
    return path
