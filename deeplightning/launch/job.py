"""The interface of launchers: what they get, start and do inside the processes that they started."""

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
        overrides: as given.
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
        command: with its arguments.
        times: how often, on each machine.
        where: the machines, in words.
        environment: variables that are added to those of the launching process; `*` stands for a number that differs.
        script: text that is submitted to a queue, which starts the command later.
    """

    command: list[str]
    times: int = 1
    where: str = "this machine"
    environment: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None


class Launcher(Protocol):
    """Starts the processes of a run.

    A class that an entry point of `deeplightning.launchers` names may have two methods more:

    - `trial_jobs(job, trials, note)` returns the `TrialJobs` of a search whose trials differ in no key of `engine`. The
      file `note` keeps what the next command needs to end them if this one is killed.
    - `hooks_here()`, static, returns the `ProcessHooks` of a process that the launcher has started, else None.
    """

    def plan(self, job: Job) -> list[Start]:
        """Return what `run` would start, without starting anything."""
        ...

    def run(self, job: Job) -> int:
        """Start a job and wait for its end; all its messages are on stderr when it returns.

        Returns:
            The exit code.

        Raises:
            deeplightning.faults.UserError: the job cannot be started.
        """
        ...


class TrialJobs(Protocol):
    """The jobs of a queue that a launcher keeps for the trials of a search."""

    def variables(self, environment: Mapping[str, str | None]) -> dict[str, str]:
        """Give a trial a job; return variables for the process that starts the trial, or {} where it submits its own.

        Args:
            environment: variables that the processes of the trial get; None: that they must not have.
        """
        ...

    def close(self) -> None:
        """End the jobs of trials that have not ended."""
        ...


class ProcessHooks:
    """Hooks of a launcher inside the processes that it started; these defaults do nothing.

    Attributes:
        signals: numbers that save a checkpoint and end the run, besides SIGINT and SIGTERM.
        copies_files: whether the launcher copies checkpoints for processes without a shared folder.
    """

    signals: Sequence[int] = ()
    copies_files = False

    def callbacks(self, cfg: Config, record: Any, checkpoints: Any) -> list[Any]:
        """Return Lightning callbacks for the run, to be called after its `Record` and `Checkpoints`."""
        return []

    def before_end(self, signal: int, batches: int) -> None:
        """Prepare for the end of the run by a signal, on rank 0.

        Args:
            batches: trained since the process was started.
        """


def pauses(params: Mapping[str, float] | None = None) -> list[float]:
    """Return the seconds to wait after each of `max_tries` tries but the last: `base_s`, then `factor` times as long
    each time.

    Args:
        params: these numbers; the defaults are 1 s, 2 and 10.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
    """
    usual: dict[str, float] = {"base_s": 1.0, "factor": 2.0, "max_tries": 10}
    values = usual | dict(params or {})
    if unknown := values.keys() - usual.keys():
        raise ValueError(f"backoff takes {', '.join(usual)}, not {', '.join(sorted(unknown))}")
    for name, low in zip(usual, (0, 1, 1), strict=True):
        if isinstance(values[name], bool) or not values[name] >= low:
            raise ValueError(f"backoff.{name} must be at least {low}, not {values[name]}")
    return [values["base_s"] * values["factor"] ** number for number in range(int(values["max_tries"]) - 1)]
