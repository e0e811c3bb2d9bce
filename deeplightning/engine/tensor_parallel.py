"""Tensor parallelism: the processes of a group split single layers among them with torch's `parallelize_module`.

A plan maps patterns of module names to the way in which these modules are split. A `Layout` tells which elements of a
parameter a process holds: it is split first over the processes of a group, then by rows over the replicas of the group.
A packed layer, such as one that computes queries, keys and values side by side, is split block by block.

Sources: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html; Shoeybi et al. 2019
(https://arxiv.org/abs/1909.08053) for the pair of a column-wise and a row-wise layer.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from deeplightning.engine.sharded import Share, places
from deeplightning.engine.shards import Scattered, Shard, slices, whole_of
from deeplightning.faults import ConfigError, Fault

log = logging.getLogger("deeplightning")

SIZE, PLAN = "engine.params.tensor_parallel", "engine.params.tensor_plan"


def parallelize(task: nn.Module, given: Mapping[str, str] | None, mesh: DeviceMesh) -> None:
    """Split the layers of a task over the processes of a one-dimensional mesh.

    The config's plan comes first, then the task's `parallelize(mesh)`, then the `tensor_plan(processes)` of its
    networks.

    Args:
        given: the config's plan: patterns of names, separated by `|`, and the words of `style`.
        mesh: this group's processes.

    Raises:
        ConfigError: there is no plan, or a module cannot be split that way.
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
    """Return the word of each module that a plan splits, by its full name.

    Args:
        given: as in `parallelize`.
        processes: of a tensor-parallel group.

    Raises:
        ConfigError: there is no plan, a pattern matches no module, or a module cannot be split that way.
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
                pattern = pattern.strip()  # of names in the task, in the network with the plan, or in any network
                of = {name: (name, inner, name.partition(".")[2]) for name, inner in names.items()}
                found = [name for name, words in of.items() if any(fnmatchcase(each, pattern) for each in words)]
                if not found:
                    message = f"no module fits {pattern!r}; there are {', '.join(sorted(names)[:12])}"
                    raise ConfigError(Fault(message, PLAN, found=pattern))
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
    """Return torch's style for a word: `colwise` splits a layer's outputs, `rowwise` its inputs.

    `colwise_2` and `colwise_3` are for layers that compute two or three outputs side by side, each of which is split;
    `colwise_gathered` gives every process the complete output.
    """
    if word == "rowwise":
        return RowwiseParallel(input_layouts=Replicate() if isinstance(module, nn.Embedding) else None)
    return ColwiseParallel(output_layouts=Replicate() if word == "colwise_gathered" else None)


def blocks_of(word: str) -> int:
    """Return how many blocks a word splits separately: 3 for `colwise_3`, and 1 by default."""
    found = re.fullmatch(r"colwise_([23])", word)
    return int(found[1]) if found else 1


def clip_by_norm(parameters: Iterable[nn.Parameter], limit: float, mesh: DeviceMesh) -> None:
    """Scale gradients so that their joint second norm is at most `limit`.

    torch's own function rejects gradients on different meshes (2.15).

    Args:
        mesh: of all processes; a gradient that several of them have in common counts once.
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
    """Compare the batches of a tensor-parallel group, whose processes compute one answer together.

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
    """Return the plans of the networks that have one, by the prefix of their modules' names."""
    found = {}
    for name, module in task.named_modules():
        if callable(make := getattr(module, "tensor_plan", None)):
            try:
                found[f"{name}." if name else ""] = dict(make(processes))
            except ValueError as error:
                raise ConfigError(Fault(f"{type(module).__name__} cannot be split: {error}", SIZE)) from None
    return found


def _unfit(module: nn.Module, word: str, processes: int) -> str | None:
    """Return why a module cannot be split that way; None if it can."""
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
        return f"its {size} {side}{each} are not a multiple of {processes} processes"
    return None


# ---- the elements that a process holds

REPLICAS, PARTS = "data_parallel", "tensor_parallel"
"""Lightning's names of the dimensions of its device mesh (2.6); processes of a group have adjacent ranks."""


@dataclass(frozen=True)
class Layout:
    """How a parameter is distributed over the processes.

    Attributes:
        shape: of the whole parameter.
        dim: the dimension that the processes of a group split; None if each has the whole.
        blocks: equal blocks along `dim` that are split separately.
        replicas: groups, which split the rows of a group member's part.
        parts: processes of a group.
    """

    shape: tuple[int, ...]
    dim: int | None
    blocks: int
    replicas: int
    parts: int

    def part(self, whole: Tensor, replica: int, part: int) -> Tensor:
        """Return a process's part of the whole parameter, flattened."""
        rows = self._of_group(whole, part)
        start, stop = list(slices(rows.shape[0], self.replicas))[replica]  # as `torch.chunk` deals them
        return rows[start:stop].reshape(-1)

    def numel(self, replica: int, part: int) -> int:
        """Return the number of elements of that part."""
        return self.part(torch.empty(self.shape, device="meta"), replica, part).numel()

    def whole(self, values: list[list[Tensor]]) -> Tensor:
        """Return the assembled parameter.

        Args:
            values: of each process, flattened, by replica and by part.
        """
        nothing = torch.empty(self.shape, device="meta")
        of_parts = [
            torch.cat([row[part] for row in values]).view(self._of_group(nothing, part).shape)
            for part in range(self.parts)
        ]
        if self.dim is None:
            return of_parts[0]
        split = [rows.unflatten(self.dim, (self.blocks, -1)) for rows in of_parts]
        return torch.cat(split, self.dim + 1).flatten(self.dim, self.dim + 1)

    def _of_group(self, whole: Tensor, part: int) -> Tensor:
        if self.dim is None:
            return whole
        blocks = whole.unflatten(self.dim, (self.blocks, -1))
        start, stop = list(slices(blocks.shape[self.dim + 1], self.parts))[part]
        return blocks.narrow(self.dim + 1, start, stop - start).flatten(self.dim, self.dim + 1)


@dataclass
class Split(Share):
    """A process's part of a parameter, which need not be a slice of it. For checkpoints the parameter is gathered, and
    each process writes a slice, so that every engine reads it."""

    layout: Layout
    mesh: DeviceMesh

    def part(self, tensor: Tensor | Scattered) -> Tensor:
        replica, part = self.mesh.get_local_rank(REPLICAS), self.mesh.get_local_rank(PARTS)
        return self.layout.part(whole_of(tensor), replica, part)

    def piece(self, values: Tensor) -> Shard:
        """Return this process's slice. Call it on every process."""
        ranks = self.mesh.mesh
        sizes = [[self.layout.numel(r, p) for p in range(self.layout.parts)] for r in range(self.layout.replicas)]
        own = values.new_zeros(max(map(max, sizes)), device=self.mesh.device_type)
        own[: values.numel()] = values
        found = [torch.empty_like(own) for _ in range(ranks.numel())]
        distributed.all_gather(found, own)
        parts = [
            [found[int(ranks[r, p])][: sizes[r][p]] for p in range(self.layout.parts)]
            for r in range(self.layout.replicas)
        ]
        whole = self.layout.whole(parts).reshape(-1)
        start, stop = list(slices(whole.numel(), len(found)))[distributed.get_rank()]
        return Shard(self.shape, start, whole[start:stop])


def share_of(parameter: nn.Parameter, blocks: int, mesh: DeviceMesh) -> Share:
    """Return this process's part of a parameter that `fully_shard` sharded over the replicas of a group.

    Args:
        parameter: a DTensor; over both dimensions of the mesh if the group splits it.
        blocks: see `Layout`.
        mesh: replicas x parts.
    """
    tensor: Any = parameter.data
    placements = dict(zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True))
    placed = placements.get(PARTS)
    dim = placed.dim if placed is not None and placed.is_shard() else None
    layout = Layout(tuple(parameter.shape), dim, blocks, *mesh.shape)
    return Split(layout.shape, 0, tensor.to_local().detach().view(-1), layout, mesh)
