"""What went wrong, in words for the person who can mend it, and the exit code that says whose turn it is."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        message: what was found, what is allowed, and the next step, in a sentence or two.
        key: the dotted config key it is about, if any.
        place: `file:line:col`, or the override that set the value, if known.
    """

    message: str
    key: str | None = None
    place: str | None = None

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.place, self.key) if part)
        return f"{where}: {self.message}" if where else self.message


class UserError(Exception):
    """An error that a user can mend: shown as notes without a traceback, ends the process with `exit_code`.

    Any exception with an integer attribute `exit_code` is treated the same way, so that a part (data, task, network,
    loss), which imports nothing of the core, can raise one of its own.
    """

    exit_code = 1

    def __init__(self, faults: str | Fault | Iterable[Fault]):
        if isinstance(faults, str):
            faults = Fault(faults)
        self.faults = [faults] if isinstance(faults, Fault) else list(faults)
        super().__init__("\n".join(map(str, self.faults)))


class ConfigError(UserError):
    """The config is wrong."""

    exit_code = 2


class SetupError(UserError):
    """The machine, the data or the tracking store is not as the config needs it."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint or a bundle is missing, damaged, or of something else."""

    exit_code = 4


class RunError(UserError):
    """The run itself failed: a loss that is not finite, no memory left, a lost worker."""

    exit_code = 5
