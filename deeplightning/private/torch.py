"""Private names of torch 2.15 and torchmetrics 1.9; `deeplightning.private.lazy_imports` has more of them."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

INHERITED = {
    # `to`, `half` and similar methods call it. If it moves, metrics of a run in bf16 accumulate in bf16.
    "torch.nn.ModuleDict": ("_apply",)
}


def storage_id(tensor: "Tensor | torch.UntypedStorage") -> int:
    """Return the id by which `torch.save` distinguishes storages; the address is 0 for every empty one."""
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor
    return storage._cdata


def apply(module: "nn.Module", function: "Callable[[Tensor], Tensor]") -> None:
    """Apply a function to each parameter and buffer; `to_empty` and `to` each cover only one case."""
    module._apply(function)


def non_persistent_buffers(module: "nn.Module") -> "dict[str, Tensor | None]":
    """Return the buffers of a module itself that its `state_dict` omits; `named_buffers` does not mark them."""
    return {name: getattr(module, name, None) for name in module._non_persistent_buffers_set}


def in_place_version(tensor: "Tensor") -> int:
    """Return a number that increases with each in-place change of a tensor."""
    return tensor._version


def metric_by_item(module: "nn.Module") -> str | None:
    """Return the name of a metric of a module that gathers the items of a list one by one, such as
    MeanAveragePrecision, or None. If a name moves, each evaluation over several processes fails."""
    from torchmetrics import Metric
    from torchmetrics.utilities.data import dim_zero_cat

    for metric in (part for part in module.modules() if isinstance(part, Metric)):
        lists = [name for name, value in metric._defaults.items() if isinstance(value, list)]
        if any(metric._reductions[name] is not dim_zero_cat for name in lists):
            return type(metric).__name__
    return None


def buffers_of_all(module: "nn.Module") -> "Iterator[Tensor]":
    """Return the buffers that all processes have; a module names others to torch's DDP, which ignores them too."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return (buffer for name, buffer in module.named_buffers() if name not in ignored)
