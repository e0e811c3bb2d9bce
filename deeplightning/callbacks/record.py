"""The record of a run: its folder, resolved config, machine, parameters and final status, and the metadata of its
checkpoints. A resumed run continues the record of the original one if possible."""

import contextlib
import json
import logging
import os
import shutil
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.model_helpers import is_overridden

from deeplightning.callbacks.describe import data_name, engine_summary, network_name, note
from deeplightning.callbacks.log_lines import log_to_file, print_once
from deeplightning.callbacks.loop_position import between_steps, pending_points
from deeplightning.callbacks.provenance import Provenance, engine_of, redact_code_secrets, versions
from deeplightning.callbacks.resumption import Resumption, check_schedules
from deeplightning.callbacks.task_state import (
    frozen_names,
    log_plain_values,
    restore_frozen,
    save_plain_values,
    unsaved_tensors,
)
from deeplightning.config.own_runs import note_own
from deeplightning.config.schema import Config
from deeplightning.config.section_kinds import misfit
from deeplightning.config.source import values_of
from deeplightning.config.tree import dump
from deeplightning.faults import CheckpointError, ConfigError, Fault, SetupError
from deeplightning.launch import hooks_here
from deeplightning.private.lightning import add_logged_steps
from deeplightning.private.mlflow import autologs
from deeplightning.process import member
from deeplightning.process.identity import restarts
from deeplightning.process.streams import Interrupted
from deeplightning.process.terminal import say
from deeplightning.runfolder import FolderLock, RunFolder, make_private, read_object, write_whole
from deeplightning.tracking.build import end, open_runs, publish, run_folder
from deeplightning.tracking.entities import DATA, ENGINE, NETWORK
from deeplightning.tracking.environment import REPRODUCES, describe
from deeplightning.tracking.user_calls import TrackedRun, UserCalls, run_maker, run_of

log = logging.getLogger("deeplightning")


class Record(Callback):
    """Open the run on rank 0 once everything is built and data and network are checked, and give other callbacks its
    folder. A resumed run opens after the checkpoint is completely restored.

    Args:
        cfg: the resolved config.
        loggers: set on the trainer only when the run opens: Lightning opens the runs of its loggers before data is
            read, and an error in the data would leave an empty run.
        user_calls: directs MLflow's own functions to the run.
        fallback: the run folder if no logger has one.

    Attributes:
        resumption: what the launch resumes from, set before the run opens; None if nothing was requested.
        has_learned: whether training has started; it does not if a finished run is resumed.
    """

    def __init__(self, cfg: Config, loggers: list[Logger], user_calls: UserCalls, fallback: Path):
        self.cfg, self.loggers, self._user_calls, self.fallback = cfg, loggers, user_calls, fallback
        self.resumption: Resumption | None = None
        self.has_learned = False
        self._folder: RunFolder | None = None
        self._lock: FolderLock | None = None
        self._failed = self._stopped = self._is_checkpoint_loaded = False
        self._provenance: Provenance | None = None  # on rank 0
        self._frozen: list[str] | None = None  # from the checkpoint
        self._unsaved_tensors: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}  # at the start or the last save
        self._lost: set[str] = set()

    @property
    def folder(self) -> RunFolder:
        """The run's folder, on every rank, available after a stage has started."""
        assert self._folder is not None, "the run folder is available only after a stage has started"
        return self._folder

    @property
    def opened(self) -> bool:
        return self._folder is not None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set the trainer's loggers before the setup of callbacks and the task; they open their runs at first use."""
        for each in trainer.callbacks:  # type: ignore[attr-defined]  # those of `configure_callbacks` too
            paths = [f"{base.__module__}.{base.__qualname__}" for base in type(each).__mro__]
            if why := misfit(paths, True, "train.callbacks"):
                raise ConfigError(Fault(f"{type(each).__name__} of `configure_callbacks` {why}", "model.module"))
        if not trainer.loggers:
            trainer.loggers = self.loggers
            self._prepare_loggers(trainer)
        log_plain_values(trainer, self.cfg.redact)  # Lightning logs them in every stage

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log_plain_values(trainer, self.cfg.redact)
        data: object = getattr(trainer, "datamodule", None)
        if hasattr(data, "check_stages"):  # a stage that cannot run must not fail after hours of training
            data.check_stages(self.cfg.stages)
        if self.resumption is None or self.resumption.checkpoint is None:
            self.open(trainer)
        else:  # the run opens after its checkpoint is restored, so that a rejected checkpoint changes no run
            self._expect_user_calls(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._is_checkpoint_loaded, self._frozen = True, checkpoint.get("frozen")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None and not self._is_checkpoint_loaded:  # Lightning 2.6 then calls no callback
            message = f"{trainer.ckpt_path}: damaged: `callbacks` is missing; resume from another checkpoint"
            raise CheckpointError(message)
        check_schedules(trainer)
        if self._frozen is not None:
            restore_frozen(pl_module, self._frozen)
            self._frozen = None
        self._unsaved_tensors = {name: seen for name, seen, _ in unsaved_tensors(pl_module)}
        self.open(trainer)
        self.has_learned = True
        if trainer.is_global_zero and not self.cfg.train.fast:  # the bundle has earlier weights
            for former in (self.folder.bundle, self.folder.model):
                shutil.rmtree(former, ignore_errors=True)
        is_first = trainer.num_nodes > 1 and trainer.local_rank == 0  # on its machine
        if is_first and not self.folder.config.exists() and not hooks_here().copies_files:
            say(
                f"warning [rank {trainer.global_rank}]: the run's folder of rank 0, {self.folder.path}, is not on this "
                "machine: logs of its processes stay here, and fsdp and DeepSpeed cannot assemble checkpoints; several "
                "machines need a shared file system",
                err=True,
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct Lightning 2.6's counters if nothing was left to train: they are those of the saving hook, and later
        stages would log their points at these steps."""
        self.open(trainer)
        if self.has_learned:
            return
        loop: Any = trainer.fit_loop
        loop.epoch_progress.current.completed = loop.epoch_progress.current.processed
        batches = loop.epoch_loop.batch_progress.total
        add_logged_steps(trainer, batches.processed - batches.completed)

    def open(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Open the run, unless it is open, and record its start."""
        if self._folder is not None:
            return
        # Before the run opens: a process that is killed during a call of git must not leave an empty run.
        environment = describe(self.cfg.redact_message) if trainer.is_global_zero else None
        resumption = self.resumption or Resumption()
        folder, tracked = "", None
        if trainer.is_global_zero:
            path = run_folder(self.loggers, resumption.folder or self.fallback)
            with contextlib.suppress(OSError):  # reported below
                make_private(path, path.parents[2 if path.name == "artifacts" else 0])  # STORE/EXPERIMENT/RUN/artifacts
                # Before we write files: CSVLogger warns if the folder is not empty.
                open_runs(self.loggers, (self.cfg.logger, *self.cfg.logger.extra))
            folder, tracked = str(path), run_of(self.loggers)
        folder, tracked = self._share_run(trainer, folder, tracked)
        self._folder = RunFolder(folder)
        if self.cfg.engine.profiler is not None:
            profiled: Any = trainer
            profiled.profiler.dirpath = self._folder.path  # of traces; else the working directory
        if tracked is not None:
            self._user_calls.begin(tracked, run_maker(self.loggers) if trainer.is_global_zero else None)
        if (group := member.current()) is not None and trainer.is_global_zero:
            group.write_run_folder(self._folder.path)
        print_once()
        if self.cfg.logger.per_rank_files:
            log_to_file(self._folder.log(trainer.global_rank), self.cfg)
        if environment is None:
            return
        self._provenance = Provenance(self.cfg, self._folder, partial(self._tell, "log_dataset"))
        if self._folder.config.exists() and resumption.run_id is None:
            return  # a later stage of a recorded run
        try:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            if "train" in self.cfg.stages:
                self._lock = resumption.lock or self._folder.lock()
            if resumption.run_id is not None:
                for left in self._folder.unfinished():
                    left.unlink()
            self._describe(environment)
        except OSError as error:
            raise SetupError(f"{self._folder.path}: the run's folder cannot be written: {error.strerror}") from error
        began_from = resumption.checkpoint if resumption.run_id is None else None
        self._provenance.begin(getattr(trainer, "datamodule", None), began_from)
        resumption.log_notes(torch.get_num_threads())

    on_validation_start = on_test_start = on_predict_start = open

    def _prepare_loggers(self, trainer: Trainer) -> None:
        """Set the loggers' run to continue and the name of a new one, before their first use."""
        self._tell("suggest_name", f"{network_name(self.cfg)}-{data_name(self.cfg)}")
        self._user_calls.take_over()
        if trainer.is_global_zero and self.resumption is not None and self.resumption.run_id is not None:
            first: Any = self.loggers[0]
            first.resume_run(self.resumption.run_id, self.resumption.pending_points, self.resumption.folder)

    def prepare_autolog(self, trainer: Trainer) -> None:
        """Direct MLflow's autolog to this run: it looks up the active run before training starts."""
        if trainer.is_global_zero and autologs() and not self._expect_user_calls(trainer):
            self._prepare_loggers(trainer)
            if (tracked := run_of(self.loggers)) is not None:
                self._user_calls.begin(tracked, run_maker(self.loggers))

    def _expect_user_calls(self, trainer: Trainer) -> bool:
        """Direct calls of MLflow's functions to the run that is resumed, and return whether there is one."""
        run_id = self.resumption.run_id if self.resumption is not None else None
        if run_id is None or not hasattr(self.loggers[0], "tracking_uri"):
            return False
        self._user_calls.expect(TrackedRun(self.loggers[0].tracking_uri, run_id))
        return True

    def _share_run(self, trainer: Trainer, folder: str, tracked: TrackedRun | None) -> tuple[str, TrackedRun | None]:
        """Return rank 0's folder and tracked run on every rank; raise SetupError if the ranks were started separately
        and have different seeds or checkpoints."""
        ours = {"seed": self.cfg.seed, "train.resume_ckpt": self.resumption.fingerprint if self.resumption else None}
        folder, run, theirs = trainer.strategy.broadcast((folder, tracked, ours))
        names = [name for name in ours if ours[name] != theirs[name]]
        if differ := [f"{name} is {theirs[name]} on rank 0 and {ours[name]} here" for name in names]:
            raise SetupError(
                f"rank {trainer.global_rank} decided differently from rank 0: {'; '.join(differ)}. Processes that are "
                "started one by one need a fixed `seed`, a checkpoint's path, and one file system"
            )
        return folder, run

    def _describe(self, environment: dict[str, object]) -> None:
        """Record config, environment and settings at the start; a resumed run keeps what was recorded before."""
        folder = self.folder
        settings = self._settings(folder)
        for logger in self.loggers:
            if not hasattr(logger, "resume_run"):  # before the files: some loggers warn if the folder is not empty
                self._log_settings(logger, settings, environment)
        any_stages = {"stages": None}  # they may differ between launches
        is_other = dump(values_of(folder.config) | any_stages) != dump(settings | any_stages)
        if is_other:
            folder.replace(folder.config, dump(settings))
        note_own(folder.config)
        former = read_object(folder.environment)
        fleeting = {name: environment[name] for name in ("started", "command", "launch")}
        if former | fleeting != environment:
            folder.replace(folder.environment, json.dumps(environment, indent=1))
        if is_other or not folder.places.exists():  # an earlier start may have failed between the two
            # The place of an override contains its value, which may be secret.
            places = {k: "command line" if p.startswith("override ") else p for k, p in (self.cfg.places or {}).items()}
            write_whole(folder.places, self.cfg.redact_message(json.dumps(places, indent=1)))
        # From here on, a restart can identify the run by its files. Our logger handles changed settings.
        for logger in self.loggers:
            if hasattr(logger, "resume_run"):
                self._log_settings(logger, settings, environment)

    def _log_settings(self, logger: Any, settings: dict[str, object], environment: dict[str, object]) -> None:
        """Log settings, tags and a description to a tracker."""
        tags, text = self._tags(environment), note(self.cfg, self.folder, getattr(logger, "run_id", None))
        logger.log_hyperparams(settings)
        if hasattr(logger, "log_tags"):
            logger.log_tags(tags)
        if hasattr(logger, "describe"):
            logger.describe(text)

    def _tags(self, environment: Mapping[str, Any]) -> dict[str, str]:
        """Return tags for searching runs, from the config and the environment."""
        cfg, git = self.cfg, environment.get("git") or {}
        reason = self.resumption.complete if self.resumption and self.resumption.run_id is None else ""  # of a new run
        found = {
            "git_commit": git.get("commit"),
            "command": environment.get("command"),
            "host": environment.get("host"),
            "reproduces": os.environ.get(REPRODUCES),
            "restarts": restarts() or None,
            "versions": ", ".join(f"{n} {v}" for n, v in (environment.get("packages") or {}).items()),
            "training": f"none: {reason}" if reason else None,
            "fast": "true" if cfg.train.fast else None,
        }
        about = {NETWORK: network_name(cfg), DATA: data_name(cfg), ENGINE: engine_summary(cfg)}
        asked = {f"asked.{key}": str(value) for key, value in (cfg.asked or {}).items()}
        return {name: str(value) for name, value in found.items() if value not in (None, "")} | about | asked

    def _settings(self, folder: RunFolder) -> dict[str, object]:
        """Return the config to repeat the run: its `train.resume_ckpt` is where the run originally started from."""
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
        if self._provenance is not None:
            self._provenance.end(self._stopped)
            self._tell("flush_ended")
        for lock in (self._lock, self.resumption.lock if self.resumption else None):
            if lock is not None:
                lock.release()

    def _tell(self, method: str, *given: object) -> None:
        """Call a method of each logger that has it."""
        for logger in self.loggers:
            getattr(logger, method, lambda *_: None)(*given)

    def log_model(self, kind: str) -> None:
        """Register the run's MLflow model, if there is one, with the trackers; to be called on rank 0."""
        if self.folder.model.is_dir():
            self._tell("log_model", self.folder.model, f"{network_name(self.cfg)}-{data_name(self.cfg)}", kind)

    def publish(self) -> None:
        """Complete the provenance after all stages, and send the run's files to remote trackers; call it on rank 0."""
        if self._provenance is not None:
            self._provenance.end(self._stopped)
        if self._folder is not None:
            publish(self.loggers, self._folder.path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # a failed GPU returns nothing
            _log_pending(pl_module)
        self.fail(exception, in_stage=True)

    def fail(self, error: BaseException, in_stage: bool = False) -> None:
        """End the run with the reason, as FAILED, or as KILLED if it was a signal."""
        notifies_others = not (in_stage or self._failed)  # inside a stage, Lightning notifies other loggers
        if isinstance(error, Exception) and not isinstance(error, Interrupted) and not self._failed:
            redact_code_secrets(self.cfg)
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        self._user_calls.end("KILLED" if stopped else "FAILED")
        if self._folder is None:
            if stopped:  # before Lightning says `failed`: a run that is just being opened
                end(self.loggers, "killed", type(error).__name__, others=False)
            return
        reason = self.cfg.redact_message(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        if not self._failed:
            log.info("the run ends: %s", reason)
        self._failed, self._stopped = True, stopped
        # Every time: Lightning sets the status `failed` in its loggers in between, also for a killed run.
        end(self.loggers, "killed" if stopped else "failed", reason, notifies_others)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, object]) -> None:
        """Add metadata of plain types to a checkpoint.

        Random numbers and the position in the data are functions of seed, epoch, batch and rank (see
        `deeplightning.callbacks.random_state` and `deeplightning.data.samplers`): on every rank, the config's seed and
        Lightning's counters are their complete state.
        """
        _log_pending(pl_module)
        checkpoint["config"] = self.cfg.public()
        save_plain_values(trainer, checkpoint, self.cfg.redact)
        run_id, name = (getattr(trainer.logger, key, None) for key in ("run_id", "run_name"))
        checkpoint["run"] = {"folder": str(self.folder.path), "id": run_id, "name": name}
        # If the run ends now, these are never logged.
        checkpoint["points"] = pending_points(trainer)
        getattr(trainer.logger, "sync", lambda: None)()  # earlier points must be as durable as the checkpoint
        checkpoint["engine"] = engine_of(self.cfg)
        checkpoint["versions"] = versions()
        checkpoint["threads"] = torch.get_num_threads()
        checkpoint["accumulating"] = not between_steps(trainer)
        checkpoint["frozen"] = frozen_names(pl_module)
        checkpoint["lost"] = self._find_lost(pl_module)
        own = ("config", "run", "engine", "versions", "threads", "points", "accumulating", "frozen", "lost")
        vars(trainer)["own_entries"] = {key: checkpoint[key] for key in own}

    def _find_lost(self, task: LightningModule) -> list[str]:
        """Return the tensors outside the task's `state_dict` that training has changed, which checkpoints lack; [] for
        a task with its own `on_save_checkpoint`."""
        before, self._unsaved_tensors = self._unsaved_tensors, {}
        for name, seen, is_buffer in unsaved_tensors(task):
            tensor, version = before.get(name, (lambda: None, -1))
            is_same = tensor() is seen[0]()
            # A replaced tensor may be just the module's last output, unless it is a buffer.
            if version != seen[1] if is_same else is_buffer:
                self._lost.add(name)
            self._unsaved_tensors[name] = seen
        return [] if is_overridden("on_save_checkpoint", task) else sorted(self._lost)


def _log_pending(task: LightningModule) -> None:
    """Make a task log its pending points: on a GPU those of the last logged step."""
    if callable(log_pending := getattr(task, "log_pending", None)):
        log_pending()
