"""Decide what may be built from the config of a run.

A config is code: it names what is imported and called. A run folder that is not this user's own, see
`deeplightning.config.own_runs`, is foreign. Its config is read once and may contain only plain values, and the checked
tree is the one that its objects are built from.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from deeplightning.config.own_runs import is_own, is_registered
from deeplightning.config.section_kinds import KINDS
from deeplightning.config.source import Source, Text, short, text_of
from deeplightning.config.target import find
from deeplightning.config.tree import Entry, KeyPath, entry_at, leaves, nodes, parse
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.own_code import LIBRARIES
from deeplightning.runfolder import RunFolder
from deeplightning.words import is_address

ENVIRONMENT = "oc.env"
"""A value of `--allow` besides modules: a foreign config may read environment variables."""

NOT_TAKEN = ("engine", "logger", "tune", "train.callbacks", "train.resume_ckpt", "model.init_from", "data.sampler")
"""Keys of a foreign config that are replaced by their defaults. Launchers, hooks, environment variables, trackers and
callbacks belong to the machine that trained, and a tracker's address could be any server."""

_NETWORKS = (*("deeplightning.model", "torch.nn"), *("torchvision.models", "torchvision.ops", "torchvision.transforms"))
_NOT_IMPORTED_MODULES = (*LIBRARIES, "optuna")
_VARIABLE = re.compile(r"\$\{oc\.env:\w+\}", re.ASCII)
_DECODED = re.compile(rf"\$\{{oc\.decode:{_VARIABLE.pattern}\}}", re.ASCII)


@dataclass(frozen=True)
class _Rule:
    """The names that a key may have.

    Attributes:
        modules: the modules that a class must be defined in, and that its name must begin with.
        base: the class that it must derive from, MODULE.CLASS.
        imported: if False, the section is ignored, so only the name is checked.
    """

    modules: tuple[str, ...]
    base: str = KINDS["model.network"].base
    imported: bool = True

    def __str__(self) -> str:
        if not self.imported:
            return f"only names of {', '.join(self.modules)} are allowed"
        return f"only a class that derives from {self.base} and is defined in {', '.join(self.modules)} is allowed"


_NETWORK = _Rule(_NETWORKS)
_MODULES = {
    "data.module": ("deeplightning.data",),
    "model.module": ("deeplightning.task",),
    "model.optimizer": ("torch.optim",),
    "model.scheduler": ("torch.optim.lr_scheduler",),
}
_RULES = {section: _Rule(modules, KINDS[section].base) for section, modules in _MODULES.items()} | {
    section: _Rule(_NOT_IMPORTED_MODULES, imported=False) for section in NOT_TAKEN
}


# ---- the config of a run


@dataclass(frozen=True)
class RunConfig(Text):
    """The config of a run, read once. `deeplightning.config.examine` calls `admit` with the tree that it builds from.

    Attributes:
        is_trusted: whether this user started the run on this machine, or trusts all of it.
        allow: modules that the user trusts, such as `own_network`; `oc.env` stands for environment variables.
        verb: the command that uses the run, for messages; "": the run is only read.
    """

    is_trusted: bool
    allow: tuple[str, ...] = ()
    verb: str = ""

    def left_out(self) -> list[str]:
        """Return overrides that reset the ignored parts of a foreign config to their defaults."""
        if self.is_trusted:
            return []
        root = parse(self.text, short(self.path), [])
        overrides = [f"~{key}" for key in NOT_TAKEN if entry_at(root, key.split(".")) is not None]
        # These params write to a folder or download files.
        for key, value, kind in (("cache", "true", str), ("download", "false", bool)):
            found = entry_at(root, ("data", "module", "params", key))
            if found is not None and isinstance(found.value, kind):
                overrides.append(f"data.module.params.{key}={value}")
        data = entry_at(root, ("data", "root"))
        if data is not None and isinstance(data.value, str) and is_address(data.value):
            overrides.append("~data.root")
        return overrides

    def admit(self, source: Source) -> None:
        """Check that all names in the tree of a foreign config are allowed.

        Args:
            source: this config with all overrides, references resolved. Objects are built from it.

        Raises:
            CheckpointError: with each refused name, its key, the rule, and the option that allows it.
        """
        if self.is_trusted:
            return
        written = _names(parse(self.text, short(self.path), []))
        ignored = [(path, named) for path, named in written if _within(".".join(map(str, path)), NOT_TAKEN)]
        names = [*ignored, *_names(source.root)]
        faults = [fault for path, named in names if (fault := self._refusal(path, named)) is not None]
        faults += [
            _non_plain_fault(f"the reference {found.written!r:.60}", found.place, self, key=".".join(map(str, path)))
            for path, found in nodes(source.root)
            if found.written is not None and self._has_forbidden_reference(found.written)
        ]
        if faults:
            raise CheckpointError(faults)

    def _has_forbidden_reference(self, text: str) -> bool:
        """Return whether a text contains a reference that is not allowed."""
        if ENVIRONMENT in self.allow:
            text = _VARIABLE.sub("", _DECODED.sub("", text))
        return "${" in text

    def _refusal(self, path: KeyPath, named: Entry) -> Fault | None:
        """Return the fault of a name that must not be imported or built, or None if it is allowed.

        A module is imported only if the rule allows its name.
        """
        name, rules = named.value, _rules(path)
        if _within(name, self.allow):
            return None
        origin = name
        for rule in rules:
            if not _within(name, rule.modules) or any(p.startswith("_") for p in name.split(".")):
                continue
            if not rule.imported:
                return None
            try:
                found = find(name)
            except ValueError:  # the name does not exist, which `check` reports
                return None
            home = getattr(found, "__module__", None) or type(found).__module__
            origin = f"{home}.{name.rpartition('.')[2]}"  # `torch.os.system` is `posix.system`
            if isinstance(found, type) and issubclass(found, find(rule.base)) and _within(origin, rule.modules):
                return None
        allowed = "; or ".join(map(str, rules)) or "no `ref` is allowed"
        module = name.rpartition(".")[0] if _within(name, _NOT_IMPORTED_MODULES) else name.partition(".")[0]
        what = f"{name}, which is {origin}," if origin != name else name
        return Fault(
            f"to {self.verb or 'use'} this run, {what} would be imported, which may run any code; for a run that was "
            f"not made here by you, {allowed}, with plain values as params. If you trust it: --allow {module}",
            ".".join(map(str, path)),
            named.place,
            found=name,
            allowed=allowed,
            exit_code=CheckpointError.exit_code,
        )


def run_config(folder: RunFolder, allow: Sequence[str] = (), verb: str = "", trust: bool = False) -> RunConfig:
    """Read the config of a run. Every use of a run's config starts here.

    Args:
        allow, verb: as in `RunConfig`.
        trust: trust a foreign run like an own one.

    Raises:
        CheckpointError: there is no config; or it is foreign, and refers to a variable, a value, a file or a function.
        ConfigError: it cannot be read, or an item of `allow` is not the name of a module.
    """
    for module in allow:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
            raise ConfigError(f"--allow takes the name of a module such as own_network, not {module!r}")
    if not folder.config.is_file():
        bundle = "neither a bundle nor a" if verb == "serve" else "no"
        raise CheckpointError(f"{folder.path}: there is {bundle} {folder.config.name} in this folder")
    text = text_of(folder.config)
    is_trusted = trust or is_registered(hashlib.sha256(text.encode()).hexdigest())
    config = RunConfig(folder.config, text, is_trusted, tuple(allow), verb)
    if not is_trusted and (faults := list(_non_plain_faults(config))):
        raise CheckpointError(faults)
    return config


def refuse_links(folder: RunFolder) -> None:
    """Refuse a foreign run whose folder has links to files outside.

    Raises:
        CheckpointError: with the first such link.
    """
    top = folder.path.resolve()
    for path in folder.path.rglob("*") if not is_own(folder) else ():
        if path.is_symlink() and os.path.commonpath([top, os.path.realpath(path)]) != str(top):  # resolve may raise
            raise CheckpointError(
                f"{path}: this link leads out of the folder of a run that was not made here by you. Remove it, or "
                "replace it by a copy of the file"
            )


def _non_plain_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for every part of a foreign config that is not a plain value: references, bases and tags."""
    name = short(config.path)
    parse(config.text, name, [])  # its errors and bounds
    for event in yaml.parse(config.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        mark: Any = event.start_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}"
        if tag := getattr(event, "tag", None):
            yield _non_plain_fault(f"the tag {tag!r:.60}", place, config)
        if isinstance(event, yaml.ScalarEvent) and config._has_forbidden_reference(event.value):
            yield _non_plain_fault(f"the reference {event.value!r:.60}", place, config)
        if isinstance(event, yaml.ScalarEvent) and event.value == "_base_":
            yield _non_plain_fault("_base_", place, config)


def _non_plain_fault(what: str, place: str, config: RunConfig, key: str | None = None) -> Fault:
    message = (
        f"this run was not made here by you, and its config has {what}. Only plain values are read from such a run; "
        "write the value here"
    )
    if config.verb and _VARIABLE.search(what):
        message += f". If you trust it: --allow {ENVIRONMENT}"
    return Fault(message, key, place, exit_code=CheckpointError.exit_code)


# ---- names that a foreign config may have


def _names(root: Entry) -> Iterator[tuple[KeyPath, Entry]]:
    """Yield the names that a config may import: each `type` and `ref` at any depth, and the keys of other tools that
    own code may build itself."""
    named = ((path, entry) for path, entry in leaves(root) if path[-1] in ("type", "ref", "_target_", "class_path"))
    return ((path, entry) for path, entry in named if isinstance(entry.value, str) and "." in entry.value)


def _rules(path: KeyPath) -> list[_Rule]:
    """Return the rules for a key, of which one must hold. The params of a network contain parts of it; those of a task
    also an optimizer and a schedule."""
    if path[-1] == "ref":
        return []
    key = ".".join(map(str, path[:-1]))
    if _within(key, ["model.module.params"]):
        return [_NETWORK, _RULES["model.optimizer"], _RULES["model.scheduler"]]
    if "params" in path:
        return [_NETWORK]
    return [next((rule for section, rule in _RULES.items() if _within(key, [section])), _NETWORK)]


def _within(name: str, modules: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
