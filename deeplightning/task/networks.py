"""Networks of a config: built on the CPU, and tried with an example input before data are read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deeplightning.config.target import build
from deeplightning.task.task_errors import MisfitError
from deeplightning.words import first_line, lacks_memory

if TYPE_CHECKING:
    import pytorch_lightning as pl


class Probabilities(nn.Module):
    """What a bundle of classes or labels holds: inputs (B, …) to probabilities float32 (B, K, …).

    Args:
        network: gives logits.
        normalise: what inputs go through before; None: nothing.
        exclusive: a sample has one class; else any number of labels.
    """

    def __init__(self, network: nn.Module | None, normalise: nn.Module | None = None, exclusive: bool = True):
        super().__init__()
        self.normalise, self.network, self.exclusive = normalise or nn.Identity(), network, exclusive

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.network is not None
        logits = self.network(self.normalise(inputs)).float()
        return logits.softmax(1) if self.exclusive else logits.sigmoid()


def on_cpu(configure_model: Callable[[Any], None]) -> Callable[[Any], None]:
    """Decorates `configure_model`: networks are built and tried out on the CPU, and strategies move them afterwards.

    Under some strategies Lightning calls that hook in a context that creates tensors on the GPU. The generators of CPU
    and GPU draw different numbers, so a seed would give other weights under these strategies.
    """

    @wraps(configure_model)
    def configured(task: "pl.LightningModule") -> None:
        with torch.device("cpu"):
            configure_model(task)

    return configured


def build_loss(target: Any, arguments: Sequence[str]) -> nn.Module:
    """Build a loss that is called with these arguments; raise MisfitError if its `forward` takes others."""
    loss: nn.Module = build(target)
    try:
        signature(loss.forward).bind(*arguments)
    except TypeError as error:
        words = f"is not a loss: forward of {type(loss).__name__} is called with {' and '.join(arguments)}"
        raise MisfitError(f"{target.type} {words}: {error}", target.name) from error
    return loss


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first parameter, else of its first buffer, else the CPU.

    A task's `device` is the one that the process computes on, and Lightning sets it before the network moves there.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


@contextmanager
def judging(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, without gradients; afterwards each part has its own mode again."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def try_network(network: nn.Module, example: Tensor, refusal: str) -> Any:
    """Passes an example through a network in evaluation mode, on the network's device, without gradients.

    The first batch would show the same error, but later and in terms of matrices or indices.

    Args:
        network: gives an output for the example.
        example: (1, …), on any device.
        refusal: what the error says before torch's reason.

    Returns:
        What the network gives.

    Raises:
        MisfitError: the network does not take the example.
    """
    try:
        with judging(network):
            return network(example.to(device_of(network)))
    except MisfitError:  # of an output
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if lacks_memory(error):
            raise
        raise MisfitError(f"{refusal}: {first_line(error)}", "model.network") from error
