"""Canaries for private names of torch: each exists with the expected signature and behaviour."""

import contextlib
import copy

import pytest
import torch
from deeplightning_plan import torch_private
from torch import nn


def test_gradients_are_computed_inside_a_context(monkeypatch):
    """`backward` and `torch.autograd.grad` call `_engine_run_backward`."""
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    events = []

    @contextlib.contextmanager
    def context():
        events.append("begins")
        yield
        events.append("ends")

    torch_private.around_backward(context)
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    torch.autograd.grad(weight.square().sum(), weight)
    assert events == ["begins", "ends"] * 2
    assert torch.equal(weight.grad, torch.ones(2))


def test_the_part_of_a_shared_tensor_is_known():
    """`_local_tensor` is the shard of a DTensor; any other tensor is returned unchanged."""
    from torch.distributed.tensor import DTensor

    plain = torch.ones(2)
    assert torch_private.local_part(plain) is plain
    assert "_local_tensor" in DTensor.__slots__


def test_operators_are_seen_before_they_run():
    """`TorchDispatchMode` gets each operator before it runs."""
    seen = []

    class Mode(torch_private.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).neg_()
    assert "aten::neg_" in seen


def test_tensors_without_memory_are_copied_and_ask_for_no_values():
    """`FakeTensorMode` and its errors behave as expected."""
    with torch_private.fake_tensors():
        module = nn.Linear(2, 2)
        (weight, bias), copied = copy.deepcopy(module).parameters(), module.weight
        assert isinstance(weight, nn.Parameter)
        assert weight is not copied
        assert bias.shape == (2,)
        with pytest.raises(RuntimeError) as raised:
            bool(bias.sum() > 0)
    assert torch_private.needs_values(raised.value)
    assert not torch_private.needs_values(ValueError())


def test_a_kernel_that_was_registered_is_taken_back():
    """`torch.library.Library._destroy` unregisters a kernel."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("layer_norm", lambda *_: torch.zeros(()), "AutocastCPU")
    torch_private.end_library(library)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.functional.layer_norm(torch.ones(2, 3), (3,)).shape == (2, 3)
