"""Run `deeplightning` so that the processes that `deeplightning.launch.Local` starts are forks of it.

A fork has everything imported; a new process spends five seconds of CPU on imports. The launcher is real, as are the
environment, sessions, signals and exit codes of its processes; only `python -m deeplightning` is called in a fork.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import end_with


class Forked:
    """Replace `subprocess.Popen` for a launcher.

    If REFUSES names a file, the first start of rank 1 fails, after rank 0 has written to the rendezvous store.
    """

    def __init__(self, args: Sequence[str], env: dict[str, str], **_: Any):
        assert [*args[1:3]] == ["-m", "deeplightning"]
        self.returncode: int | None = None
        refuses = Path(env.get("REFUSES", "/nonexistent"))
        if env["RANK"] == "1" and refuses.exists():
            refuses.unlink()
            _wait_for_a_key(int(env["MASTER_PORT"]))
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.pid = os.fork()
        if self.pid == 0:
            become(args[3:], env)

    def poll(self) -> int | None:
        return self._ask(os.WNOHANG)

    def wait(self) -> int | None:
        return self._ask(0)

    def _ask(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _wait_for_a_key(port: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False)
    keys, end = store.num_keys(), time.monotonic() + 60
    while store.num_keys() <= keys and time.monotonic() < end:
        time.sleep(0.05)


def become(argv: Sequence[str], env: dict[str, str]) -> None:
    """Run `deeplightning ARGV` in this fork, and exit with its exit code."""
    from deeplightning import cli

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["deeplightning", *argv]
    for name, module in list(sys.modules.items()):  # user code is imported again
        if str(getattr(module, "__file__", None)).startswith(f"{Path.cwd()}{os.sep}"):
            del sys.modules[name]
    end_with(cli.main)


def main() -> None:
    """Run the command with forked ranks, instead of `deeplightning.cli:main`."""
    from deeplightning import cli
    from deeplightning.launch import local

    local.Popen = Forked
    cli.main()
