"""Datasets of torch become a data module: a function of the config makes one, two or three, and is `data.module.type`.

B batch. What a sample is, is the datasets' own matter; tasks understand a mapping of names to numbers or tensors, and
tuples such as (input, target).
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import sized_len
from torch import Generator
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from deeplightning.batches import by_name
from deeplightning.config.target import build
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import EndsWithItsRun
from deeplightning.data.loading import check_folds, check_loader, start_method
from deeplightning.data.samplers import BatchIndices, go_on, is_made_for, replicas, train_sampler
from deeplightning.data.splits import deal

if TYPE_CHECKING:
    from deeplightning.config.part_config import PartConfig


class OfDatasets(pl.LightningDataModule):
    """Loads batches of datasets as our other data modules do: the training set in an order that follows from the seed
    and in which a resumed run goes on, or that of `data.sampler`; the others in theirs, each sample once over all
    processes. `LightningDataModule.from_datasets` repeats samples where processes do not share them evenly.

    `data.num_splits` and `data.fold` take the validation set from the training set.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train, val, test: with a length; a sample is a mapping, a tuple, or what `collate` makes one of. None: there is
            none.
        collate: makes a batch of a list of samples; torch's `default_collate` stacks what they hold.

    Raises:
        DataConfigError: if a value of the config is impossible. It is a ValueError.
    """

    def __init__(
        self,
        cfg: "PartConfig",
        train: Dataset | None = None,
        val: Dataset | None = None,
        test: Dataset | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ):
        super().__init__()
        self.cfg = cfg
        check_folds(cfg.data.num_splits, cfg.data.fold)
        self._loader_options = build({"type": "builtins.dict", "params": cfg.data.loader})  # refs are functions
        self._drop_last = self._loader_options.pop("drop_last", False)
        check_loader(self._loader_options, self._drop_last, cfg.data.num_workers)
        found: dict[str, Any] = {"train": train, "val": val, "test": test}
        self._sets = {name: dataset for name, dataset in found.items() if dataset is not None}
        for name, dataset in self._sets.items():
            if sized_len(dataset) is None:
                raise DataConfigError(f"the {name} set, a {type(dataset).__name__}, has no length.")
        if cfg.data.num_splits is not None and train is not None:
            size = len(found["train"])
            if size < cfg.data.num_splits:
                raise DataConfigError(f"data.num_splits={cfg.data.num_splits}: there are {size} training samples.")
            of_fold = deal(np.zeros(size, dtype=int), cfg.data.num_splits, cfg.seed) == cfg.data.fold
            for name, mask in (("val", of_fold), ("train", ~of_fold)):
                self._sets[name] = Subset(found["train"], np.flatnonzero(mask).tolist())
        self._collate = collate
        self._sampler: BatchIndices | None = None
        for name, methods in (("val", ["val_dataloader"]), ("test", ["test_dataloader", "predict_dataloader"])):
            for method in methods if name not in self._sets else ():
                setattr(self, method, getattr(super(), method))  # where a method is, Lightning asks for its set

    def setup(self, stage: str | None = None) -> None:
        if stage == "fit":
            self._train_sampler()  # what it refuses is told before a run begins

    def example_batch(self, size: int) -> Any:
        """A batch of so many samples, some more than once where there are fewer, to try out whether parts fit."""
        name = next(iter(self._sets), "train")
        return self.dataset(name)[[position % len(self._sets[name]) for position in range(size)]]

    def dataset(self, name: str) -> "_Batches":
        """Return the set "train", "val" or "test"; `[positions]` of it is a batch. A task with `batch_names` gets the
        parts of a tuple by name; any other task gets the tuple.

        Raises:
            DataError: if there is none.
        """
        if name not in self._sets:
            there = ", ".join(self._sets) or "none"
            raise DataError(f"{self.cfg.data.module.type} gives no {name} set; there is: {there}. Leave out the stage.")
        task: Any = getattr(self.trainer, "lightning_module", None)
        return _Batches(self._sets[name], self._collate, getattr(task, "batch_names", ()))

    def train_dataloader(self) -> DataLoader:
        return self._loader("train", self._train_sampler())

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        """The test set, in data order."""
        return self._loader("test")

    def _train_sampler(self) -> BatchIndices:
        if self._sampler is None or not is_made_for(self._sampler, self.trainer):
            self._sampler = train_sampler(self.cfg, self.dataset("train"), self.trainer, drop_last=self._drop_last)
            if len(self._sampler) == 0:
                is_empty = len(self._sets["train"]) == 0
                why = "the training set is empty" if is_empty else "data.sampler gives none"
                raise DataConfigError(f"{self.cfg.data.module.type} gives no training batch: {why}.")
        elif self.trainer:
            go_on(self._sampler, self.trainer)
        return self._sampler

    def _loader(self, name: str, sampler: BatchIndices | None = None) -> DataLoader:
        if sampler is None:
            world, rank = replicas(self.trainer)
            batch_size = self.cfg.data.batch_size
            sampler = BatchIndices(self.dataset(name), batch_size, num_replicas=world, rank=rank)
        options, workers = dict(self._loader_options), self.cfg.data.num_workers
        if workers > 0:
            options.setdefault("persistent_workers", True)
            options.setdefault("multiprocessing_context", start_method())
            options["worker_init_fn"] = EndsWithItsRun(options.get("worker_init_fn"))
        else:
            # Lightning's advice to add workers is wrong for sets in memory.
            warnings.filterwarnings("ignore", message=".*does not have many workers")
        # Its own generator: else each epoch would draw a number from torch's global one.
        generator = Generator().manual_seed(self.cfg.seed)
        dataset = self.dataset(name)
        return DataLoader(
            dataset, batch_size=None, sampler=sampler, num_workers=workers, generator=generator, **options
        )


class _Batches(Dataset):
    """A dataset that is asked for whole batches. One with named columns also gets `index`, the position of each row in
    the dataset, int64 (B,).

    Args:
        names: of the parts of a batch that is a tuple or list; empty: such a batch stays as it is.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[object]], object], names: Sequence[str] = ()):
        self.of, self.collate, self.names = dataset, collate, names

    def __len__(self) -> int:
        return len(self.of)

    def __getattr__(self, name: str) -> Any:
        """Columns of the set, such as `labels`."""
        if name in ("of", "collate", "names") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.of, name)

    def __getitem__(self, positions: Sequence[int]) -> Any:
        # Index -1 is padding: the row takes the last sample, and its index marks it as not counted.
        batch = self.collate([self.of[int(position) % len(self.of)] for position in positions])
        named = by_name(batch, self.names)
        return batch if named is None else {**named, "index": torch.as_tensor(np.asarray(positions))}
