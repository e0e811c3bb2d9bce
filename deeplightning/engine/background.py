"""Writing checkpoints while training continues: tensors are copied to the CPU, and a thread writes the copy.

The copy is made at once, so training may change its tensors; at most one copy exists at a time.
"""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from deeplightning.private.torch import storage_id
from deeplightning.transfer import is_asynchronous
from deeplightning.words import free_memory

MIN_BYTES = 8 * 2**20
"""Minimum size of the tensors on GPUs for writing a checkpoint in the background."""


class Writer:
    """Run jobs in a thread, in order. After a job has failed no further job runs, and each call raises its error, until
    `wait` has raised it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after all earlier ones, without waiting for it."""
        self.check()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._jobs.append(self._thread.submit(self._run, job))

    def then(self, job: Callable[[], None]) -> None:
        """Run a job once all earlier ones are done: now, if they are."""
        self.check()
        if self._jobs:
            self.submit(job)
        else:
            job()

    def check(self) -> None:
        """Raise the error of a failed job; do not wait."""
        self._jobs = [job for job in self._jobs if not job.done()]
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all jobs are done."""
        while self._jobs:
            self._jobs[0].result()
            del self._jobs[0]
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait until all jobs are done, then end the thread."""
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
    """Return whether to write a checkpoint in the background: much of it is on GPUs, and its copy fits in memory.

    In CPU training the thread competes with training for cores: the run took half as much CPU time again and did not
    end sooner (two cores, torch 2.15, November 2026).
    """
    sizes = {storage_id(t): t.untyped_storage().nbytes() for t in tensors_in(checkpoint) if is_asynchronous(t.device)}
    size, free = sum(sizes.values()), free_memory()
    return size >= MIN_BYTES and (free is None or free > 2 * size)


class Snapshot:
    """A copy of a checkpoint on the CPU. Tensors that share memory share it in the copy too.

    A GPU's tensors are copied into pinned memory on the stream of the training: its next kernel waits for the copy, but
    the process does not.
    """

    def __init__(self, checkpoint: dict[str, object]) -> None:
        copies: dict[int, Tensor] = {}  # of storages, as bytes
        tensors = list(tensors_in(checkpoint))
        for tensor in tensors:
            if (key := storage_id(tensor)) not in copies:
                whole = _bytes(tensor)
                pinned = _pinned(whole) if tensor.is_cuda else torch.empty_like(whole, device="cpu")
                copies[key] = pinned.copy_(whole, non_blocking=tensor.is_cuda)
        on_gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._copied = [torch.cuda.current_stream(device).record_event() for device in on_gpus]
        memo: dict[int, object] = {id(tensor): _like(tensor, copies[storage_id(tensor)]) for tensor in tensors}
        self.checkpoint: dict[str, object] = copy.deepcopy(checkpoint, memo)

    def finished(self) -> dict[str, object]:
        """Return the copy once it is complete."""
        for event in self._copied:
            event.synchronize()
        return self.checkpoint


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers whose values are in ordinary memory."""
    if isinstance(value, Tensor):
        if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _bytes(tensor: Tensor) -> Tensor:
    """Return all bytes of the storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    """Return a view of the copied storage that matches the tensor's view of the original."""
    found = torch.empty(0, dtype=tensor.dtype)
    found.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    return found


def _pinned(like: Tensor) -> Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except RuntimeError:  # no more memory can be pinned
        return torch.empty(like.shape, dtype=like.dtype)
