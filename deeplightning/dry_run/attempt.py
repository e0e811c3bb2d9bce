"""Hold what one attempt at a config has built and found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deeplightning.config.schema import Config, Target
from deeplightning.faults import Fault


class DeviceError(RuntimeError):
    """Raised where another device would refuse what the CPU takes, in torch's words."""


@dataclass
class Attempt:
    """One pass through a config, up to the first error.

    Attributes:
        cfg: as it is tried.
        asked: as the user wrote it.
        folder: for what is written beside a run; it is removed.
        stage: which step is tried, in words.
        saved: the name of the checkpoint of the training.
        logged: the names of metrics that are there at the end of a `step`, a `validation` and an `epoch`.
    """

    cfg: Config
    asked: Config
    folder: Path
    stage: str = "before the first step"
    faults: list[Fault] = field(default_factory=list)
    untried: list[Fault] = field(default_factory=list)
    data: Any = None
    task: Any = None
    batch: Any = None
    trainer: Any = None
    callbacks: list[tuple[Target, Any]] = field(default_factory=list)
    logged: dict[str, set[str]] = field(default_factory=dict)
    saved: str | None = None

    def fault(self, message: str, key: str) -> None:
        if key not in {fault.key for fault in self.faults if fault.key != "model.module"}:
            self.faults.append(Fault(message, key))
