"""What a network gives that is no tensor, such as a dataclass, a dict or a tuple: the task takes what `model.output`
names of it.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from deeplightning.task.task_errors import MisfitError


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
        """Return the output of this name; raise MisfitError if there is none."""
        if isinstance(outputs, Tensor):
            return outputs
        names = names_in(outputs)
        if self.name not in names:
            if not names:
                raise MisfitError(
                    f"{self.network} gives {_kind(outputs)}, which has no outputs by name", "model.output"
                )
            close = difflib.get_close_matches(str(self.name), [str(name) for name in names], 1)
            near = f" Do you mean {close[0]}?" if close else ""
            raise MisfitError(
                f"{self.network} gives {_kind(outputs)} without {self.name!r}.{near} It has "
                f"{', '.join(map(str, names)):.300}",
                "model.output",
            )
        is_attribute = isinstance(self.name, str) and not isinstance(outputs, Mapping)
        return getattr(outputs, str(self.name)) if is_attribute else outputs[self.name]


def names_in(outputs: object) -> list[str | int]:
    """What `model.output` may be for such outputs; empty: they are a tensor, or of a kind that has no names."""
    if isinstance(outputs, Mapping):  # a ModelOutput of Hugging Face's is one
        return list(outputs)
    if dataclasses.is_dataclass(outputs):
        return [field.name for field in dataclasses.fields(outputs)]
    if isinstance(outputs, tuple | list):
        return [*getattr(outputs, "_fields", ()), *range(len(outputs))]
    return []


def refusal(network: str, outputs: object, wanted: str) -> MisfitError:
    """The error of a network whose outputs are not what its task wants, and what to do about outputs with names."""
    found = f"{tuple(outputs.shape)}" if isinstance(outputs, Tensor) else _kind(outputs)
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


def _kind(outputs: object) -> str:
    return f"a {type(outputs).__name__}"
