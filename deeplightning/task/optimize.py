"""What of a network learns, and how: `model.trainable`, `optimizer` and `scheduler` become torch's objects."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from deeplightning.config.target import build
from deeplightning.task.errors import MisfitError


def freeze(network: nn.Module, wanted: str | list[str]) -> None:
    """Leaves gradients to the parameters that `model.trainable` names: all, head (the last layer), or patterns.

    Raises:
        MisfitError: a pattern matches no parameter's name, or nothing is left to learn.
    """
    if wanted == "all":
        return
    parameters = dict(network.named_parameters())
    if not wanted or not parameters:
        found = "names no parameter" if parameters else f"{type(network).__name__} has no parameters"
        raise MisfitError(f"model.trainable: {found}, so nothing would learn; `all` trains what there is")
    if wanted == "head":
        last = next(reversed(parameters)).rpartition(".")[0]
        chosen = {name for name in parameters if name.rpartition(".")[0] == last}
    else:
        chosen = set()
        for pattern in wanted:
            chosen |= set(_matching(pattern, parameters, "model.trainable"))
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)


def optimizers(network: nn.Module, model: Any, trainer: pl.Trainer) -> Any:
    """What `configure_optimizers` returns for one network.

    Args:
        model: the config's section `model`.

    Raises:
        MisfitError: a group matches nothing, or the schedule lacks its metric or a number.
    """
    target = model.optimizer
    if target is None:
        raise MisfitError(
            "model.optimizer: this task needs one, for example {type: torch.optim.SGD, params: {lr: 0.01}}"
        )
    optimizer = build(target, list(_groups(network, target.groups)))
    for group in target.groups:
        if unknown := [name for name in group if name not in ("match", *optimizer.defaults)]:
            known = ", ".join(optimizer.defaults)
            # torch keeps any word in a group, and nothing would come of it
            raise MisfitError(f"model.optimizer.groups: {target.type} has no `{unknown[0]}`; a group takes {known}")
    if model.scheduler is None:
        return optimizer
    scheduler, call = model.scheduler, model.scheduler.call
    built = build(scheduler, optimizer, **_run_time_numbers(scheduler.params, trainer))
    entry = {"scheduler": built, "interval": call.interval, "frequency": call.frequency}
    if call.monitor is not None:
        entry["monitor"] = call.monitor
    elif isinstance(built, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise MisfitError("model.scheduler.call.monitor: ReduceLROnPlateau needs a metric, for example val_loss")
    return {"optimizer": optimizer, "lr_scheduler": entry}


def _groups(network: nn.Module, groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Parameters that learn, in groups: those that match a pattern with its values, then the others."""
    left = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for group in groups:
        if "match" not in group:
            raise MisfitError(f"model.optimizer.groups: {group} lacks `match`, the pattern of its parameters' names")
        names = _matching(group["match"], left, "model.optimizer.groups")
        yield {"params": [left.pop(n) for n in names], **{k: v for k, v in group.items() if k != "match"}}
    if left:
        yield {"params": list(left.values())}


def _matching(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """The names that a pattern is found in: at least one."""
    names = list(names)
    try:
        found = [name for name in names if re.search(pattern, name)]
    except (re.error, TypeError) as error:
        raise MisfitError(f"{key}: {pattern!r} is no regular expression: {error}") from error
    if not found:
        some = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise MisfitError(f"{key}: no parameter's name matches {pattern!r}; there are {some or 'none left'}")
    return found


def _run_time_numbers(params: dict[str, Any], trainer: pl.Trainer) -> dict[str, Any]:
    """Values for the scheduler's arguments that say `auto`."""
    asked = {name for name, value in params.items() if value == "auto"}
    if not asked:
        return {}
    epochs = trainer.max_epochs or 1
    total = int(trainer.estimated_stepping_batches)
    if trainer.ckpt_path is not None:
        # The question made the iterator of the training set, before the place to go on from is known (Lightning
        # 2.6.6): without this line a run resumed inside an epoch sees batches of the first epoch.
        trainer.fit_loop._combined_loader = None
    known = {"total_steps": total, "epochs": epochs, "steps_per_epoch": -(-total // epochs), "T_max": total}
    if asked - set(known):
        raise MisfitError(f"model.scheduler.params: `auto` is known for {', '.join(known)}, not {asked - set(known)}")
    return {name: known[name] for name in asked}
