"""Run work, such as the runs of a grid or a search, in processes forked from one that has imported everything.

Each child leads its own process group, so that Ctrl-C reaches only the parent, which forwards it once. A child is
killed when the parent ends for any reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from deeplightning.launch.job import TrialJobs
from deeplightning.private.python import forget_exit_functions, run_exit_functions
from deeplightning.process.die_with_parent import end_with
from deeplightning.process.rendezvous import interface

POLL_SECONDS = 0.05  # between two checks for ended runs
MAX_MESSAGE_BYTES = 1_000_000
SIGNALS = (signal.SIGINT, signal.SIGTERM)

Train = Callable[[Sequence[str]], int]
"""A function that calls `deeplightning train` with these arguments in this process and returns its exit code."""


def fork(work: Callable[[], object]) -> int:
    """Call a function in a forked process, with an empty stdin; return the process's id.

    Args:
        work: returns the exit code of the process; anything but an integer means 1.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # Signals wait until the child has its own handlers; otherwise it would run the parent's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # libraries' threads are idle and hold no locks
            child = os.fork()
        if child == 0:
            _run_child(work, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _run_child(work: Callable[[], object], parent: int) -> None:
    """Set up the forked process, call the function and exit."""
    code: object = 1
    try:
        forget_exit_functions()  # they belong to the parent
        os.setpgid(0, 0)
        end_with(parent)
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = work()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            run_exit_functions()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code if isinstance(code, int) else 1)


class TrialServer:
    """Receives JSON messages from the runs on a port of this machine and answers them.

    Args:
        is_remote: whether the runs are on other machines, which must reach the port.
    """

    def __init__(self, is_remote: bool):
        self.token = secrets.token_hex(16)
        route = interface("192.0.2.1") if is_remote else None  # an address reserved for documentation, RFC 5737
        self._listener = socket.create_server((route[1] if route is not None else "127.0.0.1", 0))
        self._listener.settimeout(POLL_SECONDS)
        self.host, self.port = self._listener.getsockname()[:2]

    def address_for(self, number: int, metric: str) -> str:
        """Return the address of this server for a run, as JSON for a variable of its environment."""
        address = {"host": self.host, "port": self.port, "token": self.token, "trial": number, "metric": metric}
        return json.dumps(address)

    def listen(self, answer: Callable[[dict[str, object]], dict[str, object]]) -> None:
        """Answer one message, if one arrives within `POLL_SECONDS`."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        with connection, contextlib.suppress(OSError, ValueError):  # a run that was killed, or another program
            connection.settimeout(5)
            with connection.makefile("rb") as lines:
                message = json.loads(lines.readline(MAX_MESSAGE_BYTES))
                if isinstance(message, dict) and message.pop("token", None) == self.token:
                    connection.sendall(json.dumps(answer(message)).encode() + b"\n")

    def close(self) -> None:
        self._listener.close()


def failure_in(log: Path, code: int) -> str:
    """Return why a run failed: the last error that it printed, else a description of its exit code."""
    notes = re.findall(r"^(?:\x1b\[\d+m)?error(?:\x1b\[0m)?[^:]*: (.*)$", log.read_text(errors="replace"), re.MULTILINE)
    ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return (notes or [ended])[-1]


class Forked:
    """Starts runs as processes forked from this one.

    Attributes:
        array: the jobs that a launcher reserves for the runs; None if they run here, or start their own jobs.
        signal: the last signal that this process forwarded; None if there was none.
    """

    def __init__(self, train: Train, server: TrialServer):
        self.train, self.server = train, server
        self.array: TrialJobs | None = None
        self.signal: int | None = None
        self._running: dict[int, int] = {}  # run → process

    def __len__(self) -> int:
        return len(self._running)

    def start(self, number: int, arguments: Sequence[str], log: Path, environment: Mapping[str, str | None]) -> None:
        """Start a run.

        Args:
            arguments: of `deeplightning train`.
            log: the file to which its stdout and stderr are appended.
            environment: variables to set; None removes a variable.
        """
        if self.array is not None:
            environment = {**environment, **self.array.variables(environment)}

        def work() -> int:
            self.server.close()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            for name in environment:
                os.environ.pop(name, None)
            os.environ.update({name: value for name, value in environment.items() if value is not None})
            return self.train(arguments)

        log.touch(0o644)  # a signal may end the run before it opens the file
        self._running[number] = fork(work)
        if self.signal is not None:  # it arrived before this process was known
            os.kill(self._running[number], self.signal)

    def ended(self) -> dict[int, int]:
        """Return the exit codes of runs that have ended since the last call; a negative one is the signal that killed
        the run."""
        codes = {}
        for number, child in list(self._running.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[number] = os.waitstatus_to_exitcode(status)
                del self._running[number]
        return codes

    @contextlib.contextmanager
    def forward_signals(self) -> Iterator[None]:
        """Forward SIGINT and SIGTERM to the runs as SIGINT. At the first they save a checkpoint and end; at the second
        they end at once."""

        def forward(number: int, frame: FrameType | None) -> None:
            self.signal = number
            self.interrupt()

        before = {number: signal.signal(number, forward) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.array is not None:
                self.array.close()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send a signal to all runs."""
        for child in self._running.values():
            os.kill(child, number)
