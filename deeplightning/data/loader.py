"""The loader of sets that are held in memory: torch's, without what it does beside asking for the next batch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from deeplightning.data.datasets import Batch, InMemory
from deeplightning.data.samplers import BatchIndices


class InMemoryLoader(DataLoader):
    """Batches of an `InMemory` set in the order of a `BatchIndices`; any other use of it is torch's.

    A batch of torch's costs 30 µs beside the indexing: a list of positions, a look at each tensor, a profiler's mark.
    """

    def __iter__(self) -> Any:
        dataset, sampler = self.dataset, self.sampler
        if not isinstance(dataset, InMemory) or not isinstance(sampler, BatchIndices) or self.num_workers:
            return super().__iter__()
        batches: Iterator[Batch] = map(dataset.__getitem__, sampler.arrays())
        return map(_pinned, batches) if self.pin_memory and torch.accelerator.is_available() else batches


def _pinned(batch: Batch) -> Batch:
    """In memory that a GPU reads by itself, while the CPU goes on."""
    return {name: values.pin_memory() for name, values in batch.items()}
