"""What the logger and the writer ask of a tracking store, in plain values, and who answers: `open_tracker` decides.

A directory on this machine is spoken to directly (`deeplightning.tracking.sqlite`), anything else through MLflow
(`deeplightning.tracking.client`), whose import costs 1.2 CPU seconds.
"""

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from deeplightning.faults import count
from deeplightning.words import stage_of

SYSTEM = "system/"
"""How the names of metrics of the machine's load begin."""
EPOCH = "epoch"
"""What Lightning adds to all that it logs; no metric."""
DATA_CONTEXT = ("mlflow.data.context", "training")
"""The tag by which MLflow says what a run has used a dataset for."""


def is_of_test(name: str) -> bool:
    """Return whether a metric is of a test. It is of a whole run and stands at step 0, where MLflow compares runs by
    bars; at a later step it draws a line of one point."""
    return stage_of(name)[0] == "test"


class Point(NamedTuple):
    """One value of a metric.

    Attributes:
        name: of the metric.
        value: may be NaN or infinite.
        time: milliseconds since 1970.
        step: of the training, or the second of the run for the machine's load.
    """

    name: str
    value: float
    time: int
    step: int


class Dataset(NamedTuple):
    """The data of a run, as MLflow's pages show and compare them.

    Attributes:
        name: of the kind of data.
        digest: at most 36 characters; other content has another one.
        source_type: MLflow's word for where they are: "local", "http", "code".
        source: JSON, such as {"uri": "/data/flowers"}.
        profile: JSON, what is known of their size.
    """

    name: str
    digest: str
    source_type: str
    source: str
    profile: str


class Run(NamedTuple):
    """A run as its store has it.

    Attributes:
        id: 32 hexadecimal digits.
        experiment_id: a number as text.
        status: RUNNING, FINISHED, FAILED or KILLED.
        started: milliseconds since 1970.
        artifact_uri: where its files lie.
        is_active: False: it was deleted.
        params: by their names.
        tags: by their names.
    """

    id: str
    experiment_id: str
    status: str
    started: int
    artifact_uri: str
    is_active: bool
    params: dict[str, str]
    tags: dict[str, str]


class Experiment(NamedTuple):
    """An experiment as its store has it."""

    id: str
    artifact_location: str
    is_active: bool


@dataclass
class Batch:
    """What is written together; `status` is a word and the time of the end in milliseconds, None: it has none."""

    points: list[Point] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[Dataset] = field(default_factory=list)
    status: tuple[str, int | None] | None = None

    def parts(self) -> Sequence["Batch"]:
        """The kinds of things that it holds, each on its own; the status last."""
        parts = (
            Batch(params=self.params),
            Batch(tags=self.tags),
            Batch(points=self.points),
            Batch(datasets=self.datasets),
            Batch(status=self.status),
        )
        return [part for part in parts if part != Batch()]

    def words(self) -> str:
        """What it holds, for a person."""
        words = [
            count(len(self.points), "point") if self.points else "",
            count(len(self.params), "parameter") if self.params else "",
        ]
        words += [f"the tags {', '.join(self.tags)}" if self.tags else ""]
        words += [f"the data {', '.join(one.name for one in self.datasets)}" if self.datasets else ""]
        words += [f"the status {self.status[0]}" if self.status else ""]
        return ", ".join(word for word in words if word)


class Tracker(Protocol):
    """A tracking store. Whatever it raises that is not an `Absent` is the store's own; `is_transient` judges it."""

    def make_ready(self) -> None:
        """Makes sure that it can be written now; waits, within bounds, for a process that holds it."""

    def experiment(self, name: str) -> Experiment:
        """The experiment of a name, made if there is none."""

    def name_of(self, experiment_id: str) -> str:
        """The name of an experiment."""

    def new_id(self) -> str | None:
        """An id for a run that is to be created; None: the store chooses it."""

    def create_run(
        self, experiment: Experiment, name: str | None, tags: dict[str, str], stem: str = "", run_id: str | None = None
    ) -> Run:
        """A new run, RUNNING; without a name it gets that of `stem` and the first digits of its id, or a random one.

        Args:
            run_id: what `new_id` gave; None: that is asked for here.
        """

    def delete(self, run_id: str, statuses: Collection[str]) -> bool:
        """Marks a run as deleted, as MLflow does, if its status is one of these; whether it was."""

    def run(self, run_id: str) -> Run | None:
        """A run, deleted ones too; None: there is none."""

    def rename(self, run_id: str, name: str) -> None:
        """Gives a run another name."""

    def drop_tag(self, run_id: str, name: str) -> None:
        """Takes a tag, which must be there, off a run."""

    def history(self, run_id: str, names: Collection[str] | None = None) -> Iterable[Point]:
        """The points of some metrics of a run; None: of all but those of the machine's load."""

    def log_batch(self, run_id: str, batch: Batch) -> None:
        """Writes what is there; points that are there already once, tags over those of their names.

        Raises:
            Exception: the run is not there or was deleted, or a parameter has another value.
        """

    def upload(self, run_id: str, path: Path, folder: str | None) -> None:
        """Puts a file or folder into the artifacts of a run whose artifacts are elsewhere."""

    def log_model(self, run_id: str, name: str, path: Path, kind: str) -> None:
        """Lists an MLflow model among those of the run's experiment, with the run's parameters and the
        metrics of its test (those of a validation are of other weights than the best); a second time it replaces the
        first.

        Args:
            path: the model's folder; where the artifacts of the run are on this machine, one of them.
            kind: of the task.
        """

    def is_transient(self, error: Exception) -> bool:
        """Whether the same call may succeed later."""

    def close(self) -> None:
        """Lets go of the store; the next use takes it up again."""


def stored(value: float) -> tuple[bool, float]:
    """How MLflow's databases hold a value: whether it is NaN, and a finite number (0 for NaN)."""
    if math.isnan(value):
        return True, 0.0
    return False, min(max(value, -sys.float_info.max), sys.float_info.max)


def as_logged(value: float, is_nan: bool = False) -> float:
    """The value that MLflow's databases hold so, see `stored`."""
    if is_nan:
        return math.nan
    return math.copysign(math.inf, value) if abs(value) == sys.float_info.max else value
