"""The launcher for this machine: it starts the processes together, supervises them, and restarts all if one is lost."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import TYPE_CHECKING

from deeplightning.config.source import compose
from deeplightning.engine.plan import local_size
from deeplightning.faults import SetupError
from deeplightning.launch.job import Job, Start
from deeplightning.launch.sealed import sealed_meanwhile
from deeplightning.process import failure, ranks, shared_folder
from deeplightning.process.terminal import say, say_path
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.environment import git_state
from deeplightning.tracking.store import locate
from deeplightning.tracking.unsent import end_run

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.1
GRACE_SECONDS = ranks.SHUTDOWN_SECONDS + 2 * ranks.EXIT_SECONDS  # for the others to exit when one has failed


class Local:
    """Start the processes of a run on this machine.

    When a process is killed, hangs or becomes unreachable, the others end and all are restarted, up to
    `engine.max_restarts` times: they resume in the same run, from its latest complete checkpoint. An error in the
    config, the data or the code would occur again, so it ends the run with its own exit code, as does a signal. Config
    and code are sealed at the start: later edits do not reach the processes.

    With several machines, run the command on each: it starts the processes of its machine. A lost process is not
    restarted there.

    Args:
        master_port: the port of the rendezvous; null for any free port. Several machines must use the same.
        master_addr: the address at which the other machines reach the first.
        node_rank: the number of this machine, from 0. It, the address and the port may also be set as environment
            variables, NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        master_port: int | str | None = None,
        master_addr: str | None = None,
        node_rank: int | None = None,
    ):
        if master_port is not None and not (str(master_port).isdecimal() and 0 < int(master_port) < 2**16):
            raise ValueError(f"master_port must be from 1 to 65535, not {master_port}")
        self.master_port = None if master_port is None else int(master_port)
        self.master_addr, self.node_rank = master_addr, node_rank

    def plan(self, job: Job) -> list[Start]:
        """Return what `run` would start."""
        size, restarts = local_size(job.cfg.engine), job.cfg.engine.max_restarts
        variables = {"RANK": "*", "LOCAL_RANK": "*", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        port = str(self.master_port or "*")
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "*"}
        again = f", again up to {restarts} times after a process was lost" if restarts else ""
        return [Start(_command(job), size, f"this machine{again}", variables)]

    def run(self, job: Job) -> int:
        """Start the processes and supervise them.

        Returns:
            The exit code: 5 if a process was lost and no restart is left, else that of the processes.

        Raises:
            SetupError: the processes cannot be started.
        """
        restarts, redact = job.cfg.engine.max_restarts, job.cfg.redact

        def report(line: str) -> None:
            say(redact(line), err=True)

        command, size = _command(job), local_size(job.cfg.engine)
        processes = Processes(command, size, restarts, self.master_port or 0, report)
        with sealed_meanwhile(compose(job.config, [*job.overrides]).files, git_state()):
            code = processes.run()
        folder, cause = processes.run_folder, processes.cause
        if code != 0 and cause is not None:
            word = f"error [{cause.whose}]" if cause.whose else "error"
            if cause.lost and not processes.forwarded:
                used = {0: "", 1: "; the restart is used up"}.get(restarts, f"; the {restarts} restarts are used up")
                report(f"{word}: {cause.reason}{used}{failure.resume_hint(failure.newest_of(folder))}")
            elif not processes.reported:
                report(f"{word}: {cause.reason}")
            if processes.lost_first and folder is not None:  # else rank 0 did so
                tags = {"failure": redact(str(cause))[:1000]}
                tags |= {"restarts": str(processes.restarts)} if processes.restarts else {}
                with contextlib.suppress(Exception):  # any error of a store: the mark is optional
                    end_run(locate(job.cfg.logger.params.get("tracking_uri")), folder.path.parent.name, tags)
        if folder is not None:
            say_path(folder.path, "Artifact storage path: ")
        return code


def _command(job: Job) -> list[str]:
    """Return the command of each process; a drawn seed is passed on, so all processes and restarts share it."""
    drawn = any(notice.key == "seed" for notice in job.cfg.notices or [])
    return [*job.command, *([f"seed={job.cfg.seed}"] if drawn else [])]


@dataclass(eq=False)
class Processes:
    """Run a command in several processes of this machine, and restart all of them after one was lost.

    A process is lost if neither code nor data caused its end (see `Cause.lost`). The others then end by themselves (see
    `deeplightning.process.ranks`); those that do not are killed. The processes get the variables of torchrun.

    Args:
        command: the same for each process.
        number: of processes.
        max_restarts: how often all are restarted.
        port: of the rendezvous; 0 for any free port.
        report: prints a line for the user.

    Attributes:
        forwarded: the signals that were forwarded.
        cause: why the processes failed last; None if they did not.
        restarts: how often all were restarted.
        reported: whether one of them printed the cause.
        lost_first: whether rank 0, which reports for the run, was killed before it could.
        run_folder: the run's folder, if the run had begun before a process ended.
    """

    command: list[str]
    number: int
    max_restarts: int
    port: int
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        self.forwarded: list[signal.Signals] = []
        self.cause: failure.Cause | None = None
        self.restarts = 0
        self.reported = self.lost_first = False
        self.run_folder: RunFolder | None = None
        self._launch = f"local-{socket.gethostname()}-{secrets.token_hex(8)}"
        self._children: list[Popen[bytes]] = []
        self._folder = Path()
        self._store: TCPStore | None = None
        self._until: float | None = None  # when processes that still run are killed

    def run(self) -> int:
        """Start the processes and wait for their end; return the exit code.

        Raises:
            SetupError: the processes cannot be started.
        """
        before = {number: signal.signal(number, self._forward) for number in failure.INTERRUPTED}
        try:
            while not self.forwarded:
                self._start()
                if (code := self._wait()) is not None:
                    return code
                self._clean()
            return failure.INTERRUPTED[self.forwarded[0]]
        finally:
            self._clean()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal. The processes do not share the terminal's process group, so each gets it once."""
        self.forwarded.append(signal.Signals(number))
        if len(self.forwarded) > 1:  # they end at once
            self._until = time.monotonic() + GRACE_SECONDS
        self._send(number)

    def _send(self, number: int) -> None:
        for child in self._children:
            child.send_signal(number)  # which does nothing once it has ended

    def _start(self) -> None:
        """Start all processes.

        Raises:
            SetupError: the machine has no room for them, or the port is in use.
        """
        self._until, self._store = None, None  # the former store has keys of lost processes, and maybe the port
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=shared_folder.PREFIX))
            self._start_all()
        except OSError as error:
            raise SetupError(f"engine.processes: the processes cannot be started: {error.strerror}") from error
        for number in self.forwarded[:1]:  # that arrived during the start
            self._send(number)

    def _start_all(self) -> None:
        from torch.distributed import DistError, TCPStore

        try:
            # The store stays here, so that no other program takes its port.
            self._store = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        except DistError as error:
            raise SetupError(f"port {self.port}, at which the processes are to meet, is in use") from error
        shared = {
            "WORLD_SIZE": str(self.number),
            "LOCAL_WORLD_SIZE": str(self.number),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": self._store.host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": self._launch,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ranks.FOLDER: str(self._folder),
            ranks.AGENT: str(os.getpid()),
        }
        for rank in range(self.number):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._children.append(Popen(self.command, env={**os.environ, **shared, **own}, start_new_session=True))

    def _wait(self) -> int | None:
        """Wait until all processes have ended; return the exit code of the launch, or None to restart them."""
        while True:
            codes = [child.poll() for child in self._children]
            lost = ((r, code) for r, code in enumerate(codes) if code and shared_folder.was_lost(self._folder, r, code))
            failed = sorted((code > 0, rank, code) for rank, code in lost)  # first those killed
            cause = failure.first_of(self._folder)
            if cause is None and failed:
                ended = failure.end_of(*failed[0][1:])
                failure.record_cause(self._folder, ended)
                cause = failure.first_of(self._folder) or ended
            if None not in codes:
                break
            if cause is not None:
                self._end_late_ones(cause)
            time.sleep(POLL_SECONDS)
        # Once rank 0 has succeeded, the run is complete; processes lost after that do not matter.
        if cause is None or not failed or (cause.lost and codes[0] == 0):
            return 0
        self.cause, self.reported = cause, (self._folder / failure.REPORTED).exists()
        self.lost_first = (codes[0] or 0) < 0
        if self.forwarded:
            return failure.INTERRUPTED[self.forwarded[0]]
        if not cause.lost or self.restarts == self.max_restarts:
            return cause.exit_code
        self.restarts += 1
        newest = failure.newest_of(self._note_run())
        how = f"resumes from {newest}" if newest else "starts again, there is no checkpoint yet"
        self.report(f"restart {self.restarts} of {self.max_restarts}: {cause}; {how}")
        return None

    def _end_late_ones(self, cause: failure.Cause) -> None:
        """Kill processes that exceed the time limit, except while a run saves after a signal."""
        if self._until is None and cause.exit_code not in failure.INTERRUPTED.values():
            self._until = time.monotonic() + GRACE_SECONDS
        if self._until is not None and time.monotonic() > self._until:
            self._send(signal.SIGKILL)

    def _note_run(self) -> RunFolder | None:
        """Return the run's folder, and keep it; None if the run has not begun."""
        with contextlib.suppress(OSError):
            self.run_folder = RunFolder((self._folder / "run").read_text())
        return self.run_folder

    def _clean(self) -> None:
        """Kill all that the processes started, which are in process groups of their own, and remove the folder."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self._children = []
        if self._folder.name:
            self._note_run()
            shutil.rmtree(self._folder, ignore_errors=True)
