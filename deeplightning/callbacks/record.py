"""The record of a run: its folder, the config as it ran, the machine, the parameters, and how it ended; whether it goes
on with a run that was there, and what a checkpoint says of all that."""

import contextlib
import json
import logging
import os
import platform
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn
from torchmetrics import Metric

from deeplightning.callbacks.describe import data_name, engine_in_words, network_name, note
from deeplightning.callbacks.hyperparameters import log_plain_values, save_plain_values
from deeplightning.callbacks.log_lines import log_to_file, print_once
from deeplightning.callbacks.provenance import Origin, keep_out
from deeplightning.callbacks.resumption import Resumption, check_schedules
from deeplightning.config.machine import world_size
from deeplightning.config.own_runs import note_own
from deeplightning.config.schema import Config
from deeplightning.config.source import values_of
from deeplightning.config.tree import dump
from deeplightning.faults import CheckpointError, SetupError
from deeplightning.launch import hooks_here
from deeplightning.private.lightning import add_logged_steps, logged_steps, values_to_log
from deeplightning.private.mlflow import autologs
from deeplightning.private.torch import changes_in_place, non_persistent_buffers
from deeplightning.process import member
from deeplightning.process.identity import restarts
from deeplightning.process.streams import Interrupted
from deeplightning.process.terminal import say
from deeplightning.runfolder import FolderLock, RunFolder, make_private, read_object, write_whole
from deeplightning.tracking.build import end, open_runs, publish, run_folder
from deeplightning.tracking.entities import DATA, ENGINE, NETWORK, Dataset
from deeplightning.tracking.environment import REPRODUCES, describe
from deeplightning.tracking.user_calls import TrackedRun, UserCalls, maker_of, run_of
from deeplightning.version import __version__

log = logging.getLogger("deeplightning")


class Record(Callback):
    """Open the run when everything is built and data and network are known to fit, on rank 0; other callbacks ask it
    for the run's folder. Where training resumes, the run opens after all of the checkpoint is restored.

    Args:
        cfg: the settled config.
        loggers: handed to the trainer when the run opens, not before: Lightning opens the runs of loggers that it
            knows before data are read, and a fault in the data would leave an empty run.
        user_calls: directs MLflow's own functions to the run.
        fallback: the folder for runs whose loggers keep none.

    Attributes:
        resumption: what the launch resumes from; to be set before the run opens. None: nobody asked.
        has_learned: whether training has begun; it does not where a finished run is resumed.
    """

    def __init__(self, cfg: Config, loggers: list[Logger], user_calls: UserCalls, fallback: Path):
        self.cfg, self.loggers, self._user_calls, self.fallback = cfg, loggers, user_calls, fallback
        self.resumption: Resumption | None = None
        self.has_learned = False
        self._folder: RunFolder | None = None
        self._hold: FolderLock | None = None
        self._failed = self._stopped = self._has_arrived = False
        self._origin: Origin | None = None  # on rank 0
        self._frozen: list[str] | None = None  # of the checkpoint
        self._outside: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}  # at the start, or the save before
        self._lost: set[str] = set()

    @property
    def folder(self) -> RunFolder:
        """Return the run's folder, on every rank; there once a stage has started."""
        assert self._folder is not None, "asked for the run folder before a stage has started"
        return self._folder

    @property
    def opened(self) -> bool:
        return self._folder is not None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the trainer's loggers before other callbacks and the task are set up; they open their runs at the first
        use."""
        if not trainer.loggers:
            trainer.loggers = self.loggers
            self._prepare_loggers(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_plain_values(trainer, self.cfg.redact)
        data: object = getattr(trainer, "datamodule", None)
        if hasattr(data, "check_stages"):  # a stage that cannot run must not fail after hours of training
            data.check_stages(self.cfg.stages)
        if self.resumption is None or self.resumption.checkpoint is None:
            self.open(trainer)
            return
        # The run opens when its checkpoint is restored: a refusal changes no run.
        self._expect_user_calls(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._has_arrived, self._frozen = True, checkpoint.get("frozen")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None and not self._has_arrived:  # Lightning 2.6 asks no callback then
            message = f"{trainer.ckpt_path}: damaged: `callbacks` is missing; resume from another checkpoint"
            raise CheckpointError(message)
        check_schedules(trainer)
        if self._frozen is not None:
            _freeze_again(pl_module, self._frozen)
            self._frozen = None
        self._outside = {name: seen for name, seen, _ in _outside(pl_module)}
        self.open(trainer)
        self.has_learned = True
        is_first = trainer.num_nodes > 1 and trainer.local_rank == 0  # of its machine
        if is_first and not self.folder.config.exists() and not hooks_here().copies_files:
            say(
                f"warning [rank {trainer.global_rank}]: the run's folder of rank 0, {self.folder.path}, is not on this "
                "machine: logs of its processes stay here, and fsdp and DeepSpeed cannot put the parts of a checkpoint "
                "together; several machines need one file system",
                err=True,
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct Lightning 2.6's counters where nothing was left to learn: they are those of the hook that saved them,
        and later stages would count their points from there."""
        self.open(trainer)
        if self.has_learned:
            return
        loop: Any = trainer.fit_loop
        loop.epoch_progress.current.completed = loop.epoch_progress.current.processed
        batches = loop.epoch_loop.batch_progress.total
        add_logged_steps(trainer, batches.processed - batches.completed)

    def open(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Start the run, unless it is open, and write what is known at its start."""
        if self._folder is not None:
            return
        # Before the run opens: a process that is killed while it asks git must not leave an empty run.
        environment = describe(self.cfg.redact) if trainer.is_global_zero else None
        resumption = self.resumption or Resumption()
        folder, tracked = "", None
        if trainer.is_global_zero:
            path = run_folder(self.loggers, resumption.folder or self.fallback)
            with contextlib.suppress(OSError):  # reported below
                make_private(path, path.parents[2 if path.name == "artifacts" else 0])  # STORE/EXPERIMENT/RUN/artifacts
                # Before our files are there: CSVLogger warns of a folder that has files.
                open_runs(self.loggers, (self.cfg.logger, *self.cfg.logger.extra))
            folder, tracked = str(path), run_of(self.loggers)
        folder, tracked = self._agreed(trainer, folder, tracked)
        self._folder = RunFolder(folder)
        if tracked is not None:
            self._user_calls.begin(tracked, maker_of(self.loggers) if trainer.is_global_zero else None)
        if (group := member.here()) is not None and trainer.is_global_zero:
            group.note_run(self._folder.path)
        print_once()
        if self.cfg.logger.per_rank_files:
            log_to_file(self._folder.log(trainer.global_rank), self.cfg)
        if environment is None:
            return
        self._origin = Origin(self.cfg, self._folder, self._tell_data)
        if self._folder.config.exists() and resumption.run_id is None:
            return  # a later stage of a run that has recorded all this
        try:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            if "train" in self.cfg.stages:
                self._hold = resumption.hold or self._folder.lock()
            if resumption.run_id is not None:
                for left in self._folder.unfinished():
                    left.unlink()
            self._describe(environment)
        except OSError as error:
            raise SetupError(f"{self._folder.path}: the run's folder cannot be written: {error.strerror}") from error
        began_from = resumption.checkpoint if resumption.run_id is None else None
        self._origin.begin(getattr(trainer, "datamodule", None), began_from)
        resumption.say(torch.get_num_threads())

    on_validation_start = on_test_start = on_predict_start = open

    def _prepare_loggers(self, trainer: Trainer) -> None:
        """Tell the loggers, before their first use, the run to continue and the name of a new one."""
        name = f"{network_name(self.cfg)}-{data_name(self.cfg)}"
        self._user_calls.take_over()
        for logger in self.loggers:
            if hasattr(logger, "suggest_name"):
                logger.suggest_name(name)
        if trainer.is_global_zero and self.resumption is not None and self.resumption.run_id is not None:
            first: Any = self.loggers[0]
            first.go_on(self.resumption.run_id, self.resumption.owed, self.resumption.folder)

    def prepare_autolog(self, trainer: Trainer) -> None:
        """Direct MLflow's autolog to this run: it asks for the active one before training starts."""
        if trainer.is_global_zero and autologs() and not self._expect_user_calls(trainer):
            self._prepare_loggers(trainer)
            if (tracked := run_of(self.loggers)) is not None:
                self._user_calls.begin(tracked, maker_of(self.loggers))

    def _expect_user_calls(self, trainer: Trainer) -> bool:
        """Direct calls of MLflow's functions to the run that training continues; return whether there is one."""
        run_id = self.resumption.run_id if self.resumption is not None else None
        if run_id is None or not hasattr(self.loggers[0], "tracking_uri"):
            return False
        self._user_calls.expect(TrackedRun(self.loggers[0].tracking_uri, run_id))
        return True

    def _agreed(self, trainer: Trainer, folder: str, tracked: TrackedRun | None) -> tuple[str, TrackedRun | None]:
        """Return the folder and the tracker's run that rank 0 has found, on every rank.

        Raises:
            SetupError: the ranks were started separately, and decided differently what only one may decide.
        """
        ours = {"seed": self.cfg.seed, "train.resume_ckpt": self.resumption.named if self.resumption else None}
        folder, run, theirs = trainer.strategy.broadcast((folder, tracked, ours))
        names = [name for name in ours if ours[name] != theirs[name]]
        if differ := [f"{name} is {theirs[name]} on rank 0 and {ours[name]} here" for name in names]:
            raise SetupError(
                f"rank {trainer.global_rank} decided differently from rank 0: {'; '.join(differ)}. Processes that are "
                "started one by one need a fixed `seed`, a checkpoint's path, and one file system"
            )
        return folder, run

    def _describe(self, environment: dict[str, object]) -> None:
        """Record what is known at the start of the run; a continued run keeps what was recorded before."""
        folder = self.folder
        settings = self._settings(folder)
        for logger in self.loggers:
            if not hasattr(logger, "go_on"):  # before the files: some loggers warn of a folder that is not empty
                self._tell(logger, settings, environment)
        any_stages = {"stages": None}  # they may differ from launch to launch
        is_other = dump(values_of(folder.config) | any_stages) != dump(settings | any_stages)
        if is_other:
            folder.replace(folder.config, dump(settings))
        note_own(folder.config)
        former = read_object(folder.environment)
        fleeting = {name: environment[name] for name in ("started", "command", "launch")}
        if former | fleeting != environment:
            folder.replace(folder.environment, json.dumps(environment, indent=1))
        if is_other or not folder.places.exists():  # a start before may have failed between the two
            # An override's place names its value, which may be anything.
            places = {k: "command line" if p.startswith("override ") else p for k, p in (self.cfg.places or {}).items()}
            write_whole(folder.places, self.cfg.redact_message(json.dumps(places, indent=1)))
        # From here on a restart knows the run by its config and environment. Ours minds changed settings itself.
        for logger in self.loggers:
            if hasattr(logger, "go_on"):
                self._tell(logger, settings, environment)

    def _tell(self, logger: Any, settings: dict[str, object], environment: dict[str, object]) -> None:
        """Log settings, tags and a description to a tracker."""
        tags, text = self._tags(environment), note(self.cfg, self.folder, getattr(logger, "run_id", None))
        logger.log_hyperparams(settings)
        if hasattr(logger, "log_tags"):
            logger.log_tags(tags)
        if hasattr(logger, "describe"):
            logger.describe(text)

    def _tags(self, environment: Mapping[str, Any]) -> dict[str, str]:
        """Return what one wants to search runs by, of the config and the environment."""
        cfg, git = self.cfg, environment.get("git") or {}
        over = self.resumption.over if self.resumption else ""
        found = {
            "git_commit": git.get("commit"),
            "command": environment.get("command"),
            "host": environment.get("host"),
            "reproduces": os.environ.get(REPRODUCES),
            "restarts": restarts() or None,
            "versions": ", ".join(f"{n} {v}" for n, v in (environment.get("packages") or {}).items()),
            "training": f"none: {over}" if over else None,
            "fast": "true" if cfg.train.fast else None,
        }
        about = {NETWORK: network_name(cfg), DATA: data_name(cfg), ENGINE: engine_in_words(cfg)}
        asked = {f"asked.{key}": str(value) for key, value in (cfg.asked or {}).items()}
        return {name: str(value) for name, value in found.items() if value not in (None, "")} | about | asked

    def _settings(self, folder: RunFolder) -> dict[str, object]:
        """Return the config as it may be run again: it names the checkpoint that the run began from, and no other."""
        settings = self.cfg.public()
        if self.resumption is not None:
            of = self.resumption.checkpoint
            if self.resumption.run_id is not None:
                of = values_of(folder.config).get("train", {}).get("resume_ckpt")
            settings["train"]["resume_ckpt"] = str(of) if of else None
        return settings

    def close(self) -> None:
        """Set the final run status and release the folder lock."""
        self._user_calls.end("FINISHED")
        if self._origin is not None:
            self._origin.end(self._stopped)
            for logger in self.loggers:
                if hasattr(logger, "rest"):
                    logger.rest()
        for hold in (self._hold, self.resumption.hold if self.resumption else None):
            if hold is not None:
                hold.release()

    def _tell_data(self, dataset: Dataset) -> None:
        for logger in self.loggers:
            if hasattr(logger, "log_dataset"):
                logger.log_dataset(dataset)

    def log_model(self, kind: str) -> None:
        """Let the trackers list the MLflow model of the run, if there is one; to be called on rank 0.

        Args:
            kind: of the task.
        """
        for logger in self.loggers if self.folder.model.is_dir() else ():
            if hasattr(logger, "log_model"):
                logger.log_model(self.folder.model, f"{network_name(self.cfg)}-{data_name(self.cfg)}", kind)

    def publish(self) -> None:
        """Keep what is known when all stages are done, and send the run's files to trackers on other machines; to be
        called on rank 0."""
        if self._origin is not None:
            self._origin.end(self._stopped)
        if self._folder is not None:
            publish(self.loggers, self._folder.path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # a GPU that has failed gives nothing back
            _log_pending(pl_module)
        self.fail(exception, in_stage=True)

    def fail(self, error: BaseException, in_stage: bool = False) -> None:
        """End the run as FAILED with the reason, or as KILLED where a signal was the reason."""
        tells = not (in_stage or self._failed)  # Lightning tells loggers of others itself, in a stage
        if isinstance(error, Exception) and not isinstance(error, Interrupted) and not self._failed:
            keep_out(self.cfg)
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        self._user_calls.end("KILLED" if stopped else "FAILED")
        if self._folder is None:
            return
        reason = self.cfg.redact_message(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        if not self._failed:
            log.info("the run ends: %s", reason)
        self._failed, self._stopped = True, stopped
        # Each time: Lightning says `failed` to its own loggers in between, of a killed run as well.
        end(self.loggers, "killed" if stopped else "failed", reason, tells)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        """Add what a checkpoint holds beside weights, states and counters, in plain types.

        Random numbers and the position in the data are functions of seed, epoch, batch and rank (see
        `deeplightning.callbacks.random_state` and `deeplightning.data.samplers`): the config's seed and Lightning's
        counters are their whole state, on every rank.
        """
        _log_pending(pl_module)
        checkpoint["config"] = self.cfg.public()
        save_plain_values(trainer, checkpoint, self.cfg.redact)
        run_id, name = (getattr(trainer.logger, key, None) for key in ("run_id", "run_name"))
        checkpoint["run"] = {"folder": str(self.folder.path), "id": run_id, "name": name}
        # A run that ends now logs these never again.
        checkpoint["points"] = _due(trainer)
        getattr(trainer.logger, "sync", lambda: None)()  # the points before must last as long as the checkpoint
        checkpoint["engine"] = engine_of(self.cfg)
        checkpoint["versions"] = versions()
        checkpoint["threads"] = torch.get_num_threads()
        checkpoint["accumulating"] = not between_steps(trainer)
        checkpoint["frozen"] = _frozen(pl_module)
        checkpoint["lost"] = self._find_lost(pl_module)

    def _find_lost(self, task: LightningModule) -> list[str]:
        """Return the tensors outside the task's `state_dict` that training has changed, which checkpoints do not hold;
        none of a task that saves something by itself."""
        before, self._outside = self._outside, {}
        for name, seen, is_buffer in _outside(task):
            tensor, version = before.get(name, (lambda: None, -1))
            is_same = tensor() is seen[0]()
            # A module that replaces the tensor of an attribute may only keep its last output there.
            if version != seen[1] if is_same else is_buffer:
                self._lost.add(name)
            self._outside[name] = seen
        return [] if is_overridden("on_save_checkpoint", task) else sorted(self._lost)


def _frozen(task: LightningModule) -> list[str]:
    """Return the parameters that do not learn, and the batch norms whose statistics a fine-tuning callback has
    stopped."""
    untracked = [n for n, m in task.named_modules() if getattr(m, "track_running_stats", None) is False]
    return [name for name, parameter in task.named_parameters() if not parameter.requires_grad] + untracked


def _outside(task: LightningModule) -> Iterator[tuple[str, tuple[weakref.ref[torch.Tensor], int], bool]]:
    """Yield the tensors of a task that its `state_dict` leaves out, with their versions, which rise by each change in
    place, and whether they are buffers; without metrics (see `deeplightning.callbacks.gathered`)."""
    for name, module in task.named_modules():
        if isinstance(module, Metric) or type(module).get_extra_state is not nn.Module.get_extra_state:
            continue
        buffers = non_persistent_buffers(module)
        for key, value in {**vars(module), **buffers}.items():
            if isinstance(value, torch.Tensor) and not (value.requires_grad or value.is_inference()):
                yield f"{name}.{key}".lstrip("."), (weakref.ref(value), changes_in_place(value)), key in buffers


def _freeze_again(task: LightningModule, frozen: Iterable[object]) -> None:
    """Restore what `_frozen` returned, since callbacks that freeze parameters have frozen them again in `setup`."""
    frozen = {name for name in frozen if isinstance(name, str)}
    for name, parameter in task.named_parameters():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, module in task.named_modules():
        if hasattr(module, "track_running_stats"):
            module.track_running_stats = name not in frozen


def _log_pending(task: LightningModule) -> None:
    """Let a task log the points that it has put off: on a GPU those of the last logged step."""
    if callable(log_pending := getattr(task, "log_pending", None)):
        log_pending()


def engine_of(cfg: Config) -> dict[str, object]:
    """Return what of the engine decides in which order numbers are added, and how they are rounded."""
    engine = cfg.engine
    return {
        "backend": engine.backend,
        "processes": world_size(engine),
        "precision": str(engine.precision),
        "device": "CPU" if engine.gpus is None else "GPU",
    }


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {
        "deeplightning": __version__,
        "torch": str(torch.__version__),  # its own kind of text otherwise
        "pytorch_lightning": pl.__version__,
        "python": platform.python_version(),
    }


def between_steps(trainer: Trainer) -> bool:
    """Return whether, at the end of a batch and behind it, no gradients wait for their optimizer step."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return epoch_is_over(trainer) or progress.current.ready % trainer.accumulate_grad_batches == 0


def epoch_is_over(trainer: Trainer) -> bool:
    """Return whether the batch that is under way, or was the last one, is the last of its epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch or progress.current.ready >= trainer.num_training_batches)


def _due(trainer: Any) -> list[tuple[str, float, int, int]]:
    """Return the points that Lightning 2.6 is about to log: it does so only behind the hooks that save checkpoints.

    To be called on every rank: means over an epoch are taken together.
    """
    if trainer.state.fn != "fit" or trainer.validating:
        return []
    loop, step = trainer.fit_loop, logged_steps(trainer)
    epoch, batch = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
    ends_epoch = epoch.processed > epoch.completed
    if not ends_epoch and (batch.processed == batch.completed or not between_steps(trainer)):
        return []
    if (values := values_to_log(trainer, now=ends_epoch)) is None:
        return []
    step -= ends_epoch
    metrics = {"epoch": float(trainer.current_epoch)} | {name: float(value) for name, value in values.items()}
    now, step = time.time_ns() // 1_000_000, int(metrics.pop("step", step))
    return [(name, value, now, step) for name, value in metrics.items()] if len(metrics) > 1 else []
