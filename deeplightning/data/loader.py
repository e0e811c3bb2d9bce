"""The loader of sets that are held in memory: torch's, without what it does beside asking for the next batch."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from deeplightning.data.datasets import InMemory
from deeplightning.data.samplers import BatchIndices


class InMemoryLoader(DataLoader):
    """Batches of an `InMemory` set in the order of a `BatchIndices`; any other use of it is torch's.

    A batch of torch's costs 30 µs beside the indexing: a list of positions, a look at each tensor, a profiler's mark.

    Attributes:
        device: the GPU that batches are to be on; None: they are made on the CPU. It is no argument, since Lightning
            makes some loaders again with the arguments of torch's.
    """

    device: torch.device | None = None

    def __iter__(self) -> Any:
        dataset, sampler = self.dataset, self.sampler
        if not isinstance(dataset, InMemory) or not isinstance(sampler, BatchIndices) or self.num_workers:
            return super().__iter__()
        if self.device is not None:
            return dataset.batches(sampler.arrays(), self.device)
        return map(dataset.__getitem__, sampler.arrays())
