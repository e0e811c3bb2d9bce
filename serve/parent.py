"""The process that the user started: it keeps the listening sockets and the model, forks workers, replaces those that
die, and forks new ones for a changed bundle while the old ones finish what they have.

Workers share the model's memory, since they are forked when it is loaded. Each has a listening socket of its own, over
which the system spreads the connections; the parent keeps them all, so a connection that waits there is answered by
whoever comes next.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve.lanes import Lanes, Model
from serve.layout import Layout, choose
from serve.limits import Limits
from serve.log import tell
from serve.metrics import MAX_PROCESSES, Metrics
from serve.service import Service
from serve.worker import GRACE_SECONDS, work

CHECK_SECONDS = 1.0
"""How often the bundle's files are looked at, and whether a worker has died."""

SHORT_LIFE = 1.0
"""A worker that ends sooner is replaced only after as many seconds."""


@dataclass(eq=False)
class _Child:
    """One worker: its process, its row of the metrics, the pipe on which it says that it answers, and since when."""

    process: int
    slot: int
    row: int
    pipe: int
    since: float
    ready: bool = False
    leaving: bool = False


class Parent:
    """Runs the server until SIGTERM or Ctrl-C.

    Args:
        open_model: loads and checks the model; called again when its files have changed.
        listen: gives so many listening sockets of one address.
        limits: what a request may cost.
        key: what clients must send; None: nothing.
        watch: gives a value that changes when the model's files do; None while they are being replaced.
        ready: called once when the first worker answers.
    """

    def __init__(
        self,
        open_model: Callable[[], Model],
        listen: Callable[[int], list[socket.socket]],
        limits: Limits,
        key: str | None,
        watch: Callable[[], Any],
        ready: Callable[[Model, Layout], None],
    ):
        self._open = open_model
        self._limits = limits
        self._key = key
        self._watch = watch
        self._announce: Callable[[Model, Layout], None] | None = ready
        self._seen = watch()
        self._model = open_model()
        self._layout = choose(self._model)
        self._listeners = listen(self._layout.processes)
        self._metrics = Metrics()
        self._children: list[_Child] = []
        self._asked: set[int] = set()

    def run(self) -> int:
        """Returns the exit code."""
        wake, self._wakened = os.pipe()
        os.set_blocking(self._wakened, False)
        signal.set_wakeup_fd(self._wakened, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda number, _: self._asked.add(number))
        for slot in range(len(self._listeners)):
            self._fork(slot)
        while not self._asked & {signal.SIGTERM, signal.SIGINT}:
            pipes = [child.pipe for child in self._children if not child.ready]
            readable, _, _ = select.select([wake, *pipes], [], [], CHECK_SECONDS)
            if wake in readable:
                os.read(wake, 4096)
            self._hear([child for child in self._children if child.pipe in readable])
            self._reap()
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
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for other, listener in enumerate(self._listeners):
            if other != slot:
                listener.close()
        self._metrics.row = row
        lanes = Lanes(self._model, self._limits, self._layout.lanes, self._layout.forward_ms / 1e3)
        layout = {"processes": self._layout.processes, "lanes": self._layout.lanes}
        secured = self._key is not None
        service = Service(self._model, self._limits, lanes, self._metrics, layout, secured, ready=False)
        work(self._listeners[slot], service, self._key, lambda: _say(said))

    def _hear(self, children: list[_Child]) -> None:
        """What workers say: that they answer; the pipe's end without it is their own."""
        for child in children:
            child.ready = True
            if not os.read(child.pipe, 1):
                continue
            for other in self._children:
                if other.slot == child.slot and other.since < child.since and not other.leaving:
                    other.leaving = True
                    os.kill(other.process, signal.SIGTERM)
            if self._announce:
                self._announce(self._model, self._layout)
                self._announce = None

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
            if time.monotonic() - child.since < SHORT_LIFE:
                time.sleep(SHORT_LIFE)
            self._fork(child.slot)

    def _forget(self, child: _Child) -> None:
        self._children.remove(child)
        os.close(child.pipe)
        self._metrics.queue(0, child.row)

    def _reload_if_asked(self) -> None:
        """Loads the model anew beside the old one; its workers take over when they answer. A model that cannot be
        loaded changes nothing."""
        seen = self._watch()
        if seen is None or (seen == self._seen and signal.SIGHUP not in self._asked):
            return
        self._asked.discard(signal.SIGHUP)
        self._seen = seen
        try:
            self._model = self._open()
        except Exception as error:
            tell(f"the model stays as it was: {error}")
            return
        for slot in range(len(self._listeners)):
            self._fork(slot)
        tell("the model is loaded anew", run=self._model.run)

    def _end(self) -> int:
        """Lets the workers finish; kills those that do not. None is left, and the port is closed."""
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


def _say(pipe: int) -> None:
    os.write(pipe, b"1")
    os.close(pipe)
