"""What a config names, at any depth, and what it gives to that, is compared with what is there."""

import functools
import re
from collections.abc import Callable
from typing import Any

from deeplightning.checks import strategy
from deeplightning.checks.allowed import known_elsewhere
from deeplightning.checks.report import Findings
from deeplightning.checks.signature_check import Meanings, Verdict, judge
from deeplightning.config import schema
from deeplightning.config.auto_values import BALANCED, DECLARED, LISTS, WEIGHTS
from deeplightning.config.schema import Config, with_keys
from deeplightning.config.section_kinds import HOOK, no_part, role_of
from deeplightning.config.target import is_reference, is_target
from deeplightning.config.tree import Entry, KeyPath, plain
from deeplightning.faults import nearest, upwards
from deeplightning.signatures.signature import UNKNOWN, Options, Undecided, of_item

Wanted = Callable[[], Options]

# How many positional arguments we give to a target: parameters to an optimizer, an optimizer to a scheduler, the
# training set to a sampler; None: the config to a module that takes it. And what we give by name: by the key of a
# target, or by its full name.
GIVEN = {"data.module": None, "data.sampler": 1, "model.module": None, "model.optimizer": 1, "model.scheduler": 1}
GIVEN_BY_NAME: dict[str, dict[str, Any]] = {"data.sampler": {"batch_size": 1, "num_replicas": 1, "rank": 0, "seed": 0}}
AUTO = ("total_steps", "steps_per_epoch", "epochs", "T_max")
"""Params of a scheduler that may be `auto`."""


_RESOLVER = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*", re.ASCII)  # as OmegaConf's grammar has it
_LOADER = "torch.utils.data.DataLoader"
_LOADER_GIVEN = {"dataset": "data.module", "batch_size": "data.batch_size", "num_workers": "data.num_workers"}


def note_target(
    findings: Findings, name: str, entry: Entry, key: str, path: KeyPath, wanted: Wanted | None = None
) -> None:
    """Put a target, and those inside its params, on the list of what is compared with what they name.

    Args:
        wanted: of a target inside params, what the parameter allows that it is for.
    """
    place = entry.value["type"].place if "type" in entry.value else entry.place
    params = entry.value.get("params") or Entry({}, place)
    items = params.value if isinstance(params.value, dict) else {}
    findings.places.setdefault(f"{key}.type", place)
    role = role_of(key)

    def compare() -> None:
        values = {p: plain(item) for p, item in items.items()}
        auto = [p for p, value in values.items() if value == "auto"] if role == "model.scheduler" else []
        values |= dict.fromkeys(auto)  # it becomes a number when the run knows it
        if role == "model.network":
            values |= {p: [] if p in LISTS else 1 for p in DECLARED if values.get(p) == "auto"}
        for p in WEIGHTS if role == "model.loss" else ():
            if values.get(p) == BALANCED:
                values[p] = {"type": "torch.tensor", "params": {"data": []}}  # the run fills in the numbers
            elif meant := nearest(str(values.get(p)), [BALANCED]):
                message = f"must be a tensor or {BALANCED}, not the text {values[p]!r:.40}.{meant}"
                findings.fault(message, f"{key}.params.{p}", found=values[p])
        paths = {p: (*path, "params", p) for p in items}
        secrets = findings.secrets
        hidden = {p: secrets.text_of(at) or items[p].written or "" for p, at in paths.items() if secrets.is_word(at)}
        values = GIVEN_BY_NAME.get(key, {}) | GIVEN_BY_NAME.get(name, {}) | values
        given = GIVEN.get(role or key, 0)
        findings.take(judge(findings.meanings, name, values, key, role=role, given=given, hidden=hidden, wanted=wanted))
        for p in set(auto) - set(AUTO):
            message = f"`auto` is known for {', '.join(AUTO)}; give `{p}` a value"
            findings.fault(message, f"{key}.params.{p}", found="auto")

    findings.targets.append(compare)
    for param, item in items.items():
        inside = functools.partial(findings.allowed, name, param)
        note_inside(findings, item, f"{key}.params.{param}", (*path, "params", param), inside)


def note_inside(findings: Findings, entry: Entry, key: str, path: KeyPath, wanted: Wanted = lambda: None) -> None:
    """Put targets and references inside params, at any depth, on the list of what is compared.

    Args:
        wanted: what the parameter allows that the value is for.
    """
    if isinstance(entry.value, dict):
        if is_target(plain(entry)):
            note_target(findings, entry.value["type"].value, entry, key, path, wanted)
            return
        if is_reference(plain(entry)):
            ref = entry.value["ref"]
            findings.targets.append(lambda: findings.meaning(ref.value, f"{key}.ref", ref.place))
            return
        for name in {"_target_", "class_path"} & set(entry.value):  # it would stay a mapping
            if "." in str(entry.value[name].value):
                findings.fault(f"unknown key.{known_elsewhere(findings, f'{key}.{name}')}", f"{key}.{name}", found=name)
        for name, item in entry.value.items():
            note_inside(findings, item, f"{key}.{name}", (*path, name))
    elif isinstance(entry.value, list):
        for number, item in enumerate(entry.value):
            of_one = functools.partial(lambda number: of_item(wanted(), number), number)
            note_inside(findings, item, f"{key}.{number}", (*path, number), of_one)


def compare(findings: Findings, config: Config) -> None:
    """Compare what the config names with what is there."""
    for compare in findings.targets:
        compare()
    _resolvers(findings, config.resolvers or {})
    _strategy(findings, config.engine)
    _hook(findings, config.engine.setup_hook)
    if config.data is not None:
        _loader(findings, config.data.loader)
    if config.model is not None:
        _networks(findings, config.model)
        _groups(findings, config.model)
        if "train" in config.stages:
            _rates(findings, config.model)


def _strategy(findings: Findings, engine: schema.Engine) -> None:
    """Compare `engine.params` with what the backend's strategy takes."""
    backend = schema.backend_of(engine) or ("ddp" if engine.processes > 1 else None)  # as it will be settled
    classes = strategy.classes_of(backend)
    if backend is not None:
        findings.take(Verdict([*strategy.misfits(backend, engine.params)]))
    for param, value in engine.params.items() if classes else ():
        name, given = classes[0], 0
        if len(classes) > 1 and param not in findings.meanings.parameters(name):
            name, given = classes[1], 1
        findings.param(name, param, value, "engine", f"engine.params.{param}", given)


def _resolvers(findings: Findings, functions: dict[str, str]) -> None:
    """Look for the functions that references may call."""
    for name, target in functions.items():
        key = f"resolvers.{name}"
        if not _RESOLVER.fullmatch(name) or name.startswith("oc."):
            rule = "letters, digits, `_`, `-` and dots; names that begin with `oc.` are OmegaConf's"
            findings.fault(f"a resolver's name consists of {rule}", key, found=name)
        elif refusal := no_part(target, None):
            findings.fault(refusal, key, found=target)
        else:
            meaning = findings.meaning(target, key)
            if meaning and (refusal := no_part(meaning.path, None)):
                findings.fault(refusal, key, found=target)
            elif meaning and meaning.kind not in ("function", "class"):
                findings.fault(f"`{target}` is no function", key, found=target)


def _hook(findings: Findings, name: str | None) -> None:
    """Look for `engine.setup_hook`, which is called without arguments."""
    verdict = judge(findings.meanings, name, {}, HOOK, role=HOOK) if name is not None else Verdict()
    for f in verdict.faults:
        called = "; it is called without arguments" if f.key == "engine.setup_hook.params" else ""
        findings.fault(f"{f.message}{called}", "engine.setup_hook", found=name, exit_code=f.exit_code)
    for why, settled_by in verdict.undecided.values():
        findings.leave("engine.setup_hook", why, settled_by)


def _loader(findings: Findings, options: dict[str, object]) -> None:
    """Compare `data.loader` with the signature of torch's DataLoader."""
    for name, value in options.items():
        key = f"data.loader.{name}"
        if name in _LOADER_GIVEN:
            findings.fault(f"{_LOADER} gets `{name}` from {_LOADER_GIVEN[name]}; remove it", key, found=name)
        else:
            findings.param(_LOADER, name, value, "data.loader", key)


def _networks(findings: Findings, model: schema.Model) -> None:
    """Compare the names of several networks, optimizers and schedulers with those that the task needs."""
    task = model.module and model.module.type
    definition = (Meanings() if findings.meanings.importing else findings.meanings).known(task)
    needed = definition.declared_words("network_names") if definition is not None else None
    for section in ("network", "optimizer", "scheduler"):
        key, given = f"model.{section}", getattr(model, section)
        if isinstance(given, dict) and needed == set():
            findings.fault(f"{task} takes one {section}, not several by name", key)
        elif needed and section != "scheduler":
            all_ = {*needed, *(model.network if isinstance(model.network, dict) else ())}
            words, absent = ", ".join(sorted(all_)), sorted(all_ - set(given if isinstance(given, dict) else ()))
            if not isinstance(given, dict):
                findings.fault(f"{task} needs several by name, a map of {words}", key)
            elif absent:
                findings.fault(f"`{absent[0]}` is missing; {task} needs one for each of {words}", key)


def _groups(findings: Findings, model: schema.Model) -> None:
    """Compare parameter groups with the optimizer's signature; patterns must be regular expressions."""
    for key, optimizer in with_keys(model.optimizer, "model.optimizer"):
        for number, group in enumerate(optimizer.groups):
            here = f"{key}.groups.{number}"
            misspelt = [name for name in group if "match" not in group and nearest(name, ["match"])]
            for name in misspelt:
                findings.fault("unknown key. Did you mean match?", f"{here}.{name}", found=name, allowed="match")
            if "match" not in group and not misspelt:
                message = "missing: which parameters, a regular expression, for example `match: 'bias|norm'`"
                findings.fault(message, f"{here}.match")
            for name, value in group.items():
                if name == "match":
                    _pattern(findings, value, f"{here}.match")
                else:
                    findings.param(optimizer.type, name, value, key, f"{here}.{name}", 1)
    if model.trainable == []:
        findings.fault("names no parameter, so nothing would learn; `all` trains what there is", "model.trainable")
    elif isinstance(model.trainable, list):
        for number, pattern in enumerate(model.trainable):
            _pattern(findings, pattern, f"model.trainable.{number}")


def _rates(findings: Findings, model: schema.Model) -> None:
    """Ask for the learning rate where an optimizer would take its own default for it."""
    for key, optimizer in with_keys(model.optimizer, "model.optimizer"):
        if not isinstance(optimizer.type, str) or not isinstance(optimizer.params, dict):
            continue
        misspelt = any("mean lr?" in f.message and f"{key}.params" in upwards(str(f.key)) for f in findings.faults)
        if "lr" in optimizer.params or misspelt:
            continue
        try:
            taken = {p.name: p.default for p in findings.meanings.signature(optimizer.type).parameters if p.keyword}
        except ValueError:  # reported as a fault of the target
            continue
        except Undecided as why:
            findings.leave(f"{key}.params", f"{optimizer.type}: whether it takes a learning rate: {why}")
            continue
        if "lr" in taken:
            own = "" if taken["lr"] is UNKNOWN else f" ({optimizer.type} would take {taken['lr']})"
            message = f"missing: the learning rate, which has no silent default{own}; for example `lr: 0.01`"
            findings.fault(message, f"{key}.params.lr")


def _pattern(findings: Findings, text: str, key: str) -> None:
    try:
        re.compile(text)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        findings.fault(f"must be a regular expression, not {text!r:.60}: {error}", key, found=repr(text)[:60])
