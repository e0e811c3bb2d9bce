"""Send a resolved config from the launcher to a process on a worker, through a pipe to its standard input.

A later edit of the config file has no effect, and values from the environment are never written to disk. The pipe
comes from the agent that started the process, so unpickling is safe. The process ends with the agent.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deeplightning import own_code
from deeplightning.config.machine import resolve_engine
from deeplightning.config.schema import Config
from deeplightning.faults import SetupError, error_of
from deeplightning.own_code import add_import_roots
from deeplightning.private.lazy_imports import import_lazily
from deeplightning.process.die_with_parent import end_with
from deeplightning.process.member import AGENT

_STDIN = 0


@dataclass(frozen=True)
class WorkerJob:
    """Job of one process.

    Attributes:
        cfg: resolved, with the numbers of workers and machines of the launch.
        roots: absolute folders to import from.
        arguments: of the user's command, which the run records.
    """

    cfg: Config
    roots: Sequence[str] = ()
    arguments: Sequence[str] = ()

    def pack(self) -> bytes:
        """Serialize this job for `receive`."""
        content = pickle.dumps(self)
        return len(content).to_bytes(8, "big") + content


def receive() -> Config:
    """Read the config of this process from its standard input, and resolve it for this machine.

    Raises:
        SetupError: no config is sent, or this machine lacks what the config needs.
    """
    if agent := int(os.environ.get(AGENT, 0)):
        end_with(agent)
    # Ray blocks Ctrl-C in its processes, and their children inherit the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    job: WorkerJob = pickle.loads(_read(int.from_bytes(_read(8), "big")))
    sys.argv[:] = [str(Path(own_code.__file__).with_name("__main__.py")), *job.arguments]  # the run records them
    add_import_roots(*map(Path, job.roots))
    import_lazily()
    cfg = job.cfg
    notices, faults = resolve_engine(cfg)
    if faults:
        raise error_of(faults)
    cfg.notices = [*(cfg.notices or []), *notices]
    return cfg


def _read(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(_STDIN, size - len(parts))
        if not part:
            raise SetupError(
                "deeplightning_ray.worker is started by the launcher `Ray`, which sends a config to its standard input"
            )
        parts += part
    return bytes(parts)
