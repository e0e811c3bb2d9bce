"""End hangs: `limited` runs code in a child process with a time limit; a test that hangs ends with the stacks of all
threads.

A pytest plug-in that `conftest.py` loads. No timer raises in a process that runs tests: an exception from a signal
handler can interrupt a library while it holds a lock, and a later test would then wait for that lock forever.
"""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import IO

import pytest

LIMIT_SECONDS, SLOW_LIMIT_SECONDS = 600.0, 1800.0
"""Limits for each phase of a test (setup, call, teardown), after which its process ends."""
SECONDS_PER_CPU_SECOND = 10
"""Wall-clock seconds that `limited` allows for each second of CPU time, on a busy machine."""

_stderr = pytest.StashKey[int]()
_PR_SET_PDEATHSIG = 1


def limited(seconds: int, work: Callable[[], object]) -> None:
    """Call `work` in a forked process that may use `seconds` of CPU time.

    Raises:
        AssertionError: with the traceback if `work` raised, or the stacks of all threads if the process was killed.
    """
    with tempfile.TemporaryFile("w+") as report:
        process = multiprocessing.get_context("fork").Process(target=_limited, args=(seconds, work, report))
        process.start()
        process.join(SECONDS_PER_CPU_SECOND * seconds)
        if process.exitcode is None:
            os.kill(process.ident or 0, signal.SIGXCPU)  # as the kernel does when the CPU time is used up
            process.join(SECONDS_PER_CPU_SECOND)
            process.kill()
            process.join()
        report.seek(0)
        if process.exitcode != 0:
            raise AssertionError(f"ended with {process.exitcode}:\n{report.read()}")


def _limited(seconds: int, work: Callable[[], object], report: IO[str]) -> None:
    gc.disable()  # a collection would copy every page of this process
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    faulthandler.register(signal.SIGXCPU, report, chain=True)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    try:
        work()
    except BaseException:
        traceback.print_exc(file=report)
        report.flush()
        raise SystemExit(1) from None


def pytest_configure(config: pytest.Config) -> None:
    """Duplicate the standard error of this process, whose descriptor pytest captures during a test.

    On Linux, forks die with this process: a child that hangs would keep its pipes open, and xdist would wait for them
    to close. The kernel counts the thread that forks as the parent, so this holds only for the main thread.
    """
    config.stash[_stderr] = os.dup(2)
    pid, forks_itself = os.getpid(), False

    def before() -> None:
        nonlocal forks_itself
        forks_itself = threading.current_thread() is threading.main_thread()

    def after() -> None:
        if forks_itself and os.getppid() == pid:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        os.register_at_fork(before=before, after_in_child=after)


def pytest_unconfigure(config: pytest.Config) -> None:
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_stderr])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the timer of this phase; the other phases do the same."""
    limit = LIMIT_SECONDS if item.get_closest_marker("slow") is None else SLOW_LIMIT_SECONDS
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[_stderr])


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


def pytest_runtest_logfinish() -> None:
    """Cancel the timer: an xdist worker may wait long for the others."""
    faulthandler.cancel_dump_traceback_later()
