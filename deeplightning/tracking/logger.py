"""`deeplightning.tracking.MLflowLogger` tracks what Lightning, the callbacks and a user's code log, in one MLflow run.

Making the logger does nothing. The first use in a hook, on rank 0, opens or joins a run; on others nothing happens.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from deeplightning.faults import SetupError, count
from deeplightning.runfolder import make_private
from deeplightning.tracking.artifacts import Artifacts, LocalArtifacts, RemoteArtifacts
from deeplightning.tracking.environment import git_state
from deeplightning.tracking.journal import Journal, replay
from deeplightning.tracking.metric_names import MAX_NAME, MAX_REASON, MAX_TAG, NOTE, NOTE_DIGEST, clean, flatten
from deeplightning.tracking.mlflow_store import LazyClient, uri_of
from deeplightning.tracking.mlflow_tags import RUN_NAME, run_tags
from deeplightning.tracking.open import open_tracker
from deeplightning.tracking.store import Store, explain, local_path, locate
from deeplightning.tracking.tracker import EPOCH, SYSTEM, Batch, Dataset, Point, Run, Tracker, is_of_test
from deeplightning.tracking.writer import Writer
from deeplightning.words import printable

log = logging.getLogger("deeplightning.tracking")

SAMPLE_SECONDS = 10.0
"""The pause between two system metrics; MLflow's variable MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL overrides it."""

_STATUS = {
    "success": "FINISHED",
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
    "interrupted": "KILLED",
}


class MLflowLogger(Logger):
    """Tracks one run in MLflow.

    Under `mlflow run` (the variable MLFLOW_RUN_ID is set) it joins the run that MLflow has opened, in MLflow's store.

    Args:
        experiment_name: the experiment, made if there is none of that name.
        tracking_uri: a directory (an SQLite database in it, artifacts beside it), `sqlite:///FILE`, or the address of a
            server. None: the variable MLFLOW_TRACKING_URI, else `mlruns`.
        run_name: the run's name; None: what `suggest_name` was given, with the first digits of the run's id, else a
            random one.
        tags: tags of the run.
        run_id: an existing run to continue; None: a new one.
        system_metrics: track the load of the machine (CPU, memory; GPUs with nvidia-ml-py) every ten seconds.
    """

    def __init__(
        self,
        experiment_name: str = "Default",
        tracking_uri: str | os.PathLike | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        system_metrics: bool = True,
    ):
        super().__init__()
        self._experiment_name = experiment_name
        self._tracking_uri = tracking_uri
        self._run_name = run_name
        self._stem = ""
        self._tags = dict(tags or {})
        self._run_id = run_id
        self._system_metrics = system_metrics
        self._experiment_id: str | None = None
        self._name: str | None = None  # as the store has it
        self._artifact_folder: Path | None = None
        self._artifacts: Artifacts | None = None  # of an open run
        self._last_step = 0
        self._names: dict[str, str] = {}  # of metrics, as they are logged and as they are tracked
        self._latest: dict[str, tuple[int, float]] = {}  # the last point of each metric
        self._there: dict[str, set[int]] = {}  # steps that the store has of a continued run
        self._continues = False
        self._owed: list[Point] = []
        self._is_described = NOTE in self._tags  # by somebody else
        self._status: str | None = None  # None: no run is open in this process
        self._store: Store | None = None
        self._tracker: Tracker | None = None
        self._writer: Writer | None = None
        self._early: dict[str, object] = {}  # parameters of a continued run that is not open yet
        self._params: dict[str, str] = {}  # what the run has, or is about to have
        self._opened_in = 0  # the process that opened it
        self._started = 0  # milliseconds since 1970
        self._ended_as: str | None = None  # the status before it was opened again

    def __getstate__(self) -> dict[str, object]:
        """A copy sent to another process leaves the open run behind, and would continue it."""
        return self.__dict__ | {"_tracker": None, "_writer": None, "_artifacts": None, "_status": None, "_opened_in": 0}

    # The identity of the run

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's `MlflowClient` on the run's store; opens the run. MLflow is imported when the client is used."""
        self._open()
        assert self._store is not None
        return LazyClient(self._store)

    @property
    def run_id(self) -> str | None:
        """The run's id; opens the run. None on other ranks than 0, unless it was given."""
        self._open()
        return self._run_id

    @property
    def run_name(self) -> str | None:
        """The run's name as the store has it; opens the run. None on other ranks than 0."""
        self._open()
        return self._name

    @property
    def version(self) -> str | None:
        """Lightning's word for `run_id`."""
        return self.run_id

    @property
    def name(self) -> str | None:
        """The experiment's id, since Lightning makes paths of it: `save_dir/name/version` is the run's folder."""
        self._open()
        return self._experiment_id

    @property
    def save_dir(self) -> str | None:
        """The store's folder, absolute; None if the store is not on this machine. Opens nothing."""
        folder = (self._store or self._locate()[0]).folder
        return None if folder is None else str(folder)

    @property
    def tracking_uri(self) -> str:
        """The URI by which MLflow opens the store; opens nothing."""
        return uri_of(self._store or self._locate()[0])

    @property
    def artifact_folder(self) -> Path | None:
        """The local folder of the run's artifacts, absolute, made; opens the run. None: on a server, or not rank 0."""
        self._open()
        return self._artifact_folder

    @property
    def is_open(self) -> bool:
        """Whether a run has been opened in this process; opens nothing."""
        return self._status is not None

    # Continuing a run

    def go_on(self, run_id: str, owed: Iterable[Sequence[Any]]) -> None:
        """Continue a run from an earlier point of it; to be called before the first use.

        What it logs again is there already, and MLflow deletes no point: of each metric, the steps that the store has
        are not written again.

        Args:
            run_id: the run.
            owed: points (see `Point`) that the run has logged, and that may not have reached the store.
        """
        self._run_id, self._continues = run_id, True
        self._owed = [Point(str(name), float(value), int(time), int(step)) for name, value, time, step in owed]

    @rank_zero_only
    def unwritten(self) -> list[tuple[object, ...]]:
        """Points (see `Point`) that may not be in the store yet, plain tuples for a checkpoint; opens nothing."""
        waiting = self._writer.waiting() if self._writer is not None else []
        return [tuple(point) for point in waiting if not point.name.startswith(SYSTEM)]

    def suggest_name(self, stem: str) -> None:
        """Say what a new run is about, for its name; to be called before the first use. `run_name` wins."""
        self._stem = stem

    # What is tracked

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, object] | Namespace | None, *args: object, **kwargs: object) -> None:
        """Track parameters under their path (`model/optimizer/params/lr`).

        On a continued run a parameter keeps its first value, as MLflow wants it; others are named in a notice.
        """
        values = flatten(vars(params) if isinstance(params, Namespace) else dict(params or {}))
        values |= {str(key): str(value) for key, value in kwargs.items()}
        if not values:
            return
        if self._continues and self._status is None:  # Lightning says them before a checkpoint is restored
            self._early |= values
            return
        writer = self._running()
        if changed := [key for key, value in values.items() if self._params.get(key, value) != value]:
            log.warning(
                "The continued run keeps the first values of %s: %s. The new ones are in its config file.",
                *(count(len(changed), "parameter"), ", ".join(changed[:5]) + (", …" if len(changed) > 5 else "")),
            )
        if new := {key: value for key, value in values.items() if key not in self._params}:
            self._params |= new
            writer.say(("params", new))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Track points; written within about a second. What repeats the last point of its metric is left out.

        `epoch`, which Lightning adds, is no metric. Metrics of a test have no step of their own: theirs is 0.

        Args:
            metrics: numbers, or tensors and arrays of one element. NaN and infinities are tracked, for they tell a
                story (MLflow stores an infinity as the largest float).
            step: the step of the points; None: the last one given.
        """
        step = self._last_step if step is None else int(step)
        self._last_step = step
        values: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                values[self._tracked_as(name)] = float(value)
            except (TypeError, ValueError):
                log.warning("%s is not tracked: %r is not a number.", name, value)
        if values:
            self._add(values, time.time_ns() // 1_000_000, step)

    def _tracked_as(self, name: str) -> str:
        """Return the name of a metric in the form that MLflow takes, another one for each metric."""
        if name not in self._names:
            tracked = clean(name)
            if tracked in self._names.values():
                tracked = f"{tracked[: MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
            if tracked != name:
                log.info("metric     %s is tracked as %s", name, tracked)
            self._names[name] = tracked
        return self._names[name]

    def _add(self, values: Mapping[str, float], moment: int, step: int) -> None:
        writer, new, tested = self._running(), {}, {}
        for name, value in values.items():
            if name == EPOCH:
                continue
            latest, is_test = self._latest.get(name), is_of_test(name)
            self._latest[name] = point = (0 if is_test else step, value)
            if _same(point, latest):
                continue
            if is_test:  # a run may be tested again
                tested[name] = value
            elif step not in self._there.get(name, ()):
                new[name] = value
        if new:
            writer.say(("points", moment, step, new))
        if tested:
            writer.say(("points", moment, 0, tested))

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags of the run; a value is cut at 5,000 characters."""
        self._running().say(("tags", {clean(name): str(value)[:MAX_TAG] for name, value in tags.items()}))

    @rank_zero_only
    def describe(self, text: str) -> None:
        """Set the description that MLflow shows of the run, in Markdown, unless somebody else has written one."""
        text = printable(text, "\n")[:MAX_TAG]
        self._open()  # tells whose description the run has
        if not self._is_described:
            self.log_tags({NOTE: text, NOTE_DIGEST: _digest(text)})

    @rank_zero_only
    def log_dataset(self, dataset: Dataset) -> None:
        """Say what data the run uses; MLflow shows them with their digest. Changes no status, so any thread may."""
        self._writing().say(("dataset", list(dataset)))

    @rank_zero_only
    def log_model(self, path: str | Path, name: str, kind: str) -> None:
        """List an MLflow model of the run among its experiment's models, with the metrics of its test.

        Args:
            path: the model's folder, in the run's folder. A server gets a copy in the background.
            name: what MLflow lists it under.
            kind: of the task, such as `image_classification`.
        """
        source, tracker, run_id = Path(path).absolute(), self._tracker, self._run_id
        if tracker is None or run_id is None:
            return
        listed = clean(name).replace("/", "_")
        self._writing().do(f"the model {name}", lambda: tracker.log_model(run_id, listed, source, kind))

    @rank_zero_only
    def rest(self) -> None:
        """Write what came after the end of the run, without opening it again."""
        if self._writer is not None and self._status != "RUNNING" and not self._writer.stop():
            return
        if self._tracker is not None and self._status != "RUNNING":
            self._tracker.close()

    @rank_zero_only
    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Put a file or a folder into the run's artifacts, under `folder`.

        Nothing is copied where it is there already. A server gets it in the background: leave it until `finalize`.

        Raises:
            FileNotFoundError: there is nothing at `path`.
        """
        source = Path(path).expanduser().absolute()
        if not source.exists():
            raise FileNotFoundError(f"There is no file {source} to put into the run's artifacts.")
        self._stored().put(source, folder)

    @rank_zero_only
    def log_picture(self, name: str, image: object) -> None:
        """Put a picture into the run's artifacts as a PNG.

        Args:
            name: the file's name, with or without `.png`, with or without folders before it.
            image: a matplotlib figure, a Pillow image, or an array or tensor: uint8, or floats from 0 to 1, of shape
                (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels.

        Raises:
            ValueError: `image` is none of these.
        """
        from deeplightning.tracking import picture

        self._stored().save(name if name.endswith(".png") else f"{name}.png", picture.to_png(image))

    @rank_zero_only
    def log(self, name: str, value: Any, step: int | None = None, kind: str | None = None) -> None:
        """Track one thing, by its kind.

        Args:
            name: its name; a file gets its ending by itself.
            value: a number (`metric`), a mapping or list (`config`: YAML, or JSON if the name ends so), a picture
                (`image`), a matplotlib figure (`figure`), numbers of any shape (`histogram`: a PNG, and its bins as
                JSON), or a `Path` (`file`).
            step: the step of a metric; for the others it is added to the file's name.
            kind: one of the words above; None: by the value (an array or tensor of one axis is a histogram, of two or
                three an image).

        Raises:
            ValueError: an unknown kind, or a value of none of the kinds.
        """
        from deeplightning.tracking import picture

        kind = kind or picture.kind_of(value)
        stem, dot, ending = (
            name.rpartition(".") if name.endswith((".png", ".yaml", ".yml", ".json")) else (name, "", "")
        )
        stem = stem if step is None else f"{stem}_{step}"
        if kind == "metric":
            self.log_metrics({name: value}, step)
        elif kind == "config":
            as_json = ending == "json"
            text = (
                json.dumps(value, indent=2) if as_json else yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
            )
            self._stored().save(f"{stem}{dot or '.'}{ending or 'yaml'}", text.encode())
        elif kind in ("image", "figure"):
            self.log_picture(stem, value)
        elif kind == "histogram":
            counts, edges = picture.histogram(value)
            self._stored().save(f"{stem}.json", json.dumps({"counts": counts, "edges": edges}).encode())
            self.log_picture(stem, picture.histogram_figure(stem, counts, edges))
        elif kind == "file":
            self.log_artifact(value)
        else:
            raise ValueError(
                f"{name}: a {type(value).__name__} of kind {kind!r} cannot be tracked. "
                "Kinds: metric, config, image, figure, histogram, file."
            )

    @rank_zero_only
    def finalize(self, status: str, reason: str | None = None) -> None:
        """Write everything that waits and set the run's status; Lightning calls it at the end of every stage.

        What is tracked afterwards sets the run to RUNNING again, until the next call.

        Args:
            status: `success`, `failed` or `killed`.
            reason: why it failed or was killed; kept as the tag `failure`, its first 1,000 characters.
        """
        word = _STATUS[status]
        if self._status is None or (self._status == "KILLED" and word == "FAILED"):  # Lightning says `failed` of both
            return
        writer = self._writing()
        if reason:
            writer.say(("tags", {"failure": reason[:MAX_REASON]}))
        writer.say(("status", word, time.time_ns() // 1_000_000))
        self._status = word
        if writer.stop() and self._tracker is not None:
            self._tracker.close()

    # Opening and ending

    def _locate(self) -> tuple[Store, str | None]:
        """The store and the run to join: under `mlflow run` MLflow's, else ours."""
        if self._run_id is None and (run_id := os.environ.get("MLFLOW_RUN_ID")):
            return locate(os.environ.get("MLFLOW_TRACKING_URI") or self._tracking_uri), run_id
        return locate(self._tracking_uri), self._run_id

    @rank_zero_only
    def _open(self) -> None:
        """Open or join the run, once.

        Raises:
            SetupError: the store cannot be used, or the run to join is not there.
        """
        if self._status is not None:
            return
        store, run_id = self._locate()
        journal = None
        try:
            tracker = open_tracker(store, run_id, self._experiment_name)
            tracker.make_ready()
            self._replay(store, tracker, run_id)
            # Before the store has it as RUNNING: a process that is killed here leaves a sign of its end.
            if (planned := run_id or tracker.new_id()) is not None:
                with contextlib.suppress(OSError, RuntimeError):  # the writer tries again, and tells why
                    journal = Journal(store, planned)
            run = self._old_run(tracker, store, run_id) if run_id else self._new_run(tracker, store, planned)
            try:
                folder = local_path(run.artifact_uri)
                if folder is not None:
                    root = store.artifact_root
                    make_private(folder, root if root is not None and root in folder.parents else folder.parent)
            except OSError:
                tracker.log_batch(run.id, Batch(status=("FAILED", time.time_ns() // 1_000_000)))
                raise
        except BaseException as error:
            if journal is not None and planned is not None:  # the sign by which the next command ends a run
                journal.end(keep=not _is_settled(tracker, planned))
            if isinstance(error, SetupError) or not isinstance(error, Exception):
                raise
            # MLflow, SQLite, requests and the file system each have their own.
            raise explain(error, store) from error
        self._store, self._tracker = store, tracker
        self._run_id, self._experiment_id = run.id, run.experiment_id
        self._name = self._run_name or run.tags.get(RUN_NAME)
        self._artifact_folder = folder
        self._started, self._params = run.started, dict(run.params)
        self._status = "RUNNING"
        self._opened_in = os.getpid()
        atexit.register(self._at_exit)
        writer = self._writing(journal)
        self._artifacts = RemoteArtifacts(writer, tracker, run.id) if folder is None else LocalArtifacts(folder)
        owed, self._owed = self._owed, []
        if self._early:
            self.log_hyperparams(self._early)
        for point in owed:
            self._add({point.name: point.value}, point.time, point.step)

    def _replay(self, store: Store, tracker: Tracker, run_id: str | None) -> None:
        """What ended processes could not write is written first: a continued run then has its points."""
        for found in replay(store, tracker, continuing=run_id if self._continues else None):
            if found.problem:
                log.warning(
                    "The journal of the run %s could not be written (%s); it stays in %s.",
                    *(found.run_id, found.problem, found.kept),
                )
                continue
            if found.damaged:
                log.warning("The run %s: %s.", found.run_id, found.losses)
            if found.points or found.others:
                log.info("The run %s had left %d points unwritten; they are there now.", found.run_id, found.points)

    def _new_run(self, tracker: Tracker, store: Store, run_id: str | None) -> Run:
        experiment = tracker.experiment(self._experiment_name)
        if not experiment.is_active:
            raise SetupError(
                f"The experiment {self._experiment_name!r} in {store.shown} was deleted. Restore it (mlflow "
                f"experiments restore --experiment-id {experiment.id}) or set another "
                "logger.params.experiment_name."
            )
        # MLflow describes the repository of the started file, which is ours, and its address, perhaps with a password.
        git = git_state() or {}
        tags = run_tags() | {f"mlflow.source.git.{name}": git[name] for name in ("commit", "branch") if git.get(name)}
        tags = {name: str(value)[:MAX_TAG] for name, value in (tags | self._tags).items()}
        return tracker.create_run(experiment, self._run_name, tags, self._stem, run_id)

    def _old_run(self, tracker: Tracker, store: Store, run_id: str) -> Run:
        run = tracker.run(run_id)
        if run is None or not run.is_active:
            state = "is not" if run is None else "was deleted"
            raise SetupError(
                f"The run {run_id!r} {state} in the tracking store {store.shown}. Give the id of a run there, or leave "
                "it out (logger.params.run_id, the variable MLFLOW_RUN_ID) to start a new one."
            )
        self._there = {}
        for point in sorted(tracker.history(run_id), key=lambda point: point.time):
            if self._continues:
                self._there.setdefault(point.name, set()).add(point.step)
            if is_of_test(point.name):
                self._latest[point.name] = (0, point.value)
        if self._continues and "failure" in run.tags:
            tracker.drop_tag(run_id, "failure")
        if (note := run.tags.get(NOTE)) is not None:
            self._is_described = self._is_described or run.tags.get(NOTE_DIGEST) != _digest(note)
        if self._run_name:
            tracker.rename(run_id, self._run_name)
        tags = {name: str(value)[:MAX_TAG] for name, value in self._tags.items()}
        tracker.log_batch(run_id, Batch(tags=tags, status=("RUNNING", None)))
        return run

    def _writing(self, journal: Journal | None = None) -> Writer:
        """The writer, made at the first need, with a journal that is there already."""
        self._open()
        if self._writer is None:
            from deeplightning.tracking.system_metrics import sampler

            sample = sampler(self._started) if self._system_metrics else None
            pause = float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or SAMPLE_SECONDS)
            assert self._tracker is not None
            assert self._store is not None
            assert self._run_id is not None
            self._writer = Writer(self._tracker, self._store, self._run_id, sample, pause, journal)
        return self._writer

    def _stored(self) -> Artifacts:
        """The run's artifacts; opens the run."""
        self._open()
        assert self._artifacts is not None
        return self._artifacts

    def _running(self) -> Writer:
        """The writer, with the run's status RUNNING."""
        if self._status == "RUNNING" and self._writer is not None:
            return self._writer
        writer = self._writing()
        if self._status != "RUNNING":
            self._ended_as, self._status = self._status, "RUNNING"
            writer.say(("status", "RUNNING", None))
        return writer

    def _at_exit(self) -> None:
        """A process that ends without `finalize` leaves no run RUNNING, and no point unwritten."""
        if self._status is None or self._opened_in != os.getpid():  # a forked child is not the owner
            return
        error = getattr(sys, "last_value", None)  # set by the interpreter for an exception that nobody caught
        if self._status == "RUNNING":
            if error is not None or self._ended_as is None:
                reason = f"{type(error).__name__}: {error}" if error else "the process ended without finishing the run"
                self.finalize("failed", reason)
            else:
                self.finalize({word: key for key, word in _STATUS.items()}[self._ended_as])
        elif self._writer is not None:
            self._writer.stop()


def _is_settled(tracker: Tracker, run_id: str) -> bool:
    """Whether a run that could not be opened is known not to be RUNNING: a store may have taken that and still have
    reported a fault. It is FAILED then."""
    try:
        run = tracker.run(run_id)
        if run is not None and run.status == "RUNNING":
            tracker.log_batch(run_id, Batch(status=("FAILED", time.time_ns() // 1_000_000)))
    except Exception:
        return False
    return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _same(point: tuple[int, float], other: tuple[int, float] | None) -> bool:
    """Whether two points, step and value, are one; NaN equals NaN."""
    return other is not None and (
        point == other or (point[0] == other[0] and point[1] != point[1] and other[1] != other[1])
    )
