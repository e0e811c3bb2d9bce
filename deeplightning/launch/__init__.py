"""Launchers, the targets of `engine.launcher`, and the environment in which they start the processes of a run.

A launcher runs inside the user's command. It starts that command again, once for each process; each process reads its
identity from its environment (`deeplightning.process.identity`) and trains. Modules of this folder import torch only
where they use it, because every command with a config may create a launcher. Installed packages add launchers through
the entry points `deeplightning.launchers`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.config import plugins
from deeplightning.config.machine import address_of, launches_remotely, local_size, manual_address
from deeplightning.config.schema import Config, Target
from deeplightning.config.target import build
from deeplightning.launch.job import Job, Launcher, ProcessHooks, Start, TrialJobs
from deeplightning.own_code import ROOTS, add_import_roots, original_roots
from deeplightning.private.python import import_in_spawned
from deeplightning.process.identity import identity, pass_on

if TYPE_CHECKING:
    from deeplightning.launch.local import Local

__all__ = ["Job", "Launcher", "Local", "ProcessHooks", "Start", "array_of", "hooks_here", "launcher_of", "plan_of"]


def __getattr__(name: str) -> object:
    """Import `Local` on first access, because a run of one process does not need it."""
    if name != "Local":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deeplightning.launch.local import Local

    return Local


def launcher_of(cfg: Config) -> Launcher | None:
    """Return the launcher of a run, or None if this process is one of the run and starts any others itself."""
    here = identity()
    if here is not None and (here.is_binding or here.is_of_lightning):
        return None
    if cfg.engine.num_nodes > 1 and not launches_remotely(cfg.engine):  # the user runs this command on each machine
        return None
    local = Target(type="deeplightning.launch.Local", name="engine.launcher") if cfg.engine.max_restarts else None
    target = cfg.engine.launcher or local
    launcher: Any = None if target is None else build(target)
    if hasattr(launcher, "job_signals"):
        launcher.job_signals = tuple(hooks_here().signals)
    return launcher


def array_of(job: Job, trials: int, swept: Iterable[str], note: Path) -> TrialJobs | None:
    """Return the jobs of all trials of a search, or None if each trial starts its own processes.

    Args:
        trials: the number of runs to start.
        swept: the keys in which they differ; if one is a key of `engine`, each trial is a job of its own size.
        note: a file for the launcher, see `Launcher`.
    """
    make = getattr(launcher_of(job.cfg), "trial_jobs", None)
    alike = not any(re.match(r"engine\b", key) for key in swept)
    return make(job, trials, note) if make is not None and trials > 1 and alike else None


def hooks_here() -> ProcessHooks:
    """Return the hooks of the launcher that started this process.

    Raises:
        SetupError: an installed package adds a launcher that cannot be imported.
    """
    names = plugins.names(plugins.LAUNCHERS) if identity() is not None else []  # otherwise no launcher started it
    launchers = (plugins.load(plugins.LAUNCHERS, name) for name in names)
    found = (launcher.hooks_here() for launcher in launchers if hasattr(launcher, "hooks_here"))
    return next((hooks for hooks in found if hooks is not None), ProcessHooks())


def plan_of(job: Job) -> list[dict[str, object]]:
    """Return the commands that `deeplightning train` would start, as plain types."""
    launcher = launcher_of(job.cfg)
    return [
        {"where": s.where, "times": s.times, "environment": dict(s.environment), "command": s.command}
        | ({"script": s.script.splitlines()} if s.script else {})
        for s in (_plan_here(job) if launcher is None else launcher.plan(job))
    ]


def _plan_here(job: Job) -> list[Start]:
    here, local = identity({**os.environ, **address_of(job.cfg.engine)}), local_size(job.cfg.engine)
    if here is not None:
        variables = {"RANK": str(here.rank), "WORLD_SIZE": str(here.world), "LOCAL_RANK": str(here.local_rank)}
        variables |= {"LOCAL_WORLD_SIZE": str(here.local_world), "NODE_RANK": str(here.node)}
        variables |= {"MASTER_ADDR": here.address} if here.address else {}
        variables |= {"MASTER_PORT": here.port} if here.port else {}
        return [Start(job.command, 1, f"this process, started by {here.by}", variables)]
    nodes = job.cfg.engine.num_nodes
    if local * nodes == 1:
        return [Start(job.command)]
    where = "this machine" if nodes == 1 else f"each of {nodes} machines, where you run this command"
    variables = {"LOCAL_RANK": "*", "WORLD_SIZE": str(local * nodes)}
    variables |= manual_address(job.cfg.engine) if nodes > 1 else {}
    return [Start(job.command, local, where, variables)]


def apply_environment(cfg: Config) -> None:
    """Set the environment that a resolved config requests, for this process and those that it starts. Idempotent.

    It consists of the variables of `engine.env`, those that replace secrets written in plain text, the address of
    rank 0, the drawn seed, and the folders of the user's own code, which also apply to later configs, such as that of
    the run's export.
    """
    os.environ |= cfg.engine.env
    if cfg.secrets:
        os.environ |= cfg.secrets.variables()
    os.environ |= address_of(cfg.engine)
    pass_on("seed", cfg.seed)
    add_import_roots(*map(Path, cfg.roots or ()))
    os.environ[ROOTS] = json.dumps(original_roots())
    import_in_spawned(add_import_roots)  # a loader's spawned workers need the same import roots
