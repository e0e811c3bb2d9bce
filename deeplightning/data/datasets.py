"""Make batches of samples that are in memory, or prepared on demand; both give the same batches.

It does not import Lightning, since loader workers import it: that would cost each worker 1.5 s.
N samples, B batch, H height, W width, C channels of the prepared image.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from deeplightning.data.data_errors import DataError
from deeplightning.data.samplers import BatchIndices
from deeplightning.image_spec import MAX_PIXELS, ImageError, ImageSpec
from deeplightning.transfer import to_device

Batch = dict[str, torch.Tensor]
"""`image` uint8 (B, C, H, W), `label` int64 (B,), `index` int64 (B,): position in the set; -1: padding, not counted."""

_CHUNK_PICTURES = 64  # maximum that one thread prepares at a time
_COPY_BYTES = 2**26  # copied to a GPU at a time
_NO_POSITIONS = np.empty(0, np.int64)

SHARE_OF_GPU = 0.5
"""Pictures take at most this fraction of the GPU memory that remains free at the peak of a step."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Divisible:
    """Base of samples: columns of N entries each, except those in `shared`; splits are stratified by `labels`."""

    shared: ClassVar[tuple[str, ...]] = ()

    def take(self, positions: np.ndarray) -> Self:
        """Return the samples at these positions, int (n,), in this order."""
        columns = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in self.shared}
        taken = {
            name: values[positions] if isinstance(values, np.ndarray) else [values[position] for position in positions]
            for name, values in columns.items()
            if values is not None
        }
        return replace(self, **taken)


@dataclass(frozen=True)
class Samples(Divisible):
    """Unprepared pictures with labels.

    Attributes:
        items: pixels, uint8 (N, height, width) or (N, height, width, channels); or the paths of image files.
        labels: int64 (N,).
    """

    items: np.ndarray | Sequence[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def prepare(self, position: int, spec: ImageSpec, max_pixels: int) -> np.ndarray:
        """Return one picture, uint8 (C, H, W); raise DataError if it cannot be read as an image."""
        item = self.items[position]
        if isinstance(item, np.ndarray):
            return spec.from_array(item).transpose(2, 0, 1)
        try:
            return spec.decode(item, max_pixels).transpose(2, 0, 1)
        except (ImageError, OSError) as error:
            raise DataError(f"{item}: cannot be used as an image. {error}") from error


class InMemory(Dataset):
    """Prepared samples in tensors: a batch is one indexing operation for each tensor.

    Args:
        large: columns of which each step gathers its rows, by name: (R, …); in memory, or mapped from a file.
        small: columns that are copied to a GPU once per epoch, by name: (N, …).
        rows: the row of each sample in `large`, int64 (N,); None: sample n has row n.
        samples: the unprepared samples.

    Attributes:
        large, small, rows, samples: as given, on the CPU.
        on_device: the columns that `move` copied to a GPU, by name, (N, …) in the order of the samples.
    """

    needs_workers = False

    def __init__(self, large: Batch, small: Batch, rows: torch.Tensor | None = None, samples: Any = None):
        self.large, self.small, self.rows, self.samples = large, small, rows, samples
        self._size = len(next(iter(large.values())) if rows is None else rows)
        self.on_device: Batch = {}

    @property
    def labels(self) -> torch.Tensor:
        """int64 (N,), or empty if `small` has none."""
        return self.small.get("label", torch.zeros(0))

    @property
    def images(self) -> torch.Tensor:
        """uint8 (N, C, H, W), in the order of the samples; a copy if there are `rows`."""
        return self.large["image"] if self.rows is None else self.large["image"][self.rows]

    @property
    def size(self) -> int:
        """Number of bytes that `move` needs on a GPU."""
        return len(self) * sum(v.element_size() * v[:1].numel() for v in self.large.values())

    def move(self, device: torch.device) -> None:
        """Copy the large columns to a device; from then on, `batches` indexes them there.

        Raises:
            torch.OutOfMemoryError: they do not fit; then nothing has changed.
        """
        moved = {}
        for name, values in self.large.items():
            target = moved[name] = torch.empty((len(self), *values.shape[1:]), dtype=values.dtype, device=device)
            chunk = max(1, _COPY_BYTES // max(1, values[:1].numel() * values.element_size()))
            for start in range(0, len(self), chunk):
                part = slice(start, start + chunk)
                target[part].copy_(values[part] if self.rows is None else values[self.rows[part]])
        self.on_device = moved

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: Sequence[int] | np.ndarray) -> Batch:
        index = torch.as_tensor(positions)  # (B,)
        # Index -1 is padding: the row has the last sample, and its index excludes it from counts.
        taken = index if positions[0] >= 0 else index + len(self)
        rows = taken if self.rows is None else self.rows.index_select(0, taken)
        # `index_select` is twice as fast as `values[rows]`.
        batch = {name: values.index_select(0, rows) for name, values in self.large.items()}
        for name, values in self.small.items():
            batch[name] = values.index_select(0, taken)
        batch["index"] = index
        return batch

    def batches(self, positions: Iterable[np.ndarray], device: torch.device) -> Iterator[Batch]:
        """Yield the batches of an epoch, the same as `[]` returns, on a GPU, without waiting for it.

        Positions and labels of all batches are copied at once. Pictures that are on the GPU are indexed there; others
        are gathered in pinned memory, which torch reuses once the copies from it are done.

        Args:
            positions: of each batch, int64 (B,).
            device: of the batches.
        """
        arrays = list(positions)
        sizes, index = [len(array) for array in arrays], torch.from_numpy(np.concatenate([_NO_POSITIONS, *arrays]))
        taken = torch.where(index < 0, index + len(self), index)  # PADDING: the last sample, as above
        rows = (taken if self.rows is None else self.rows.index_select(0, taken)).split(sizes)
        sent = {name: to_device(v.index_select(0, taken), device).split(sizes) for name, v in self.small.items()}
        sent["index"] = to_device(index, device).split(sizes)
        taken_there = to_device(taken, device).split(sizes)

        def batch(number: int) -> Batch:
            if self.on_device:
                made = {name: values.index_select(0, taken_there[number]) for name, values in self.on_device.items()}
            else:
                made = {name: _gather(values, rows[number], device) for name, values in self.large.items()}
            return made | {name: values[number] for name, values in sent.items()}

        return map(batch, range(len(arrays)))


def _gather(values: torch.Tensor, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return rows of a CPU tensor, on a device."""
    picked = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=device.type == "cuda")
    return torch.index_select(values, 0, rows, out=picked).to(device, non_blocking=True)


def move_if_it_fits(sets: Sequence[InMemory], device: torch.device) -> None:
    """Copy sets to a GPU if they take at most `SHARE_OF_GPU` of the memory that a step leaves free."""
    size, free = sum(one.size for one in sets), free_bytes(device)
    location = "in the memory of the CPU, batches pinned"
    if size <= free * SHARE_OF_GPU:
        try:
            for one in sets:
                one.move(device)
            location = f"on {device}"
        except torch.OutOfMemoryError:  # another process has taken the memory
            for one in sets:
                one.on_device = {}
    log.info("%-10s %s: %.3g GiB; a step leaves %.3g free on the GPU", "data", location, size / 2**30, free / 2**30)


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that neither this process at its peak nor any other process uses."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))  # of `deeplightning batch --memory`
    return min(free + torch.cuda.memory_reserved(device), limit) - torch.cuda.max_memory_allocated(device)


class OnDemand(Dataset):
    """Samples that are prepared for each batch, for sets that do not fit into memory. It runs in loader workers, so all
    its attributes can be pickled.

    Args:
        samples: N samples.
        prepare: called with the samples and positions, int64 (B,); returns columns of a batch.
        small: the other columns, by name: (N, …).

    Attributes:
        samples: as given.
    """

    needs_workers = True

    def __init__(self, samples: Any, prepare: "Prepare", small: Batch):
        self.samples, self._prepare, self._small = samples, prepare, small

    @property
    def labels(self) -> torch.Tensor:
        """int64 (N,), or empty if `small` has none."""
        return self._small.get("label", torch.zeros(0))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, positions: Sequence[int] | np.ndarray) -> Batch:
        index = torch.as_tensor(positions)
        taken = np.asarray(positions) % len(self)  # index -1 is padding: the last sample
        others = {name: values[taken] for name, values in self._small.items()}
        return {**self._prepare(self.samples, taken), **others, "index": index}


class ExitWithParent:
    """Worker init function: makes a loader worker exit with the process that reads its batches, and not on Ctrl-C.

    A worker of a fork server is not a child of that process. If the process is killed, worker and server would wait for
    each other forever (Python 3.11).

    Args:
        then: called with the worker's number, like torch's `worker_init_fn`.
    """

    def __init__(self, then: Callable[[int], None] | None = None):
        self.then = then

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it here too, and the run needs further batches
        threading.Thread(target=self._watch, daemon=True).start()
        if self.then is not None:
            self.then(number)

    def _watch(self) -> None:
        if (reader := multiprocessing.parent_process()) is not None:
            reader.join()
            os._exit(1)


def threads() -> int:
    """Return the number of threads that decode pictures: one for each core of this process, 16 at most."""
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def in_threads(work: Callable[[Any], Any], parts: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each part with the result of `work` for it, in order. Pillow releases the GIL while it decodes."""
    count, waiting = threads(), deque[tuple[Any, Future[Any]]]()
    with ThreadPoolExecutor(count) as pool:
        try:
            for part in parts:
                waiting.append((part, pool.submit(work, part)))
                if len(waiting) > 2 * count:  # the consumer may be slower than the threads
                    yield waiting[0][0], waiting.popleft()[1].result()
            while waiting:
                yield waiting[0][0], waiting.popleft()[1].result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def prepare_all(samples: Any, prepare: "Prepare") -> Batch:
    """Return all samples, prepared in threads, by name (N, …); raise DataError if a file cannot be read."""
    found: Batch = {}
    every, size = np.arange(len(samples)), len(samples)
    step = max(1, min(_CHUNK_PICTURES, size // (4 * threads())))
    parts = (slice(start, start + step) for start in range(0, max(1, size), step))
    for part, made in in_threads(lambda part: prepare(samples, every[part]), parts):
        for name, values in made.items():
            if name not in found:
                found[name] = torch.empty((size, *values.shape[1:]), dtype=values.dtype)
            found[name][part] = values
    return found


@dataclass(frozen=True)
class Pictures:
    """Prepares pictures.

    Attributes:
        spec: how pictures are prepared.
        max_pixels: largest image file that is decoded.
    """

    spec: ImageSpec
    max_pixels: int = MAX_PIXELS

    def __call__(self, samples: Samples, positions: np.ndarray) -> Batch:
        """Return `image`, uint8 (B, C, H, W); raise DataError if a file cannot be read as an image."""
        spec = self.spec
        if isinstance(getattr(samples, "items", None), np.ndarray):
            pixels = samples.items[positions]  # type: ignore[call-overload]
            pixels = pixels if pixels.ndim == 4 else pixels[..., None]  # (B, H', W', C')
            if pixels.dtype == np.uint8 and pixels.shape[1:] == (spec.height, spec.width, spec.channels):
                return {"image": torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))}
        # Channels first in memory too; otherwise convolutions would round differently than for a set in memory.
        images = np.empty((len(positions), spec.channels, spec.height, spec.width), dtype=np.uint8)
        for row, position in enumerate(positions):
            images[row] = samples.prepare(position, spec, self.max_pixels)
        return {"image": torch.from_numpy(images)}


Prepare = Callable[[Any, np.ndarray], Batch]
"""Makes columns of a batch from samples and positions."""


class InMemoryLoader(DataLoader):
    """Loads batches of an `InMemory` set in the order of a `BatchIndices`; for anything else it is torch's DataLoader.

    torch's overhead per batch is 30 µs: a list of positions, checks of each tensor, a record for the profiler.

    Attributes:
        device: the GPU to put batches on; None: the CPU. It is not an argument, since Lightning recreates some loaders
            with the arguments of torch's DataLoader.
    """

    device: torch.device | None = None

    def __iter__(self) -> Any:
        dataset, sampler = self.dataset, self.sampler
        if not isinstance(dataset, InMemory) or not isinstance(sampler, BatchIndices) or self.num_workers:
            return super().__iter__()
        if self.device is not None:
            return dataset.batches(sampler.arrays(), self.device)
        return map(dataset.__getitem__, sampler.arrays())
