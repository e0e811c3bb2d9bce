"""Decide which samples form which batch on which process, as positions in a set.

The order is a function of (seed, epoch) alone, so a run can be repeated, shared over more processes and resumed in the
middle of an epoch. N samples, B batch size per process, R processes.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

import numpy as np
import torch
from torch import distributed
from torch.utils.data import DistributedSampler, IterableDataset

from deeplightning.data.data_errors import DataConfigError
from deeplightning.data.splits import random_state
from deeplightning.words import is_whole

WARN_FRACTION = 0.05
"""Warn if more than this fraction of the samples is left out, or repeated, in each epoch."""

PADDING = -1
"""Position of a row that is not counted, for a process without a sample in the last batch. The row contains some sample
and has weight 0 in training."""


class BatchIndices(DistributedSampler):
    """One list of positions per batch, for `DataLoader(dataset, batch_size=None, sampler=...)`.

    A global batch is B * R consecutive positions of the order; rank r takes every R-th of them, starting at the r-th.
    Two processes with B thus see the same samples at each step as one process with 2 B. Each position occurs once over
    all ranks. Every rank has the same number of batches, since collectives run at each step: if the last global batch
    has fewer samples than ranks, a rank without any gets one entry, `PADDING`.

    It is a `DistributedSampler` only because Lightning wraps any other sampler into one.

    Args:
        dataset: anything with a length.
        batch_size: B, per process.
        num_replicas: R.
        rank: of this process, from 0 to R - 1.
        shuffle: use a new order in each epoch; otherwise 0, 1, 2 …
        seed: of the order, a whole number of at least 0.
        drop_last: leave out a last global batch that is not full.

    Attributes:
        start: number of batches to skip in this epoch, to resume in the middle of it; the next epoch starts at 0. Not
            subtracted from `len()`.
        made_for: R and rank for which `train_sampler` made it; a data module that is set up before it has a trainer
            makes one for a single process.

    Raises:
        ValueError: the batch size is not positive, or the rank is not one of R.
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
        self.batch_size, self.start = batch_size, 0
        self.made_for = num_replicas, rank

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.arrays())

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield the same as arrays, int64 (B,), that the caller may change; saves 4 µs per batch of 64."""
        # Not a generator: a later `set_epoch` must not change a running iteration.
        order, size, ranks = self._order(), self.batch_size * self.num_replicas, self.num_replicas
        batches = (order[n * size + self.rank : (n + 1) * size : ranks] for n in range(self.start, len(self)))
        return (batch.copy() if len(batch) else np.array([PADDING]) for batch in batches)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch at its first batch; keep `start` if it is the current one. `start` belongs to the epoch, not
        to an iteration, since a loader with workers makes two iterators in its first epoch (torch 2.15)."""
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches per process and epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size * self.num_replicas)  # type: ignore[arg-type]
        return whole + (rest > 0 and not self.drop_last)

    def samples_of(self, batch: int) -> tuple[int, float]:
        """Return the number of samples of a batch on this process, and its mean over all processes.

        If a sampler has this method, its batches are weighted by it, so that each optimizer step uses the mean over its
        samples. It needs no communication.
        """
        size = self.batch_size * self.num_replicas
        samples = min(size, len(self.dataset) - batch * size)  # type: ignore[arg-type]
        return len(range(self.rank, samples, self.num_replicas)), samples / self.num_replicas

    def _order(self) -> np.ndarray:
        size = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return np.arange(size)
        # Seed and epoch are mixed, not added: seed 1 in epoch 0 is not seed 0 in epoch 1.
        return random_state(self.seed, self.epoch).permutation(size)


class BalancedBatches(BatchIndices):
    """Batches of an epoch in which each class occurs equally often: `data.sampler: balanced`.

    An epoch still has N positions. Each of the K classes has N / K of them, rounded up or down. A class with more
    samples uses a different part of them in each epoch; a class with fewer repeats them, some once more than others.
    The order is shuffled.

    Args:
        labels: the class of each sample, whole numbers (N,).
        batch_size, num_replicas, rank, seed, drop_last: see `BatchIndices`.

    Attributes:
        by_class: the positions of the samples of each class that occurs, K arrays, int64.
    """

    def __init__(self, labels: np.ndarray, batch_size: int, **options: Any):
        super().__init__(labels, batch_size, shuffle=True, **options)
        ends = np.cumsum(np.unique(labels, return_counts=True)[1])
        self.by_class = np.split(np.argsort(labels, kind="stable"), ends[:-1])

    def _order(self) -> np.ndarray:
        random, classes = random_state(self.seed, self.epoch, purpose=3), len(self.by_class)
        least, rest = divmod(len(self.dataset), classes)  # type: ignore[arg-type]
        shares = np.full(classes, least)
        shares[random.permutation(classes)[:rest]] += 1
        drawn = [
            np.concatenate([random.permutation(members) for _ in range(-(-share // len(members)))] or [members[:0]])
            for members, share in zip(self.by_class, shares.tolist(), strict=True)
        ]
        return random.permutation(np.concatenate([d[:share] for d, share in zip(drawn, shares, strict=True)]))


class SampledBatches(BatchIndices):
    """The positions of another sampler in lists of B. A `DistributedSampler` yields those of one process; those of any
    other sampler are a global order, which is distributed over the processes as in `BatchIndices`.

    While the sampler is iterated over, torch's global generator is seeded from seed and epoch, so a sampler that draws
    from it yields the same positions on each process and in a repeated run.

    Args:
        sampler: yields positions, and has a length.
        batch_size, num_replicas, rank, seed, drop_last: see `BatchIndices`.

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
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(random_state(self.seed, self.epoch, purpose=2).randint(2**31)))
            return np.fromiter(self.sampler, dtype=np.int64)


class BucketedDistributedSampler(DistributedSampler):
    """Group samples of similar size: at each step all processes draw from one bucket, so that batches that are padded
    to their longest sample contain little padding. Yields `int`, the positions of one process.

    The samples, sorted by size, are cut into contiguous buckets of N / `buckets` samples, the first ones longer by one
    if needed. A slice is B * R elements of one bucket; rank r takes the elements r, r + R, r + 2 R … Shuffling permutes
    the elements inside each bucket, and then the slices; both follow from (seed, epoch). A bucket that is not a whole
    number of slices is filled up with elements from its start, each at most once: they are used and counted twice in
    that epoch. With `drop_last`, the remainder is left out instead, a different one in each epoch.

    In a config, `data.sampler` sets `buckets` and `sort_key`; the run supplies the other arguments. In Python, pass it
    to `DataLoader(dataset, batch_size=B, sampler=...)`; Lightning does not wrap it.

    Args:
        dataset: anything with a length N.
        buckets: number of buckets, at least 1.
        batch_size: B, per process.
        sorted_idx: the positions of all samples in order of size, a permutation of 0 … N - 1, the same on each process.
        sort_key: instead of sorted_idx, what to sort by, see `sort_values`.
        num_replicas, rank: R and the rank of this process; None: those of torch's process group, or 1 and 0.
        shuffle: use new permutations in each epoch; otherwise buckets and slices are in order of size.
        seed: of the permutations, a whole number of at least 0.
        drop_last: leave out what does not fill a slice, instead of repeating elements.
        allow_bucket_overlap: with `drop_last`: form further, mixed slices of the remainders of all buckets, in order.
        min_samples_per_bucket: a bucket with fewer samples is too small: many would be repeated or left out.
        on_small_bucket: for buckets of fewer than two slices or `min_samples_per_bucket` samples: "warn" or "error".
            Fewer samples than one slice are always an error.

    Attributes:
        start: number of batches to skip in this epoch, see `BatchIndices`.

    Raises:
        ValueError: an argument is invalid, or a bucket is too small. In the first iteration: the processes of torch's
            group have different orders.
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
            raise ValueError(f"buckets need a dataset with a length, which {type(dataset).__name__} lacks")
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
            raise ValueError("allow_bucket_overlap needs drop_last: without it no samples remain; set drop_last too")
        assert batch_size is not None
        self.buckets, self.batch_size, self.start = buckets, batch_size, 0
        self.slice_size = batch_size * num_replicas
        round_up = 0 if drop_last else 1
        per_bucket = (size + round_up * (buckets - 1)) // buckets
        self.slices_per_bucket = (per_bucket + round_up * (self.slice_size - 1)) // self.slice_size
        kept = self.slices_per_bucket * self.slice_size
        self.mixed_slices = max(0, size - kept * buckets) // self.slice_size if allow_bucket_overlap else 0
        self._check_buckets(per_bucket, min_samples_per_bucket, on_small_bucket)
        if (sorted_idx is None) == (sort_key is None):
            raise ValueError("give sort_key, which to sort the samples by, or sorted_idx, the sorted positions")
        order = np.argsort(sort_values(dataset, sort_key), kind="stable") if sort_key is not None else sorted_idx
        self._buckets = np.array_split(_permutation(order, size), buckets)
        self._is_order_checked = not grouped or distributed.get_world_size() != num_replicas

    def _check_buckets(self, samples: int, least: int, on_small_bucket: str) -> None:
        """Reject buckets of too few samples, or warn of them; warn of samples that are repeated or left out."""
        per_step = f"{self.slice_size} (batch_size {self.batch_size} x {self.num_replicas} process(es))"
        if samples < self.slice_size:
            raise ValueError(f"a bucket has {samples} samples, fewer than a step takes: {per_step}; use fewer buckets")
        size, used, warning = len(self.dataset), len(self) * self.num_replicas, ""  # type: ignore[arg-type]
        if self.slices_per_bucket < 2:
            warning = f"a bucket has {samples} samples, fewer than two steps take, each {per_step}"
        elif samples < least:
            warning = f"a bucket has {samples} samples, fewer than min_samples_per_bucket={least}"
        if warning and on_small_bucket == "error":
            raise ValueError(f"{warning}; use fewer buckets, or set on_small_bucket: warn")
        if not warning and used > size * (1 + WARN_FRACTION):
            warning = f"buckets are filled up with {used - size} of {size} samples, which repeat in each epoch"
        if not warning and used < size * (1 - WARN_FRACTION):
            warning = f"drop_last leaves out {size - used} of {size} samples in each epoch"
        if warning:
            warnings.warn(f"{warning}; use fewer buckets or a smaller batch_size", stacklevel=4)

    def __len__(self) -> int:
        """Return the number of samples per process and epoch, including repeated ones."""
        return (self.slices_per_bucket * self.buckets + self.mixed_slices) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        # Not a generator: a later `set_epoch` must not change a running iteration.
        self._check_order()
        return iter(self.slices()[self.start :, self.rank :: self.num_replicas].flatten().tolist())

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch at its first batch; keep `start` if it is the current one."""
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)

    def slices(self) -> np.ndarray:
        """Return the positions that all processes together take at each step of this epoch, int64 (steps, B * R)."""
        kept, slices, left = self.slices_per_bucket * self.slice_size, [], []
        within = random_state(self.seed, self.epoch, purpose=0)
        for bucket in self._buckets:
            if self.shuffle:
                bucket = within.permutation(bucket)  # a copy
            left.append(bucket[kept:])
            slices.append(np.concatenate([bucket[:kept], bucket[: max(0, kept - len(bucket))]]))
        slices.append(np.concatenate(left)[: self.mixed_slices * self.slice_size])
        steps = np.concatenate(slices).reshape(-1, self.slice_size)
        return random_state(self.seed, self.epoch, purpose=1).permutation(steps) if self.shuffle else steps

    def _check_order(self) -> None:
        """Check once that all processes have the same order; otherwise samples would be repeated or left out."""
        if self._is_order_checked:
            return
        self._is_order_checked = True
        order = (self.seed, len(self), *(bucket.tobytes() for bucket in self._buckets))
        own, digests = hashlib.sha256(repr(order).encode()).hexdigest(), [""] * self.num_replicas
        distributed.all_gather_object(digests, own)
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise ValueError(
                f"the processes {', '.join(map(str, others))} have other buckets than process 0: sort once and share "
                "the order, or use a sort_key with the same values on every process"
            )


def sort_values(dataset: Any, sort_key: str | Callable[[object], object], batched: bool = False) -> np.ndarray:
    """Return the values by which the samples of a set are sorted, numbers (N,).

    Args:
        dataset: of length N.
        sort_key: a function that is called with each sample; or the name of a column: an attribute of the set with N
            entries (`labels`), or a key of its samples. The value of anything but a number, such as a text or a list,
            is its length.
        batched: `dataset[[position, …]]` is a batch whose rows are samples; otherwise `dataset[position]` is a sample.

    Raises:
        ValueError: there is no such column, or a value is not a number and has no length.
    """

    def sample(position: int) -> Any:
        batch = dataset[[position]] if batched else None
        if isinstance(batch, Mapping):
            return {name: rows[0] for name, rows in batch.items()}
        return dataset.of[position] if batched else dataset[position]  # a batch without names is of `OfDatasets`

    def number(value: Any) -> float:
        if isinstance(value, int | float):
            return value
        return value.item() if getattr(value, "ndim", 1) == 0 else len(value)

    column: Any = None if callable(sort_key) else getattr(dataset, sort_key, None)
    every = range(len(dataset))
    if callable(sort_key):
        column = [sort_key(sample(position)) for position in every]
    elif not hasattr(column, "__len__") or len(column) != len(dataset):
        column = []
        for one in map(sample, every):
            try:
                column.append(one[sort_key])
            except (LookupError, TypeError, AttributeError) as error:  # a sample may be a tuple
                raise DataConfigError(
                    f"sort_key {sort_key!r}: the training set ({type_name(dataset)}) has no such column, and its "
                    "samples have no such key. A function is named by {ref: MODULE.FUNCTION}"
                ) from error
    try:
        values = np.array([number(value) for value in column])
    except TypeError:
        raise DataConfigError(f"sort_key {sort_key!r} gives a value that is not a number and has no length") from None
    if not np.isfinite(values).all():
        raise DataConfigError(f"sort_key {sort_key!r} gives {values[~np.isfinite(values)][0]}, not a finite number")
    return values


def type_name(dataset: object) -> str:
    """Return the name of the class of a set, or of the user's set that it wraps."""
    return type(getattr(dataset, "of", dataset)).__name__


def _permutation(order: object, size: int) -> np.ndarray:
    """Return sorted positions, int64 (N,); raise ValueError unless each position occurs once."""
    found = np.asarray(order)
    if found.shape != (size,):
        raise ValueError(f"sorted_idx has {found.size} positions, the set {size} samples")
    if found.dtype.kind not in "iu" or not np.array_equal(np.sort(found), np.arange(size)):
        raise ValueError(f"sorted_idx must contain each position from 0 to {size - 1} once")
    return found.astype(np.int64)
