"""Copy between the CPU and a GPU without waiting: tensors to the GPU, and numbers from it that are read later.

It imports torch and no module of ours.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """Return whether a device computes while the CPU continues, so that reading one of its numbers blocks."""
    return device.type == "cuda"


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the CPU to a device; to a GPU through pinned memory, which torch reuses once a copy is done, so
    that nothing is allocated in the steady state."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Deferred:
    """Numbers of a device that are being copied to the CPU.

    Args:
        values: float, of any shape; later changes of the tensor have no effect.

    Attributes:
        is_late: whether reading them now may block.
    """

    def __init__(self, values: Tensor):
        self.is_late = is_asynchronous(values.device)
        self._arrived: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._values = values.detach().clone()
            return
        self._values = values.detach().to("cpu", non_blocking=True)  # into pinned memory
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """Return the flattened numbers; wait only for their copy, not for later work on the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.flatten().tolist()


class Points:
    """Pass the values of logged training steps to loggers: at once or, from a GPU, at the next logged step.

    By then their copy is done, so nothing waits for the GPU. `log_pending` logs the remaining values.
    """

    def __init__(self) -> None:
        self._pending: tuple[Sequence[Any], list[str], Deferred, int] | None = None

    def log(self, loggers: Sequence[Any], values: dict[str, Tensor], step: int) -> None:
        """Log the values of one step by name, tensors () of the same device and dtype."""
        self.log_pending()
        if values:
            self._pending = loggers, list(values), Deferred(torch.stack(list(values.values()))), step
            if not self._pending[2].is_late:
                self.log_pending()

    def log_pending(self) -> None:
        """Log the values of the last logged step, if they are pending."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        loggers, names, values, step = pending
        points = dict(zip(names, values.read(), strict=True))
        for logger in loggers:
            logger.log_metrics(points, step)
