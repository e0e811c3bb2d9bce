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
from collections.abc import Mapping
from typing import IO, TextIO

from deeplightning.faults import ERRORS, Fault, RunError

LAST_LINES = 250
"""Number of stderr lines kept for an error message."""


def watch(
    command: list[str], environment: Mapping[str, str], marker: str, hide: str | None = None, shown: str = ""
) -> str | None:
    """Run a command, print its output until it ends, and return the rest of the stdout line that begins with `marker`,
    or None if there is no such line.

    The command runs in its own session, so Ctrl-C reaches it only once, through this process. It ends when this process
    ends (`deeplightning.process.die_with_parent`).

    Args:
        environment: variables to add to those of this process.
        marker: the beginning of the line to return, which is not printed.
        hide: the path of a temporary file. The output shows `shown` instead, without line and column.
        shown: a name that the user recognises.

    Raises:
        UserError: the command failed.
        KeyboardInterrupt: this process was interrupted; the command has ended.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deeplightning.process.die_with_parent", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        start_new_session=True,
    )
    hidden = re.compile(rf"{re.escape(hide)}(:\d+:\d+)?") if hide else None
    lines: queue.Queue[tuple[str, str] | None] = queue.Queue()

    def read(name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode("utf-8", "replace").rstrip("\n")
                lines.put((name, hidden.sub(shown, text) if hidden else text))
        lines.put(None)

    for name in ("stdout", "stderr"):
        threading.Thread(target=read, args=(name, getattr(process, name)), daemon=True).start()
    found, last, open_streams, code, interrupted = None, list[str](), 2, None, False
    errors: TextIO = sys.stdout if hasattr(builtins, "__IPYTHON__") else sys.stderr  # stderr is red in a notebook
    try:
        while code is None:
            try:
                while open_streams:
                    if (item := lines.get()) is None:
                        open_streams -= 1
                        continue
                    name, line = item
                    last = [*last[-LAST_LINES + 1 :], line] if name == "stderr" else last
                    if name == "stdout" and line.startswith(marker):
                        found = line.removeprefix(marker)
                    elif name == "stdout" or not line.startswith("error: "):  # errors are raised at the end
                        print(line, file=sys.stdout if name == "stdout" else errors, flush=True)
                code = process.wait()
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        process.terminate()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
    if interrupted:
        raise KeyboardInterrupt
    if code != 0:
        notes = [Fault(line.removeprefix("error: ")) for line in last if line.startswith("error")]
        reason = "; its last line: ".join([f"the command ended with exit code {code}", *last[-1:]])
        raise ERRORS.get(code, RunError)(notes or reason)
    return found
