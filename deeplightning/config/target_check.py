"""Check the targets and references of a config, at any depth, and their params."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deeplightning.config import schema
from deeplightning.config.auto_values import BALANCED, DECLARED, LISTS, WEIGHTS
from deeplightning.config.metric_check import check_monitors, set_modes
from deeplightning.config.report import Report
from deeplightning.config.schema import Config, Target, with_keys
from deeplightning.config.section_kinds import HOOK, role_of
from deeplightning.config.signature_check import Meanings, Verdict, judge
from deeplightning.config.target import is_reference, is_target
from deeplightning.config.tree import Entry, KeyPath, nodes, plain
from deeplightning.faults import Notice, nearest, upwards
from deeplightning.signatures.signature import UNKNOWN, Options, Parameter, Undecided, of_item

Wanted = Callable[[], Options]

# How many positional arguments Deep Lightning passes to a target: parameters to an optimizer, an optimizer to a
# scheduler, the training set to a sampler; None: the config to a module that takes it. And its keyword arguments, by
# the key of a target or by its full name.
GIVEN = {"data.module": None, "data.sampler": 1, "model.module": None, "model.optimizer": 1, "model.scheduler": 1}
GIVEN_BY_NAME: dict[str, dict[str, Any]] = {"data.sampler": {"batch_size": 1, "num_replicas": 1, "rank": 0, "seed": 0}}
AUTO_PARAMS = ("total_steps", "steps_per_epoch", "epochs", "T_max")
"""Params of a scheduler that may be `auto`."""

_LOADER = "torch.utils.data.DataLoader"
_LOADER_GIVEN = {"dataset": "data.module", "batch_size": "data.batch_size", "num_workers": "data.num_workers"}


def add_target(report: Report, name: str, entry: Entry, key: str, path: KeyPath, wanted: Wanted | None = None) -> None:
    """Add a target, and the targets inside its params, to the checks of the report.

    Args:
        wanted: for a target inside params, the options of its parameter.
    """
    place = entry.value["type"].place if "type" in entry.value else entry.place
    params = entry.value.get("params") or Entry({}, place)
    items = params.value if isinstance(params.value, dict) else {}
    report.places.setdefault(f"{key}.type", place)
    role = role_of(key)

    def compare() -> None:
        values = {p: plain(item) for p, item in items.items()}
        auto = [p for p, value in values.items() if value == "auto"] if role == "model.scheduler" else []
        values |= dict.fromkeys(auto)  # a number, which the run fills in
        if role == "model.network":
            values |= {p: [] if p in LISTS else 1 for p in DECLARED if values.get(p) == "auto"}
        for p in WEIGHTS if role == "model.loss" else ():
            if values.get(p) == BALANCED:
                values[p] = {"type": "torch.tensor", "params": {"data": []}}  # the run fills in the numbers
            elif meant := nearest(str(values.get(p)), [BALANCED]):
                message = f"must be a tensor or {BALANCED}, not the text {values[p]!r:.40}.{meant}"
                report.fault(message, f"{key}.params.{p}", found=values[p])
        paths = {p: (*path, "params", p) for p in items}
        secrets = report.source.secrets
        hidden = {p: secrets.text_of(at) or items[p].written or "" for p, at in paths.items() if secrets.is_env_var(at)}
        values = GIVEN_BY_NAME.get(key, {}) | GIVEN_BY_NAME.get(name, {}) | values
        given = GIVEN.get(role or key, 0)
        report.merge(judge(report.meanings, name, values, key, role=role, given=given, hidden=hidden, wanted=wanted))
        for p in set(auto) - set(AUTO_PARAMS):
            message = f"`auto` works for {', '.join(AUTO_PARAMS)}; give `{p}` a value"
            report.fault(message, f"{key}.params.{p}", found="auto")

    report.targets.append(compare)
    for param, item in items.items():
        parameter = functools.partial(report.parameter, name, param)
        add_nested(report, item, f"{key}.params.{param}", (*path, "params", param), parameter)


def add_nested(report: Report, entry: Entry, key: str, path: KeyPath, parameter: Callable[[], Parameter]) -> None:
    """Add targets and references inside params, at any depth, to the checks of the report.

    Args:
        parameter: the parameter that takes the value; inside a list or mapping, with the options there.
    """
    if isinstance(entry.value, dict):
        if is_target(plain(entry)):
            add_target(report, entry.value["type"].value, entry, key, path, lambda: parameter().allowed)
            return
        if is_reference(plain(entry)):
            ref = entry.value["ref"]
            report.targets.append(lambda: report.meaning(ref.value, f"{key}.ref", ref.place))
            return
        for name in {"_target_", "class_path"} & set(entry.value):
            if "." in (target := str(entry.value[name].value)):
                _report_foreign_target(report, f"{key}.{name}", target, parameter())
        for name, item in entry.value.items():
            add_nested(report, item, f"{key}.{name}", (*path, name), lambda: replace(parameter(), allowed=None))
    elif isinstance(entry.value, list):
        for number, item in enumerate(entry.value):
            of_one = functools.partial(lambda n: replace(parameter(), allowed=of_item(parameter().allowed, n)), number)
            add_nested(report, item, f"{key}.{number}", (*path, number), of_one)


def _report_foreign_target(report: Report, key: str, target: str, parameter: Parameter) -> None:
    """Report a target in the format of another tool, which stays a mapping. A class may build it itself: it is a fault
    only if the parameter does not allow a mapping, or is annotated with a class, or the module, of the target."""
    annotation = parameter.annotation or ""
    if parameter.allowed is not None:
        is_right = dict in parameter.allowed
    else:
        found = Meanings().known(target)  # from source, without importing
        classes = {base.rpartition(".")[2] for base in found.bases()[0]} if found is not None else set()
        is_right = classes.isdisjoint(re.findall(r"\w+", annotation)) and not target.startswith(f"{annotation}.")
    if is_right:
        text = f"{key}: the mapping is passed as it is; use `type` and `params` to build an object"
        report.source.notices.append(Notice(text, unasked=False, key=key))
    else:
        from deeplightning.config.allowed import foreign_key_hint

        report.fault(f"unknown key.{foreign_key_hint(report, key)}", key, found=key.rpartition(".")[2])


def compare(report: Report, config: Config) -> None:
    """Run all checks of targets, and of the keys that are passed on to classes."""
    for compare in report.targets:
        compare()
    _check_strategy(report, config.engine)
    _check_hook(report, config.engine.setup_hook)
    if config.data is not None:
        _check_loader(report, config.data.loader)
    if config.model is not None:
        _check_task(report, config)
        _check_groups(report, config.model)
        if "train" in config.stages:
            _check_rates(report, config.model)
    _check_modules(report, config)
    if config.model is not None and "train" in config.stages:
        check_monitors(report, config)
        set_modes(report, config)


def _check_strategy(report: Report, engine: schema.Engine) -> None:
    """Check `engine.params` against the signature of the backend's strategy."""
    backend = schema.backend_of(engine) or ("ddp" if engine.processes > 1 else None)  # as resolved later
    if backend is None:
        return
    from deeplightning.config import strategy

    classes = strategy.classes_of(backend)
    report.merge(Verdict([*strategy.misfits(backend, engine.params)]))
    for param, value in engine.params.items() if classes else ():
        if param == "timeout":  # seconds, converted to a timedelta
            continue
        name, given = classes[0], 0
        if len(classes) > 1 and param not in report.meanings.parameters(name):
            name, given = classes[1], 1
        report.param(name, param, value, "engine", f"engine.params.{param}", given)


def _check_hook(report: Report, name: str | None) -> None:
    """Check `engine.setup_hook`, which is called without arguments."""
    verdict = judge(report.meanings, name, {}, HOOK, role=HOOK) if name is not None else Verdict()
    for f in verdict.faults:
        called = "; it is called without arguments" if f.key == "engine.setup_hook.params" else ""
        report.fault(f"{f.message}{called}", "engine.setup_hook", found=name, exit_code=f.exit_code)
    for why, option in verdict.undecided.values():
        report.add_unchecked("engine.setup_hook", why, option)


def _check_loader(report: Report, options: dict[str, object]) -> None:
    """Check `data.loader` against the signature of torch's DataLoader."""
    for name, value in options.items():
        key = f"data.loader.{name}"
        if name in _LOADER_GIVEN:
            report.fault(f"{_LOADER} gets `{name}` from {_LOADER_GIVEN[name]}; remove it", key, found=name)
        else:
            report.param(_LOADER, name, value, "data.loader", key)


def _check_task(report: Report, config: Config) -> None:
    """Check that the server supports the kind of a task, and that the task has the networks, optimizers and schedulers
    that it needs by name."""
    model, task = config.model, config.model.module and config.model.module.type
    definition = (Meanings() if report.meanings.importing else report.meanings).known(task)
    needed = definition.declared_words("network_names") if definition is not None else None
    if config.train.export and definition is not None and definition.defines("inference_model"):
        from deeplightning.kinds import KINDS

        is_ours = any(base.startswith("deeplightning.task.") for base in definition.bases()[0])
        kinds = definition.declared_words("kind") if is_ours else None
        for word in sorted((kinds or set()) - {*KINDS, "supervised"}):  # supervised: set later, or never
            hint = f"use one of {', '.join(KINDS)}, or set train.export=false"
            report.fault(f"{task} has the kind {word!r}, which no server supports; {hint}", "model.module", found=word)
    for section in ("network", "optimizer", "scheduler"):
        key, given = f"model.{section}", getattr(model, section)
        if isinstance(given, dict) and needed == set():
            report.fault(f"{task} takes one {section}, not several by name", key)
        elif needed and section != "scheduler":
            all_ = {*needed, *(model.network if isinstance(model.network, dict) else ())}
            words, absent = ", ".join(sorted(all_)), sorted(all_ - set(given if isinstance(given, dict) else ()))
            if not isinstance(given, dict):
                report.fault(f"{task} needs several by name, a mapping of {words}", key)
            elif absent:
                report.fault(f"`{absent[0]}` is missing; {task} needs one for each of {words}", key)


def _check_groups(report: Report, model: schema.Model) -> None:
    """Check parameter groups against the optimizer's signature, and that patterns are regular expressions."""
    for key, optimizer in with_keys(model.optimizer, "model.optimizer"):
        for number, group in enumerate(optimizer.groups):
            here = f"{key}.groups.{number}"
            misspelt = [name for name in group if "match" not in group and nearest(name, ["match"])]
            for name in misspelt:
                report.fault("unknown key. Did you mean match?", f"{here}.{name}", found=name, allowed="match")
            if "match" not in group and not misspelt:
                message = "missing: which parameters, a regular expression, for example `match: 'bias|norm'`"
                report.fault(message, f"{here}.match")
            for name, value in group.items():
                if name == "match":
                    _check_pattern(report, value, f"{here}.match")
                else:
                    report.param(optimizer.type, name, value, key, f"{here}.{name}", 1)
    if model.trainable == []:
        report.fault("names no parameter, so nothing would learn; `all` trains every parameter", "model.trainable")
    elif isinstance(model.trainable, list):
        for number, pattern in enumerate(model.trainable):
            _check_pattern(report, pattern, f"model.trainable.{number}")


def _check_rates(report: Report, model: schema.Model) -> None:
    """Require a learning rate for every optimizer that takes one."""
    for key, optimizer in with_keys(model.optimizer, "model.optimizer"):
        if not isinstance(optimizer.type, str) or not isinstance(optimizer.params, dict):
            continue
        misspelt = any("mean lr?" in f.message and f"{key}.params" in upwards(str(f.key)) for f in report.faults)
        if "lr" in optimizer.params or misspelt:
            continue
        try:
            taken = {p.name: p.default for p in report.meanings.signature(optimizer.type).parameters if p.keyword}
        except ValueError:  # reported as a fault of the target
            continue
        except Undecided as why:
            report.add_unchecked(f"{key}.params", f"{optimizer.type}: whether it takes a learning rate: {why}")
            continue
        if "lr" in taken:
            own = "" if taken["lr"] is UNKNOWN else f" ({optimizer.type} would take {taken['lr']})"
            message = f"missing: the learning rate, which has no silent default{own}; for example `lr: 0.01`"
            report.fault(message, f"{key}.params.lr")


def _check_pattern(report: Report, text: str, key: str) -> None:
    try:
        re.compile(text)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        report.fault(f"must be a regular expression, not {text!r:.60}: {error}", key, found=repr(text)[:60])


# ---- keys of modules that take the config; others get their values from `params` only

_CONFIG_KEYS = {
    "data": ("batch_size", "root", "num_workers", "num_splits", "fold", "sampler", "loader"),
    "model": ("network", "output", "optimizer", "scheduler", "loss", "metrics", "trainable"),
}
"""The keys that a module reads from the config. The run reads the others."""
_REQUIRED_KEY = {"data": "batch_size", "model": "optimizer"}
"""The key that a module that takes the config requires."""


def _check_modules(report: Report, config: Config) -> None:
    """Report missing keys of modules that take the config, and unread keys of modules that do not.

    Unread keys that a base file sets are reset to their defaults, so that the config contains only what is read.
    """
    written = [entry.written or "" for _, entry in nodes(report.source.root)]
    for name in _CONFIG_KEYS:
        section = getattr(config, name)
        required, module = f"{name}.{_REQUIRED_KEY[name]}", section and section.module
        if module is None or not report.faulty_keys.isdisjoint(upwards(f"{name}.module.type")):
            continue  # unknown which keys it needs
        try:
            signature = report.meanings.signature(module.type)
        except Undecided as why:
            if required not in report.places:
                report.add_unchecked(required, f"{module.type}: whether it takes the config: {why}")
            continue
        if signature.config() is not None:
            key = _REQUIRED_KEY[name]
            if getattr(section, key) is None and not (name == "model" and required in report.places):
                about = next(f.metadata for f in schema.keys(type(section)) if f.name == key)
                example = f"; for example `{key}: {about['example']}`" if about["example"] else ""
                report.fault(f"missing: {about['doc'].partition('; null')[0]}{example}", required)
            continue
        known = ", ".join(p.name for p in signature.parameters if p.keyword) or signature.rest or "nothing"
        defaults = dict(schema.defaults(type(section)))
        for key in _CONFIG_KEYS[name]:
            is_read = any(re.search(rf"[{{:][\s'\"]*([.\[]*{name}[.\[\]]+|\.+\[?){key}\b", text) for text in written)
            if getattr(section, key) != defaults[key] and not is_read:
                _report_unread_key(report, config, f"{name}.{key}", module, known)
                setattr(section, key, defaults[key])


def _report_unread_key(report: Report, config: Config, key: str, module: Target, known: str) -> None:
    """Report a key that a module does not read: a fault if the user set it, a notice if a base file did."""
    below = [place for k, place in report.places.items() if f"{k}.".startswith(f"{key}.")]
    if not any(map(report.source.is_top, below)):
        text = f"{key}, set by a base file, is left out: {module.type} does not take the config"
        config.notices = [*(config.notices or []), Notice(text, unasked=False, key=key)]
        config.unread = [*(config.unread or []), f"~{key}"]
        report.source.secrets.texts.pop(tuple(key.split(".")), None)  # otherwise the saved config has it
        return
    takes = f"set what it takes under {key.partition('.')[0]}.module.params: {known}"
    report.fault(f"is not read by {module.type}, which does not take the config; {takes}", key)
