"""Run `deeplightning train` in processes forked from one that has imported everything: a grid, a search, a bisection.

A child leads a process group of its own, so that Ctrl-C reaches the parent alone, which passes it on once; and it is
killed when the parent ends, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from deeplightning.launch.job import TrialJobs
from deeplightning.private.python import forget_exit_functions, run_exit_functions

LOOK = 0.05  # seconds between two looks at whether a trial has ended
MESSAGE = 1_000_000  # bytes at most
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Train = Callable[[Sequence[str]], int]
"""Gives `deeplightning train` these arguments in this process; its exit code."""


class Line:
    """The search's end of what trials say: a port of this machine, and answers in JSON.

    Args:
        host: the address to listen on; trials on other machines need one that they can reach.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self.token = secrets.token_hex(16)
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(LOOK)
        self.host, self.port = self._listener.getsockname()[:2]

    def address_for(self, number: int, metric: str) -> str:
        """JSON by which a trial reaches the search, for a variable of its environment."""
        words = {"host": self.host, "port": self.port, "token": self.token, "trial": number, "metric": metric}
        return json.dumps(words)

    def listen(self, answer: Callable[[dict[str, object]], dict[str, object]]) -> None:
        """Answers one message, if one comes in a moment."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return
        with connection:
            try:
                connection.settimeout(5)
                with connection.makefile("rb") as lines:
                    message = json.loads(lines.readline(MESSAGE))
                    if isinstance(message, dict) and message.pop("token", None) == self.token:
                        reply = answer(message)
                        connection.sendall(json.dumps(reply).encode() + b"\n")
            except (OSError, ValueError):  # a trial that was killed meanwhile, or somebody else
                pass

    def close(self) -> None:
        self._listener.close()


def reason_of(log: Path, code: int) -> str:
    """Return why a run failed: the last error that it printed, else what its exit code means."""
    notes = re.findall(r"^(?:\x1b\[\d+m)?error(?:\x1b\[0m)?[^:]*: (.*)$", log.read_text(errors="replace"), re.MULTILINE)
    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return (notes or [killed])[-1]


def own_address() -> str:
    """The address of this machine that others reach it by, as far as its routes tell; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
            towards.connect(("192.0.2.1", 9))  # kept for documentation, RFC 5737
            return towards.getsockname()[0]
    except OSError:
        return "127.0.0.1"


class Forked:
    """Trials as processes forked from this one.

    Attributes:
        array: the jobs that a launcher keeps for the trials; None: they run here, or start what they need.
        signal: the last that this process got while it passed them on; None: none.
    """

    def __init__(self, train: Train, line: Line):
        self.train, self.line = train, line
        self.array: TrialJobs | None = None
        self.signal: int | None = None
        self._running: dict[int, int] = {}  # trial → process

    def __len__(self) -> int:
        return len(self._running)

    def start(self, number: int, arguments: Sequence[str], log: Path, environment: Mapping[str, str | None]) -> None:
        """Starts a trial.

        Args:
            arguments: of `deeplightning train`.
            log: takes what it writes on stdout and stderr, behind what is there.
            environment: variables to set; None: to remove.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        if self.array is not None:
            environment = {**environment, **self.array.variables(environment)}
        driver = os.getpid()
        # A signal that comes meanwhile waits: the child would take it for the search's.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads wait, and hold nothing
                child = os.fork()
            if child == 0:
                self.line.close()
                _be_trial(self.train, arguments, log, environment, driver)
            self._running[number] = child
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ended(self) -> dict[int, int]:
        """Trials that have ended since the last call, with their exit codes; negative: the signal that killed it."""
        codes = {}
        for number, child in list(self._running.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[number] = os.waitstatus_to_exitcode(status)
                del self._running[number]
        return codes

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """SIGINT and SIGTERM reach the trials as SIGINT: after one they save a checkpoint and end, after a second they
        end at once."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.signal = number
            self.interrupt()

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self.array is not None:
                self.array.close()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        for child in self._running.values():
            os.kill(child, number)


def _be_trial(
    train: Train, arguments: Sequence[str], log: Path, environment: Mapping[str, str | None], driver: int
) -> None:
    """The whole life of a forked process."""
    code: object = 1
    try:
        forget_exit_functions()  # what is registered is the search's to do
        os.setpgid(0, 0)
        end_with(driver)
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(written, 1)
        os.dup2(written, 2)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        code = train(arguments)
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


def end_with(driver: int) -> None:
    """This process is killed when the process that forked it ends."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (AttributeError, OSError):  # not Linux
        threading.Thread(target=_watch, args=(driver,), name="search", daemon=True).start()
    if os.getppid() != driver:
        os._exit(1)


def _watch(driver: int) -> None:
    while os.getppid() == driver:
        time.sleep(0.25)
    os._exit(1)
