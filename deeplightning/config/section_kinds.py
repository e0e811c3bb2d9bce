"""What the target of each section must be, judged by the dotted paths of a class and its ancestors. Imports nothing.

`compare` asks it of source files and live classes, `target` of what was built, `trust` of foreign configs.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from deeplightning.own_code import top_level
from deeplightning.signatures.signature import Factory


class Kind(NamedTuple):
    """What a target makes: the class that it derives from, MODULE.CLASS, and the same in words."""

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
"""Called for what it does, not for what it makes."""

# Modules that are neither a network nor, but for the first, a loss.
_OTHER_MODULES = {"_Loss": "a loss", "Metric": "a metric", "LightningModule": "a task"}

# Callbacks of Lightning's that train with another value than the config's, which the run would not record; and the verb
# that finds the value first.
_SEARCHERS = {"LearningRateFinder": "lr", "BatchSizeFinder": "batch"}

# What of the standard library makes a plain value, which params may hold: `datetime.timedelta` for a callback.
_PLAIN = {
    "array", "collections", "datetime", "decimal", "enum", "fractions", "functools", "itertools", "json", "math",
    "operator", "pathlib", "random", "re", "statistics", "string", "types", "typing", "uuid", "zoneinfo",
    *(f"builtins.{name}" for name in (
        "bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice", "str", "tuple"
    )),
}  # fmt: skip


def role_of(key: str) -> str | None:
    """Return which of `KINDS` the target at a key is for; a target inside the params of another has none."""
    if ".params." in key:
        return None
    return next((r for r in sorted(KINDS, key=len, reverse=True) if key == r or key.startswith(f"{r}.")), None)


def misfit(paths: Sequence[str], complete: bool, role: str) -> str | None:
    """Explain why an instance of a class does not fit a section, in words that follow the name of the class.

    Args:
        paths: the dotted paths of the class and its ancestors.
        complete: whether these are all.

    Returns:
        None: it is not known; "": it is.
    """
    kind = KINDS[role]
    top, base = kind.base.partition(".")[0], kind.base.rpartition(".")[2]
    ancestors = {(path.partition(".")[0], path.rpartition(".")[2]) for path in paths}
    names, roots = {name for _, name in ancestors}, {root for root, _ in ancestors}
    if base in names and "lightning" in roots and "pytorch_lightning" not in roots:
        return "derives from `lightning.pytorch`; derive it from the same class of `pytorch_lightning`"
    if role == "train.callbacks" and (searcher := next((name for name in _SEARCHERS if name in names), None)):
        kept = "and the run's cfg.yaml would keep another than it trained with"
        return f"changes a value of the config, {kept}; find it first by `deeplightning {_SEARCHERS[searcher]} CONFIG`"
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
    return f"is not {kind.words}" + (f"; {KINDS[home].words} belongs to {home}" if home else "")


def is_bound(paths: Sequence[str], is_lacking: bool, factory: Factory | None) -> bool:
    """Return whether a target inside params stands for a callable with its params bound, not for what it makes.

    So does an optimizer or a schedule, which a config alone cannot make; and where a callable is wanted, a class whose
    instances this returns, and what lacks arguments.

    Args:
        paths: the dotted paths of a class and its ancestors; of a function nothing.
        is_lacking: whether required arguments are not among the params.
        factory: the callable that the parameter wants.
    """
    if any(misfit(paths, True, role) == "" for role in ("model.optimizer", "model.scheduler")):
        return True
    return factory is not None and (is_lacking or not set(factory.returns).isdisjoint(paths))


def no_part(path: str, role: str | None) -> str | None:
    """Explain in a sentence why the object of a dotted path must not be called, or return None if it may be.

    Python's standard library makes no part of a run. Inside params a few of its modules make plain values.
    """
    top = path.partition(".")[0]
    if role == HOOK or not _is_standard(top):
        return None
    if role is None and (top.removeprefix("_") in _PLAIN or path in _PLAIN):
        return None
    wanted = KINDS[role].words if role in KINDS else "a part of a run"
    return f"`{path}` is of Python's own `{top}`, where nothing makes {wanted}; it is not called"


def _is_standard(top: str) -> bool:
    """Return whether a module's first name refers to the standard library and not to a file of the user's."""
    spec = top_level(top) if top in sys.stdlib_module_names else None
    return top in sys.stdlib_module_names and (spec is None or spec.loader is None)
