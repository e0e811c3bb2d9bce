"""What the tests assume of whatever starts them, and that one test that fails does not make others fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from served import gone

SUITE = """\
import gc
import pathlib
import subprocess
import sys

import leftovers
import pytest

leftovers.GRACE_SECONDS = 0.1
SAYS = "import signal; print([signal.getsignal(s) in (0, signal.default_int_handler) for s in (1, 2, 3, 15)])"
SLEEPS = "import subprocess as s; c = s.Popen(['sleep', '600'], stdout=-3); print(c.pid, flush=True); input(); c.kill()"


def starts():
    process = subprocess.Popen([sys.executable, "-c", SLEEPS], stdin=-1, stdout=-1, text=True)
    with open("pids", "a") as pids:
        print(process.pid, process.stdout.readline(), file=pids)
    return process


@pytest.fixture(scope="module")
def server():
    process = starts()
    yield process
    assert process.poll() is None
    process.communicate("end", timeout=60)


def test_signals():
    assert eval(subprocess.check_output([sys.executable, "-c", SAYS])) == [True] * 4


def test_fails(server):
    file = open("pids")
    process = starts()
    assert False


def test_later(server):
    gc.collect()


def test_leaves():
    starts()
"""
IGNORES = """
import os, signal, sys
for number in (1, 2, 3, 15):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.run
def test_one_failed_test_is_one_failed_test(tmp_path):
    """Signals have their default actions; what a failed test leaves is ended, what one that passes leaves an error."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    for workers in (0, 1):
        plugins = ["-p", "leftovers", "-p", "no:cacheprovider", "-n", str(workers)]
        command = [sys.executable, "-c", IGNORES, "-m", "pytest", *plugins, "-q", "-rA", "test_suite.py"]
        env = environment(PYTHONPATH=os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]))
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
        told = [line.split(" - ")[0] for line in done.stdout.splitlines()]
        assert sorted(line for line in told if line.startswith(("PASSED ", "FAILED ", "ERROR "))) == [
            "ERROR test_suite.py::test_leaves",
            "FAILED test_suite.py::test_fails",
            "PASSED test_suite.py::test_later",
            "PASSED test_suite.py::test_leaves",
            "PASSED test_suite.py::test_signals",
        ], done.stdout + done.stderr
        started = map(int, (tmp_path / "pids").read_text().split())
        assert [number for number in started if not gone(number)] == []
