"""A part of a training step as CUDA graphs: the kernels of eager mode, recorded once and replayed without Python and
without a launch for each.

What a graph does not record is what Python does: it decides and counts while it is recorded, and never again. So a part
that changes anything in Python, or draws numbers on the CPU, is refused instead of learning something else in silence;
and where somebody else changes a module between two steps, the part is recorded again.
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
"""Runs before the recording, in which libraries choose their kernels and take their memory; torch's own number."""

_KEY = "engine.compile"
_INSTEAD = "set engine.compile=reduce-overhead, or engine.compile=false"
_PLAIN = (bool, int, float, str, type(None))


class Recorded:
    """A function of tensors, recorded at its first call on a GPU and replayed at all later ones, backwards too. On a
    CPU it is the function.

    Each call overwrites the tensors that the call before has given, and the gradients of its backward pass.

    Args:
        function: of tensors; gives a tensor, or a tuple that ends with one. Gradients go back through this one alone.
            At each call the tensors have the shapes, types and `requires_grad` of the first.
        owner: the module whose submodules it computes with. Their parameters get gradients; the first call leaves their
            buffers, and the random numbers, as one call of the function would.
    """

    def __init__(self, function: Callable[..., Any], owner: nn.Module):
        self.function, self.owner = function, owner
        self._replay: _Replay | None = None
        self._state: Any = None  # of the owner, as it was recorded

    def __call__(self, *inputs: Tensor) -> object:
        """Replay the function; raise MisfitError if it cannot be recorded."""
        device = inputs[0].device
        if device.type != "cuda":
            return self.function(*inputs)
        if self._replay is not None and self._state.differs():
            log.info("%s=graphs: the network was changed, so the step is recorded again", _KEY)
            self._replay = None
        if self._replay is None:
            with _as_before(self.owner, device), _without_autocast_cache(device.type):
                learns = watched(self.function, self.owner, inputs)
                self._replay = _Replay(self.function, self.owner, inputs)
            if lost := learns ^ self._replay.learns:
                names = ", ".join(sorted(lost)[:3])
                raise MisfitError(f"{_KEY}=graphs: a recorded step would not teach {names}; {_INSTEAD}")
            self._state = State(self.owner)
        return self._replay(*inputs)


class _Replay:
    """Two graphs, forwards and backwards, with the memory that they read and write.

    Attributes:
        learns: names of the parameters that it gives gradients to.
    """

    def __init__(self, function: Callable[..., object], owner: nn.Module, inputs: tuple[Tensor, ...]):
        self.inputs = [given.detach().clone().requires_grad_(given.requires_grad) for given in inputs]
        self.parameters = _learning(owner)
        part = _Part(function, owner)
        # Aliases of the parameters: where these have been used outside of the recording, by ddp or another part,
        # autograd would have the recording wait for that.
        aliases = {f"owner.{name}": p.detach().requires_grad_() for name, p in self.parameters.items()}
        device = inputs[0].device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    last = _last(functional_call(part, aliases, tuple(self.inputs)))
                    self._gradients_of(last, torch.ones_like(last), aliases)
                    del last
            torch.cuda.synchronize(device)
            self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            # thread_local: what other threads do meanwhile, such as pinning memory, is no fault of the recording.
            with torch.cuda.graph(self._forward, stream=stream, capture_error_mode="thread_local"):
                given = functional_call(part, aliases, tuple(self.inputs))
            last = _last(given)
            self.gradient = torch.empty_like(last)
            with torch.cuda.graph(
                self._backward, pool=self._forward.pool(), stream=stream, capture_error_mode="thread_local"
            ):
                self.gradients = self._gradients_of(last, self.gradient, aliases)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise MisfitError(f"{_KEY}=graphs: this step cannot be recorded: {_cause(error)}; {_INSTEAD}") from error
        torch.cuda.current_stream(device).wait_stream(stream)
        self.learns = set()
        of_parameters = zip(self.parameters.items(), aliases.values(), self.gradients[len(inputs) :], strict=True)
        for (name, parameter), alias, gradient in of_parameters:
            # An LSTM of cuDNN moves the weights that it is given into one block of memory: of an alias, a copy.
            if gradient is not None and alias.data_ptr() == parameter.data_ptr():
                self.learns.add(name)
        self.last = last.detach()
        self.before_last = None
        if isinstance(given, tuple):
            self.before_last = apply_to_collection(given[:-1], Tensor, Tensor.detach)

    def _gradients_of(self, last: Tensor, gradient: Tensor, aliases: dict[str, Tensor]) -> list[Tensor | None]:
        """Return the gradient of each input and parameter; None for those without one."""
        given = [*self.inputs, *aliases.values()]
        wanted = [tensor for tensor in given if tensor.requires_grad]
        found = iter(torch.autograd.grad(last, wanted, gradient, allow_unused=True))
        return [next(found) if tensor.requires_grad else None for tensor in given]

    def __call__(self, *inputs: Tensor) -> Any:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.detach().copy_(given, non_blocking=True)
        last = _Run.apply(self, *inputs, *self.parameters.values())
        return last if self.before_last is None else (*self.before_last, last)

    def forward(self) -> Tensor:
        self._forward.replay()
        return self.last.detach()

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        self.gradient.copy_(gradient)
        self._backward.replay()
        # Without another reference autograd makes them the parameters' `.grad`, and copies nothing.
        return [None if found is None else found.detach() for found in self.gradients]


class _Part(nn.Module):
    """A function with the modules that it computes with, whose parameters `functional_call` replaces."""

    def __init__(self, function: Callable[..., object], owner: nn.Module):
        super().__init__()
        self.function, self.owner = function, owner

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


def _last(given: Any) -> Tensor:
    """Return the tensor that gradients go back through, of what a function gives."""
    last: Tensor = given[-1] if isinstance(given, tuple) else given
    return last


def _learning(owner: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that learn, by name."""
    return {name: parameter for name, parameter in owner.named_parameters() if parameter.requires_grad}


class _Run(torch.autograd.Function):
    """Ties a replay to inputs and parameters, as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, *tensors: Tensor) -> Tensor:
        ctx.replay = replay
        return replay.forward()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.replay.backward(gradient)


# ---- what a graph would not repeat


class State:
    """What a recording takes for granted of an owner's submodules, all but metrics: their plain attributes, `training`
    among them, where their tensors are, and which of these learn."""

    def __init__(self, owner: nn.Module):
        self._modules = [m for m in owner.modules() if m is not owner and not isinstance(m, Metric)]
        self._tensors = [*owner.parameters(), *owner.buffers()]
        self._was = self._now()

    def _now(self) -> Any:
        # At each step, 0.1 ms for a ResNet-18.
        plain = [[v for v in vars(module).values() if type(v) in _PLAIN] for module in self._modules]
        return plain, [(tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors]

    def differs(self) -> bool:
        """Return whether anything of it is not as it was."""
        return bool(self._was != self._now())

    @property
    def changed(self) -> str | None:
        """An attribute that is not as it was, with its module; None: all are."""
        for before, now, module in zip(self._was[0], self._now()[0], self._modules, strict=True):
            if before != now:
                names = [name for name, value in vars(module).items() if type(value) in _PLAIN]
                found = [name for name, a, b in zip(names, before, now, strict=False) if a != b]
                return f"{type(module).__name__} changes its `{(found or names)[-1]}`"
        return None


def watched(function: Callable[..., object], owner: nn.Module, inputs: tuple[Tensor, ...]) -> set[str]:
    """Call a function once and look at what it does beside computing with tensors.

    Returns:
        The names of the parameters to which the last of its results has gradients.

    Raises:
        MisfitError: a module has changed an attribute, or numbers were drawn on the CPU.
    """
    before, drawn = State(owner), _cpu_generators()
    given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    last = _last(function(*given))
    if changed := before.changed:
        reason = f"{changed} at each call, in Python, which a recorded step would not"
        raise MisfitError(f"{_KEY}=graphs: {reason}; {_INSTEAD}")
    if drawn != _cpu_generators():
        drew = "the network or a loss draws random numbers on the CPU"
        raise MisfitError(f"{_KEY}=graphs: {drew}, which a recorded step would not; {_INSTEAD}")
    parameters = _learning(owner)
    found = torch.autograd.grad(last, [*parameters.values()], torch.ones_like(last), allow_unused=True)
    return {name for name, gradient in zip(parameters, found, strict=True) if gradient is not None}


def _cpu_generators() -> tuple[object, ...]:
    state: Any = np.random.get_state()
    kind, keys, *position = state
    return random.getstate(), (kind, keys.tobytes(), *position), torch.get_rng_state().numpy().tobytes()


# ---- what a recording leaves as it was


@contextmanager
def _as_before(owner: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and generators afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in owner.buffers()]
    with torch.random.fork_rng([device]):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


@contextmanager
def _without_autocast_cache(kind: str) -> Iterator[None]:
    """Use autocast as it is outside, without its copies of weights, which a recording would use and never renew."""
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        yield


def _cause(error: BaseException) -> str:
    """Return what first went wrong: the end of a recording that has failed raises an error of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return first_line(error)
