"""A test that hangs ends together with the process that runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from served import gone, wait_until

TESTS = Path(__file__).parents[1]

HANGS = """
import os, threading, time
import hangs

def waits():
    time.sleep(1000)

def test_fails():
    hangs.LIMIT_SECONDS = 1  # for the next test, not in the worker that replaces this one
    assert False

def test_hangs():
    threading.Thread(target=waits, daemon=True).start()
    if (child := os.fork()) == 0:
        waits()
    with open("child", "w") as file:
        file.write(str(child))
    (lock := threading.Lock()).acquire()
    lock.acquire()
"""


@pytest.mark.parametrize("processes", [0, 1])
def test_a_test_that_hangs_ends_its_process_with_the_stacks_of_all_threads(tmp_path, processes):
    """So does a worker of xdist, while the others continue, and a process that the test has forked."""
    (tmp_path / "test_one.py").write_text(HANGS)
    (tmp_path / "test_other.py").write_text("def test_passes(): pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "hangs", "-n", str(processes)]
    variables = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done
    assert "Timeout (0:00:01)!" in done.stderr
    assert " in waits\n" in done.stderr
    assert " in test_hangs\n" in done.stderr
    assert ("1 passed" in done.stdout) == (processes == 1)
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: gone(child), 60)  # it has received the signal already
