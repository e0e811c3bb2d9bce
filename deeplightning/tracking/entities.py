"""The content of a tracking store as plain values, with names and texts in a form that MLflow accepts."""

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
"""Prefix of the names of system metrics."""
RUN_NAME = "mlflow.runName"
"""The tag with a run's name."""
EPOCH = "epoch"
"""Name that Lightning adds to everything it logs. It is not a metric."""
PRUNED = ("trial.state", "pruned")
"""Tag of a trial that its search stopped early."""
MAX_NAME, MAX_PARAM, MAX_TAG, MAX_REASON = 250, 6000, 5000, 1000
"""Maximum length of a name, a parameter and a tag in MLflow, and of the recorded reason of a failure."""
NETWORK, DATA, ENGINE = "network", "data", "engine"
"""Tags with a run's network, data and engine: columns of the table of runs."""
NOTE = "mlflow.note.content"
"""The tag that MLflow shows as the description of a run, in Markdown."""


def name_of(prefix: str, run_id: str) -> str:
    """Return a name for a run, such as `SimpleCNN-Digits-a3f1`: `prefix`, or `run`, and the first digits of its id."""
    return f"{prefix or 'run'}-{run_id[:4]}"


def is_test_metric(name: str) -> bool:
    """Return whether a metric is a test metric. It belongs to the whole run and is logged at step 0, where MLflow
    compares runs by bars; at a later step it draws a line with one point."""
    return stage_of(name)[0] == "test"


class Point(NamedTuple):
    """One value of a metric, which may be NaN or infinite."""

    name: str
    value: float
    time: int  # milliseconds since 1970
    step: int  # of the training; for system metrics, the second of the run


class Dataset(NamedTuple):
    """The data of a run, as MLflow shows and compares them."""

    name: str  # name of the kind of data
    digest: str  # at most 36 characters; it changes with the content
    source_type: str  # in MLflow's terms: "local", "http", "code"
    source: str  # JSON, such as {"uri": "/data/flowers"}
    profile: str  # JSON with what is known about their size


class Run(NamedTuple):
    """A run in its store."""

    id: str  # 32 hexadecimal digits
    experiment_id: str  # a number, as text
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
        """Whether it is a trial that its search stopped early."""
        return PRUNED in self.tags.items()


def run_of(header: Mapping[str, Any]) -> Run:
    """Return the run that the first line of a metrics file describes."""
    ids, tags = (str(header["run"]), str(header["experiment_id"])), {str(n): str(v) for n, v in header["tags"].items()}
    place, name = str(header["artifact_uri"]), str(header["experiment"])
    return Run(*ids, "RUNNING", int(header["started"]), place, True, {}, tags, name)


def header_of(run: Run) -> dict[str, Any]:
    """Return the first line of a metrics file, which describes a run that its store may not have yet."""
    ids = {"run": run.id, "experiment_id": run.experiment_id, "experiment": run.experiment}
    return ids | {"artifact_uri": run.artifact_uri, "started": run.started, "tags": run.tags}


class Experiment(NamedTuple):
    """An experiment in its store."""

    id: str
    artifact_location: str
    is_active: bool


@dataclass
class Batch:
    """Data that is written together. `status` has the time of the end in milliseconds, or None if there is none."""

    points: list[Point] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[Dataset] = field(default_factory=list)
    status: tuple[str, int | None] | None = None


def as_logged(value: float, is_nan: bool = False) -> float:
    """Return the value that was logged: MLflow stores an infinity in a database as the largest float."""
    return math.nan if is_nan else math.copysign(math.inf, value) if abs(value) == sys.float_info.max else value


def flatten(params: Mapping[str, object]) -> dict[str, str]:
    """Flatten nested mappings and lists into one mapping of texts, with keys joined by `/`, within MLflow's limits."""
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


def storable(text: str) -> str:
    """Escape what no database stores: the bytes of a file name that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def subpath(name: str) -> Path:
    """Return a path relative to the run's artifacts.

    Raises:
        ValueError: the path leads out of them.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is not a name inside the run's artifacts: use a relative path without '..'.")
    return path
