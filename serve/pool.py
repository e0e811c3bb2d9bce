"""The process that owns one model: load and verify it within limits, fork workers, and replace those that die, until
SIGTERM.

Workers share the model's memory, since they are forked after it is loaded. CUDA does not survive a fork: on GPUs each
worker loads the model itself, within a time limit, and reports the result.
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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, cast

from deeplightning.kinds import KINDS
from deeplightning.words import free_memory
from serve.admission import Admission
from serve.batching import Batcher
from serve.device import CPU, Device, DeviceError
from serve.limits import Limits
from serve.log import log_event
from serve.metrics import Metrics
from serve.model import Model
from serve.prediction import Service
from serve.private import is_out_of_memory
from serve.worker import BACKLOG, GRACE_SECONDS, OPENING_SECONDS, STOP_SIGNALS, run_worker
from serve.worker_count import Layout, choose_layout, largest_batch, usable_cores

CHECK_SECONDS = 1.0
"""Interval at which the processes are polled."""

LOAD_SECONDS = 300.0
"""Time limit for a model to load and to answer its samples."""

LOAD_MEMORY_SHARE = 0.9
"""Fraction of the free memory that loading a model may take."""

RESTART_SECONDS = 1.0
"""Delay before the restart of a process that ended within this time."""

OpenModel = Callable[[Device], Model]
"""Load and check the model on a device."""

REFUSED_EXIT_CODE = 4
"""Exit code if a model exceeds the limits."""


class Report(TypedDict, total=False):
    """The one report of a child: the loaded model, its origin, and processes, lanes and forward_ms of its `Layout`; or,
    as `fault`, why it was not loaded."""

    model: str
    run: dict[str, object]
    layout: dict[str, Any]
    fault: str
    exit_code: int


@dataclass(frozen=True)
class Setup:
    """Settings that all worker pools share.

    Attributes:
        open_model: loads and checks the model on a device.
        folder: source of the model.
        listeners: sockets of one address, one for each possible worker; only those in use listen.
        limits: limits of a request.
        admission: checks the heads of requests.
        metrics: counters of requests.
    """

    open_model: OpenModel
    folder: Path
    listeners: list[socket.socket]
    limits: Limits
    admission: Admission
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(eq=False)
class _Worker:
    """A worker: its process id, the pipe for its report, its start time (`time.monotonic`), and, as `fault`, why it
    was killed."""

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
        setup: settings that all worker pools share.
        layout: layout of the GPUs, or of the previous model on the CPU; None: measured after loading.
        row: row of its first worker in the metrics.
        memory: memory limit for loading the model, in bytes.
        pipe: receives one report: all workers answer, or why they cannot.
    """

    def __init__(self, setup: Setup, layout: Layout | None, row: int, memory: int, pipe: int):
        self._setup, self._layout, self._row, self._memory = setup, layout, row, memory
        self._pipe: int | None = pipe
        self._model: Model | None = None
        self._workers: list[_Worker] = []
        self._signals: set[int] = set()

    def run(self) -> None:
        """Run the pool until SIGTERM. Never returns: exit without the parent's exit handlers."""
        parent = os.getppid()
        reset_signals()
        if self._layout is None or not self._layout.devices[0].on_gpu:
            try:
                with _resource_limits(self._memory):
                    self._model = self._setup.open_model(CPU)
                    measured = choose_layout(self._model)
                    self._layout = replace(self._layout or measured, forward_ms=measured.forward_ms)
            except Exception as error:
                self._abort(_load_failure(error, CPU, self._memory))
        wake = collect_signals(self._signals, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        gc.collect()
        gc.freeze()  # as the parent does
        for listener in self._setup.listeners[self._chosen_layout.processes :]:
            listener.close()  # it listens if a worker of a GPU that failed was to use it
        for slot in range(self._chosen_layout.processes):
            self._setup.listeners[slot].listen(BACKLOG)
            self._fork(slot)
        while not self._signals & {signal.SIGTERM, signal.SIGINT} and os.getppid() == parent:
            loading = [worker for worker in self._workers if not worker.reported]
            pause = CHECK_SECONDS / 10 if loading else CHECK_SECONDS
            readable, _, _ = select.select([wake, *(worker.pipe for worker in loading)], [], [], pause)
            if wake in readable:
                os.read(wake, 4096)
            self._read_reports([worker for worker in loading if worker.pipe in readable])
            for worker in self._workers:
                if not worker.reported and not worker.fault and time.monotonic() > worker.since + LOAD_SECONDS:
                    worker.fault = timeout_message(self._setup.folder, LOAD_SECONDS)
                    os.kill(worker.process, signal.SIGKILL)
            self._reap()
        self._stop_workers(signal.SIGTERM)
        os._exit(0)

    @property
    def _chosen_layout(self) -> Layout:
        assert self._layout is not None, "the model is loaded, or the GPUs are known"
        return self._layout

    def _fork(self, slot: int) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the worker unblocks them once it can shut down
        process = os.fork()
        if process:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            os.close(writing)
            self._workers.append(_Worker(process, slot, reading, time.monotonic()))
            return
        try:
            self._become_worker(slot, writing)
        finally:  # in any case, the worker must not run the pool's code
            os._exit(1)

    def _become_worker(self, slot: int, pipe: int) -> None:
        reset_signals()
        if self._pipe is not None:
            os.close(self._pipe)
        setup, layout, parent = self._setup, self._chosen_layout, os.getppid()
        for other, listener in enumerate(setup.listeners):
            if other != slot:
                listener.close()
        setup.metrics.row = self._row + slot
        device, limits, threads, model = layout.device(slot), setup.limits, None, self._model
        if model is None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # loading takes long
            try:
                model = setup.open_model(device)
                limits = replace(limits, max_batch=largest_batch(model, limits.max_batch))
                threads = usable_cores() // layout.processes + layout.lanes
            except Exception as error:
                send_report(pipe, **_load_failure(error, device, self._memory))
                os._exit(1)
        batcher = Batcher(model, limits, layout.lanes, layout.forward_ms / 1e3, threads)
        shown = {"processes": layout.processes, "lanes": layout.lanes, "device": str(device)}
        if device.on_gpu:
            shown["device_name"] = device.name
        service = Service(model, limits, batcher, setup.metrics, shown, setup.admission, ready=False)
        started = partial(send_report, pipe, model=_summary(model), run=model.run)
        run_worker(setup.listeners[slot], service, started, parent)

    def _read_reports(self, workers: list[_Worker]) -> None:
        """Read the reports of workers: ready, or why not. An empty report means that the worker died."""
        for worker in workers:
            worker.reported = True
            report = read_report(worker.pipe)
            worker.ready = "model" in report
            if not worker.ready and self._model is None:  # else it was loaded before the fork
                self._handle_load_failure(worker, report)
            if self._pipe is not None and all(worker.ready for worker in self._workers):
                layout = {name: asdict(self._chosen_layout)[name] for name in ("processes", "lanes", "forward_ms")}
                send_report(self._pipe, **report, layout=layout)
                self._pipe = None

    def _handle_load_failure(self, worker: _Worker, report: Report) -> None:
        """End this worker pool if a worker cannot load the model on its GPU; if all were ready before, only log it."""
        device = self._chosen_layout.device(worker.slot)
        died = f"the process for {device} ({device.name}) died while it loaded the model"
        reason = report.get("fault") or worker.fault or died
        if self._pipe is None:
            if any(other.ready for other in self._workers):  # they get its connections until it answers again
                with contextlib.suppress(OSError):  # it listens no more
                    self._setup.listeners[worker.slot].shutdown(socket.SHUT_RD)
            log_event(f"{device} does not answer, and is tried again: {reason}")
        else:
            code = REFUSED_EXIT_CODE if worker.fault else DeviceError.exit_code
            self._abort({"fault": reason, "exit_code": report.get("exit_code", code)})

    def _abort(self, report: Report) -> None:
        """Kill the workers, report why, and exit."""
        self._stop_workers(signal.SIGKILL)
        assert self._pipe is not None, "it has not reported yet"
        send_report(self._pipe, **report)
        os._exit(1)

    def _reap(self) -> None:
        """Replace workers that have died."""
        for worker in list(self._workers):
            ended, status = os.waitpid(worker.process, os.WNOHANG)
            if not ended:
                continue
            if not worker.reported:  # it died before its report, or the report is still unread
                self._read_reports([worker])
            self._remove(worker)
            log_event("a worker died", process=worker.process, exit_code=os.waitstatus_to_exitcode(status))
            if not worker.ready or time.monotonic() - worker.since < RESTART_SECONDS:
                time.sleep(RESTART_SECONDS)
            self._fork(worker.slot)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        os.close(worker.pipe)
        self._setup.metrics.queue(0, self._row + worker.slot)

    def _stop_workers(self, number: signal.Signals) -> None:
        """Send the workers a signal, wait for them to finish, and kill those that do not."""
        for worker in self._workers:
            os.kill(worker.process, number)
        if number == signal.SIGTERM and self._model is not None:
            self._replace_dead_workers()
        for listener in self._setup.listeners:
            listener.close()
        wait_or_kill([worker.process for worker in self._workers], GRACE_SECONDS + 0.5)
        for worker in list(self._workers):
            self._remove(worker)

    def _replace_dead_workers(self) -> None:
        """Answer the connections that wait on a dead worker's socket: start another worker, and have it shut down."""
        time.sleep(OPENING_SECONDS)  # the others accept for this long; a killed worker has ended by then
        for worker in list(self._workers):
            ended, status = os.waitpid(worker.process, os.WNOHANG)
            if not ended:
                continue
            self._remove(worker)
            if status:
                log_event("a worker died", process=worker.process, exit_code=os.waitstatus_to_exitcode(status))
                self._fork(worker.slot)
                os.kill(self._workers[-1].process, signal.SIGTERM)


def collect_signals(received: set[int], *numbers: signal.Signals) -> int:
    """Add signals to `received` as they arrive, and return a pipe that becomes readable then."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, _: received.add(number))
    return reading


def wait_or_kill(processes: list[int], seconds: float) -> None:
    """Wait until child processes have ended, and kill those that do not in this time."""
    running, end = processes, time.monotonic() + seconds
    while running and time.monotonic() < end:
        running = [process for process in running if not os.waitpid(process, os.WNOHANG)[0]]
        time.sleep(0.02 if running else 0)
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def reset_signals() -> None:
    """Reset the signal handlers that a forked child inherits."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


# ---- reports of children


def read_report(pipe: int) -> Report:
    """Return the report of a child; empty if it died."""
    with os.fdopen(os.dup(pipe), "rb") as stream:
        return cast(Report, json.loads(stream.read() or "{}"))


def send_report(pipe: int, **report: object) -> None:
    """Write the report and close the pipe."""
    with os.fdopen(pipe, "wb") as stream:
        stream.write(json.dumps(report, default=str).encode())


def _summary(model: Model) -> str:
    """Return the task and the labels of a model, for the user."""
    kind = KINDS[model.task]
    names = f"{len(model.labels)} {kind.labelled}" if kind.has_choices else ", ".join(model.labels)
    return f"{model.task} ({names})" if names else model.task


def _load_failure(error: Exception, device: Device, memory: int) -> Report:
    """Return why a model cannot be loaded, and the exit code. Log the traceback of an unexpected error."""
    reason, code = str(error) or type(error).__name__, getattr(error, "exit_code", None)
    if isinstance(error, MemoryError) or "bad_alloc" in reason or is_out_of_memory(error):
        return {"fault": f"{reason.rstrip('.')}; {_memory_limit(memory)}.", "exit_code": code or REFUSED_EXIT_CODE}
    if code is None:
        log_event(f"the process for {device} cannot load the model", error)
    return {"fault": reason, "exit_code": code or 1}


# ---- limits for loading a model


def timeout_message(folder: Path, seconds: float) -> str:
    return (
        f"The model of {folder} was not loaded and verified within {seconds:g} s, the limit. It may run forever; "
        "get a new copy of it, or export it again."
    )


def death_message(folder: Path, memory: int) -> str:
    return f"The process that loaded the model of {folder} died without a message; {_memory_limit(memory)}."


def _memory_limit(memory: int) -> str:
    return f"loading may take {memory / 1e9:.3g} GB of memory, {LOAD_MEMORY_SHARE:.2g} of what is free"


def spare_memory() -> int:
    """Return the memory that a model may take, in bytes: `LOAD_MEMORY_SHARE` of what is free here."""
    free = free_memory()
    return int(LOAD_MEMORY_SHARE * (sys.maxsize if free is None else free))


@contextlib.contextmanager
def _resource_limits(memory: int) -> Iterator[None]:
    """Limit the further memory of this process, in bytes, and the CPU time of its threads. The kernel enforces both,
    even if the parent has been killed; otherwise, the parent's time limit is reached first."""
    limits = {resource.RLIMIT_CPU: int(LOAD_SECONDS * usable_cores()) + 2}
    with contextlib.suppress(OSError, StopIteration):  # not Linux
        used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
        limits[resource.RLIMIT_DATA] = min(int(used.split()[1]) * 1024 + memory, sys.maxsize)
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, (soft, hard) in before.items():
        finite = [limit for limit in (limits[kind], soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(finite), hard))
    try:
        yield
    finally:
        for kind, both in before.items():
            resource.setrlimit(kind, both)
