"""A process finds its ranks under every launcher."""

import os
import socket
from types import SimpleNamespace

import pytest

from deeplightning.faults import SetupError
from deeplightning.process.identity import first_host, identity, own_rank, port_of, tasks_per_node
from deeplightning.process.shared_folder import shared_folder
from deeplightning.run import load, resume
from deeplightning.runfolder import RunFolder


def numbers(of):
    """Return (rank, world), (local rank, local world) and (node, nodes)."""
    return (of.rank, of.world), (of.local_rank, of.local_world), (of.node, of.nodes)


def variables_of(text):
    """Return the variables of a text such as `RANK=3 WORLD_SIZE=4`."""
    return dict(pair.split("=") for pair in text.split())


TORCHRUN = variables_of(
    "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_USE_AGENT_STORE=True RANK=3 WORLD_SIZE=4 "
    "LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=one MASTER_PORT=29400"
)
ALONE = TORCHRUN | variables_of("RANK=1 WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1")
RANK = variables_of("RANK=3 WORLD_SIZE=4")
OPEN_MPI = variables_of(  # of Open MPI 4.1
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_NAMESPACE=245235713 PMIX_RANK=1"
)
ONE_ON_EACH = variables_of("OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1")
# Of MPICH 5.0 and Intel MPI.
HYDRA = variables_of("PMI_RANK=1 PMI_SIZE=2 PMI_FD=11 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
TASK = variables_of(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_NUM_TASKS=4 "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=n[03-04]"
)
OLD_TASK = variables_of(
    "SLURM_JOBID=7 SLURM_STEPID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NPROCS=4 SLURM_NNODES=2 "
    "SLURM_TASKS_PER_NODE=2(x2) SLURM_NODELIST=n[03-04]"
)
STEP = variables_of(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=4 SLURM_NNODES=2 "
    "SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=n[03-04]"
)
ADDRESS = variables_of("MASTER_ADDR=one MASTER_PORT=2000")
SECOND = (1, 2), (1, 2), (0, 1)  # of two processes on this machine
HERE, EACH, TWO = ((3, 4), (3, 4), (0, 1)), ((3, 4), (0, 1), (3, 4)), ((3, 4), (1, 2), (1, 2))
"""Ranks of the last of four processes: all on this machine, one on each of four machines, two on each of two."""
PLACES = {
    "torchrun on two machines": (TORCHRUN, "torchrun", TWO),
    "torchrun started by Slurm": (TORCHRUN | STEP, "torchrun", TWO),
    "four processes on this machine": (RANK, "RANK", HERE),
    "four with a rendezvous on this machine": (RANK | {"MASTER_ADDR": "localhost"}, "RANK", HERE),
    "Kubernetes: a pod for each": (RANK | ADDRESS, "RANK", EACH),
    "two on each machine": (RANK | ADDRESS | {"LOCAL_WORLD_SIZE": "2"}, "RANK", TWO),
    "DeepSpeed's launcher": (RANK | variables_of("LOCAL_RANK=1 LOCAL_SIZE=2"), "RANK", TWO),
    "a script under mpirun with its own ranks":
        (OPEN_MPI | ADDRESS | variables_of("RANK=1 WORLD_SIZE=4"), "RANK", ((1, 4), (1, 2), (0, 2))),
    "a script under srun": (RANK | STEP, "RANK", TWO),
    "Lightning's second process":
        (variables_of("LOCAL_RANK=1 WORLD_SIZE=2 NODE_RANK=0"), "LOCAL_RANK", SECOND),
    "Lightning's second process on a second machine":
        (variables_of("LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 NODE_RANK=1"), "LOCAL_RANK", TWO),
    "Open MPI": (OPEN_MPI, "MPI", SECOND),
    "Open MPI on two machines, also Kubernetes' MPI operator":
        (OPEN_MPI | ONE_ON_EACH | ADDRESS, "MPI", ((1, 2), (0, 1), (1, 2))),
    "Open MPI with ranks alternating between two machines":
        (OPEN_MPI | ADDRESS | variables_of("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0"),
         "MPI", ((1, 4), (0, 2), (1, 2))),
    "Open MPI inside a job of Slurm": (STEP | OPEN_MPI, "MPI", SECOND),
    "MPICH and Intel MPI": (HYDRA, "MPI", SECOND),
    "MPICH inside a job of Slurm": (STEP | HYDRA, "MPI", SECOND),
    "srun --mpi=pmi2": (STEP | variables_of("PMI_RANK=3 PMI_SIZE=4"), "Slurm", TWO),
    "a task of Slurm": (STEP, "Slurm", TWO),
}  # fmt: skip


@pytest.mark.parametrize(("variables", "by", "found"), PLACES.values(), ids=PLACES)
def test_whoever_starts_a_process_its_numbers_are_right(variables, by, found):
    """World, rank, local rank and node are right under torchrun, Kubernetes, Lightning, MPI and Slurm, also nested."""
    here = identity(variables)
    assert (here.by, numbers(here)) == (by, found)


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    "variables",
    [
        *({}, {"MASTER_ADDR": "one", "NODE_RANK": "1"}),  # started by hand, on several machines
        *(without(TASK, "SLURM_STEP_ID"), without(TASK, "SLURM_STEP_ID", "SLURM_PROCID")),  # a batch script, salloc
        TASK | {"SLURM_STEP_ID": "4294967290"},  # a step that Slurm reserves
    ],
)
def test_a_process_without_a_launcher_has_no_ranks(variables):
    """Neither a start by hand, on several machines too, nor a batch script or a shell of Slurm defines ranks."""
    assert identity(variables) is None


@pytest.mark.parametrize(
    ("variables", "note"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        (without(TORCHRUN, "RANK"), "RANK is not set"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set"),
        (without(RANK, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "1"}, "WORLD_SIZE is not set"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"),
        (without(HYDRA, "PMI_RANK", "PMI_SIZE"), "PMI_RANK is not set"),
        (OPEN_MPI | ONE_ON_EACH, "MASTER_ADDR not set"),
        (HYDRA | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, "MASTER_ADDR and MASTER_PORT not set"),
        (without(STEP, "SLURM_NTASKS"), "SLURM_STEP_NUM_TASKS is not set"),
        (RANK | {"RANK": "first"}, "RANK='first' is not a whole number of at least 0"),
        (RANK | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (RANK | {"WORLD_SIZE": "٤"}, "WORLD_SIZE='٤' is not a whole number"),
        (RANK | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "on this machine 2 of 2"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "machine 2 of 2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "rank 2 of 2"),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(variables, note):
    """The error has exit code 3, the variable, and its value or the reason why it is needed."""
    with pytest.raises(SetupError) as raised:
        identity(variables)
    assert note in str(raised.value)
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"SLURM_PROCID": "5"}, 5),
        ({"RANK": "3", "SLURM_PROCID": "5"}, 3),
        ({"RANK": "x", "SLURM_PROCID": "5"}, 5),
        (OPEN_MPI, 1),
    ],
)
def test_the_number_is_rank_else_slurms_else_nought(variables, rank, monkeypatch):
    """The rank is RANK, else SLURM_PROCID, else that of MPI, else 0, even if other variables are missing or wrong;
    `identity` prefers RANK as well."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_rank() == rank
    assert identity(RANK | {"SLURM_PROCID": "5"}).rank == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (OPEN_MPI, OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}),
        (HYDRA, HYDRA | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0", "PMI_FD": "9"}),
        (STEP, STEP | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}),
    ],
)
def test_processes_without_a_port_agree_on_one(one, other):
    """The port derives from the launch's name; processes of a machine also share a folder."""
    assert identity(one).port == identity(other).port
    assert shared_folder(one) == shared_folder(other)
    assert 20000 <= int(identity(one).port) < 30000
    assert port_of("one launch") != port_of("another")


@pytest.mark.parametrize(
    ("variables", "launch", "may_resume"),
    [
        (TORCHRUN, "torchrun-one-29400", False),
        (TORCHRUN | {"MASTER_PORT": "5", "DEEPLIGHTNING_AGENT_PORT": "29400"}, "torchrun-one-29400", False),
        (ALONE, f"torchrun-{socket.gethostname()}-{os.getppid()}", False),  # known by the agent that restarts it
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}, "torchrun-one-29400", True),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "job"}, "job", True),
        (RANK, None, False),
        (RANK | {"DEEPLIGHTNING_LAUNCH": "a"}, "a", False),
        (RANK | {"DEEPLIGHTNING_LAUNCH": "a", "DEEPLIGHTNING_ATTEMPT": "2"}, "a", True),
        (STEP, "slurm-7.0", False),
        (STEP | {"SLURM_RESTART_COUNT": "1"}, "slurm-7.0", True),
    ],
)
def test_a_launch_is_known_again_after_a_restart(variables, launch, may_resume):
    """All processes have the same launch name, which a restart does not change."""
    here = identity(variables)
    assert (here.launch, here.may_resume) == (launch, may_resume)


@pytest.mark.parametrize("variables", [TASK, OLD_TASK], ids=["new names", "old names"])
def test_a_task_of_slurm_knows_its_ranks(variables):
    """Slurm's variables, old and new, define rank, world, local rank, nodes and the address of rank 0."""
    found = identity(variables)
    assert (found.by, numbers(found)) == ("Slurm", TWO)
    assert (found.address, found.launch, found.is_binding, found.may_resume) == ("n03", "slurm-7.0", True, False)
    assert identity(variables | {"SLURM_RESTART_COUNT": "1"}).may_resume


def test_an_address_that_is_set_wins():
    """MASTER_ADDR and MASTER_PORT take precedence over the first node and the derived port."""
    found = identity(TASK | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711"})
    assert (found.address, found.port) == ("10.0.0.9", "4711")
    assert identity(TASK).port == identity(TASK | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).port
    assert identity(TASK).port != identity(TASK | {"SLURM_JOB_ID": "8"}).port


def test_a_single_task_may_start_processes_itself():
    """A shell of `srun --pty bash` starts processes without a rank; a task of our launcher has one."""
    single = TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    single |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "n03"}
    assert not identity(single).is_binding
    assert identity(single | {"DEEPLIGHTNING_LAUNCH": "slurm-7"}).is_binding


def test_short_forms_are_spread():
    """The first machine of Slurm's node list and the tasks of each node are read from their short forms."""
    assert [first_host(text) for text in ("gpu[03-05,9]-a,login", "n[7,9]x[01-02]", "login,n1", "")] == [
        *("gpu03-a", "n7x01", "login", None)
    ]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_a_restarted_launch_leaves_a_run_alone_that_a_process_uses(tmp_path, monkeypatch):
    """A restarted launch resumes its run, which has no checkpoint yet, but not while another process has the lock."""
    folder = RunFolder(tmp_path / "0" / "run" / "artifacts")
    folder.path.mkdir(parents=True)
    folder.environment.write_text('{"launch": "slurm-7.0"}')
    monkeypatch.setattr(resume, "identity", lambda: identity(STEP | {"SLURM_RESTART_COUNT": "1"}))
    monkeypatch.setattr(resume, "restarts", lambda: 1)
    monkeypatch.setattr(resume, "refusal", lambda *_: "")
    monkeypatch.setattr(load, "runs_of", lambda cfg, wanted: iter([folder] if wanted(folder.path) else []))
    lock = folder.lock()
    cfg = SimpleNamespace(logger=SimpleNamespace(type="own.Logger", params={}))
    assert resume._resume_launch(cfg) is None
    lock.release()
    found = resume._resume_launch(cfg)
    assert (found.run_id, found.folder, found.checkpoint) == ("run", folder.path, None)
    assert folder.lock() is None
    found.lock.release()


def test_torchrun_in_two_containers_is_two_launches():
    """Host name and process id are the same in both; a restart keeps the name."""

    def launch(agent, attempt):
        file = f"/tmp/torchelastic_a/none_{agent}/attempt_{attempt}/1/error.json"
        return identity(ALONE | {"TORCHELASTIC_ERROR_FILE": file}).launch

    assert launch("x", 0) == launch("x", 1) != launch("y", 0)
    assert "/" not in launch("x", 0)
