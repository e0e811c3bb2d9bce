"""Private names of torch 2.15 for counting a training step and simulating a GPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, autograd
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # noqa: F401

FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention
ITEM = torch.ops.aten._local_scalar_dense.default
"""The operator of `Tensor.item`."""


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, without an autograd node; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def around_backward(context: Callable[[], AbstractContextManager[object]]) -> None:
    """Run each backward pass inside a context: torch calls the autograd engine with function modes disabled."""
    run = autograd._engine_run_backward

    def inside(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        with context():
            return run(*args, **options)

    autograd._engine_run_backward = inside


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Create tensors in this context with a shape, a dtype and a device but without values or memory.

    `deepcopy` of such a tensor creates a new one; torch 2.15 would copy its missing storage and crash the process at
    exit.
    """

    def copy(self: Tensor, memo: dict[int, object]) -> object:
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
    """Return whether an error comes from code that needed the values of a fake tensor."""
    while error is not None:
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            return True
        error = error.__cause__ or error.__context__
    return False


def changes_in_place(operator: Any) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return bool(operator._schema.is_mutable)


def end_library(library: torch.library.Library) -> None:
    """Unregister the operators of a `torch.library.Library`."""
    library._destroy()
