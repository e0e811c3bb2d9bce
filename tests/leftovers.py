"""Set the default signals for tests, and clean up processes and open files after each test.

A pytest plug-in that `conftest.py` loads. Programs that tests start have the signal handling of a terminal, however
pytest was started. A test must end every process that it starts: a test that passes and leaves some is an error.
Processes and files of a failed test are killed and closed, so that no later test fails because of them.
"""

import contextlib
import gc
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import commands
import psutil
import pytest

SENT = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGCHLD", "SIGALRM", "SIGUSR1", "SIGUSR2")
"""Signals that tests and programs under test send."""
GRACE_SECONDS = 20.0
"""Time that the processes of a test that passed have to end."""

_FAILED = pytest.StashKey[bool]()
_tests: list[str] = []  # the running test, if any
_scopes: list[str] = []  # of the fixtures that are being set up
_processes: list[subprocess.Popen[Any]] = []  # started by the current test
_runs: list[commands.Running] = []


def _nothing(*_: object) -> None:
    """Ignore a signal."""


def default_signals() -> None:
    """Give programs started from now on the default action of each signal in `SENT`.

    `nohup`, `&` in a script and some CI runners start their commands with signals ignored. A program inherits ignored
    signals from its parent, but not handlers. This process still ignores the signals.
    """
    for name in SENT:
        number = getattr(signal, name)
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def pytest_configure(config: pytest.Config) -> None:
    """Set the signals in the process that runs tests: a worker of xdist inherits the ignored ones of its parent."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        default_signals()


def _of_a_test() -> bool:
    """Return whether a process started now must end with the current test: no fixture of a wider scope starts it."""
    return bool(_tests) and all(scope == "function" for scope in _scopes)


_init, _start = subprocess.Popen.__init__, commands.Commands.start


def _popen(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
    _init(self, *arguments, **options)
    if _of_a_test():
        _processes.append(self)


def _run(self: commands.Commands, *arguments: Any, **options: Any) -> commands.Running:
    running = _start(self, *arguments, **options)
    if _of_a_test():
        _runs.append(running)
    return running


subprocess.Popen.__init__ = _popen  # type: ignore[method-assign]
commands.Commands.start = _run  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _tests.append(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    _scopes.append(fixturedef.scope)
    try:
        return (yield)
    finally:
        _scopes.pop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Check for leftovers after the test's fixtures have been torn down."""
    failed = item.stash.get(_FAILED, False)
    try:
        return (yield)
    except BaseException:
        failed = True
        raise
    finally:
        left = _end(0 if failed else GRACE_SECONDS)
        if failed:
            _forget()
        elif left:
            pytest.fail(f"the test left processes running: {', '.join(left)}", pytrace=False)


def _end(grace: float) -> list[str]:
    """Kill the processes of the test that have not ended after `grace` seconds; return their names."""
    left = []
    for process in _processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        if process.returncode is None:
            left.append(str(process.args))
            _kill(process.pid)
            process.wait()
        for file in (process.stdin, process.stdout, process.stderr):
            if file is not None:
                with contextlib.suppress(OSError):  # unwritten data has no reader
                    file.close()
    for running in _runs:
        if not running.ended(grace):
            left.append(str(running.files))
            for process in running.processes():
                _kill(process)
    for each in (_tests, _processes, _runs):
        each.clear()
    return left


def _kill(number: int) -> None:
    """Kill a process and all processes that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(number)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def _forget() -> None:
    """Close the files of a failed test: its traceback keeps them open until another test fails."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        with contextlib.suppress(AttributeError):
            delattr(sys, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
