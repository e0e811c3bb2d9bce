"""Base of the data modules: split the samples and load batches in an order that follows from the seed."""

import multiprocessing
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Generator
from torch.utils.data import DataLoader

from deeplightning.config.part_config import PartConfig
from deeplightning.config.target import build
from deeplightning.data.data_errors import DataConfigError, DataError, require_whole
from deeplightning.data.datasets import Batch, ExitWithParent, InMemory, InMemoryLoader, OnDemand, move_if_it_fits
from deeplightning.data.samplers import BatchIndices
from deeplightning.data.splits import SPLITS, assign_folds, keep_classes, shuffled
from deeplightning.data.train_sampler import replicas, resume_sampler, train_sampler
from deeplightning.words import InputError, address_shown, is_address

MAX_CLASSES = 1_000_000
"""Labels above it are rejected: they are numbers, such as customer ids, not classes."""

IN_MEMORY_LIMIT = 2**30
"""Keep the prepared samples of all sets in memory if they take at most this many bytes per process: 1 GiB."""

_OWN_KEYS = ("dataset", "batch_size", "num_workers", "shuffle", "sampler", "batch_sampler", "generator")
_WORKER_KEYS = ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout", "worker_init_fn")
_SPLIT_TEST, _LIMIT, _SPLIT_VAL = range(3)  # purposes of the seed, see `random_state`


class SplitData(pl.LightningDataModule):
    """Base of the data modules: a subclass finds the samples (`read`), computes statistics of the training samples
    (`learn`), and makes a set of each split (`_prepare`); `[positions]` of a set is a batch.

    Validation is one fold of the training set: fold `data.fold` of `data.num_splits`, or a tenth of the training
    samples if that is null. It is never the test set. The splits depend on `seed` alone.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        in_memory: see `deeplightning.data.images.ImageData`.
        limit: use at most this many training samples (validation included), and test samples.

    Raises:
        DataConfigError: a value of the config is invalid. It is a ValueError.
    """

    remedy = "name another file under data.module.params"
    """What else helps if a file is missing, for messages."""

    holds_out = True
    """Whether to hold out training samples if there is neither a validation set nor `data.num_splits`."""

    def __init__(
        self, cfg: PartConfig, in_memory: bool | Literal["auto", "device"] | None = None, limit: int | None = None
    ):
        super().__init__()
        self.cfg = cfg
        if limit is not None:
            require_whole("limit", limit)
        self.in_memory = None if in_memory == "auto" else in_memory
        self.limit = limit
        self._moves_after_step = in_memory == "auto"  # the first one shows how much memory a step takes
        self._first_step: int | None = None
        self._loader_options = build({"type": "builtins.dict", "params": cfg.data.loader})  # resolves refs
        self._drop_last = self._loader_options.pop("drop_last", False)
        for name in {*_OWN_KEYS} & {*self._loader_options}:
            raise DataConfigError(
                f"data.loader.{name} cannot be set: data.batch_size, num_workers, sampler and seed determine it."
            )
        try:
            DataLoader([], batch_size=None, num_workers=cfg.data.num_workers, **self._loader_options)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise DataConfigError(f"torch's DataLoader rejects data.loader: {error}") from error
        self._required_paths: dict[str, Path] = {}  # such as the files that the config names
        self._samples: dict[str, Any] = {}  # of each split, anything with a length; set by `setup`
        self._datasets: dict[str, Any] = {}
        self._sampler: BatchIndices | None = None

    def read(self) -> dict[str, Any]:
        """Find the samples; a subclass defines this.

        Returns:
            Objects with a length, `labels` (int64 (N,), by which splits are stratified) and `take(positions)`: under
            "train" and, if they exist, "val" and "test"; or under "all", to be split 80/10/10.

        Raises:
            DataError: the data is missing or damaged.
        """
        raise NotImplementedError

    def name_files(self, **names: str | None) -> None:
        """Set `root` to the folder of `data.root`, and `files` to the paths of the sets in it.

        Args:
            names: of the files "train", "val", "test", and of others that must exist; None: no such file.

        Raises:
            DataConfigError: `data.root` is null or an address.
        """
        given = {key: name for key, name in names.items() if name is not None}
        named, root = next(iter(given.values()), None), self.cfg.data.root
        self.root = self.root_folder(named) if named else Path(root or ".").expanduser().absolute()
        self._required_paths = {key: self.root / name for key, name in given.items()}
        self.files: Any = {key: path for key, path in self._required_paths.items() if key in SPLITS[None]}

    def root_folder(self, content: str) -> Path:
        """Return the folder of `data.root`, absolute.

        Args:
            content: what it must contain, for messages.

        Raises:
            DataConfigError: `data.root` is null or an address.
        """
        root = self.cfg.data.root
        if root is None:
            raise DataConfigError(f"data.root is null, but {type(self).__name__} needs the folder with {content}.")
        if is_address(root):
            raise DataConfigError(
                f"data.root: {address_shown(root)} is an address. Copy the data to this machine first, for example "
                "with `aws s3 sync`, and name the folder."
            )
        return Path(root).expanduser().absolute()

    def check(self) -> None:
        """Raise DataError if a file is missing; do not read any."""
        for path in self._required_paths.values():
            if not path.exists():
                raise DataError(
                    f"{path} is missing. Set data.root (now {self.cfg.data.root}) to the folder that holds it, or "
                    f"{self.remedy}."
                )

    def learn(self, train: Any) -> None:
        """Compute what the preparation of samples needs from the training set, such as means or a vocabulary."""

    def _prepare(self, samples: Any) -> Any:
        """Return a set that prepares these samples."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Read and split the samples once, and prepare those that the stage needs (None: all).

        Raises:
            DataError: a file is missing or invalid.
        """
        if not self._samples:
            divided = self._divide(self._read_checked())
            self.learn(divided["train"])
            self._samples = divided
        self._prepare_stage(stage)

    def _fits(self, size: int) -> bool:
        """Return whether all samples, each of `size` bytes when prepared, fit into memory."""
        return size * sum(map(len, self._samples.values())) <= IN_MEMORY_LIMIT

    def _describe(self) -> str:
        name, root = type(self).__name__, getattr(self, "root", None)
        return name if root is None else f"{name} in {root}"

    def _read_checked(self) -> dict[str, Any]:
        """Return the samples of `read`; raise DataError if the data is missing or damaged."""
        try:
            self.check()
            return self.read()
        except (OSError, InputError, UnicodeError) as error:
            raise DataError(f"{self._describe()} cannot be read: {error}") from error

    def _prepare_stage(self, stage: str | None) -> None:
        """Prepare the sets that a stage needs (None: all), so that their errors appear before a run starts."""
        for split in SPLITS[stage]:
            if split in self._samples:
                self.dataset(split)
        if stage in ("fit", None) and not len(self._train_sampler()):
            raise DataConfigError(
                f"{self._describe()} has no training batch: there are {len(self._samples['train'])} samples, but a "
                f"batch has {self.cfg.data.batch_size} (data.batch_size) x {replicas(self.trainer)[0]} process(es); "
                f"data.loader.drop_last is {str(self._drop_last).lower()}."
            )

    def check_stages(self, stages: Sequence[str]) -> None:
        """Raise DataError if a stage needs a test set and there is none. Called after `setup`, before training."""
        if {"test", "predict"} & {*stages}:
            self._require_split("test")

    def _require_split(self, split: str) -> None:
        if split not in self._samples:
            raise DataError(f"There is no {split} set in {self._describe()}. Add one, or remove the stage.")

    def dataset(self, split: str) -> Any:
        """Return the set "train", "val" or "test", after `setup`; raise DataError if there is none or it is damaged."""
        if split not in self._datasets:
            self._require_split(split)
            self._datasets[split] = self._prepare(self._samples[split])
        return self._datasets[split]

    def sample(self, split: str, position: int) -> dict[str, Any]:
        """Return what pictures and reports show of a sample, any of: `image`, uint8 (C, H, W), as the network gets it;
        `text`; `name`, of its file. Call `setup` first."""
        return {}

    def _divide(self, found: dict[str, Any]) -> dict[str, Any]:
        seed, num_splits, fold = self.cfg.seed, self.cfg.data.num_splits, self.cfg.data.fold
        splits = {name: samples for name, samples in found.items() if name != "all"}
        default_folds = 10
        if "all" in found:
            whole = found["all"]
            if len(whole) < 10:
                raise DataError(f"{self._describe()}: {len(whole)} samples are too few to split 80/10/10; need 10.")
            tenths = self._folds(whole, 10, _SPLIT_TEST)
            splits["test"] = whole.take(np.flatnonzero(tenths == 0))
            splits["train"] = whole.take(np.flatnonzero(tenths != 0))
            default_folds = 9  # a ninth of the rest is a tenth of all
        for name in ("train", "test"):
            if self.limit is not None and name in splits and self.limit < len(splits[name]):
                splits[name] = splits[name].take(np.sort(shuffled(len(splits[name]), seed, _LIMIT)[: self.limit]))
        if num_splits is not None or (self.holds_out and "val" not in splits):
            train, folds = splits["train"], num_splits or default_folds
            if len(train) < folds:
                raise DataError(
                    f"{self._describe()}: {len(train)} training samples are too few to hold out one in {folds}; set "
                    "data.num_splits to a smaller number."
                )
            of_fold = self._folds(train, folds, _SPLIT_VAL) == fold
            splits["train"], splits["val"] = (train.take(np.flatnonzero(mask)) for mask in (~of_fold, of_fold))
        return splits

    def _folds(self, samples: Any, number: int, purpose: int) -> np.ndarray:
        """Return the fold of each sample, int (N,), from 0 to `number` - 1; the held-out one has no whole class."""
        held_out = 0 if purpose == _SPLIT_TEST else self.cfg.data.fold
        return keep_classes(samples.labels, assign_folds(samples.labels, number, self.cfg.seed, purpose), held_out)

    def train_dataloader(self) -> DataLoader:
        return self._loader("train", training=True)

    def val_dataloader(self) -> Any:
        """Return the loader of the validation set, or an empty list if there is none."""
        return self._loader("val") if self.holds_out or "val" in self._samples else []

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        """Return the loader of the test set, in data order."""
        return self._loader("test")

    def transfer_batch_to_device(self, batch: object, device: torch.device, dataloader_idx: int) -> object:
        """Move a batch to a device. A batch that is there already skips Lightning's search for tensors."""
        if device.type == "cpu":
            return batch
        if self._moves_after_step and self._gpu() == device and self.trainer is not None and self.trainer.training:
            if self._first_step is None:
                self._first_step = self.trainer.global_step
            if self.trainer.global_step > self._first_step:
                self._moves_after_step = False
                if sets := [one for name in SPLITS["fit"] if isinstance(one := self._datasets.get(name), InMemory)]:
                    move_if_it_fits(sets, device)
        if isinstance(batch, dict) and all(isinstance(v, torch.Tensor) and v.device == device for v in batch.values()):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _loader(self, split: str, training: bool = False) -> DataLoader:
        dataset, gpu = self.dataset(split), self._gpu()
        if self.in_memory == "device" and gpu is not None and isinstance(dataset, InMemory) and not dataset.on_device:
            dataset.move(gpu)
        if training:
            sampler = self._train_sampler()
        else:
            (world, rank), size = replicas(self.trainer), self.cfg.data.batch_size
            if getattr(dataset, "names", None) == ():  # the task cannot tell padding: choose a size that needs none
                size = next((n for n in range(size, 0, -1) if not 0 < len(dataset) % (n * world) < world), size)
            sampler = BatchIndices(dataset, size, num_replicas=world, rank=rank)
        options, workers = dict(self._loader_options), self.cfg.data.num_workers
        if not getattr(dataset, "needs_workers", True):
            workers = 0
            options = {key: value for key, value in options.items() if key not in _WORKER_KEYS}
            options.setdefault("pin_memory", gpu is not None)
            if isinstance(dataset, InMemory) and dataset.on_device:
                options["pin_memory"] = False
        elif workers > 0:
            options.setdefault("persistent_workers", True)
            # The fork server imports torch once, so a worker starts in 0.1 s instead of 3.
            multiprocessing.set_forkserver_preload(["deeplightning.data.datasets"])
            options.setdefault("multiprocessing_context", "forkserver")
            options["worker_init_fn"] = ExitWithParent(options.get("worker_init_fn"))
        if workers == 0 and not (isinstance(dataset, OnDemand) and dataset.needs_workers):
            # Lightning advises to add workers, which does not help here.
            warnings.filterwarnings("ignore", message=".*does not have many workers")
        # Its own generator; otherwise each epoch would draw a number from torch's global one.
        generator = Generator().manual_seed(self.cfg.seed)
        options |= {"batch_size": None, "sampler": sampler, "num_workers": workers, "generator": generator}
        if not isinstance(dataset, InMemory) or "collate_fn" in options:
            return DataLoader(dataset, **options)
        loader = InMemoryLoader(dataset, **options)
        if dataset.on_device or options["pin_memory"]:
            loader.device = gpu
        return loader

    def _train_sampler(self) -> BatchIndices:
        if self._sampler is None or self._sampler.made_for != replicas(self.trainer):
            self._sampler = train_sampler(self.cfg, self.dataset("train"), self.trainer, drop_last=self._drop_last)
        elif self.trainer:
            resume_sampler(self._sampler, self.trainer)
        return self._sampler

    def _gpu(self) -> torch.device | None:
        """Return the GPU that this process trains on, or None."""
        device = getattr(getattr(self.trainer, "strategy", None), "root_device", None)
        return device if device is not None and device.type == "cuda" else None


class Moments:
    """Mean and deviation of numbers that are added in parts (Chan, Golub and LeVeque 1983).

    For a single part they equal NumPy's bit by bit, except that the mean of a constant is exact: NumPy's mean of a
    hundred 0.1 is not 0.1, and with its deviation of 1e-17, 0.2 would be standardised to a huge number.

    Attributes:
        count: numbers added so far, per column.
        mean: float64, a number or (T,).
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = 0.0
        self._squares: Any = 0.0  # sum of squared distances from the mean

    def add(self, values: np.ndarray) -> None:
        """Add numbers, float64 (n,) or (n, T)."""
        if not (size := len(values)):
            return
        mean = np.where((values == values[0]).all(0), values[0], values.mean(0))
        squares = np.square(values - mean).sum(0)
        total, distance = self.count + size, mean - self.mean
        self.mean = self.mean + distance * (size / total)
        self._squares = self._squares + squares + np.square(distance) * (self.count * (size / total))
        self.count = total

    @property
    def std(self) -> Any:
        """Standard deviation, float64, a number or (T,)."""
        found = np.sqrt(self._squares / self.count)
        return np.where(found < np.abs(self.mean) * 2e-15, 0.0, found)  # of a constant up to rounding; NaN stays


class ColumnData(SplitData):
    """Base of data modules whose samples are columns, with classes or with numbers to be predicted.

    Attributes:
        class_names: the name of each label, in order; empty if the targets are numbers.
        target_names: the name of each number to be predicted; empty if there are classes.
        target_mean, target_std: of each number, over the training samples.
    """

    def __init__(self, cfg: PartConfig, limit: int | None = None):
        super().__init__(cfg, "auto", limit)
        self.class_names: list[str] = []
        self.target_names: list[str] = []
        self.target_mean: list[float] = []
        self.target_std: list[float] = []

    def learn_targets(self, names: Sequence[str], targets: Moments) -> None:
        """Store mean and deviation of the numbers to be predicted, (T,)."""
        self.target_names = list(names)
        self.target_mean = targets.mean.tolist()
        self.target_std = np.where(targets.std > 0, targets.std, 1.0).tolist()
        for name, mean, std in zip(names, self.target_mean, targets.std.tolist(), strict=True):
            if 0 < std < abs(mean) / 100_000:
                gap = f"near {mean:.3g} float32 numbers are about {abs(mean) / 2**23:.2g} apart: subtract a constant"
                warnings.warn(f"the target {name} varies by {std:.3g}, and {gap}", stacklevel=2)

    def example_batch(self, size: int) -> Batch:
        """Return the first training samples, to test whether the parts of a config fit together; reads the data.

        Args:
            size: number of samples; a smaller set is repeated.
        """
        self.setup("fit")
        found = self.dataset("train")
        return found[np.arange(size) % len(found)]


def checked_names(names: Sequence[object] | None, most: int | None = None) -> list[str]:
    """Return the names of `class_names` in a config, or an empty list for null.

    Raises:
        DataConfigError: they are not a list of different texts, or more than `most`.
    """
    found = [name for name in names or () if isinstance(name, str) and not isinstance(names, str)]
    if names is not None and not 1 <= len(names) == len(set(found)) <= (most or len(names)):
        raise DataConfigError(
            f"data.module.params.class_names must be a list of {f'1 to {most} ' if most else ''}different names, "
            f"starting with class 0, not {names!r}; a number or a word such as no needs quotes."
        )
    return found
