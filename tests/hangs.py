"""End hangs: `limited` runs code that may hang in a process that is killed, and a test that hangs ends with all stacks.

A plugin of pytest, which `conftest.py` loads. No timer raises in a process that runs tests: an exception of a signal
handler can leave a library between taking a lock and releasing it, and a later test would then wait for that lock for
ever.
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
"""Time that `limited` waits for each second of CPU time, on a machine that does other work too."""

_stderr = pytest.StashKey[int]()
_PR_SET_PDEATHSIG = 1


def limited(seconds: int, work: Callable[[], object]) -> None:
    """Call `work` in a forked process that may use so many seconds of CPU time.

    Raises:
        AssertionError: `work` raised, with its traceback; or the process was killed, with the stacks of its threads.
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
    """Keep the standard error of this process: during a test its descriptor is pytest's.

    What it forks dies with it on Linux: a child that hangs would keep its pipes open, and xdist would wait for their
    end. The kernel counts the thread that forks as the parent, so this holds for the main thread only.
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
    """Cancel the timer: a worker of xdist may wait long for the others."""
    faulthandler.cancel_dump_traceback_later()
