"""A tree of values becomes a checked `Config`, or all that is wrong with it at once, each fault with its place."""

import inspect
import os
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from deeplightning.config import schema
from deeplightning.config.fault import ConfigError, Fault
from deeplightning.config.interpolation import Secrets
from deeplightning.config.schema import Config, Target
from deeplightning.config.source import Source, read
from deeplightning.config.target import add_import_roots, faults_of, find, is_reference, is_target, nearest
from deeplightning.config.tree import Entry, KeyPath, kind, plain, scalar

MAX_UNKNOWN = 50  # unknown keys of one section that are told singly

# Words of older configs, and what says the same today.
RENAMED = {
    "train.ckpt_resume_path": "train.resume_ckpt",
    "data.total_batch_size": "data.batch_size (it counts per process)",
    "model.scheduler.call.interval=batch": "step",
}

# Positional arguments that we hand to a target: the config to task and data, parameters to an optimizer, an optimizer
# to a scheduler.
_GIVEN = {"data.module": 1, "model.module": 1, "model.optimizer": 1, "model.scheduler": 1}

# What a target must be: a class whose name stands among the bases of what the target names. A function passes: only
# its result tells.
_KINDS = {
    "data.module": ("LightningDataModule", "a LightningDataModule"),
    "model.module": ("LightningModule", "a LightningModule"),
    "model.network": ("Module", "a network (torch.nn.Module)"),
    "model.loss": ("Module", "a loss (torch.nn.Module)"),
    "model.optimizer": ("Optimizer", "an optimizer (torch.optim.Optimizer)"),
    "model.scheduler": ("LRScheduler", "a scheduler (torch.optim.lr_scheduler.LRScheduler)"),
    "model.metrics": ("Metric", "a metric (torchmetrics.Metric)"),
    "train.callbacks": ("Callback", "a Lightning callback"),
    "logger": ("Logger", "a Lightning logger"),
    "logger.extra": ("Logger", "a Lightning logger"),
}


# The classes that `engine.params` go to, by backend: what the first does not name goes on to the second, which is given
# the network. An installed Lightning knows them all, whether their packages are there or not.
_DDP = ("pytorch_lightning.strategies.DDPStrategy", "torch.nn.parallel.DistributedDataParallel")
_STRATEGIES = {
    "ddp": _DDP,
    "horovod": _DDP,
    "dp": _DDP,
    **dict.fromkeys(
        (word for word in typing.get_args(schema.Backend) if word.startswith("deepspeed")),
        ("pytorch_lightning.strategies.DeepSpeedStrategy",),
    ),
}

# Modules that are neither a network nor, but for the first, a loss.
_OTHER_MODULES = {"_Loss": "a loss", "Metric": "a metric", "LightningModule": "a task"}


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """The checked config of a file and its overrides.

    Raises:
        ConfigError: with every fault that was found.
    """
    source = read(path, overrides)
    add_import_roots(Path.cwd(), source.folder)
    faults = list(source.faults)
    checker = _Checker(faults, source.secrets)
    config = checker.section(Config, source.root, "", ())
    if config is None:
        raise ConfigError(_in_order(faults, source))
    config.secrets = source.secrets
    checker.contradictions(config)
    os.environ.update(config.engine.env)  # before any target is imported: libraries read their variables then
    for check in checker.targets:
        check()
    if config.engine is not None:
        checker.strategy(config.engine)
    if faults:
        raise ConfigError(_in_order(faults, source))
    return config


def _in_order(faults: list[Fault], source: Source) -> list[Fault]:
    """Faults in the order of the file, each once; no value from the environment in their words."""

    def position(fault: Fault) -> tuple[str, int, int]:
        name, line, column = ([*(fault.place or "").rsplit(":", 2), "", ""])[:3]
        return (name, int(line), int(column)) if line.isdigit() and column.isdigit() else (fault.place or "", 0, 0)

    clean = [Fault(source.secrets.redact(f.message), f.key, f.place and source.secrets.redact(f.place)) for f in faults]
    return sorted(dict.fromkeys(clean), key=position)


class _Checker:
    """Walks schema and tree together. What does not fit goes to `faults`, its place is taken by the default or None,
    and reading goes on."""

    def __init__(self, faults: list[Fault], secrets: Secrets):
        self.faults, self.secrets = faults, secrets
        self.places: dict[str, str] = {}
        self.answered = {fault.key for fault in faults}  # keys that a fault already speaks of
        self.targets: list[Callable[[], None]] = []

    def fault(self, message: str, key: str, place: str | None = None) -> None:
        if self.answered.isdisjoint(_upwards(key)):
            self.answered.add(key)
            self.faults.append(
                Fault(message, key, place or next((self.places[k] for k in _upwards(key) if k in self.places), None))
            )

    def section(self, cls: type, entry: Entry, key: str, path: KeyPath) -> Any:
        """An instance of a schema class."""
        if entry.value is None:
            entry = Entry({}, entry.place, entry.at)
        if not isinstance(entry.value, dict):
            self.fault(
                f"must be a mapping of {', '.join(f.name for f in schema.keys(cls))}, not {kind(entry)}",
                key,
                entry.place,
            )
            return None
        known = {f.name: f for f in schema.keys(cls)}
        hints = typing.get_type_hints(cls)
        prefix = f"{key}." if key else ""
        values: dict[str, Any] = {}
        unknown = [name for name in entry.value if name not in known]
        if len(unknown) > MAX_UNKNOWN:
            message = (
                f"{len(unknown)} unknown keys, such as {unknown[0]}; is this a config? Known here: {', '.join(known)}"
            )
            self.fault(message, key, entry.value[unknown[0]].place)
            return None
        for name, item in entry.value.items():
            here = prefix + name
            self.places[here] = item.place
            if name in known:
                value = self.value(hints[name], item, here, (*path, name), known[name].metadata)
                if value is not _BAD:
                    values[name] = value
            else:
                hint = f" Today it is {RENAMED[here]}." if here in RENAMED else nearest(name, known)
                self.fault(f"unknown key.{hint} Known here: {', '.join(known)}", here, item.place)
                self.answered |= {prefix + other for other in known if f"mean {other}?" in hint}
        for name, field in known.items():
            if name not in values and field.default is MISSING and field.default_factory is MISSING:
                example = f"; for example `{name}: {field.metadata['example']}`" if field.metadata["example"] else ""
                self.fault(f"missing: {field.metadata['doc']}{example}", prefix + name, entry.place)
                values[name] = None
        if issubclass(cls, Target) and isinstance(values.get("type"), str):
            self.target(values["type"], entry, key, path)
        section = cls(**values)
        if isinstance(section, Target):
            section.place = entry.value["type"].place if "type" in entry.value else entry.place
            section.name = key
        return section

    def value(self, hint: Any, entry: Entry, key: str, path: KeyPath, metadata: typing.Mapping[str, Any] = {}) -> Any:
        """A value of the type that the schema gives, or _BAD after a fault was noted."""
        options = list(typing.get_args(hint)) if typing.get_origin(hint) in (types.UnionType, typing.Union) else [hint]
        if isinstance(entry.value, str) and str not in options and self.secrets.is_word(path):
            entry = Entry(scalar(entry.value), entry.place, entry.at)  # a variable's text stands for a number too
        value = entry.value
        for option in options:
            fits, made = self.fit(option, entry, key, path, len(options) > 1)
            if fits:
                if made is not _BAD and not self.in_range(made, entry, key, metadata):
                    return _BAD
                return made
        allowed = " or ".join(dict.fromkeys(_words(option) for option in options))
        found, near = kind(entry), ""
        if self.secrets.text_of(path) is not None:
            found = f"what {self.secrets.text_of(path)} gives"
        elif isinstance(value, str):
            words = [str(w) for o in options if typing.get_origin(o) is typing.Literal for w in typing.get_args(o)]
            renamed = RENAMED.get(f"{key}={value}")
            near = f" Did you mean {renamed}?" if renamed else nearest(value, words)
        self.fault(f"must be {allowed}, not {found}" + (near and f".{near}"), key, entry.place)
        return _BAD

    def in_range(self, value: Any, entry: Entry, key: str, metadata: typing.Mapping[str, Any]) -> bool:
        low, high = metadata.get("low"), metadata.get("high")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        if low is not None and not value >= low:
            self.fault(f"must be at least {low}, not {value}", key, entry.place)
            return False
        if high is not None and not value <= high:
            self.fault(f"must be at most {high}, not {value}", key, entry.place)
            return False
        return True

    def fit(self, option: Any, entry: Entry, key: str, path: KeyPath, one_of_several: bool) -> tuple[bool, Any]:
        """Whether this is the option that the value is meant for, and what it makes of it."""
        value, origin = entry.value, typing.get_origin(option)
        if option is Any:
            return True, plain(entry)
        if option is type(None):
            return value is None, None
        if origin is typing.Literal:
            return any(value == word and type(value) is type(word) for word in typing.get_args(option)), value
        if option is float:
            return isinstance(value, int | float) and not isinstance(value, bool), value
        if option is int:
            whole = isinstance(value, int) and not isinstance(value, bool)
            return whole, value
        if option in (str, bool):
            if option is str and isinstance(value, str) and value.startswith("~/"):
                value = str(Path(value).expanduser())
            return isinstance(value, option), value
        if origin is list:
            if not isinstance(value, list):
                return False, _BAD
            (inner,) = typing.get_args(option)
            items = [self.value(inner, item, f"{key}.{n}", (*path, n)) for n, item in enumerate(value)]
            return True, _BAD if any(item is _BAD for item in items) else items
        if origin is dict:
            return self.mapping(option, entry, key, path)
        assert isinstance(option, type)
        assert is_dataclass(option)
        if not isinstance(value, dict) and (one_of_several or value is not None):
            return False, _BAD
        if one_of_several and issubclass(option, Target) and _are_named(entry, option):
            return False, _BAD
        return True, self.section(option, entry, key, path)

    def mapping(self, option: Any, entry: Entry, key: str, path: KeyPath) -> tuple[bool, Any]:
        _, inner = typing.get_args(option)
        if entry.value is None and inner is Any:
            return True, {}
        if not isinstance(entry.value, dict):
            return False, _BAD
        for name, item in entry.value.items():
            self.places[f"{key}.{name}"] = item.place
        items = {name: self.value(inner, item, f"{key}.{name}", (*path, name)) for name, item in entry.value.items()}
        return True, _BAD if any(item is _BAD for item in items.values()) else items

    # ---- targets

    def target(self, name: str, entry: Entry, key: str, path: KeyPath) -> None:
        """Puts a target, and those inside its params, on the list of what is compared with real signatures."""
        params = entry.value.get("params") or Entry(
            {}, entry.value["type"].place if "type" in entry.value else entry.place
        )
        items = params.value if isinstance(params.value, dict) else {}

        role = _role(key, _GIVEN)
        given = _GIVEN[role] if role else 0
        place = entry.value["type"].place if "type" in entry.value else entry.place

        def check() -> None:
            values = {p: plain(item) for p, item in items.items()}
            if role == "model.scheduler":  # `auto` becomes a number when the run knows it
                values = {p: None if value == "auto" else value for p, value in values.items()}
            hidden = {p: text for p in items if (text := self.secrets.text_of((*path, "params", p))) is not None}
            places = {f"{key}.params.{p}": item.place for p, item in items.items()} | {f"{key}.params": params.place}
            for fault in self.wrong_kind(name, key) or faults_of(name, values, given, key, hidden):
                self.fault(fault.message, str(fault.key), places.get(str(fault.key), place))

        self.targets.append(check)
        for param, item in items.items():
            self.inside(item, f"{key}.params.{param}", (*path, "params", param))

    def inside(self, entry: Entry, key: str, path: KeyPath) -> None:
        """Targets and references inside params, at any depth."""
        if isinstance(entry.value, dict):
            if is_target(plain(entry)):
                self.target(entry.value["type"].value, entry, key, path)
                return
            if is_reference(plain(entry)):
                self.reference(entry.value["ref"], key)
                return
            for name, item in entry.value.items():
                self.inside(item, f"{key}.{name}", (*path, name))
        elif isinstance(entry.value, list):
            for number, item in enumerate(entry.value):
                self.inside(item, f"{key}.{number}", (*path, number))

    def reference(self, entry: Entry, key: str) -> None:
        def check() -> None:
            try:
                find(entry.value)
            except ValueError as error:
                self.fault(str(error), f"{key}.ref", entry.place)

        self.targets.append(check)

    def wrong_kind(self, name: str, key: str) -> list[Fault]:
        role = _role(key, _KINDS)
        if role is None:
            return []
        try:
            found = find(name)
        except ValueError:
            return []
        base, words = _KINDS[role]
        if not isinstance(found, type):
            return []
        bases = {c.__name__ for c in found.__mro__}
        if base in bases or (role == "model.scheduler" and "ReduceLROnPlateau" in bases):
            modules = {c.__module__.partition(".")[0] for c in found.__mro__}
            if "lightning" in modules and "pytorch_lightning" not in modules:
                message = (
                    f"{name} derives from `lightning.pytorch`; derive it from the same class of `pytorch_lightning`"
                )
                return [Fault(message, f"{key}.type")]
            other = next(
                (w for b, w in _OTHER_MODULES.items() if b in bases and role in ("model.network", "model.loss")), None
            )
            if other is None or (role == "model.loss" and other == "a loss"):
                return []
            return [Fault(f"{name} is {other}, not {words}", f"{key}.type")]
        return [Fault(f"{name} is not {words}", f"{key}.type")]

    def strategy(self, engine: schema.Engine) -> None:
        """Compares `engine.params` with the signatures of the classes that they go to."""
        classes = _STRATEGIES.get(engine.backend or "", ())
        for param, value in engine.params.items() if classes else ():
            name = next((c for c in classes if param in inspect.signature(find(c)).parameters), classes[-1])
            given = int(name == _DDP[-1])
            for fault in faults_of(name, {param: value}, given, "engine"):
                if fault.key != "engine.params":  # Lightning gives what the class needs besides
                    self.fault(fault.message, str(fault.key))

    # ---- what single keys cannot tell

    def contradictions(self, config: Config) -> None:
        """Keys that are each right and wrong together."""
        train, data = config.train, config.data or schema.Data(module=_NONE, batch_size=1)
        model = config.model or schema.Model(module=_NONE, optimizer=None)
        for key, value, default in _later(config):
            words = "null" if default is None else default
            found = "" if is_dataclass(value) else f", not {value}"
            self.fault(f"not available in this version; leave it at {words}{found}", key)
        if not config.stages:
            self.fault("nothing to do: give at least one of train, validate, test, predict", "stages")
        if "train" in config.stages:
            if train.num_epochs is None and train.max_steps is None:
                self.fault("missing: say how long to train, for example `num_epochs: 10`", "train.num_epochs")
            named = model.optimizer if isinstance(model.optimizer, dict) else {"": model.optimizer}
            for name, optimizer in named.items():
                key = f"model.optimizer.{name}".rstrip(".")
                if optimizer is not None and f"{key}.params" not in self.places:
                    self.fault("missing: the optimizer's settings, for example `params: {lr: 0.01}`", f"{key}.params")
        if data.num_splits is not None and data.num_splits < 2:
            message = f"must be at least 2, not {data.num_splits}; with 10, one tenth of the training set validates"
            self.fault(message, "data.num_splits")
        elif data.num_splits is not None and data.fold >= data.num_splits:
            message = f"must be 0 to {data.num_splits - 1}, since data.num_splits is {data.num_splits}; not {data.fold}"
            self.fault(message, "data.fold")
        for key, number in (
            ("train.val_every_n_epoch", train.val_every_n_epoch),
            ("train.checkpoint.every_n_epochs", train.checkpoint.every_n_epochs),
        ):
            if number is not None and not (0 < number <= 1 or (number > 1 and float(number).is_integer())):
                self.fault(f"must be a whole number of epochs, or a fraction between 0 and 1, not {number}", key)
        for name, part in vars(train.limit_batches).items() if train.limit_batches else ():
            if isinstance(part, float) and not 0 <= part <= 1:
                message = f"must be a whole number of batches, or a fraction between 0 and 1, not {part}"
                self.fault(message, f"train.limit_batches.{name}")


_BAD: Any = object()
_NONE = Target(type="none.none")


def _role(key: str, roles: typing.Iterable[str]) -> str | None:
    """What the target at a key is for; a target inside the params of another has no role."""
    if ".params." in key:
        return None
    return next((r for r in sorted(roles, key=len, reverse=True) if key == r or key.startswith(f"{r}.")), None)


def _are_named(entry: Entry, cls: type) -> bool:
    """Whether a mapping holds several targets by name rather than being one."""
    if not entry.value or any(f.name in entry.value for f in schema.keys(cls)):
        return False
    return all(isinstance(item.value, dict) for item in entry.value.values())


def _words(option: Any) -> str:
    """What a type allows, in words."""
    simple = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    if option in simple:
        return simple[option]
    origin = typing.get_origin(option)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(option)))
    if origin is list:
        return "a list"
    if origin is dict:
        return "a mapping of names" if typing.get_args(option)[1] is not Any else "a mapping"
    if isinstance(option, type) and issubclass(option, Target):
        return "a target {type: MODULE.CLASS, params: {…}}"
    return "a mapping of " + ", ".join(f.name for f in schema.keys(option))


def _later(section: Any, key: str = "") -> typing.Iterator[tuple[str, Any, Any]]:
    """Keys that this version does not serve yet and that are set to something."""
    for f in schema.keys(section):
        value, here = getattr(section, f.name), f"{key}.{f.name}".lstrip(".")
        default = f.default_factory() if f.default is MISSING and f.default_factory is not MISSING else f.default
        if f.metadata["later"] and value != default:
            yield here, value, default
        elif is_dataclass(value):
            yield from _later(value, here)


def _upwards(key: str) -> typing.Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]
