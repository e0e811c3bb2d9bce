"""Processes on this machine: started together, looked after, and started again where one was lost."""

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
    """Starts the processes of a run on this machine, by torch's elastic agent.

    When a process is killed, hangs, or can no longer be reached, the others end, and all are restarted, up to
    `engine.max_restarts` times: they resume in the same run, from its latest complete checkpoint. A fault of the
    config, the data or the code would happen again; it ends the run with its own exit code, and so does a signal.
    Config and code are sealed at the start: an edit reaches no process.

    Of several machines it starts the processes of the one where the command is given, on each; a lost process is not
    started again there.

    Args:
        master_port: where the processes meet; null: any port that is free. Of several machines all have the same.
        master_addr: the address of the first of several machines, at which the others reach it.
        node_rank: which of several machines this is, from 0. Both, and the port, may stand in the environment as well,
            as MASTER_ADDR, NODE_RANK and MASTER_PORT.
        backoff: how to wait where the machine has no room for the processes: `base_s` seconds, the next time `factor`
            times as long, and after `max_tries` tries no more; null: 1 s, doubled, ten tries.

    Raises:
        ValueError: a number is out of its range.
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
        """What `run` would start."""
        size, restarts = local_size(job.cfg.engine), job.cfg.engine.max_restarts
        port = "*" if self.master_port is None else str(self.master_port)
        variables = {"RANK": "*", "LOCAL_RANK": "*", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "*"}
        again = f", again up to {restarts} times after a process was lost" if restarts else ""
        return [Start(_command(job), size, f"this machine{again}", variables)]

    def run(self, job: Job) -> int:
        """Starts the processes and sees them through.

        Returns:
            The exit code: 5 where a process was lost and no restart is left, else that of the processes.

        Raises:
            SetupError: they cannot be started.
        """
        from deeplightning.launch.elastic import attend

        restarts, redact = job.cfg.engine.max_restarts, job.cfg.redact

        def tell(line: str) -> None:
            say(redact(line), err=True)

        command, size = _command(job), local_size(job.cfg.engine)
        with sealed_meanwhile(compose(job.config, [*job.overrides]).files, git_answers(redact)):
            code, agent = attend(command, size, restarts, self.master_port or 0, self.backoff, tell)
        if code != 0 and agent.cause is not None:
            self._tell_end(job, agent, tell)
        if agent.run_folder is not None:
            say_path(agent.run_folder.path, "Artifact storage path: ")
        return code

    def _tell_end(self, job: Job, agent: Any, tell: Callable[[str], None]) -> None:
        """Says why the processes have ended, where none of them has."""
        from deeplightning.process import failure

        restarts, redact, cause = job.cfg.engine.max_restarts, job.cfg.redact, agent.cause
        assert cause is not None
        word = f"error [{cause.whose}]" if cause.whose else "error"
        if cause.lost and not agent.heard:
            used = {0: "", 1: "; the restart is used up"}.get(restarts, f"; the {restarts} restarts are used up")
            tell(f"{word}: {cause.reason}{used}{failure.resume_hint(agent.newest)}")
        elif not agent.reported:
            tell(f"{word}: {cause.reason}")
        if agent.lost_first and agent.run_folder is not None:  # else the process has reported it
            tags = {"failure": redact(str(cause))[:1000], "restarts": str(agent.restarts)}
            _end_run(job, agent.run_folder, {name: value for name, value in tags.items() if value != "0"})


def _end_run(job: Job, folder: RunFolder, tags: dict[str, str]) -> None:
    """Marks a run as failed where the process was killed that would have done so."""
    import time

    from deeplightning.tracking.open import open_tracker
    from deeplightning.tracking.store import locate
    from deeplightning.tracking.tracker import Batch

    store, run_id = locate(job.cfg.logger.params.get("tracking_uri")), folder.path.parent.name
    with contextlib.suppress(Exception):  # whatever a store raises: this is an extra
        tracker = open_tracker(store, run_id)
        if tracker.run(run_id) is not None:
            ended = ("FAILED", time.time_ns() // 1_000_000)
            tracker.log_batch(run_id, Batch(tags=tags, status=ended))
        tracker.close()


def _command(job: Job) -> list[str]:
    """What each process runs; a seed that was drawn is drawn for all, and for all starts."""
    drawn = any(notice.key == "seed" for notice in job.cfg.notices or [])
    return [*job.command, *([f"seed={job.cfg.seed}"] if drawn else [])]
