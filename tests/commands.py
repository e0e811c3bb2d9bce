"""Run `deeplightning VERB` in processes forked from one that has imported everything.

A new process spends four seconds on imports, a fork some milliseconds. Everything else is the same: `sys.argv`, working
directory, environment, signals, unbuffered output, `atexit`, and the exit code.

A job of several ranks is one fork per rank, with the environment variables that a launcher would set.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import itertools
import json
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

LIMIT_SECONDS = 300  # a command takes less than 30 on an idle machine with warm compiler caches
MAIN = "deeplightning.cli:main"
DEEPSPEED = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "setuptools",
    "distutils.ccompiler",  # after setuptools, which replaces distutils
    "torch._subclasses.schema_check_mode",
)
"""What to preload for DeepSpeed: a third of a tiny training's CPU time."""
POLL_SECONDS = 0.02  # between two reads of a process's output

_LATER = (  # modules that our code and the libraries import inside functions
    "alembic.command",
    "alembic.config",
    "deeplightning_ray.launcher",
    "deeplightning_slurm.launcher",
    "matplotlib.figure",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "networkx",
    "omegaconf.grammar_parser",
    "onnxscript.function_libs.torch_lib.ops",
    "sqlalchemy.dialects.sqlite",
    "sympy.tensor.tensor",
    "torch._inductor.compiler_bisector",
    "torch.export._trace",
    "torch.export._unlift",
    "torch.onnx._internal.exporter._compat",
    "torch.fx.experimental.validator",
    "torch.utils.serialization.config",
)

_numbers = itertools.count()


@dataclass
class Outcome:
    """Exit code and output of a command.

    Attributes:
        ranks: the outcome of each process of a job; this outcome is that of the first.
    """

    code: int
    out: str
    err: str
    ranks: list["Outcome"] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Folder of the run: the last line on stdout."""
        last = self.out.splitlines()[-1]
        assert last.startswith("Artifact storage path: /"), str(self)
        return Path(last.removeprefix("Artifact storage path: "))

    def __str__(self) -> str:
        ranks = [f"rank {number}: {outcome}" for number, outcome in enumerate(self.ranks[1:], start=1)]
        return "\n".join([f"exit code {self.code}\n{self.out}\n{self.err}", *ranks])


class Running:
    """Started command. The files `files` + `.out`, `.err`, `.pid`, `.code` have output, process id and exit code.

    Attributes:
        ranks: the processes of a job; the first represents all.
    """

    def __init__(self, files: Path, others: Sequence[Path] = ()):
        self.files = files
        self.ranks = [self, *(Running(path) for path in others)]

    def _wait(self, happened, what: str):
        try:
            return wait_for(happened, what)
        except AssertionError as late:
            output = "\n".join(f"{rank._read('out')}\n{rank._read('err')}" for rank in self.ranks)
            self._kill()
            raise AssertionError(f"{late}:\n{output}") from None

    def _kill(self) -> None:
        for rank in self.ranks:
            if rank._read("pid") and not rank._read("code"):
                os.kill(int(rank._read("pid")), signal.SIGKILL)

    def _read(self, what: str) -> str:
        path = self.files.with_suffix(f".{what}")
        return path.read_text() if path.exists() else ""

    def says(self, text: str, where: str = "out") -> str:
        """Wait until the output contains a text; return the whole output."""
        return self._wait(lambda: (found := self._read(where)) and text in found and found, repr(text))

    def signal(self, number: int, rank: int = 0) -> None:
        os.kill(int(self._wait(lambda: self.ranks[rank]._read("pid"), "its start")), number)

    def ended(self, seconds: float) -> bool:
        """Return whether all its processes end within `seconds`."""
        end = time.monotonic() + seconds
        while not (over := all(rank._read("code") for rank in self.ranks)) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return over

    def processes(self) -> list[int]:
        """Return the ids of the processes that have not ended."""
        self._wait(lambda: all(rank._read("pid") for rank in self.ranks), "its start")
        return [int(rank._read("pid")) for rank in self.ranks if not rank._read("code")]

    def end(self, code: int | None = None) -> Outcome:
        """Wait until all its processes have ended; `code` is the expected exit code of all."""
        self._wait(lambda: all(rank._read("code") for rank in self.ranks), "its end")
        ended = [Outcome(int(rank._read("code")), rank._read("out"), rank._read("err")) for rank in self.ranks]
        missing = re.fullmatch(r"error: `(\w+)` is a plug-in: pip install .*\n", ended[0].err)
        if missing and importlib.util.find_spec(f"deeplightning_{missing[1]}") is None:
            import pytest  # imported lazily: the server does not need it

            pytest.skip(f"the plug-in `{missing[1]}` is not installed")
        if len(ended) > 1:
            ended[0].ranks = ended
        assert code is None or {code} == {each.code for each in ended}, ended[0]
        return ended[0]


class Commands:
    """Start commands, whose stdout and stderr go to files in `folder`.

    Args:
        orders: pipe of the server, which processes share; the first one starts it, and it ends after the last.
        parent: start the server as a fork of this one's; None: as a new process.
        preload: additional modules that the server imports.
    """

    def __init__(self, folder: Path, orders: Path, parent: "Commands | None" = None, preload: Sequence[str] = ()):
        self.folder = folder
        self._state = {name: os.environ[name] for name in ("XDG_STATE_HOME",) if name in os.environ}
        with orders.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                pipe = os.open(orders, os.O_WRONLY | os.O_NONBLOCK)  # fails unless there is a server
            except OSError:
                orders.unlink(missing_ok=True)
                os.mkfifo(orders)
                reader = os.open(orders, os.O_RDONLY | os.O_NONBLOCK)
                pipe = os.open(orders, os.O_WRONLY)
                if parent is None:
                    os.set_blocking(reader, True)
                    subprocess.run([sys.executable, __file__], stdin=reader, env=environment(), check=True)
                else:
                    parent._send({"orders": str(orders), "preload": preload})
                    wait_for((started := orders.with_suffix(".started")).exists, "a server")
                    started.unlink()
                os.close(reader)
        os.set_blocking(pipe, True)
        self._orders = os.fdopen(pipe, "wb")

    def start(self, *arguments: object, cwd: Path, ranks: int = 1, main: str = MAIN, **variables: str) -> Running:
        """Start a command in one process per rank, so that Lightning starts none itself.

        Args:
            main: MODULE:FUNCTION to call instead of `deeplightning`; the module may be one of the tests.
        """
        name = f"{os.getpid()}-{next(_numbers)}.command"  # forks of this process continue from the same number
        files = [self.folder / (f"rank{rank}-{name}" if rank else name) for rank in range(ranks)]
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
        for rank, path in enumerate(files):
            own = job | {"LOCAL_RANK": str(rank)} if ranks > 1 else {}
            order = {"main": main, "argv": [str(a) for a in arguments], "cwd": str(cwd), "files": str(path)}
            order["env"] = self._state | own | variables
            self._send(order)
        return Running(files[0], files[1:])

    def _send(self, order: dict) -> None:
        fcntl.flock(self._orders, fcntl.LOCK_EX)  # a long line is written in parts
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()
        fcntl.flock(self._orders, fcntl.LOCK_UN)

    def __call__(self, *arguments: object, cwd: Path, code: int | None = None, **options: Any) -> Outcome:
        """Run a command; `code` is the expected exit code of all its processes."""
        return self.start(*arguments, cwd=cwd, **options).end(code)

    def close(self) -> None:
        self._orders.close()


class Forking(Commands):
    """Start commands as forks of this process, which has called `import_all`."""

    def __init__(self, folder: Path):
        self.folder, self._state = folder, {}

    def _send(self, order: dict) -> None:
        if os.fork() == 0:
            _watch(order)


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of this process without variables that would change a run."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("MLFLOW_", "DEEPLIGHTNING_", "PYTEST_"))}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DEEPLIGHTNING_CACHE": "off"} | variables


def free_port() -> str:
    """Return a free port of loopback, as an environment variable's value."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return str(made.getsockname()[1])


def wait_for(happened: Callable[[], Any], what: str, seconds: float | None = None) -> Any:
    """Poll `happened()` until its result is true; return it. The default limit is LIMIT_SECONDS."""
    end = time.monotonic() + (LIMIT_SECONDS if seconds is None else seconds)
    while not (found := happened()):
        assert time.monotonic() < end, f"timed out waiting for {what}"
        time.sleep(POLL_SECONDS)
    return found


def answer_of(server: "subprocess.Popen[bytes]", address: str, seconds: float = 120) -> bytes:
    """Poll an address of a server that was just started; return the body of the first answer."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return answer.read()
        except OSError:
            assert server.poll() is None, f"the server of {address} has ended"
            assert time.monotonic() < end, f"nothing answers at {address}"
            time.sleep(0.1)


def read_terminal(leader: int) -> bytes:
    """Read a pseudo-terminal until its other end is closed, then close this end."""
    shown = b""
    with contextlib.suppress(OSError):  # end of file of a pseudo-terminal on Linux
        while part := os.read(leader, 10_000):
            shown += part
    os.close(leader)
    return shown


def real(
    *arguments: object, cwd: Path, code: int | None = None, limit: float = LIMIT_SECONDS, **variables: str
) -> Outcome:
    """Run a command in a new process, as a user starts it.

    Args:
        code: the expected exit code.
        limit: seconds after which it and every process that it has started are killed.

    Raises:
        AssertionError: it timed out, or has another exit code.
    """
    command = [sys.executable, "-m", "deeplightning", *map(str, arguments)]
    # Files, because a process that outlives its parent would keep a pipe open and block the reader.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        env = environment(**variables)
        child = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            ended: int | None = child.wait(limit)
        except BaseException as stopped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            ended = None
        for file in (out, err):
            file.seek(0)
        outcome = Outcome(-1 if ended is None else ended, out.read(), err.read())
    assert ended is not None, f"not ended after {limit:.0f} s: {outcome}"
    assert code in (None, ended), outcome
    return outcome


def python(*words: object, cwd: Path | None = None, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run Python in a new process that imports the package of this clone."""
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = environment(PYTHONPATH=os.pathsep.join(paths), **variables)
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def import_all(preload: Sequence[str]) -> None:
    """Import what every command needs and the given modules, and freeze all objects for the garbage collector.

    Otherwise each collection in a fork copies every page of the imported modules, which doubles the training time.
    """
    import mlflow.tracking  # noqa: F401
    import sklearn.datasets.data  # noqa: F401
    import sqlalchemy.orm
    import torch._dynamo  # noqa: F401
    import torchvision.datasets  # noqa: F401

    import deeplightning

    own = [module.name for module in pkgutil.walk_packages(deeplightning.__path__, "deeplightning.")]
    for name in (*own, *_LATER, *preload):
        with contextlib.suppress(ImportError):  # missing in other versions, which only costs time
            __import__(name)
    sqlalchemy.orm.configure_mappers()  # half a second in each training otherwise
    gc.collect()
    gc.freeze()


def _serve(orders: BinaryIO, preload: Sequence[str] = ()) -> None:
    import_all(preload)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child becomes a zombie
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup, pytest outlives its terminal
    for line in iter(orders.readline, b""):
        if os.fork() == 0:
            order = json.loads(line)
            if "preload" in order:
                with Path(order["orders"]).open("rb") as others:
                    Path(order["orders"]).with_suffix(".started").touch()
                    _serve(others, order["preload"])
            _watch(order)
    os._exit(0)  # Triton's bindings print a page about objects that still exist at exit


def _watch(order: dict) -> None:
    """Start the command; record its process id and its exit code."""
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    sys.path[0:1] = []  # as for `deeplightning` and `python -m deeplightning`
    if order["main"] != MAIN:
        tests = Path(__file__).parent
        sys.path += map(str, [tests, tests / "unit", tests / "runs", *tests.parent.glob("plugins/*/tests")])
    sys.argv = ["deeplightning", *order["argv"]]
    module, _, function = order["main"].partition(":")
    end_with(lambda: getattr(importlib.import_module(module), function)())


def end_with(call: Callable[[], object]) -> None:
    """Call a function, and end this fork like a new process, with the function's exit code."""
    code: object = 1
    try:
        call()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.last_value = error  # as the interpreter does
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__" and os.fork() == 0:  # the server outlives the process that started it
    _serve(sys.stdin.buffer)
