"""Applies the rules of combinations to a config, or to its section `serve` alone."""

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from deeplightning.checks.combinations import RULES, Rule
from deeplightning.config.schema import Config, Engine, Serve, Target, plain
from deeplightning.config.tree import line
from deeplightning.faults import Fault, upwards


def conflicts(
    cfg: Config, asked: Engine, places: Mapping[str, str], skip: Callable[[str], bool] = lambda key: False
) -> Iterator[tuple[Rule, Fault]]:
    """Each rule that a config breaks, with the fault to tell.

    Args:
        cfg: a whole config, as it will run.
        asked: the engine as it was asked for, its backend in today's word.
        places: dotted key → the place that set it.
        skip: whether a key is wrong by itself, and says nothing of others.
    """
    for rule in RULES:
        if skip(rule.key) or skip(rule.other) or not rule.broken(cfg, asked):
            continue
        value, other = _value(cfg, rule.key, asked), _value(cfg, rule.other, asked)
        at = f" ({places[rule.other]})" if rule.other in places else ""
        message = f"{value} does not go with {rule.other}: {other}{at}: {rule.why}; {rule.remedy}"
        set_ = [key for key in (*upwards(rule.key), *upwards(rule.other)) if key in places]
        place = places[set_[0]] if set_ else None
        yield rule, Fault(message, rule.key, place, found=value, allowed=rule.remedy, exit_code=rule.exit_code)


def _value(cfg: Config, key: str, asked: Engine) -> str:
    """A key's value in one short line; a section by the names in it."""
    words: dict[str, object] = {"engine.backend": asked.backend, "engine.precision": asked.precision}
    value: object = words.get(key, cfg)
    for name in key.split(".") if key not in words else ():
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if isinstance(value, list):
        return "[" + ", ".join(str(v.type if isinstance(v, Target) else v) for v in value) + "]"
    return value.type if isinstance(value, Target) else line(plain(value))


def server_conflicts(serve: Serve) -> Iterator[Rule]:
    """The rules that the section `serve` breaks by itself."""
    cfg: Any = SimpleNamespace(serve=serve)
    return (rule for rule in RULES if rule.key.startswith("serve.") and rule.broken(cfg, Engine()))
