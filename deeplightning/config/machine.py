"""Resolve `engine` for this machine, a step of the config check. Torch is imported only for MPI."""

import os
from collections.abc import Callable

from deeplightning.config.schema import BACKENDS, PRECISIONS, Config, Engine
from deeplightning.config.target import is_installed
from deeplightning.faults import ConfigError, Fault, Notice, SetupError
from deeplightning.process.identity import Identity, identity, slurm_step

_RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


def resolve_engine(cfg: Config) -> tuple[list[Notice], list[Fault]]:
    """Resolve `cfg.engine` in place to what will run; `cfg.asked` keeps the requested values.

    Returns:
        A notice for each change, and a fault for each device or package that the machine lacks.
    """
    engine, notices, faults = cfg.engine, list[Notice](), list[Fault]()

    def change(key: str, value: object, why: str) -> None:
        before = getattr(engine, key)
        values = ("null" if v is None else v for v in (before, value))
        text = "engine.{}: {} → {} ({})".format(key, *values, why)
        notices.append(Notice(text, unasked=before != "auto", key=f"engine.{key}"))
        note_asked(cfg, f"engine.{key}", before)
        setattr(engine, key, value)

    if engine.backend in BACKENDS:
        change("backend", BACKENDS[engine.backend], f"{engine.backend} is its older name")
    if engine.precision in PRECISIONS:
        more = "; 16-true is nearer to O2" if engine.precision == "apex_O2" else ""
        change("precision", PRECISIONS[engine.precision], f"{engine.precision} is its older name{more}")
    missing, here = None, None
    try:
        here = identity()
    except SetupError as error:
        faults.append(Fault(str(error), exit_code=3))
    if engine.gpus is not None and ((here is not None and here.is_binding) or not launches_remotely(engine)):
        from deeplightning.config.devices import resolve_gpus

        missing = resolve_gpus(engine, change)
    if here is not None and here.is_binding:
        faults += _resolve_sizes(engine, here, change)
    elif not launches_remotely(engine):
        faults += _rendezvous_faults(engine)
    if missing:
        faults.append(Fault(missing, "engine.gpus", exit_code=3))
    world = world_size(engine)
    if world == 1 and engine.gpus is None and engine.backend is not None:
        change("backend", None, "there is one process and no GPU")
    if world > 1 and engine.backend is None:
        change("backend", "ddp", f"there are {world} processes")
    if engine.gpus is None and engine.precision in (16, "16-mixed"):
        change("precision", "bf16-mixed", "half precision on CPU is bf16")
    if engine.gpus is None and str(engine.precision).startswith("bf16"):
        from deeplightning.config.devices import cpu_computes_bf16

        if not cpu_computes_bf16():
            text = "engine.precision: this CPU has no instructions for bf16, so bf16 is slower than 32"
            notices.append(Notice(text, key="engine.precision"))
    # If GPUs are missing, do not report a missing DeepSpeed too.
    if not missing and (engine.backend or "").startswith("deepspeed") and not is_installed("deepspeed"):
        message = f"{engine.backend} needs the package deepspeed: install the extra `deeplightning[deepspeed]`"
        faults.append(Fault(message, "engine.backend", exit_code=3))
    if engine.params.get("process_group_backend") == "mpi":
        from torch import distributed

        if not (distributed.is_available() and distributed.is_mpi_available()):
            message = "this build of torch has no MPI; use gloo, or nccl on GPUs, or build torch with MPI"
            faults.append(Fault(message, "engine.params.process_group_backend", exit_code=3))
    return notices, faults


def note_asked(cfg: Config, key: str, value: object) -> None:
    """Record the requested value of a key that is replaced; null requests nothing."""
    if value is not None:
        cfg.asked = {key: value} | (cfg.asked or {})  # of several changes the first has the requested value


def launches_remotely(engine: Engine) -> bool:
    """Return whether the launcher runs on other machines, which cannot be inspected here."""
    local = ("deeplightning.launch.Local", "deeplightning.launch.local.Local")  # a user's class may be called Local too
    return engine.launcher is not None and engine.launcher.type not in local


def address_of(engine: Engine) -> dict[str, str]:
    """Return the rendezvous variables of a resolved engine that only the config sets.

    A launcher's parameters also apply to tasks that a user starts with srun; those of `Local`, or the environment,
    apply to machines that are started one by one.
    """
    if slurm_step(os.environ) is not None and engine.launcher is not None and launches_remotely(engine):
        names = {"master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
        params = engine.launcher.params
        return {name: str(params[key]) for key, name in names.items() if params.get(key) is not None}
    here = identity()
    is_launched = here is not None and (here.is_binding or here.is_of_lightning)
    return manual_address(engine) if engine.num_nodes > 1 and not launches_remotely(engine) and not is_launched else {}


def manual_address(engine: Engine) -> dict[str, str]:
    """Return the rendezvous variables of machines started by hand, from `Local`'s parameters or the environment."""
    params = {} if engine.launcher is None or launches_remotely(engine) else engine.launcher.params
    given = {name: params.get(name.lower(), os.environ.get(name)) for name in _RENDEZVOUS_VARIABLES}
    return {name: str(value) for name, value in given.items() if value not in (None, "")}


def _resolve_sizes(engine: Engine, here: Identity, change: Callable[[str, object, str], None]) -> list[Fault]:
    """Take the sizes from the launch; return a fault for each requested size that differs."""
    faults = []

    def agree(key: str, asked: int, started: int, what: str) -> None:
        if asked == started:
            return
        if asked == 1 and key != "gpus":
            change(key, started, f"{here.by} started {started} {what}")
        else:
            message = f"requests {asked} {what}, but {here.by} started {started}; make the two equal"
            faults.append(Fault(message, f"engine.{key}", exit_code=3))

    if here.world != here.nodes * here.local_world:
        of_them = f"{here.local_world} of them on this one of {here.nodes} nodes"
        message = f"{here.by} started {here.world} processes, {of_them}; each node must have the same number"
        return [Fault(message, "engine.num_nodes", exit_code=3)]
    agree("num_nodes", engine.num_nodes, here.nodes, "nodes" if here.nodes > 1 or engine.num_nodes > 1 else "node")
    of_each = "processes on each node" if here.nodes > 1 else "processes"
    agree("processes" if engine.gpus is None else "gpus", local_size(engine), here.local_world, of_each)
    if engine.max_restarts and here.launch is None:
        change("max_restarts", 0, f"{here.by} started this process and does not restart it")
    return faults


def _rendezvous_faults(engine: Engine) -> list[Fault]:
    """Return what is missing to connect several machines that are started by hand."""
    given, nodes = manual_address(engine), engine.num_nodes
    number = given.get("NODE_RANK", "0").strip()
    message, key, code = "", "engine.num_nodes", 3
    if nodes == 1:
        if number.strip("0"):
            message = f"there is 1 node, and NODE_RANK={number}; set engine.num_nodes, or unset NODE_RANK"
    elif "SLURM_JOB_ID" in os.environ and "NODE_RANK" not in given:
        message = f"requests {nodes} machines, but this is a single process of a Slurm job; start it with `srun`"
    elif engine.max_restarts:
        key, code = "engine.max_restarts", 2
        message = "machines started by hand cannot restart lost processes: set it to 0, or use torchrun, Slurm or Ray"
    elif not given:
        code = 2
        message = (
            f"{nodes} machines must be started: by torchrun, Slurm, `engine.launcher`, or by this command on each "
            "with MASTER_ADDR, MASTER_PORT and NODE_RANK set"
        )
    elif missing := [name for name in _RENDEZVOUS_VARIABLES if name not in given]:
        message = f"{', '.join(missing)} not set; each of the machines needs it"
    elif not (number.isascii() and number.isdigit() and int(number) < nodes):
        message = f"NODE_RANK={number} is not a number from 0 to {nodes - 1}"
    return [Fault(message, key, exit_code=code)] if message else []


def local_size(engine: Engine) -> int:
    """Return the number of processes on one machine; 1 while `engine.gpus` is `auto`."""
    if engine.gpus is None:
        return engine.processes
    if engine.gpus == "auto":
        return 1
    return engine.gpus if isinstance(engine.gpus, int) else len(engine.gpus)


def world_size(engine: Engine) -> int:
    """Return the number of processes of the whole run."""
    return local_size(engine) * engine.num_nodes


def batch_size(cfg: Config) -> int:
    """Return `data.batch_size`, for a command that needs it.

    Raises:
        ConfigError: the data module sets its own batch size.
    """
    if cfg.data.batch_size is None:
        message = f"null: {cfg.data.module.type} sets its own batch size, which this command cannot change"
        raise ConfigError(Fault(message, "data.batch_size"))
    return cfg.data.batch_size
