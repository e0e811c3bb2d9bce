"""Collect what the check of a config finds, for people and for programs."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from deeplightning.config.schema import Config
from deeplightning.config.signature_check import Meanings, Verdict, judge
from deeplightning.config.source import Source
from deeplightning.config.tree import MAX_FAULTS, TAG, nodes
from deeplightning.faults import ConfigError, Fault, Missing, Notice, error_of, place_of, upwards
from deeplightning.signatures.signature import Parameter, Undecided

_ABSENT = re.compile(r"there is no module (\S+) to import \(for [^)]*")


@dataclass
class Report:
    """What the check of a config has found so far; every step adds to it.

    Attributes:
        source: the config as it was written, its references resolved.
        config: the config; None where there is no tree to make one of. Whole only without faults: what is wrong is
            replaced by its default or None.
        faults: all that is wrong, in the order of the files once a check ends.
        unchecked: what could not be decided, each with its reason, and the option that settles it.
        places: dotted key → the place that set it, for every key that is set.
        answered: keys that a fault is already about; another fault of theirs would be a consequence.
        unread: keys whose values could not be read.
        targets: comparisons of targets with what they name, left until the whole config is read.
        meant: keys of ours that were written under a name of another tool.
    """

    source: Source
    config: Config | None = None
    unchecked: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.faults = self.source.faults
        self.places = {".".join(map(str, path)): entry.place for path, entry in nodes(self.source.root)}
        self.unread = {fault.key for fault in self.faults if fault.message.startswith(TAG)}
        self.answered = {fault.key for fault in self.faults} - self.unread
        self.meanings = Meanings()
        self.targets: list[Callable[[], None]] = []
        self.meant: set[str | None] = set()

    def fault(self, message: str, key: str, place: str | None = None, **more: Any) -> None:
        if message.startswith(("missing: ", "must be ")) and not self.unread.isdisjoint(upwards(key)):
            return  # the value there could not be read
        if self.answered.isdisjoint(upwards(key)):
            self.answered.add(key)
            self.faults.append(Fault(message, key, place or place_of(key, self.places), **more))
            if len(self.faults) > MAX_FAULTS:
                raise ConfigError([*self.faults, Fault(f"more than {MAX_FAULTS} faults; there may be others")])

    def wrong(self, allowed: str, found: object, key: str, place: str | None = None, near: str = "") -> None:
        message = f"must be {allowed}, not {found}" + (near and f".{near}")
        self.fault(message, key, place, found=str(found), allowed=allowed)

    def take(self, verdict: Verdict) -> None:
        for f in verdict.faults:
            key = str(f.key)
            beside = self.places.get(f"{key.removesuffix('.params')}.type") if key.endswith(".params") else None
            place = self.places.get(key) or beside
            self.fault(f.message, key, place, found=f.found, allowed=f.allowed, exit_code=f.exit_code)
        for key, (why, settled_by) in verdict.undecided.items():
            self.leave(key, why, settled_by)

    def leave(self, key: str, why: str, settled_by: str = "--import") -> None:
        """Note what could not be checked, and what settles it."""
        remedy = "" if settled_by == "--import" and self.meanings.importing else f"; `{settled_by}` settles it"
        self.unchecked.append(Fault(why + remedy, key, place_of(key, self.places)))
        if len(self.unchecked) > MAX_FAULTS:
            message = f"more than {MAX_FAULTS} things, up to here, that cannot be checked without importing them"
            raise ConfigError([*self.faults, replace(self.unchecked[-1], message=message)])

    def param(self, name: str, param: str, value: object, section: str, key: str, given: int = 0) -> None:
        """Compare one param, at `key`, with the parameters of a class; others check the class itself."""
        if not isinstance(name, str):
            return
        asked = f"{section}.params.{param}"
        verdict = judge(self.meanings, name, {param: value}, section, given=given)
        faults = [
            replace(fault, key=key + str(fault.key).removeprefix(asked))
            for fault in verdict.faults
            if asked in upwards(str(fault.key))
        ]
        self.take(Verdict(faults, {key: verdict.undecided[asked]} if asked in verdict.undecided else {}))

    def meaning(self, name: str, key: str, place: str | None = None) -> Any:
        """Return what a name at a key means; None where there is no such thing, or only importing can tell."""
        try:
            return self.meanings.of(name)
        except ValueError as error:
            self.fault(str(error), key, place, found=name, exit_code=getattr(error, "exit_code", 2))
        except Undecided as why:
            self.leave(key, f"{name}: {why}")
        return None

    def parameter(self, name: str, param: str) -> Parameter:
        """Return a parameter of a class. An unknown parameter allows anything; a missing one allows nothing."""
        try:
            signature = self.meanings.signature(name)
        except (ValueError, Undecided):
            return Parameter(param)
        absent = Parameter(param, allowed=() if signature.rest is None else None)
        return next((p for p in signature.parameters if p.name == param), absent)

    def add(self, *faults: Fault) -> None:
        """Add further faults: those without a place get that of their key, or of the nearest section above."""
        self.faults += [replace(f, place=f.place or place_of(f.key or "", self.places)) for f in faults]
        self.sort()

    def drop_consequences(self) -> None:
        """Drop what is missing because its key has the name of another tool, or `_base_` is misspelt."""
        is_base = any("mean _base_?" in fault.message for fault in self.faults)  # the missing keys are in the base
        missing = [fault for fault in self.faults if fault.message.startswith("missing: ")]
        self.faults[:] = [f for f in self.faults if not (f in missing and (is_base or f.key in self.meant))]

    def sort(self) -> None:
        """Bring faults, and what is unchecked, into the order of the files, without values from the environment."""
        self.faults[:] = in_order(self.faults, self.source)
        self.unchecked = in_order(self.unchecked, self.source)

    @property
    def notices(self) -> list[Notice]:
        """Return what was changed in the config, and why."""
        return (self.config.notices if self.config is not None else None) or []

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
        return self.source.secrets.redact_message(text)

    def to_dict(self) -> dict[str, object]:
        """Return the report for programs; the config only where nothing is wrong with it."""

        def told(is_warning: bool) -> list[dict[str, str | None]]:
            found = [notice for notice in self.notices if notice.unasked == is_warning]
            return [{"key": notice.key, "message": self.redact(notice.text)} for notice in found]

        right = not self.faults and self.config is not None
        return {
            "valid": right,
            "faults": [fault.to_dict() for fault in self.faults],
            "warnings": told(is_warning=True),
            "notices": told(is_warning=False),
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
    """Return faults in the order of the file, each once, without values from the environment.

    A package that is missing is one fault, which names all keys that need it.
    """

    def position(fault: Fault) -> tuple[str, int, int]:
        name, line, column = ([*(fault.place or "").rsplit(":", 2), "", ""])[:3]
        return (name, int(line), int(column)) if line.isdigit() and column.isdigit() else (fault.place or "", 0, 0)

    def clean(fault: Fault) -> Fault:
        words = {name: getattr(fault, name) for name in ("message", "place", "found", "allowed")}
        clean: dict[str, Any] = {name: source.secrets.redact(text) for name, text in words.items() if text}
        return replace(fault, **clean)

    found = dict[str, Fault]()
    for fault in sorted(dict.fromkeys(map(clean, faults)), key=position):
        absent = _ABSENT.match(fault.message) if fault.exit_code == Missing.exit_code else None
        name = absent[1] if absent else f"fault {len(found)}"
        if name in found:
            message = _ABSENT.sub(rf"\g<0>, {fault.key}", found[name].message, count=1)
            found[name] = replace(found[name], message=message)
        else:
            found[name] = fault
    return [*found.values()]
