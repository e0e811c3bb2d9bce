"""Tensor parallelism: the processes of a group split single layers among them, by torch's `parallelize_module`.

A plan says which: patterns of module names, each with a word for the way in which these modules are split.

Sources: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html; Shoeybi et al. 2019
(https://arxiv.org/abs/1909.08053) for the pair of a column-wise and a row-wise layer.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from deeplightning.engine.sharded import places
from deeplightning.faults import ConfigError, Fault, nearest

log = logging.getLogger("deeplightning")

SIZE, PLAN = "engine.params.tensor_parallel", "engine.params.tensor_plan"


def parallelize(task: nn.Module, given: Mapping[str, str] | None, mesh: DeviceMesh) -> None:
    """Splits the layers of a task over the processes of a mesh of one dimension.

    The plan is the config's; without one, what the task's `parallelize(mesh)` does; without that, what the
    `tensor_plan(processes)` of its networks returns.

    Args:
        given: the config's plan: patterns of names, separated by `|`, and the words of `style`.
        mesh: this group's processes.

    Raises:
        ConfigError: there is no plan, or a module cannot be split so.
    """
    own = getattr(task, "parallelize", None)
    if given is None and callable(own):
        own(mesh)
        if not any(isinstance(parameter.data, DTensor) for parameter in task.parameters()):
            message = f"{type(task).__name__}.parallelize has split no layer; call `parallelize_module` on the networks"
            raise ConfigError(Fault(message, SIZE))
        return
    chosen = plan_of(task, given, mesh.size())
    for name, word in chosen.items():
        module = task.get_submodule(name)
        vars(module)["packed_blocks"] = blocks_of(word)  # for the layout of its parameters
        parallelize_module(module, mesh, style(word, module))
    split = sum(p.numel() for name in chosen for p in task.get_submodule(name).parameters())
    share = split / sum(parameter.numel() for parameter in task.parameters())
    log.info("tensor     %d layers, %.0f %% of the parameters, split over %d", len(chosen), 100 * share, mesh.size())


def plan_of(task: nn.Module, given: Mapping[str, str] | None, processes: int) -> dict[str, str]:
    """The word for each module that a plan splits, by its full name.

    Args:
        given: as `parallelize`.
        processes: of a tensor-parallel group.

    Raises:
        ConfigError: there is no plan, a pattern of it fits no module, or a module cannot be split so.
    """
    plans = {"": dict(given)} if given is not None else _own_plans(task, processes)
    if not plans:
        networks = ", ".join(type(child).__name__ for child in task.children() if any(True for _ in child.parameters()))
        message = (
            f"there is no plan for {networks or type(task).__name__}: set `{PLAN}` to patterns of module names, "
            "as {'*.q_proj|*.k_proj|*.v_proj': colwise, '*.o_proj': rowwise}, or give the task a method "
            "`parallelize(mesh)`"
        )
        raise ConfigError(Fault(message, SIZE))
    chosen: dict[str, str] = {}
    for prefix, plan in plans.items():
        inside = [name for name, _ in task.named_modules() if name and name.startswith(prefix)]
        names = {name: name.removeprefix(prefix) for name in inside}
        for patterns, word in plan.items():
            for pattern in patterns.split("|"):
                found = [name for name, inner in names.items() if _fits(name, inner, pattern.strip())]
                if not found:
                    raise _no_module(pattern.strip(), names)
                for name in found:
                    if chosen.setdefault(name, word) != word:
                        message = f"{name} is both {chosen[name]} and {word}; let one pattern fit it"
                        raise ConfigError(Fault(message, PLAN))
    found_at = places(task)
    closed = [m for m in task.modules() if isinstance(m, nn.MultiheadAttention | nn.TransformerEncoderLayer)]
    inner = {id(module): type(outer).__name__ for outer in closed for module in outer.modules()}
    for name, word in chosen.items():
        module = task.get_submodule(name)
        fault = _unfit(module, word, processes)
        if id(module) in inner:
            fault = (
                f"torch's {inner[id(module)]} computes with the parameters of its layers and need not call them; use "
                "an attention with a layer for each projection"
            )
        elif any(len(found_at[parameter]) > 1 for parameter in module.parameters()):
            fault = "another module has the same parameter, and each would split it its own way"
        if fault:
            raise ConfigError(Fault(f"{name} cannot be {word}: {fault}", PLAN if given is not None else SIZE))
    return chosen


def style(word: str, module: nn.Module) -> ParallelStyle:
    """What torch does for a word: `colwise` splits what a layer gives, `rowwise` what it takes.

    `colwise_2` and `colwise_3` are for layers that compute so many things side by side, of which each is split;
    `colwise_gathered` gives every process all of the output.
    """
    if word == "rowwise":
        return RowwiseParallel(input_layouts=Replicate() if isinstance(module, nn.Embedding) else None)
    return ColwiseParallel(output_layouts=Replicate() if word == "colwise_gathered" else None)


def blocks_of(word: str) -> int:
    """The blocks that a word splits one by one: 3 for `colwise_3`, and 1."""
    found = re.fullmatch(r"colwise_([23])", word)
    return int(found[1]) if found else 1


def clip_by_norm(parameters: Iterable[nn.Parameter], limit: float, mesh: DeviceMesh) -> None:
    """Scales gradients such that the second norm of all of them together is at most `limit`.

    Torch's own function takes no gradients that lie on different meshes (2.15).

    Args:
        mesh: of all processes; a gradient that several of them have alike counts once.
    """
    groups: dict[int, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        shared = 1
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            for size in (size for size, placement in sizes if not placement.is_replicate()):  # a strided shard too
                shared *= size
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        groups.setdefault(mesh.size() // shared, []).append(local)
    squares = torch.zeros((), device=mesh.device_type)
    for copies, gradients in groups.items():
        squares += nn.utils.get_total_norm(gradients).float().to(squares.device) ** 2 / copies
    distributed.all_reduce(squares)
    scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in (gradient for gradients in groups.values() for gradient in gradients):
        gradient.mul_(scale.to(gradient))


def raise_for_other_batch(batch: object, mesh: DeviceMesh) -> None:
    """Compares the batches of the processes of a tensor-parallel group, which compute one answer together.

    Raises:
        ConfigError: they differ.
    """
    digest = hashlib.sha256()

    def add(tensor: Tensor) -> Tensor:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.layout == torch.strided:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    apply_to_collection(batch, Tensor, add)
    found: list[Any] = [None] * mesh.size()
    distributed.all_gather_object(found, digest.hexdigest(), mesh.get_group())
    if len(set(found)) > 1:
        message = (
            f"the {mesh.size()} processes of a tensor-parallel group were given different batches, and would compute "
            "nonsense; a data module of your own takes the part of the data from "
            "`trainer.distributed_sampler_kwargs`, and draws no random numbers that differ by rank"
        )
        raise ConfigError(Fault(message, SIZE))


def _own_plans(task: nn.Module, processes: int) -> dict[str, dict[str, str]]:
    """The plans of networks that have one, by what their modules' names begin with."""
    found = {}
    for name, module in task.named_modules():
        if callable(make := getattr(module, "tensor_plan", None)):
            try:
                found[f"{name}." if name else ""] = dict(make(processes))
            except ValueError as error:
                raise ConfigError(Fault(f"{type(module).__name__} cannot be split: {error}", SIZE)) from None
    return found


def _fits(name: str, inner: str, pattern: str) -> bool:
    """Whether a pattern fits a module's name in the task, in the network that has the plan, or in any network."""
    return any(fnmatchcase(part, pattern) for part in (name, inner, name.partition(".")[2]))


def _no_module(pattern: str, names: Mapping[str, str]) -> ConfigError:
    some = sorted(names)
    message = f"no module fits {pattern!r}.{nearest(pattern, names)} There are {', '.join(some[:12])}"
    more = f" and {len(some) - 12} more" if len(some) > 12 else ""
    return ConfigError(Fault(message + more, PLAN, found=pattern))


def _unfit(module: nn.Module, word: str, processes: int) -> str | None:
    """Why a module cannot be split so, if it cannot."""
    if isinstance(module, nn.Embedding):
        if word != "rowwise":
            return "an embedding is split by its rows: rowwise"
        side, size, blocks = "rows", module.num_embeddings, 1
    elif isinstance(module, nn.Linear):
        by_rows = word == "rowwise"
        side, size = ("inputs", module.in_features) if by_rows else ("outputs", module.out_features)
        blocks = blocks_of(word)
    else:
        return f"it is a {type(module).__name__}, and torch splits Linear and Embedding"
    if size % (blocks * processes):
        each = f" in {blocks} blocks" if blocks > 1 else ""
        return f"its {size} {side}{each} are no multiple of {processes} processes"
    return None
