"""What all image data modules share: labelled samples go in, seeded splits and fast loaders of uint8 batches come out.

A data module of your own subclasses `ImageData` and says in `read` which samples there are; the rest is done here.
"""

import inspect
import multiprocessing
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Generator, nn, uint8
from torch.utils.data import DataLoader

from deeplightning.config.target import build
from deeplightning.data.cache import ImageCache, cache_folder
from deeplightning.data.datasets import Batch, EndsWithItsRun, InMemory, OnDemand, Samples, prepare_all
from deeplightning.data.errors import DataConfigError, DataError
from deeplightning.data.loader import InMemoryLoader
from deeplightning.data.memory import Room
from deeplightning.data.samplers import BatchIndices, go_on, train_sampler
from deeplightning.data.splits import deal, shuffled
from deeplightning.image import MAX_PIXELS, ImageSpec

IN_MEMORY_LIMIT = 2**30
"""Bytes of prepared images, all splits together, up to which they are held in memory: per process, 1 GiB."""

_SPLITS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}
_OWN_KEYS = {
    "dataset": "it comes from data.module",
    "batch_size": "set data.batch_size",
    "num_workers": "set data.num_workers",
    "shuffle": "the training set is shuffled, the others are not",
    "sampler": "set data.sampler",
    "batch_sampler": "batches come from deeplightning.data.samplers.BatchIndices",
    "generator": "the order comes from seed",
}
_WORKER_KEYS = ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout", "worker_init_fn")
_SPLIT_TEST, _LIMIT, _SPLIT_VAL = range(3)  # purposes of the seed


class ImageData(pl.LightningDataModule):
    """Base of the image data modules.

    Validation is one fold of the training set: fold `data.fold` of `data.num_splits`, or where that is null a tenth of
    all the training samples. It is never the test set. The splits depend on `seed` alone. Random numbers of torch are
    not used up by loading, so results do not depend on `data.num_workers`.

    Image files are decoded once, by all cores, into a cache that this and later runs, and all processes of each, map
    into their memory (`deeplightning.data.cache` says when it is right, how large it gets and how to be rid of it).
    Sets held there or in memory are loaded without workers: a batch is one indexing operation, cheaper than handing it
    over. Workers start by a fork server, where there is one, since a fork of a process with threads may hang; like
    every way but fork it needs `if __name__ == "__main__":` in a script. `data.loader.multiprocessing_context` changes
    it.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        image_spec: how images are prepared.
        augment: modules that take and give uint8 (B, C, H, W), applied in turn to training batches on their device.
        in_memory: true: each process holds the prepared images in its memory; "device": on its GPU as well; false: they
            come from the cache, or are prepared for each batch where there is none. None: like false where they are
            cached, else like true if they take at most `IN_MEMORY_LIMIT`. "auto": like None, and they are copied to the
            GPU after the first step if they take at most `SHARE_OF_GPU` of the memory that it leaves.
        limit: use at most this many training samples (validation included) and as many test samples, a seeded choice.
        max_pixels: largest image file that is decoded.
        cache: where decoded image files are kept: a folder; true: the one that the environment variable
            `DEEPLIGHTNING_CACHE` names, else `deeplightning/images` in the user's cache folder; false: nowhere.

    Attributes:
        image_spec: as given.
        class_names: the name of each label, in order; there after `setup`.

    Raises:
        DataConfigError: if a value of the config is impossible. It is a ValueError.
    """

    def __init__(
        self,
        cfg: Any,
        image_spec: ImageSpec,
        *,
        augment: Sequence[nn.Module] = (),
        in_memory: bool | Literal["auto", "device"] | None = "auto",
        limit: int | None = None,
        max_pixels: int = MAX_PIXELS,
        cache: bool | str = True,
    ):
        super().__init__()
        self.cfg = cfg
        self.image_spec = image_spec
        self.class_names: list[str] = []
        self.in_memory = None if in_memory == "auto" else in_memory
        self._room = Room() if in_memory == "auto" else None
        self.limit = limit
        self.max_pixels = max_pixels
        self.cache = cache
        if in_memory not in (None, True, False, "auto", "device"):
            raise DataConfigError(
                f"data.module.params.in_memory must be auto, null, true, false or device, not {in_memory!r}."
            )
        if not isinstance(cache, bool | str) or cache == "":
            raise DataConfigError(f"data.module.params.cache must be a folder, true or false, not {cache!r}.")
        if limit is not None and not is_whole(limit, 1):
            raise DataConfigError(f"data.module.params.limit must be null or a number of at least 1, not {limit!r}.")
        if not is_whole(max_pixels, 1):
            raise DataConfigError(f"data.module.params.max_pixels must be a number of at least 1, not {max_pixels!r}.")
        check_folds(cfg.data.num_splits, cfg.data.fold)
        for position, module in enumerate(augment):
            if not isinstance(module, nn.Module):
                raise DataConfigError(f"data.module.params.augment[{position}] must be an nn.Module, not {module!r}.")
        self._augment = nn.Sequential(*augment)
        self._loader_options = build({"type": "builtins.dict", "params": cfg.data.loader})  # refs are functions
        self._drop_last = self._loader_options.pop("drop_last", False)
        check_loader(self._loader_options, self._drop_last, cfg.data.num_workers)
        self._samples: dict[str, Samples] = {}
        self._datasets: dict[str, InMemory | OnDemand] = {}
        self._has_own_order = getattr(cfg.data, "sampler", None) is not None
        self._sampler: BatchIndices | None = None
        self._cache: ImageCache | None = None

    def read(self) -> dict[str, Samples]:
        """To be written by a subclass: finds the samples and sets `class_names`.

        Returns:
            Under "train", and where there are such under "val" and "test"; or under "all", to be divided 80/10/10.

        Raises:
            DataError: if the data are not there or damaged.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Looks whether the data are there, without reading or writing any; cheap.

        Raises:
            DataError: if not.
        """

    def example_batch(self, size: int) -> Batch:
        """A batch that is made up, to try out whether the parts of a config fit; reads no data and needs no `setup`.

        Args:
            size: samples.

        Returns:
            What a loader gives: random pixels, labels from the first class to the last. While `class_names` is empty,
            each label is 0.
        """
        spec, last = self.image_spec, max(0, len(self.class_names) - 1)
        shape = (size, spec.channels, spec.height, spec.width)
        pixels = torch.randint(256, shape, dtype=uint8, generator=Generator().manual_seed(0))
        labels = torch.linspace(0, last, size).round().long()
        return {"image": pixels, "label": labels, "index": torch.arange(size)}

    def setup(self, stage: str | None = None) -> None:
        """Reads and divides the samples once, and prepares the images that the stage needs (None: all)."""
        if not self._samples:
            try:
                self.check()
                found = self.read()
            except OSError as error:
                raise DataError(f"{self._describe()} cannot be read: {error}") from error
            self._samples = self._divide(found)
            if (folder := cache_folder(self.cache)) is not None:
                root = self.cfg.data.root
                source = type(self).__name__ if root is None else str(Path(root).expanduser().absolute())
                self._cache = ImageCache(folder, source, self.image_spec, self.max_pixels, self._size())
        for split in _SPLITS[stage] if stage else ("train", "val", "test"):
            if split in self._samples:
                self.dataset(split)
        if self._drop_last:
            self._check_batches(len(self._samples["train"]))
        if self._has_own_order and stage in ("fit", None):
            self._train_sampler()  # what it refuses is told before a run begins

    def _check_batches(self, samples: int) -> None:
        world, batch_size = self.trainer.world_size if self.trainer else 1, self.cfg.data.batch_size
        if samples < batch_size * world:
            raise DataConfigError(
                f"data.loader.drop_last leaves no training batch: {samples} samples are fewer than "
                f"{batch_size} (data.batch_size) x {world} process(es)."
            )

    def dataset(self, split: str) -> InMemory | OnDemand:
        """The set "train", "val" or "test"; call `setup` first.

        Raises:
            DataError: if there is none, or an image is damaged.
        """
        if split not in self._datasets:
            if split not in self._samples:
                raise DataError(
                    f"There is no {split} set: {self._describe()} has none. Leave out the stage, or add one."
                )
            self._datasets[split] = self._prepare(self._samples[split])
        return self._datasets[split]

    def _prepare(self, samples: Samples) -> InMemory | OnDemand:
        if self._cache is not None and not isinstance(samples.items, np.ndarray) and len(samples):
            if (cached := self._cache.rows_of(samples.items)) is not None:
                pixels, rows = cached
                if self.in_memory:
                    return InMemory(samples, torch.from_numpy(pixels[rows]))
                with warnings.catch_warnings(action="ignore"):  # of torch: pixels that are mapped cannot be written
                    return InMemory(samples, torch.from_numpy(pixels), torch.from_numpy(rows))
            self._cache = None  # the log has said why, once
        if self.in_memory is None:
            spec = self.image_spec
            self.in_memory = self._size() * spec.channels * spec.height * spec.width <= IN_MEMORY_LIMIT
        if self.in_memory:
            return InMemory(samples, torch.from_numpy(prepare_all(samples, self.image_spec, self.max_pixels)))
        return OnDemand(samples, self.image_spec, self.max_pixels)

    def _size(self) -> int:
        """Samples of all sets."""
        return sum(map(len, self._samples.values()))

    def train_dataloader(self) -> DataLoader:
        return self._loader("train", training=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        """The test set, in data order."""
        return self._loader("test")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """What is there already stays as it is: Lightning would look through each batch for what to move."""
        if device.type == "cpu":
            return batch
        if self._room is not None and self._gpu() == device and self.trainer is not None and self.trainer.training:
            sets = [self._datasets[name] for name in _SPLITS["fit"] if name in self._datasets]
            if self._room.settle(self.trainer.global_step, [s for s in sets if isinstance(s, InMemory)], device):
                self._room = None
        if isinstance(batch, dict) and all(isinstance(v, torch.Tensor) and v.device == device for v in batch.values()):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Changes training images at random, on the device."""
        if len(self._augment) == 0 or self.trainer is None or not self.trainer.training:
            return batch
        images = self._augment(batch["image"])
        found = images.dtype if isinstance(images, torch.Tensor) else type(images).__name__
        if found != uint8:
            raise DataConfigError(f"data.module.params.augment must give uint8 images again, not {found}.")
        return {**batch, "image": images}

    def _describe(self) -> str:
        return type(self).__name__

    def _divide(self, found: dict[str, Samples]) -> dict[str, Samples]:
        seed, num_splits, fold = self.cfg.seed, self.cfg.data.num_splits, self.cfg.data.fold
        splits = {name: samples for name, samples in found.items() if name != "all"}
        default_folds = 10
        if "all" in found:
            whole = found["all"]
            if len(whole) < 10:
                raise DataError(f"{self._describe()}: {len(whole)} images are too few to divide 80/10/10: at least 10.")
            tenths = deal(whole.labels, 10, seed, _SPLIT_TEST)
            splits["test"] = whole.take(np.flatnonzero(tenths == 0))
            splits["train"] = whole.take(np.flatnonzero(tenths != 0))
            default_folds = 9  # a ninth of the rest is a tenth of all
        for name in ("train", "test"):
            if self.limit is not None and name in splits and self.limit < len(splits[name]):
                chosen = shuffled(len(splits[name]), seed, _LIMIT)[: self.limit]
                splits[name] = splits[name].take(np.sort(chosen))
        if num_splits is not None or "val" not in splits:
            train, folds = splits["train"], num_splits or default_folds
            if len(train) < folds:
                raise DataError(
                    f"{self._describe()}: {len(train)} training images are too few to hold out one in {folds}; "
                    "data.num_splits changes that."
                )
            of_fold = deal(train.labels, folds, seed, _SPLIT_VAL) == fold
            splits["train"], splits["val"] = (train.take(np.flatnonzero(mask)) for mask in (~of_fold, of_fold))
        return splits

    def _loader(self, split: str, training: bool = False) -> DataLoader:
        dataset, gpu = self.dataset(split), self._gpu()
        if self.in_memory == "device" and gpu is not None and isinstance(dataset, InMemory) and not dataset.on_device:
            dataset.move(gpu)
        if training:
            sampler = self._train_sampler()
        else:
            world, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
            sampler = BatchIndices(dataset, self.cfg.data.batch_size, num_replicas=world, rank=rank)
        options, workers = dict(self._loader_options), self.cfg.data.num_workers
        if isinstance(dataset, InMemory):
            workers = 0
            options = {key: value for key, value in options.items() if key not in _WORKER_KEYS}
            # Lightning's advice to add workers is wrong here.
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            options.setdefault("pin_memory", gpu is not None)
            if dataset.on_device:
                options["pin_memory"] = False
        elif workers > 0:
            options.setdefault("persistent_workers", True)
            options.setdefault("multiprocessing_context", start_method())
            options["worker_init_fn"] = EndsWithItsRun(options.get("worker_init_fn"))
        # Its own generator: else each epoch would draw a number from torch's global one.
        generator = Generator().manual_seed(self.cfg.seed)
        options |= {"batch_size": None, "sampler": sampler, "num_workers": workers, "generator": generator}
        if not isinstance(dataset, InMemory) or "collate_fn" in options:
            return DataLoader(dataset, **options)
        loader = InMemoryLoader(dataset, **options)
        if dataset.on_device or options["pin_memory"]:
            loader.device = gpu
        return loader

    def _train_sampler(self) -> BatchIndices:
        if self._sampler is None or not self._has_own_order:
            self._sampler = train_sampler(self.cfg, self.dataset("train"), self.trainer, drop_last=self._drop_last)
        elif self.trainer:
            go_on(self._sampler, self.trainer)
        return self._sampler

    def _gpu(self) -> torch.device | None:
        """The GPU that this process trains on."""
        device = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
        return device if device is not None and device.type == "cuda" else None


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_folds(num_splits: Any, fold: Any) -> None:
    if num_splits is None:
        if fold != 0:
            raise DataConfigError(f"data.fold={fold!r} needs data.num_splits, the number of folds; it is null.")
        return
    if not is_whole(num_splits, 2):
        raise DataConfigError(f"data.num_splits must be null or a whole number of at least 2, not {num_splits!r}.")
    if not is_whole(fold, 0) or fold >= num_splits:
        raise DataConfigError(
            f"data.fold must be from 0 to {num_splits - 1}, since data.num_splits is {num_splits}, not {fold!r}."
        )


def check_loader(options: dict[str, Any], drop_last: Any, num_workers: int) -> None:
    known = [name for name in inspect.signature(DataLoader).parameters if name not in _OWN_KEYS]
    for key in options:
        if key in _OWN_KEYS:
            raise DataConfigError(f"data.loader.{key} cannot be given: {_OWN_KEYS[key]}.")
        if key not in known:
            raise DataConfigError(
                f"data.loader.{key} is not an argument of torch's DataLoader; {', '.join(known)} are."
            )
    if not isinstance(drop_last, bool):
        raise DataConfigError(f"data.loader.drop_last must be true or false, not {drop_last!r}.")
    try:
        DataLoader([], batch_size=None, num_workers=num_workers, **options)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise DataConfigError(f"data.loader is refused by torch's DataLoader: {error}") from error


def start_method() -> str:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    # The server imports torch once, and each worker is a fork of it: 0.1 s instead of 3.
    multiprocessing.set_forkserver_preload(["deeplightning.data.datasets"])
    return "forkserver"


def height_width(image_size: int | Sequence[int]) -> tuple[int, int]:
    """`image_size` of a config as (height, width).

    Raises:
        DataConfigError: if it is not one positive whole number, or two.
    """
    sides = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    if len(sides) != 2 or not all(is_whole(side, 1) for side in sides):
        raise DataConfigError(
            "data.module.params.image_size must be a whole number of pixels of at least 1, or [height, width], "
            f"not {image_size!r}."
        )
    return sides[0], sides[1]
