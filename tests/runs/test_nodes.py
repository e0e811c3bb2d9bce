"""Processes on several machines, or started by somebody else: one run, or a note on each machine and no hang."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from cable import ADDRESS, Cable, NoCable
from commands import LIMIT_SECONDS, POLL_SECONDS, environment, free_port
from conftest import OWN, digest
from test_identity import TASK

from deeplightning.config.examine import examine
from deeplightning.config.machine import launches_remotely
from deeplightning.config.schema import Engine, Target
from deeplightning.faults import SetupError
from deeplightning.process.identity import port_of
from deeplightning.process.rendezvous import wait_seconds

TWO = ("engine.num_nodes=2", "engine.backend=ddp")
THREE = ("engine.num_nodes=3", "engine.backend=ddp")
LOCAL = "engine.launcher={{type: deeplightning.launch.Local, params: {}}}"


@pytest.fixture
def nodes(command, tiny, place):
    """`nodes([variables, …], override, …)` gives the command on each machine by hand, and how it ended there.

    A mapping has the variables of a machine, NODE_RANK as the least; `own` are overrides of single ones.
    """

    def run(machines, *overrides, own=((),) * 9, wait="30", **variables):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "DEEPLIGHTNING_MEET_SECONDS": wait}
        running = [
            command.start("train", tiny, *overrides, *more, cwd=place, **(address | variables | machine))
            for machine, more in zip(machines, own, strict=False)
        ]
        return [each.end() for each in running]

    return run


def numbered(*numbers):
    return [{"NODE_RANK": str(number)} for number in numbers]


def notes(outcome):
    return [line for line in outcome.err.splitlines() if line.startswith("error")]


# ---- by hand


@pytest.fixture(scope="module")
def alone(job):
    """What two processes on one machine end with."""
    return job("engine.backend=ddp")


def assert_alike(ended, other, tracked):
    """Two runs have the same losses and weights."""
    assert digest(ended.folder / "last.ckpt") == digest(other.folder / "last.ckpt")
    ours, theirs = (
        {name: points for name, points in tracked(run.folder).series().items() if "loss" in name}
        for run in (ended, other)
    )
    assert ours == theirs


def test_two_shells_are_one_run(nodes, alone, tracked):
    """MASTER_ADDR, MASTER_PORT and NODE_RANK on each: world 2, one run, the losses and weights of one machine."""
    first, second = nodes(numbered(0, 1), *TWO)
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    assert second.out == ""
    assert_alike(first, alone, tracked)
    assert "32 samples a step: 16 per process x 2 processes" in first.out
    assert sorted(path.name for path in (first.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


ABSENT = "MASTER_ADDR=127.0.0.1, MASTER_PORT=1: rank 0 does not answer there after 1 s"


@pytest.mark.parametrize(
    ("present", "overrides", "own", "variables", "words"),
    [
        pytest.param([0], TWO, (), {"wait": "1"}, ["waiting for node 1: 1 of 2 missing after 1 s"], id="no second"),
        pytest.param([1], TWO, (), {"wait": "1", "MASTER_PORT": "1"}, [ABSENT], id="no first", marks=pytest.mark.slow),
        pytest.param(
            *([0, 1], THREE, (), {"wait": "2"}, ["waiting for node 2: 1 of 3 missing"]),
            id="no third",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *([0, 1, 1], THREE, (), {}, ["node 1 started twice, also on "]), id="twice", marks=pytest.mark.slow
        ),
        pytest.param(
            *([0, 1], TWO, ["seed=8", "model.optimizer.params.lr=0.1"], {}),
            ["seed is 7 on node 0, 8 on node 1", "model.optimizer is"],
            id="another config",
        ),
        pytest.param(
            *([0, 1], TWO, ["engine.processes=2"], {}, ["engine.processes is 1 on node 0, 2 on node 1"]),
            id="another number of processes",
        ),
    ],
)
def test_a_machine_that_does_not_come_is_named(present, overrides, own, variables, words, nodes):
    """Or comes twice, or with another config: the same note on all that are there, exit 3 in the time limit."""
    ended = nodes(numbered(*present), *overrides, own=((), own, ()), **variables)
    assert [each.code for each in ended] == [3] * len(present)
    told = [note for each in ended for note in notes(each)]
    assert told
    assert all(word in note for note in told for word in words), told
    assert len(told) == 1 or len(present) > 1


@contextlib.contextmanager
def program_at_a_port(says):
    """The port of a program that answers so whatever it gets; None: it says nothing, ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while says is not None:
                    caller, _ = listener.accept()
                    with caller:
                        caller.sendall(says)

        thread = threading.Thread(target=serve)
        thread.start()
        yield str(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which closing does not
        thread.join()


@pytest.mark.parametrize("says", [b"HTTP/1.0 400 Bad Request\r\n\r\n", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_port_of_another_program_is_named(says, number, nodes):
    """A web server, or one that never answers: exit 3 on the machine that listens and on the one that calls."""
    with program_at_a_port(says) as port:
        (ended,) = nodes(numbered(number), *TWO, wait="1", MASTER_PORT=port)
    assert ended.code == 3
    (note,) = notes(ended)
    expected = "in use by another program" if number == 0 else "rank 0 does not answer there"
    assert port in note
    assert expected in note


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


ONE_OF_TWO = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2000", "NODE_RANK": "0"}
WAYS = "2 machines must be started: by torchrun, Slurm, `engine.launcher`, or by this command"
NO_SRUN = "requests 2 machines, but this is a single process of a Slurm job; start it with `srun`"
NO_RESTART = "machines started by hand cannot restart lost processes: set it to 0, or use torchrun"


@pytest.mark.parametrize(
    ("variables", "overrides", "key", "code", "note"),
    [
        (ONE_OF_TWO | {"NODE_RANK": "2"}, TWO, "num_nodes", 3, "NODE_RANK=2 is not a number from 0 to 1"),
        (ONE_OF_TWO | {"NODE_RANK": "second"}, TWO, "num_nodes", 3, "NODE_RANK=second is not a number from 0 to 1"),
        (ONE_OF_TWO | {"MASTER_ADDR": ""}, TWO, "num_nodes", 3, "MASTER_ADDR not set; each of the machines needs it"),
        (ONE_OF_TWO | {"NODE_RANK": ""}, TWO, "num_nodes", 3, "NODE_RANK not set; each of the machines needs it"),
        ({"NODE_RANK": "1"}, (), "num_nodes", 3, "there is 1 node, and NODE_RANK=1; set"),  # a run without a first one
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, TWO, "num_nodes", 3, NO_SRUN),  # it would wait for nobody
        ({}, TWO, "num_nodes", 2, WAYS),
        (ONE_OF_TWO, (*TWO, "engine.max_restarts=2"), "max_restarts", 2, NO_RESTART),
    ],
)
def test_a_variable_that_is_wrong_is_named(variables, overrides, key, code, note, tiny, monkeypatch):
    """With what would be right; likewise several machines that nobody starts, or starts again."""
    set_all(monkeypatch, variables)
    (fault,) = examine(tiny, [*overrides]).faults
    assert (fault.key, fault.exit_code) == (f"engine.{key}", code)
    assert note in fault.message


@pytest.mark.parametrize("text", ["long", "0", "-1", "nan"])
def test_a_time_limit_that_is_none_is_named(text, monkeypatch):
    """Seconds, above 0."""
    monkeypatch.setenv("DEEPLIGHTNING_MEET_SECONDS", text)
    with pytest.raises(SetupError, match=f"DEEPLIGHTNING_MEET_SECONDS='{text}' is not a number of seconds"):
        wait_seconds()


@pytest.mark.parametrize(
    ("launcher", "is_ours"),
    [
        ("deeplightning.launch.Local", True),
        ("deeplightning.launch.local.Local", True),
        ("deeplightning_slurm.Slurm", False),
        ("mine.Local", False),
        ("mine.Cluster", False),
    ],
)
def test_a_launcher_is_known_by_its_whole_name(launcher, is_ours):
    """A user's own launcher may be called Local and take the run to other machines."""
    assert launches_remotely(Engine(launcher=Target(type=launcher))) is not is_ours


def test_the_launcher_may_say_the_same_as_the_variables(nodes, alone):
    """`master_addr`, `master_port` (also as text) and `node_rank` of `Local`, which come before the environment's."""
    port = free_port()

    def local(number, port):
        return [LOCAL.format(f"{{master_addr: 127.0.0.1, master_port: {port}, node_rank: {number}}}")]

    own = (local(0, f"'{port}'"), local(1, port))
    first, second = nodes([{}, {}], *TWO, own=own, MASTER_ADDR="nowhere.invalid", MASTER_PORT="1", NODE_RANK="9")
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    assert digest(first.folder / "last.ckpt") == digest(alone.folder / "last.ckpt")


@pytest.mark.parametrize(
    ("variables", "overrides", "fault"),
    [
        ({"WORLD_SIZE": "2"}, ["engine.processes=3"], "requests 3 processes, but RANK started 2; make the two"),
        ({"WORLD_SIZE": "2"}, ["engine.num_nodes=2"], "requests 2 nodes, but RANK started 1; make the two"),
        (
            {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            *([], "RANK started 3 processes, 2 of them on this one of 2 nodes; each node must have the same"),
        ),
    ],
)
def test_other_sizes_than_the_launchers_are_refused(variables, overrides, fault, tiny, monkeypatch):
    """Both numbers, exit 3, wherever they contradict."""
    set_all(monkeypatch, {"RANK": "0"} | variables)
    (found,) = [found for found in examine(tiny, overrides).faults if fault in found.message]
    assert found.exit_code == 3


def test_restarts_that_nobody_would_do_are_told(tiny, monkeypatch):
    """Of a process that a script has started."""
    set_all(monkeypatch, {"RANK": "3", "WORLD_SIZE": "4"})
    report = examine(tiny, ["engine.max_restarts=1"])
    told = [notice.text for notice in report.notices if notice.unasked]
    assert "engine.max_restarts: 1 → 0 (RANK started this process and does not restart it)" in told
    assert report.config.engine.processes == 4


# ---- two machines, as Linux can pretend: network namespaces joined by a cable


@pytest.fixture
def cable():
    try:
        made = Cable()
    except NoCable as reason:
        pytest.skip(f"{reason}; run this test as root")
    yield made
    made.remove()


@pytest.fixture
def machines(command, tiny, place, cable, tmp_path):
    """`machines(override, …)` starts the command in both namespaces; the first one's is the address.

    Each has a folder for temporary files of its own, as machines have.
    """

    def start(*overrides, second=()):
        variables = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": "29500", "DEEPLIGHTNING_MEET_SECONDS": "40"}
        running = []
        for number, name in enumerate(cable.names):
            (tmp_path / name).mkdir()
            own = {"NODE_RANK": str(number), "NAMESPACE": name, "TMPDIR": str(tmp_path / name)}
            own |= dict(second) if number else {}
            main = "cable:in_namespace"
            running.append(command.start("train", tiny, *TWO, *overrides, cwd=place, main=main, **variables, **own))
        return running

    return start


@pytest.mark.parametrize(
    "backend",
    ["ddp", *(pytest.param(e, marks=pytest.mark.slow) for e in ("fsdp", "deepspeed_stage_2", "deepspeed_stage_3"))],
)
def test_two_machines_are_one_run(backend, machines, job, alone, tracked):
    """Losses and weights are those of one machine, also of divided tensors; nobody names a network interface."""
    first, second = (each.end() for each in machines(f"engine.backend={backend}"))
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    assert_alike(first, alone if backend == "ddp" else job(f"engine.backend={backend}"), tracked)
    assert tracked(first.folder).status == "FINISHED"


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_told(machines, alone, store):
    """The second machine does not see the first one's disk: a warning there, and the run is the same."""
    first, second = (each.end() for each in machines(second={"HIDDEN": str(store)}))
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    assert f"the run's folder of rank 0, {first.folder}, is not on this machine" in second.err
    assert "is not on this machine" not in first.err
    assert digest(first.folder / "last.ckpt") == digest(alone.folder / "last.ckpt")


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_machines(machines, cable, tracked, tmp_path):
    """Within the time limit of the process group, exit 5, a note on each."""
    go = tmp_path / "go"
    waits = f"train.callbacks=[{{type: own.Waits, params: {{until: '{go}'}}}}]"
    running = machines("engine.params.timeout=8", waits)
    running[0].says("waits")
    running[1].says("waits")
    cable.cut()
    go.touch()
    first, second = (each.end() for each in running)
    assert (first.code, second.code) == (5, 5), f"{first}\n{second}"
    for each in (first, second):
        (note,) = notes(each)
        assert "timed out after 8 s (engine.params.timeout)" in note
    assert tracked(first.folder).status == "FAILED"


# ---- torchrun


def torchrun():
    """`torchrun`, where the processes that it starts are forked from it; the agent and what it tells them are real."""
    import forks
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    class Unbuffered(forks.Forked):
        def __init__(self, args, env, **more):
            assert args[1] == "-u"
            super().__init__((args[0], *args[2:]), env, **more)

        def wait(self, timeout=None):
            until = time.monotonic() + (LIMIT_SECONDS if timeout is None else timeout)
            while self.poll() is None:
                if time.monotonic() > until:
                    raise subprocess.TimeoutExpired("deeplightning", timeout)
                time.sleep(POLL_SECONDS)
            return self.returncode

    subprocess_handler.Popen = Unbuffered
    run.main(sys.argv[1:])


@pytest.fixture
def by_torchrun(command, tiny, place):
    """`by_torchrun([option, …], override, …)` starts `torchrun OPTION … -m deeplightning train TINY OVERRIDE …`.

    Another torchrun on this machine has the port that it takes where none is given.
    """

    def start(options, *overrides, cwd=place):
        port = [] if any("rdzv" in option for option in options) else [f"--master-port={free_port()}"]
        words = (*port, *options, "-m", "deeplightning", "train", tiny, *overrides)
        return command.start(*words, cwd=cwd, main="test_nodes:torchrun")

    return start


def runs_of(store):
    """The folders of all runs."""
    return set(store.glob("*/*/artifacts"))


def test_torchrun_starts_all_processes_itself(by_torchrun, alone, store):
    """Two processes in all, one run; its weights are those of two processes that this command starts."""
    before = runs_of(store)
    ended = by_torchrun(["--nproc-per-node", "2"], "--show-config").end(code=0)
    assert runs_of(store) - before == {ended.folder}
    assert "processes: 2" in ended.out
    assert "num_nodes: 1" in ended.out
    assert digest(ended.folder / "last.ckpt") == digest(alone.folder / "last.ckpt")
    assert sorted(path.name for path in (ended.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.slow
def test_two_torchruns_are_one_run(by_torchrun, alone, store):
    """With a rendezvous, a process each: world 2, one run; the same id for another job later is another run."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options += ["--rdzv-id=two", "--local-addr=127.0.0.1"]
    for _ in range(2):
        before = runs_of(store)
        ended = [each.end() for each in [by_torchrun(options, "--show-config", "engine.backend=ddp") for _ in range(2)]]
        assert [each.code for each in ended] == [0, 0], ended
        (folder,) = runs_of(store) - before
        assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")
    assert "num_nodes: 2" in ended[0].out + ended[1].out


KILLED = '''\
import os
import pathlib

import own


class Once(own.Killed):
    """Kills the second process where no file is there yet."""

    def on_train_batch_start(self, trainer, *rest):
        mark = pathlib.Path("mark")
        if trainer.global_rank == 1 and not mark.exists() and (trainer.current_epoch, rest[-1]) == self.at:
            mark.touch()
            super().on_train_batch_start(trainer, *rest)
'''


@pytest.mark.slow
def test_torchrun_goes_on_in_the_same_run(by_torchrun, alone, store, tracked, tmp_path):
    """`--max-restarts`: after a kill all start again from the newest checkpoint, and end as undisturbed."""
    before = runs_of(store)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "killed.py").write_text(KILLED)
    once = "train.callbacks=[{type: killed.Once, params: {epoch: 1, batch: 2}}]"
    ended = by_torchrun(["--nproc-per-node=2", "--max-restarts=1"], once, cwd=tmp_path).end()
    assert (tmp_path / "mark").exists()
    assert ended.code == 0, ended
    (folder,) = runs_of(store) - before
    assert tracked(folder).status == "FINISHED"
    assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")


# ---- MPI


@pytest.fixture(scope="module")
def told_by_mpirun(tmp_path_factory):
    """What `mpirun -np 2` tells its two processes; it asks twice whether root may, and counts the cores."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun; Debian has it in openmpi-bin")
    folder = tmp_path_factory.mktemp("mpirun")
    program = (  # a file for each process: in one pipe their lines can mix
        "import json, os, pathlib, sys; told = {n: v for n, v in os.environ.items() if n[:4] in ('OMPI', 'PMIX')}; "
        "pathlib.Path(sys.argv[1], told['OMPI_COMM_WORLD_RANK']).write_text(json.dumps(told))"
    )
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-c", program, folder]
    told = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    return [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


@pytest.mark.slow
def test_as_a_person_types_it(tiny, place, alone):
    """Everything in fresh processes: `torchrun --nproc-per-node 2 -m deeplightning …`."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = {"capture_output": True, "text": True, "timeout": LIMIT_SECONDS}
    command = [*words, "-m", "deeplightning", "train", str(tiny)]
    ended = subprocess.run(command, cwd=place, env=environment(), **options)
    assert ended.returncode == 0, ended.stderr
    folder = Path(ended.stdout.splitlines()[-1].removeprefix("Artifact storage path: "))
    assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")


def test_mpirun_starts_all_processes(told_by_mpirun, command, tiny, place, alone, store):
    """World 2 from its variables, one run, and no mpi4py."""
    before = runs_of(store)
    ended = [each.end() for each in [command.start("train", tiny, cwd=place, **told) for told in told_by_mpirun]]
    assert [each.code for each in ended] == [0, 0], ended
    (folder,) = runs_of(store) - before
    assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")
    assert "MPI started 2 processes" in "".join(each.err for each in ended)


# ---- plan


BY_HAND = {"MASTER_ADDR": "one", "MASTER_PORT": "2000", "NODE_RANK": "1"}
OF_TASK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
OF_TASK |= {"MASTER_ADDR": "n03", "MASTER_PORT": port_of("slurm-7.0")}


@pytest.mark.parametrize(
    ("variables", "overrides", "where", "times", "told"),
    [
        ({}, (), "this machine", 1, {}),
        ({}, ("engine.processes=2",), "this machine", 2, {"LOCAL_RANK": "*", "WORLD_SIZE": "2"}),
        (
            *(BY_HAND, ("engine.processes=2", "engine.num_nodes=2")),
            *("each of 2 machines, where you run this command", 2),
            {"LOCAL_RANK": "*", "WORLD_SIZE": "4"} | BY_HAND,
        ),
        (TASK, (), "this process, started by Slurm", 1, OF_TASK),
        (
            *({}, ("engine.processes=3", "engine.max_restarts=2", LOCAL.format("{master_port: 29500}"))),
            *("this machine, restarted up to 2 times after a process was lost", 3),
            {
                **dict.fromkeys(("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"), "*"),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "3"),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            },
        ),
    ],
)
def test_plan_says_what_would_start(variables, overrides, where, times, told, command, tiny, place, store):
    """Processes, their variables, the command; in a task what Slurm's variables give. Nothing starts."""
    pytest.importorskip("deeplightning_plan")
    before = runs_of(store)
    said = command("plan", tiny, *overrides, cwd=place, **variables, code=0)
    (start,) = yaml.safe_load(said.out)
    words = [sys.executable, "-m", "deeplightning", "train", str(tiny), *overrides]
    assert start == {"where": where, "times": times, "environment": told, "command": words}
    assert runs_of(store) == before
