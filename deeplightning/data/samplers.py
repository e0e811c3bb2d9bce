"""Which samples form which batch, on which process: positions in a set, and nothing else.

The order is a function of (seed, epoch) alone, so a run can be repeated, spread over more processes and resumed in the
middle of an epoch. `train_sampler` is what a data module asks for its training batches. N samples, B batch size per
process, R processes.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Literal

import numpy as np
import torch
from torch import distributed
from torch.utils.data import DistributedSampler, IterableDataset

from deeplightning.config.part_config import PartConfig, Target
from deeplightning.config.target import build
from deeplightning.data.data_errors import DataConfigError
from deeplightning.data.splits import stream
from deeplightning.words import is_whole

NOTABLE = 0.05
"""Where more of the samples than this are left out, or come twice, in each epoch, it is said."""

PADDING = -1
"""Stands for no sample, where a process has none left in the last batch. The row is marked with it and not counted;
its picture is any sample's, so that a network can learn from it with weight 0."""


class BatchIndices(DistributedSampler):
    """One list of positions per batch; goes into `DataLoader(dataset, batch_size=None, sampler=...)`.

    A global batch is B * R consecutive positions of the order, of which rank r takes every R-th from the r-th on: two
    processes with B see at each step the samples that one process with 2 B sees. Each position occurs once over all
    ranks. Every rank has the same number of batches, since collectives run at each step: where the last global batch
    has fewer samples than ranks, a rank without any gets one entry: `PADDING`.

    It is a `DistributedSampler` for one reason: Lightning leaves those as they are and wraps any other into one.

    Args:
        dataset: anything with a length.
        batch_size: B, per process.
        num_replicas: R.
        rank: of this process, from 0 to R - 1.
        shuffle: a new order in each epoch; else 0, 1, 2 …
        seed: of the order, a whole number of at least 0.
        drop_last: leave out a last global batch that is not full.

    Attributes:
        start: batches to leave out in this epoch, to go on in the middle of it; another epoch begins at 0. `len()` does
            not count it.
        made_for: R and rank of the run that `train_sampler` made it for; a data module that is set up before there is a
            trainer makes one for a single process.

    Raises:
        ValueError: if the batch size is not positive, or the rank not one of R.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ):
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.batch_size = batch_size
        self.start = 0
        self.made_for = num_replicas, rank

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.arrays())

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield the same as arrays, int64 (B,), of which each is the caller's own: cheaper by 4 µs a batch of 64."""
        # Not a generator: a later `set_epoch` does not change an iteration under way.
        order, size, ranks = self._order(), self.batch_size * self.num_replicas, self.num_replicas
        batches = (order[n * size + self.rank : (n + 1) * size : ranks] for n in range(self.start, len(self)))
        return (batch.copy() if len(batch) else np.array([PADDING]) for batch in batches)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; continue one that is under way. A loader with workers makes two iterators for its first
        (torch 2.15), so `start` holds for the epoch, not for an iteration."""
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)

    def __len__(self) -> int:
        """Count the batches per process and epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size * self.num_replicas)  # type: ignore[arg-type]
        return whole + (rest > 0 and not self.drop_last)

    def samples_of(self, batch: int) -> tuple[int, float]:
        """Return how many samples an epoch's batch has on this process, and on average over all.

        A sampler that offers this has its batches weighed by it: each optimizer step is the mean over the samples that
        it sees. Known without asking the other processes.
        """
        size = self.batch_size * self.num_replicas
        samples = min(size, len(self.dataset) - batch * size)  # type: ignore[arg-type]
        return len(range(self.rank, samples, self.num_replicas)), samples / self.num_replicas

    def _order(self) -> np.ndarray:
        size = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return np.arange(size)
        # Seed and epoch are mixed, not added: seed 1 in epoch 0 is not seed 0 in epoch 1.
        return stream(self.seed, self.epoch).permutation(size)


class BalancedBatches(BatchIndices):
    """Batches of an epoch in which each class occurs equally often: `data.sampler: balanced`.

    An epoch has N positions, as without it. Each of K classes has N / K of them, or one more where that is no whole
    number. A class with more samples gives a part of them, another one in each epoch; one with fewer repeats them, each
    as often as the others or once more. The order is shuffled.

    Args:
        labels: the class of each sample, whole numbers (N,).
        batch_size, num_replicas, rank, seed, drop_last: as of `BatchIndices`.

    Attributes:
        by_class: the positions of the samples of each class that occurs, int64, K arrays.
    """

    def __init__(self, labels: np.ndarray, batch_size: int, **options: Any):
        super().__init__(labels, batch_size, shuffle=True, **options)
        self.by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]

    def _order(self) -> np.ndarray:
        random, classes = stream(self.seed, self.epoch, purpose=3), len(self.by_class)
        each, rest = divmod(len(self.dataset), classes)  # type: ignore[arg-type]
        shares = np.full(classes, each)
        shares[random.permutation(classes)[:rest]] += 1
        drawn = [
            np.concatenate([random.permutation(members) for _ in range(-(-share // len(members)))] or [members[:0]])
            for members, share in zip(self.by_class, shares.tolist(), strict=True)
        ]
        return random.permutation(np.concatenate([d[:share] for d, share in zip(drawn, shares, strict=True)]))


class SampledBatches(BatchIndices):
    """The batches of another sampler: what it gives, cut into lists of B. A `DistributedSampler` has shared its
    positions out by itself; those of any other are the order of all processes, dealt to them like `BatchIndices`'s.

    While the sampler decides, torch's global generator is seeded from seed and epoch, so one that draws from it gives
    the same on each process and again.

    Args:
        sampler: gives positions, and has a length.
        batch_size, num_replicas, rank, seed, drop_last: as of `BatchIndices`.

    Attributes:
        sampler: as given.
    """

    def __init__(self, sampler: Any, batch_size: int, **options: Any):
        if isinstance(sampler, DistributedSampler):
            options |= {"num_replicas": 1, "rank": 0}
        super().__init__(sampler, batch_size, shuffle=True, **options)
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def _order(self) -> np.ndarray:
        word = int(stream(self.seed, self.epoch, purpose=2).randint(2**31))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(word)
            return np.fromiter(self.sampler, dtype=np.int64)


class BucketedDistributedSampler(DistributedSampler):
    """Positions of samples of like size together: at each step all processes draw from one bucket, so that batches
    which are padded to their longest sample hold little padding. Yields `int`, the positions of one process.

    The samples in order of size are cut into contiguous buckets, the first ones one longer where uneven. A slice is
    B * R elements of one bucket, of which rank r takes the elements r, r + R, r + 2 R … Shuffling permutes the elements
    inside each bucket, and then the slices; both follow from (seed, epoch). A bucket that is no whole number of slices
    is filled up with elements from its own start, each at most once: they train twice in that epoch, and count twice.
    With `drop_last` its rest is left out instead, another one in each epoch.

    `data.sampler` names it with buckets and sort_key; the run gives the rest. In Python it goes into
    `DataLoader(dataset, batch_size=B, sampler=...)`, and Lightning leaves it as it is.

    Args:
        dataset: anything with a length N.
        buckets: how many, at least 1.
        batch_size: B, per process.
        sorted_idx: the positions of all samples in order of size, a permutation of 0 … N - 1, the same on each process.
        sort_key: instead of sorted_idx, by what to sort, see `sort_values`.
        num_replicas, rank: R and the rank of this process; None: as in torch's process group, without one 1 and 0.
        shuffle: new permutations in each epoch; else buckets and slices follow each other in order of size.
        seed: of the permutations, a whole number of at least 0.
        drop_last: leave out what does not fill a slice, instead of repeating elements.
        allow_bucket_overlap: with `drop_last`: the rests of all buckets, in their order, form further, mixed slices.
        min_samples_per_bucket: fewer samples in a bucket are refused: much would be repeated or left out.
        on_small_bucket: `warn`: take buckets of fewer than two slices or `min_samples_per_bucket` samples, with a
            warning; `error`: refuse them. Fewer samples than one slice are always refused.

    Attributes:
        start: batches to leave out in this epoch, see `BatchIndices`.

    Raises:
        ValueError: if an argument is impossible, or a bucket too small. In the first iteration: if the processes of
            torch's group have different orders.
    """

    def __init__(
        self,
        dataset: Sized,
        buckets: int,
        batch_size: int | None = None,
        sorted_idx: Sequence[int] | np.ndarray | None = None,
        *,
        sort_key: str | Callable[[Any], Any] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        allow_bucket_overlap: bool = False,
        min_samples_per_bucket: int = 100,
        on_small_bucket: Literal["error", "warn"] = "error",
    ):
        grouped = distributed.is_available() and distributed.is_initialized()
        if num_replicas is None:
            num_replicas = distributed.get_world_size() if grouped else 1
        if rank is None:
            rank = distributed.get_rank() if grouped else 0
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(f"buckets need a set of known length, which {type(dataset).__name__} is not")
        size = len(dataset)
        super().__init__(range(size), num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        for name, value in (("buckets", buckets), ("batch_size", batch_size)):
            if not is_whole(value, 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, not {seed}")
        if on_small_bucket not in ("error", "warn"):
            raise ValueError(f"on_small_bucket must be error or warn, not {on_small_bucket!r}")
        if allow_bucket_overlap and not drop_last:
            raise ValueError("allow_bucket_overlap: without drop_last nothing is left: set drop_last too")
        assert batch_size is not None
        self.buckets, self.batch_size, self.start = buckets, batch_size, 0
        self.slice_size = batch_size * num_replicas
        rest = 0 if drop_last else 1  # of a division: left out, or rounded up
        per_bucket = (size + rest * (buckets - 1)) // buckets
        self.slices_per_bucket = (per_bucket + rest * (self.slice_size - 1)) // self.slice_size
        kept = self.slices_per_bucket * self.slice_size
        self.mixed_slices = max(0, size - kept * buckets) // self.slice_size if allow_bucket_overlap else 0
        self._check_buckets(per_bucket, min_samples_per_bucket, on_small_bucket)
        if (sorted_idx is None) == (sort_key is None):
            raise ValueError("give sort_key, by what the samples are sorted, or sorted_idx, the sorted positions")
        order = np.argsort(sort_values(dataset, sort_key), kind="stable") if sort_key is not None else sorted_idx
        self._buckets = np.array_split(_permutation(order, size), buckets)
        self._is_compared = not grouped or distributed.get_world_size() != num_replicas

    def _check_buckets(self, samples: int, least: int, on_small_bucket: str) -> None:
        """Refuse buckets of too few samples, or warn of them; warn of samples that come twice or are left out."""
        of_a_slice = f"{self.slice_size} (batch_size {self.batch_size} x {self.num_replicas} process(es))"
        if samples < self.slice_size:
            raise ValueError(
                f"a bucket has {samples} samples, fewer than a step takes: {of_a_slice}; use fewer buckets"
            )
        size, seen, warning = len(self.dataset), len(self) * self.num_replicas, ""  # type: ignore[arg-type]
        if self.slices_per_bucket < 2:
            warning = f"a bucket has {samples} samples, fewer than two steps take, each {of_a_slice}"
        elif samples < least:
            warning = f"a bucket has {samples} samples, fewer than min_samples_per_bucket={least}"
        if warning and on_small_bucket == "error":
            raise ValueError(f"{warning}; use fewer buckets, or set on_small_bucket: warn")
        if not warning and seen > size * (1 + NOTABLE):
            warning = f"buckets are filled up with {seen - size} of {size} samples, which come twice in each epoch"
        if not warning and seen < size * (1 - NOTABLE):
            warning = f"drop_last leaves out {size - seen} of {size} samples in each epoch"
        if warning:
            warnings.warn(f"{warning}; use fewer buckets or a smaller batch_size", stacklevel=4)

    def __len__(self) -> int:
        """Count the samples per process and epoch, repeated ones too."""
        return (self.slices_per_bucket * self.buckets + self.mixed_slices) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        # Not a generator: a later `set_epoch` does not change an iteration under way.
        self._compare()
        return iter(self.slices()[self.start :, self.rank :: self.num_replicas].flatten().tolist())

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; continue one that is under way."""
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)

    def slices(self) -> np.ndarray:
        """Return what all processes together take at each step of this epoch, int64 (steps, B * R)."""
        kept, slices, left = self.slices_per_bucket * self.slice_size, [], []
        within = stream(self.seed, self.epoch, purpose=0)
        for bucket in self._buckets:
            if self.shuffle:
                bucket = within.permutation(bucket)  # a copy
            left.append(bucket[kept:])
            slices.append(np.concatenate([bucket[:kept], bucket[: max(0, kept - len(bucket))]]))
        slices.append(np.concatenate(left)[: self.mixed_slices * self.slice_size])
        steps = np.concatenate(slices).reshape(-1, self.slice_size)
        if self.shuffle:
            steps = stream(self.seed, self.epoch, purpose=1).permutation(steps)
        return steps

    def _compare(self) -> None:
        """Check once that all processes have the same order; else some samples would come twice and others never."""
        if self._is_compared:
            return
        self._is_compared = True
        known = (self.seed, len(self), *(bucket.tobytes() for bucket in self._buckets))
        own, found = hashlib.sha256(repr(known).encode()).hexdigest(), [""] * self.num_replicas
        distributed.all_gather_object(found, own)
        if other := [rank for rank, digest in enumerate(found) if digest != found[0]]:
            raise ValueError(
                f"the processes {', '.join(map(str, other))} have other buckets than process 0: sort once and share "
                "the order, or use a sort_key that gives the same everywhere"
            )


def sort_values(dataset: Any, sort_key: str | Callable[[object], object], batched: bool = False) -> np.ndarray:
    """Return what the samples of a set are sorted by, numbers (N,).

    Args:
        dataset: of length N.
        sort_key: a function that is called with each sample; or the name of a column: an attribute of the set with N
            entries (`labels`), or a key of its samples. Of what is no number, such as a text or a list, the length
            counts.
        batched: `dataset[[position, …]]` gives a batch, of which a row is a sample; else `dataset[position]` is one.

    Raises:
        ValueError: if there is no such column, or a value is no number and has no length.
    """

    def sample(position: int) -> Any:
        return {name: rows[0] for name, rows in dataset[[position]].items()} if batched else dataset[position]

    def number(value: Any) -> float:
        if isinstance(value, int | float):
            return value
        return value.item() if getattr(value, "ndim", 1) == 0 else len(value)

    column: Any = None if callable(sort_key) else getattr(dataset, sort_key, None)
    every = range(len(dataset))
    if callable(sort_key):
        column = [sort_key(sample(position)) for position in every]
    elif not hasattr(column, "__len__") or len(column) != len(dataset):
        try:
            column = [sample(position)[sort_key] for position in every]
        except (LookupError, TypeError, AttributeError) as error:  # a sample may be a tuple
            raise ValueError(
                f"sort_key {sort_key!r}: the training set ({_class(dataset)}) has no such column, and its samples have "
                "no such key. A function is named by {ref: MODULE.FUNCTION}"
            ) from error
    try:
        values = np.array([number(value) for value in column])
    except TypeError:
        raise ValueError(f"sort_key {sort_key!r} gives a value that is not a number and has no length") from None
    if not np.isfinite(values).all():
        raise ValueError(f"sort_key {sort_key!r} gives {values[~np.isfinite(values)][0]}, which is not a finite number")
    return values


def _class(dataset: object) -> str:
    """Return the name of the class of a set, of the user's own where ours makes batches of it."""
    return type(getattr(dataset, "of", dataset)).__name__


def train_sampler(cfg: PartConfig, dataset: Any, trainer: object = None, *, drop_last: bool = False) -> BatchIndices:
    """Return the batches of a training: `BatchIndices`, shuffled, or those of `data.sampler`. They begin where a
    resumed run continues.

    `data.sampler` is called with the set, and by name with batch_size, num_replicas, rank and seed of the run; it gives
    a torch sampler.

    Args:
        cfg: the whole config; `seed`, `data.batch_size` and `data.sampler` are read.
        dataset: the training set; its `[positions]` gives a batch.
        trainer: Lightning's; None: one process, from the start.
        drop_last: leave out a last batch that is not full.

    Raises:
        DataConfigError: `data.sampler` gives no sampler, or is given what the run gives. It is a ValueError.
        ConfigError: it refuses its arguments.
    """
    world, rank = replicas(trainer)
    spread: dict[str, Any] = {"num_replicas": world, "rank": rank, "seed": cfg.seed}
    asked = getattr(cfg.data, "sampler", None)
    if asked is not None and (isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")):
        raise DataConfigError(
            f"data.sampler needs a training set of known length, not {type(dataset).__name__}, which can only be read "
            "in its own order; leave data.sampler out."
        )
    if asked is None:
        sampler = BatchIndices(dataset, cfg.data.batch_size, shuffle=True, drop_last=drop_last, **spread)
    elif asked == "balanced":
        sampler = BalancedBatches(_labels(dataset), cfg.data.batch_size, drop_last=drop_last, **spread)
    else:
        made = _build_sampler(asked, dataset, {"batch_size": cfg.data.batch_size, **spread})
        sampler = SampledBatches(made, cfg.data.batch_size, drop_last=drop_last, **spread)
    sampler.made_for = world, rank
    if trainer:
        go_on(sampler, trainer)
    return sampler


def replicas(trainer: Any) -> tuple[int, int]:
    """Return R and the rank; without a trainer those of one process."""
    return (trainer.world_size, trainer.global_rank) if trainer else (1, 0)


def go_on(sampler: BatchIndices, trainer: Any) -> None:
    """Set a sampler to the epoch, and behind the batches, that a resumed run has done.

    After a whole epoch the counter still shows it. Lightning sets the epoch as well, but only when the first iterator
    has been made.
    """
    loop: Any = trainer.fit_loop
    limit = trainer.limit_train_batches
    length = min(len(sampler), limit) if isinstance(limit, int) else int(len(sampler) * limit)
    epoch, done = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current.ready
    ended = done >= length and epoch.processed < epoch.ready  # saved after the last batch, not counted yet
    sampler.set_epoch(epoch.processed + ended)
    sampler.start = done if done < length else 0


def _labels(dataset: Any) -> np.ndarray:
    """Return the class of each sample, int64 (N,): the set's attribute `labels`, or the entry `label` of its samples.

    Raises:
        DataConfigError: the samples have no classes.
    """
    hint = "leave data.sampler out, or name a sampler of your own"
    refusal = f"data.sampler=balanced: the training set ({_class(dataset)}) has no class for each sample; {hint}"
    column: Any = getattr(dataset, "labels", None)
    if not hasattr(column, "__len__") or len(column) != len(dataset):
        try:
            column = sort_values(dataset, "label", batched=True)
        except ValueError as error:
            raise DataConfigError(f"{refusal}: {error}") from None
    found = np.asarray(column)
    if found.ndim != 1 or found.dtype.kind not in "iub" or not len(found):
        raise DataConfigError(f"{refusal}: its labels are {found.dtype} {found.shape}.")
    return found.astype(np.int64)


def _build_sampler(target: Target, dataset: object, run: dict[str, Any]) -> object:
    for name, instead in (("batch_size", "data.batch_size"), ("num_replicas", "engine"), ("rank", "engine")):
        if name in target.params:
            raise DataConfigError(f"data.sampler.params.{name} cannot be given: it comes from {instead}.")
    given = run | ({"seed": target.params["seed"]} if "seed" in target.params else {})
    if target.params.get("sort_key") is not None:
        # Built alone: a reference becomes its function.
        key = build({"type": "builtins.dict", "params": {"key": target.params["sort_key"]}})["key"]
        try:
            values = sort_values(dataset, key, batched=True)
        except ValueError as error:
            raise DataConfigError(f"data.sampler.params.{error}") from None
        given |= {"sort_key": None, "sorted_idx": np.argsort(values, kind="stable")}
    made = build(target, dataset, **given)
    if not hasattr(made, "__iter__") or not hasattr(made, "__len__"):
        raise DataConfigError(f"data.sampler: {target.type} gives a {type(made).__name__}, not a sampler of torch's.")
    return made


def _permutation(order: object, size: int) -> np.ndarray:
    """Return sorted positions, int64 (N,); raise ValueError unless each position is there once."""
    found = np.asarray(order)
    if found.shape != (size,):
        raise ValueError(f"sorted_idx has {found.size} positions, the set {size} samples")
    if found.dtype.kind not in "iu" or not np.array_equal(np.sort(found), np.arange(size)):
        raise ValueError(f"sorted_idx must hold each position from 0 to {size - 1} once")
    return found.astype(np.int64)
