"""A settled config on its way from the command that a user gives to a process that a launcher starts elsewhere.

It goes through a pipe, whole: what the file says by then does not matter, and what came from the environment is never
written down. The process runs `deeplightning worker`, and ends with the one that started it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deeplightning.config.schema import Config
from deeplightning.engine.plan import occupied, settle
from deeplightning.faults import SetupError, error_of
from deeplightning.own_code import add_import_roots
from deeplightning.private.lazy_imports import import_lazily
from deeplightning.process.supervisor import AGENT

_STDIN = 0
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl(2)


@dataclass(frozen=True)
class Order:
    """What a worker is to do.

    Attributes:
        cfg: settled, with the sizes of the launch.
        roots: folders to import from, absolute.
        arguments: of the command that a user gave, which the run notes as its own.
    """

    cfg: Config
    roots: Sequence[str] = ()
    arguments: Sequence[str] = ()

    def pack(self) -> bytes:
        """As `receive` reads it."""
        content = pickle.dumps(self)
        return len(content).to_bytes(8, "big") + content


def receive() -> Config:
    """The config that this process is to train, from its standard input, settled for this machine.

    Raises:
        SetupError: nothing sends one, or this machine lacks what the config needs.
    """
    _end_with_agent()
    # Ray starts its processes deaf to Ctrl-C, and theirs inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    order = pickle.loads(_read(int.from_bytes(_read(8), "big")))
    sys.argv[1:] = order.arguments
    add_import_roots(*map(Path, order.roots))
    import_lazily()
    cfg: Config = order.cfg
    notices, faults = settle(cfg)
    if faults := faults or occupied(cfg.engine):
        raise error_of(faults)
    cfg.notices = [*(cfg.notices or []), *notices]
    return cfg


def _read(size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(_STDIN, size - len(parts))
        if not part:
            raise SetupError(
                "`deeplightning worker` is started by launchers, which send a config to its standard input"
            )
        parts += part
    return bytes(parts)


def _end_with_agent() -> None:
    """Has the kernel kill this process when the one that started it is gone."""
    agent = int(os.environ.get(AGENT, 0))
    if not agent:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != agent:  # it ended before that took effect
        os._exit(5)
