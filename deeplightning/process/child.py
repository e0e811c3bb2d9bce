"""A command of ours, as a child process of a program that uses it from Python: its output, its errors, its end."""

from __future__ import annotations

import builtins
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import IO, TextIO

from deeplightning.faults import CheckpointError, ConfigError, RunError, SetupError, UserError

LAST_LINES = 40
"""Lines on stderr that are kept for the message of an error."""

_ERRORS = {kind.exit_code: kind for kind in (UserError, ConfigError, SetupError, CheckpointError, RunError)}


class Child:
    """A command in a session of its own, so that Ctrl-C reaches it once, through this process; it ends with this
    process (`deeplightning.process.die_with_parent`).

    Args:
        environment: variables beside those of this process.
        hide: the path of a temporary file. The output shows `shown` in its place, without line and column.
        shown: a name that the user knows.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], hide: str | None = None, shown: str = ""):
        leash = [sys.executable, "-P", "-m", "deeplightning.process.die_with_parent", *command]
        self._process = subprocess.Popen(
            leash,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )
        self._lines: queue.Queue[tuple[str, str] | None] = queue.Queue()
        self._open = 2
        self._hidden, self._shown = re.compile(rf"{re.escape(hide)}(:\d+:\d+)?") if hide else None, shown
        self._last: list[str] = []
        for name in ("stdout", "stderr"):
            threading.Thread(target=self._read, args=(name, getattr(self._process, name)), daemon=True).start()

    def _read(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode("utf-8", "replace").rstrip("\n")
                self._lines.put((name, self._hidden.sub(self._shown, text) if self._hidden else text))
        self._lines.put(None)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _both(self) -> Iterator[tuple[str, str]]:
        """The lines of stdout and stderr, each with the name of its stream, until both end."""
        while self._open:
            item = self._lines.get()
            if item is None:
                self._open -= 1
            else:
                yield item

    def watch(self, marker: str) -> str | None:
        """Shows what the command prints until it ends.

        Args:
            marker: begins the line on stdout that is returned instead of shown.

        Returns:
            The rest of that line; None: there was none.

        Raises:
            UserError: it failed.
            KeyboardInterrupt: this process was interrupted; the command has ended.
        """
        found, code, interrupted = None, None, False
        errors: TextIO = sys.stdout if hasattr(builtins, "__IPYTHON__") else sys.stderr  # it is red in a notebook
        while code is None:
            try:
                for name, line in self._both():
                    if name == "stdout" and line.startswith(marker):
                        found = line.removeprefix(marker)
                    elif name == "stdout" or self._note(line):
                        print(line, file=sys.stdout if name == "stdout" else errors, flush=True)
                code = self._process.wait()
            except KeyboardInterrupt:
                interrupted = True
                self._send(signal.SIGINT)
        if interrupted:
            raise KeyboardInterrupt
        if code != 0:
            raise self._error(code)
        return found

    def first_line(self, beginning: str) -> str:
        """The first line on stdout that begins so.

        Raises:
            UserError: the command ends before.
        """
        for name, line in self._both():
            if name == "stdout" and line.startswith(beginning):
                return line
            if name == "stderr":
                self._note(line)
        raise self._error(self._process.wait())

    def _note(self, line: str) -> bool:
        """Keeps a line of stderr; False: it is part of an error, which is raised in the end."""
        self._last = [*self._last[-LAST_LINES + 1 :], line]
        return not line.startswith("error: ")

    def _error(self, code: int) -> Exception:
        notes = [line.removeprefix("error: ") for line in self._last if line.startswith("error")]
        text = "\n".join(notes or self._last[-1:] or [f"it ended with exit code {code}"])
        return _ERRORS.get(code, RunError)(text)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self) -> None:
        """Ends the command by SIGTERM, and waits for it."""
        if self._process.poll() is None:
            self._send(signal.SIGTERM)
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
