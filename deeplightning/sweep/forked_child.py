"""Call a function in a forked process: whatever ends it ends that process alone.

What the function returns comes back as JSON. Memory is limited from outside: a process that takes more is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deeplightning.faults import CheckpointError, ConfigError, RunError, SetupError, UserError
from deeplightning.private.python import forget_exit_functions
from deeplightning.process.failure import exit_code_of, reason_of
from deeplightning.process.terminal import say
from deeplightning.sweep.worker import end_with
from deeplightning.words import lacks_memory

POLL_SECONDS = 0.02
_ERRORS: dict[int, type[UserError]] = {2: ConfigError, 3: SetupError, 4: CheckpointError, 5: RunError}


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        found: what the function returned; None: the child ran out of memory.
        peak: the most main memory that it held, in bytes.
    """

    found: dict[str, Any] | None
    peak: int


def in_child(work: Callable[[], dict[str, object]], limit: int | None, redact: Callable[[str], str]) -> Outcome:
    """Call a function in a forked process, which is killed when it exceeds a memory limit.

    Args:
        work: returns what JSON can hold.
        limit: bytes of main memory; None: no limit.
        redact: removes secrets from a message.

    Raises:
        UserError: the child failed for another reason than memory.
        SystemExit: a bug in Deep Lightning ended it; its traceback has been printed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="deeplightning-measure-") as folder:
        file = Path(folder) / "found.json"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries wait, and hold nothing
            child = os.fork()
        if child == 0:
            _be_child(work, file, parent, redact)
        peak = 0
        try:
            peak, code = _watch(child, limit)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
            raise
        content = json.loads(file.read_text()) if file.is_file() else {}
    if limit is not None and peak > limit:
        return Outcome(None, peak)
    if "found" in content:
        return Outcome(content["found"], peak)
    if content.get("lacks_memory") or code == -signal.SIGKILL:  # the system kills as well
        return Outcome(None, peak)
    if (kind := _ERRORS.get(content.get("code", 1))) is not None:
        raise kind(content["message"])
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if not content:
        raise RunError(f"the process that measured ended with exit code {code} without a message")
    sys.exit(1)


def _watch(child: int, limit: int | None) -> tuple[int, int]:
    """Wait for a child.

    Returns:
        The most memory that it held, in bytes, and its exit code.
    """
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            scale = 1 if sys.platform == "darwin" else 1024
            return usage.ru_maxrss * scale, os.waitstatus_to_exitcode(status)
        with contextlib.suppress(psutil.Error):
            if limit is not None and psutil.Process(child).memory_info().rss > limit:
                os.kill(child, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _be_child(work: Callable[[], dict[str, object]], file: Path, parent: int, redact: Callable[[str], str]) -> None:
    """Call the function in the forked process, write its answer and end the process."""
    code, content = 1, dict[str, Any]()
    try:
        forget_exit_functions()  # what is registered is the parent's to do
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # stdout is for the result
        try:
            content, code = {"found": work()}, 0
        except KeyboardInterrupt:
            code = 130
        except BaseException as error:
            content = _told(error, redact)
        if content:
            file.write_text(json.dumps(content))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _told(error: BaseException, redact: Callable[[str], str]) -> dict[str, object]:
    """Return the description of an error for the parent."""
    cause: BaseException | None = error
    while cause is not None:
        if lacks_memory(cause):
            return {"lacks_memory": True}
        cause = cause.__cause__ or cause.__context__
    code = getattr(error, "exit_code", None)
    if code not in _ERRORS:
        say(redact("".join(traceback.format_exception(error))), err=True)
        return {"code": exit_code_of(error), "message": redact(reason_of(error))}
    notes = [str(fault) for fault in error.faults] if isinstance(error, UserError) else [str(error)]
    return {"code": code, "message": redact("; ".join(notes))}
