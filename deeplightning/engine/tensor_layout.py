"""The elements of a parameter that a process holds under tensor parallelism: split first over the processes of a group,
then by rows over the replicas of the group.

A packed layer, such as one that computes queries, keys and values side by side, is split block by block: the process
holds its share of each block.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from deeplightning.engine.sharded import Share
from deeplightning.engine.shards import Scattered, Shard, slices, whole_of

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
        start, stop = self._rows(rows.shape[0])[replica]
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

    def start(self, replica: int, part: int) -> int | None:
        """Return where a process's part begins in the flattened parameter; None if it is not one slice of it."""
        if self.dim not in (None, 0) or self.blocks > 1:
            return None
        first, last = (0, self.shape[0]) if self.dim is None else list(slices(self.shape[0], self.parts))[part]
        return (first + self._rows(last - first)[replica][0]) * math.prod(self.shape[1:])

    def _of_group(self, whole: Tensor, part: int) -> Tensor:
        if self.dim is None:
            return whole
        blocks = whole.unflatten(self.dim, (self.blocks, -1))
        start, stop = list(slices(blocks.shape[self.dim + 1], self.parts))[part]
        return blocks.narrow(self.dim + 1, start, stop - start).flatten(self.dim, self.dim + 1)

    def _rows(self, number: int) -> list[tuple[int, int]]:
        return list(slices(number, self.replicas))  # as `torch.chunk` deals them


@dataclass
class Replicated(Share):
    """A part of a parameter that all processes of a group have; each writes a slice of it to a checkpoint."""

    rank: int
    parts: int

    def piece(self, values: Tensor) -> Shard:
        start, stop = list(slices(values.numel(), self.parts))[self.rank]
        return Shard(self.shape, self.start + start, values[start:stop])


@dataclass
class Split(Share):
    """A process's part of a parameter that is not a slice of it. For checkpoints the parameter is gathered, and each
    process writes a slice, so that every engine reads it."""

    layout: Layout
    mesh: DeviceMesh

    def part(self, tensor: Tensor | Scattered) -> Tensor:
        replica, part = _place(self.mesh)
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
    (replica, part), (replicas, parts) = _place(mesh), mesh.shape
    tensor: Any = parameter.data
    placements = dict(zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True))
    placed = placements.get(PARTS)
    dim = placed.dim if placed is not None and placed.is_shard() else None
    layout = Layout(tuple(parameter.shape), dim, blocks, replicas, parts)
    values, start = tensor.to_local().detach().view(-1), layout.start(replica, part)
    if start is None:
        return Split(layout.shape, 0, values, layout, mesh)
    if dim is None:
        return Replicated(layout.shape, start, values, part, parts)
    return Share(layout.shape, start, values)


def _place(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the replica and the part of this process."""
    return mesh.get_local_rank(REPLICAS), mesh.get_local_rank(PARTS)
