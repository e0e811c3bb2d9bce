"""`deeplightning VERB` in processes of their own, forked from one that has imported what they need.

A fresh process spends four seconds on imports, a forked one some milliseconds. What follows them is the same: arguments
in `sys.argv`, working directory, environment, signals, output as it is written, `atexit`, and the exit code.
"""

import atexit
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LONGEST = 90  # seconds; nothing here takes ten, unless it hangs
PAUSE = 0.02  # seconds between two looks at what a process has written

_numbers = itertools.count()


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def folder(self) -> Path:
        """The run's folder: the last line on stdout."""
        last = self.out.splitlines()[-1]
        assert last.startswith("Artifact storage path: /"), self.out + self.err
        return Path(last.removeprefix("Artifact storage path: "))

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


class Running:
    """A command that has been started; `files` + `.out`, `.err`, `.pid`, `.code` are what it says."""

    def __init__(self, files: Path):
        self.files = files

    def _wait(self, happened, what: str):
        end = time.monotonic() + LONGEST
        while not (found := happened()):
            assert time.monotonic() < end, f"waited in vain for {what}:\n{self._read('out')}\n{self._read('err')}"
            time.sleep(PAUSE)
        return found

    def _read(self, what: str) -> str:
        path = self.files.with_suffix(f".{what}")
        return path.read_text() if path.exists() else ""

    def says(self, text: str) -> str:
        """Waits until a text is in its output; returns all of that."""
        return self._wait(lambda: (found := self._read("out")) and text in found and found, repr(text))

    def signal(self, number: int) -> None:
        os.kill(int(self._wait(lambda: self._read("pid"), "its start")), number)

    def end(self) -> Outcome:
        """Waits until it has ended."""
        code = int(self._wait(lambda: self._read("code"), "its end"))
        return Outcome(code, self._read("out"), self._read("err"))


class Commands:
    """Starts commands; `folder` takes what they write on stdout and stderr."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, env=environment())

    def start(self, *arguments: object, cwd: Path, **variables: str) -> Running:
        files = self.folder / f"{next(_numbers)}.command"
        order = {"argv": [str(a) for a in arguments], "cwd": str(cwd), "env": variables, "files": str(files)}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        self._server.stdin.flush()
        return Running(files)

    def __call__(self, *arguments: object, cwd: Path, **variables: str) -> Outcome:
        return self.start(*arguments, cwd=cwd, **variables).end()

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def environment(**variables: str) -> dict[str, str]:
    """The caller's environment, without what would change a run."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("MLFLOW_", "DEEPLIGHTNING_", "PYTEST_"))}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables


def real(*arguments: object, cwd: Path, **variables: str) -> Outcome:
    """The same in a fresh process, as a person starts it."""
    command = [sys.executable, "-m", "deeplightning", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, timeout=LONGEST
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def _serve() -> None:
    import mlflow.tracking  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo  # noqa: F401
    import torchvision.datasets  # noqa: F401

    import deeplightning.predict
    import deeplightning.task.figures
    import deeplightning.task.img_classif  # noqa: F401
    from deeplightning.data import cifar, digits, image_folder, mnist  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children here
    for line in iter(sys.stdin.buffer.readline, b""):
        if os.fork() == 0:
            _watch(json.loads(line))


def _watch(order: dict) -> None:
    """Starts the command, and notes its process and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    files = Path(order["files"])
    child = os.fork()
    if child == 0:
        _run(order, files)
    _note(files.with_suffix(".pid"), child)
    _, status = os.waitpid(child, 0)
    _note(files.with_suffix(".code"), os.waitstatus_to_exitcode(status))
    os._exit(0)


def _note(path: Path, number: int) -> None:
    beside = path.with_suffix(f"{path.suffix}.partial")
    beside.write_text(str(number))
    beside.replace(path)


def _run(order: dict, files: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(os.open(files.with_suffix(".out"), flags), 1)
    os.dup2(os.open(files.with_suffix(".err"), flags), 2)
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[0] = order["cwd"]  # as `python -m` has it
    sys.argv = ["deeplightning", *order["argv"]]
    from deeplightning.cli import main

    code: object = 1
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    _serve()
