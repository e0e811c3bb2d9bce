"""Run a case in a forked process that is session leader and subreaper, so that no process of the case escapes."""

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import psutil

from storm.place import Broken, Place, Skipped

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
GRACE = 10.0
"""Seconds that the processes of a case have to end."""


@dataclass
class Result:
    """Result of a case.

    Attributes:
        held: whether the promise held; None: it was skipped.
        message: what was done, or what was broken, or why it was skipped.
        count: how many faults were tried.
    """

    kind: str
    number: int
    held: bool | None
    message: str
    count: int = 1
    seconds: float = 0.0


@dataclass
class Case:
    """A running case."""

    kind: str
    number: int
    pid: int
    answer: int
    begun: float
    limit: float
    folder: Path

    def end(self, reason: str | None = None) -> Result:
        """Wait for the end and return the result; a `reason` to kill it is a broken promise."""
        if reason is not None:
            _kill_all(psutil.Process(self.pid))
        with os.fdopen(self.answer, "rb") as file:
            answer = file.read()
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self.begun
        if reason is None and answer:
            result = Result(**json.loads(answer))
        else:
            output = (self.folder / "output.log").read_text(errors="replace")[-4000:]
            what = reason or f"the process of the case ended with {os.waitstatus_to_exitcode(status)}"
            result = Result(self.kind, self.number, False, f"{what}\n{output}")
        result.seconds = seconds
        return result


def start(module: ModuleType, kind: str, seed: int, number: int, base: Path) -> Case:
    """Start a case, with a folder below `base`."""
    folder = base / f"{kind}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "case").mkdir(parents=True)
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        os.close(reading)
        code = 1
        try:
            result = _run(module, kind, seed, number, folder, base / f"shared-{kind}")
            os.write(writing, json.dumps(asdict(result)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    limit = float(getattr(module, "LIMIT", 300))
    return Case(kind, number, pid, reading, time.monotonic(), limit, folder)


def _run(module: ModuleType, kind: str, seed: int, number: int, folder: Path, shared: Path) -> Result:
    os.setsid()
    for name in ("SIGINT", "SIGTERM", "SIGCHLD", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    output = os.open(folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for name in ("state", "tmp"):
        (folder / name).mkdir()
    os.environ |= {"XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder / "tmp")}
    os.chdir(folder / "case")
    place = Place(folder / "case", shared, number)
    held: bool | None = True
    try:
        message = module.case(random.Random(f"{seed} {kind} {number}"), place)
    except Skipped as skipped:
        held, message = None, str(skipped)
    except Broken as broken:
        held, message = False, str(broken)
    except BaseException:
        held, message = False, traceback.format_exc()
    left = living_after(GRACE if held else 0, end=True)
    if held and left:
        held, message = False, f"processes were left: {', '.join(left)}; the case: {message}"
    return Result(kind, number, held, message, place.count)


def living_after(grace: float, end: bool = False) -> list[str]:
    """Return the processes of a case that still run after `grace` seconds; kill them if `end`."""
    me, until = psutil.Process(), time.monotonic() + grace
    # List the processes twice: one that gets a new parent meanwhile is missing from the first list.
    while ((living := _living(me)) and time.monotonic() < until) or (not living and (living := _living(me))):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)
    names = []
    for process in living:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())[-200:]}")
            if end:
                process.kill()
    return names


def _living(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def _kill_all(process: psutil.Process) -> None:
    """Stop a process, kill its descendants, then kill it: so none can start another in between."""
    with contextlib.suppress(psutil.Error):
        process.suspend()
        for _ in range(20):  # children of a killed process become children of the case
            if not (living := _living(process)):
                break
            for child in living:
                with contextlib.suppress(psutil.Error):
                    child.kill()
            time.sleep(0.02)
        process.kill()
