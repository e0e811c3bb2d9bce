"""Log one line of JSON per request to standard output, and per event to standard error. If the reader is slow or gone,
lines are lost; answers are never delayed."""

import contextlib
import json
import os
import select
import sys
import time
import traceback

from deeplightning.words import printable

MAX_LINES = 4096

MAX_REFUSED_LINES = 100
"""Lines of refused requests that a process writes per second; for the rest, only their number is logged."""

MAX_WRITE_BYTES = 4096
"""Bytes that are written to a pipe atomically when other processes write to it too (PIPE_BUF on Linux)."""


class Log:
    """Buffers lines until `flush` writes them to the file `descriptor`."""

    def __init__(self, descriptor: int = 1):
        self._descriptor = descriptor
        self._lines: list[bytes] = []
        self._second = self._refused = 0
        self._stamp = ""

    def add(self, fields: str, refused: bool = False) -> None:
        """Buffer a line until the next flush; `fields` is the inside of a JSON object. Of `refused` requests, at most
        `MAX_REFUSED_LINES` lines per second are kept."""
        now = self._now()
        if refused:
            self._refused += 1
            if self._refused > MAX_REFUSED_LINES:
                return
        if len(self._lines) < MAX_LINES:
            self._lines.append(f'{{"time": "{now}", {fields}}}\n'.encode())

    def flush(self) -> None:
        """Write the buffered lines, as many as the reader takes without blocking."""
        self._now()
        lines, self._lines = self._lines, []
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the disk is full
            poll = select.poll()
            poll.register(self._descriptor, select.POLLOUT)
            while lines and any(event & select.POLLOUT for _, event in poll.poll(0)):
                size = number = 0
                while number < len(lines) and (not number or size + len(lines[number]) <= MAX_WRITE_BYTES):
                    size += len(lines[number])
                    number += 1
                os.write(self._descriptor, b"".join(lines[:number]))
                del lines[:number]

    def _now(self) -> str:
        """Return the time in UTC, in milliseconds. Each new second, log how many lines were dropped."""
        now = time.time()
        if int(now) != self._second:
            self._second = int(now)
            if self._refused > MAX_REFUSED_LINES:
                log_event("refused requests without a line", number=self._refused - MAX_REFUSED_LINES)
            self._refused = 0
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        return f"{self._stamp}.{int(now * 1000) % 1000:03}Z"


def log_event(event: str, error: BaseException | None = None, **fields: object) -> None:
    """Write one line of JSON to standard error, with the traceback of `error` if it is given."""
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, **fields}
    if error is not None:
        record["error"] = "".join(traceback.format_exception(error))[-3000:]  # a line that fits into a pipe at once
    with contextlib.suppress(OSError, ValueError):
        # One write: `print` may write the newline separately, after the line of another process.
        if select.select([], [2], [], 0)[1]:  # else its reader is slow
            sys.stderr.write(f"{printable(json.dumps(record, default=str))}\n")
            sys.stderr.flush()


def open_streams() -> None:
    """Open /dev/null in place of closed standard streams (`>&-`). Otherwise the next socket would get the descriptor
    that log lines are written to."""
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            assert null == descriptor, "those below are open"
        if getattr(sys, name) is None:  # a library may have opened a file under this number since
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  (it stays open)
