"""Samples become batches, held in memory or prepared when asked for; both give the same batches.

A loader worker imports this module and nothing of Lightning, which would cost each worker 1.5 s.
N samples, B batch, H height, W width, C channels of the prepared image.
"""

import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch.utils.data import Dataset

from deeplightning.data.data_errors import DataError
from deeplightning.image_spec import MAX_PIXELS, ImageError, ImageSpec
from deeplightning.transfer import to_device

Batch = dict[str, torch.Tensor]
"""`image` uint8 (B, C, H, W), `label` int64 (B,), `index` int64 (B,): position in the set, -1: row does not count."""


_CHUNK = 64  # pictures that one thread prepares at a time, at most
_MOVED = 2**26  # bytes that go to a GPU at a time
_NO_POSITIONS = np.empty(0, np.int64)

SHARE_OF_GPU = 0.5
"""Of the GPU's memory that is left beside the largest demand of a step, pictures take at most this share."""


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Divisible:
    """Base of samples: columns side by side, of N entries each but those in `shared`; `labels` divides them evenly."""

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
    """Pictures as they come, with labels.

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
    """Samples that are prepared, side by side in tensors: a batch is one indexing operation for each.

    Args:
        large: what of a batch is gathered for each step, by name: (R, …). Mapped from a file, it is as good as in
            memory.
        small: what of a batch goes to a GPU once an epoch, by name: (N, …).
        rows: of `large` for each sample, int64 (N,); None: sample n has row n.
        samples: where they came from.

    Attributes:
        large, small, rows, samples: as given; on the CPU.
        on_device: what `move` has copied to a GPU, by its name in a batch, (N, …) in the order of the samples.
    """

    needs_workers = False

    def __init__(self, large: Batch, small: Batch, rows: torch.Tensor | None = None, samples: Any = None):
        self.large, self.small, self.rows, self.samples = large, small, rows, samples
        self._size = len(next(iter(large.values())) if rows is None else rows)
        self.on_device: Batch = {}

    @property
    def labels(self) -> torch.Tensor:
        """int64 (N,), empty where `small` has none."""
        return self.small.get("label", torch.zeros(0))

    @property
    def images(self) -> torch.Tensor:
        """uint8 (N, C, H, W), in the order of the samples; a copy where there are `rows`."""
        return self.large["image"] if self.rows is None else self.large["image"][self.rows]

    @property
    def size(self) -> int:
        """Bytes that `move` takes on a GPU."""
        return len(self) * sum(v.element_size() * v[:1].numel() for v in self.large.values())

    def move(self, device: torch.device) -> None:
        """Copy what is large to a device: `batches` makes theirs there from now on.

        Raises:
            torch.OutOfMemoryError: they do not fit; nothing has changed then.
        """
        moved = {}
        for name, values in self.large.items():
            target = moved[name] = torch.empty((len(self), *values.shape[1:]), dtype=values.dtype, device=device)
            chunk = max(1, _MOVED // max(1, values[:1].numel() * values.element_size()))
            for start in range(0, len(self), chunk):
                part = slice(start, start + chunk)
                target[part].copy_(values[part] if self.rows is None else values[self.rows[part]])
        self.on_device = moved

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: Sequence[int] | np.ndarray) -> Batch:
        index = torch.as_tensor(positions)  # (B,)
        # Index -1 is padding: the row takes the last sample, and its index marks it as not counted.
        taken = index if positions[0] >= 0 else index + len(self)
        rows = taken if self.rows is None else self.rows.index_select(0, taken)
        # `index_select` is twice as fast as `values[rows]`, for the same.
        batch = {name: values.index_select(0, rows) for name, values in self.large.items()}
        for name, values in self.small.items():
            batch[name] = values.index_select(0, taken)
        batch["index"] = index
        return batch

    def batches(self, positions: Iterable[np.ndarray], device: torch.device) -> Iterator[Batch]:
        """Yield the batches of an epoch, as `[]` gives them one by one, on a GPU, without a wait for it.

        Positions and labels of all batches go there in one copy each. Pictures that are there are picked there; others
        are gathered in pinned memory, which torch reuses once the copies from it are done.

        Args:
            positions: int64 (B,) of each batch.
            device: where the batches are to be.
        """
        arrays = list(positions)
        sizes, index = [len(array) for array in arrays], torch.from_numpy(np.concatenate([_NO_POSITIONS, *arrays]))
        taken = torch.where(index < 0, index + len(self), index)  # of PADDING the last, as above
        rows = (taken if self.rows is None else self.rows.index_select(0, taken)).split(sizes)
        sent = {
            name: to_device(values.index_select(0, taken), device).split(sizes) for name, values in self.small.items()
        }
        sent["index"] = to_device(index, device).split(sizes)
        there = to_device(taken, device).split(sizes)

        def batch(number: int) -> Batch:
            if self.on_device:
                made = {name: values.index_select(0, there[number]) for name, values in self.on_device.items()}
            else:
                made = {name: _gathered(values, rows[number], device) for name, values in self.large.items()}
            return made | {name: values[number] for name, values in sent.items()}

        return map(batch, range(len(arrays)))


def _gathered(values: torch.Tensor, rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return rows of a tensor of the CPU, on a device."""
    picked = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=device.type == "cuda")
    return torch.index_select(values, 0, rows, out=picked).to(device, non_blocking=True)


def move_where_there_is_room(sets: Sequence[InMemory], device: torch.device) -> None:
    """Copy sets to a GPU, where they take at most `SHARE_OF_GPU` of the memory that a step has left."""
    size, free = sum(one.size for one in sets), left(device)
    words = "in the memory of the CPU, batches pinned"
    if size <= free * SHARE_OF_GPU:
        try:
            for one in sets:
                one.move(device)
            words = f"on {device}"
        except torch.OutOfMemoryError:  # in the meantime another process has taken it
            for one in sets:
                one.on_device = {}
    log.info("%-10s %s: %.3g GiB, and a step leaves %.3g on the GPU", "data", words, size / 2**30, free / 2**30)


def left(device: torch.device) -> int:
    """Return the bytes of a GPU that neither this process at its peak nor another one has taken."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)


class OnDemand(Dataset):
    """Samples that are prepared when a batch asks for them, for sets that do not fit into memory; belongs into loader
    workers, so all that it holds can be pickled.

    Args:
        samples: N of them.
        prepare: called with the samples and positions, int64 (B,); gives entries of a batch.
        small: its other entries, by name: (N, …).

    Attributes:
        samples: as given.
    """

    needs_workers = True

    def __init__(self, samples: Any, prepare: "Prepare", small: Batch):
        self.samples, self._prepare, self._small = samples, prepare, small

    @property
    def labels(self) -> torch.Tensor:
        """int64 (N,), empty where `small` has none."""
        return self._small.get("label", torch.zeros(0))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, positions: Sequence[int] | np.ndarray) -> Batch:
        index = torch.as_tensor(positions)
        taken = np.asarray(positions) % len(self)  # index -1 is padding: it takes the last sample
        others = {name: values[taken] for name, values in self._small.items()}
        return {**self._prepare(self.samples, taken), **others, "index": index}


class EndsWithItsRun:
    """What a loader worker does first: from then on it ends with the process that reads its batches.

    A worker of a fork server is no child of that process. Where the process is killed, worker and server would wait for
    each other for good (Python 3.11).

    Args:
        then: called with the worker's number, like torch's `worker_init_fn`.
    """

    def __init__(self, then: Callable[[int], None] | None = None):
        self.then = then

    def __call__(self, number: int) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        if self.then is not None:
            self.then(number)

    def _watch(self) -> None:
        if (reader := multiprocessing.parent_process()) is not None:
            reader.join()
            os._exit(1)


def threads() -> int:
    """Return how many threads decode pictures: one for each core of this process, 16 at most."""
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def in_threads(work: Callable[[Any], Any], parts: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each part and what `work` makes of it, in order. Pillow lets other threads run while it decodes."""
    count, waiting = threads(), deque[tuple[Any, Future[Any]]]()
    with ThreadPoolExecutor(count) as pool:
        try:
            for part in parts:
                waiting.append((part, pool.submit(work, part)))
                if len(waiting) > 2 * count:  # whoever takes the results may be slower than the threads
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
    step = max(1, min(_CHUNK, size // (4 * threads())))
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
        spec: how.
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
            if pixels.shape[1:] == (spec.height, spec.width, spec.channels):
                return {"image": torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))}
        # Channels first in memory too: else convolutions would round otherwise than of a set in memory.
        images = np.empty((len(positions), spec.channels, spec.height, spec.width), dtype=np.uint8)
        for row, position in enumerate(positions):
            images[row] = samples.prepare(position, spec, self.max_pixels)
        return {"image": torch.from_numpy(images)}


Prepare = Callable[[Any, np.ndarray], Batch]
"""Makes entries of a batch of samples and positions."""
