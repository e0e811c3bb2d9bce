"""`train.overfit: N`: a data module returns the same N batches in each epoch, for training and for validation."""

import itertools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_fabric.utilities.data import sized_len

if TYPE_CHECKING:
    import pytorch_lightning as pl

log = logging.getLogger("deeplightning")


def overfit(data: Any, number: int) -> None:
    """Make a data module return its first `number` training batches in each epoch, also for validation.

    They are read once and kept in memory. Later changes to a batch, such as augmentation, still apply.
    """
    fixed = _Batches(data.train_dataloader, number)

    def train_dataloader() -> _Loader:
        return _Loader(fixed, _done(data.trainer, len(fixed)))

    data.train_dataloader, data.val_dataloader = train_dataloader, lambda: _Loader(fixed)


class _Batches:
    """The first batches of a loader's first epoch.

    Args:
        make: creates the loader.
    """

    def __init__(self, make: Callable[[], object], number: int):
        self.make, self.number = make, number
        self._loader: object = None
        self._kept: list[object] | None = None

    @property
    def loader(self) -> Any:
        if self._loader is None:
            self._loader = self.make()
            sampler: object = getattr(self._loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(0)
                if hasattr(sampler, "start"):
                    sampler.start = 0  # set in a resumed run
        return self._loader

    def __len__(self) -> int:
        length = sized_len(self.loader)
        return self.number if length is None else min(self.number, length)

    @property
    def kept(self) -> list[object]:
        if self._kept is None:
            self._kept = list(itertools.islice(self.loader, self.number))
            more = ", which has no more" if len(self._kept) < self.number else ""
            batches = f"{len(self._kept)} batch" + "es" * (len(self._kept) != 1)
            log.info("%-10s %s of the training set%s, for training and validation", "overfit", batches, more)
        return self._kept


class _Loader:
    """A loader of stored batches; its first pass begins at `start`.

    Attributes:
        sampler: has the `samples_of` of the training set's sampler, if that has one.
        dataset: the training set.
    """

    batch_sampler = None  # Lightning reads it if there is a sampler

    def __init__(self, batches: _Batches, start: int = 0):
        self.batches, self.start = batches, start
        self.dataset = getattr(batches.loader, "dataset", None)
        samples_of = getattr(getattr(batches.loader, "sampler", None), "samples_of", None)
        self.sampler = SimpleNamespace(**({"samples_of": samples_of} if samples_of else {}))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if not self.batches.kept:
            return
        *rest, last = self.batches.kept[self.start :]
        yield from rest
        self.start = 0  # before the last batch, after which Lightning stops
        yield last


def _done(trainer: "pl.Trainer", length: int) -> int:
    """Return how many batches of its epoch a resumed run has done; 0 if that epoch is complete."""
    done: int = trainer.fit_loop.epoch_loop.batch_progress.current.ready if trainer is not None else 0
    return done if done < length else 0
