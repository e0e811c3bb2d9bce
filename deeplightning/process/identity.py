"""The identity of a process: its rank in the launch, read from environment variables, and the decisions of rank 0.

Imports only the standard library, because every process reads its identity before anything else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deeplightning.faults import SetupError

LAUNCH, ATTEMPT = "DEEPLIGHTNING_LAUNCH", "DEEPLIGHTNING_ATTEMPT"
"""Variables in which our launchers pass the name of the launch and its number of restarts to their processes."""
AGENT_PORT = "DEEPLIGHTNING_AGENT_PORT"  # torchrun's MASTER_PORT, in processes that use another

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MPI_LOCALRANKID")
"""A process without any of these has no identity."""


@dataclass(frozen=True)
class Identity:
    """The identity of a process in its launch.

    Attributes:
        by: what started the processes: torchrun, Slurm, MPI, LOCAL_RANK (Lightning) or RANK (a person or a script).
        rank, world: the process's rank and the number of processes.
        local_rank, local_world: the same on its machine.
        node, nodes: the rank of its machine and the number of machines.
        address, port: where rank 0 listens; None if unknown.
        launch: the name of the launch, the same for all processes and after a restart; None if it has no name.
        may_resume: whether the launch may already have a run, which it then continues.
        is_of_launcher: whether one of our launchers started it, with the number of processes that the config sets.
    """

    by: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    nodes: int
    address: str | None = None
    port: str | None = None
    launch: str | None = None
    may_resume: bool = False
    is_of_launcher: bool = False

    @property
    def is_of_lightning(self) -> bool:
        """Whether Lightning starts the processes of a machine from its first process."""
        return self.by == "LOCAL_RANK"

    @property
    def is_binding(self) -> bool:
        """Whether these numbers fix the size of the run. A single Slurm task may start any number of processes."""
        return not self.is_of_lightning and not (self.by == "Slurm" and self.world == 1 and not self.is_of_launcher)


def identity(environment: Mapping[str, str] | None = None) -> Identity | None:
    """Return the identity that an environment defines, by default that of this process; None if no launcher started
    the process.

    torchrun's variables come first, then RANK, then mpirun's, then Slurm's: processes that torchrun or mpirun start
    inside a Slurm job inherit Slurm's variables.

    Raises:
        SetupError: a variable is missing or not a number, or two contradict each other.
    """
    variables = _Variables(os.environ if environment is None else environment)
    if "TORCHELASTIC_RUN_ID" in variables:
        found = _of_torchrun(variables)
    elif "RANK" in variables:
        found = _of_rank_variables(variables)
    elif "LOCAL_RANK" in variables:
        found = _of_lightning(variables)
    elif "OMPI_COMM_WORLD_RANK" in variables:
        found = _of_mpi(variables, _OPEN_MPI)
    elif "MPI_LOCALRANKID" in variables:
        found = _of_mpi(variables, _HYDRA)
    elif slurm_step(variables.environment) is not None:
        found = _of_slurm(variables)
    elif "PMI_RANK" in variables:
        found = _of_mpi(variables, _HYDRA)
    else:
        return None
    if not (found.rank < found.world and found.local_rank < found.local_world and found.node < found.nodes):
        raise SetupError(
            f"{found.by} gives rank {found.rank} of {found.world}, on this machine {found.local_rank} of "
            f"{found.local_world}, machine {found.node} of {found.nodes}: a number is out of range"
        )
    return found


def own_rank() -> int:
    """Return this process's rank from its identity, else RANK, SLURM_PROCID, LOCAL_RANK or NODE_RANK, else 0. Never
    raise.

    With NODE_RANK, the first process of each machine but the first has a rank above 0.
    """
    with contextlib.suppress(SetupError):
        if (found := identity()) is not None:
            return found.rank
    values = (os.environ.get(name, "") for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK"))
    return next((int(value) for value in values if value.isdecimal()), 0)


def require_single_process(command: str) -> None:
    """Raise SetupError if a launcher started several processes of this command, which itself starts processes."""
    if (here := identity()) is not None and here.world > 1:
        raise SetupError(
            f"{here.by} started this as one of {here.world} processes; start {command} only once: it starts the "
            "processes of its runs itself"
        )


class _Variables:
    """Environment variables that contain numbers."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = environment

    def __contains__(self, name: str) -> bool:
        return bool(self.environment.get(name))

    def text(self, *names: str) -> str | None:
        return next((self.environment[name] for name in names if name in self), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the number in the first of these variables that is set; raise SetupError if none is set and there is
        no default, or the value is not a whole number."""
        name = next((name for name in names if name in self), None)
        if name is None:
            if default is not None:
                return default
            raise SetupError(f"{names[0]} is not set, but other variables of a launcher are; set it, or unset them")
        if not re.fullmatch(r"[0-9]{1,9}", value := self.environment[name].strip()):
            raise SetupError(f"{name}={self.environment[name]!r} is not a whole number of at least 0")
        return int(value)


def _of_torchrun(variables: _Variables) -> Identity:
    run_id, attempt = variables.text("TORCHELASTIC_RUN_ID"), variables.number("TORCHELASTIC_RESTART_COUNT", default=0)
    rank, world = variables.number("RANK"), variables.number("WORLD_SIZE")
    local_rank, local_world = variables.number("LOCAL_RANK"), variables.number("LOCAL_WORLD_SIZE")
    node = variables.number("GROUP_RANK", default=0)
    nodes = variables.number("GROUP_WORLD_SIZE", default=max(1, world // max(1, local_world)))
    address, port = variables.text("MASTER_ADDR"), variables.text("MASTER_PORT")
    if run_id != "none":
        launch = run_id
    elif nodes == 1:  # in containers, host names and process ids recur; the folder of the agent's logs does not
        logs = (variables.text("TORCHELASTIC_ERROR_FILE") or "").rpartition("/attempt_")[0].rpartition("/")[2]
        launch = f"torchrun-{socket.gethostname()}-{os.getppid()}{logs}"
    else:
        launch = f"torchrun-{address}-{variables.text(AGENT_PORT, 'MASTER_PORT')}"
    may_resume = run_id != "none" or attempt > 0
    return Identity("torchrun", rank, world, local_rank, local_world, node, nodes, address, port, launch, may_resume)


def _of_rank_variables(variables: _Variables) -> Identity:
    """Return the identity of a process whose rank a person, a script or Kubernetes set."""
    rank, world = variables.number("RANK"), variables.number("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS")
    address, port, size = variables.text("MASTER_ADDR"), variables.text("MASTER_PORT"), variables.text(*_LOCAL_SIZE)
    in_step = slurm_step(variables.environment) is not None and variables.text(*_SLURM_SIZE) is not None
    slurm = _of_slurm(variables) if in_step else None
    is_here = address in (None, "localhost", "::1") or str(address).startswith("127.")
    if size is None and slurm is not None:
        local_world = slurm.local_world
    elif size is None and "LOCAL_RANK" not in variables and not is_here:
        local_world = 1  # one machine per process, as in Kubernetes
    else:
        local_world = variables.number(*_LOCAL_SIZE, default=world)
    local_rank = slurm.local_rank if slurm is not None else rank % max(1, local_world)
    local_rank = variables.number("LOCAL_RANK", *_LOCAL_RANK, default=local_rank)
    node = slurm.node if slurm is not None else _node(rank, local_rank, world, local_world)
    node, nodes = variables.number("NODE_RANK", "GROUP_RANK", default=node), max(1, -(-world // max(1, local_world)))
    return Identity("RANK", rank, world, local_rank, local_world, node, nodes, address, port, *_launch(variables))


def _node(rank: int, local_rank: int, world: int, local_world: int) -> int:
    """Return the number of a machine, for ranks numbered machine by machine or round-robin."""
    nodes = max(1, world // max(1, local_world))
    by_machine = rank // max(1, local_world)
    dealt = rank - local_rank * nodes
    return by_machine if by_machine * local_world + local_rank == rank or not 0 <= dealt < nodes else dealt


def _of_lightning(variables: _Variables) -> Identity:
    """Return the identity of a process that Lightning or something else started with Lightning's variables."""
    world, local_rank = variables.number("WORLD_SIZE"), variables.number("LOCAL_RANK")
    node, local_world = variables.number("NODE_RANK", default=0), variables.number("LOCAL_WORLD_SIZE", default=world)
    rank, nodes = node * local_world + local_rank, max(1, world // max(1, local_world))
    address, port = variables.text("MASTER_ADDR"), variables.text("MASTER_PORT")
    return Identity("LOCAL_RANK", rank, world, local_rank, local_world, node, nodes, address, port, *_launch(variables))


_SLURM_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")  # newer names first
FIRST_RESERVED_STEP = 0xFFFFFF00  # Slurm reserves steps from here on, for batch scripts and shells of salloc


def slurm_step(environment: Mapping[str, str]) -> str | None:
    """Return `slurm-JOB.STEP` in a task of a job step and in the processes that it starts; None outside a step.

    With Slurm 22.05 a batch script has SLURM_PROCID but no step, and a shell of salloc has neither; with
    `use_interactive_step` that shell has one of Slurm's reserved steps.
    """
    job, step, rank = (environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"))
    job, step = job or environment.get("SLURM_JOBID", ""), step or environment.get("SLURM_STEPID", "")
    if not rank or not step.isdecimal() or int(step) >= FIRST_RESERVED_STEP:
        return None
    return f"slurm-{job}.{step}"


def _of_slurm(variables: _Variables) -> Identity:
    """Return the identity of a task of a job step; https://slurm.schedmd.com/srun.html lists the variables."""
    rank, world = variables.number("SLURM_PROCID"), variables.number(*_SLURM_SIZE)
    local_rank = variables.number("SLURM_LOCALID", default=0)
    nodes = variables.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1)
    node = variables.number("SLURM_NODEID", default=0)
    per_node = variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    tasks = tasks_per_node(per_node or "")
    local_world = tasks[node] if node < len(tasks) else max(1, world // max(1, nodes))
    nodelist = variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") or ""
    address = variables.text("MASTER_ADDR") or first_host(nodelist) or "127.0.0.1"
    launch, may_resume = _launch(variables)
    assert launch is not None, "there is a step"
    port, ours = variables.text("MASTER_PORT") or port_of(launch), LAUNCH in variables
    return Identity("Slurm", rank, world, local_rank, local_world, node, nodes, address, port, launch, may_resume, ours)


# Variables of rank, size, local rank and local size, then those that identify a launch. MPICH and Intel MPI, which
# Hydra starts, have no variable that identifies it; on one machine their processes have the same parent.
_OPEN_MPI = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_LOCAL_RANK = (_OPEN_MPI[2], _HYDRA[2])
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", _OPEN_MPI[3], _HYDRA[3])  # LOCAL_SIZE is set by DeepSpeed's launcher


def _of_mpi(variables: _Variables, names: tuple[str, ...]) -> Identity:
    rank, world = variables.number(names[0]), variables.number(names[1])
    local_rank, local_world = variables.number(names[2], default=rank), variables.number(names[3], default=world)
    nodes = max(1, -(-world // max(1, local_world)))
    address, port, job = variables.text("MASTER_ADDR"), variables.text("MASTER_PORT"), variables.text(*names[4:])
    missing = ["MASTER_ADDR"] if address is None else []
    missing += ["MASTER_PORT"] if port is None and job is None else []
    if missing and nodes > 1:
        raise SetupError(
            f"{' and '.join(missing)} not set; {world} MPI processes on {nodes} machines need the address of rank 0 "
            "and a port that is free there: `mpirun -x MASTER_ADDR=…`, or `-env MASTER_ADDR …` with Hydra"
        )
    address, port = address or "127.0.0.1", port or port_of(job or str(os.getppid()))
    node = _node(rank, local_rank, world, local_world)
    return Identity("MPI", rank, world, local_rank, local_world, node, nodes, address, port, *_launch(variables))


def _launch(variables: _Variables) -> tuple[str | None, bool]:
    """Return the name of the launch and whether it was restarted."""
    restarts = variables.number(ATTEMPT, default=0)
    if (step := slurm_step(variables.environment)) is not None:
        restarts += variables.number("SLURM_RESTART_COUNT", default=0)
    return variables.text(LAUNCH) or step, restarts > 0


def port_of(launch: str) -> str:
    """Derive a port from 20000 to 29999 from the launch's name, the same in all its processes."""
    return str(20000 + int(hashlib.sha256(launch.encode()).hexdigest(), 16) % 10000)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each machine from Slurm's short form: `2(x3),1` is 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def first_host(text: str) -> str | None:
    """Return the first machine of Slurm's list: gpu03-a of `gpu[03-05,9]-a,login`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else None


def restarts() -> int:
    """Return how often the processes of this launch were started before."""
    names = ("TORCHELASTIC_RESTART_COUNT", ATTEMPT, "SLURM_RESTART_COUNT")
    return max((int(value) for name in names if (value := os.environ.get(name, "")).isdecimal()), default=0)


# ---- values that one process chooses for the whole launch, and passes to the processes that it starts

DECIDED = "DEEPLIGHTNING_DECIDED"
"""The environment variable in which rank 0 passes its decisions, as JSON, to the processes that Lightning starts."""


def decision_of_rank_0(what: str) -> Any:
    """Return the value that rank 0 passed to this process, or None; rank 0 itself always gets None."""
    return None if own_rank() == 0 else _decisions().get(what)


def decide_on_rank_0(what: str, decide: Callable[[], object]) -> Any:
    """Return a plain value that rank 0 chooses for all processes by calling `decide`; processes that it starts read the
    result.

    Processes started otherwise (torchrun, Slurm) each call `decide`; a run whose processes disagree does not start (see
    `deeplightning.callbacks.record.Record`).
    """
    if own_rank() == 0 or what not in _decisions():
        pass_on(what, decide())
    return _decisions()[what]


def pass_on(what: str, value: object) -> None:
    """Pass a plain value to the processes that this one starts."""
    os.environ[DECIDED] = json.dumps(_decisions() | {what: value})


def _decisions() -> dict[str, object]:
    found: dict[str, object] = json.loads(os.environ.get(DECIDED, "{}"))
    return found
