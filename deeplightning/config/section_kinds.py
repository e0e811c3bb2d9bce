"""The class that the target of each section must derive from, checked by dotted paths. Imports nothing.

`signature_check` uses it for source files and live classes, `target` for built objects, `trust` for foreign configs.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from deeplightning.own_code import top_level
from deeplightning.signatures.signature import Factory


class Kind(NamedTuple):
    """What a target makes: its base class, MODULE.CLASS, and a description."""

    base: str
    words: str


KINDS = {
    "data.module": Kind("pytorch_lightning.LightningDataModule", "a LightningDataModule"),
    "model.module": Kind("pytorch_lightning.LightningModule", "a LightningModule"),
    "model.network": Kind("torch.nn.Module", "a network (torch.nn.Module)"),
    "model.loss": Kind("torch.nn.Module", "a loss (torch.nn.Module)"),
    "model.optimizer": Kind("torch.optim.Optimizer", "an optimizer (torch.optim.Optimizer)"),
    "model.scheduler": Kind(
        "torch.optim.lr_scheduler.LRScheduler", "a scheduler (torch.optim.lr_scheduler.LRScheduler)"
    ),
    "model.metrics": Kind("torchmetrics.Metric", "a metric (torchmetrics.Metric)"),
    "train.callbacks": Kind("pytorch_lightning.Callback", "a Lightning callback"),
    "logger": Kind("pytorch_lightning.loggers.Logger", "a Lightning logger"),
    "logger.extra": Kind("pytorch_lightning.loggers.Logger", "a Lightning logger"),
}

HOOK = "engine.setup_hook"
"""A target that is called for its effect, not for what it returns."""

# Modules that are not networks; only the first is a loss.
_OTHER_MODULES = {"_Loss": "a loss", "Metric": "a metric", "LightningModule": "a task"}

# Lightning callbacks that train with another value than the config has, which the run would not record, and the verb
# that finds the value beforehand.
_SEARCHERS = {"LearningRateFinder": "lr", "BatchSizeFinder": "batch"}

# Modules of the standard library that make plain values for params, such as `datetime.timedelta` for a callback.
_PLAIN = {
    "array", "collections", "datetime", "decimal", "enum", "fractions", "functools", "itertools", "json", "math",
    "operator", "pathlib", "random", "re", "statistics", "string", "types", "typing", "uuid", "zoneinfo",
    *(f"builtins.{name}" for name in (
        "bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice", "str", "tuple"
    )),
}  # fmt: skip


def role_of(key: str) -> str | None:
    """Return the role in `KINDS` of the target at a key, or None, as for a target inside params."""
    if ".params." in key:
        return None
    return next((r for r in sorted(KINDS, key=len, reverse=True) if key == r or key.startswith(f"{r}.")), None)


def misfit(paths: Sequence[str], complete: bool, role: str) -> str | None:
    """Explain why an instance of a class does not fit a section, as text that follows the name of the class.

    Args:
        paths: the dotted paths of the class and its ancestors.
        complete: whether these are all ancestors.

    Returns:
        "" if it fits, or None if unknown.
    """
    kind = KINDS[role]
    top, base = kind.base.partition(".")[0], kind.base.rpartition(".")[2]
    ancestors = {(path.partition(".")[0], path.rpartition(".")[2]) for path in paths}
    names, roots = {name for _, name in ancestors}, {root for root, _ in ancestors}
    if base in names and "lightning" in roots and "pytorch_lightning" not in roots:
        return "derives from `lightning.pytorch`; derive it from the same class of `pytorch_lightning`"
    if role == "train.callbacks" and (searcher := next((name for name in _SEARCHERS if name in names), None)):
        kept = "so the run's cfg.yaml would not have the value that it trained with"
        return f"changes a value of the config, {kept}; find it first: `deeplightning {_SEARCHERS[searcher]} CONFIG`"
    if (top, base) in ancestors or (role == "model.scheduler" and "ReduceLROnPlateau" in names):
        other = next((words for name, words in _OTHER_MODULES.items() if name in names), None)
        if other and role in ("model.network", "model.loss") and (role, other) != ("model.loss", "a loss"):
            return f"is {other}, not {kind.words}"
        return ""
    if not complete:
        return None
    parts = {"_Loss": "model.loss", "Metric": "model.metrics"}
    home = next((parts[name] for name in parts if name in names), None) or next(
        (r for r, k in KINDS.items() if (k.base.partition(".")[0], k.base.rpartition(".")[2]) in ancestors), None
    )
    hint = f"; {KINDS[home].words} belongs to {home}" if home else ""
    if role == "model.scheduler" and not home:
        hint = "; a task of your own can use it, in `configure_optimizers` and `lr_scheduler_step`"
    return f"is not {kind.words}{hint}"


def is_bound(paths: Sequence[str], is_lacking: bool, factory: Factory | None) -> bool:
    """Return whether a target inside params becomes a callable with its params bound instead of being built.

    This holds for optimizers and schedules, which a config alone cannot build. If the parameter takes a callable, it
    also holds for a class whose instances that callable returns, and for a target that lacks arguments.

    Args:
        paths: the dotted paths of a class and its ancestors; empty for a function.
        is_lacking: whether required arguments are missing in the params.
        factory: the callable that the parameter takes.
    """
    if any(misfit(paths, True, role) == "" for role in ("model.optimizer", "model.scheduler")):
        return True
    return factory is not None and (is_lacking or not set(factory.returns).isdisjoint(paths))


def no_part(path: str, role: str | None) -> str | None:
    """Explain in a sentence why the object at a dotted path must not be called, or return None if it may be.

    Python's standard library provides no part of a run. Inside params, a few of its modules may make plain values.
    """
    top = path.partition(".")[0]
    is_plain = role is None and (top.removeprefix("_") in _PLAIN or path in _PLAIN)
    if role == HOOK or is_plain or top not in sys.stdlib_module_names or getattr(top_level(top), "loader", None):
        return None  # the last: the user's own file
    wanted = KINDS[role].words if role in KINDS else "a part of a run"
    return f"`{path}` is in Python's `{top}`, which does not provide {wanted}; it is not called"
