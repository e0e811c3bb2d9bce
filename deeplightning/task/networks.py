"""Check the network and losses of a config before data are read, and select one of a network's outputs.

A network may return something other than a tensor, such as a dataclass, a dict or a tuple; `model.output` names the
part that the task uses.
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


class _KeyedError(ValueError):
    """
    Attributes:
        key: the config key that the error is about, if the message does not begin with it.
    """

    def __init__(self, message: str, key: str | None = None):
        super().__init__(message)
        self.key = key


class LabelError(_KeyedError):
    """The data's labels do not fit the network's classes. Ends the run with exit code 3."""

    exit_code = 3


class MisfitError(_KeyedError):
    """Parts of the config that do not fit each other. Ends the run with exit code 2."""

    exit_code = 2


class Probabilities(nn.Module):
    """Module exported for classes and labels: inputs (B, …) to probabilities float32 (B, K, …).

    Args:
        network: returns logits.
        normalise: is applied to inputs first, if given.
        exclusive: whether a sample has exactly one class, rather than any number of labels.
    """

    def __init__(self, network: nn.Module | None, normalise: nn.Module | None = None, exclusive: bool = True):
        super().__init__()
        self.normalise, self.network, self.exclusive = normalise or nn.Identity(), network, exclusive

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.network is not None
        logits = self.network(self.normalise(inputs)).float()
        return logits.softmax(1) if self.exclusive else logits.sigmoid()


def build_loss(target: Any, arguments: Sequence[str]) -> nn.Module:
    """Build a loss that is called with these arguments; raise MisfitError if its `forward` does not accept them."""
    loss: nn.Module = build(target)
    try:
        signature(loss.forward).bind(*arguments)
    except NameError:  # an annotation that only type checkers resolve; Python 3.14 evaluates it here
        return loss
    except TypeError as error:
        words = f"is not a loss: forward of {type(loss).__name__} is called with {' and '.join(arguments)}"
        raise MisfitError(f"{target.type} {words}: {error}", target.name) from error
    return loss


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode without gradients, and restore the mode of each submodule on exit."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def try_network(network: nn.Module, example: Tensor, summary: str) -> Any:
    """Pass an example through a network in evaluation mode, on the network's device, without gradients.

    The first batch would raise the same error, but later and in terms of matrices or indices.

    Args:
        network: is called with the example.
        example: (1, …), on any device.
        summary: start of the error message, before torch's reason.

    Returns:
        The output of the network.

    Raises:
        MisfitError: the network does not accept the example.
    """
    device = next(itertools.chain(network.parameters(), network.buffers()), example).device
    try:
        with evaluation_mode(network):
            return network(example.to(device))
    except MisfitError:  # raised by `SelectOutput`
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if lacks_memory(error):
            raise
        raise MisfitError(f"{summary}: {first_line(error)}", "model.network") from error


class SelectOutput:
    """Forward hook that makes a network return only one of its outputs: in training, validation and export.

    A tensor is returned unchanged: torchvision's Inception returns several outputs in training and one in evaluation.

    Args:
        name: an attribute or a key, or the position in a tuple or list, from 0.
        network: the name of the network, for messages.
    """

    def __init__(self, name: str | int, network: str):
        self.name, self.network = name, network

    def __call__(self, module: nn.Module, inputs: object, outputs: Any) -> Any:
        """Return the output with this name; raise MisfitError if there is none."""
        if isinstance(outputs, Tensor):
            return outputs
        names = output_names(outputs)
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


def output_names(outputs: object) -> list[str | int]:
    """Return the values that `model.output` may have for these outputs; [] if they are a tensor or have no names."""
    if isinstance(outputs, Mapping):  # including Hugging Face's ModelOutput
        return list(outputs)
    if dataclasses.is_dataclass(outputs):
        return [field.name for field in dataclasses.fields(outputs)]
    return [*getattr(outputs, "_fields", ()), *range(len(outputs))] if isinstance(outputs, tuple | list) else []


def output_error(network: str, outputs: object, wanted: str) -> MisfitError:
    """Return the error for outputs of the wrong form, with a hint if the outputs have names."""
    found = f"{tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    message = f"{network} gives {found}, not {wanted}"
    if names := output_names(outputs):
        several = ", ".join(map(str, names))
        message += f". Set model.output to one of its outputs: {several:.300}; for example model.output={names[0]}"
    return MisfitError(message, "model.network")


def check_trained_names(names: list[str], trained: list[str]) -> None:
    """Raise MisfitError if a checkpoint was trained with other classes than those of the data, if both have names."""
    if names and trained not in (names, [str(number) for number in range(len(trained))]):
        message = f"the checkpoint was trained with the classes {', '.join(trained)[:200]}, not those of the data"
        raise MisfitError(message, "data.module")


def check_output_count(outputs: Tensor, names: list[str], what: str, per: str = "") -> None:
    """Raise MisfitError unless there is one output (B, K, …) for each name; without names any number is accepted."""
    if names and outputs.shape[1] != len(names):
        raise MisfitError(
            f"the data has {len(names)} {what}, the network {outputs.shape[1]} outputs{per}; set "
            f"model.network.params.num_classes={len(names)}, or the param that it uses instead",
            "model.network",
        )
