"""Private names of torch 2.15 and torchmetrics 1.9; `deeplightning.private.lazy_imports` has those for lazy imports."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

INHERITED = {
    # `to`, `half` and similar methods call it. If it moves, metrics of a run in bf16 accumulate in bf16.
    "torch.nn.ModuleDict": ("_apply",)
}


def storage_id(tensor: "Tensor | torch.UntypedStorage") -> int:
    """Return the id by which `torch.save` distinguishes storages; the address of an empty one is 0."""
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor
    return storage._cdata


def apply(module: "nn.Module", function: "Callable[[Tensor], Tensor]") -> None:
    """Replace each parameter and buffer by a function of it; `to_empty` and `to` each cover only one case."""
    module._apply(function)


def non_persistent_buffers(module: "nn.Module") -> "dict[str, Tensor | None]":
    """Return the buffers of a module itself that its `state_dict` leaves out; `named_buffers` does not tell."""
    return {name: getattr(module, name, None) for name in module._non_persistent_buffers_set}


def changes_in_place(tensor: "Tensor") -> int:
    """Return a number that rises with each change of a tensor in place."""
    return tensor._version
