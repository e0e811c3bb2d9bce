"""Private names of torch 2.15 and torchmetrics 1.9; `deeplightning.private.lazy_imports` has those of their imports."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

INHERITED = {
    # The agent of torchrun restarts a lost worker. Where a name has moved, `launcher: …Elastic` fails at its start.
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent": (
        "_monitor_workers",
        "_pcontext",
        "_remaining_restarts",
        "_rendezvous",
        "_shutdown",
        "_start_workers",
        "_worker_group",
    ),
    # `to`, `half` and their kin go through it. Where it has moved, metrics of a run in bf16 count in bf16.
    "torch.nn.ModuleDict": ("_apply",),
}


def storage_id(tensor: "Tensor") -> int:
    """What `torch.save` tells storages apart by; the address of an empty one is 0."""
    return tensor.untyped_storage()._cdata


def local_part(tensor: "Tensor") -> "Tensor":
    """What this process holds of a tensor that several share (a DTensor), without a node for autograd."""
    return getattr(tensor, "_local_tensor", tensor)


def around_backward(context: "Callable[[], AbstractContextManager[object]]") -> None:
    """Has each computation of gradients run inside a context: torch calls the engine with modes of functions off."""
    from torch import autograd

    run = autograd._engine_run_backward

    def inside(*args: object, **options: object) -> object:
        with context():
            return run(*args, **options)

    autograd._engine_run_backward = inside


def apply(module: "nn.Module", function: "Callable[[Tensor], Tensor]") -> None:
    """Replaces each parameter and buffer by what a function makes of it: `to_empty` and `to` each serve one case."""
    module._apply(function)


def dispatch_mode() -> object:
    """The class whose instances see each operator before it runs; torch's own counters of collectives use it too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode
