"""Start a process of a run on a worker, and forward its output.

Ray creates an actor of the class. It does not import torch, because its process does not train.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deeplightning.launch.sealed import PREFIX, seal
from deeplightning.process import failure, member, shared_folder
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.code import Code
from deeplightning.version import __version__

DRAIN_SECONDS = 1.0  # for output after the end of a process, whose children may keep the pipe open

WORKER = ("-P", "-m", "deeplightning_ray.worker")
"""Arguments of Python for a process; with -P its working directory is not first on `sys.path`."""

_DROPPED_PREFIXES = ("RAY_", "DEEPLIGHTNING_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_")
_RANK_VARS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")


@dataclass(frozen=True)
class Report:
    """State of a worker's process.

    Attributes:
        parts: its output since the last call, each with 1 (stdout) or 2 (stderr).
        code: its exit code, or the negative number of the signal that killed it; None while it runs.
        run: the run's folder, or None before it exists.
        newest: the latest complete checkpoint in that folder, once the process has ended.
        cause: why the processes of this machine failed, once this one has ended; None if they did not.
        reported: whether one of them has printed the cause.
    """

    parts: list[tuple[int, bytes]] = field(default_factory=list)
    code: int | None = None
    run: str | None = None
    newest: Path | None = None
    cause: failure.Cause | None = None
    reported: bool = False


class Agent:
    """Start one process, and report on it."""

    def __init__(self) -> None:
        self._output: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._child: subprocess.Popen | None = None
        self._readers: list[threading.Thread] = []
        self._ended: float | None = None
        self._unpacked: tempfile.TemporaryDirectory | None = None
        self._folder = Path()
        self._rank = 0

    def about(self, folders: Mapping[str, int]) -> dict[str, Any]:
        """Return properties of this worker that the launch needs.

        Args:
            folders: folder on the launching machine → its inode number.

        Returns:
            `host`, `version`, `python`; a free `port`; `shared`: the folders that are the same here.
        """
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        shared = []
        for folder, inode in folders.items():
            with contextlib.suppress(OSError):
                if os.stat(folder).st_ino == inode:  # noqa: PTH116
                    shared.append(folder)
        python = platform.python_version()
        return {"host": socket.gethostname(), "version": __version__, "python": python, "port": port, "shared": shared}

    def unpack(self, code: Code, shared: Sequence[str], git: Mapping[str, str | None] | None = None) -> str:
        """Write the frozen code of a launch to this machine; return its folder.

        Args:
            shared: folders of the launching machine that this one shares; see `about`.
            git: see `deeplightning.launch.sealed.seal`.
        """
        self._unpacked = tempfile.TemporaryDirectory(prefix=PREFIX)
        folder = Path(self._unpacked.name) / "seal"
        return str(seal(folder, code=code, linked=shared, git=git))

    def begin(self, job: bytes, environment: Mapping[str, str], folder: str, folder_name: str) -> str | None:
        """Start the process.

        Args:
            job: a packed `WorkerJob`, for its standard input.
            environment: additional variables for it.
            folder: its working directory, created if it is missing.
            folder_name: name of the folder shared by the processes of a machine, see `process.shared_folder`.

        Returns:
            The reason why it could not start, or None.
        """
        env = {n: v for n, v in os.environ.items() if not n.startswith(_DROPPED_PREFIXES) and n not in _RANK_VARS}
        self._folder = Path(tempfile.gettempdir()) / f"{shared_folder.PREFIX}{folder_name}"
        self._rank = int(environment["RANK"])
        env |= {**environment, member.AGENT: str(os.getpid()), member.FOLDER: str(self._folder)}
        command = [sys.executable, *WORKER]
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            Path(folder).mkdir(parents=True, exist_ok=True)
            pipe = subprocess.PIPE
            options: Any = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "start_new_session": True}
            self._child = subprocess.Popen(command, cwd=folder, env=env, **options)
        except OSError as error:
            return f"{error.filename or folder}: {error.strerror}"
        for number, stream in ((1, self._child.stdout), (2, self._child.stderr)):
            reader = threading.Thread(target=self._read, args=(number, stream), daemon=True)
            reader.start()
            self._readers.append(reader)
        self._write(job)
        return None

    def _read(self, number: int, stream: IO[bytes]) -> None:
        while part := os.read(stream.fileno(), 65536):
            self._output.put((number, part))

    def _write(self, content: bytes) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its report follows
            self._child.stdin.write(content)
            self._child.stdin.flush()

    def report(self, seconds: float) -> Report:
        """Wait for output or the end of the process, at most `seconds`."""
        assert self._child is not None
        until, parts = time.monotonic() + seconds, list[tuple[int, bytes]]()
        while True:
            with contextlib.suppress(queue.Empty):
                parts.append(self._output.get(timeout=0 if parts else 0.05))
                continue
            if self._child.poll() is not None:
                self._ended = self._ended or time.monotonic()
                all_read = not any(reader.is_alive() for reader in self._readers) and self._output.empty()
                if all_read or time.monotonic() > self._ended + DRAIN_SECONDS:
                    return self._final_report(parts, self._child.returncode)
            elif parts or time.monotonic() > until:
                return Report(parts, run=self._run_folder())

    def _run_folder(self) -> str | None:
        with contextlib.suppress(OSError):
            return (self._folder / "run").read_text()
        return None

    def _final_report(self, parts: list[tuple[int, bytes]], code: int) -> Report:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)  # its remaining children
        if code and failure.first_cause(self._folder) is None:
            failure.record_cause(self._folder, failure.cause_of_exit(self._rank, code))
        run = self._run_folder()
        newest = failure.latest_checkpoint(RunFolder(run) if run else None)
        reported = (self._folder / failure.REPORTED).exists()
        return Report(parts, code, run, newest, failure.first_cause(self._folder), reported)

    def clean_up(self) -> None:
        """Remove the files of the process and of this agent."""
        if self._folder.name:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._unpacked is not None:
            self._unpacked.cleanup()

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.Signals(number))

    def make_room(self) -> None:
        """Notify the process that more workers can join; see `deeplightning_ray.ray_elastic`."""
        self._write(b"room")
