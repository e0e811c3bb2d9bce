"""Texts of other libraries' exceptions, where the type of an exception is not specific enough.

Only `matches` compares them. If a library changes a message, its exception is treated as unexpected: exit code 1 and a
traceback. `tests/runs/test_messages.py` makes each library raise each exception.
"""

import re
from enum import Enum


class ErrorText(Enum):
    """Parts of messages, as regular expressions, with the library and its version."""

    ADDRESS_IN_USE = "EADDRINUSE"  # torch 2.15, torch.distributed.TCPStore
    ARGUMENT_BY_POSITION = r"can be passed to its parent's `(\w+)="  # Lightning 2.6, when it re-creates a loader
    BATCH_SIZE_IS_FIXED = "specialized it to be a constant"  # torch 2.15, torch.export
    CANNOT_BUILD = "JIT load"  # DeepSpeed 0.19, op_builder
    HOOK_IS_REMOVED = "has been removed in"  # Lightning 2.6, configuration_validator
    NO_CUDA = "NVIDIA driver|CUDA enabled|CUDA GPUs are available|CUDA driver"  # torch 2.15, torch.cuda
    NO_DATALOADER = r"`(val|test|predict)_dataloader` must be implemented"  # Lightning 2.6
    NO_GRADIENT = "does not require grad"  # torch 2.15, autograd
    NO_GROUP = "process group has not been initialized"  # torch 2.15, torch.distributed
    NO_METRIC = "conditioned on metric"  # Lightning 2.6, EarlyStopping
    OTHER_NETWORK = r"Error\(s\) in loading state_dict"  # torch 2.15, nn.Module.load_state_dict
    OTHER_OPTIMIZER = "loaded state dict"  # torch 2.15, optim.Optimizer.load_state_dict


def matches(error: BaseException, *texts: ErrorText) -> re.Match[str] | None:
    """Return the first match of one of the texts in the message of an exception, or None."""
    found = (re.search(text.value, str(error)) for text in texts)
    return next((match for match in found if match), None)
