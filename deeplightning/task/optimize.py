"""What of a network learns, and how: `model.trainable`, `optimizer` and `scheduler` become torch's objects."""

import re
from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from deeplightning.config.target import build
from deeplightning.task.errors import MisfitError


def freeze(network: nn.Module, wanted: str | list[str]) -> None:
    """Leaves gradients to the parameters that `model.trainable` names: all, head (the last layer), or patterns.

    Raises:
        MisfitError: a pattern matches no parameter's name.
    """
    if wanted == "all":
        return
    parameters = dict(network.named_parameters())
    if wanted == "head":
        last = next(reversed(parameters)).rpartition(".")[0]
        chosen = {name for name in parameters if name.rpartition(".")[0] == last}
    else:
        chosen = set()
        for pattern in wanted:
            found = {name for name in parameters if re.search(pattern, name)}
            if not found:
                raise MisfitError(f"model.trainable: no parameter's name matches {pattern!r}")
            chosen |= found
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
        names = [name for name in left if re.search(group["match"], name)]
        if not names:
            raise MisfitError(f"model.optimizer.groups: no parameter's name matches {group['match']!r}")
        yield {"params": [left.pop(n) for n in names], **{k: v for k, v in group.items() if k != "match"}}
    if left:
        yield {"params": list(left.values())}


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
