"""The process that holds one model: it loads and verifies it within limits, forks the workers that answer, and replaces
those that die, until SIGTERM.

Workers share the model's memory, since they are forked when it is loaded. CUDA does not survive a fork: on GPUs each
worker loads the model itself, within the same limits, and reports whether it could.
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypedDict, cast

from deeplightning.kinds import KINDS
from serve.admission import Admission
from serve.batching import Batcher, Model
from serve.device import CPU, Device, DeviceError
from serve.layout import Layout, choose, largest_batch, usable_cores
from serve.limits import Limits
from serve.log import log_event
from serve.metrics import Metrics
from serve.private import is_out_of_memory
from serve.service import Service
from serve.worker import BACKLOG, GRACE_SECONDS, OPENING_SECONDS, STOPS, work

CHECK_SECONDS = 1.0
"""How often it is looked whether a process has died."""

LOAD_SECONDS = 300.0
"""How long a model may take to load and to answer its samples before it is given up."""

GPU_LOAD_SECONDS = 900.0
"""The same on a GPU, for which TensorRT may compile for minutes."""

LOAD_SHARE = 0.9
"""The part of the memory that is free which it may take meanwhile."""

SHORT_LIFE = 1.0
"""A process that ends sooner is replaced only after as many seconds."""

OpenModel = Callable[[Device], Model]
"""Loads and checks the model on a device."""

REFUSED = 4
"""The exit code where a model is outside the limits."""


class Spread(TypedDict):
    """What a report tells of a layout."""

    processes: int
    lanes: int
    forward_ms: float


class Report(TypedDict, total=False):
    """What a child reports, once: the model that answers, its origin and the layout; or, as `fault`, why none does."""

    model: str
    run: dict[str, object]
    layout: Spread
    fault: str
    exit_code: int


@dataclass(frozen=True)
class Setup:
    """What every worker pool has.

    Attributes:
        open_model: loads and checks the model on a device.
        folder: where the model comes from.
        listeners: sockets of one address, one for each worker that there may be; only those in use listen.
        limits: what a request may cost.
        admission: which requests are let in.
        fast: predictions take the fast path.
        metrics: where requests are counted.
    """

    open_model: OpenModel
    folder: Path
    listeners: list[socket.socket]
    limits: Limits
    admission: Admission
    fast: bool
    metrics: Metrics


@dataclass(eq=False)
class _Worker:
    """One worker: its process, the pipe on which it reports that it answers or why it cannot, and since when; `fault`:
    why it was killed."""

    process: int
    slot: int
    pipe: int
    since: float
    reported: bool = False
    ready: bool = False
    fault: str | None = None


class WorkerPool:
    """One model and its workers.

    Args:
        setup: what every worker pool has.
        layout: of the GPUs, or of the model before on the CPU; None: it is measured.
        row: the first of its workers' rows of the metrics.
        memory: bytes that it may take to load the model.
        pipe: where it reports, once, that all its workers answer, or why they cannot.
    """

    def __init__(self, setup: Setup, layout: Layout | None, row: int, memory: int, pipe: int):
        self._setup = setup
        self._layout = layout
        self._row = row
        self._memory = memory
        self._pipe: int | None = pipe
        self._model: Model | None = None
        self._workers: list[_Worker] = []
        self._asked: set[int] = set()

    def run(self) -> None:
        """Never returns: the process ends without running what its parent has set up."""
        parent = os.getppid()
        reset_signals()
        if self._layout is None or not self._layout.devices[0].on_gpu:
            try:
                with _limited(self._memory):
                    self._model = self._setup.open_model(CPU)
                    self._layout = self._layout or choose(self._model)
            except Exception as error:
                self._give_up(_fault(error, CPU, self._memory))
        wake, self._wakened = os.pipe()
        os.set_blocking(self._wakened, False)
        signal.set_wakeup_fd(self._wakened, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda number, _: self._asked.add(number))
        gc.collect()
        gc.freeze()  # as the parent does
        for slot in range(self._spread.processes):
            self._setup.listeners[slot].listen(BACKLOG)
            self._fork(slot)
        while not self._asked & {signal.SIGTERM, signal.SIGINT} and os.getppid() == parent:
            loading = [worker for worker in self._workers if not worker.reported]
            pause = CHECK_SECONDS / 10 if loading else CHECK_SECONDS
            readable, _, _ = select.select([wake, *(worker.pipe for worker in loading)], [], [], pause)
            if wake in readable:
                os.read(wake, 4096)
            self._read_reports([worker for worker in loading if worker.pipe in readable])
            self._stop_overdue()
            self._reap()
        self._end(signal.SIGTERM)
        os._exit(0)

    @property
    def _spread(self) -> Layout:
        assert self._layout is not None, "the model is loaded, or the GPUs are known"
        return self._layout

    def _fork(self, slot: int) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # in the worker until it can finish what waits
        process = os.fork()
        if process:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            os.close(writing)
            self._workers.append(_Worker(process, slot, reading, time.monotonic()))
            return
        try:
            self._become_worker(slot, writing)
        finally:  # whatever happened, the worker pool's work is not the worker's
            os._exit(1)

    def _become_worker(self, slot: int, pipe: int) -> None:
        reset_signals()
        if self._pipe is not None:
            os.close(self._pipe)
        setup, spread = self._setup, self._spread
        for other, listener in enumerate(setup.listeners):
            if other != slot:
                listener.close()
        setup.metrics.row = self._row + slot
        device, limits, threads, model = spread.device(slot), setup.limits, None, self._model
        if model is None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # it loads for long
            try:
                model = setup.open_model(device)
                limits = replace(limits, max_batch=largest_batch(model, limits.max_batch))
                threads = usable_cores() // spread.processes + spread.lanes
            except Exception as error:
                send_report(pipe, **_fault(error, device, self._memory))
                os._exit(1)
        batcher = Batcher(model, limits, spread.lanes, spread.forward_ms / 1e3, threads)
        shown = {"processes": spread.processes, "lanes": spread.lanes, "device": str(device)}
        if device.on_gpu:
            shown["device_name"] = device.name
        service = Service(model, limits, batcher, setup.metrics, shown, setup.admission, setup.fast, ready=False)
        started = lambda: send_report(pipe, model=_words(model), run=model.run)  # noqa: E731
        work(setup.listeners[slot], service, started)

    def _read_reports(self, workers: list[_Worker]) -> None:
        """What workers report: that they answer, or why they cannot; a pipe that ends without a word is a death."""
        for worker in workers:
            worker.reported = True
            report = read_report(worker.pipe)
            worker.ready = "model" in report
            if not worker.ready and self._model is None:  # else it was loaded before the fork
                self._cannot(worker, report)
            if self._pipe is not None and all(worker.ready for worker in self._workers):
                spread = {name: asdict(self._spread)[name] for name in ("processes", "lanes", "forward_ms")}
                send_report(self._pipe, **report, layout=spread)
                self._pipe = None

    def _cannot(self, worker: _Worker, report: Report) -> None:
        """A worker cannot load the model on its GPU: the end of this worker pool, unless all have answered before."""
        device = self._spread.device(worker.slot)
        died = f"the process for {device} ({device.name}) died while it loaded the model"
        reason = report.get("fault") or worker.fault or died
        if self._pipe is None:
            log_event(f"{device} does not answer, and is tried again: {reason}")
        else:
            code = REFUSED if worker.fault else DeviceError.exit_code
            self._give_up({"fault": reason, "exit_code": report.get("exit_code", code)})

    def _give_up(self, report: Report) -> None:
        """Ends this process and its workers, none of which has answered; then reports why."""
        self._end(signal.SIGKILL)
        assert self._pipe is not None, "it has not reported yet"
        send_report(self._pipe, **report)
        os._exit(1)

    def _stop_overdue(self) -> None:
        """Kills workers that load their model for too long, or take too much memory for it. The system's own limits
        count addresses, of which CUDA takes many more than memory."""
        for worker in self._workers:
            if worker.reported or worker.fault:
                continue
            if time.monotonic() > worker.since + GPU_LOAD_SECONDS:
                worker.fault = too_slow(self._setup.folder, GPU_LOAD_SECONDS)
            elif _in_bytes(f"/proc/{worker.process}/status", "RssAnon:") > self._memory:
                worker.fault = too_large(self._setup.folder, self._memory)
            if worker.fault:
                os.kill(worker.process, signal.SIGKILL)

    def _reap(self) -> None:
        """Replaces workers that have died."""
        for worker in list(self._workers):
            ended, status = os.waitpid(worker.process, os.WNOHANG)
            if not ended:
                continue
            if not worker.reported:  # it had no time to report, or nobody to listen
                self._read_reports([worker])
            self._forget(worker)
            log_event("a worker died", process=worker.process, exit_code=os.waitstatus_to_exitcode(status))
            if not worker.ready or time.monotonic() - worker.since < SHORT_LIFE:
                time.sleep(SHORT_LIFE)
            self._fork(worker.slot)

    def _forget(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        os.close(worker.pipe)
        self._setup.metrics.queue(0, self._row + worker.slot)

    def _end(self, number: signal.Signals) -> None:
        """Lets the workers finish; kills those that do not. None is left."""
        for worker in self._workers:
            os.kill(worker.process, number)
        if number == signal.SIGTERM and self._model is not None:
            self._finish_for_the_lost()
        for listener in self._setup.listeners:
            listener.close()
        end = time.monotonic() + GRACE_SECONDS + 0.5
        while self._workers and time.monotonic() < end:
            for worker in list(self._workers):
                if os.waitpid(worker.process, os.WNOHANG)[0]:
                    self._forget(worker)
            time.sleep(0.02)
        for worker in list(self._workers):
            os.kill(worker.process, signal.SIGKILL)
            os.waitpid(worker.process, 0)

    def _finish_for_the_lost(self) -> None:
        """Answers the connections that wait on the socket of a worker that has died, by another that then ends."""
        time.sleep(OPENING_SECONDS)  # the others accept for as long; a killed worker has ended by then
        for worker in list(self._workers):
            ended, status = os.waitpid(worker.process, os.WNOHANG)
            if not ended:
                continue
            self._forget(worker)
            if status:
                log_event("a worker died", process=worker.process, exit_code=os.waitstatus_to_exitcode(status))
                self._fork(worker.slot)
                os.kill(self._workers[-1].process, signal.SIGTERM)


def reset_signals() -> None:
    """In a child: the parent's handlers are not its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


# ---- what a child reports


def read_report(pipe: int) -> Report:
    """All that a child writes before it closes its end; nothing where it has died."""
    with os.fdopen(os.dup(pipe), "rb") as stream:
        return cast(Report, json.loads(stream.read() or "{}"))


def send_report(pipe: int, **report: object) -> None:
    """Reports, once, and closes this end."""
    with os.fdopen(pipe, "wb") as stream:
        stream.write(json.dumps(report, default=str).encode())


def _words(model: Model) -> str:
    """What a model does."""
    if not model.labels or KINDS[model.task].gives == "regression":
        return f"{model.task} ({', '.join(model.labels)})" if model.labels else model.task
    words = "labels" if KINDS[model.task].gives == "multilabel" else "classes"
    return f"{model.task} ({len(model.labels)} {words})"


def _fault(error: Exception, device: Device, memory: int) -> Report:
    """Why a model cannot be loaded, for people, and the exit code; a fault of ours leaves its traceback in the log."""
    reason, code = str(error) or type(error).__name__, getattr(error, "exit_code", None)
    if isinstance(error, MemoryError) or "bad_alloc" in reason or is_out_of_memory(error):
        return {"fault": f"{reason.rstrip('.')}; {_memory_words(memory)}.", "exit_code": code or REFUSED}
    if code is None:
        log_event(f"the process for {device} cannot load the model", error)
    return {"fault": reason, "exit_code": code or 1}


# ---- within which limits a model is loaded


def too_slow(folder: Path, seconds: float) -> str:
    return (
        f"The model of {folder} was not loaded and proved within {seconds:g} s, the limit. It may compute without end; "
        "get a new copy of it, or export it again."
    )


def too_large(folder: Path, memory: int) -> str:
    return f"The model of {folder} was not loaded and proved: {_memory_words(memory)}."


def died(folder: Path, memory: int) -> str:
    return f"The process that loaded the model of {folder} died without a word; {_memory_words(memory)}."


def _memory_words(memory: int) -> str:
    return f"it may take {memory / 1e9:.3g} GB of memory meanwhile, {LOAD_SHARE:.2g} of what is free"


def spare_memory() -> int:
    """Bytes that a model may take: `LOAD_SHARE` of what is free on this machine, or in this container."""
    free = _in_bytes("/proc/meminfo", "MemAvailable:") or sys.maxsize
    with contextlib.suppress(OSError, ValueError):  # a container's own limit (cgroup 2); files that it has read can go
        limit, taken = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        kept = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        free = min(free, limit - taken + int(kept["inactive_file"]) + int(kept["active_file"]))
    return int(LOAD_SHARE * max(free, 0))


@contextlib.contextmanager
def _limited(memory: int) -> Iterator[None]:
    """Has this process fail where it asks for so many more bytes, and ends it when it computes for too long, also where
    its parent has been killed."""
    most = {resource.RLIMIT_CPU: int(LOAD_SECONDS) + 1}
    if used := _in_bytes("/proc/self/status", "VmData:"):
        most[resource.RLIMIT_DATA] = min(used + memory, sys.maxsize)
    before = {kind: resource.getrlimit(kind) for kind in most}
    for kind, (soft, hard) in before.items():
        known = [limit for limit in (most[kind], soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(known), hard))
    try:
        yield
    finally:
        for kind, both in before.items():
            resource.setrlimit(kind, both)


def _in_bytes(file: str, name: str) -> int:
    """A number of kB from a file of the system; 0 where it has none."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in Path(file).read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
    return 0
