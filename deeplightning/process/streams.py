"""Set-up of a command: open standard streams, a stdout without a reader, and SIGTERM.

Importing this module changes nothing; the command calls `prepare`. It imports little, because every verb pays for it.
"""

import errno
import io
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

PIPE_CODE = 141
"""The exit code of a verb whose stdout was closed by its reader, as for a program that SIGPIPE ended."""
INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""The exit codes of a command that a signal ended."""
TERMINATED_CODE = INTERRUPTED[signal.SIGTERM]

heard: int | None = None
"""The signal that asked this process to end before a run handled signals."""

_deferrals = 0
_MOST_DEFERRALS = 100
_DROPS_ERRORS = "_get_module_lock.<locals>.cb"
_outlives = False


class Interrupted(BaseException):
    """Raised when a signal asks the run to end; `at_once`, after a second one, nothing more is saved. A BaseException
    like KeyboardInterrupt, so that `except Exception` cannot swallow it."""

    def __init__(self, signal_name: str, exit_code: int, at_once: bool = False):
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code = exit_code
        self.at_once = at_once


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM outside a run. A BaseException, so `except Exception` cannot swallow it."""

    exit_code = TERMINATED_CODE

    def __init__(self) -> None:
        super().__init__("interrupted by SIGTERM")


def prepare() -> None:
    """Open closed standard streams as /dev/null, guard stdout and stderr, and handle SIGTERM. Idempotent."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next opened file would get this descriptor and be printed into
            _to_null(descriptor)
    if sys.stdin is None:
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        _guard(name, descriptor)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def outlive_reader() -> None:
    """Let the command continue when stdout cannot be written, because its result is elsewhere."""
    global _outlives
    _outlives = True


def release() -> None:
    """Restore the default for SIGTERM, which ends the process at once."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_early(number: int) -> bool:
    """Return whether no run is there yet that would save anything on this signal."""
    return signal.getsignal(number) in (_terminate, signal.default_int_handler)


# ---- SIGTERM


def _terminate(number: int, frame: FrameType | None) -> None:
    global heard
    if is_deferred(number, frame):
        return
    if heard is not None:  # the first was raised, but a library may be holding it up
        os.write(2, b"error: interrupted by SIGTERM\n")
        os._exit(TERMINATED_CODE)
    heard = number
    raise Terminated


def is_deferred(number: int, frame: FrameType | None) -> bool:
    """Return whether a handler should return, not raise, because the signal arrived inside `logging`, where an
    exception can leave a lock taken forever, or inside a callback of Python's import, which prints it and drops it.
    The signal is sent again soon, for a second at most."""
    global _deferrals
    while frame and frame.f_globals.get("__name__") != "logging" and frame.f_code.co_qualname != _DROPS_ERRORS:
        frame = frame.f_back
    if frame is None or _deferrals >= _MOST_DEFERRALS:
        return False
    _deferrals += 1
    again = threading.Timer(1 / _MOST_DEFERRALS, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    return True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=release)  # a pool ends its workers with SIGTERM, without a message


# ---- streams


class _Stream(io.FileIO):
    """A standard stream that drops what is written after its reader has gone."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            _lose(self.fileno(), error)
        return memoryview(data).nbytes


def _guard(name: str, descriptor: int) -> None:
    former: object = getattr(sys, name)
    if former is not getattr(sys, f"__{name}__"):  # replaced by other code
        return
    raw = getattr(getattr(former, "buffer", None), "raw", getattr(former, "buffer", None))
    if isinstance(raw, _Stream):
        return
    how: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": name == "stderr"}
    if former is not None:
        former.flush()
        how = {word: getattr(former, word) for word in ("encoding", "errors", "line_buffering", "write_through")}
    stream: Any = _Stream(descriptor, "w", closefd=False)
    stream.name = f"<{name}>"
    is_unbuffered = former is not None and isinstance(former.buffer, io.FileIO)
    made = io.TextIOWrapper(stream if is_unbuffered else io.BufferedWriter(stream), **how)
    made.mode = "w"  # type: ignore[misc]
    setattr(sys, name, made)
    setattr(sys, f"__{name}__", made)


def _lose(descriptor: int, error: OSError) -> None:
    if descriptor == 1 and not _outlives:
        if error.errno != errno.EPIPE:
            raise error
        _to_null(1)
        raise SystemExit(PIPE_CODE)  # not an OSError, which the writing code might handle
    _to_null(descriptor)


def _to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
        return
    os.dup2(null, descriptor)
    os.close(null)
