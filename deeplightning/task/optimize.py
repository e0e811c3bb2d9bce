"""What of a network learns, and how: `model.trainable`, `optimizer` and `scheduler` become torch's objects."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import pytorch_lightning as pl
import torch
from torch import nn

from deeplightning.config.target import build
from deeplightning.task.networks import MisfitError

if TYPE_CHECKING:
    from torch.optim import Optimizer


def freeze(network: nn.Module, wanted: str | list[str]) -> None:
    """Leave gradients to the parameters that `model.trainable` names: all, head (the last layer), or patterns.

    Modules of which no parameter learns are in evaluation mode from now on, so that their buffers stay as they are. A
    module that has buffers and no parameters learns where a pattern matches the name of a buffer.

    Raises:
        MisfitError: a pattern matches no parameter's name, or nothing is left to learn.
    """
    if wanted == "all":
        return
    parameters = dict(network.named_parameters())
    if not wanted or not parameters:
        found = "names no parameter" if parameters else f"{type(network).__name__} has no parameters"
        raise MisfitError(f"model.trainable: {found}, so nothing would learn; `all` trains what there is")
    learns = set[str]()
    if wanted == "head":
        last = next(reversed(parameters)).rpartition(".")[0]
        learns |= {name for name in parameters if name.rpartition(".")[0] == last}
    else:
        for pattern in wanted:
            learns |= set(_matching(pattern, parameters, "model.trainable"))
            learns |= {name for name, _ in network.named_buffers() if re.search(pattern, name)}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in learns)
    for path, module in network.named_modules():
        buffers = {name for name, _ in module.named_buffers(prefix=path)}
        held = [parameter.requires_grad for parameter in module.parameters()]
        if (held or buffers) and not any(held) and not buffers & learns:
            module.eval()


def optimizers(network: nn.Module, model: Any, trainer: pl.Trainer, fused: bool | Literal["auto"] = "auto") -> Any:
    """Return what `configure_optimizers` returns for one network.

    Args:
        model: the config's section `model`.
        fused: the config's `engine.fused`.

    Raises:
        MisfitError: a group matches nothing, or the schedule lacks its metric or a number.
    """
    if model.optimizer is None:
        raise MisfitError("model.optimizer: this task needs one, such as {type: torch.optim.SGD, params: {lr: 0.01}}")
    optimizer = _optimizer(network, model.optimizer, "model.optimizer", trainer, fused)
    if model.scheduler is None:
        return optimizer
    call = model.scheduler.call
    built = _schedule(optimizer, model.scheduler, "model.scheduler", trainer)
    entry = {"scheduler": built, "interval": call.interval, "frequency": call.frequency}
    if call.monitor is not None:
        entry["monitor"] = call.monitor
    return {"optimizer": optimizer, "lr_scheduler": entry}


def optimizers_by_name(
    networks: Mapping[str, nn.Module], model: Any, trainer: pl.Trainer, fused: bool | Literal["auto"] = "auto"
) -> tuple[dict[str, torch.optim.Optimizer], dict[str, object]]:
    """Return the optimizers of several networks, and the schedules of those that have one, by name, in their order.

    For tasks that step them themselves. The learning rate of each is logged as `lr-NAME`: its first group of parameters
    has the `name`.

    Args:
        networks: what learns, by the names under `model.network`.
        model: the config's section `model`.
        fused: the config's `engine.fused`.

    Raises:
        MisfitError: a network has no optimizer; or as `optimizers`.
    """
    schedules = model.scheduler or {}
    for section, given, missing in (("optimizer", model.optimizer, networks), ("scheduler", schedules, ())):
        if not isinstance(given, dict) or not {*missing} <= {*given} <= {*networks}:
            each = f"one for each of {', '.join(networks)}, by name"
            raise MisfitError(f"model.{section}: this task {'needs' if missing else 'may have'} {each}, and no others")
    found: dict[str, torch.optim.Optimizer] = {}
    for name, network in networks.items():
        found[name] = _optimizer(network, model.optimizer[name], f"model.optimizer.{name}", trainer, fused)
        found[name].param_groups[0]["name"] = name
    return found, {
        name: _schedule(found[name], schedules[name], f"model.scheduler.{name}", trainer)
        for name in networks
        if name in schedules
    }


def _optimizer(
    network: nn.Module, target: Any, key: str, trainer: pl.Trainer, fused: bool | Literal["auto"]
) -> torch.optim.Optimizer:
    groups = list(_groups(network, target.groups, key))
    optimizer: torch.optim.Optimizer = build(target, groups, **_fused(network, target, key, trainer, fused))
    if "fused" in getattr(optimizer, "defaults", {}):
        optimizer.register_load_state_dict_pre_hook(_keep_kernel)
    for group in target.groups:
        if unknown := [name for name in group if name not in ("match", *optimizer.defaults)]:
            known = ", ".join(optimizer.defaults)
            # torch keeps any word in a group, and nothing would come of it
            raise MisfitError(f"{key}.groups: {target.type} has no `{unknown[0]}`; a group takes {known}")
    return optimizer


_KERNELS = ("fused", "foreach", "capturable", "differentiable")


def _fused(
    network: nn.Module, target: Any, key: str, trainer: pl.Trainer, wanted: bool | Literal["auto"]
) -> dict[str, bool]:
    """Return the argument by which an optimizer of torch's takes its step in one kernel; {}: torch decides, which on a
    GPU groups tensors (`foreach`). What the config's params say of this counts.

    Raises:
        MisfitError: it is wanted, and this optimizer has no such kernel or the parameters are not made for it.
    """
    if wanted is False or any(name in part for name in _KERNELS for part in (target.params, *target.groups)):
        return {}
    parameters = [p for p in network.parameters() if p.requires_grad]
    if wanted == "auto" and not all(p.device.type == "cuda" and not hasattr(p, "placements") for p in parameters):
        return {}  # on the CPU, or DTensors
    kind: type[Optimizer] = build({"type": "builtins.dict", "params": {"kind": {"ref": target.type}}})["kind"]
    # The argument of another library's optimizer may mean something else.
    is_torchs = (getattr(kind, "__module__", None) or "").startswith("torch.optim")
    has_kernel = is_torchs and "fused" in signature(kind).parameters
    sparse = any(getattr(module, "sparse", False) is True for module in network.modules())
    fits_it = has_kernel and not sparse and all(p.is_floating_point() for p in parameters)
    if wanted == "auto":
        # Under a gradient scaler the kernel itself leaves out a step: schedules would not know, and nothing could clip.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        drives_itself = isinstance(trainer.strategy, pl.strategies.DeepSpeedStrategy)
        return {"fused": True} if fits_it and not scaled and not drives_itself else {}
    if not fits_it:
        why = "it has sparse gradients or complex parameters" if has_kernel else "it has no fused kernel"
        raise MisfitError(f"engine.fused is true, and {key} is {target.type}: {why}; set `engine.fused=auto`")
    return {"fused": True}


def _keep_kernel(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, object] | None:
    """Return the state of a checkpoint, with this run's choice of kernel: the checkpoint may be from another device."""
    saved, own = state["param_groups"], optimizer.param_groups
    if len(saved) != len(own):
        return None  # torch says so
    groups = [{**group, "fused": mine["fused"]} for group, mine in zip(saved, own, strict=True)]
    return {**state, "param_groups": groups}


def _schedule(optimizer: torch.optim.Optimizer, target: Any, key: str, trainer: pl.Trainer) -> object:
    built = build(target, optimizer, **_run_time_numbers(target.params, trainer, key))
    if target.call.monitor is None and isinstance(built, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise MisfitError(f"{key}.call.monitor: ReduceLROnPlateau needs a metric, for example val_loss")
    return built


def _groups(network: nn.Module, groups: list[dict[str, Any]], key: str) -> Iterator[dict[str, object]]:
    """Return parameters that learn, in groups: those that match a pattern with its values, then the others."""
    left = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for group in groups:
        if "match" not in group:
            raise MisfitError(f"{key}.groups: {group} lacks `match`, the pattern of its parameters' names")
        names = _matching(group["match"], left, f"{key}.groups")
        yield {"params": [left.pop(n) for n in names], **{k: v for k, v in group.items() if k != "match"}}
    if left:
        yield {"params": list(left.values())}


def _matching(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """Return the names that a pattern is found in: at least one."""
    names = list(names)
    try:
        found = [name for name in names if re.search(pattern, name)]
    except (re.error, TypeError) as error:
        raise MisfitError(f"{key}: {pattern!r} is not a regular expression: {error}") from error
    if not found:
        some = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise MisfitError(f"{key}: no parameter's name matches {pattern!r}; there are {some or 'none left'}")
    return found


def _run_time_numbers(params: dict[str, object], trainer: pl.Trainer, key: str) -> dict[str, object]:
    """Return values for the scheduler's arguments that say `auto`."""
    asked = {name for name, value in params.items() if value == "auto"}
    if not asked:
        return {}
    epochs = trainer.max_epochs or 1
    length = trainer.estimated_stepping_batches
    if not math.isfinite(length):
        raise MisfitError(
            f"{key}.params: {', '.join(sorted(asked))}: `auto` needs the number of steps, which is not known: the "
            "training data have no length, or the training has no end; set train.max_steps, or a number"
        )
    total = int(length)
    known = {"total_steps": total, "epochs": epochs, "steps_per_epoch": -(-total // epochs), "T_max": total}
    if asked - set(known):
        raise MisfitError(f"{key}.params: `auto` is known for {', '.join(known)}, not {asked - set(known)}")
    return {name: known[name] for name in asked}
