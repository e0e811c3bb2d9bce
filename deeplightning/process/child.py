"""A Deep Lightning command as a child process of a Python program: its output, its errors and its end."""

from __future__ import annotations

import builtins
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import IO, TextIO

from deeplightning.faults import ERRORS, RunError

LAST_LINES = 40
"""Number of stderr lines kept for an error message."""


class Child:
    """Run a command in its own session, so that Ctrl-C reaches it once, through this process. The command ends when
    this process ends (`deeplightning.process.die_with_parent`).

    Args:
        environment: variables to add to those of this process.
        hide: the path of a temporary file. Output shows `shown` instead of it, without line and column.
        shown: a name that the user knows.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], hide: str | None = None, shown: str = ""):
        wrapper = [sys.executable, "-P", "-m", "deeplightning.process.die_with_parent", *command]
        self._process = subprocess.Popen(
            wrapper,
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
        """Yield the lines of stdout and stderr, each with the name of its stream, until both end."""
        while self._open:
            item = self._lines.get()
            if item is None:
                self._open -= 1
            else:
                yield item

    def watch(self, marker: str) -> str | None:
        """Print the command's output until it ends.

        Args:
            marker: the beginning of the stdout line that is returned instead of printed.

        Returns:
            The rest of that line, or None if there was none.

        Raises:
            UserError: the command failed.
            KeyboardInterrupt: this process was interrupted; the command has ended.
        """
        found, code, interrupted = None, None, False
        errors: TextIO = sys.stdout if hasattr(builtins, "__IPYTHON__") else sys.stderr  # stderr is red in a notebook
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
                self._process.send_signal(signal.SIGINT)
        if interrupted:
            raise KeyboardInterrupt
        if code != 0:
            raise self._error(code)
        return found

    def first_line(self, beginning: str) -> str:
        """Return the first line on stdout that begins with `beginning`.

        Raises:
            UserError: the command ended before it printed one.
        """
        for name, line in self._both():
            if name == "stdout" and line.startswith(beginning):
                return line
            if name == "stderr":
                self._note(line)
        raise self._error(self._process.wait())

    def _note(self, line: str) -> bool:
        """Keep a line of stderr; return whether to print it: lines of an error are raised at the end instead."""
        self._last = [*self._last[-LAST_LINES + 1 :], line]
        return not line.startswith("error: ")

    def _error(self, code: int) -> Exception:
        notes = [line.removeprefix("error: ") for line in self._last if line.startswith("error")]
        text = "\n".join(notes or self._last[-1:] or [f"it ended with exit code {code}"])
        return ERRORS.get(code, RunError)(text)

    def stop(self) -> None:
        """Send SIGTERM to the command, unless it has ended, and wait for it."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
