"""Processes on several machines, or from another launcher: one run, or an error on each machine and no hang."""

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
from commands import LIMIT_SECONDS, POLL_SECONDS, environment, free_port, python
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


def end_all(running, code=0):
    """Wait for commands, which must exit with this code; return their outcomes."""
    ended = [each.end() for each in running]
    assert [each.code for each in ended] == [code] * len(ended), "\n".join(map(str, ended))
    return ended


@pytest.fixture
def nodes(command, tiny, place):
    """`nodes([variables, …], override, …)` runs the command for each machine, and returns their outcomes.

    Each mapping has the variables of a machine, at least NODE_RANK; `own` has overrides for each machine.
    """

    def run(machines, *overrides, own=((),) * 9, wait="30", code=0, **variables):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "DEEPLIGHTNING_MEET_SECONDS": wait}
        variables = address | variables
        running = [
            command.start("train", tiny, *overrides, *more, cwd=place, **(variables | machine))
            for machine, more in zip(machines, own, strict=False)
        ]
        return end_all(running, code)

    return run


def numbered(*numbers):
    return [{"NODE_RANK": str(number)} for number in numbers]


def errors(outcome):
    return [line for line in outcome.err.splitlines() if line.startswith("error")]


# ---- by hand


@pytest.fixture(scope="module")
def alone(job):
    """A run of two processes on one machine."""
    return job("engine.backend=ddp")


def assert_alike(ended, other, tracked):
    """Assert that two runs have the same losses and weights."""
    assert digest(ended.folder / "last.ckpt") == digest(other.folder / "last.ckpt")
    ours, theirs = (
        {name: points for name, points in tracked(run.folder).series().items() if "loss" in name}
        for run in (ended, other)
    )
    assert ours == theirs


def test_two_shells_are_one_run(nodes, alone, tracked):
    """MASTER_ADDR, MASTER_PORT and NODE_RANK make one run of world size 2, with losses and weights of one machine."""
    first, second = nodes(numbered(0, 1), *TWO)
    assert second.out == ""
    assert_alike(first, alone, tracked)
    assert "32 samples a step: 16 per process x 2 processes" in first.out
    assert sorted(path.name for path in (first.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


ABSENT = "MASTER_ADDR=127.0.0.1, MASTER_PORT=1: rank 0 does not answer there after 1 s"
OTHER_CONFIG = ["seed=8", "model.optimizer.params.lr=0.1"]
MISFITS = {
    "no second": ([0], TWO, (), {"wait": "1"}, ["waiting for node 1: 1 of 2 missing after 1 s"]),
    "no first": ([1], TWO, (), {"wait": "1", "MASTER_PORT": "1"}, [ABSENT]),
    "no third": ([0, 1], THREE, (), {"wait": "2"}, ["waiting for node 2: 1 of 3 missing"]),
    "twice": ([0, 1, 1], THREE, (), {}, ["node 1 started twice, also on "]),
    "config": ([0, 1], TWO, OTHER_CONFIG, {}, ["seed is 7 on node 0, 8 on node 1", "model.optimizer is"]),
    "processes": ([0, 1], TWO, ["engine.processes=2"], {}, ["engine.processes is 1 on node 0, 2 on node 1"]),
}
SLOW = ("no first", "no third", "twice")


@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in MISFITS])
def test_a_missing_or_different_machine_is_reported(case, nodes):
    """A machine that is missing, is started twice, or has another config is reported with the same error on all others;
    they exit with code 3 within the time limit."""
    present, overrides, own, variables, parts = MISFITS[case]
    ended = nodes(numbered(*present), *overrides, own=((), own, ()), code=3, **variables)
    reported = [error for each in ended for error in errors(each)]
    assert reported
    assert all(part in error for error in reported for part in parts), reported
    assert len(reported) == 1 or len(present) > 1


@contextlib.contextmanager
def program_at_a_port(response):
    """The port of a program that sends this response to each connection, or never responds if it is None."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while response is not None:
                    caller, _ = listener.accept()
                    with caller:
                        caller.sendall(response)

        thread = threading.Thread(target=serve)
        thread.start()
        yield str(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)  # ends `accept`, which closing does not
        thread.join()


RESPONSE = b"HTTP/1.0 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize("response", [RESPONSE, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_port_of_another_program_is_named(response, number, nodes):
    """If a web server, or a program that never responds, has the port, the machine that listens and the one that
    connects exit with code 3 and name it."""
    with program_at_a_port(response) as port:
        (ended,) = nodes(numbered(number), *TWO, wait="1", code=3, MASTER_PORT=port)
    (error,) = errors(ended)
    assert port in error
    assert ("in use by another program" if number == 0 else "rank 0 does not answer there") in error


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
        ({"NODE_RANK": "1"}, (), "num_nodes", 3, "there is 1 node, and NODE_RANK=1; set"),  # no node 0
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, TWO, "num_nodes", 3, NO_SRUN),  # it would wait in vain
        ({}, TWO, "num_nodes", 2, WAYS),
        (ONE_OF_TWO, (*TWO, "engine.max_restarts=2"), "max_restarts", 2, NO_RESTART),
    ],
)
def test_a_variable_that_is_wrong_is_named(variables, overrides, key, code, note, tiny, monkeypatch):
    """The error names the variable and the valid values. Several machines without a launcher, or restarts without one,
    are refused too."""
    set_all(monkeypatch, variables)
    (fault,) = examine(tiny, [*overrides]).faults
    assert (fault.key, fault.exit_code) == (f"engine.{key}", code)
    assert note in fault.message


@pytest.mark.parametrize("text", ["long", "0", "-1", "nan"])
def test_an_invalid_time_limit_is_refused(text, monkeypatch):
    """The time limit must be a number of seconds above 0."""
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
    ],
)
def test_a_launcher_is_known_by_its_whole_name(launcher, is_ours):
    """A launcher of the user may be called Local and start the run on other machines."""
    assert launches_remotely(Engine(launcher=Target(type=launcher))) is not is_ours


def test_the_launcher_may_say_the_same_as_the_variables(nodes, alone):
    """`master_addr`, `master_port` (also as text) and `node_rank` of `Local` override the environment variables."""
    port = free_port()

    def local(number, port):
        return [LOCAL.format(f"{{master_addr: 127.0.0.1, master_port: {port}, node_rank: {number}}}")]

    own = (local(0, f"'{port}'"), local(1, port))
    first, _ = nodes([{}, {}], *TWO, own=own, MASTER_ADDR="nowhere.invalid", MASTER_PORT="1", NODE_RANK="9")
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
    """A config that contradicts the launcher's sizes is an error with both numbers and exit code 3."""
    set_all(monkeypatch, {"RANK": "0"} | variables)
    (found,) = [found for found in examine(tiny, overrides).faults if fault in found.message]
    assert found.exit_code == 3


def test_restarts_are_switched_off_where_nobody_would_restart(tiny, monkeypatch):
    """`engine.max_restarts` becomes 0, with a notice, in a process that a script has started."""
    set_all(monkeypatch, {"RANK": "3", "WORLD_SIZE": "4"})
    report = examine(tiny, ["engine.max_restarts=1"])
    changes = [notice.text for notice in report.notices if notice.unasked]
    assert "engine.max_restarts: 1 → 0 (RANK started this process and does not restart it)" in changes
    assert report.config.engine.processes == 4


# ---- two machines, simulated by network namespaces that a virtual cable joins


@pytest.fixture
def cable():
    """The virtual cable between two network namespaces."""
    try:
        made = Cable()
    except NoCable as reason:
        pytest.skip(f"{reason}; run this test as root")
    yield made
    made.remove()


@pytest.fixture
def machines(command, tiny, place, cable, tmp_path):
    """`machines(override, …)` starts the command in both namespaces; the address is that of the first.

    Each has its own folder for temporary files, as machines have.
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
    """Two machines give the losses and weights of one, with sharded tensors too; no network interface is set."""
    first, _ = end_all(machines(f"engine.backend={backend}"))
    assert_alike(first, alone if backend == "ddp" else job(f"engine.backend={backend}"), tracked)
    assert tracked(first.folder).status == "FINISHED"


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_told(machines, alone, store):
    """If the second machine does not see the first one's disk, it warns, and the weights are the same."""
    first, second = end_all(machines(second={"HIDDEN": str(store)}))
    assert f"the run's folder of rank 0, {first.folder}, is not on this machine" in second.err
    assert "is not on this machine" not in first.err
    assert digest(first.folder / "last.ckpt") == digest(alone.folder / "last.ckpt")


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_machines(machines, cable, tracked, tmp_path):
    """If the link is cut, both machines exit with code 5 and an error within the process group's time limit."""
    go = tmp_path / "go"
    waits = f"train.callbacks=[{{type: own.Waits, params: {{until: '{go}'}}}}]"
    running = machines("engine.params.timeout=8", waits)
    for each in running:
        each.says("waits")
    cable.cut()
    go.touch()
    ended = end_all(running, code=5)
    for each in ended:
        (error,) = errors(each)
        assert "timed out after 8 s (engine.params.timeout)" in error
    assert tracked(ended[0].folder).status == "FAILED"


# ---- torchrun


def torchrun():
    """Run `torchrun` with workers that are forked from it; the agent and the variables that it sets are real."""
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

    It sets a free port, since another torchrun on this machine may have the default one.
    """

    def start(options, *overrides, cwd=place):
        port = [] if any("rdzv" in option for option in options) else [f"--master-port={free_port()}"]
        arguments = (*port, *options, "-m", "deeplightning", "train", tiny, *overrides)
        return command.start(*arguments, cwd=cwd, main="test_nodes:torchrun")

    return start


def runs_of(store):
    """Return the folders of all runs."""
    return set(store.glob("*/*/artifacts"))


def test_torchrun_starts_all_processes_itself(by_torchrun, alone, store):
    """Two processes of torchrun are one run, with the weights of two processes that this command starts."""
    before = runs_of(store)
    ended = by_torchrun(["--nproc-per-node", "2"], "--show-config").end(code=0)
    assert runs_of(store) - before == {ended.folder}
    assert "processes: 2" in ended.out
    assert "num_nodes: 1" in ended.out
    assert digest(ended.folder / "last.ckpt") == digest(alone.folder / "last.ckpt")
    assert sorted(path.name for path in (ended.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


@pytest.mark.slow
def test_two_torchruns_are_one_run(by_torchrun, alone, store):
    """Two torchruns of one process each are one run of world size 2; a later job with the same id is another run."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options += ["--rdzv-id=two", "--local-addr=127.0.0.1"]
    for _ in range(2):
        before = runs_of(store)
        ended = end_all([by_torchrun(options, "--show-config", "engine.backend=ddp") for _ in range(2)])
        (folder,) = runs_of(store) - before
        assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")
    assert "num_nodes: 2" in ended[0].out + ended[1].out


KILLED = '''\
import os
import pathlib

import own


class Once(own.Killed):
    """Kills the second process, once."""

    def on_train_batch_start(self, trainer, *rest):
        mark = pathlib.Path("mark")
        if trainer.global_rank == 1 and not mark.exists() and (trainer.current_epoch, rest[-1]) == self.at:
            mark.touch()
            super().on_train_batch_start(trainer, *rest)
'''


@pytest.mark.slow
def test_torchrun_restarts_in_the_same_run(by_torchrun, alone, store, tracked, tmp_path):
    """With `--max-restarts`, a killed run resumes from the latest checkpoint, and ends like an uninterrupted one."""
    before = runs_of(store)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "killed.py").write_text(KILLED)
    once = "train.callbacks=[{type: killed.Once, params: {epoch: 1, batch: 2}}]"
    by_torchrun(["--nproc-per-node=2", "--max-restarts=1"], once, cwd=tmp_path).end(code=0)
    assert (tmp_path / "mark").exists()
    (folder,) = runs_of(store) - before
    assert tracked(folder).status == "FINISHED"
    assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")


@pytest.mark.slow
def test_two_torchruns_restart_in_the_same_run(by_torchrun, alone, store, tmp_path):
    """Only the agent of the killed process counts the restart; the run ends like an uninterrupted one."""
    before = runs_of(store)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "killed.py").write_text(KILLED)
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options += ["--rdzv-id=again", "--local-addr=127.0.0.1", "--max-restarts=1"]
    once = "train.callbacks=[{type: killed.Once, params: {epoch: 1, batch: 2}}]"
    end_all([by_torchrun(options, once, "engine.backend=ddp", cwd=tmp_path) for _ in range(2)])
    (folder,) = runs_of(store) - before
    assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")


@pytest.mark.slow
def test_torchrun_starts_the_command_in_new_processes(tiny, place, alone):
    """`torchrun --nproc-per-node 2 -m deeplightning …`, as a user runs it, gives the same weights."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = python(*launcher, "-m", "deeplightning", "train", tiny, cwd=place)
    assert ended.returncode == 0, ended.stderr
    folder = Path(ended.stdout.splitlines()[-1].removeprefix("Artifact storage path: "))
    assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")


# ---- MPI

MPI = (  # a file for each process: in one pipe their lines can mix
    "import json, os, pathlib, sys; found = {n: v for n, v in os.environ.items() if n[:4] in ('OMPI', 'PMIX')}; "
    "pathlib.Path(sys.argv[1], found['OMPI_COMM_WORLD_RANK']).write_text(json.dumps(found))"
)
"""Writes the variables that mpirun sets."""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun; Debian has it in openmpi-bin")
def test_mpirun_starts_all_processes(command, tiny, place, alone, store, tmp_path):
    """The variables of `mpirun -np 2` make one run of world size 2, without mpi4py."""
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable, "-c", MPI, tmp_path]
    subprocess.run(mpirun, env=environment(), check=True, timeout=60)
    variables = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    before = runs_of(store)
    ended = end_all([command.start("train", tiny, cwd=place, **own) for own in variables])
    (folder,) = runs_of(store) - before
    assert digest(folder / "last.ckpt") == digest(alone.folder / "last.ckpt")
    assert "MPI started 2 processes" in "".join(each.err for each in ended)


# ---- plan


BY_HAND = {"MASTER_ADDR": "one", "MASTER_PORT": "2000", "NODE_RANK": "1"}
OF_TASK = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
OF_TASK |= {"MASTER_ADDR": "n03", "MASTER_PORT": port_of("slurm-7.0")}


@pytest.mark.parametrize(
    ("variables", "overrides", "where", "times", "environment"),
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
def test_plan_says_what_would_start(variables, overrides, where, times, environment, command, tiny, place, store):
    """`plan` prints the processes, their variables (in a Slurm task, from its own) and the command; nothing starts."""
    pytest.importorskip("deeplightning_plan")
    before = runs_of(store)
    (start,) = yaml.safe_load(command("plan", tiny, *overrides, cwd=place, **variables, code=0).out)
    arguments = [sys.executable, "-m", "deeplightning", "train", str(tiny), *overrides]
    assert start == {"where": where, "times": times, "environment": environment, "command": arguments}
    assert runs_of(store) == before
