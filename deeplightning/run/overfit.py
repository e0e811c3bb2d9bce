"""`train.overfit: N`: a data module returns the same N batches in each epoch, for training and for validation."""

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

log = logging.getLogger("deeplightning")


def overfit(data: Any, number: int) -> None:
    """Make a data module return its first `number` training batches in each epoch, also for validation.

    They are read once and kept in memory. Later changes to a batch, such as augmentation, still apply.
    """
    fixed = _Batches(data.train_dataloader, number)
    data.train_dataloader = data.val_dataloader = lambda: fixed


class _Batches:
    """The first batches of a loader's first epoch.

    Args:
        make: creates the loader.
    """

    def __init__(self, make: Callable[[], Any], number: int):
        self.make, self.number = make, number

    @cached_property
    def kept(self) -> list[object]:
        loader = self.make()
        sampler = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(0)
            sampler.start = 0  # that of a resumed run is behind the batches that are done
        kept = list(itertools.islice(loader, self.number))
        more = ", which has no more" if len(kept) < self.number else ""
        log.info("%-10s %d batches of the training set%s, for training and validation", "overfit", len(kept), more)
        return kept

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[object]:
        return iter(self.kept)
