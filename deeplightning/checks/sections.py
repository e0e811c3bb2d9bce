"""A tree of values becomes a checked `Config`, or all that is wrong with it at once, each fault with its place."""

import contextlib
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, is_dataclass, replace
from pathlib import Path
from typing import Any

from deeplightning.checks import space, strategy
from deeplightning.checks.compare import Meanings, Verdict, judge
from deeplightning.checks.mode import mode_of
from deeplightning.checks.report import Report, in_order
from deeplightning.config import other_tools, schema
from deeplightning.config.kinds import HOOK, no_part, role_of
from deeplightning.config.schema import Config, Target
from deeplightning.config.secrets import Secrets
from deeplightning.config.source import Source, compose
from deeplightning.config.target import find_function, is_reference, is_target
from deeplightning.config.tree import MAX_FAULTS, TAG, Entry, KeyPath, kind, nodes, plain, scalar
from deeplightning.faults import MAX_WORD, ConfigError, Fault, Notice, nearest, place_of, upwards
from deeplightning.own_code import added_roots, roots, use_import_roots
from deeplightning.static.signature import UNKNOWN, Undecided

MAX_UNKNOWN = 50  # unknown keys of one section that are told singly

# Positional arguments that we hand to a target: the config to task and data, parameters to an optimizer, an optimizer
# to a scheduler, the training set to a sampler; and what we hand to one by name.
GIVEN = {"data.module": 1, "data.sampler": 1, "model.module": 1, "model.optimizer": 1, "model.scheduler": 1}
GIVEN_BY_NAME = {"data.sampler": {"batch_size": 1, "num_replicas": 1, "rank": 0, "seed": 0}}

AUTO = ("total_steps", "steps_per_epoch", "epochs", "T_max")
"""Params of a scheduler that may be `auto`."""

_RESOLVER = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", re.ASCII)  # as OmegaConf's grammar has it

_LOADER = "torch.utils.data.DataLoader"
_LOADER_GIVEN = {"dataset": "data.module", "batch_size": "data.batch_size", "num_workers": "data.num_workers"}


def examine(
    path: str | Path, overrides: list[str] | None = None, *, importing: bool = False, beside: bool = True
) -> Report:
    """Checks the config of a file and its overrides.

    Args:
        importing: import what the config names, which decides what its source cannot; only once the text is in order.
            Else nothing is imported, and no code executed.
        beside: let names come from the config's folder too.
    """
    report = Report()
    try:
        source = compose(path, overrides)
        _find_own_code(source, beside)
        functions = {}
        if importing and source.resolvers():
            before = examine(path, overrides, beside=beside)
            if before.faults or before.config is None:
                return before
            functions = _resolvers(source, before)
        source.resolve(functions)
        report.source = source
        _examine(report, source, importing)
    except ConfigError as error:  # there is no going on
        report.config = None
        report.faults = error.faults if report.source is None else in_order(error.faults, report.source)
    return report


def section(name: str, source: Source) -> Any:
    """One section of a config by itself, whatever the others hold.

    Raises:
        ConfigError: with every fault of this section and of the overrides.
    """
    checker = _Checker(source.faults, source.secrets, source.root)
    entry = source.root.value.get(name) or Entry(None, source.root.place)
    made = checker.section(typing.get_type_hints(Config)[name], entry, name, (name,))
    faults = [fault for fault in source.faults if name in upwards(fault.key or name)]
    if faults:
        raise ConfigError(in_order(faults, source))
    return made


def _resolvers(source: Source, before: Report) -> dict[str, Callable[..., Any]]:
    """The user's resolvers, imported.

    Args:
        before: what a check without importing came to.

    Raises:
        ConfigError: one is no function that may be called.
    """
    unknown = {fault.key for fault in before.unchecked}
    env = before.config.engine.env if before.config is not None else {}
    known = {name: text for name, text in env.items() if unknown.isdisjoint(upwards(f"engine.env.{name}"))}
    functions, faults = {}, []
    with _variables(known):
        for name, entry in source.resolvers().items():
            try:
                functions[name] = find_function(entry.value)
            except ValueError as error:
                code = getattr(error, "exit_code", 2)
                faults.append(Fault(str(error), f"resolvers.{name}", entry.place, found=entry.value, exit_code=code))
    if faults:
        raise ConfigError(faults)
    return functions


@contextlib.contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def _examine(report: Report, source: Source, importing: bool) -> None:
    checker = _Checker(source.faults, source.secrets, source.root)
    for fault in source.unchecked:
        checker.answered.add(fault.key)
        checker.leave(str(fault.key), fault.message)
    report.places = checker.places
    report.config = config = checker.section(Config, source.root, "", ())
    if config is not None:
        config.secrets, config.notices, config.roots = source.secrets, source.notices or None, roots()
        checker.contradictions(config)
        checker.meanings = Meanings(importing and not source.faults)
        with _variables(config.engine.env if checker.meanings.importing else {}):  # libraries read them when imported
            checker.compare(config)
    source.faults[:] = [f for f in source.faults if f.key not in checker.meant or not f.message.startswith("missing: ")]
    if any("mean _base_?" in fault.message for fault in source.faults):  # what is missing stands in the base
        source.faults[:] = [fault for fault in source.faults if not fault.message.startswith("missing: ")]
    report.unchecked = in_order(checker.unchecked, source)
    report.faults = in_order(source.faults, source)


def _find_own_code(source: Source, beside: bool) -> None:
    """Names come from the working directory and the folders of the files that the user named; from a run folder never,
    not even where it is the working directory."""
    here = Path.cwd()
    if beside:
        use_import_roots(here, *source.folders, *added_roots())
    elif here.is_relative_to(source.folders[0].resolve()):
        use_import_roots(*added_roots())
    else:
        use_import_roots(*added_roots(), here)  # the code that the run kept comes first, where it is asked for


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """The config of a file and its overrides, checked, with everything imported that it names.

    Raises:
        ConfigError: with every fault that was found.
    """
    return examine(path, overrides, importing=True).checked()


class _Checker:
    """Walks schema and tree together. What does not fit goes to `faults`, its place is taken by the default or None,
    and reading goes on."""

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

    def section(self, cls: type, entry: Entry, key: str, path: KeyPath) -> Any:
        """An instance of a schema class."""
        if entry.value is None:
            entry = Entry({}, entry.place, entry.at)
        if not isinstance(entry.value, dict):
            allowed = f"a mapping of {', '.join(f.name for f in schema.keys(cls))}"
            self.wrong(allowed, kind(entry), key, entry.place)
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
            if name in known:
                value = self.value(hints[name], item, here, (*path, name), known[name].metadata)
                if value is not _BAD:
                    values[name] = value
            else:
                others = known if key else {**known, "_base_": None}
                hint = self.known_elsewhere(here)
                if hint or not (hint := nearest(name, others)):
                    self.foreign(item, here)
                hint = hint or _elsewhere(name)
                if not hint and issubclass(cls, Target) and "type" in entry.value:  # an argument beside `params`
                    hint = other_tools.said(f"{prefix}params.{name}") if name.isidentifier() else ""
                    self.meant.add(f"{prefix}params")
                message = f"unknown key.{hint} Known here: {', '.join(known)}"
                if name.startswith("~"):
                    message = f"there is no such key to remove: nothing below this file sets `{prefix}{name[1:]}`"
                self.fault(message, here, item.place, found=name, allowed=", ".join(known))
                self.answered |= {prefix + other for other in known if f"mean {other}?" in hint}
        for name, f in known.items():
            if name not in values and f.default is MISSING and f.default_factory is MISSING:
                example = f"; for example `{name}: {f.metadata['example']}`" if f.metadata["example"] else ""
                self.fault(f"missing: {f.metadata['doc']}{example}", prefix + name, entry.place)
                values[name] = None
        section = cls(**values)
        if isinstance(section, Target):
            if isinstance(section.type, str):
                self.target(section.type, entry, key, path)
            section.place = entry.value["type"].place if "type" in entry.value else entry.place
            section.name = key
        if isinstance(section, schema.Engine) and section.params:
            for name, item in entry.value["params"].value.items():
                self.inside(item, f"{prefix}params.{name}", (*path, "params", name))
        return section

    def value(self, hint: Any, entry: Entry, key: str, path: KeyPath, metadata: typing.Mapping[str, Any] = {}) -> Any:
        """A value of the type that the schema gives, or _BAD after a fault was noted."""
        options = _options(hint)
        if isinstance(entry.value, str) and (str not in options or int in options) and self.secrets.is_word(path):
            entry = Entry(scalar(entry.value), entry.place, entry.at)  # a variable's text stands for a number too
        value = entry.value
        for option in options:
            fits, made = self.fit(option, entry, key, path, len(options) > 1)
            if fits:
                if made is not _BAD and not self.in_range(made, entry, key, path, metadata):
                    return _BAD
                return made
        allowed = describe(hint)
        found, near = kind(entry), ""
        if self.secrets.text_of(path) is not None:
            found = f"what {self.secrets.text_of(path)} gives"
        elif isinstance(value, str):
            near = nearest(value, [str(word) for word in _literals(options)])
            if key == "engine.gpus" and value.startswith(("GPU-", "MIG-")):
                near = f" Did you mean [{value}]?"
        if not self.secrets.text_of(path):
            near = _meant(key, value, options) or near
            self.foreign(entry, key)
        self.wrong(allowed, found, key, entry.place, near)
        return _BAD

    def known_elsewhere(self, key: str, section: str | None = None) -> str:
        """What a key of another tool is here, as a sentence; `section` is where it stands, if not in a known one."""
        found = other_tools.ours(key, section)
        mean = other_tools.key_of(found) if found is not None else None
        self.meant |= {above for above in upwards(mean or "") if "." in above}
        same = mean is not None and mean.rpartition(".")[2] == key.rpartition(".")[2] and ".params." not in mean
        return f" Did you mean {mean}?" if same else other_tools.hint(found)

    def foreign(self, entry: Entry, key: str) -> None:
        """Tells what the keys of other tools inside a value are here, where nothing inside it is a key of ours."""
        known = [(path, item) for path, item in nodes(entry) if path and path[-1] in other_tools.NAMES]
        for path, item in reversed(known):
            here = ".".join([key, *map(str, path)])
            if hint := self.known_elsewhere(here, section=""):
                self.fault(f"unknown key.{hint}", here, item.place, found=str(path[-1]))

    def in_range(self, value: Any, entry: Entry, key: str, path: KeyPath, metadata: typing.Mapping[str, Any]) -> bool:
        low, high = metadata.get("low"), metadata.get("high")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return True
        written = self.secrets.text_of(path)
        found = f"what {written} gives" if written else value
        if low is not None and not value >= low:
            self.wrong(f"at least {low}", found, key, entry.place, _meant(key, value, []))
            return False
        if high is not None and not value <= high:
            self.wrong(f"at most {high}", found, key, entry.place)
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
        items = {name: self.value(inner, item, f"{key}.{name}", (*path, name)) for name, item in entry.value.items()}
        return True, _BAD if any(item is _BAD for item in items.values()) else items

    # ---- targets

    def target(self, name: str, entry: Entry, key: str, path: KeyPath) -> None:
        """Puts a target, and those inside its params, on the list of what is compared with what they name."""
        place = entry.value["type"].place if "type" in entry.value else entry.place
        params = entry.value.get("params") or Entry({}, place)
        items = params.value if isinstance(params.value, dict) else {}
        self.places.setdefault(f"{key}.type", place)
        role = role_of(key)

        def compare() -> None:
            values = {p: plain(item) for p, item in items.items()}
            auto = [p for p, value in values.items() if value == "auto"] if role == "model.scheduler" else []
            values |= dict.fromkeys(auto)  # it becomes a number when the run knows it
            hidden = {p: text for p in items if (text := self.secrets.text_of((*path, "params", p))) is not None}
            given = GIVEN.get(role or key, 0)
            values = GIVEN_BY_NAME.get(key, {}) | values
            if key == "tune.sampler" and is_grid(name):
                values.setdefault("search_space", {})  # made from tune.space
            called_with = self.loss_arguments if role == "model.loss" else None
            verdict = judge(
                self.meanings, name, values, key, role=role, given=given, hidden=hidden, called_with=called_with
            )
            self.take(verdict)
            for p in set(auto) - set(AUTO):
                message = f"`auto` is known for {', '.join(AUTO)}; give `{p}` a value"
                self.fault(message, f"{key}.params.{p}", found="auto")

        self.targets.append(compare)
        for param, item in items.items():
            self.inside(item, f"{key}.params.{param}", (*path, "params", param))

    def take(self, verdict: Verdict) -> None:
        for f in verdict.faults:
            key = str(f.key)
            beside = self.places.get(f"{key.removesuffix('.params')}.type") if key.endswith(".params") else None
            place = self.places.get(key) or beside
            self.fault(f.message, key, place, found=f.found, allowed=f.allowed, exit_code=f.exit_code)
        for key, (why, settled_by) in verdict.undecided.items():
            self.leave(key, why, settled_by)

    def leave(self, key: str, why: str, settled_by: str = "--import") -> None:
        """Notes what could not be checked, and what settles it."""
        remedy = "" if settled_by == "--import" and self.meanings.importing else f"; `{settled_by}` settles it"
        self.unchecked.append(Fault(why + remedy, key, place_of(key, self.places)))
        if len(self.unchecked) > MAX_FAULTS:
            message = f"more than {MAX_FAULTS} things, up to here, that cannot be checked without importing them"
            raise ConfigError([*self.faults, replace(self.unchecked[-1], message=message)])

    def inside(self, entry: Entry, key: str, path: KeyPath) -> None:
        """Targets and references inside params, at any depth."""
        if isinstance(entry.value, dict):
            if is_target(plain(entry)):
                self.target(entry.value["type"].value, entry, key, path)
                return
            if is_reference(plain(entry)):
                self.reference(entry.value["ref"], key)
                return
            for name in {"_target_", "class_path"} & set(entry.value):  # it would stay a mapping
                if "." in str(entry.value[name].value):
                    self.fault(f"unknown key.{self.known_elsewhere(f'{key}.{name}')}", f"{key}.{name}", found=name)
            for name, item in entry.value.items():
                self.inside(item, f"{key}.{name}", (*path, name))
        elif isinstance(entry.value, list):
            for number, item in enumerate(entry.value):
                self.inside(item, f"{key}.{number}", (*path, number))

    def reference(self, entry: Entry, key: str) -> None:
        def compare() -> None:
            try:
                self.meanings.of(entry.value)
            except ValueError as error:
                code = getattr(error, "exit_code", 2)
                self.fault(str(error), f"{key}.ref", entry.place, found=entry.value, exit_code=code)
            except Undecided as why:
                self.leave(f"{key}.ref", f"{entry.value}: {why}")

        self.targets.append(compare)

    def compare(self, config: Config) -> None:
        """Compares what the config names with what is there."""
        task: Any = config.model and config.model.module and config.model.module.type
        with contextlib.suppress(ValueError, Undecided):
            definition: Any = Meanings().of(str(task))
            self.loss_arguments = len(definition.loss_arguments()) or None
        for compare in self.targets:
            compare()
        self.resolvers(config.resolvers or {})
        if config.engine is not None:
            self.strategy(config.engine)
            self.hook(config.engine.setup_hook)
        if config.data is not None:
            self.loader(config.data.loader)
        if config.model is not None:
            self.networks(config.model)
            self.groups(config.model)
            if config.train is not None and "train" in config.stages:
                self.rates(config.model)
                self.monitors(config)
                self.modes(config)

    def strategy(self, engine: schema.Engine) -> None:
        """Compares `engine.params` with what the backend's strategy takes."""
        backend = schema.backend_of(engine) or ("ddp" if engine.processes > 1 else None)  # as it will be settled
        classes = strategy.classes_of(backend)
        for wrong in strategy.misfits(backend, engine.params) if backend is not None else ():
            self.fault(wrong.message, f"engine.params.{wrong.key}", found=wrong.found, allowed=wrong.allowed)
        for param, value in engine.params.items() if classes else ():
            name, given = classes[0], 0
            if len(classes) > 1 and param not in self.names(name):
                name, given = classes[1], 1
            self.param(name, param, value, "engine", f"engine.params.{param}", given)

    def resolvers(self, functions: dict[str, str]) -> None:
        """Looks for the functions that references may call."""
        for name, target in functions.items():
            key = f"resolvers.{name}"
            if not _RESOLVER.fullmatch(name) or name.startswith("oc."):
                rule = "letters, digits, `_`, `-` and dots; names that begin with `oc.` are OmegaConf's"
                self.fault(f"a resolver's name consists of {rule}", key, found=name)
            elif refusal := no_part(target, None):
                self.fault(refusal, key, found=target)
            else:
                try:
                    meaning = self.meanings.of(target)
                    if refusal := no_part(meaning.path, None):
                        self.fault(refusal, key, found=target)
                    elif meaning.kind not in ("function", "class"):
                        self.fault(f"`{target}` is no function", key, found=target)
                except ValueError as error:
                    self.fault(str(error), key, found=target, exit_code=getattr(error, "exit_code", 2))
                except Undecided as why:
                    self.leave(key, f"{target}: {why}")

    def hook(self, name: str | None) -> None:
        """Looks for `engine.setup_hook`, which is called without arguments."""
        verdict = judge(self.meanings, name, {}, HOOK, role=HOOK) if name is not None else Verdict()
        for f in verdict.faults:
            called = "; it is called without arguments" if f.key == "engine.setup_hook.params" else ""
            self.fault(f"{f.message}{called}", "engine.setup_hook", found=name, exit_code=f.exit_code)
        for why, settled_by in verdict.undecided.values():
            self.leave("engine.setup_hook", why, settled_by)

    def loader(self, options: dict[str, Any]) -> None:
        """Compares `data.loader` with the signature of torch's DataLoader."""
        for name, value in options.items():
            key = f"data.loader.{name}"
            if name in _LOADER_GIVEN:
                self.fault(f"{_LOADER} gets `{name}` from {_LOADER_GIVEN[name]}; remove it", key, found=name)
            else:
                self.param(_LOADER, name, value, "data.loader", key)

    def networks(self, model: schema.Model) -> None:
        """Compares the names of several networks, optimizers and schedulers with those that the task needs, and with
        one another."""
        task, needed = model.module and model.module.type, None
        with contextlib.suppress(ValueError, Undecided):
            definition: Any = (Meanings() if self.meanings.importing else self.meanings).of(str(task))
            needed = definition.network_names()
        for section in ("network", "optimizer", "scheduler"):
            key, given = f"model.{section}", getattr(model, section)
            if isinstance(given, dict) and needed == set():
                self.fault(f"{task} takes one {section}, not several by name", key)
            elif needed and section != "scheduler":
                all_ = {*needed, *(model.network if isinstance(model.network, dict) else ())}
                words, absent = ", ".join(sorted(all_)), sorted(all_ - set(given if isinstance(given, dict) else ()))
                if not isinstance(given, dict):
                    self.fault(f"{task} needs several by name, a map of {words}", key)
                elif absent:
                    self.fault(f"there is none for `{absent[0]}`; {task} needs one for each of {words}", key)
            if isinstance(given, dict) and isinstance(model.network, dict) and "model.network" not in self.answered:
                for name in [name for name in given if name not in model.network]:
                    known = ", ".join(model.network)
                    message = f"no network is called `{name}`.{nearest(name, model.network)} There are: {known}"
                    self.fault(message, f"{key}.{name}", found=name, allowed=known)

    def groups(self, model: schema.Model) -> None:
        """Compares parameter groups with the optimizer's signature; patterns must be regular expressions."""
        for key, optimizer in _named(model.optimizer, "model.optimizer"):
            for number, group in enumerate(optimizer.groups):
                here = f"{key}.groups.{number}"
                misspelt = [name for name in group if "match" not in group and nearest(name, ["match"])]
                for name in misspelt:
                    self.fault("unknown key. Did you mean match?", f"{here}.{name}", found=name, allowed="match")
                if "match" not in group and not misspelt:
                    message = "missing: which parameters, a regular expression, for example `match: 'bias|norm'`"
                    self.fault(message, f"{here}.match")
                for name, value in group.items():
                    if name == "match":
                        self.pattern(value, f"{here}.match")
                    else:
                        self.param(optimizer.type, name, value, key, f"{here}.{name}", 1)
        if model.trainable == []:
            self.fault("names no parameter, so nothing would learn; `all` trains what there is", "model.trainable")
        elif isinstance(model.trainable, list):
            for number, pattern in enumerate(model.trainable):
                self.pattern(pattern, f"model.trainable.{number}")

    def rates(self, model: schema.Model) -> None:
        """Asks for the learning rate where an optimizer would take its own default for it."""
        for key, optimizer in _named(model.optimizer, "model.optimizer"):
            if not isinstance(optimizer.type, str) or not isinstance(optimizer.params, dict):
                continue
            misspelt = any("mean lr?" in f.message and f"{key}.params" in upwards(str(f.key)) for f in self.faults)
            if "lr" in optimizer.params or misspelt:
                continue
            try:
                taken = {p.name: p.default for p in self.meanings.signature(optimizer.type).parameters if p.keyword}
            except ValueError:  # reported as a fault of the target
                continue
            except Undecided as why:
                self.leave(f"{key}.params", f"{optimizer.type}: whether it takes a learning rate: {why}")
                continue
            if "lr" in taken:
                own = "" if taken["lr"] is UNKNOWN else f" ({optimizer.type} would take {taken['lr']})"
                message = f"missing: the learning rate, which has no silent default{own}; for example `lr: 0.01`"
                self.fault(message, f"{key}.params.lr")

    def monitors(self, config: Config) -> None:
        """Compares the metrics that decide something with those that the task and the callbacks log."""
        stop, schedulers = config.train.early_stop, _named(config.model.scheduler, "model.scheduler")
        all_ = {"train.checkpoint.monitor": config.train.checkpoint.monitor}
        all_ |= {"train.early_stop.metric": stop.metric} if stop is not None else {}
        all_ |= {"tune.metric": config.tune.metric} if isinstance(config.tune, schema.Tune) else {}
        all_ |= {f"{key}.call.monitor": scheduler.call.monitor for key, scheduler in schedulers if scheduler.call}
        targets = (config.model.module, *config.train.callbacks)
        all_ |= {f"{target.name}.params.monitor": target.params.get("monitor") for target in targets[1:] if target}
        asked = {key: metric for key, metric in all_.items() if isinstance(metric, str)}
        if not asked or any(target is None or target.type is None for target in targets):  # a fault speaks of them
            return
        if any(str(key).startswith("model.module") for key in self.answered):
            return
        names, vague = self.logged(config)
        for key, metric in asked.items():
            rate = re.fullmatch(r"lr-(.+)", metric)  # of tasks with several optimizers
            several = config.model.optimizer if isinstance(config.model.optimizer, dict) else {}
            if metric in names or (rate and (rate[1].isdigit() or rate[1] in several)):
                continue
            if vague is None:
                known = ", ".join(sorted(names))
                message = f"no metric `{metric}` is logged.{nearest(metric, names)} There are: {known}"
                self.fault(message, key, found=metric, allowed=known)
            else:
                self.leave(key, f"whether `{metric}` is logged: {vague} computes names", "--dry-run")

    def modes(self, config: Config) -> None:
        """Decides which way is better of each metric that something is judged by, where the config does not say."""
        train, tune = config.train, config.tune
        sections = [("train.checkpoint", train.checkpoint, "monitor"), ("train.early_stop", train.early_stop, "metric")]
        for key, section, name in [*sections, ("tune", tune, "metric")]:
            if section is not None and section.mode is None:
                section.mode = self.mode(config, getattr(section, name), f"{key}.{name}", f"{key}.mode")
        for key, scheduler in _named(config.model.scheduler, "model.scheduler"):
            metric = scheduler.call.monitor if scheduler.call else None
            self.own_mode(config, scheduler, metric, f"{key}.call.monitor")
        for callback in train.callbacks or ():
            if callback is not None and isinstance(callback.params, dict):
                self.own_mode(config, callback, callback.params.get("monitor"), f"{callback.name}.params.monitor")

    def own_mode(self, config: Config, target: Target, metric: Any, asked: str) -> None:
        """The same for a class of torch's or Lightning's with a parameter `mode`, whose default is `min` whatever the
        metric; a user's own class keeps the default of its author."""
        params = target.params
        if not isinstance(target.type, str):
            return
        try:
            found: Any = Meanings().of(target.type)
            home = found.path.partition(".")[0]
        except (ValueError, Undecided):
            return
        is_theirs = home in ("torch", "pytorch_lightning") and "mode" in self.names(target.type)
        if is_theirs and isinstance(params, dict) and params.get("mode") is None:
            mode = self.mode(config, metric, asked, f"{target.name}.params.mode")
            if mode is not None:
                params["mode"] = mode

    def mode(self, config: Config, metric: Any, asked: str, key: str) -> schema.Mode | None:
        """What a `mode` becomes that is not given; a notice says why, or a fault asks for it.

        Args:
            asked: the key that names the metric.
            key: that of the mode.
        """
        if not isinstance(metric, str) or not self.answered.isdisjoint([*upwards(asked), *upwards(key)]):
            return None
        try:
            try:
                mode, why = mode_of(metric, config.model, Meanings())
            except Undecided:
                mode, why = mode_of(metric, config.model, self.meanings)
        except Undecided as undecided:
            self.leave(key, f"which way of {metric} is better: {undecided}")
            return None
        if mode is None:
            self.fault(f"missing: {why}; set `mode: max` or `mode: min`", key, allowed="min, max")
        else:
            config.notices = [*(config.notices or []), Notice(f"{key}: null → {mode} ({why})", False, key)]
        return mode

    def logged(self, config: Config) -> tuple[set[str], str | None]:
        """The metrics that a training logs, by the source of task and callbacks; and which of them may log others."""
        found, vague, sources, usual = {"lr"}, None, Meanings(), set[str]()
        for target in (config.model.module, *config.train.callbacks):
            try:
                definition: Any = sources.of(target.type)
                names, all_of_them = definition.logged_names()
            except (ValueError, Undecided):
                return found, str(target.type)
            found, vague = found | names, vague if all_of_them else target.type
            usual |= definition.usual_metrics()
        metrics = usual if config.model.metrics is None else set(config.model.metrics)
        losses = list(config.model.loss) if isinstance(config.model.loss, dict) and len(config.model.loss) > 1 else []
        for placeholder, words in (("{stage}", ["train", "val"]), ("{metric}", metrics), ("{loss}", losses)):
            split = [name.replace(placeholder, word) for name in found if placeholder in name for word in words]
            found = {name for name in found if placeholder not in name} | set(split)
        return {name for name in found if not name.startswith("test_")}, vague

    def pattern(self, text: Any, key: str) -> None:
        try:
            re.compile(text)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            self.fault(f"must be a regular expression, not {text!r:.60}: {error}", key, found=repr(text)[:60])

    def param(self, name: str, param: str, value: Any, section: str, key: str, given: int = 0) -> None:
        """Compares one param, which stands at `key`, with what a class takes; the class itself is another's matter."""
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

    def names(self, name: str) -> set[str]:
        """What a class takes by name."""
        try:
            return {p.name for p in self.meanings.signature(name).parameters}
        except (ValueError, Undecided):
            return set()

    # ---- what single keys cannot tell

    def contradictions(self, config: Config) -> None:
        """Keys that are each right and wrong together."""
        train, data = config.train, config.data or schema.Data(module=_NONE, batch_size=1)
        model = config.model or schema.Model(module=_NONE, optimizer=None)
        gpus = config.engine.gpus if config.engine is not None else None
        if isinstance(gpus, list):
            self.devices(gpus)
        if isinstance(config.tune, schema.Tune):
            self.search(config, config.tune)
        if not config.stages:
            self.fault("nothing to do: give at least one of train, validate, test, predict", "stages")
        if "train" in config.stages:
            if train.num_epochs is None and train.max_steps is None:
                self.fault("missing: say how long to train, for example `num_epochs: 10`", "train.num_epochs")
            for key, _ in _named(model.optimizer, "model.optimizer"):
                if f"{key}.params" not in self.places:
                    self.fault("missing: the optimizer's settings, for example `params: {lr: 0.01}`", f"{key}.params")
        if data.num_splits is not None and data.num_splits < 2:
            message = f"must be at least 2, not {data.num_splits}; with 10, one tenth of the training set validates"
            self.fault(message, "data.num_splits", found=str(data.num_splits), allowed="at least 2")
        for key, number in (
            ("train.val_every_n_epoch", train.val_every_n_epoch),
            ("train.checkpoint.every_n_epochs", train.checkpoint.every_n_epochs),
        ):
            if number is not None and not (0 < number <= 1 or (number > 1 and number % 1 == 0)):
                self.wrong("a whole number of epochs, or a fraction between 0 and 1", number, key)
        if train.limit_batches is not None and train.limit_batches.train == 0:
            allowed = "at least 1 batch, or a fraction above 0; to validate alone set `train.num_epochs=0`"
            self.wrong(allowed, train.limit_batches.train, "train.limit_batches.train")
        for name, part in vars(train.limit_batches).items() if train.limit_batches else ():
            if isinstance(part, float) and not 0 <= part <= 1:
                allowed = "a whole number of batches, or a fraction between 0 and 1"
                self.wrong(allowed, part, f"train.limit_batches.{name}")

    def devices(self, gpus: list[int | str]) -> None:
        """What a list of GPUs says that no machine could have."""
        ids = [entry for entry in gpus if isinstance(entry, str)]
        wrong = [entry for entry in ids if not entry.startswith(("GPU-", "MIG-"))]
        if wrong:
            number = f" Did you mean {wrong[0]}, without quotes?" if wrong[0].isdecimal() else ""
            self.wrong(
                "indexes, or ids that begin with GPU- or MIG- (`nvidia-smi -L`)", wrong[0], "engine.gpus", near=number
            )
        elif len(set(gpus)) < len(gpus):
            self.wrong("different device ids", gpus, "engine.gpus")
        elif ids and len(ids) < len(gpus):
            self.wrong("either indexes or ids, not both", gpus, "engine.gpus")

    def search(self, config: Config, tune: schema.Tune) -> None:
        """What the block `tune` says by itself; whether the values of its space are right is seen with each of them."""
        if isinstance(tune.space, dict):
            grid = tune.sampler is not None and is_grid(tune.sampler.type) and "search_space" not in tune.sampler.params
            for name, message in space.faults(tune.space, grid):
                self.fault(message, f"tune.space.{name}".rstrip("."))
        if "train" not in config.stages:
            self.fault("a search trains: add `train` to the stages", "stages")
        if config.train is not None and config.train.resume_ckpt is not None:
            message = "the trials of a search begin each by itself; for weights to start from take `model.init_from`"
            self.fault(message, "train.resume_ckpt")


def is_grid(sampler: Any) -> bool:
    """Whether a sampler goes through a grid, which it must be given."""
    return isinstance(sampler, str) and sampler.startswith("optuna.") and sampler.endswith(".GridSampler")


_BAD: Any = object()
_NONE = Target(type="none.none")


def _named(targets: Any, key: str) -> list[tuple[str, Any]]:
    """The targets of a key that takes one or several by name, each with its own key."""
    if isinstance(targets, dict):
        return [(f"{key}.{name}", target) for name, target in targets.items() if isinstance(target, Target)]
    return [(key, targets)] if isinstance(targets, Target) else []


def _elsewhere(name: str, cls: type = Config, path: str = "") -> str:
    """` Did you mean …?` with the whole key, where a word is a key of another section."""
    hints = typing.get_type_hints(cls)
    for f in schema.keys(cls):
        here = f"{path}{f.name}"
        if f.name == name and path:
            return f" Did you mean {here}?"
        for option in _options(hints[f.name]):
            if is_dataclass(option) and option is not Target:
                found = _elsewhere(name, typing.cast(type, option), f"{here}.")
                if found:
                    return found
    return ""


def _meant(key: str, given: Any, options: list[Any]) -> str:
    """` Did you mean …?` for a value that other tools have here, or one that lacks the mapping around it."""
    role = role_of(key)
    found = other_tools.value(key, given)
    if found is None and given is not None:
        for option in options:
            if isinstance(option, type) and issubclass(option, Target):
                name = other_tools.class_of(role, given) or (given if isinstance(given, str) and "." in given else None)
                found = f"{{type: {name}}}" if name and len(name) < MAX_WORD else None
            elif typing.get_origin(option) is list and key == "train.callbacks":
                found = "[{type: MODULE.CLASS}]"
            elif is_dataclass(option) and not isinstance(given, dict | list):
                found = _wrapped(typing.cast(type, option), given)
    return f" Did you mean {found}?" if found else ""


def _wrapped(cls: type, given: str | float) -> str | None:
    """A value inside the mapping that a section is: as its first key where it fits there."""
    first, *others = schema.keys(cls)
    options = _options(typing.get_type_hints(cls)[first.name])
    fits = type(given) in options or (type(given) is int and float in options) or given in _literals(options)
    required = [f for f in others if f.default is MISSING and f.default_factory is MISSING]
    if len(str(given)) > MAX_WORD or not (fits or first.metadata["example"]):
        return None
    items = [f"{first.name}: {given if fits else first.metadata['example']}"]
    return "{" + ", ".join([*items, *(f"{f.name}: {f.metadata['example']}" for f in required)]) + "}"


def _literals(options: list[Any]) -> list[Any]:
    return [word for o in options if typing.get_origin(o) is typing.Literal for word in typing.get_args(o)]


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


def describe(hint: Any, metadata: typing.Mapping[str, Any] = types.MappingProxyType({})) -> str:
    """What a key takes, in words."""
    words = " or ".join(dict.fromkeys(_words(option) for option in _options(hint)))
    bounds = {"at least": metadata.get("low"), "at most": metadata.get("high")}
    return ", ".join([words, *(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)])


def _options(hint: Any) -> list[Any]:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return list(typing.get_args(hint)) if union else [hint]
