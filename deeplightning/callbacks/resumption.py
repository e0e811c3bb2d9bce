"""Where training resumes from, and in which run; imported before torch is."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeplightning.faults import ConfigError, Fault
from deeplightning.launch import hooks_here
from deeplightning.runfolder import FolderLock

log = logging.getLogger("deeplightning")


@dataclass(frozen=True)
class Resumption:
    """Where training resumes from, and in which run.

    Attributes:
        checkpoint: absolute; None: from the start.
        run_id: the run of the tracker that is continued; None: a new one.
        folder: of the continued run.
        owed: points that this run was about to log: (name, value, milliseconds since 1970, step).
        hold: the claim on `folder`.
        notes: what a person should know, a line each.
        inexact: why the end will not be that of an uninterrupted run, bit for bit; "": it will with as many threads.
        threads: that computed the checkpoint; None: unknown, or they change nothing.
        over: why nothing is left to train, of a checkpoint whose run is complete; "": something is.
        epochs: that the checkpoint has completed.
        kept: what the config has from the checkpoint, see `deeplightning.run.resume`.
    """

    checkpoint: Path | None = None
    run_id: str | None = None
    folder: Path | None = None
    owed: Sequence[Sequence[Any]] = ()
    hold: FolderLock | None = None
    notes: Sequence[str] = ()
    inexact: str = ""
    threads: int | None = None
    over: str = ""
    epochs: int = 0
    kept: Sequence[Sequence[Any]] = ()

    @property
    def named(self) -> str | None:
        """Return what all processes know of the checkpoint: its path, or size and time where each may have a copy."""
        if self.checkpoint is None or not hooks_here().copies_files:
            return str(self.checkpoint) if self.checkpoint else None
        stat = self.checkpoint.stat()
        return f"{self.checkpoint.name} of {stat.st_size} bytes, written at {stat.st_mtime_ns} ns"

    def say(self, threads: int) -> None:
        """Log the notes; `threads`: that this process computes with."""
        for note in self.notes:
            log.info("%s", note)
        if self.kept:
            log.warning(
                "A resumed run keeps the optimizer and the schedule of its checkpoint: %s. New values begin a new run "
                "from the weights: model.init_from='%s'",
                ", ".join(f"model.{'.'.join(keys)} is {was}, not {asked}" for *keys, was, asked in self.kept),
                self.checkpoint,
            )
        changed = f"engine.threads {self.threads} → {threads} (numbers are added in another order)"
        reasons = "; ".join(filter(None, [self.inexact, changed if self.threads not in (None, threads) else ""]))
        if reasons:
            log.warning("This run will not end bit for bit like an uninterrupted one: %s", reasons)


def check_schedules(trainer: Any) -> None:
    """Compare each schedule's length in steps with the training's; a resumed schedule keeps its first length.

    Raises:
        ConfigError: a schedule is shorter.
    """
    steps = trainer.estimated_stepping_batches
    for config in trainer.lr_scheduler_configs:
        length = getattr(config.scheduler, "total_steps", None)
        if length is not None and config.interval == "step" and steps > length * config.frequency:
            keeps = (
                "a resumed run keeps the schedule that it began with, and so its train.num_epochs and data.batch_size. "
                f"To train on, start a new run with model.init_from='{trainer.ckpt_path}'"
            )
            advice = keeps if trainer.ckpt_path else "set the length of the schedule to `auto`"
            message = f"this schedule ends after {length} steps, the training takes {steps}; {advice}"
            raise ConfigError(Fault(message, "model.scheduler"))
