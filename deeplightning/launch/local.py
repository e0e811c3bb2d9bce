"""The launcher for this machine: it starts the processes together, supervises them, and restarts all if one is lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import TYPE_CHECKING

from deeplightning.config.machine import local_size
from deeplightning.config.source import compose
from deeplightning.faults import SetupError
from deeplightning.launch.job import Job, Start
from deeplightning.launch.sealed import PREFIX, seal
from deeplightning.own_code import SEALED
from deeplightning.process import failure, member, ranks, shared_folder
from deeplightning.process.identity import identity
from deeplightning.process.streams import INTERRUPTED
from deeplightning.process.terminal import say, say_path
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.environment import git_state
from deeplightning.tracking.store import locate
from deeplightning.tracking.unsent import end_run

if TYPE_CHECKING:
    from torch.distributed import TCPStore

POLL_SECONDS = 0.1
GRACE_SECONDS = ranks.SHUTDOWN_SECONDS + 2 * ranks.EXIT_SECONDS  # for the others to exit after one failed


class Local:
    """Start the processes of a run on this machine.

    When a process is killed, hangs or becomes unreachable, the others end, late ones by force, and all are restarted,
    up to `engine.max_restarts` times: they resume in the same run, from its latest complete checkpoint. An error in the
    config, the data or the code would occur again, so it ends the run with its own exit code, as does a signal. Config
    and code are sealed at the start: later edits do not reach the processes.

    With several machines, run the command on each: it starts the processes of its machine. Lost processes are not
    restarted then.

    Args:
        master_port: the port of the rendezvous; null for any free port. Several machines must use the same port.
        master_addr: the address at which the other machines reach the first one.
        node_rank: the number of this machine, from 0. The environment variables NODE_RANK, MASTER_ADDR and MASTER_PORT
            may set it, the address and the port instead.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self, master_port: int | str | None = None, master_addr: str | None = None, node_rank: int | None = None
    ):
        if master_port is not None and not (str(master_port).isdecimal() and 0 < int(master_port) < 2**16):
            raise ValueError(f"master_port must be from 1 to 65535, not {master_port}")
        self.master_port = None if master_port is None else int(master_port)
        self.master_addr, self.node_rank = master_addr, node_rank
        here = identity()  # in a job that is requeued, the same command resumes its run
        name = f"{here.launch} {sys.argv}" if here is not None and here.launch else secrets.token_hex(8)
        self._launch = f"local-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        self.job_signals: tuple[int, ...] = ()  # of the launcher that started this process; forwarded too
        self._signals: list[signal.Signals] = []
        self._restarts = 0
        self._run_folder: RunFolder | None = None  # set if the run had started before a process ended
        self._children: list[Popen[bytes]] = []
        self._folder = Path()
        self._store: TCPStore | None = None
        self._kill_time: float | None = None  # when to kill the processes that still run

    def plan(self, job: Job) -> list[Start]:
        """Return the commands that `run` would start."""
        size, restarts = local_size(job.cfg.engine), job.cfg.engine.max_restarts
        variables = {"RANK": "*", "LOCAL_RANK": "*", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        port = str(self.master_port or "*")
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "*"}
        again = f", restarted up to {restarts} times after a process was lost" if restarts else ""
        return [Start(_command(job), size, f"this machine{again}", variables)]

    def run(self, job: Job) -> int:
        """Start the processes and supervise them.

        Returns:
            The exit code: 5 if a process was lost and no restart is left, else that of the processes.

        Raises:
            SetupError: the processes cannot be started.
        """
        try:
            top = tempfile.mkdtemp(prefix=PREFIX)  # forked processes remove a TemporaryDirectory too
        except OSError as error:
            raise SetupError(f"the code of this launch cannot be sealed: {error.strerror}: {error.filename}") from error
        try:
            files = compose(job.config, [*job.overrides]).files
            os.environ[SEALED] = str(seal(Path(top, "seal"), files, git=git_state()))
            code = self._supervise(job)
        finally:
            os.environ.pop(SEALED, None)
            shutil.rmtree(top, ignore_errors=True)
        if self._run_folder is not None:
            say_path(self._run_folder.path, "Artifact storage path: ")
        return code

    def _supervise(self, job: Job) -> int:
        """Start the processes, restart them if one is lost, and wait for their end; return the exit code."""
        before = {number: signal.signal(number, self._forward) for number in (*INTERRUPTED, *self.job_signals)}
        try:
            while not self._signals:
                self._start(job)
                if (code := self._wait(job)) is not None:
                    return code
                self._kill_all()
            return INTERRUPTED.get(self._signals[0], 128 + self._signals[0])  # 138 requeues a job of Slurm
        finally:
            self._kill_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal. The processes do not share the terminal's process group, so each gets it once."""
        self._signals.append(signal.Signals(number))
        if len(self._signals) > 1 and number in INTERRUPTED:  # a second one ends them at once; a queue repeats its own
            self._kill_time = time.monotonic() + GRACE_SECONDS
        self._send(number)

    def _send(self, number: int) -> None:
        for child in self._children:
            child.send_signal(number)  # does nothing if the child has ended

    def _start(self, job: Job) -> None:
        """Start all processes, with the variables of torchrun; raise SetupError if the machine has too few resources
        for them, or the port is in use."""
        from torch.distributed import DistError, TCPStore

        size, command = str(local_size(job.cfg.engine)), _command(job)
        self._kill_time, self._store = None, None  # a former store has keys of lost processes, and maybe the port
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=shared_folder.PREFIX))
            # This process keeps the store open, so no other program can take its port.
            self._store = TCPStore("127.0.0.1", self.master_port or 0, is_master=True, wait_for_workers=False)
            shared = {
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size,
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": self._store.host,
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_RUN_ID": self._launch,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
                "TORCHELASTIC_MAX_RESTARTS": str(job.cfg.engine.max_restarts),
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
                member.FOLDER: str(self._folder),
                member.AGENT: str(os.getpid()),
            }
            for rank in range(int(size)):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._children.append(Popen(command, env={**os.environ, **shared, **own}, start_new_session=True))
        except DistError as error:
            raise SetupError(f"port {self.master_port}, for the rendezvous of the processes, is in use") from error
        except OSError as error:
            raise SetupError(f"engine.processes: the processes cannot be started: {error.strerror}") from error
        for number in self._signals[:1]:  # arrived during the start
            self._send(number)

    def _wait(self, job: Job) -> int | None:
        """Wait for all processes to end; return the exit code of the launch, or None to restart them."""
        while True:
            codes = [child.poll() for child in self._children]
            lost = ((r, code) for r, code in enumerate(codes) if code and shared_folder.was_lost(self._folder, r, code))
            failed = sorted((code > 0, rank, code) for rank, code in lost)  # killed processes first
            cause = failure.first_cause(self._folder)
            if cause is None and failed:
                ended = failure.cause_of_exit(*failed[0][1:])
                failure.record_cause(self._folder, ended)
                cause = failure.first_cause(self._folder) or ended
            if None not in codes:
                break
            if cause is not None and self._kill_time is None and cause.exit_code not in INTERRUPTED.values():
                self._kill_time = time.monotonic() + GRACE_SECONDS  # not while a run saves a checkpoint after a signal
            if cause is not None and self._kill_time is not None and time.monotonic() > self._kill_time:
                self._send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        # Once rank 0 has succeeded, the run is complete; processes lost after that do not matter.
        if cause is None or not failed or (cause.lost and codes[0] == 0):
            return 0
        restarts = job.cfg.engine.max_restarts
        if self._signals or not cause.lost or self._restarts == restarts:
            self._report(job, cause, rank_0_was_lost=(codes[0] or 0) < 0)
            return INTERRUPTED.get(self._signals[0], 128 + self._signals[0]) if self._signals else cause.exit_code
        self._restarts += 1
        newest = failure.latest_checkpoint(self._find_run())
        how = f"resumes from {newest}" if newest else "starts again, because there is no checkpoint yet"
        say(job.cfg.redact(f"restart {self._restarts} of {restarts}: {cause}; {how}"), err=True)
        return None

    def _report(self, job: Job, cause: failure.Cause, rank_0_was_lost: bool) -> None:
        """Report why the launch failed, unless one of the processes did."""
        prefix, folder, redact = f"error [{cause.whose}]" if cause.whose else "error", self._find_run(), job.cfg.redact
        if cause.lost and not self._signals:
            restarts = job.cfg.engine.max_restarts
            used = {0: "", 1: "; the restart is used up"}.get(restarts, f"; the {restarts} restarts are used up")
            hint = failure.resume_hint(failure.latest_checkpoint(folder))
            say(redact(f"{prefix}: {cause.reason}{used}{hint}"), err=True)
        elif not (self._folder / failure.REPORTED).exists():
            say(redact(f"{prefix}: {cause.reason}"), err=True)
        if rank_0_was_lost and folder is not None:  # otherwise rank 0 has set the run's status
            tags = {"failure": redact(str(cause))[:1000]}
            tags |= {"restarts": str(self._restarts)} if self._restarts else {}
            with contextlib.suppress(Exception):  # any error of a store: the status is optional
                end_run(locate(job.cfg.logger.params.get("tracking_uri")), folder.path.parent.name, tags)

    def _find_run(self) -> RunFolder | None:
        """Read the path of the run's folder and return the folder; None if the run has not started."""
        with contextlib.suppress(OSError):
            self._run_folder = RunFolder((self._folder / "run").read_text())
        return self._run_folder

    def _kill_all(self) -> None:
        """Kill the processes with all that they started (each leads a process group), and remove the folder."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        self._children = []
        if self._folder.name:
            self._find_run()
            shutil.rmtree(self._folder, ignore_errors=True)


def _command(job: Job) -> list[str]:
    """Return the command of each process; a drawn seed is passed on, so all processes and restarts share it."""
    drawn = any(notice.key == "seed" for notice in job.cfg.notices or [])
    return [*job.command, *([f"seed={job.cfg.seed}"] if drawn else [])]
