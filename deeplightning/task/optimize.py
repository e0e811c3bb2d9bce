"""Apply `model.trainable`, and build optimizers and schedulers from `model.optimizer` and `model.scheduler`."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
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
    """Freeze the parameters that `model.trainable` does not select: all, head (the last layer), or patterns.

    Modules without a trainable parameter are put into evaluation mode, so that their buffers do not change. A module
    with buffers and no parameters stays trainable if a pattern matches the name of a buffer.

    Raises:
        MisfitError: a pattern matches no parameter's name, or no parameter is trainable.
    """
    if wanted == "all":
        return
    parameters = dict(network.named_parameters())
    if not wanted or not parameters:
        found = "names no parameter" if parameters else f"{type(network).__name__} has no parameters"
        raise MisfitError(f"model.trainable: {found}, so nothing would learn; `all` trains every parameter")
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
        trainable = [parameter.requires_grad for parameter in module.parameters()]
        if (trainable or buffers) and not any(trainable) and not buffers & learns:
            module.eval()


def optimizers(network: nn.Module, model: Any, trainer: pl.Trainer, fused: bool | Literal["auto"] = "auto") -> Any:
    """Return what `configure_optimizers` returns for one network.

    Args:
        model: the config's section `model`.
        fused: the config's `engine.fused`.

    Raises:
        MisfitError: a group matches no parameter, or the scheduler lacks its metric or an `auto` number.
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
    """Return the optimizers of several networks, and the schedulers of those that have one, by name, in their order.

    For tasks that step their optimizers themselves. The learning rate of each is logged as `lr-NAME`, because its first
    parameter group has the `name`.

    Args:
        networks: the networks to train, by the names under `model.network`.
        model: the config's section `model`.
        fused: the config's `engine.fused`.

    Raises:
        MisfitError: a network has no optimizer, or as in `optimizers`.
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
    named = [name for name in networks if name in schedules]
    return found, {n: _schedule(found[n], schedules[n], f"model.scheduler.{n}", trainer) for n in named}


def _optimizer(
    network: nn.Module, target: Any, key: str, trainer: pl.Trainer, fused: bool | Literal["auto"]
) -> torch.optim.Optimizer:
    groups = list(_groups(network, target.groups, key))
    optimizer: torch.optim.Optimizer = build(target, groups, **_fused_argument(network, target, key, trainer, fused))
    has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
    if has_scaler and any(group.get("fused") for group in optimizer.param_groups):
        raise MisfitError(f"{key}: `fused` with precision 16 would clip scaled gradients; remove it, or set bf16")
    if "fused" in getattr(optimizer, "defaults", {}):
        with suppress(AttributeError):  # timm's Lookahead does not call torch's constructor
            optimizer.register_load_state_dict_pre_hook(_keep_kernel)
    for group in target.groups:
        if unknown := [name for name in group if name not in ("match", *optimizer.defaults)]:
            known = ", ".join(optimizer.defaults)
            # torch would store any key of a group and ignore it
            raise MisfitError(f"{key}.groups: {target.type} has no `{unknown[0]}`; a group takes {known}")
    return optimizer


_KERNELS = ("fused", "foreach", "capturable", "differentiable")


def _fused_argument(
    network: nn.Module, target: Any, key: str, trainer: pl.Trainer, wanted: bool | Literal["auto"]
) -> dict[str, bool]:
    """Return the argument that makes a torch optimizer step in one kernel, or {} to let torch decide, which on a GPU
    groups tensors (`foreach`). Params of the config take precedence.

    Raises:
        MisfitError: it is requested, but the optimizer has no such kernel or does not support these parameters.
    """
    if wanted is False or any(name in part for name in _KERNELS for part in (target.params, *target.groups)):
        return {}
    parameters = [p for p in network.parameters() if p.requires_grad]
    if wanted == "auto" and not all(p.device.type == "cuda" and not hasattr(p, "placements") for p in parameters):
        return {}  # on the CPU, or DTensors
    kind: type[Optimizer] = build({"type": "builtins.dict", "params": {"kind": {"ref": target.type}}})["kind"]
    # The same argument of another library's optimizer may mean something else.
    is_torchs = (getattr(kind, "__module__", None) or "").startswith("torch.optim")
    cpu_only = "(CPU only)" in (kind.__doc__ or "") and any(p.is_cuda for p in parameters)  # Adagrad of an older torch
    has_kernel = is_torchs and "fused" in signature(kind).parameters and not cpu_only
    sparse = any(getattr(module, "sparse", False) is True for module in network.modules())
    fits_it = has_kernel and not sparse and all(p.is_floating_point() for p in parameters)
    if wanted == "auto":
        # With a gradient scaler the kernel itself skips steps: schedulers would not notice, and clipping would fail.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        drives_itself = isinstance(trainer.strategy, pl.strategies.DeepSpeedStrategy)
        return {"fused": True} if fits_it and not scaled and not drives_itself else {}
    if not fits_it:
        why = "it has sparse gradients or complex parameters" if has_kernel else "it has no fused kernel"
        raise MisfitError(f"engine.fused is true, and {key} is {target.type}: {why}; set `engine.fused=auto`")
    return {"fused": True}


def _keep_kernel(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, object] | None:
    """Return a checkpoint's state with this run's choice of kernel: the checkpoint may be from another device."""
    saved, own = state["param_groups"], optimizer.param_groups
    if len(saved) != len(own):
        return None  # torch raises the error
    groups = [{**group, "fused": mine["fused"]} for group, mine in zip(saved, own, strict=True)]
    return {**state, "param_groups": groups}


def _schedule(optimizer: torch.optim.Optimizer, target: Any, key: str, trainer: pl.Trainer) -> object:
    rates = {str(group.get("lr")) for group in optimizer.param_groups}
    more: dict[str, Any] = _auto_numbers(target, trainer, key)
    parts = target.params.get("schedulers") if target.type.endswith("SequentialLR") else None
    if isinstance(parts, list):
        callables = build({"type": "builtins.dict", "params": {"parts": parts}})["parts"]
        more["schedulers"] = [part(optimizer) for part in callables]
    built = build(target, optimizer, **more)
    if len(rates) > len({str(group.get("initial_lr", group.get("lr"))) for group in optimizer.param_groups}):
        message = f"{target.type} replaces the `lr` of the optimizer's groups; give a list with a rate for each group"
        raise MisfitError(f"{key}.params: {message}")
    if target.call.monitor is None and isinstance(built, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise MisfitError(f"{key}.call.monitor: ReduceLROnPlateau needs a metric, for example val_loss")
    return built


def _groups(network: nn.Module, groups: list[dict[str, Any]], key: str) -> Iterator[dict[str, object]]:
    """Yield the trainable parameters in groups: those that match a pattern with its values, then the remaining ones."""
    remaining = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for group in groups:
        if "match" not in group:
            raise MisfitError(f"{key}.groups: {group} lacks `match`, the pattern of its parameters' names")
        names = _matching(group["match"], remaining, f"{key}.groups")
        yield {"params": [remaining.pop(n) for n in names], **{k: v for k, v in group.items() if k != "match"}}
    if remaining:
        yield {"params": list(remaining.values())}


def _matching(pattern: str, names: Iterable[str], key: str) -> list[str]:
    """Return the names that match a pattern, at least one."""
    names = list(names)
    try:
        found = [name for name in names if re.search(pattern, name)]
    except (re.error, TypeError) as error:
        raise MisfitError(f"{key}: {pattern!r} is not a regular expression: {error}") from error
    if not found:
        some = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise MisfitError(f"{key}: no parameter's name matches {pattern!r}; there are {some or 'none left'}")
    return found


def _auto_numbers(target: Any, trainer: pl.Trainer, key: str) -> dict[str, object]:
    """Return values for the scheduler's arguments that are `auto`; they count the scheduler's own steps."""
    requested = {name for name, value in target.params.items() if value == "auto"}
    if not requested:
        return {}
    epochs, length = trainer.max_epochs or 1, trainer.estimated_stepping_batches
    batches = trainer.num_training_batches
    if math.isfinite(batches) and 0 < trainer.max_steps <= length:
        own: Any = trainer  # Lightning sets `callbacks` without a type
        factors = (getattr(each, "get_accumulate_grad_batches", None) for each in own.callbacks)
        factor = next(filter(None, factors), lambda _: trainer.accumulate_grad_batches)
        ends = itertools.accumulate(math.ceil(batches / factor(epoch)) for epoch in range(epochs))
        epochs = next((number for number, end in enumerate(ends, 1) if end >= length), epochs)
    kind, limit = target.call.interval, "train.max_steps"
    if kind == "epoch":
        length, limit = epochs if epochs > 0 else math.inf, f"train.num_epochs, or {key}.call.interval=step"
    if not math.isfinite(length):
        raise MisfitError(
            f"{key}.params: {', '.join(sorted(requested))}: `auto` needs the number of {kind}s, which is not known: "
            f"the training data have no length, or the training has no end; set {limit}, or a number"
        )
    total = -(-int(length) // target.call.frequency)
    known = {"total_steps": total, "T_max": total}
    if epochs > 0:  # -1: only max_steps limits the training
        known |= {"epochs": epochs, "steps_per_epoch": -(-total // epochs)}
    if requested - set(known):
        raise MisfitError(f"{key}.params: `auto` works for {', '.join(known)}, not {requested - set(known)}")
    return {name: known[name] for name in requested}
