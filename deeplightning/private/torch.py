"""Private names of torch 2.15 and torchmetrics 1.9; `deeplightning.private.lazy_imports` has those for lazy imports."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch.library
    from torch import Tensor, nn

INHERITED = {
    # `to`, `half` and similar methods call it. If it moves, metrics of a run in bf16 accumulate in bf16.
    "torch.nn.ModuleDict": ("_apply",),
}


def storage_id(tensor: "Tensor | torch.UntypedStorage") -> int:
    """Return the id by which `torch.save` distinguishes storages; the address of an empty one is 0."""
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor
    return storage._cdata


def local_part(tensor: "Tensor") -> "Tensor":
    """Return this process's shard of a DTensor, without an autograd node; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def around_backward(context: "Callable[[], AbstractContextManager[object]]") -> None:
    """Run each backward pass inside a context: torch calls the autograd engine with function modes disabled."""
    from torch import autograd

    run = autograd._engine_run_backward

    def inside(*args: Any, **options: Any) -> "tuple[Tensor, ...]":
        with context():
            return run(*args, **options)

    autograd._engine_run_backward = inside


def apply(module: "nn.Module", function: "Callable[[Tensor], Tensor]") -> None:
    """Replace each parameter and buffer by a function of it; `to_empty` and `to` each cover only one case."""
    module._apply(function)


def dispatch_mode() -> object:
    """Return the class whose instances intercept each operator; torch's own counters of collectives use it too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def tensors_in(value: object) -> "list[Tensor]":
    """Return the tensors in a tree of lists, tuples and dicts, such as the arguments or results of an operator."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Create tensors in this context with a shape, a dtype and a device but without values or memory. If the name
    moves, `plan --memory` fails.

    `deepcopy` of such a tensor creates a new one; torch 2.15 would copy its missing storage and crash the process at
    exit.
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
    """Return whether an error comes from code that needed the values of a fake tensor. If the names move, a plan of a
    network that branches on values fails instead of being partial."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    while error is not None:
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            return True
        error = error.__cause__ or error.__context__
    return False


def attention_operators() -> tuple[Any, Any]:
    """Return flash attention and memory-efficient attention. If a name moves, `plan --memory` for a GPU fails."""
    import torch

    aten = torch.ops.aten
    return aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention


def asks_for_a_number(operator: Any) -> bool:
    """Return whether an operator is that of `Tensor.item`."""
    import torch

    return operator is torch.ops.aten._local_scalar_dense.default


def changes_in_place(operator: Any) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return bool(operator._schema.is_mutable)


def family_of(operator: Any) -> Any:
    """Return the operator without its overload, the key of its formula in torch's `flop_registry`."""
    return operator._overloadpacket


def end_library(library: "torch.library.Library") -> None:
    """Unregister the operators of a `torch.library.Library`. If the name moves, `plan --memory` for a GPU fails."""
    library._destroy()
