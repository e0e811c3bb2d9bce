"""Run a part of a training step as CUDA graphs: the eager kernels, recorded once and replayed without Python or
per-kernel launches.

A graph records kernels only; Python code runs while it is recorded and never again. A part that changes Python state or
draws random numbers on the CPU is therefore refused, because replaying it would silently train something else. If a
module is changed between two steps, the part is recorded again.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torchmetrics import Metric

from deeplightning.task.networks import MisfitError
from deeplightning.words import first_line

log = logging.getLogger("deeplightning")

WARM_UPS = 3
"""Runs before the recording, in which libraries choose kernels and allocate memory; the number that torch uses."""

_KEY = "engine.compile"
_REMEDY = "set engine.compile=reduce-overhead, or engine.compile=false"
_PLAIN_TYPES = (bool, int, float, str, type(None))


class RecordedFunction:
    """A function of tensors whose forward and backward pass are recorded at its first call on a GPU and replayed at
    later calls. On a CPU the function itself is called.

    Each call overwrites the tensors that the previous call returned, and the gradients of its backward pass.

    Args:
        function: takes tensors and returns a tensor, or a tuple that ends with one; only this tensor is differentiable.
            The tensors of all calls have the shapes, dtypes and `requires_grad` of the first call.
        owner: the module whose submodules the function uses. Their parameters get gradients; the first call changes
            their buffers and the random state exactly as one call of the function would.
    """

    def __init__(self, function: Callable[..., Any], owner: nn.Module):
        self.function, self.owner = function, owner
        self._replay: _Replay | None = None
        self._state: Any = None  # of the owner when the function was recorded

    def __call__(self, *inputs: Tensor) -> object:
        """Replay the function; raise MisfitError if it cannot be recorded."""
        device = inputs[0].device
        if device.type != "cuda":
            return self.function(*inputs)
        if self._replay is not None and self._state.has_changed():
            log.info("%s=graphs: the network has changed, so the step is recorded again", _KEY)
            self._replay = None
        if self._replay is None:
            with _restore_buffers_and_rng(self.owner, device), _without_autocast_cache(device.type):
                trained_names = check_recordable(self.function, self.owner, inputs)
                self._replay = _Replay(self.function, self.owner, inputs)
            if lost := trained_names ^ self._replay.trained_names:
                names = ", ".join(sorted(lost)[:3])
                raise MisfitError(f"{_KEY}=graphs: a recorded step would not train {names}; {_REMEDY}")
            self._state = ModuleState(self.owner)
        return self._replay(*inputs)


class _Replay:
    """The graphs of the forward and the backward pass, with the memory that they read and write; `trained_names` are
    the names of the parameters that get gradients."""

    def __init__(self, function: Callable[..., object], owner: nn.Module, inputs: tuple[Tensor, ...]):
        self.inputs = [given.detach().clone().requires_grad_(given.requires_grad) for given in inputs]
        self.parameters = _trainable_parameters(owner)
        part = _FunctionModule(function, owner)
        # Aliases of the parameters: if DDP or another part has used the parameters outside of the recording, autograd
        # would make the recording wait for that use.
        aliases = {f"owner.{name}": p.detach().requires_grad_() for name, p in self.parameters.items()}
        device = inputs[0].device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    last = _differentiable_output(functional_call(part, aliases, tuple(self.inputs)))
                    self._compute_gradients(last, torch.ones_like(last), aliases)
                    del last
            torch.cuda.synchronize(device)
            self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            # thread_local: calls of other threads, such as pinning memory, do not invalidate the recording.
            with torch.cuda.graph(self._forward, stream=stream, capture_error_mode="thread_local"):
                given = functional_call(part, aliases, tuple(self.inputs))
            last = _differentiable_output(given)
            self.gradient = torch.empty_like(last)
            with torch.cuda.graph(
                self._backward, pool=self._forward.pool(), stream=stream, capture_error_mode="thread_local"
            ):
                self.gradients = self._compute_gradients(last, self.gradient, aliases)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise MisfitError(f"{_KEY}=graphs: this step cannot be recorded: {_cause(error)}; {_REMEDY}") from error
        torch.cuda.current_stream(device).wait_stream(stream)
        of_parameters = zip(self.parameters.items(), aliases.values(), self.gradients[len(inputs) :], strict=True)
        # A cuDNN LSTM moves its weights into one block of memory; given an alias, it would train a copy.
        is_own = {n: g is not None and a.data_ptr() == p.data_ptr() for (n, p), a, g in of_parameters}
        self.trained_names = {name for name, is_so in is_own.items() if is_so}
        self.last = last.detach()
        self.before_last = apply_to_collection(given[:-1], Tensor, Tensor.detach) if isinstance(given, tuple) else None

    def _compute_gradients(self, last: Tensor, gradient: Tensor, aliases: dict[str, Tensor]) -> list[Tensor | None]:
        """Return the gradient of each input and parameter, or None for those without one."""
        given = [*self.inputs, *aliases.values()]
        wanted = [tensor for tensor in given if tensor.requires_grad]
        found = iter(torch.autograd.grad(last, wanted, gradient, allow_unused=True))
        return [next(found) if tensor.requires_grad else None for tensor in given]

    def __call__(self, *inputs: Tensor) -> Any:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.detach().copy_(given, non_blocking=True)
        last = _ReplayFunction.apply(self, *inputs, *self.parameters.values())
        return last if self.before_last is None else (*self.before_last, last)

    def forward(self) -> Tensor:
        self._forward.replay()
        return self.last.detach()

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        self.gradient.copy_(gradient)
        self._backward.replay()
        # With no other reference to these, autograd uses them as the parameters' `.grad` without a copy.
        return [None if found is None else found.detach() for found in self.gradients]


class _FunctionModule(nn.Module):
    """A function and the modules that it uses, so that `functional_call` can replace their parameters."""

    def __init__(self, function: Callable[..., object], owner: nn.Module):
        super().__init__()
        self.function, self.owner = function, owner

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


def _differentiable_output(given: Any) -> Tensor:
    """Return the differentiable tensor among the results of a function."""
    last: Tensor = given[-1] if isinstance(given, tuple) else given
    return last


def _trainable_parameters(owner: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: parameter for name, parameter in owner.named_parameters() if parameter.requires_grad}


class _ReplayFunction(torch.autograd.Function):
    """Connects a replay to its inputs and parameters in autograd."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, *tensors: Tensor) -> Tensor:
        ctx.replay = replay
        return replay.forward()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.replay.backward(gradient)


# ---- what a graph does not repeat


class ModuleState:
    """State that a recording relies on, of all submodules of an owner except metrics: their plain attributes, such as
    `training`, the addresses of their tensors, and which tensors require gradients."""

    def __init__(self, owner: nn.Module):
        self._modules = [m for m in owner.modules() if m is not owner and not isinstance(m, Metric)]
        self._tensors = [*owner.parameters(), *owner.buffers()]
        self._recorded = self._current()

    def _current(self) -> Any:
        # Runs at each step; takes 0.1 ms for a ResNet-18.
        plain = [[v for v in vars(module).values() if type(v) in _PLAIN_TYPES] for module in self._modules]
        return plain, [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors]

    def has_changed(self) -> bool:
        """Return whether any of it has changed."""
        return bool(self._recorded != self._current())

    @property
    def first_change(self) -> str | None:
        """The first changed attribute, with its module, or None if no attribute has changed."""
        for before, now, module in zip(self._recorded[0], self._current()[0], self._modules, strict=True):
            if before != now:
                names = [name for name, value in vars(module).items() if type(value) in _PLAIN_TYPES]
                found = [name for name, a, b in zip(names, before, now, strict=False) if a != b]
                return f"{type(module).__name__} changes its `{(found or names)[-1]}`"
        return None


def check_recordable(function: Callable[..., object], owner: nn.Module, inputs: tuple[Tensor, ...]) -> set[str]:
    """Call a function once and check that it has no side effects in Python.

    Returns:
        The names of the parameters that get gradients from its last result.

    Raises:
        MisfitError: the call changed an attribute of a module, replaced a buffer, or drew random numbers on the CPU.
    """
    before, drawn, buffers = ModuleState(owner), _cpu_generators(), dict(owner.named_buffers())
    given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    last = _differentiable_output(function(*given))
    replaced = (f"the network replaces its buffer `{n}`" for n, b in owner.named_buffers() if buffers.get(n) is not b)
    if changed := before.first_change or next(replaced, None):
        reason = f"{changed} at each call, in Python, which a recorded step would not repeat"
        raise MisfitError(f"{_KEY}=graphs: {reason}; {_REMEDY}")
    if drawn != _cpu_generators():
        drew = "the network or a loss draws random numbers on the CPU"
        raise MisfitError(f"{_KEY}=graphs: {drew}, which a recorded step would not repeat; {_REMEDY}")
    parameters = _trainable_parameters(owner)
    found = torch.autograd.grad(last, [*parameters.values()], torch.ones_like(last), allow_unused=True)
    return {name for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def _cpu_generators() -> tuple[object, ...]:
    state: Any = np.random.get_state()
    kind, keys, *position = state
    return random.getstate(), (kind, keys.tobytes(), *position), torch.get_rng_state().numpy().tobytes()


# ---- state that a recording must not change


@contextmanager
def _restore_buffers_and_rng(owner: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and random generators on exit."""
    buffers = [(buffer, buffer.clone()) for buffer in owner.buffers()]
    with torch.random.fork_rng([device]):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _without_autocast_cache(kind: str) -> torch.autocast:
    """Keep the current autocast settings but disable its weight cache: a recording would use cached copies forever."""
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)


def _cause(error: BaseException) -> str:
    """Return the first line of the original error: ending a failed recording raises another error."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)
