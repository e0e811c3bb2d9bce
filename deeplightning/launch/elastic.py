"""Torch's elastic agent (https://docs.pytorch.org/docs/stable/elastic/agent.html), as `Local` uses it.

The agent starts the processes of a machine, each as a command, monitors them and restarts all of them after one was
lost. Ours restarts only after a loss that neither code nor data caused (see `Cause.lost`), and only when all processes
have ended by themselves, as a process does that lost a peer (`deeplightning.process.ranks`). Torch's agent sends
SIGTERM, which a run takes as a person's request to stop.

Overridden are the methods that torch 2.15 documents for this purpose, `_start_workers`, `_monitor_workers` and
`_shutdown` of `SimpleElasticAgent`. `_rendezvous`, `_remaining_restarts`, `_pcontext` and `_worker_group` are used
because nothing public replaces them.
"""

import contextlib
import errno
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from deeplightning.faults import SetupError
from deeplightning.process import failure, ranks, shared_folder, supervisor
from deeplightning.process.agreement import enough_memory
from deeplightning.runfolder import RunFolder

POLL_SECONDS = 0.1
GRACE_SECONDS = ranks.SHUTDOWN_SECONDS + 2 * ranks.EXIT_SECONDS  # for the others to exit when one has failed


def supervise(
    command: list[str],
    processes: int,
    max_restarts: int,
    port: int,
    pauses: Iterable[float],
    report: Callable[[str], None],
) -> tuple[int, "Agent"]:
    """Run a command in several processes and supervise them.

    Args:
        command: the same for each process.
        processes: their number.
        max_restarts: how often all are restarted after one was lost.
        port: of the rendezvous; 0 for any free port.
        pauses: seconds to wait after each failed attempt to start the processes.
        report: prints a line for the user.

    Returns:
        The exit code, and the agent with its details.

    Raises:
        SetupError: the processes cannot be started.
    """
    # Signals are forwarded, once each; the handlers that torch would install end the processes.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    spec = WorkerSpec(
        role="rank",
        local_world_size=processes,
        rdzv_handler=_OneMachine(f"local-{socket.gethostname()}-{secrets.token_hex(8)}", port),
        entrypoint=command[0],
        args=tuple(word.replace("$", "$$") for word in command[1:]),  # torch expands names after a $
        max_restarts=max_restarts,
        monitor_interval=POLL_SECONDS,
    )
    agent = Agent(spec, pauses, report)
    before = {number: signal.signal(number, agent.forward) for number in failure.INTERRUPTED}
    try:
        result = agent.run()
    except _Interrupted:
        return failure.INTERRUPTED[agent.forwarded[0]], agent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if result.state == WorkerState.SUCCEEDED:
        return 0, agent
    assert agent.cause is not None
    return failure.INTERRUPTED[agent.forwarded[0]] if agent.forwarded else agent.cause.exit_code, agent


class _Interrupted(Exception):
    """Raised when a signal arrives while no process runs."""


class Agent(LocalElasticAgent):
    """Supervise the processes of one machine.

    Attributes:
        forwarded: the signals that were forwarded.
        cause: why the processes failed last; None if they did not.
        restarts: how often all were restarted.
        reported: whether one of them printed the cause.
        lost_first: whether rank 0, which reports for the run, was killed before it could.
    """

    def __init__(self, spec: WorkerSpec, pauses: Iterable[float], report: Callable[[str], None]):
        super().__init__(spec, _NoLogs())
        self.forwarded: list[signal.Signals] = []
        self.cause: failure.Cause | None = None
        self.restarts = 0
        self.reported = self.lost_first = False
        self._pauses, self._report = pauses, report
        self._folder: Path | None = None
        self._run: RunFolder | None = None
        self._until: float | None = None  # when processes that still run are killed

    @property
    def run_folder(self) -> RunFolder | None:
        """The run's folder, once the run has begun."""
        if self._run is None and self._folder is not None:
            with contextlib.suppress(OSError):
                self._run = RunFolder((self._folder / "run").read_text())
        return self._run

    @property
    def newest(self) -> Path | None:
        """The latest complete checkpoint."""
        return failure.newest_of(self.run_folder)

    # ---- signals

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal. The processes do not share the terminal's process group, so each gets it once."""
        self.forwarded.append(signal.Signals(number))
        if len(self.forwarded) > 1:  # they end at once
            self._until = time.monotonic() + GRACE_SECONDS
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes():
            if process.poll() is None:
                process.send_signal(number)

    def _processes(self) -> list[Any]:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handlers[rank].proc for rank in sorted(handlers)]

    # ---- methods that torch calls

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        pauses, running = iter(self._pauses), set(psutil.Process().children())
        while True:
            if self.forwarded:
                raise _Interrupted
            self._pcontext, self._until, self.lost_first = None, None, False
            self._folder = Path(tempfile.mkdtemp(prefix=shared_folder.PREFIX))
            os.environ |= {supervisor.FOLDER: str(self._folder), supervisor.AGENT: str(os.getpid())}
            try:
                enough_memory(worker_group.spec.local_world_size)
                started = super()._start_workers(worker_group)
            except (OSError, SetupError) as error:
                self._remove_folder()
                for process in (begun := {*psutil.Process().children()} - running):
                    process.kill()
                psutil.wait_procs(begun)
                if isinstance(error, OSError) and error.errno not in (errno.EAGAIN, errno.ENOMEM):
                    raise SetupError(f"the processes cannot be started: {error.strerror}") from error
                reason = str(error) if isinstance(error, SetupError) else f"engine.processes: {error.strerror}"
                if (pause := next(pauses, None)) is None:
                    raise SetupError(reason) from error
                self._report(f"{reason}; tries again in {pause:g} s")
                time.sleep(pause)
                self._rendezvous(worker_group)  # with a new store: the old one has keys of processes that started
                continue
            for number in self.forwarded[:1]:  # that arrived during the start
                self._send(number)
            return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._folder is not None
        pairs = zip(worker_group.workers, self._processes(), strict=True)
        codes = {worker.global_rank: process.poll() for worker, process in pairs}
        failed = sorted((rank for rank, code in codes.items() if code), key=lambda rank: codes[rank] > 0)
        cause = failure.first_of(self._folder)
        if cause is None and failed:
            ended = failure.end_of(failed[0], codes[failed[0]])
            failure.record_cause(self._folder, ended)
            cause = failure.first_of(self._folder) or ended
        if None in codes.values():
            if cause is not None:
                self._end_late_ones(cause)
            return RunResult(WorkerState.HEALTHY)
        # Once rank 0 has succeeded, the run is complete; processes lost after that do not matter.
        if not failed or (cause is not None and cause.lost and codes.get(0) == 0):
            self._clean()
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))
        self.cause, self.reported = cause, (self._folder / failure.REPORTED).exists()
        self.lost_first = (codes.get(0) or 0) < 0
        if cause is None or not cause.lost or self.forwarded:
            self._remaining_restarts = 0
        elif self._remaining_restarts > 0:
            self._report_restart(cause)
        self._clean()
        return RunResult(WorkerState.FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._clean()

    # ---- the end of the processes

    def _end_late_ones(self, cause: failure.Cause) -> None:
        """Kill processes that exceed the time limit, except while a run saves after a signal."""
        if self._until is None:
            if cause.exit_code in failure.INTERRUPTED.values():
                return
            self._until = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > self._until:
            for process in self._processes():
                if process.poll() is None:
                    process.kill()

    def _report_restart(self, cause: failure.Cause) -> None:
        self.restarts += 1
        newest = self.newest
        how = f"resumes from {newest}" if newest else "starts again, there is no checkpoint yet"
        self._report(f"restart {self.restarts} of {self._worker_group.spec.max_restarts}: {cause}; {how}")

    def _clean(self) -> None:
        """Kill all that the processes started, which are in process groups of their own, and remove the folder."""
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._remove_folder()

    def _remove_folder(self) -> None:
        _ = self.run_folder  # reads and keeps the path
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class _OneMachine(RendezvousHandler):
    """Rendezvous on one machine, at a store that the agent keeps; each start of the processes gets a new one.

    The store listens on any free port, and no other program can take it meanwhile.
    """

    def __init__(self, launch: str, port: int = 0):
        self._launch, self._port = launch, port
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None
        address = "127.0.0.1"
        try:
            self._store = TCPStore(address, self._port, is_master=True, wait_for_workers=False)
        except DistError as error:
            raise SetupError(f"port {self._port}, at which the processes are to meet, is in use") from error
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(address, self._store.port))

    def get_backend(self) -> str:
        return "deeplightning"

    def get_run_id(self) -> str:
        return self._launch

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Ignore the state, which is never read."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._store = None
        return True


class _NoLogs(LogsSpecs):
    """Let the processes write to the agent's own streams; torch's default redirects them to files."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(nowhere, nowhere, {}, {}, dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return os.devnull
