"""What one process really holds after training: parameters and the optimizer's state under each engine, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from deeplightning.private.torch import storage_id


def footprint(network: nn.Module, optimizers: Iterable[Any]) -> dict[str, int]:
    """Bytes in this process: `parameters`, whole or its share of them, and `state`, with the copy of the weights in 32
    bits that DeepSpeed's optimizer keeps."""
    parameters = list(network.parameters())
    mine: set[Any] = set(parameters)
    held: list[Any] = [*parameters, *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))]
    state: list[Any] = []
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed's is around the one that steps
        state += [value for kept in inner.state.values() for value in kept.values() if isinstance(value, Tensor)]
        state += [key for key in inner.state if isinstance(key, Tensor) and key not in mine]
    return {"parameters": _bytes(held), "state": _bytes(state)}


def _bytes(tensors: Iterable[Any]) -> int:
    """Each memory once."""
    # Only a DTensor has `to_local`; its module costs each training sympy.
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach() for tensor in tensors]
    seen = {(storage_id(t), t.storage_offset()): t.numel() * t.element_size() for t in local if t.numel()}
    return sum(seen.values())
