"""Copies between the CPU and a GPU for which neither waits: what goes there, and numbers that are read when they have
come back. Imports torch and nothing of ours."""

import torch
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """Whether a device computes on while the CPU goes ahead, so that reading one of its numbers is a wait."""
    return device.type == "cuda"


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values of the CPU on a device.

    They go to a GPU from pinned memory. torch keeps that, and uses it again once the copies from it are done, so that
    none is allocated in the steady state.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Deferred:
    """Numbers of a device on their way to the CPU.

    Args:
        values: float, of any shape; what happens to the tensor later changes nothing.

    Attributes:
        is_late: whether reading them now may be a wait.
    """

    def __init__(self, values: Tensor):
        self.is_late = is_asynchronous(values.device)
        self._arrived: torch.cuda.Event | None = None
        if values.device.type != "cuda":
            self._values = values.detach().clone()
            return
        self._values = values.detach().to("cpu", non_blocking=True)  # pinned: torch sees to that
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """The numbers, flat; waits for them alone, not for what the device was given since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.flatten().tolist()
