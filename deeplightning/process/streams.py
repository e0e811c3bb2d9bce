"""What the command sees to before anything else: open standard streams, a stdout that nobody reads, and SIGTERM.

Importing it changes nothing; only `prepare`, which the command calls, does. It imports little, since every verb pays.
"""

import _thread
import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

PIPE_CODE = 141
"""The exit code of a verb whose stdout nobody reads any more: that of a program which SIGPIPE has ended."""
TERMINATED_CODE = 143

heard: int | None = None
"""The signal that has asked this process to end before a run could hear it."""

_deferrals = 0
_MOST_DEFERRALS = 100
_process = 0  # that of the command; a process that is forked from it says nothing of a lost stream
_outlives = False
_lost: str | None = None  # the message about a stream that was lost
_can_say = _said = False


class Interrupted(BaseException):
    """A signal asked the run to end; a second one, `at_once`: nothing more is saved. Like
    KeyboardInterrupt, it is no Exception: it may be raised anywhere, and `except Exception` must not swallow it."""

    def __init__(self, signal_name: str, exit_code: int, at_once: bool = False):
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code = exit_code
        self.at_once = at_once


class Terminated(KeyboardInterrupt):
    """SIGTERM, where no run hears it: as Ctrl-C is, no error that code may take for its own."""

    exit_code = TERMINATED_CODE

    def __init__(self) -> None:
        super().__init__("interrupted by SIGTERM")


def prepare() -> None:
    """Opens closed standard streams as /dev/null, guards stdout and stderr, and hears SIGTERM; again: does nothing."""
    prepare_streams()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def prepare_streams() -> None:
    """The part of `prepare` that concerns standard streams."""
    global _process
    _process = os.getpid()
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # else the next file that is opened would be it, and be printed into
            _to_null(descriptor)
    if sys.stdin is None:
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        _guard(name, descriptor)


def outlive_reader() -> None:
    """From here on the command continues when stdout cannot be written: its result is elsewhere."""
    global _outlives
    _outlives = True


def say_losses() -> None:
    """Logs that stdout or stderr was lost, now if it was, else when it is; to be called when a run's log is there."""
    global _can_say, _said
    _can_say = True
    if _lost is not None and not _said and os.getpid() == _process:
        _said = True
        import logging

        logging.getLogger("deeplightning").warning("%s", _lost)


def release() -> None:
    """Lets SIGTERM end the process at once again: there is nobody left to tell."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_early(number: int) -> bool:
    """Whether a signal that comes now finds no run that would save anything."""
    return signal.getsignal(number) in (_terminate, signal.default_int_handler)


# ---- SIGTERM


def _terminate(number: int, frame: FrameType | None) -> None:
    global heard
    if is_deferred(number, frame):
        return
    if heard is not None:  # the first is on its way, perhaps through a library that holds it up
        os.write(2, b"error: interrupted by SIGTERM\n")
        os._exit(TERMINATED_CODE)
    heard = number
    raise Terminated


def is_deferred(number: int, frame: FrameType | None) -> bool:
    """Whether a handler should return instead of raising, because the signal arrived inside `logging`. It is sent again
    soon, for a second at most. An exception there can leave a lock taken, for which other threads then wait for ever.
    """
    global _deferrals
    while frame is not None and frame.f_globals.get("__name__") != "logging":
        frame = frame.f_back
    if frame is None or _deferrals >= _MOST_DEFERRALS:
        return False
    _deferrals += 1
    _thread.start_new_thread(_send_again, (number,))  # `threading` takes locks
    return True


def _send_again(number: int) -> None:
    time.sleep(1 / _MOST_DEFERRALS)
    os.kill(os.getpid(), number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=release)  # a pool ends its workers with SIGTERM, without words


# ---- streams


class _Stream(io.FileIO):
    """A standard stream: what is written when its reader has gone is dropped."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            _lose(self.fileno(), error)
        return memoryview(data).nbytes


def _guard(name: str, descriptor: int) -> None:
    former: object = getattr(sys, name)
    if former is not getattr(sys, f"__{name}__"):  # somebody's own
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
    global _lost
    if descriptor == 1 and not _outlives:
        if error.errno != errno.EPIPE:
            raise error
        _to_null(1)
        raise SystemExit(PIPE_CODE)  # no OSError: what writes might take that for its own
    _to_null(descriptor)
    if _lost is None:
        name = "stdout" if descriptor == 1 else "stderr"
        _lost = f"{name} can no longer be written ({error.strerror}): the run continues without it"
        if _can_say:
            with contextlib.suppress(RuntimeError):  # the interpreter is about to end
                # The thread that writes holds locks that a log may need.
                threading.Thread(target=say_losses, name="deeplightning-lost").start()


def _to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null == descriptor:
        os.set_inheritable(null, True)
        return
    os.dup2(null, descriptor)
    os.close(null)
