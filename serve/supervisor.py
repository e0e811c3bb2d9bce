"""The process that the user starts: it owns the listening sockets and supervises worker pools. It never loads a model.

A worker pool (`serve.pool`) loads and verifies the model and forks the workers. If the bundle changes, the supervisor
starts a new pool; once its workers are ready, the old pool finishes its requests and ends. Each worker has its own
listening socket, and the kernel distributes connections over them. The supervisor keeps every socket open, so the next
worker answers the connections that wait on a dead worker's socket.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from serve import pool
from serve.device import Choice
from serve.log import log_event
from serve.pool import CHECK_SECONDS, REFUSED_EXIT_CODE, RESTART_SECONDS, Report, Setup, WorkerPool
from serve.worker import GRACE_SECONDS
from serve.worker_count import MAX_WORKERS, Layout, gpu_layout

RETRY_SECONDS = 5.0
"""Time after which loading is retried if no model answers."""

ON_CPU = "serving on the CPU"
"""Event that is logged if `serve.device: auto` finds no usable GPU."""

_SO_ATTACH_FILTER = 26
"""From Linux's `asm/socket.h`; Python has no name for it."""


class ModelError(Exception):
    """Raised if the model cannot be served; the message is that of the process that tried to load it."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, eq=False)
class _Child:
    """A worker pool: its process id, the pipe for its report, its first row of the metrics, its start time
    (`time.monotonic`), and the time and memory limits for loading."""

    process: int
    pipe: int
    row: int
    since: float
    seconds: float
    memory: int


class Supervisor:
    """Runs the server until SIGTERM or Ctrl-C.

    Args:
        setup: settings that all worker pools share; the first of its sockets listens.
        watch: returns a value that changes when the model's files do; None while they are being replaced.
        ready: called once, when the server is ready, with a description of the model.
        choice: devices that answer.
    """

    def __init__(self, setup: Setup, watch: Callable[[], object], ready: Callable[[str, Layout], None], choice: Choice):
        self._setup, self._watch = setup, watch
        self._announce: Callable[[str, Layout], None] | None = ready
        self._may_fall_back = choice.may_fall_back
        self._layout = gpu_layout(choice.devices) if choice.devices[0].on_gpu else None
        self._current: _Child | None = None
        self._next: _Child | None = None
        self._outgoing: _Child | None = None
        self._row = MAX_WORKERS
        self._seen: object = None
        self._retry = 0.0
        self._signals: set[int] = set()

    def run(self) -> int:
        """Run until a stop signal, and return the exit code.

        Raises:
            ModelError: the model cannot be loaded, or exceeds the limits.
        """
        wake = pool.collect_signals(self._signals, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        gc.freeze()  # otherwise the collector writes to pages that the processes share
        try:
            while not self._signals & {signal.SIGTERM, signal.SIGINT}:
                self._load_if_needed()
                pipes = [] if self._next is None else [self._next.pipe]
                readable, _, _ = select.select([wake, *pipes], [], [], CHECK_SECONDS)
                if wake in readable:
                    os.read(wake, 4096)
                self._read_report(readable)
                self._reap()
        finally:
            for listener in self._setup.listeners:
                _drop_new_connections(listener)
                listener.close()
            self._stop_next()
            self._stop(self._current, self._outgoing)  # wait until all workers have finished
        return 0

    def _load_if_needed(self) -> None:
        """Start a worker pool if needed: at the start, after the last one died, and when the model's files have
        changed; but not before a replaced pool has ended."""
        if self._outgoing is not None:
            return
        seen = self._watch()
        if self._current is None:
            if self._next is None and time.monotonic() >= self._retry:
                self._load(seen)
        elif seen is not None and (seen != self._seen or signal.SIGHUP in self._signals):
            self._signals.discard(signal.SIGHUP)
            self._stop_next()
            self._load(seen)

    def _load(self, seen: object) -> None:
        self._seen = seen
        # On GPUs, the worker pool enforces the limit for each worker itself.
        seconds = pool.LOAD_SECONDS + 10 * (self._layout is not None and self._layout.devices[0].on_gpu)
        row, memory = MAX_WORKERS - self._row, pool.spare_memory()
        reading, writing = os.pipe()
        sys.stdout.flush()
        process = os.fork()
        if process:
            os.close(writing)
            self._next = _Child(process, reading, row, time.monotonic(), seconds, memory)
            return
        try:
            os.close(reading)
            WorkerPool(self._setup, self._layout, row, memory, writing).run()
        finally:  # in any case, the child must not run the parent's code
            os._exit(1)

    def _read_report(self, readable: list[int]) -> None:
        """Handle the report of the worker pool that loads a model, or its time limit."""
        child = self._next
        if child is None:
            return
        if child.pipe in readable:
            report = pool.read_report(child.pipe)
            if "model" in report:
                self._take_over(child, report)
                return
            died = pool.death_message(self._setup.folder, child.memory)
            self._stop_next()
            self._handle_load_failure(report.get("fault") or died, report.get("exit_code", REFUSED_EXIT_CODE))
        elif time.monotonic() > child.since + child.seconds:
            self._stop_next()
            self._handle_load_failure(pool.timeout_message(self._setup.folder, child.seconds), REFUSED_EXIT_CODE)

    def _take_over(self, child: _Child, report: Report) -> None:
        """Switch to the new model's workers; the old ones finish their requests."""
        os.close(child.pipe)
        self._outgoing, self._current, self._next, self._row = self._current, child, None, child.row
        if self._outgoing is not None:
            os.kill(self._outgoing.process, signal.SIGTERM)
        if self._layout is None:  # first model on the CPU; sockets that do not listen yet are not needed
            self._layout = Layout(**report["layout"])
            for listener in self._setup.listeners[self._layout.processes :]:
                listener.close()
        if self._announce is not None:
            self._announce(report["model"], self._layout)
            self._announce = None
        else:
            log_event("the model is reloaded", run=report["run"])

    def _handle_load_failure(self, reason: str, exit_code: int) -> None:
        """Handle a model that cannot be served: at the start, fall back to the CPU or raise; later, keep the previous
        model, or retry."""
        if self._current is not None:
            log_event(f"the previous model is kept: {reason}")
        elif self._announce is None:
            log_event(f"no model answers; loading is retried in {RETRY_SECONDS:g} s: {reason}")
            self._retry = time.monotonic() + RETRY_SECONDS
        elif self._may_fall_back:
            log_event(ON_CPU, reason=reason)
            self._may_fall_back, self._layout = False, None
        else:
            raise ModelError(reason, exit_code)

    def _reap(self) -> None:
        """Reap a worker pool that was replaced or has died; one that has died is replaced later."""
        if self._outgoing is not None and os.waitpid(self._outgoing.process, os.WNOHANG)[0]:
            self._outgoing = None
        if self._current is not None:
            ended, status = os.waitpid(self._current.process, os.WNOHANG)
            if ended:  # its workers notice that and finish their requests
                log_event(
                    "the worker pool of the model died", process=ended, exit_code=os.waitstatus_to_exitcode(status)
                )
                self._retry = self._current.since + RESTART_SECONDS
                self._current = None

    def _stop_next(self) -> None:
        """Stop the worker pool that loads a model, if any; it has no requests."""
        child, self._next = self._next, None
        if child is not None:
            os.close(child.pipe)
            self._stop(child)

    def _stop(self, *children: _Child | None) -> None:
        """Stop worker pools, and kill those that do not end in time."""
        processes = [child.process for child in children if child is not None]
        for process in processes:
            os.kill(process, signal.SIGTERM)
        pool.wait_or_kill(processes, GRACE_SECONDS + 1)


def _drop_new_connections(listener: socket.socket) -> None:
    """Make the kernel drop packets that open new connections on a socket, in every process that has it. A connection
    that opens between a worker's last `accept` and the close of the socket would be reset; this way its client retries
    after a second, as TCP does, and is refused. Linux only."""
    if sys.platform != "linux":
        return
    # The classic BPF of socket(7): load byte 13 of the TCP header, the flags; drop the packet if it has SYN, else pass.
    instructions = [(0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    with contextlib.suppress(OSError):  # a sandbox forbids it, or the socket was not needed and is closed
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(instructions), ctypes.addressof(code))
        )
