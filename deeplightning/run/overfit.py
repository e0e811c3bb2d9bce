"""`train.overfit: N`: a data module returns the same N batches in each epoch, for training and for validation."""

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from lightning_fabric.utilities.data import sized_len

log = logging.getLogger("deeplightning")


def overfit(data: Any, number: int) -> None:
    """Make a data module return its first `number` training batches in each epoch, also for validation.

    They are read once and kept in memory. Later changes to a batch, such as augmentation, still apply.
    """
    fixed = _Batches(data.train_dataloader, number)
    data.train_dataloader, data.val_dataloader = lambda: _Loader(fixed, data.trainer), lambda: _Loader(fixed)


class _Batches:
    """The first batches of a loader's first epoch.

    Args:
        make: creates the loader.
    """

    def __init__(self, make: Callable[[], object], number: int):
        self.make, self.number = make, number

    @cached_property
    def loader(self) -> Any:
        loader: Any = self.make()
        sampler: object = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(0)
            if hasattr(sampler, "start"):
                sampler.start = 0  # set in a resumed run
        return loader

    def __len__(self) -> int:
        length = sized_len(self.loader)
        return self.number if length is None else min(self.number, length)

    @cached_property
    def kept(self) -> list[object]:
        kept = list(itertools.islice(self.loader, self.number))
        more = ", which has no more" if len(kept) < self.number else ""
        batches = f"{len(kept)} batch" + "es" * (len(kept) != 1)
        log.info("%-10s %s of the training set%s, for training and validation", "overfit", batches, more)
        return kept


class _Loader:
    """A loader of stored batches. In training, a pass begins behind the batches of its epoch that are done, which a
    resumed run has.

    Attributes:
        sampler: has the `samples_of` of the training set's sampler, if that has one.
        dataset: the training set.
    """

    batch_sampler = None  # Lightning reads it if there is a sampler

    def __init__(self, batches: _Batches, trainer: Any = None):
        self.batches, self.trainer = batches, trainer
        self.dataset = getattr(batches.loader, "dataset", None)
        samples_of = getattr(getattr(batches.loader, "sampler", None), "samples_of", None)
        self.sampler = SimpleNamespace(**({"samples_of": samples_of} if samples_of else {}))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready if self.trainer is not None else 0
        return iter(self.batches.kept[done if done < len(self) else 0 :])
