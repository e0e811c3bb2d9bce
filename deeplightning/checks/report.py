"""What checking a config came to, for people and for programs."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from deeplightning.config.schema import Config
from deeplightning.config.source import Source
from deeplightning.faults import Fault, Notice, error_of, place_of, upwards


@dataclass
class Report:
    """What checking a config came to.

    Attributes:
        config: the config; None where there is no tree to make one of. Whole only without faults: what is wrong is
            replaced by its default or None.
        faults: all that is wrong, in the order of the files.
        unchecked: what only importing can tell, each with its reason.
        at_start: what lets a run not start on this machine, though the config may be right on another.
        hints: what is right and could be better.
        places: dotted key → the place that set it, for every key that is set.
        source: the config as it was written.
    """

    config: Config | None = None
    faults: list[Fault] = field(default_factory=list)
    unchecked: list[Fault] = field(default_factory=list)
    at_start: list[Fault] = field(default_factory=list)
    hints: list[Notice] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    source: Source | None = None

    def add(self, *faults: Fault) -> None:
        """Add further faults: those without a place get that of their key, or of the nearest section above. None
        of a value that is not known without importing."""
        unknown = {fault.key for fault in self.source.unchecked} if self.source is not None else set()
        faults = tuple(f for f in faults if unknown.isdisjoint(upwards(f.key or "")))
        self.faults += [replace(f, place=f.place or place_of(f.key or "", self.places)) for f in faults]
        if self.source is not None:
            self.faults = in_order(self.faults, self.source)

    @property
    def notices(self) -> list[Notice]:
        """Return what was changed in the config, and why; then the hints."""
        changed = self.config.notices if self.config is not None else None
        return [*(changed or []), *self.hints]

    @property
    def exit_code(self) -> int:
        """Return the exit code of a process that reports no more than this."""
        return error_of(self.faults).exit_code if self.faults else 0

    @property
    def keeps_from_trying(self) -> bool:
        """Return whether what is wrong is more than that this machine lacks the GPUs, which a dry run pretends to
        have."""
        return any(fault.key != "engine.gpus" or fault.exit_code != 3 for fault in self.faults)

    def redact(self, text: str) -> str:
        """Return a text without the values that came from the environment."""
        return self.source.secrets.redact_message(text) if self.source is not None else text

    def to_dict(self) -> dict[str, object]:
        """Return the report for programs; the config only where nothing is wrong with it."""
        right = not self.faults and self.config is not None
        return {
            "valid": right,
            "faults": [fault.to_dict() for fault in self.faults],
            "warnings": [fault.to_dict() for fault in self.at_start],
            "notices": [{"key": notice.key, "message": self.redact(notice.text)} for notice in self.notices],
            "unchecked": [fault.to_dict() for fault in self.unchecked],
            "config": self.config.public() if right and self.config is not None else None,
        }

    def checked(self) -> Config:
        """Return the config, if nothing is wrong.

        Raises:
            UserError: with every fault; of the kind of the worst.
        """
        if self.faults or self.config is None:
            raise error_of(self.faults)
        return self.config


def in_order(faults: Iterable[Fault], source: Source) -> list[Fault]:
    """Return faults in the order of the file, each once, without values from the environment."""

    def position(fault: Fault) -> tuple[str, int, int]:
        name, line, column = ([*(fault.place or "").rsplit(":", 2), "", ""])[:3]
        return (name, int(line), int(column)) if line.isdigit() and column.isdigit() else (fault.place or "", 0, 0)

    def clean(fault: Fault) -> Fault:
        words = {name: getattr(fault, name) for name in ("message", "place", "found", "allowed")}
        clean: dict[str, Any] = {name: source.secrets.redact(text) for name, text in words.items() if text}
        return replace(fault, **clean)

    return sorted(dict.fromkeys(map(clean, faults)), key=position)
