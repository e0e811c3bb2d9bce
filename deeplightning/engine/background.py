"""Checkpoints are written while training continues: a copy of the tensors on the CPU, and a thread that writes it.

The copy is made at once, so training may change its tensors; at most one copy exists at a time.
"""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from deeplightning.private.torch import storage_id
from deeplightning.process.agreement import free_memory
from deeplightning.transfer import is_asynchronous

SMALLEST = 8 * 2**20
"""Bytes of tensors on GPUs from which a checkpoint is written in the background."""


class Writer:
    """Runs jobs in a thread, in the order in which they come. After a job has failed none runs any more, and each call
    raises its error, until `wait` has raised it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Runs a job after all that came before, without waiting for it."""
        self.check()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._jobs.append(self._thread.submit(self._run, job))

    def then(self, job: Callable[[], None]) -> None:
        """Runs a job when all that came before is done: now, if it is."""
        self.check()
        if self._jobs:
            self.submit(job)
        else:
            job()

    def check(self) -> None:
        """Raises the error of a job that has failed; does not wait."""
        self._jobs = [job for job in self._jobs if not job.done()]
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Waits until all jobs are done."""
        while self._jobs:
            self._jobs[0].result()
            del self._jobs[0]
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits until all jobs are done, and ends the thread."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def _run(self, job: Callable[[], None]) -> None:
        if self._error is None:
            try:
                job()
            except BaseException as error:
                self._error = error


def gains(checkpoint: dict[str, object]) -> bool:
    """Whether to write a checkpoint in the background: much of it is on GPUs, and there is memory for its copy.

    Where the CPU trains, the thread takes the cores that training needs: the run took half as much CPU time again and
    did not end sooner (two cores, torch 2.15, November 2026).
    """
    sizes = {storage_id(t): t.untyped_storage().nbytes() for t in _tensors(checkpoint) if is_asynchronous(t.device)}
    size, free = sum(sizes.values()), free_memory()
    return size >= SMALLEST and (free is None or free > 2 * size)


class Snapshot:
    """A copy of a checkpoint on the CPU. Tensors that share memory share it in the copy.

    From a GPU the copy is made on a stream of its own, into pinned memory. If the GPU has room for a second copy of the
    tensors, training continues at once; else its next kernel waits for the copy, and the process does not.
    """

    def __init__(self, checkpoint: dict[str, object]) -> None:
        self._copied: list[torch.cuda.Event] = []
        self._kept: list[Tensor] = []  # on a GPU, until the copy is done
        copies: dict[int, Tensor] = {}  # of storages, as bytes
        tensors = list(_tensors(checkpoint))
        on_gpus: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for tensor in tensors:
            if (key := storage_id(tensor)) not in copies:
                whole = _bytes(tensor)
                copies[key] = _pinned(whole) if tensor.is_cuda else whole.to("cpu", copy=True)
                if tensor.is_cuda:
                    on_gpus.setdefault(tensor.device, []).append((whole, copies[key]))
        for device, pairs in on_gpus.items():
            self._copy(device, *map(list, zip(*pairs, strict=True)))
        memo: dict[int, object] = {id(tensor): _like(tensor, copies[storage_id(tensor)]) for tensor in tensors}
        self.checkpoint: dict[str, object] = copy.deepcopy(checkpoint, memo)

    def _copy(self, device: torch.device, sources: list[Tensor], targets: list[Tensor]) -> None:
        training, beside = torch.cuda.current_stream(device), _stream(device)
        free, _ = torch.cuda.mem_get_info(device)
        room = free > 2 * sum(source.numel() for source in sources)
        if room:
            sources = [source.clone() for source in sources]
        beside.wait_stream(training)
        with torch.cuda.stream(beside):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            self._copied.append(beside.record_event())
        self._kept += sources
        if not room:
            training.wait_stream(beside)

    def finished(self) -> dict[str, object]:
        """The copy, when all of it has arrived."""
        for event in self._copied:
            event.synchronize()
        self._kept.clear()
        return self.checkpoint


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in nested containers that have values in memory of their own."""
    if isinstance(value, Tensor):
        if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of the memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    """The view of a copied storage that a tensor is of its own."""
    found = torch.empty(0, dtype=tensor.dtype)
    found.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    return found


def _pinned(like: Tensor) -> Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except RuntimeError:  # the system has no more memory that it can pin
        return torch.empty(like.shape, dtype=like.dtype)
