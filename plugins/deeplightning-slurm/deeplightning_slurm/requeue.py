"""Requeue a job from inside one of its processes."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path
from signal import SIGTERM, SIGUSR1, SIGUSR2

from deeplightning.launch import ProcessHooks
from deeplightning.process.identity import slurm_step
from deeplightning.process.terminal import say
from deeplightning_slurm.batch_script import REQUEUE_FILE
from deeplightning_slurm.commands import run_command, state_of


class JobHooks(ProcessHooks):
    """Requeue the job of this process when a signal ends the run early.

    SIGUSR1 and SIGUSR2 announce the end of the job's time. SIGTERM requeues it only if Slurm preempts it.

    Args:
        number: Slurm's number of the job.
    """

    signals = (SIGUSR1, SIGUSR2)

    def __init__(self, number: str):
        self.number, self._is_registered = number, False

    def before_end(self, signal: int, batches: int) -> None:
        """Register the requeue to run last in this process, because it ends all processes of the job."""
        is_announced = signal in self.signals
        if self._is_registered or not (is_announced or (signal == SIGTERM and is_preempted(self.number))):
            return
        self._is_registered = True
        atexit.register(_requeue, self.number, str(batches) if is_announced else "preempted")


def job_here(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the number of the Slurm job that runs this process as a step, or None."""
    if (step := slurm_step(environment)) is None:
        return None
    if array := environment.get("SLURM_ARRAY_JOB_ID"):  # the job ID of the last task is that of the array
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return step.removeprefix("slurm-").partition(".")[0]


def is_preempted(number: str) -> bool:
    """Return whether Slurm preempts a job; False also if Slurm does not answer."""
    try:
        return (state_of(number) or {}).get("PreemptTime", "None") != "None"
    except TimeoutError:
        return False


def _requeue(number: str, done: str) -> None:
    """Requeue a job, or let its batch script do so.

    Args:
        done: batches since this start, or `preempted`, for the batch script; see `REQUEUE_FILE`.
    """
    say(f"job {number} returns to the queue and resumes when Slurm restarts it", err=True)
    if file := os.environ.get(REQUEUE_FILE):
        Path(file).write_text(done)
        return
    code, output = run_command("scontrol", "requeue", number)
    if code != 0:
        hint = "`train.resume_ckpt=auto` resumes from last.ckpt"
        say(f"error: Slurm does not requeue job {number}: {output or f'exit code {code}'}; {hint}", err=True)
