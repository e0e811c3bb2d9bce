"""Networks of a config: built on the CPU, tried with an example input before data are read, and what they give.

A network may give something other than a tensor, such as a dataclass, a dict or a tuple: the task takes what
`model.output` names of it.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from deeplightning.config.target import build
from deeplightning.words import did_you_mean, first_line, lacks_memory


class _AboutKey(ValueError):
    """
    Attributes:
        key: the config key that it is about, where the message does not begin with it.
    """

    def __init__(self, message: str, key: str | None = None):
        super().__init__(message)
        self.key = key


class LabelError(_AboutKey):
    """The data's labels do not fit the network's classes. Ends the run with exit code 3."""

    exit_code = 3


class MisfitError(_AboutKey):
    """Parts of the config that do not fit each other. Ends the run with exit code 2."""

    exit_code = 2


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


def build_loss(target: Any, arguments: Sequence[str]) -> nn.Module:
    """Build a loss that is called with these arguments; raise MisfitError if its `forward` takes others."""
    loss: nn.Module = build(target)
    try:
        signature(loss.forward).bind(*arguments)
    except TypeError as error:
        words = f"is not a loss: forward of {type(loss).__name__} is called with {' and '.join(arguments)}"
        raise MisfitError(f"{target.type} {words}: {error}", target.name) from error
    return loss


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
    """Pass an example through a network in evaluation mode, on the network's device, without gradients.

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
    device = next(itertools.chain(network.parameters(), network.buffers()), example).device
    try:
        with judging(network):
            return network(example.to(device))
    except MisfitError:  # of an output
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if lacks_memory(error):
            raise
        raise MisfitError(f"{refusal}: {first_line(error)}", "model.network") from error


class Picked:
    """A forward hook by which a network gives one of its outputs alone: in training, in validation and in the export.

    A tensor stays as it is: torchvision's inception gives several in training, and one in evaluation.

    Args:
        name: of an attribute or a key; or the position in a tuple or list, from 0.
        network: the name of the network, for messages.
    """

    def __init__(self, name: str | int, network: str):
        self.name, self.network = name, network

    def __call__(self, module: nn.Module, inputs: object, outputs: Any) -> Any:
        """Return the output with this name; raise MisfitError if there is none."""
        if isinstance(outputs, Tensor):
            return outputs
        names = names_in(outputs)
        if self.name not in names:
            given = f"{self.network} gives a {type(outputs).__name__}"
            if not names:
                raise MisfitError(f"{given}, which has no outputs by name", "model.output")
            near = did_you_mean(str(self.name), map(str, names))
            raise MisfitError(
                f"{given} without {self.name!r}.{near} It has {', '.join(map(str, names)):.300}", "model.output"
            )
        is_attribute = isinstance(self.name, str) and not isinstance(outputs, Mapping)
        return getattr(outputs, str(self.name)) if is_attribute else outputs[self.name]


def names_in(outputs: object) -> list[str | int]:
    """Return what `model.output` may be for such outputs; empty: they are a tensor, or of a kind that has no names."""
    if isinstance(outputs, Mapping):  # a ModelOutput of Hugging Face's is one
        return list(outputs)
    if dataclasses.is_dataclass(outputs):
        return [field.name for field in dataclasses.fields(outputs)]
    if isinstance(outputs, tuple | list):
        return [*getattr(outputs, "_fields", ()), *range(len(outputs))]
    return []


def refusal(network: str, outputs: object, wanted: str) -> MisfitError:
    """Return the error of outputs that are not what a task wants, and what to do about outputs with names."""
    found = f"{tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    message = f"{network} gives {found}, not {wanted}"
    if names := names_in(outputs):
        several = ", ".join(map(str, names))
        message += f". Set model.output to one of what it has: {several:.300}; for example model.output={names[0]}"
    return MisfitError(message, "model.network")


def check_number(outputs: Tensor, names: list[str], what: str, per: str = "") -> None:
    """Raise MisfitError unless there is one output (B, K, …) for each name; without names any number will do."""
    if names and outputs.shape[1] != len(names):
        raise MisfitError(
            f"the data has {len(names)} {what}, the network {outputs.shape[1]} outputs{per}; set "
            f"model.network.params.num_classes={len(names)}, or whatever it calls them",
            "model.network",
        )
