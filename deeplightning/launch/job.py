"""What a launcher gets, what it starts, and what it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from deeplightning.config.schema import Config


@dataclass(frozen=True)
class Job:
    """What is to be started: `deeplightning train CONFIG [key=value …]`.

    Attributes:
        cfg: what that means, settled.
        config: absolute.
        overrides: as they were given.
    """

    cfg: Config
    config: Path
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """What each process runs."""
        return [sys.executable, "-m", "deeplightning", "train", str(self.config), *self.overrides]


@dataclass(frozen=True)
class Start:
    """A command that a launch starts.

    Attributes:
        command: with its arguments.
        times: how often, on each machine.
        where: the machines, in words.
        environment: variables that are set for it, beside those of the launching process; `*` means a number
            that differs.
        script: what is handed to a queue, which starts the command in its time.
    """

    command: list[str]
    times: int = 1
    where: str = "this machine"
    environment: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None


class Launcher(Protocol):
    """Starts the processes of a run."""

    def plan(self, job: Job) -> list[Start]:
        """What `run` would start, without starting anything."""
        ...

    def run(self, job: Job) -> int:
        """Starts a job and sees it through; all its messages are on stderr when it returns.

        Returns:
            The exit code.

        Raises:
            deeplightning.faults.UserError: the job cannot be started.
        """
        ...
