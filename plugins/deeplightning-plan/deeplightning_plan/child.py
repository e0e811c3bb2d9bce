"""Measure in a forked process: what it holds is free again when it ends, and a lack of memory ends it alone."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deeplightning.faults import ERRORS, RunError, UserError
from deeplightning.process.failure import exit_code_of, reason_of
from deeplightning.process.terminal import say
from deeplightning.runfolder import read_object
from deeplightning.sweep.worker import fork
from deeplightning.words import lacks_memory

_OF_USERS = ERRORS.keys() - {UserError.exit_code}


def in_child(
    work: Callable[[], dict[str, object]], limit: int | None, redact: Callable[[str], str]
) -> tuple[dict[str, Any] | None, int]:
    """Call a function in a forked process, which is killed when it exceeds a memory limit.

    Args:
        work: returns what JSON can hold; what it prints goes to stderr.
        limit: bytes of main memory; None: no limit.
        redact: removes secrets from a message.

    Returns:
        What the function returned, or None if the child ran out of memory; the most main memory that it held, in bytes.

    Raises:
        UserError: the child failed for another reason than memory.
        SystemExit: a bug in Deep Lightning ended it; its traceback has been printed.
    """
    with tempfile.TemporaryDirectory(prefix="deeplightning-measure-") as folder:
        file = Path(folder) / "found.json"

        def answer() -> int:
            os.dup2(2, 1)  # stdout is for the result
            try:
                content: dict[str, object] = {"found": work()}
            except Exception as error:
                content = _described(error, redact)
            file.write_text(json.dumps(content))
            return 0

        child = fork(answer)
        try:
            peak, code = _wait(child, limit)
        except BaseException:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise
        content = read_object(file)
    if limit is not None and peak > limit:
        return None, peak
    if "found" in content or code == -signal.SIGKILL:  # the system kills as well
        return content.get("found"), peak
    if not content:
        raise RunError(f"the process that measured ended with exit code {code} without a message")
    if content["code"] not in _OF_USERS:
        sys.exit(1)
    raise ERRORS[content["code"]](content["message"])


def _wait(child: int, limit: int | None) -> tuple[int, int]:
    """Wait for a child; return the most memory that it held, in bytes, and its exit code."""
    import psutil

    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            scale = 1 if sys.platform == "darwin" else 1024
            return usage.ru_maxrss * scale, os.waitstatus_to_exitcode(status)
        with contextlib.suppress(psutil.Error):
            if limit is not None and psutil.Process(child).memory_info().rss > limit:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def _described(error: Exception, redact: Callable[[str], str]) -> dict[str, object]:
    """Return the description of an error for the parent; `found` is None where memory was lacking."""
    cause: BaseException | None = error
    while cause is not None:
        if lacks_memory(cause):
            return {"found": None}
        cause = cause.__cause__ or cause.__context__
    if getattr(error, "exit_code", None) not in _OF_USERS:
        say(redact("".join(traceback.format_exception(error))), err=True)
    return {"code": exit_code_of(error), "message": redact(reason_of(error))}
