"""Where training resumes from, and in which run. Imported before torch."""

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
        checkpoint: absolute path; None to start from the beginning.
        run_id: the tracker's id of the run that continues; None for a new run.
        folder: the folder of the continued run.
        pending_points: points that this run was about to log: (name, value, milliseconds since 1970, step).
        lock: the lock on `folder`.
        notes: lines to log.
        inexact: why the result will differ from that of an uninterrupted run; "" if only `threads` matter.
        threads: number of threads that computed the checkpoint; None if unknown or irrelevant.
        complete: why nothing is left to train; "" otherwise.
        epochs: number of epochs that the checkpoint has completed.
        kept: settings taken from the checkpoint, see `deeplightning.run.resume`.
    """

    checkpoint: Path | None = None
    run_id: str | None = None
    folder: Path | None = None
    pending_points: Sequence[Sequence[Any]] = ()
    lock: FolderLock | None = None
    notes: Sequence[str] = ()
    inexact: str = ""
    threads: int | None = None
    complete: str = ""
    epochs: int = 0
    kept: Sequence[Sequence[Any]] = ()

    @property
    def fingerprint(self) -> str | None:
        """The checkpoint's identity on all processes: its path, or size and time if each may have its own copy."""
        if self.checkpoint is None or not hooks_here().copies_files:
            return str(self.checkpoint) if self.checkpoint else None
        stat = self.checkpoint.stat()
        return f"{self.checkpoint.name} of {stat.st_size} bytes, written at {stat.st_mtime_ns} ns"

    def log_notes(self, threads: int) -> None:
        """Log the notes and warnings; `threads` is the number of threads of this process."""
        for note in self.notes:
            log.info("%s", note)
        if self.kept:
            log.warning(
                "A resumed run keeps the optimizer and the schedule of its checkpoint: %s. To use new values, start a "
                "new run from the weights: model.init_from='%s'",
                ", ".join(f"model.{'.'.join(keys)} is {was}, not {requested}" for *keys, was, requested in self.kept),
                self.checkpoint,
            )
        changed = f"engine.threads {self.threads} → {threads} (numbers are added in another order)"
        reasons = "; ".join(filter(None, [self.inexact, changed if self.threads not in (None, threads) else ""]))
        if reasons:
            log.warning("This run will not end bit for bit like an uninterrupted one: %s", reasons)


def check_schedules(trainer: Any) -> None:
    """Compare the length of each schedule with the training's, in steps; a resumed schedule keeps its original length.

    Raises:
        ConfigError: a schedule is shorter than the training.
    """
    steps = trainer.estimated_stepping_batches
    for config in trainer.lr_scheduler_configs:
        length = getattr(config.scheduler, "total_steps", None)
        if length is not None and config.interval == "step" and steps > length * config.frequency:
            keeps = (
                "a resumed run keeps its original schedule, and thus its train.num_epochs and data.batch_size. "
                f"To train on, start a new run with model.init_from='{trainer.ckpt_path}'"
            )
            advice = keeps if trainer.ckpt_path else "set the length of the schedule to `auto`"
            message = f"this schedule ends after {length} steps, the training takes {steps}; {advice}"
            raise ConfigError(Fault(message, "model.scheduler"))
