"""A test that hangs ends with the process that runs it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


HANGS = """
import os, threading, time
import hangs

def waits():
    time.sleep(1000)

def test_fails():
    hangs.LIMIT_SECONDS = 1  # of the next test, and not in the worker that takes the place of this one
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
    """Of a worker of xdist too, where the others continue; what the test has forked ends as well."""
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
    assert _ends(int((tmp_path / "child").read_text()))


def _ends(process: int) -> bool:
    """Return whether a process ends within a minute; it has the signal already."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in ("Z", "X"):
            return True
        time.sleep(0.1)
    return False
