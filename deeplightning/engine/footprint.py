"""The bytes of parameters and optimizer state that one process holds after training, under each engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from deeplightning.private.torch import storage_id


def footprint(network: nn.Module, optimizers: Iterable[Any]) -> dict[str, int]:
    """Return bytes in this process: `parameters` (all or its share) and `state`, with the 32-bit copy of the weights
    that DeepSpeed's optimizer keeps."""
    parameters = list(network.parameters())
    mine: set[Any] = set(parameters)
    shares: list[Any] = [*parameters, *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))]
    state: list[Any] = []
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed wraps the optimizer that steps
        state += [value for kept in inner.state.values() for value in kept.values() if isinstance(value, Tensor)]
        state += [key for key in inner.state if isinstance(key, Tensor) and key not in mine]
    return {"parameters": _bytes(shares), "state": _bytes(state)}


def _bytes(tensors: Iterable[Any]) -> int:
    """Return the total size, counting shared memory once."""
    # Only a DTensor has `to_local`; importing its class would import sympy.
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach() for tensor in tensors]
    seen = {(storage_id(t), t.storage_offset()): t.numel() * t.element_size() for t in local if t.numel()}
    return sum(seen.values())
