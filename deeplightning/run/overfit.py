"""`train.overfit: N`: a data module returns the same N batches in each epoch, for training and for validation."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger("deeplightning")


def overfit(data: Any, number: int) -> None:
    """Make a data module return its first `number` training batches in each epoch, also for validation.

    They are read once and kept in memory. Later changes to a batch, such as augmentation, still apply.
    """
    kept = functools.cache(functools.partial(_first, data.train_dataloader, number))
    data.train_dataloader, data.val_dataloader = lambda: _Loader(kept(), data.trainer), lambda: _Loader(kept())


def _first(make: Callable[[], Any], number: int) -> list[object]:
    """Return the first batches of the first epoch of the loader that `make` creates."""
    loader: Any = make()
    sampler: Any = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(0)
        sampler.start = 0  # that of a resumed run is behind the batches that are done
    kept = list(itertools.islice(loader, number))
    more = ", which has no more" if len(kept) < number else ""
    log.info("%-10s %d batches of the training set%s, for training and validation", "overfit", len(kept), more)
    return kept


class _Loader:
    """A loader of kept batches. In training, a pass begins behind the batches of its epoch that are done."""

    def __init__(self, batches: list[object], trainer: Any = None):
        self.batches, self.trainer = batches, trainer

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[object]:
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready if self.trainer is not None else 0
        return iter(self.batches[done if done < len(self) else 0 :])
