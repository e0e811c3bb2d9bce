"""The interface of launchers: the jobs they get, the commands they start, and their hooks in started processes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deeplightning.config.schema import Config


@dataclass(frozen=True)
class Job:
    """A run to start: `deeplightning train CONFIG [key=value …]`.

    Attributes:
        cfg: the resolved config.
        config: the absolute path of the config file.
        overrides: the overrides as the user wrote them.
    """

    cfg: Config
    config: Path
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command of each process."""
        return [sys.executable, "-m", "deeplightning", "train", str(self.config), *self.overrides]


@dataclass(frozen=True)
class Start:
    """A command that a launch starts.

    Attributes:
        command: the program and its arguments.
        times: how many times it is started on each machine.
        where: a description of the machines.
        environment: variables added to those of the launching process; `*` is a number that differs by process.
        script: the text submitted to a queue, which starts the command later.
    """

    command: list[str]
    times: int = 1
    where: str = "this machine"
    environment: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None


class Launcher(Protocol):
    """Starts the processes of a run.

    A class named by an entry point of `deeplightning.launchers` may have two more methods:

    - `trial_jobs(job, trials, note)` returns the `TrialJobs` of a search whose trials differ in no key of `engine`. The
      file `note` stores what the next command needs to end these jobs if this one is killed.
    - `hooks_here()`, static, returns the `ProcessHooks` of a process that the launcher started, else None.
    """

    def plan(self, job: Job) -> list[Start]:
        """Return what `run` would start, without starting anything."""
        ...

    def run(self, job: Job) -> int:
        """Start a job and wait for its end; print all its messages to stderr, and then return the exit code.

        Raises:
            deeplightning.faults.UserError: the job cannot be started.
        """
        ...


class TrialJobs(Protocol):
    """Jobs in a queue that a launcher reserves for the trials of a search."""

    def variables(self, environment: Mapping[str, str | None]) -> dict[str, str]:
        """Assign a job to a trial; return variables for the process that starts it, or {} if that submits its own job.

        Args:
            environment: variables that the processes of the trial get; None for one that must be unset.
        """
        ...

    def close(self) -> None:
        """End the jobs of trials that have not ended."""
        ...


class ProcessHooks:
    """Hooks of a launcher inside the processes that it started; these defaults do nothing.

    Attributes:
        signals: the signals, besides SIGINT and SIGTERM, that save a checkpoint and end the run.
        copies_files: whether the launcher copies checkpoints between processes that share no folder.
    """

    signals: Sequence[int] = ()
    copies_files = False

    def callbacks(self, cfg: Config, record: Any, checkpoints: Any) -> list[Any]:
        """Return Lightning callbacks for the run, to be called after its `Record` and `Checkpoints`."""
        return []

    def before_end(self, signal: int, batches: int) -> None:
        """Prepare, on rank 0, for the end by a signal; `batches`: number trained since the process started."""
