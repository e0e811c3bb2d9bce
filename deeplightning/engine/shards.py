"""Sharded tensors: each process holds a contiguous part, flattened. Checkpoints are saved in shards and reassembled for
any number of processes.

ZeRO splits each flattened parameter into equal parts, or a sequence of parameters at any position; FSDP2 splits along
the first dimension. In both, the share of a process is one contiguous slice.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A process's part of a tensor of `shape`: `values` (n,) start at `start` in the flattened tensor."""

    shape: tuple[int, ...]
    start: int
    values: Tensor


class Scattered:
    """A tensor whose shards are in the files of a checkpoint and are read on access.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        shards: (start, values), in order, without gaps.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, shards: list[tuple[int, Tensor]]):
        self.shape, self.dtype, self.shards = shape, dtype, shards

    def part(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of the flattened tensor."""
        found = torch.empty(max(0, stop - start), dtype=self.dtype)
        for first, values in self.shards:
            low, high = max(start, first), min(stop, first + values.numel())
            if low < high:
                found[low - start : high - start] = values[low - first : high - first]
        return found

    def whole(self) -> Tensor:
        """Return the assembled tensor."""
        return self.part(0, torch.Size(self.shape).numel()).view(self.shape)


def assembled(value: object) -> Any:
    """Return a value of a checkpoint with all scattered tensors assembled."""
    return _replace_leaves(value, lambda each: isinstance(each, Scattered), lambda scattered, _: scattered.whole())


def split_shards(checkpoint: dict[str, object]) -> tuple[dict[str, object], dict[str, Any]]:
    """Separate the shards from a checkpoint.

    Returns:
        The checkpoint with a reference {"scattered": key, "shape", "dtype"} instead of each shard; and the shards,
        {key: {"start", "values"}}.
    """
    own: dict[str, object] = {}

    def refer(shard: Shard, key: str) -> dict[str, object]:
        own[key] = {"start": shard.start, "values": shard.values.detach().cpu().clone()}
        return {"scattered": key, "shape": list(shard.shape), "dtype": str(shard.values.dtype).removeprefix("torch.")}

    return _replace_leaves(checkpoint, lambda each: isinstance(each, Shard), refer), own


def join_shards(checkpoint: dict[str, object], of_processes: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Replace the references that `split_shards` made by scattered tensors.

    Args:
        of_processes: the shards that each process wrote.

    Raises:
        ValueError: the shards of a tensor leave a gap, or have another type or shape than the reference.
    """

    def find(ref: Mapping[str, Any], _: str) -> Scattered:
        key, shape, dtype = ref["scattered"], ref["shape"], getattr(torch, str(ref["dtype"]), None)
        sizes = shape if isinstance(shape, list | tuple) else [None]
        if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
            raise ValueError("the reference to a sharded tensor is invalid")
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise ValueError(f"{key}: its shape is {shape!r:.60}")
        shape, numel = tuple(shape), math.prod(shape)
        found = [shards[key] for shards in of_processes if key in shards and shards[key]["values"].numel()]
        ordered = sorted(((shard["start"], shard["values"]) for shard in found), key=lambda shard: shard[0])
        reached = 0
        for start, values in ordered:
            if values.dtype != dtype or start < 0 or start + values.numel() > numel:
                raise ValueError(f"{key}: a shard is not {dtype} within {shape}")
            if start > reached:
                break
            reached = max(reached, start + values.numel())
        if reached < numel:
            raise ValueError(f"{key}: values are missing from position {reached} on")
        return Scattered(shape, dtype, ordered)

    keys = {"scattered", "shape", "dtype"}
    return _replace_leaves(checkpoint, lambda value: isinstance(value, dict) and value.keys() == keys, find)


def _replace_leaves(value: object, wanted: Callable[[object], bool], replace: Callable[[Any, str], Any]) -> Any:
    """Replace leaves of a tree of dicts and lists; `replace` gets each with its path, such as `state_dict/weight`. A
    dict or list that occurs several times is visited once, and is shared in the result too; one that contains itself
    raises RecursionError."""
    visited: dict[int, object] = {}

    def visit(value: object, at: str) -> object:
        if wanted(value):
            return replace(value, at)
        if not isinstance(value, dict | list | tuple):
            return value
        if id(value) not in visited:
            if isinstance(value, dict):
                new: object = {name: visit(item, f"{at}/{name}" if at else str(name)) for name, item in value.items()}
            else:
                new = type(value)([visit(item, f"{at}/{number}") for number, item in enumerate(value)])
            visited[id(value)] = new
        return visited[id(value)]

    return visit(value, "")
