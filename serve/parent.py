"""The process that the user started: it keeps the listening sockets and the model, forks workers, replaces those that
die, and forks new ones for a changed bundle while the old ones finish what they have.

Workers share the model's memory, since they are forked when it is loaded. Each has a listening socket of its own, over
which the system spreads the connections; the parent keeps them all, so a connection that waits there is answered by
whoever comes next. CUDA does not survive a fork: on GPUs each worker loads the model itself, and reports to the parent
whether it could.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serve.device import CPU, Choice, Device, DeviceError
from serve.hosts import Hosts
from serve.lanes import Lanes, Model
from serve.layout import Layout, choose, largest_batch, on_gpus, usable_cores
from serve.limits import Limits
from serve.log import tell
from serve.metrics import MAX_PROCESSES, Metrics
from serve.service import Service
from serve.worker import GRACE_SECONDS, work

CHECK_SECONDS = 1.0
"""How often the bundle's files are looked at, and whether a worker has died."""

LOAD_SECONDS = 300.0
"""How long a changed model may take to load and to answer its samples before it is given up."""

LOAD_SHARE = 0.9
"""The part of the memory that is free which it may take meanwhile."""

SHORT_LIFE = 1.0
"""A worker that ends sooner is replaced only after as many seconds."""

OpenModel = Callable[[Device], Model]
"""Loads and checks the model on a device."""

ON_CPU = "serving on the CPU"
"""The event that says that `serve.device: auto` has found no usable GPU."""

CPU_ALONE = Choice((CPU,))


class WorkerError(Exception):
    """No worker can load the model; the message is that of the worker."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(eq=False)
class _Child:
    """One worker: its process, its row of the metrics, the pipe on which it reports that it answers or why it cannot,
    and since when."""

    process: int
    slot: int
    row: int
    pipe: int
    since: float
    heard: bool = False
    ready: bool = False
    leaving: bool = False


@dataclass(frozen=True)
class _Trial:
    """A process that tries a changed model: the pipe on which it reports, what was seen of the files, its deadline."""

    process: int
    pipe: int
    seen: Any
    end: float


class Parent:
    """Runs the server until SIGTERM or Ctrl-C.

    Args:
        open_model: loads and checks the model on a device; called again when its files have changed.
        listen: gives so many listening sockets of one address.
        limits: what a request may cost.
        key: what clients must send; None: nothing.
        hosts: the names of the server that are answered.
        watch: gives a value that changes when the model's files do; None while they are being replaced.
        ready: called once when requests are answered, with a word about the model.
        choice: the devices that answer.
    """

    def __init__(
        self,
        open_model: OpenModel,
        listen: Callable[[int], list[socket.socket]],
        limits: Limits,
        key: str | None,
        hosts: Hosts,
        watch: Callable[[], Any],
        ready: Callable[[str, Layout], None],
        choice: Choice = CPU_ALONE,
    ):
        self._open = open_model
        self._limits = limits
        self._key = key
        self._hosts = hosts
        self._watch = watch
        self._announce: Callable[[str, Layout], None] | None = ready
        self._seen = watch()
        self._listen = listen
        self._may_fall_back = choice.may_fall_back
        self._model: Model | None = None
        if choice.devices[0].on_gpu:
            self._layout = on_gpus(choice.devices)
        else:
            self._model = open_model(CPU)
            self._layout = choose(self._model)
        self._listeners = listen(self._layout.processes)
        self._metrics = Metrics()
        self._children: list[_Child] = []
        self._trial: _Trial | None = None
        self._asked: set[int] = set()
        self._failure: Exception | None = None

    def run(self) -> int:
        """Returns the exit code.

        Raises:
            WorkerError: no worker can load the model on its GPU.
        """
        wake, self._wakened = os.pipe()
        os.set_blocking(self._wakened, False)
        signal.set_wakeup_fd(self._wakened, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, _: self._asked.add(number))
        for slot in range(len(self._listeners)):
            self._fork(slot)
        while not self._asked & {signal.SIGTERM, signal.SIGINT}:
            pipes = [child.pipe for child in self._children if not child.heard]
            if self._trial is not None:
                pipes.append(self._trial.pipe)
            readable, _, _ = select.select([wake, *pipes], [], [], CHECK_SECONDS)
            if wake in readable:
                os.read(wake, 4096)
            self._hear([child for child in self._children if child.pipe in readable])
            if self._failure is not None:
                self._end()
                raise self._failure
            self._reap()
            self._end_trial(readable)
            self._reload_if_asked()
        return self._end()

    def _fork(self, slot: int) -> None:
        taken = {child.row for child in self._children}
        row = next(row for row in range(MAX_PROCESSES) if row not in taken)
        heard, said = os.pipe()
        sys.stdout.flush()
        process = os.fork()
        if process:
            os.close(said)
            self._children.append(_Child(process, slot, row, heard, time.monotonic()))
            return
        try:
            self._become_worker(slot, row, said)
        finally:  # whatever happened, the parent's work is not the child's
            os._exit(1)

    def _become_worker(self, slot: int, row: int, said: int) -> None:
        _forget_signals()
        for other, listener in enumerate(self._listeners):
            if other != slot:
                listener.close()
        self._metrics.row = row
        device, limits, threads = self._layout.device(slot), self._limits, None
        model = self._model
        if model is None:
            try:
                model = self._open(device)
                limits = replace(limits, max_batch=largest_batch(model, limits.max_batch))
                threads = usable_cores() // self._layout.processes + self._layout.lanes
            except Exception as error:
                if not hasattr(error, "exit_code"):
                    tell(f"the process for {device} cannot load the model", error)
                _say(said, fault=str(error), exit_code=getattr(error, "exit_code", 1))
                os._exit(1)
        lanes = Lanes(model, limits, self._layout.lanes, self._layout.forward_ms / 1e3, threads)
        layout = {"processes": self._layout.processes, "lanes": self._layout.lanes, "device": str(device)}
        if device.on_gpu:
            layout["device_name"] = device.name
        service = Service(model, limits, lanes, self._metrics, layout, self._key is not None, ready=False)
        started = lambda: _say(said, model=_words(model), run=model.run)  # noqa: E731
        work(self._listeners[slot], service, self._key, self._hosts, started)

    def _hear(self, children: list[_Child]) -> None:
        """What workers report: that they answer, or why they cannot; a pipe that ends without a word is a death."""
        for child in children:
            child.heard = True
            report = _report(child.pipe)
            if "model" not in report:
                self._cannot(child, report)
                continue
            child.ready = True
            for other in self._children:
                if other.slot == child.slot and other.since < child.since and not other.leaving:
                    other.leaving = True
                    os.kill(other.process, signal.SIGTERM)
                    if self._model is None and other.ready:
                        tell("the model is loaded anew", run=report["run"], device=str(self._layout.device(child.slot)))
            started = self._model is not None or all(child.ready for child in self._children)
            if self._announce and started:
                self._announce(report["model"], self._layout)
                self._announce = None

    def _cannot(self, child: _Child, report: dict[str, Any]) -> None:
        """A worker cannot load the model. At the start that is the server's end, unless the CPU may answer; later the
        model of before stays."""
        if self._model is not None:  # it was loaded before the fork
            return
        device = self._layout.device(child.slot)
        reason = report.get("fault") or f"the process for {device} ({device.name}) died while it loaded the model"
        if self._announce is None:
            child.leaving = any(other.slot == child.slot and other.ready for other in self._children)
            end = "the model stays as it was" if child.leaving else f"{device} does not answer, and is tried again"
            tell(f"{end}: {reason}")
        elif self._may_fall_back:
            self._fall_back(reason)
        else:
            self._failure = WorkerError(reason, report.get("exit_code", DeviceError.exit_code))

    def _fall_back(self, reason: str) -> None:
        """The CPU answers instead of GPUs."""
        tell(ON_CPU, reason=reason)
        for child in self._children:
            child.leaving = child.heard = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.process, signal.SIGTERM)
        self._model = self._open(CPU)
        self._layout = choose(self._model)
        for listener in self._listeners[1:]:
            listener.close()
        self._listeners = self._listen(self._layout.processes)
        for slot in range(len(self._listeners)):
            self._fork(slot)

    def _reap(self) -> None:
        """Replaces workers that have died."""
        for child in list(self._children):
            ended, status = os.waitpid(child.process, os.WNOHANG)
            if not ended:
                continue
            self._forget(child)
            if child.leaving:
                continue
            tell("a worker died", process=child.process, exit_code=os.waitstatus_to_exitcode(status))
            if any(other.slot == child.slot and not other.leaving for other in self._children):
                continue
            if not child.ready or time.monotonic() - child.since < SHORT_LIFE:
                time.sleep(SHORT_LIFE)
            self._fork(child.slot)

    def _forget(self, child: _Child) -> None:
        self._children.remove(child)
        os.close(child.pipe)
        self._metrics.queue(0, child.row)

    def _reload_if_asked(self) -> None:
        """Has a changed model tried by a process of its own, or loaded by the workers of GPUs."""
        seen = self._watch()
        if seen is None or (seen == self._seen and signal.SIGHUP not in self._asked):
            return
        self._asked.discard(signal.SIGHUP)
        self._seen = seen
        if self._model is None:
            for slot in range(len(self._listeners)):
                self._fork(slot)
            return
        self._give_up_trial()
        heard, said = os.pipe()
        sys.stdout.flush()
        process = os.fork()
        if process:
            os.close(said)
            self._trial = _Trial(process, heard, seen, time.monotonic() + LOAD_SECONDS)
            return
        try:
            self._try_model(said)
        finally:
            os._exit(1)

    def _try_model(self, said: int) -> None:
        """In a process of its own: loads the model within bounds of time and memory, and reports."""
        _forget_signals()
        for listener in self._listeners:
            listener.close()
        _bound_resources()
        try:
            self._open(CPU)
        except Exception as error:
            _say(said, fault=str(error) or type(error).__name__)
            os._exit(1)
        _say(said, good=True)
        os._exit(0)

    def _end_trial(self, readable: list[int]) -> None:
        """Loads a model that has been tried beside the old one; its workers take over when they answer. A model that
        cannot be loaded changes nothing."""
        trial = self._trial
        if trial is None:
            return
        if trial.pipe not in readable:
            if time.monotonic() > trial.end:
                self._give_up_trial()
                tell(f"the model stays as it was: the new one was not loaded and proved within {LOAD_SECONDS:g} s")
            return
        report = _report(trial.pipe)
        self._give_up_trial()
        if "good" not in report:
            reason = report.get("fault") or "the process that loaded the new one died, perhaps for want of memory"
            tell(f"the model stays as it was: {reason}")
        elif self._watch() != trial.seen:  # what was tried is not there any more; what is, is tried next
            self._seen = None
        else:
            try:
                self._model = model = self._open(CPU)
            except Exception as error:
                tell(f"the model stays as it was: {error}")
                return
            for slot in range(len(self._listeners)):
                self._fork(slot)
            tell("the model is loaded anew", run=model.run)

    def _give_up_trial(self) -> None:
        """Ends the process that tries a model, if there is one."""
        trial, self._trial = self._trial, None
        if trial is not None:
            os.close(trial.pipe)
            os.kill(trial.process, signal.SIGKILL)
            os.waitpid(trial.process, 0)

    def _end(self) -> int:
        """Lets the workers finish; kills those that do not. None is left, and the port is closed."""
        self._give_up_trial()
        for listener in self._listeners:
            listener.close()
        for child in self._children:
            os.kill(child.process, signal.SIGTERM)
        end = time.monotonic() + GRACE_SECONDS + 1
        while self._children and time.monotonic() < end:
            for child in list(self._children):
                if os.waitpid(child.process, os.WNOHANG)[0]:
                    self._forget(child)
            time.sleep(0.02)
        for child in list(self._children):
            os.kill(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
        return 0


def _forget_signals() -> None:
    """In a child: the parent's handlers are not its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _bound_resources() -> None:
    """Ends this process when it computes for too long, also where its parent has been killed; and has it fail where it
    asks for more memory than is free."""
    seconds = int(LOAD_SECONDS * usable_cores()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with contextlib.suppress(OSError, ValueError, StopIteration):  # other systems
        used, free = (
            int(next(line for line in Path(file).read_text().splitlines() if line.startswith(name)).split()[1]) * 1024
            for file, name in (("/proc/self/status", "VmData:"), ("/proc/meminfo", "MemAvailable:"))
        )
        with contextlib.suppress(OSError, ValueError):  # a container's own limit (cgroup 2)
            limit, taken = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
            free = min(free, limit - taken)
        most = used + int(LOAD_SHARE * max(free, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _words(model: Model) -> str:
    """What a model does."""
    return f"{model.task} ({len(model.labels)} classes)" if model.labels else model.task


def _report(pipe: int) -> dict[str, Any]:
    """All that a worker writes before it closes its end; nothing where it has died."""
    with os.fdopen(os.dup(pipe), "rb") as stream:
        return json.loads(stream.read() or "{}")


def _say(pipe: int, **report: Any) -> None:
    with os.fdopen(pipe, "wb") as stream:
        stream.write(json.dumps(report, default=str).encode())
