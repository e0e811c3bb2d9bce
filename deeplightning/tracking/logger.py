"""`deeplightning.tracking.MLflowLogger` tracks what Lightning, callbacks and user code log, in one MLflow run.

Creating the logger does nothing. Its first use in a hook opens or joins a run on rank 0, and does nothing on others.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from deeplightning.faults import SetupError, count, seconds_of
from deeplightning.runfolder import RunFolder, make_private
from deeplightning.tracking import entities
from deeplightning.tracking.claims import artifacts_of, find_run, folder_of
from deeplightning.tracking.entities import EPOCH, MAX_TAG, NOTE, RUN_NAME, Dataset, Run, clean, is_test_metric, subpath
from deeplightning.tracking.environment import run_tags
from deeplightning.tracking.metrics_file import Line, points_line, points_of, read_lines, sync
from deeplightning.tracking.mlflow_store import NO_FORK, Lazy, open_client, uri_of
from deeplightning.tracking.reader import client_of, find_experiment, raise_if_newer
from deeplightning.tracking.sender import Sender, sampler
from deeplightning.tracking.store import Store, check_writable, explained, is_former, local_path, locate
from deeplightning.words import printable

if TYPE_CHECKING:
    from deeplightning.tracking.client import Client

log = logging.getLogger("deeplightning.tracking")

SAMPLE_SECONDS = 10.0
"""Interval of system metrics; MLflow's variable MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL overrides it."""

_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MLflowLogger(Logger):
    """Tracks one run in MLflow.

    Under `mlflow run` (the variable MLFLOW_RUN_ID is set) it joins the run that MLflow opened, in MLflow's store.

    Args:
        experiment_name: the experiment; it is created if it does not exist.
        tracking_uri: a directory (with an SQLite database and artifacts), `sqlite:///FILE`, or the address of a
            server. None: the variable MLFLOW_TRACKING_URI, else `mlruns`.
        run_name: the run's name; None: the name given to `suggest_name`, else `run`, and the first digits of the id.
        tags: tags of the run.
        run_id: an existing run to continue; None: a new one.
        system_metrics: track system load (CPU, memory; GPUs with nvidia-ml-py) every ten seconds.
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
        self._experiment_name, self._tracking_uri = experiment_name, tracking_uri
        self._run_name, self._name_prefix = run_name, ""
        self._tags = dict(tags or {})
        self._run_id, self._system_metrics = run_id, system_metrics
        self._experiment_id: str | None = None
        self._name: str | None = None  # the name in the store
        self._artifact_folder: Path | None = None
        self._last_step = 0
        self._names: dict[str, str] = {}  # of metrics: logged name to tracked name
        self._latest: dict[str, tuple[int, float]] = {}  # the last point of each metric
        self._logged_steps: dict[str, set[int]] = {}  # steps of each metric that a continued run logged before
        self._continues = False
        self._pending_points: list[tuple[str, float, int, int]] = []
        self._is_described = NOTE in self._tags  # by the user
        self._status: str | None = None  # None: no run is open in this process
        self._store: Store | None = None
        self._sender: Sender | None = None
        self._early_params: dict[str, object] = {}  # parameters logged before a continued run is open
        self._params: dict[str, str] = {}  # parameters of the run, including unsent ones
        self._run_folder: Path | None = None  # folder of a run with remote artifacts
        self._opener_pid = 0  # id of the process that opened the run
        self._previous_status: str | None = None  # the status before the run was reopened

    def __getstate__(self) -> dict[str, object]:
        """Leave the open run out of a copy for another process, which would continue it."""
        return self.__dict__ | {"_sender": None, "_status": None, "_opener_pid": 0}

    # The identity of the run

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's `MlflowClient` on the run's store; opens the run. MLflow is imported when the client is used."""
        self._open()
        return Lazy(self._client)

    def _client(self) -> Any:
        self.make_run()
        assert self._store is not None
        return open_client(self._store)

    @property
    def run_id(self) -> str | None:
        """The run's id; opens the run. None on other ranks than 0, unless it was given."""
        self._open()
        return self._run_id

    @property
    def run_name(self) -> str | None:
        """The run's name in the store; opens the run. None on other ranks than 0."""
        self._open()
        return self._name

    version = run_id  # Lightning's name for it

    @property
    def name(self) -> str | None:
        """The experiment's id, since Lightning builds paths with it: `save_dir/name/version` is the run's folder."""
        self._open()
        return self._experiment_id

    experiment_id = name  # in Lightning's MLFlowLogger

    @property
    def save_dir(self) -> str | None:
        """The store's folder, absolute; None if the store is not on this machine. Opens nothing."""
        folder = (self._store or self._locate()[0]).folder
        return None if folder is None else str(folder)

    @property
    def tracking_uri(self) -> str:
        """The URI with which MLflow opens the store; opens nothing."""
        return uri_of(self._store or self._locate()[0])

    @property
    def artifact_folder(self) -> Path | None:
        """Existing absolute folder of the run's artifacts; opens the run. None if they are remote, or not on rank 0."""
        self._open()
        return self._artifact_folder

    # Continuing a run

    def resume_run(self, run_id: str, pending: Iterable[Sequence[Any]], folder: Path | None = None) -> None:
        """Continue a run from an earlier point. Call it before the first use.

        Steps of a metric that are already in `metrics.jsonl` are not logged again.

        Args:
            run_id: the run.
            pending: points (name, value, milliseconds since 1970, step) that the run was about to log.
            folder: the run's folder.
        """
        self._run_id, self._continues = run_id, True
        self._pending_points = [(str(name), float(value), int(time), int(step)) for name, value, time, step in pending]
        self._run_folder = folder

    def set_run_folder(self, folder: Path) -> None:
        """Set the folder for the files of a run with remote artifacts. Call it before the first use."""
        self._run_folder = folder

    @rank_zero_only
    def sync(self) -> None:
        """Wait until all logged points would survive a power failure; opens nothing."""
        if self._sender is not None:
            sync(RunFolder(self._files_folder()).metrics)

    def make_run(self) -> None:
        """Ensure that the store has the run now, for code that uses MLflow itself. Otherwise, it has the run after the
        first training step."""
        self._open()
        if self._sender is not None and self._opener_pid == os.getpid():  # a forked process lacks the thread
            self._sender.make_run()

    def suggest_name(self, prefix: str) -> None:
        """Set the start of a new run's name. Call it before the first use. `run_name` takes precedence."""
        self._name_prefix = prefix

    # What is tracked

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, object] | Namespace | None, *args: object, **kwargs: object) -> None:
        """Track parameters under their path (`model/optimizer/params/lr`).

        In a continued run a parameter keeps its first value, as MLflow requires; a warning lists changed ones.
        """
        values = entities.flatten(vars(params) if isinstance(params, Namespace) else dict(params or {}))
        values |= {str(key): str(value) for key, value in kwargs.items()}
        if not values:
            return
        if self._continues and self._status is None:  # Lightning logs them before a checkpoint is restored
            self._early_params |= values
            return
        sender = self._running_sender()
        if changed := [key for key, value in values.items() if self._params.get(key, value) != value]:
            log.warning(
                "MLflow keeps the first values of %s of the continued run: %s. The new ones are in its config file.",
                *(count(len(changed), "parameter"), ", ".join(changed[:5]) + (", …" if len(changed) > 5 else "")),
            )
        if new := {key: value for key, value in values.items() if key not in self._params}:
            self._params |= new
            sender.log({"params": new})

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Track points within about a second. A point that repeats the last point of its metric is left out.

        `epoch`, which Lightning adds, is not a metric. Test metrics are tracked at step 0.

        Args:
            metrics: numbers, or tensors and arrays of one element. NaN and infinities are tracked too (MLflow stores an
                infinity as the largest float).
            step: the step of the points; None: the last one given.
        """
        self._last_step = step = self._last_step if step is None else int(step)
        values: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                values[self._tracked_as(name)] = float(value.item() if type(value).__module__ == "numpy" else value)
            except (TypeError, ValueError):
                log.warning("%s is not tracked: %r is not a number.", name, value)
        if values:
            self._log_points(values, time.time_ns() // 1_000_000, step)

    def _tracked_as(self, name: str) -> str:
        """Return a unique name for a metric in a form that MLflow accepts."""
        if name not in self._names:
            tracked = clean(name)
            if tracked in self._names.values():
                tracked = f"{tracked[: entities.MAX_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
            if tracked != name:
                log.info("metric     %s is tracked as %s", name, tracked)
            self._names[name] = tracked
        return self._names[name]

    def _log_points(self, values: Mapping[str, float], moment: int, step: int) -> None:
        sender, new, tested = self._running_sender(), {}, {}
        for name, value in values.items():
            if name == EPOCH:
                continue
            latest, is_test = self._latest.get(name), is_test_metric(name)
            self._latest[name] = point = (0 if is_test else step, value)
            if repr(point) == repr(latest):  # as text, NaN equals NaN
                continue
            if is_test:  # a run may be tested again
                tested[name] = value
            elif step not in self._logged_steps.get(name, ()):
                new[name] = value
        if new:
            sender.log(points_line(moment, step, new))
        if tested:
            sender.log(points_line(moment, 0, tested))

    @rank_zero_only
    def log_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags of the run; a value is cut at 5,000 characters."""
        self._running_sender().log({"tags": {clean(name): str(value)[:MAX_TAG] for name, value in tags.items()}})

    @rank_zero_only
    def describe(self, text: str) -> None:
        """Set the description of the run in MLflow, in Markdown, unless the user has written one."""
        self._open()  # sets `_is_described`
        if not self._is_described:
            self.log_tags({NOTE: printable(text, "\n")})

    @rank_zero_only
    def log_dataset(self, dataset: Dataset) -> None:
        """Log the data that the run uses; MLflow shows their digest. Any thread may call it: it changes no status."""
        self._open_sender().log({"dataset": list(dataset)})

    @rank_zero_only
    def log_model(self, path: str | Path, name: str, kind: str) -> None:
        """Log an MLflow model of the run to its experiment, with its test metrics.

        Args:
            path: the model's folder, in the run's folder. It is uploaded to a server in the background.
            name: the model's name in MLflow.
            kind: kind of the task, such as `image_classification`.
        """
        if self._sender is not None:
            self._sender.log({"model": [str(Path(path).absolute()), re.sub("[/:.]", "_", clean(name)), kind]})

    @rank_zero_only
    def flush_ended(self) -> None:
        """Send data that was logged after the end of the run, without reopening the run."""
        if self._sender is not None and self._status not in (None, "RUNNING"):  # None: the run is abandoned
            self._sender.stop()

    @rank_zero_only
    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Put a file or a folder into the run's artifacts, under `folder`.

        A file that is already there is not copied. Uploads to a server run in the background: keep it until `finalize`.

        Raises:
            FileNotFoundError: `path` does not exist.
        """
        source = Path(path).expanduser().absolute()
        if not source.exists():
            raise FileNotFoundError(f"There is no file {source} to put into the run's artifacts.")
        sender, place = self._open_sender(), subpath(folder or ".")
        if self._artifact_folder is None:
            into = place / source.name if source.is_dir() else place
            sender.log({"artifact": [str(source), None if into == Path() else into.as_posix()]})
            return
        target = self._artifact_folder / place / source.name
        if target.exists() and target.samefile(source):
            return
        with self._writing(target) as partial:
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, partial)  # with the run's permissions, not those of the source
                partial.replace(target)

    def _write_artifact(self, name: str, content: bytes) -> None:
        """Replace an artifact file atomically."""
        self._open()
        target = self._files_folder() / subpath(name)
        with self._writing(target) as partial:
            partial.write_bytes(content)
            partial.replace(target)
            if self._artifact_folder is None:
                self.log_artifact(target, Path(name).parent.as_posix())

    @contextlib.contextmanager
    def _writing(self, target: Path) -> Iterator[Path]:
        """Yield a temporary path to write a file to. If the disk is full, warn and leave the file out."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield target.with_name(f".{target.name}.partial")
        except OSError as error:
            log.warning("Not tracked in %s: %s (%s)", self._files_folder(), target.name, error)

    @rank_zero_only
    def log_picture(self, name: str, image: object) -> None:
        """Put a picture into the run's artifacts as a PNG.

        Args:
            name: the file's name, with or without folders and `.png`.
            image: a matplotlib figure, a Pillow image, or an array or tensor: uint8, or floats from 0 to 1, of shape
                (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels.

        Raises:
            ValueError: `image` is none of these.
        """
        from deeplightning.tracking import picture

        self._write_artifact(name if name.endswith(".png") else f"{name}.png", picture.to_png(image))

    @rank_zero_only
    def log(self, name: str, value: Any, step: int | None = None, kind: str | None = None) -> None:
        """Track a value by its kind.

        Args:
            name: its name; a suffix is added to the name of a file.
            value: a number (`metric`), a mapping or list (`config`: YAML, or JSON if `name` ends so), a picture
                (`image`), a matplotlib figure (`figure`), numbers of any shape (`histogram`: a PNG, and its bins as
                JSON), or a `Path` (`file`).
            step: the step of a metric; for other kinds it is added to the file's name.
            kind: one of the kinds above; None: depends on the value (an array or tensor with one axis is a histogram,
                with two or three an image).

        Raises:
            ValueError: the kind is unknown, or the value has none of the kinds.
        """
        from deeplightning.tracking import picture

        kind = kind or picture.kind_of(value)
        ending = next((ending for ending in (".png", ".yaml", ".yml", ".json") if name.endswith(ending)), "")
        stem = name.removesuffix(ending) + ("" if step is None else f"_{step}")
        if kind == "metric":
            self.log_metrics({name: value}, step)
        elif kind == "config":
            as_yaml = None if ending == ".json" else yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
            text: str = json.dumps(value, indent=2) if as_yaml is None else as_yaml
            self._write_artifact(stem + (ending or ".yaml"), text.encode())
        elif kind in ("image", "figure"):
            self.log_picture(stem, value)
        elif kind == "histogram":
            counts, edges = picture.histogram(value)
            self._write_artifact(f"{stem}.json", json.dumps({"counts": counts, "edges": edges}).encode())
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
        """Write all pending data and set the run's status. Lightning calls it at the end of every stage.

        Data that is tracked afterwards sets the run to RUNNING again, until the next call.

        Args:
            status: `success`, `failed` or `killed`.
            reason: why it failed or was killed; its first 1,000 characters become the tag `failure`.
        """
        final = _STATUS[status]
        if self._status is None or (self._status == "KILLED" and final == "FAILED"):  # Lightning passes `failed`
            return
        if final == "KILLED" and not (self._params or self._latest or self._continues):
            self._status = None  # nothing is recorded: the next command on the store deletes the run
            return
        sender = self._open_sender()
        if reason:
            sender.log({"tags": {"failure": reason[: entities.MAX_REASON]}})
        sender.log({"status": final, "time": time.time_ns() // 1_000_000})
        self._status = final
        sender.stop()

    # Opening and ending

    def _locate(self) -> tuple[Store, str | None]:
        """Return the store and the run to join, under `mlflow run` those of MLflow."""
        if self._run_id is None and (run_id := os.environ.get("MLFLOW_RUN_ID")):
            return locate(os.environ.get("MLFLOW_TRACKING_URI") or self._tracking_uri), run_id
        return locate(self._tracking_uri), self._run_id

    @rank_zero_only
    def _open(self) -> None:
        """Open or join the run, once; raise SetupError if the store cannot be used, or lacks the run to join."""
        if self._status is not None:
            return
        store, run_id = self._locate()
        with explained(store):
            client = client_of(store) if store.database is None else None
            if store.database is not None and store.database.exists():
                check_writable(store)
                raise_if_newer(store)
            run, lines = self._old_run(store, run_id) if run_id else self._new_run(store, client)
            if (folder := artifacts_of(store, run)) is not None:
                root = store.artifact_root
                make_private(folder, root if root is not None and root in folder.parents else folder.parent)
        self._store = store
        self._run_id, self._experiment_id = run.id, run.experiment_id
        self._name = self._run_name or run.tags.get(RUN_NAME)
        self._artifact_folder = folder
        self._params = dict(run.params)
        metrics = RunFolder(self._files_folder()).metrics
        if run_id:
            self._read_history(metrics, run.tags.get(NOTE))
        sample = sampler(run.started) if self._system_metrics else None
        pause = seconds_of("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", SAMPLE_SECONDS)
        self._sender = Sender(store, run.id, metrics, client, self._send_leftovers, sample, pause)
        self._status, self._opener_pid = "RUNNING", os.getpid()  # not earlier: a signal may arrive at any line
        atexit.register(self._at_exit)
        for line in lines:
            self._sender.log(line)
        pending, self._pending_points = self._pending_points, []
        if self._early_params:
            self.log_hyperparams(self._early_params)
        for name, value, moment, step in pending:
            self._log_points({name: value}, moment, step)

    def _files_folder(self) -> Path:
        """Return the folder of the run's files; with remote artifacts, the one given to `set_run_folder`."""
        if self._artifact_folder is not None:
            return self._artifact_folder
        if self._run_folder is not None:
            return self._run_folder
        assert self._store is not None
        folder = folder_of(self._store) / f"{self._run_id}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _new_run(self, store: Store, client: "Client | None") -> tuple[Run, list[Line]]:
        """Return a new run, and the first lines to log."""
        tags = {name: entities.storable(str(value))[:MAX_TAG] for name, value in (run_tags() | self._tags).items()}
        experiment = find_experiment(store, self._experiment_name) if client is None else None
        if experiment is None:
            experiment = (client or client_of(store)).experiment(self._experiment_name)
        if not experiment.is_active:
            where = f"MLFLOW_TRACKING_URI={shlex.quote(f'sqlite:///{store.database}')} " if store.database else ""
            raise SetupError(
                f"The experiment {self._experiment_name!r} in {store.shown} was deleted. Restore it "
                f"({where}mlflow experiments restore --experiment-id {experiment.id}) "
                "or set another logger.params.experiment_name."
            )
        if client is not None:
            return client.create_run(experiment, self._run_name, tags, self._name_prefix), []
        run_id, started = uuid.uuid4().hex, time.time_ns() // 1_000_000
        tags |= {
            RUN_NAME: entities.storable(self._run_name or "")
            or tags.get(RUN_NAME)
            or entities.name_of(self._name_prefix, run_id)
        }
        place, root = experiment.artifact_location.rstrip("/"), store.artifact_root
        if root and (former := local_path(place)) and is_former(former.parent, store):
            place = (root / experiment.id).as_uri()
        location = f"{place}/{run_id}/artifacts"
        run = Run(run_id, experiment.id, "RUNNING", started, location, True, {}, tags, self._experiment_name)
        return run, [{"run": entities.header_of(run)}]

    def _old_run(self, store: Store, run_id: str) -> tuple[Run, list[Line]]:
        """Return the run to join, and the first lines to log."""
        run = find_run(store, run_id)
        if run is None or not run.is_active:
            state = "is not" if run is None else "was deleted"
            raise SetupError(
                f"The run {run_id!r} {state} in the tracking store {store.shown}. Give the id of a run there, or omit "
                "it (logger.params.run_id, the variable MLFLOW_RUN_ID) to start a new one."
            )
        tags = {name: str(value)[:MAX_TAG] for name, value in self._tags.items()}
        tags |= {RUN_NAME: self._run_name} if self._run_name else {}
        lines: list[Line] = [{"untag": "failure"}] if self._continues else []
        return run, [*lines, *([{"tags": tags}] if tags else []), {"status": "RUNNING", "time": None}]

    def _read_history(self, metrics: Path, note: str | None) -> None:
        """Read what the run has logged, and whether its description in the store is one of ours."""
        self._logged_steps = {}
        own_notes: set[str | None] = {None}
        for _, line in read_lines(metrics):
            own_notes.add(line.get("tags", {}).get(NOTE))
            self._params |= line.get("params", {})
            for point in points_of(line):
                if self._continues:
                    self._logged_steps.setdefault(point.name, set()).add(point.step)
                if is_test_metric(point.name):
                    self._latest[point.name] = (0, point.value)
        self._is_described = self._is_described or note not in own_notes

    def _send_leftovers(self) -> None:
        """Send unsent data of ended processes, in the run's thread."""
        with NO_FORK:  # this imports modules
            from deeplightning.tracking.unsent import send_leftovers_quietly

        assert self._store is not None
        for line in send_leftovers_quietly(self._store):
            log.info("unsent     %s", line)

    def _open_sender(self) -> Sender:
        self._open()
        assert self._sender is not None
        return self._sender

    def _running_sender(self) -> Sender:
        """Return the sender, with the run's status RUNNING."""
        sender = self._open_sender()
        if self._status != "RUNNING":
            self._previous_status, self._status = self._status, "RUNNING"
            sender.log({"status": "RUNNING", "time": None})
        return sender

    def _at_exit(self) -> None:
        """End the run and write all points when the process ends without `finalize`."""
        if self._status is None or self._opener_pid != os.getpid():  # a forked child does not own the run
            return
        # An uncaught exception, which at the prompt of an interpreter or notebook ends nothing.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if self._status != "RUNNING":
            self._open_sender().stop()
        elif error is None and self._previous_status is not None:
            self.finalize(self._previous_status.lower())
        else:
            reason = f"{type(error).__name__}: {error}" if error else "the process ended without finishing the run"
            self.finalize("failed", reason)
