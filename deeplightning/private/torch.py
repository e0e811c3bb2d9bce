"""Private names of torch 2.15 and torchmetrics 1.9; `deeplightning.private.lazy_imports` has those of their imports."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch.library
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


def storage_id(tensor: "Tensor | torch.UntypedStorage") -> int:
    """What `torch.save` tells storages apart by; the address of an empty one is 0."""
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor
    return storage._cdata


def local_part(tensor: "Tensor") -> "Tensor":
    """What this process holds of a tensor that several share (a DTensor), without a node for autograd."""
    return getattr(tensor, "_local_tensor", tensor)


def around_backward(context: "Callable[[], AbstractContextManager[object]]") -> None:
    """Has each computation of gradients run inside a context: torch calls the engine with modes of functions off."""
    from torch import autograd

    run = autograd._engine_run_backward

    def inside(*args: Any, **options: Any) -> "tuple[Tensor, ...]":
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


def tensors_in(value: object) -> "list[Tensor]":
    """The tensors in a tree of lists, tuples and dicts, as an operator is given and gives them."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors that are made herein have a shape, a type and a device, and no values and no memory. Where it has moved,
    `plan --memory` fails.

    A copy of one is a new one; torch 2.15 would copy a storage that is not there, and end the process at its exit.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def copy(self: "Tensor", memo: dict[int, object]) -> object:
        if id(self) not in memo:
            with torch.no_grad():
                made = self.detach().clone().requires_grad_(self.requires_grad)
            if "_is_param" in self.__dict__:
                made.__dict__["_is_param"] = True
            memo[id(self)] = made
        return memo[id(self)]

    FakeTensor.__deepcopy__ = copy  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        del FakeTensor.__deepcopy__


def needs_values(error: BaseException | None) -> bool:
    """Whether an error comes from code that asked a tensor without values for one. Where the names have moved, a plan
    of a network that branches on values fails instead of being partial."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    while error is not None:
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            return True
        error = error.__cause__ or error.__context__
    return False


def attention_operators() -> tuple[Any, Any]:
    """Flash attention and the memory-efficient one. Where a name has moved, `plan --memory` for a GPU fails."""
    import torch

    aten = torch.ops.aten
    return aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention


def asks_for_a_number(operator: Any) -> bool:
    """Whether an operator is that of `Tensor.item`."""
    import torch

    return operator is torch.ops.aten._local_scalar_dense.default


def changes_in_place(operator: Any) -> bool:
    """Whether an operator writes into one of its arguments."""
    return bool(operator._schema.is_mutable)


def family_of(operator: Any) -> Any:
    """The operator without its overload, by which torch's `flop_registry` has its formula."""
    return operator._overloadpacket


def end_library(library: "torch.library.Library") -> None:
    """Takes back what a `torch.library.Library` has registered. Where it has moved, `plan --memory` for a GPU fails."""
    library._destroy()
