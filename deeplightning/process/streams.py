"""Prepare the process of a command: missing standard streams, a closed stdout, and SIGTERM.

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
"""Exit code of a verb whose reader closed stdout, the same as for a program that SIGPIPE killed."""
INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes of a command that a signal ended."""
TERMINATED_CODE = INTERRUPTED[signal.SIGTERM]

received_signal: int | None = None
"""The signal that asked this process to end before a run handled signals."""

_deferrals = 0
_MAX_DEFERRALS = 100
_IMPORT_LOCK_CALLBACK = "_get_module_lock.<locals>.cb"
_ignores_closed_stdout = False


class Interrupted(BaseException):
    """Raised when a signal asks the run to end; `at_once`, after a second signal, means that nothing more is saved.
    A BaseException like KeyboardInterrupt, so `except Exception` cannot swallow it."""

    def __init__(self, signal_name: str, exit_code: int, at_once: bool = False):
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code, self.at_once = exit_code, at_once


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
        except OSError:  # otherwise the next opened file gets this descriptor, and prints go into it
            _to_null(descriptor)
    if sys.stdin is None:
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        _guard(name, descriptor)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def ignore_closed_stdout() -> None:
    """Let the command continue when stdout cannot be written, because it writes its result elsewhere."""
    global _ignores_closed_stdout
    _ignores_closed_stdout = True


def release() -> None:
    """Restore the default action of SIGTERM, which ends the process at once."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_unhandled(number: int) -> bool:
    """Return whether no run handles this signal yet, so there is nothing to save."""
    return signal.getsignal(number) in (_terminate, signal.default_int_handler)


# ---- SIGTERM


def _terminate(number: int, frame: FrameType | None) -> None:
    global received_signal
    if defer_signal(number, frame):
        return
    if received_signal is not None:  # the first was raised, but a library may be blocking it
        os.write(2, b"error: interrupted by SIGTERM\n")
        os._exit(TERMINATED_CODE)
    received_signal = number
    raise Terminated


def defer_signal(number: int, frame: FrameType | None) -> bool:
    """Send a signal again soon if its handler must not raise now; return whether it must not.

    An exception inside `logging` can leave a lock taken forever; a callback of Python's import prints and drops it."""
    global _deferrals
    while frame and frame.f_globals.get("__name__") != "logging" and frame.f_code.co_qualname != _IMPORT_LOCK_CALLBACK:
        frame = frame.f_back
    if frame is None or _deferrals >= _MAX_DEFERRALS:
        return False
    _deferrals += 1
    again = threading.Timer(1 / _MAX_DEFERRALS, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    return True


os.register_at_fork(after_in_child=release)  # a pool ends its workers with SIGTERM; they must not print an error


# ---- streams


class _Stream(io.FileIO):
    """A standard stream that drops what is written after its reader has gone."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            _handle_write_error(self.fileno(), error)
        return memoryview(data).nbytes


def _guard(name: str, descriptor: int) -> None:
    former: object = getattr(sys, name)
    if former is not getattr(sys, f"__{name}__"):  # replaced by other code
        return
    raw = getattr(getattr(former, "buffer", None), "raw", getattr(former, "buffer", None))
    if isinstance(raw, _Stream):
        return
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": name == "stderr"}
    if former is not None:
        former.flush()
        options = {key: getattr(former, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
        options["errors"] = options["errors"].replace("strict", "backslashreplace")  # else a character may end a run
    stream: Any = _Stream(descriptor, "w", closefd=False)
    stream.name = f"<{name}>"
    is_unbuffered = former is not None and isinstance(former.buffer, io.FileIO)
    guarded = io.TextIOWrapper(stream if is_unbuffered else io.BufferedWriter(stream), **options)
    guarded.mode = "w"  # type: ignore[misc]
    setattr(sys, name, guarded)
    setattr(sys, f"__{name}__", guarded)


def _handle_write_error(descriptor: int, error: OSError) -> None:
    if descriptor == 1 and not _ignores_closed_stdout:
        _to_null(1)  # else the buffered rest fails again when Python exits, with code 120
        if error.errno != errno.EPIPE:
            raise error
        raise SystemExit(PIPE_CODE)  # not an OSError, which the writing code might handle
    _to_null(descriptor)


def _to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
        return
    os.dup2(null, descriptor)
    os.close(null)
