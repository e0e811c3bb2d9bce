"""What a check has found so far: faults, what could not be checked, and what is still to compare."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deeplightning.checks.signature_check import Meanings, Verdict, judge
from deeplightning.config.secrets import Secrets
from deeplightning.config.tree import MAX_FAULTS, TAG, Entry, nodes
from deeplightning.faults import ConfigError, Fault, place_of, upwards
from deeplightning.static.signature import Options


class Findings:
    """What the check of a config has found so far, and what it still has to compare.

    Attributes:
        faults: what is wrong.
        unchecked: what could not be decided, with the option that settles it.
        places: dotted key → where it was set.
        answered: keys that a fault is already about; another fault of theirs would be a consequence.
        targets: comparisons of targets with what they name, left until the whole config is read.
    """

    def __init__(self, faults: list[Fault], secrets: Secrets, root: Entry):
        self.faults, self.secrets = faults, secrets
        self.unchecked: list[Fault] = []
        self.meanings = Meanings()
        self.places = {".".join(map(str, path)): entry.place for path, entry in nodes(root)}
        self.unread = {fault.key for fault in faults if fault.message.startswith(TAG)}
        self.answered = {fault.key for fault in faults} - self.unread  # keys that a fault already speaks of
        self.targets: list[Callable[[], None]] = []
        self.meant: set[str | None] = set()  # keys of ours that were written under a name of another tool
        self.loss_arguments: int | None = None  # how many the task calls a loss with, if it says so

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

    def allowed(self, name: str, param: str) -> Options:
        """Return what a param of a class may be; None: anything, or not known."""
        parameter = self.meanings.parameters(name).get(param)
        return None if parameter is None else parameter.allowed
