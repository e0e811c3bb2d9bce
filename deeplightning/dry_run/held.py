"""The bytes that tensors hold during a training step, counted tensor by tensor, real or fake, and by kind.

`torch.distributed._tools.mem_tracker.MemTracker` (torch 2.15) counts the same bytes; it refuses a network that a step
calls twice, as a GAN's, and metrics that are called, so that the count is here and MemTracker is what tests compare it with.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from deeplightning.private.torch import dispatch_mode, storage_id, tensors_in

KINDS = ("parameters", "gradients", "state", "activations", "communication", "temporary")
"""What bytes are held for. `activations`: what the forward pass makes and keeps, the batch and the network's buffers."""

_OF_PHASE = {"between": "activations", "forward": "activations"}


class Held(dispatch_mode()):  # type: ignore[misc]
    """Counts while it is on.

    Attributes:
        phase: `between`, `forward`, `backward` or `optimizer`, set from outside.
        total: bytes held now.
        kinds: kind → bytes of it held now.
        peaks: phase → `kinds` at the moment of that phase at which the most was held.
        moved: bytes that operators read and wrote since `reset`, views not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "between"
        self.total, self.moved = 0, 0
        self.kinds: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self._most: dict[str, int] = {}
        self._sizes: dict[int, tuple[int, str]] = {}

    def reset(self) -> None:
        """Forgets the peaks so far."""
        self.peaks, self._most, self.moved = {}, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        is_new = False
        for tensor in tensors_in(made):
            is_new = self._note(tensor) or is_new
        if is_new or func._schema.is_mutable:
            self.moved += sum(t.nbytes for t in tensors_in((args, kwargs, made)) if not t.is_sparse)
        self._look()
        return made

    def add(self, kind: str, tensors: Iterable[object]) -> int:
        """Counts tensors that were made before, or that have turned out to be of another kind.

        Returns:
            The bytes of them, each memory counted once.
        """
        known, size = set[int](), 0
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            key = storage_id(local)
            if key not in known:
                known.add(key)
                self._note(local, kind)
                size += local.untyped_storage().nbytes()
        self._look()
        return size

    def _note(self, tensor: Tensor, kind: str | None = None) -> bool:
        """Whether the memory of a tensor was not known."""
        storage = tensor.untyped_storage()
        key, size = storage_id(tensor), storage.nbytes()
        before = self._sizes.get(key)
        if before is None and not size:
            return False
        wanted = kind or (before[1] if before else _OF_PHASE.get(self.phase, "temporary"))
        if before == (size, wanted):
            return False
        if before is None:
            weakref.finalize(storage, self._free, key)
        else:
            self.kinds[before[1]] -= before[0]
            self.total -= before[0]
        self._sizes[key] = size, wanted
        self.kinds[wanted] += size
        self.total += size
        return before is None

    def _look(self) -> None:
        if self.total > self._most.get(self.phase, 0):
            self._most[self.phase] = self.total
            self.peaks[self.phase] = self.kinds.copy()

    def _free(self, key: int) -> None:
        size, kind = self._sizes.pop(key)
        self.kinds[kind] -= size
        self.total -= size


class Flops(FlopCounterMode):
    """torch's count of operations, without its table."""

    def __init__(self) -> None:
        super().__init__(display=False)


def gradients_of(module: nn.Module) -> list[Tensor]:
    """The gradients that parameters hold now."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def state_of(optimizer: Any) -> list[torch.Tensor]:
    """The tensors that an optimizer keeps; of DeepSpeed's, those of the one that it is around."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return [value for kept in inner.state.values() for value in kept.values() if isinstance(value, Tensor)]
