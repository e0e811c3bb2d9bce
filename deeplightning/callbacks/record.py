"""The record of a run: its folder, the config as it ran, the machine, the parameters, and how it ended."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers import Logger

from deeplightning.config.fault import SetupError
from deeplightning.config.schema import Config
from deeplightning.config.tree import dump
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.build import end, publish, run_folder
from deeplightning.tracking.environment import describe, git_diff

log = logging.getLogger("deeplightning")


class Interrupted(Exception):
    """A signal asked the run to end; a second one, `at_once`: nothing more is saved."""

    def __init__(self, signal_name: str, exit_code: int, at_once: bool = False):
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code = exit_code
        self.at_once = at_once


class Record(pl.Callback):
    """Opens the run when everything is built and data and network are known to fit, on rank 0; other callbacks ask it
    for the run's folder.

    Args:
        cfg: the settled config.
        loggers: handed to the trainer when the run opens, not before: Lightning opens the runs of loggers that it
            knows before data are read, and a fault in the data would leave an empty run.
        fallback: the folder for runs whose loggers keep none.
    """

    def __init__(self, cfg: Config, loggers: list[Logger], fallback: Path):
        self.cfg, self.loggers, self.fallback = cfg, loggers, fallback
        self._folder: RunFolder | None = None
        self._failed = False

    @property
    def folder(self) -> RunFolder:
        """The run's folder, on every rank; there once a stage has started."""
        assert self._folder is not None, "asked for the run folder before a stage has started"
        return self._folder

    @property
    def opened(self) -> bool:
        return self._folder is not None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.open(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.open(trainer)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.open(trainer)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.open(trainer)

    def open(self, trainer: pl.Trainer) -> None:
        """Starts the run, unless it is open, and writes what is known at its start."""
        if self._folder is not None:
            return
        trainer.loggers = self.loggers
        path = str(run_folder(self.loggers, self.fallback)) if trainer.is_global_zero else ""
        self._folder = RunFolder(trainer.strategy.broadcast(path))
        if self.cfg.logger.per_rank_files:
            _log_to_file(self._folder.log(trainer.global_rank), self.cfg)
        if not trainer.is_global_zero:
            return
        if self._folder.config.exists():
            return  # a later stage of a run that has said all this
        environment = describe(self.cfg.redact)
        diff = git_diff(self.cfg.redact)
        for logger in self.loggers:  # before the files: some loggers warn of a folder that is not empty
            logger.log_hyperparams(self.cfg.public())
            if hasattr(logger, "log_tags"):
                logger.log_tags(_tags(environment))
        try:
            self._folder.path.mkdir(parents=True, exist_ok=True)
            self._folder.config.write_text(dump(self.cfg.public()))
            self._folder.environment.write_text(json.dumps(environment, indent=1))
            if diff is not None:
                self._folder.git_diff.write_text(diff)
        except OSError as error:
            raise SetupError(f"{self._folder.path}: the run's folder cannot be written: {error.strerror}") from error

    def publish(self) -> None:
        """Hands the run's files to trackers on other machines; to be called on rank 0 when all stages are done."""
        if self._folder is not None:
            publish(self.loggers, self._folder.path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.fail(exception)

    def fail(self, error: BaseException) -> None:
        """Ends the run as FAILED with the reason, or as KILLED where a signal was the reason."""
        if self._folder is None:
            return
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        reason = self.cfg.redact(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        if not self._failed:
            log.info("the run ends: %s", reason)
        self._failed = True
        # Each time: Lightning says `failed` to its own loggers in between, of a killed run as well.
        end(self.loggers, "killed" if stopped else "failed", reason)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.cfg.public()
        checkpoint["run"] = {"folder": str(self.folder.path), "id": getattr(trainer.logger, "run_id", None)}


def _tags(environment: Mapping[str, Any]) -> dict[str, str]:
    """What of the environment one wants to search runs by."""
    git = environment.get("git") or {}
    found = {
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
        "command": environment.get("command"),
        "host": environment.get("host"),
        "versions": ", ".join(f"{n} {v}" for n, v in (environment.get("packages") or {}).items()),
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def _log_to_file(path: Path, cfg: Config) -> None:
    """Everything said under `deeplightning` goes to a file as well; a second launch appends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for former in [h for h in log.handlers if isinstance(h, _RankFile)]:  # of an earlier run of this process
            log.removeHandler(former)
            former.close()
        handler = _RankFile(path, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{path}: the log cannot be written: {error.strerror}") from error
    handler.setFormatter(Redacting(cfg, "%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


class _RankFile(logging.FileHandler):
    """What one process says of one run."""


class Redacting(logging.Formatter):
    """Writes log lines without the values that came from the environment."""

    def __init__(self, cfg: Config | None, pattern: str):
        super().__init__(pattern)
        self.cfg = cfg

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return self.cfg.redact(text) if self.cfg else text
