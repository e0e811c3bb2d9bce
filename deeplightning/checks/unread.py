"""What a user's module needs of a config, and what of a config has no effect: a module that does not take the config
gets its values from `params` alone."""

from collections.abc import Collection, Iterator
from typing import Any

from deeplightning.checks.report import Findings
from deeplightning.config import schema
from deeplightning.config.schema import Config, Target, with_keys
from deeplightning.config.source import Source
from deeplightning.config.tree import nodes
from deeplightning.faults import Notice, upwards
from deeplightning.signatures.signature import Parameter, Undecided

_READ = {
    "data": ("batch_size", "root", "num_workers", "num_splits", "fold", "sampler", "loader"),
    "model": ("network", "output", "optimizer", "scheduler", "loss", "metrics", "trainable"),
}
"""The keys that a module reads from the config; others are read by the run."""
_REQUIRED = {"data": "batch_size", "model": "optimizer"}
"""What a module that takes the config must be given."""


def check_sections(findings: Findings, config: Config, source: Source) -> None:
    """Ask for what a module needs that takes the config, and refuse what is set for one that does not.

    What a base file sets for a module that does not take the config is left out of the config: it holds only what is
    read.
    """
    for name in _READ:
        section = getattr(config, name)
        if section is None:
            continue
        required, module = f"{name}.{_REQUIRED[name]}", section.module
        try:
            is_right = module is not None and findings.answered.isdisjoint(upwards(f"{name}.module.type"))
            signature = findings.meanings.signature(module.type) if is_right else None
        except Undecided as why:
            if required not in findings.places:
                findings.leave(required, f"{module.type}: whether it takes the config: {why}")
            continue
        if signature is None or signature.config() is not None:
            _require(findings, section, name)
            continue
        known = {p.name: p for p in signature.parameters if p.keyword}
        defaults = dict(schema.defaults(type(section)))
        written = [entry.written or "" for _, entry in nodes(source.root)]
        for key in _READ[name]:
            is_referred_to = any(f"${{{name}.{key}" in text for text in written)
            if getattr(section, key) != defaults[key] and not is_referred_to:
                _refuse(findings, config, f"{name}.{key}", module, known, source)
                setattr(section, key, defaults[key])


def _require(findings: Findings, section: Any, name: str) -> None:
    key = _REQUIRED[name]
    is_given = getattr(section, key) is not None or (name == "model" and f"{name}.{key}" in findings.places)
    if not is_given:
        known = next(f.metadata for f in schema.keys(type(section)) if f.name == key)
        example = f"; for example `{key}: {known['example']}`" if known["example"] else ""
        findings.fault(f"missing: {known['doc'].partition('; null')[0]}{example}", f"{name}.{key}")


def _refuse(
    findings: Findings, config: Config, key: str, module: Target, known: dict[str, Parameter], source: Source
) -> None:
    """Report a key that a module does not read: a fault where the user has set it, a notice where a base file has."""
    below = [place for k, place in findings.places.items() if f"{k}.".startswith(f"{key}.")]
    if not any(map(source.is_top, below)):
        text = f"{key}, set by a base file, is left out: {module.type} does not take the config"
        config.notices = [*(config.notices or []), Notice(text, unasked=False, key=key)]
        return
    takes = f"set what it takes under {key.partition('.')[0]}.module.params: {', '.join(known) or 'nothing'}"
    findings.fault(f"is not read by {module.type}, which does not take the config; {takes}", key)


def rates_without_effect(cfg: Config, searched: Collection[str] = ()) -> Iterator[Notice]:
    """Report the schedule that sets the learning rate instead of the optimizer's `lr`.

    Who writes both rates knows the schedule's; who changes `lr` alone, or searches over it, may not.

    Args:
        searched: keys that a search gives values to.
    """
    if "train" not in cfg.stages:
        return
    optimizers = dict(with_keys(cfg.model.optimizer, "model.optimizer"))
    for key, schedule in with_keys(cfg.model.scheduler, "model.scheduler"):
        name = str(schedule.type).rpartition(".")[2]
        rate = {"OneCycleLR": "max_lr", "CyclicLR": "base_lr"}.get(name)
        of = key.replace("scheduler", "optimizer", 1)
        if (
            not rate
            or of not in optimizers
            or (optimizers[of].params or {}).get("lr") == (schedule.params or {}).get(rate)
        ):
            continue
        changed = cfg.written[1] if cfg.written else []
        is_alone = f"{of}.params.lr" in changed and f"{key}.params.{rate}" not in changed
        if is_alone or f"{of}.params.lr" in searched:
            yield Notice(f"{of}.params.lr has no effect: {name} sets the rate, from {key}.params.{rate}", key=key)
