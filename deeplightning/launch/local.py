"""The launcher for this machine: it starts the processes together, supervises them, and restarts all if one is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from deeplightning.config.source import compose
from deeplightning.engine.plan import local_size
from deeplightning.launch.backoff import Backoff
from deeplightning.launch.job import Job, Start
from deeplightning.launch.sealed import sealed_meanwhile
from deeplightning.process.terminal import say, say_path
from deeplightning.runfolder import RunFolder
from deeplightning.tracking.environment import git_answers


class Local:
    """Start the processes of a run on this machine, with torch's elastic agent.

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
        backoff: how to retry if the machine has no room for the processes: wait `base_s` seconds, then `factor` times
            as long each time, for `max_tries` tries; null for 1 s, 2 and 10.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        master_port: int | str | None = None,
        backoff: Mapping[str, float] | None = None,
        master_addr: str | None = None,
        node_rank: int | None = None,
    ):
        if master_port is not None and not (str(master_port).isdecimal() and 0 < int(master_port) < 2**16):
            raise ValueError(f"master_port must be from 1 to 65535, not {master_port}")
        self.master_port = None if master_port is None else int(master_port)
        self.master_addr, self.node_rank = master_addr, node_rank
        self.backoff = Backoff(backoff)

    def plan(self, job: Job) -> list[Start]:
        """Return what `run` would start."""
        size, restarts = local_size(job.cfg.engine), job.cfg.engine.max_restarts
        port = "*" if self.master_port is None else str(self.master_port)
        variables = {"RANK": "*", "LOCAL_RANK": "*", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
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
        from deeplightning.launch.elastic import supervise

        restarts, redact = job.cfg.engine.max_restarts, job.cfg.redact

        def report(line: str) -> None:
            say(redact(line), err=True)

        command, size = _command(job), local_size(job.cfg.engine)
        with sealed_meanwhile(compose(job.config, [*job.overrides]).files, git_answers(redact)):
            code, agent = supervise(command, size, restarts, self.master_port or 0, self.backoff, report)
        if code != 0 and agent.cause is not None:
            self._report_end(job, agent, report)
        if agent.run_folder is not None:
            say_path(agent.run_folder.path, "Artifact storage path: ")
        return code

    def _report_end(self, job: Job, agent: Any, report: Callable[[str], None]) -> None:
        """Report why the processes ended, if none of them did."""
        from deeplightning.process import failure

        restarts, redact, cause = job.cfg.engine.max_restarts, job.cfg.redact, agent.cause
        assert cause is not None
        word = f"error [{cause.whose}]" if cause.whose else "error"
        if cause.lost and not agent.forwarded:
            used = {0: "", 1: "; the restart is used up"}.get(restarts, f"; the {restarts} restarts are used up")
            report(f"{word}: {cause.reason}{used}{failure.resume_hint(agent.newest)}")
        elif not agent.reported:
            report(f"{word}: {cause.reason}")
        if agent.lost_first and agent.run_folder is not None:  # else rank 0 did so
            tags = {"failure": redact(str(cause))[:1000], "restarts": str(agent.restarts)}
            _end_run(job, agent.run_folder, {name: value for name, value in tags.items() if value != "0"})


def _end_run(job: Job, folder: RunFolder, tags: dict[str, str]) -> None:
    """Mark a run as failed if the process that would do so was killed."""
    import time

    from deeplightning.tracking.open import open_tracker
    from deeplightning.tracking.store import locate
    from deeplightning.tracking.tracker import Batch

    store, run_id = locate(job.cfg.logger.params.get("tracking_uri")), folder.path.parent.name
    with contextlib.suppress(Exception):  # any error of a store: the mark is optional
        tracker = open_tracker(store, run_id)
        if tracker.run(run_id) is not None:
            ended = ("FAILED", time.time_ns() // 1_000_000)
            tracker.log_batch(run_id, Batch(tags=tags, status=ended))
        tracker.close()


def _command(job: Job) -> list[str]:
    """Return the command of each process; a drawn seed is passed on, so all processes and restarts share it."""
    drawn = any(notice.key == "seed" for notice in job.cfg.notices or [])
    return [*job.command, *([f"seed={job.cfg.seed}"] if drawn else [])]
