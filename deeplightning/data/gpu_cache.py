"""`in_memory: auto`: whether pictures go to the GPU is settled by what the first step leaves of its memory."""

import logging
from collections.abc import Sequence

import torch

from deeplightning.data.datasets import InMemory

log = logging.getLogger("deeplightning.data")

SHARE_OF_GPU = 0.5
"""Of the GPU's memory that is left beside the largest demand of a step, pictures take at most this share."""


class Room:
    """Settles once where the pictures of a training are."""

    def __init__(self) -> None:
        self._first: int | None = None  # the step before which the first batch comes

    def settle(self, step: int, sets: Sequence[InMemory], device: torch.device) -> bool:
        """Copies sets to a GPU that has room for them, all or the first; to be called before each batch.

        Args:
            step: the optimizer steps that are done. The first one of this process shows what a step takes.
            sets: the training set, then the validation set.
            device: the GPU.

        Returns:
            Whether it is settled.
        """
        if self._first is None:
            self._first = step
        if step == self._first:
            return False
        free = left(device)
        for chosen in (sets, sets[:1]):
            size = sum(one.size for one in chosen)
            if chosen and size <= free * SHARE_OF_GPU and _moved(chosen, device):
                words = "%-10s on %s: %s of pictures, of %s that a step leaves"
                log.info(words, "data", device, size_of(size), size_of(free))
                return True
        if sets:
            words = "%-10s in the memory of the CPU, batches pinned: %s of pictures, and a step leaves %s on %s"
            log.info(words, "data", size_of(sum(one.size for one in sets)), size_of(free), device)
        return True


def left(device: torch.device) -> int:
    """Bytes of a GPU that neither this process at its peak nor another one has taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


def _moved(sets: Sequence[InMemory], device: torch.device) -> bool:
    try:
        for one in sets:
            one.move(device)
    except torch.OutOfMemoryError:  # in the meantime another process has taken it
        for one in sets:
            one.on_device = {}
        return False
    return True


def size_of(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.2f} MiB"
