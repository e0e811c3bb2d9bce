"""One line of JSON per request on standard output, and per event on standard error. A reader that is slow, or gone,
costs lines, never an answer."""

import contextlib
import json
import os
import select
import sys
import threading
import time
import traceback

from deeplightning.words import printable

MAX_LINES = 4096

MAX_REFUSED = 100
"""Lines of refused requests that a process writes in a second; of the rest only their number is reported."""

MAX_WRITE = 4096
"""Bytes that a pipe takes whole, also when other processes write to it (POSIX's PIPE_BUF on Linux)."""


_counting, _left_out = threading.Lock(), 0


class Log:
    """Lines for `descriptor`, gathered until `flush`."""

    def __init__(self, descriptor: int = 1):
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._second = self._refused = 0
        self._stamp = ""

    def add(self, fields: str, refused: bool = False) -> None:
        """Keep a line for the next flush: `fields` is the inside of a JSON object. `refused`: it is one of a request
        that was refused, of which `MAX_REFUSED` in a second are kept."""
        now = self._now()
        if refused:
            self._refused += 1
            if self._refused > MAX_REFUSED:
                return
        if len(self._lines) < MAX_LINES:
            self._lines.append(f'{{"time": "{now}", {fields}}}\n'.encode())

    def flush(self) -> None:
        """Write what was kept, or as much as is taken without waiting."""
        self._now()
        lines, self._lines = self._lines, []
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more, or the disk is full
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            while lines and any(event & select.POLLOUT for _, event in poll.poll(0)):
                size = number = 0
                while number < len(lines) and (not number or size + len(lines[number]) <= MAX_WRITE):
                    size += len(lines[number])
                    number += 1
                os.write(self._descriptor, b"".join(lines[:number]))
                del lines[:number]

    def _now(self) -> str:
        """UTC, to the millisecond."""
        now = time.time()
        if int(now) != self._second:
            self._second = int(now)
            if self._refused > MAX_REFUSED:
                log_event("refused requests without a line", number=self._refused - MAX_REFUSED)
            self._refused = 0
            if number := _left():
                log_event("messages of decoders without a line", number=number)
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        return f"{self._stamp}.{int(now * 1000) % 1000:03}Z"


def leave_out(number: int) -> None:
    """Counts messages of decoders about a client's picture: of those of a second only their number is logged."""
    global _left_out
    with _counting:
        _left_out += number


def _left() -> int:
    """How many were left out since the last call."""
    global _left_out
    with _counting:
        number, _left_out = _left_out, 0
    return number


def log_event(event: str, error: BaseException | None = None, **fields: object) -> None:
    """Writes one line of JSON to standard error; with `error`, also its traceback."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = {"time": stamp, "event": event, **fields}
    if error is not None:
        record["error"] = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError, ValueError):
        # One write: `print` may write the end of the line alone, after the line of another process.
        sys.stderr.write(f"{printable(json.dumps(record, default=str))}\n")
        sys.stderr.flush()


def open_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed, as by `>&-`: else the next socket would have the
    number to which log lines go."""
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            assert null == descriptor, "those below are open"
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
