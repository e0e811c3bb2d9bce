"""Sharded tensors: each process holds a contiguous part, flattened. Checkpoints are saved in shards and reassembled for
any number of processes.

ZeRO cuts each flattened parameter into equal parts, or a row of parameters at any position; FSDP2 cuts along the first
dimension. In both, a process's share is one contiguous slice.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A process's part of a tensor of `shape`: `values` (n,) begin at `start` in the flattened tensor."""

    shape: tuple[int, ...]
    start: int
    values: Tensor


class Scattered:
    """A tensor whose shards are in the files of a checkpoint and are read on access.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        pieces: (start, values), in order, without gaps.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[tuple[int, Tensor]]):
        self.shape, self.dtype, self.pieces = shape, dtype, pieces

    def part(self, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of the flattened tensor."""
        found = torch.empty(max(0, stop - start), dtype=self.dtype)
        for first, values in self.pieces:
            low, high = max(start, first), min(stop, first + values.numel())
            if low < high:
                found[low - start : high - start] = values[low - first : high - first]
        return found

    def whole(self) -> Tensor:
        """Return the assembled tensor."""
        return self.part(0, torch.Size(self.shape).numel()).view(self.shape)


def whole_of(value: object) -> Any:
    """Return a value of a checkpoint with each scattered tensor assembled."""
    return _replaced(value, lambda each: isinstance(each, Scattered), lambda scattered, _: scattered.whole())


def split(checkpoint: dict[str, object]) -> tuple[dict[str, object], dict[str, Any]]:
    """Take the shards out of a checkpoint.

    Returns:
        The checkpoint with a note {"scattered": key, "shape", "dtype"} instead of each shard; and the shards,
        {key: {"start", "values"}}.
    """
    own: dict[str, object] = {}

    def note(piece: Shard, key: str) -> dict[str, object]:
        own[key] = {"start": piece.start, "values": piece.values.detach().cpu().clone()}
        return {"scattered": key, "shape": list(piece.shape), "dtype": str(piece.values.dtype).removeprefix("torch.")}

    return _replaced(checkpoint, lambda each: isinstance(each, Shard), note), own


def joined(checkpoint: dict[str, object], of_processes: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Replace the notes that `split` left by scattered tensors.

    Args:
        of_processes: what each process wrote.

    Raises:
        ValueError: the shards of a tensor leave a gap, or have another type or shape than the note says.
    """

    def find(note: Mapping[str, Any], _: str) -> Scattered:
        key, shape, dtype = note["scattered"], note["shape"], getattr(torch, str(note["dtype"]), None)
        sizes = shape if isinstance(shape, list | tuple) else [None]
        if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor is described wrongly")
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise ValueError(f"{key}: its shape is {shape!r:.60}")
        shape, numel = tuple(shape), math.prod(shape)
        found = [pieces[key] for pieces in of_processes if key in pieces and pieces[key]["values"].numel()]
        ordered = sorted(((piece["start"], piece["values"]) for piece in found), key=lambda piece: piece[0])
        reached = 0
        for start, values in ordered:
            if values.dtype != dtype or start < 0 or start + values.numel() > numel:
                raise ValueError(f"{key}: a piece is not {dtype} within {shape}")
            if start > reached:
                break
            reached = max(reached, start + values.numel())
        if reached < numel:
            raise ValueError(f"{key}: there are no values from {reached} on")
        return Scattered(shape, dtype, ordered)

    keys = {"scattered", "shape", "dtype"}
    return _replaced(checkpoint, lambda value: isinstance(value, dict) and value.keys() == keys, find)


def _replaced(value: object, wanted: Callable[[object], bool], replace: Callable[[Any, str], Any]) -> Any:
    """Replace some leaves of a tree of dicts and lists; `replace` gets each with its path, such as `state_dict/weight`.

    A dict or list that occurs several times is visited once and shared in the result too.

    Raises:
        RecursionError: a value contains itself.
    """
    known: dict[int, object] = {}

    def visit(value: object, at: str) -> object:
        if wanted(value):
            return replace(value, at)
        if not isinstance(value, dict | list | tuple):
            return value
        if id(value) not in known:
            if isinstance(value, dict):
                made: object = {name: visit(item, f"{at}/{name}" if at else str(name)) for name, item in value.items()}
            else:
                made = type(value)([visit(item, f"{at}/{number}") for number, item in enumerate(value)])
            known[id(value)] = made
        return known[id(value)]

    return visit(value, "")


def slices(numel: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each of `parts` equal parts of a flattened tensor, the last ones shorter or empty."""
    size = -(-numel // parts)
    return ((min(numel, n * size), min(numel, (n + 1) * size)) for n in range(parts))
