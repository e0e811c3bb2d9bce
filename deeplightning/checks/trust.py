"""Which run folders are this user's own, and what may be imported and built for one that is not.

A config is code: it names what is imported and called. A run that this user started on this machine leaves the SHA-256
of its `cfg.yaml` in the user's state folder, and is used as it is, wherever its folder is moved or copied. Any other
run folder is foreign: each name in its config is compared with what may be built before anything is imported, and the
sections that are about a machine and not about the model are not taken.
"""

import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import FunctionType

from deeplightning.config.kinds import KINDS
from deeplightning.config.source import Source, read
from deeplightning.config.target import find
from deeplightning.config.tree import Entry, KeyPath, leaves
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.own_code import LIBRARIES
from deeplightning.runfolder import RunFolder

log = logging.getLogger("deeplightning")

ENVIRONMENT = "oc.env"
"""What `--allow` takes beside modules: a foreign config may read environment variables."""

NOT_TAKEN = (
    *("engine", "logger", "tune", "train.callbacks", "train.resume_ckpt", "model.init_from", "data.sampler"),
    "resolvers",
)
"""Keys of a foreign config in whose place the defaults are used. Launchers, hooks, environment variables, trackers and
callbacks belong to the machine that trained; a tracker's address could be anywhere. What resolvers gave is in the
config."""

_NETWORKS = (
    *("deeplightning.model", "deeplightning.loss", "torch.nn"),
    *("torchvision.models", "torchvision.ops", "torchvision.transforms"),
)
_NAMED_ONLY = (*LIBRARIES, "optuna")


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
        rule = f"only a class that derives from {self.base} and is defined in {', '.join(self.modules)} is allowed"
        if self.base == "torch.nn.Module":
            rule += ", or a function of deeplightning.model or torchvision.models that builds one without weights"
        return rule


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


# ---- whose folder it is


def note_own(file: Path) -> None:
    """Notes that this user has written a run's config, or its kept code, on this machine. A register that cannot be
    written is no fault."""
    digest = _digest(file)
    _noted.add(digest)
    register = _register()
    try:
        register.mkdir(mode=0o700, parents=True, exist_ok=True)
        (register / digest).touch(mode=0o600)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): later commands take this run for a foreign one and ask before they import its "
            "code",
            *(register, error.strerror),
        )


def note_launched(folder: str) -> None:
    """Notes a run that a launcher started for this user on other machines, where its folder has come to lie here."""
    run = RunFolder(folder)
    for file in (run.config, run.code):
        if file.is_file():
            note_own(file)


def is_own(folder: RunFolder) -> bool:
    """Whether this user started the run on this machine, by the digest of its config as it is now."""
    return is_noted(folder.config)


def is_own_code(folder: RunFolder) -> bool:
    """Whether this user started the run on this machine with the code that its folder holds now."""
    return is_noted(folder.config) and is_noted(folder.code)


def is_noted(file: Path) -> bool:
    """Whether this user wrote a file, as it is now, on this machine: see `note_own`."""
    try:
        digest = _digest(file)
        if digest in _noted:
            return True
        register = _register().stat()
        return register.st_uid == os.geteuid() and not register.st_mode & 0o022 and (_register() / digest).is_file()
    except OSError:
        return False


def _register() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    return state / "deeplightning" / "own"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


_noted: set[str] = set()


# ---- what a foreign folder may name


def admit(folder: RunFolder, allow: Sequence[str] = (), verb: str = "use") -> list[str]:
    """Compares a foreign run's config with what may be built; an own one is admitted as it is.

    Args:
        allow: modules that the user trusts, `own_network`; `oc.env` means environment variables.
        verb: what the run is asked for, for the note.

    Returns:
        Overrides to load the config with; they come before all others. None for an own run.

    Raises:
        CheckpointError: with each name that is refused, its key, the rule, and what allows it.
        ConfigError: a word of `allow` is no module.
    """
    for module in allow:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module):
            raise ConfigError(f"--allow takes the name of a module such as own_network, not {module!r}")
    if not folder.config.is_file():
        bundle = "neither a bundle nor a" if verb == "serve" else "no"
        raise CheckpointError(f"{folder.path}: there is {bundle} {folder.config.name} in this folder")
    if is_own(folder):
        return []
    root = read(folder.config).root
    faults = [fault for path, named in _names(root) if (fault := _refusal(root, path, named, allow, verb)) is not None]
    overrides = [f"~{key}" for key in NOT_TAKEN if entry(root, key) is not None]
    cache = entry(root, "data.module.params.cache")
    if cache is not None and isinstance(cache.value, str):
        overrides.append("data.module.params.cache=true")  # a folder to be written to
    if ENVIRONMENT not in allow:
        faults += variables(folder, read(folder.config, overrides))
    if faults:
        raise CheckpointError(faults)
    left = ", ".join(text.removeprefix("~") for text in overrides if text.startswith("~"))
    log.info("%s was not made here by you: its %s are not taken", folder.path, left or "engine and logger")
    return overrides


def variables(folder: RunFolder, source: Source, section: str = "") -> list[Fault]:
    """A fault for each value of a foreign config that asks for an environment variable.

    Args:
        source: the config, without what is not taken.
        section: only the values below this key; "": all.
    """
    keys = sorted(".".join(map(str, path)) for path in source.secrets.words)
    return [
        Fault(
            "the config of this run, which was not made here by you, takes an environment variable into this value; "
            f"only plain values are allowed. If you trust it: --allow {ENVIRONMENT}",
            key,
            str(folder.config),
            exit_code=CheckpointError.exit_code,
        )
        for key in keys
        if _within(key, [section] if section else [key])
    ]


def entry(root: Entry, key: str) -> Entry | None:
    """The value at a dotted key; None: nothing."""
    found: Entry | None = root
    for part in key.split("."):
        found = found.value.get(part) if found is not None and isinstance(found.value, dict) else None
    return found


def _names(root: Entry) -> Iterator[tuple[KeyPath, Entry]]:
    """What a config may import: the text of each `type` and `ref`, at any place."""
    return (
        (path, entry)
        for path, entry in leaves(root)
        if path[-1] in ("type", "ref") and isinstance(entry.value, str) and "." in entry.value
    )


def _rule(path: KeyPath) -> _Rule | None:
    """What a key may name; None: nothing at all. Whatever is inside params is a part of a network."""
    if path[-1] == "ref":
        return None
    key = ".".join(map(str, path[:-1]))
    if "params" in path:
        return _NETWORK
    return next((rule for section, rule in _RULES.items() if _within(key, [section])), _NETWORK)


def _refusal(root: Entry, path: KeyPath, entry: Entry, allow: Sequence[str], verb: str) -> Fault | None:
    """Why a name is not imported or built; None: it may be.

    A module is imported only where its name begins as the rule has it.
    """
    name, rule = entry.value, _rule(path)
    if _within(name, allow):
        return None
    allowed_text = "no `ref` is allowed" if rule is None else str(rule)
    public = not any(part.startswith("_") for part in name.split("."))
    if rule is not None and public and _within(name, rule.modules):
        if not rule.imported:
            return None
        try:
            found = find(name)
        except ValueError:  # the name does not exist, which `check` reports
            return None
        fits = isinstance(found, type) and issubclass(found, find(rule.base))
        if fits and _within(_origin(found, name), rule.modules):
            return None
        if rule is _NETWORK and (_is_own_builder(found) or _builds_without_weights(found, _params(root, path))):
            return None
        origin = _origin(found, name)
    else:
        origin = _known_origin(name)
    foreign = not _within(name, _NAMED_ONLY)
    module = name.partition(".")[0] if foreign else name.rpartition(".")[0]
    what = f"{name}, which is {origin}," if origin != name else name
    return Fault(
        f"to {verb} this run, {what} would be imported, and that may run any code; of a run that was not made here by "
        f"you, {allowed_text}, with plain values as its params. If you trust it: --allow {module}",
        ".".join(map(str, path)),
        entry.place,
        found=name,
        allowed=allowed_text,
        exit_code=CheckpointError.exit_code,
    )


def _is_own_builder(found: object) -> bool:
    """Whether it is one of our functions that make a network: the public ones of `deeplightning.model` do nothing else,
    and of numbers alone."""
    return (
        isinstance(found, FunctionType)
        and _within(found.__module__, ["deeplightning.model"])
        and found.__qualname__ == found.__name__
    )


def _builds_without_weights(found: object, params: Entry | None) -> bool:
    """Whether it is a function of torchvision's register of networks, with params under which it downloads no weights.

    Some do so by default: `weights_backbone` of those that detect has another default than None.
    """
    if not isinstance(found, FunctionType) or not _within(found.__module__, ["torchvision.models"]):
        return False
    models = sys.modules["torchvision.models"]
    if found.__name__ not in models.list_models() or models.get_model_builder(found.__name__) is not found:
        return False
    given = params.value if params is not None else {}
    if not isinstance(given, dict):
        return False
    chosen = {name: parameter.default for name, parameter in signature(found).parameters.items()}
    chosen |= {name: entry.value for name, entry in given.items()}
    return not any(value for name, value in chosen.items() if name.startswith(("weights", "pretrained")))


def _params(root: Entry, path: KeyPath) -> Entry | None:
    """The params beside the name at a path."""
    found = root
    for part in path[:-1]:
        found = found.value[part]
    params: Entry | None = found.value.get("params")
    return params


def _within(name: str, modules: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _origin(found: object, name: str) -> str:
    """Where that is defined which a name leads to: `torch.os.system` is `posix.system`."""
    return f"{getattr(found, '__module__', None) or type(found).__module__}.{name.rpartition('.')[2]}"


def _known_origin(name: str) -> str:
    """The same, by what is imported already: a name that is refused imports nothing."""
    first, *rest = name.split(".")
    found: object = sys.modules.get(first)
    for part in rest:
        found = vars(found).get(part) if found is not None and hasattr(found, "__dict__") else None
    return name if found is None else _origin(found, name)
