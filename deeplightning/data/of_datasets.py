"""Make a data module of torch datasets (a function of the config, `data.module.type`), or of a module's own loaders.

B batch. Samples may have any form; tasks understand a mapping of names to numbers or tensors, and tuples such as
(input, target).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import sized_len
from torch.utils.data import Dataset, Subset, default_collate

from deeplightning.batches import by_name
from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError
from deeplightning.data.loading import SplitData
from deeplightning.data.splits import assign_folds


class OfModule(pl.LightningDataModule):
    """Marks a run without a data module: Lightning gets the loaders from the LightningModule.

    A config without `data` gets this target if the class of `model.module` defines `train_dataloader`.
    """


class OfDatasets(SplitData):
    """Loads batches of torch datasets like the other data modules: the training set in an order that follows from the
    seed, or that of `data.sampler`, and that a resumed run continues; the other sets in their own order, each sample
    once over all processes. `LightningDataModule.from_datasets` repeats samples if processes cannot share them evenly.

    `data.num_splits` and `data.fold` hold out the validation set from the training set.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train, val, test: datasets with a length, or None; a sample is a mapping, a tuple, or anything that `collate`
            accepts.
        collate: makes a batch of a list of samples; torch's `default_collate` stacks their values.

    Raises:
        DataConfigError: a value of the config is invalid. It is a ValueError.
    """

    def __init__(
        self,
        cfg: PartConfig,
        train: Dataset | None = None,
        val: Dataset | None = None,
        test: Dataset | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ):
        super().__init__(cfg)
        found: dict[str, Any] = {"train": train, "val": val, "test": test}
        self._samples = {name: dataset for name, dataset in found.items() if dataset is not None}
        for name, dataset in self._samples.items():
            if sized_len(dataset) is None:
                raise DataConfigError(f"the {name} set, a {type(dataset).__name__}, has no length.")
        if cfg.data.num_splits is not None and train is not None:
            size = len(found["train"])
            if size < cfg.data.num_splits:
                raise DataConfigError(f"data.num_splits={cfg.data.num_splits}: there are {size} training samples.")
            of_fold = assign_folds(np.zeros(size, dtype=int), cfg.data.num_splits, cfg.seed) == cfg.data.fold
            for name, mask in (("val", of_fold), ("train", ~of_fold)):
                self._samples[name] = Subset(found["train"], np.flatnonzero(mask).tolist())
        self._collate = collate
        for name, methods in (("val", ["val_dataloader"]), ("test", ["test_dataloader", "predict_dataloader"])):
            for method in methods if name not in self._samples else ():
                # Lightning calls each method that differs from its own.
                setattr(self, method, getattr(super(SplitData, self), method))

    transfer_batch_to_device = pl.LightningDataModule.transfer_batch_to_device  # so that Lightning calls the task's own

    def setup(self, stage: str | None = None) -> None:
        if stage == "fit":
            self._prepare_stage(stage)  # so that errors of a sampler appear before the run starts

    def example_batch(self, size: int) -> Any:
        """Return a batch of `size` samples, repeated if there are fewer, to test whether parts fit together."""
        name = next(iter(self._samples), "train")
        return self.dataset(name)[[position % len(self._samples[name]) for position in range(size)]]

    def dataset(self, split: str) -> "_Batches":
        """Return the set "train", "val" or "test"; its `[positions]` is a batch. A task with `batch_names` gets the
        parts of a tuple by name; any other task gets the tuple.

        Raises:
            DataError: the set does not exist.
        """
        self._require_split(split)
        task: Any = getattr(self.trainer, "lightning_module", None)
        return _Batches(self._samples[split], self._collate, getattr(task, "batch_names", ()))

    def _describe(self) -> str:
        return self.cfg.data.module.type


class _Batches(Dataset):
    """Wraps a dataset so that indexing returns whole batches. A batch with named columns also gets `index`, the
    position of each row in the dataset, int64 (B,). `names`: of the parts of a batch that is a tuple or list; empty:
    such a batch stays as it is."""

    def __init__(self, dataset: Any, collate: Callable[[list[object]], object], names: Sequence[str] = ()):
        self.of, self.collate, self.names = dataset, collate, names

    def __len__(self) -> int:
        return len(self.of)

    def __getattr__(self, name: str) -> Any:
        """Return a column of the set, such as `labels`."""
        if name in ("of", "collate", "names") or name.startswith("__"):
            raise AttributeError(name)
        return _column(self.of, name)

    def __getitem__(self, positions: Sequence[int]) -> Any:
        # Index -1 is padding: the row has the last sample, and its index excludes it from counts.
        batch = self.collate([self.of[int(position) % len(self.of)] for position in positions])
        named = by_name(batch, self.names)
        return batch if named is None else {**named, "index": torch.as_tensor(np.asarray(positions))}


def _column(dataset: Any, name: str) -> Any:
    """Return an attribute of a set; for a Subset (a fold, or from `random_split`), the entries of its samples. Raise
    AttributeError if the set has no such attribute, or it does not have one entry per sample."""
    if not isinstance(dataset, Subset):
        return getattr(dataset, name)
    column = _column(dataset.dataset, name)
    if not hasattr(column, "__len__") or isinstance(column, dict) or len(column) != len(dataset.dataset):  # type: ignore[arg-type]
        raise AttributeError(name)
    rows = getattr(column, "iloc", column)  # of pandas, whose `[]` takes the labels of rows
    return [rows[position] for position in dataset.indices]
