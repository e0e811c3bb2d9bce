"""Decide what may be built from the config of a run.

A config is code: it names what is imported and called. Each run folder that is not this user's own, see
`deeplightning.config.own_runs`, is foreign. Its config is read once, holds plain values only, and the tree that its
objects are built from is the tree whose names are compared with what may be built.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from deeplightning.config.own_runs import digest_of, is_own, is_registered
from deeplightning.config.section_kinds import KINDS
from deeplightning.config.source import Source, Text, short, text_of
from deeplightning.config.target import find
from deeplightning.config.tree import Entry, KeyPath, entry_at, leaves, nodes, parse
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.own_code import LIBRARIES
from deeplightning.runfolder import RunFolder
from deeplightning.words import is_address

ENVIRONMENT = "oc.env"
"""What `--allow` takes beside modules: a foreign config may read environment variables."""

NOT_TAKEN = ("engine", "logger", "tune", "train.callbacks", "train.resume_ckpt", "model.init_from", "data.sampler")
"""Keys of a foreign config whose defaults are used instead. Launchers, hooks, environment variables, trackers and
callbacks belong to the machine that trained; a tracker's address could be anywhere."""

_NETWORKS = (*("deeplightning.model", "torch.nn"), *("torchvision.models", "torchvision.ops", "torchvision.transforms"))
_NAMED_ONLY = (*LIBRARIES, "optuna")
_VARIABLE = re.compile(r"\$\{oc\.env:\w+\}", re.ASCII)
_DECODED = re.compile(rf"\$\{{oc\.decode:{_VARIABLE.pattern}\}}", re.ASCII)


@dataclass(frozen=True)
class _Rule:
    """What a key may name.

    Attributes:
        modules: where a class must be defined, and how its name must begin.
        base: the class that it must derive from, MODULE.CLASS.
        imported: False: the section is not taken, so that only the name is looked at.
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
    section: _Rule(_NAMED_ONLY, imported=False) for section in NOT_TAKEN
}


# ---- the config of a run


@dataclass(frozen=True)
class RunConfig(Text):
    """The config of a run, read once. `deeplightning.config.examine` admits the tree that it builds from.

    Attributes:
        is_trusted: whether this user started the run on this machine, or trusts all of it.
        allow: modules that the user trusts, such as `own_network`; `oc.env` means environment variables.
        verb: what the run is asked for, for messages; "": it is only read.
    """

    is_trusted: bool
    allow: tuple[str, ...] = ()
    verb: str = ""

    def left_out(self) -> list[str]:
        """Return the overrides that replace by defaults what is not taken from a foreign config."""
        if self.is_trusted:
            return []
        root = parse(self.text, short(self.path), [])
        overrides = [f"~{key}" for key in NOT_TAKEN if entry_at(root, key.split(".")) is not None]
        # A folder to write to, and downloads.
        for key, value, kind in (("cache", "true", str), ("download", "false", bool)):
            found = entry_at(root, ("data", "module", "params", key))
            if found is not None and isinstance(found.value, kind):
                overrides.append(f"data.module.params.{key}={value}")
        data = entry_at(root, ("data", "root"))
        if data is not None and isinstance(data.value, str) and is_address(data.value):
            overrides.append("~data.root")
        return overrides

    def admit(self, source: Source) -> None:
        """Compare the names in a tree with what may be built from a foreign config.

        Args:
            source: of this config and all overrides, with its references resolved. Objects are built from it.

        Raises:
            CheckpointError: with each name that is refused, its key, the rule, and the option that allows it.
        """
        if self.is_trusted:
            return
        ignored = [
            (path, named)
            for path, named in _names(parse(self.text, short(self.path), []))
            if _within(".".join(map(str, path)), NOT_TAKEN)
        ]
        names = [*ignored, *_names(source.root)]
        faults = [fault for path, named in names if (fault := self._refusal(path, named)) is not None]
        faults += [
            _not_plain(f"the reference {found.written!r:.60}", found.place, self, key=".".join(map(str, path)))
            for path, found in nodes(source.root)
            if found.written is not None and self._refers(found.written)
        ]
        if faults:
            raise CheckpointError(faults)

    def _refers(self, text: str) -> bool:
        """Return whether a text holds a reference that is not allowed."""
        if ENVIRONMENT in self.allow:
            text = _VARIABLE.sub("", _DECODED.sub("", text))
        return "${" in text

    def _refusal(self, path: KeyPath, named: Entry) -> Fault | None:
        """Return why a name may not be imported or built; None: it may.

        A module is imported only if its name begins as the rule demands.
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
            origin = _origin(found, name)
            if isinstance(found, type) and issubclass(found, find(rule.base)) and _within(origin, rule.modules):
                return None
        allowed = "; or ".join(map(str, rules)) or "no `ref` is allowed"
        module = name.rpartition(".")[0] if _within(name, _NAMED_ONLY) else name.partition(".")[0]
        what = f"{name}, which is {origin}," if origin != name else name
        return Fault(
            f"to {self.verb or 'use'} this run, {what} would be imported, and that may run any code; of a run that was "
            f"not made here by you, {allowed}, with plain values as its params. If you trust it: --allow {module}",
            ".".join(map(str, path)),
            named.place,
            found=name,
            allowed=allowed,
            exit_code=CheckpointError.exit_code,
        )


def run_config(folder: RunFolder, allow: Sequence[str] = (), verb: str = "", trust: bool = False) -> RunConfig:
    """Read the config of a run. Every use of a run's config begins here.

    Args:
        allow, verb: as of `RunConfig`.
        trust: trust a foreign run as an own one.

    Raises:
        CheckpointError: there is no config; or it is foreign, and refers to a variable, a value, a file or a function.
        ConfigError: it cannot be read, or a word of `allow` is no module.
    """
    for module in allow:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
            raise ConfigError(f"--allow takes the name of a module such as own_network, not {module!r}")
    if not folder.config.is_file():
        bundle = "neither a bundle nor a" if verb == "serve" else "no"
        raise CheckpointError(f"{folder.path}: there is {bundle} {folder.config.name} in this folder")
    text = text_of(folder.config)
    is_trusted = trust or is_registered(digest_of(text.encode()))
    config = RunConfig(folder.config, text, is_trusted, tuple(allow), verb)
    if not is_trusted and (faults := list(_beyond_plain(config))):
        raise CheckpointError(faults)
    return config


def refuse_links(folder: RunFolder) -> None:
    """Refuse a foreign run whose folder has links to files outside of it.

    Raises:
        CheckpointError: with the first of them.
    """
    top = folder.path.resolve()
    for path in folder.path.rglob("*") if not is_own(folder) else ():
        if path.is_symlink() and not path.resolve().is_relative_to(top):
            raise CheckpointError(
                f"{path}: this link leads out of the folder of a run that was not made here by you. Remove it, or "
                "replace it by a copy of the file"
            )


def _beyond_plain(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for all in a foreign config that is not a plain value: references, bases and tags."""
    name = short(config.path)
    parse(config.text, name, [])  # its errors and bounds
    for event in yaml.parse(config.text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        mark: Any = event.start_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}"
        if tag := getattr(event, "tag", None):
            yield _not_plain(f"the tag {tag!r:.60}", place, config)
        if isinstance(event, yaml.ScalarEvent) and config._refers(event.value):
            yield _not_plain(f"the reference {event.value!r:.60}", place, config)
        if isinstance(event, yaml.ScalarEvent) and event.value == "_base_":
            yield _not_plain("_base_", place, config)


def _not_plain(what: str, place: str, config: RunConfig, key: str | None = None) -> Fault:
    message = (
        f"this run was not made here by you, and its config has {what}. Only plain values are read of such a run; "
        "write the value here"
    )
    if config.verb and _VARIABLE.search(what):
        message += f". If you trust it: --allow {ENVIRONMENT}"
    return Fault(message, key, place, exit_code=CheckpointError.exit_code)


# ---- what a foreign config may name


def _names(root: Entry) -> Iterator[tuple[KeyPath, Entry]]:
    """Yield what a config may import: the text of each `type` and `ref`, at any place, and of what own code may build
    by itself."""
    return (
        (path, entry)
        for path, entry in leaves(root)
        if path[-1] in ("type", "ref", "_target_", "class_path") and isinstance(entry.value, str) and "." in entry.value
    )


def _rules(path: KeyPath) -> list[_Rule]:
    """Return what a key may name, by any of these rules. The params of a network hold parts of it; those of a task also
    an optimizer and a schedule."""
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


def _origin(found: object, name: str) -> str:
    """Return where that is defined which a name leads to: `torch.os.system` is `posix.system`."""
    return f"{getattr(found, '__module__', None) or type(found).__module__}.{name.rpartition('.')[2]}"
