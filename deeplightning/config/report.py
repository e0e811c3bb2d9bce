"""Collect the results of checking a config, for users and programs."""

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

_NO_MODULE = re.compile(r"there is no module (\S+) to import \(for [^)]*")


@dataclass
class Report:
    """The results of checking a config. Each step of the check adds to them.

    Attributes:
        source: the config as it was written, its references resolved.
        config: the config, or None if there is no tree to build it from. Complete only without faults: a wrong value
            is replaced by its default or None.
        faults: all faults, in the order of the files once the check ends.
        unchecked: what could not be checked, each with its reason and the option that checks it.
        places: dotted key → the place that set it, for every key that is set.
        faulty_keys: keys that already have a fault; a further one would be a consequence.
        unread: keys whose values could not be read.
        targets: checks of targets, which run once the whole config is read.
        meant_keys: our keys that were written under a name of another tool.
    """

    source: Source
    config: Config | None = None
    unchecked: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.faults = self.source.faults
        self.places = {".".join(map(str, path)): entry.place for path, entry in nodes(self.source.root)}
        self.unread = {fault.key for fault in self.faults if fault.message.startswith(TAG)}
        self.faulty_keys = {fault.key for fault in self.faults} - self.unread
        self.meanings = Meanings()
        self.targets, self.meant_keys = list[Callable[[], None]](), set[str | None]()

    def fault(self, message: str, key: str, place: str | None = None, **more: Any) -> None:
        if message.startswith(("missing: ", "must be ")) and not self.unread.isdisjoint(upwards(key)):
            return  # the value there could not be read
        if self.faulty_keys.isdisjoint(upwards(key)):
            self.faulty_keys.add(key)
            self.faults.append(Fault(message, key, place or place_of(key, self.places), **more))
            if len(self.faults) > MAX_FAULTS:
                raise ConfigError([*self.faults, Fault(f"more than {MAX_FAULTS} faults; there may be others")])

    def wrong(self, allowed: str, found: object, key: str, place: str | None = None, near: str = "") -> None:
        message = f"must be {allowed}, not {found}" + (near and f".{near}")
        self.fault(message, key, place, found=str(found), allowed=allowed)

    def merge(self, verdict: Verdict) -> None:
        for f in verdict.faults:
            key = str(f.key)
            type_place = self.places.get(f"{key.removesuffix('.params')}.type") if key.endswith(".params") else None
            place = self.places.get(key) or type_place
            self.fault(f.message, key, place, found=f.found, allowed=f.allowed, exit_code=f.exit_code)
        for key, (why, option) in verdict.undecided.items():
            self.add_unchecked(key, why, option)

    def add_unchecked(self, key: str, why: str, option: str = "--import") -> None:
        """Record a key that could not be checked, why, and the option that checks it."""
        remedy = "" if option == "--import" and self.meanings.importing else f"; `{option}` checks it"
        self.unchecked.append(Fault(why + remedy, key, place_of(key, self.places)))
        if len(self.unchecked) > MAX_FAULTS:
            message = f"more than {MAX_FAULTS} values, up to here, cannot be checked without importing"
            raise ConfigError([*self.faults, replace(self.unchecked[-1], message=message)])

    def param(self, name: str, param: str, value: object, section: str, key: str, given: int = 0) -> None:
        """Check one param, at `key`, against the signature of a class. The class itself is checked elsewhere."""
        if not isinstance(name, str):
            return
        param_key = f"{section}.params.{param}"
        verdict = judge(self.meanings, name, {param: value}, section, given=given)
        found = [fault for fault in verdict.faults if param_key in upwards(str(fault.key))]
        faults = [replace(fault, key=key + str(fault.key).removeprefix(param_key)) for fault in found]
        self.merge(Verdict(faults, {key: verdict.undecided[param_key]} if param_key in verdict.undecided else {}))

    def meaning(self, name: str, key: str, place: str | None = None) -> Any:
        """Resolve a name at a key, or return None if it does not exist or only importing would show it."""
        try:
            return self.meanings.of(name)
        except ValueError as error:
            self.fault(str(error), key, place, found=name, exit_code=getattr(error, "exit_code", 2))
        except Undecided as why:
            self.add_unchecked(key, f"{name}: {why}")
        return None

    def parameter(self, name: str, param: str) -> Parameter:
        """Return a parameter of a class. One of an unknown signature allows anything; a missing one allows nothing."""
        try:
            signature = self.meanings.signature(name)
        except (ValueError, Undecided):
            return Parameter(param)
        absent = Parameter(param, allowed=() if signature.rest is None else None)
        return next((p for p in signature.parameters if p.name == param), absent)

    def add(self, *faults: Fault) -> None:
        """Add faults. One without a place gets that of its key, or of the nearest enclosing section."""
        self.faults += [replace(f, place=f.place or place_of(f.key or "", self.places)) for f in faults]
        self.sort()

    def drop_consequences(self) -> None:
        """Drop faults of missing keys that were written under a name of another tool, or are in a misspelt `_base_`."""
        is_base = any("mean _base_?" in fault.message for fault in self.faults)  # the missing keys are in the base
        missing = [fault for fault in self.faults if fault.message.startswith("missing: ")]
        self.faults[:] = [f for f in self.faults if not (f in missing and (is_base or f.key in self.meant_keys))]

    def sort(self) -> None:
        """Sort faults and unchecked keys in the order of the files, and redact values from the environment."""
        self.faults[:] = sort_faults(self.faults, self.source)
        self.unchecked = sort_faults(self.unchecked, self.source)

    @property
    def notices(self) -> list[Notice]:
        """Return the changes that were made to the config, with reasons."""
        return (self.config.notices if self.config is not None else None) or []

    @property
    def exit_code(self) -> int:
        """Return the exit code for these faults."""
        return error_of(self.faults).exit_code if self.faults else 0

    @property
    def blocks_dry_run(self) -> bool:
        """Return whether there are faults besides missing GPUs, which a dry run simulates."""
        return any(fault.key != "engine.gpus" or fault.exit_code != 3 for fault in self.faults)

    def redact(self, text: str) -> str:
        """Redact the values from the environment in a text."""
        return self.source.secrets.redact_message(text)

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain values, for JSON. It has the config only if that has no faults."""

        def entries(is_warning: bool) -> list[dict[str, str | None]]:
            found = [notice for notice in self.notices if notice.unasked == is_warning]
            return [{"key": notice.key, "message": self.redact(notice.text)} for notice in found]

        is_valid = not self.faults and self.config is not None
        return {
            "valid": is_valid,
            "faults": [fault.to_dict() for fault in self.faults],
            "warnings": entries(is_warning=True),
            "notices": entries(is_warning=False),
            "unchecked": [fault.to_dict() for fault in self.unchecked],
            "config": self.config.public() if is_valid and self.config is not None else None,
        }

    def checked(self) -> Config:
        """Return the config if it has no faults.

        Raises:
            UserError: with all faults; `error_of` chooses its class.
        """
        if self.faults or self.config is None:
            raise error_of(self.faults)
        return self.config


def sort_faults(faults: Iterable[Fault], source: Source) -> list[Fault]:
    """Sort faults in the order of the files, without duplicates, and redact values from the environment.

    A missing package is one fault, which names all keys that need it.
    """

    def clean(fault: Fault) -> Fault:
        texts = {name: getattr(fault, name) for name in ("message", "place", "found", "allowed")}
        clean: dict[str, Any] = {name: source.secrets.redact(text) for name, text in texts.items() if text}
        return replace(fault, **clean)

    found = dict[str, Fault]()
    for fault in sorted(dict.fromkeys(map(clean, faults)), key=Fault.position):
        absent = _NO_MODULE.match(fault.message) if fault.exit_code == Missing.exit_code else None
        name = absent[1] if absent else f"fault {len(found)}"
        if name in found:
            message = _NO_MODULE.sub(rf"\g<0>, {fault.key}", found[name].message, count=1)
            fault = replace(found[name], message=message)
        found[name] = fault
    return [*found.values()]
