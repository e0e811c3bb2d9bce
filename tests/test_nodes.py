"""Processes on several machines, or started by somebody else: one run, or a note on each machine and no hang."""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
import threading

import pytest
from conftest import digest

from deeplightning.config.fault import SetupError
from deeplightning.configure import examine, load_config
from deeplightning.engine.meeting import patience

TWO = ("engine.num_nodes=2", "engine.backend=ddp")


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return str(made.getsockname()[1])


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


def test_two_shells_are_one_run(nodes, alone, tracked):
    """MASTER_ADDR, MASTER_PORT and NODE_RANK on each: world 2, one run, the losses and weights of one machine."""
    first, second = nodes(numbered(0, 1), *TWO)
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    assert second.out == ""
    assert digest(first.folder / "last.ckpt") == digest(alone.folder / "last.ckpt")
    ours, theirs = tracked(first.folder).series(), tracked(alone.folder).series()
    assert {name: points for name, points in ours.items() if "loss" in name} == {
        name: points for name, points in theirs.items() if "loss" in name
    }
    assert "32 samples a step: 16 per process x 2 processes" in first.out
    assert sorted(path.name for path in (first.folder / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_a_machine_that_does_not_come_is_named(nodes):
    """In the time limit, exit 3."""
    (first,) = nodes(numbered(0), *TWO, wait="1")
    assert first.code == 3
    (note,) = notes(first)
    assert "waiting for node 1: of 2 machines 1 did not come in 1 s" in note


def test_the_first_machine_may_be_missing_too(nodes):
    """Nobody listens at the address: exit 3 after the time limit, with both variables."""
    (second,) = nodes(numbered(1), *TWO, wait="1", MASTER_PORT="1")
    assert second.code == 3
    (note,) = notes(second)
    assert "MASTER_ADDR=127.0.0.1, MASTER_PORT=1: waiting for node 0: rank 0 does not answer there after 1 s" in note


def test_all_who_wait_are_told_who_is_missing(nodes):
    """Of three machines two came: the same note on both, exit 3."""
    first, second = nodes(numbered(0, 1), "engine.num_nodes=3", "engine.backend=ddp", wait="2")
    assert (first.code, second.code) == (3, 3)
    told = [note for each in (first, second) for note in notes(each)]
    assert told
    assert all("waiting for node 2: of 3 machines 1 did not come" in note for note in told)


def test_the_first_machine_twice_is_told_on_both(nodes):
    """Both wait for the second: one note with the number, the same on both, exit 3."""
    both = nodes(numbered(0, 0), *TWO)
    assert [each.code for each in both] == [3, 3]
    told = {note for each in both for note in notes(each)}
    assert len(told) == 1, told
    assert "NODE_RANK=0 is told twice, on " in told.pop()


def test_another_machine_twice_is_told_on_all(nodes):
    """Of three machines, two came as the second: the same note everywhere, exit 3."""
    all_of_them = nodes(numbered(0, 1, 1), "engine.num_nodes=3", "engine.backend=ddp")
    assert [each.code for each in all_of_them] == [3, 3, 3]
    told = [note for each in all_of_them for note in notes(each)]
    assert told
    assert all("NODE_RANK=1 is told twice, on " in note for note in told), told


def test_other_configs_on_another_machine_are_refused(nodes):
    """Seed and number of processes, with both values, before anything is learned; exit 3 on both."""
    both = nodes(numbered(0, 1), *TWO, own=((), ("seed=8", "model.optimizer.params.lr=0.1")))
    assert [each.code for each in both] == [3, 3]
    told = [note for each in both for note in notes(each)]
    assert all("seed is 7 on node 0, 8 on node 1" in note and "model.optimizer is" in note for note in told), told


def test_another_number_of_processes_is_refused_before_they_start(nodes):
    """The machines meet first: nothing is left running."""
    both = nodes(numbered(0, 1), *TWO, own=((), ("engine.processes=2",)))
    assert [each.code for each in both] == [3, 3]
    told = [note for each in both for note in notes(each)]
    assert all("engine.processes is 1 on node 0, 2 on node 1" in note for note in told), told


class Listener:
    """A program at a port: `says` is its answer to whatever it gets; None: it says nothing, ever."""

    def __init__(self, says):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = str(self.socket.getsockname()[1])
        self.open = []
        threading.Thread(target=self._serve, args=(says,), daemon=True).start()

    def _serve(self, says):
        while True:
            try:
                caller, _ = self.socket.accept()
            except OSError:
                return
            self.open.append(caller)
            if says is not None:
                caller.sendall(says)
                caller.close()


@pytest.mark.parametrize("says", [b"HTTP/1.0 400 Bad Request\r\n\r\n", None])
@pytest.mark.parametrize("number", [0, 1])
def test_a_port_of_another_program_is_named(says, number, nodes):
    """A web server, or one that never answers: exit 3 on the machine that listens and on the one that calls."""
    listener = Listener(says)
    (ended,) = nodes(numbered(number), *TWO, wait="1", MASTER_PORT=listener.port)
    listener.socket.close()
    assert ended.code == 3
    (note,) = notes(ended)
    expected = "in use by another program" if number == 0 else "what listens there is no torch store"
    assert listener.port in note
    assert expected in note


@pytest.mark.parametrize(
    ("variables", "note"),
    [
        ({"NODE_RANK": "2"}, "NODE_RANK=2 is none of 0 to 1"),
        ({"NODE_RANK": "second"}, "NODE_RANK=second is none of 0 to 1"),
        ({"NODE_RANK": "0", "MASTER_ADDR": ""}, "MASTER_ADDR not set; each of the machines needs it"),
        ({}, "NODE_RANK not set; each of the machines needs it"),
    ],
)
def test_a_variable_that_is_wrong_is_named(variables, note, tiny, monkeypatch):
    """Exit 3, with what would be right."""
    for name, value in ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2000"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=note):
        load_config(tiny, [*TWO])


@pytest.mark.parametrize("text", ["long", "0", "-1", "nan"])
def test_a_time_limit_that_is_none_is_named(text, monkeypatch):
    """Seconds, above 0."""
    monkeypatch.setenv("DEEPLIGHTNING_MEET_SECONDS", text)
    with pytest.raises(SetupError, match=f"DEEPLIGHTNING_MEET_SECONDS='{text}' is no time in seconds"):
        patience()


def test_a_machine_of_several_with_one_in_the_config_is_refused(tiny, monkeypatch):
    """NODE_RANK=1 would be a run without a first process."""
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(SetupError, match="there is 1 node, and NODE_RANK=1; set"):
        load_config(tiny)


def test_several_machines_without_anybody_to_start_them_are_refused(tiny):
    """By `check` as well: exit 2, and the ways there are."""
    (fault,) = examine(tiny, [*TWO]).faults
    assert (fault.key, fault.exit_code) == ("engine.num_nodes", 2)
    assert "2 machines have to be started: by torchrun, Slurm, `engine.launcher`, or by this command" in fault.message


# ---- two machines, as Linux can pretend: network namespaces joined by a cable


def in_namespace():
    """`deeplightning`, in the network namespace that NAMESPACE names."""
    from deeplightning import cli

    handle = os.open(f"/var/run/netns/{os.environ['NAMESPACE']}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "setns")
    tempfile.tempdir = None  # what the process that this one is forked from has found
    cli.main()


class Cable:
    """Two network namespaces and what joins them; `cut` ends it at the second."""

    def __init__(self):
        self.names = [f"dl{os.getpid()}{letter}" for letter in "ab"]
        self.made = []
        for name in self.names:
            self._ip("netns", "add", name)
            self.made.append(name)
        one, two = self.names
        self._ip("link", "add", "va", "netns", one, "type", "veth", "peer", "name", "vb", "netns", two)
        for number, (name, end) in enumerate(zip(self.names, ("va", "vb"), strict=True), start=1):
            self._ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", name, "link", "set", end, "up")

    def _ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)

    def cut(self):
        self._ip("-n", self.names[1], "link", "set", "vb", "down")

    def remove(self):
        for name in self.made:
            self._ip("netns", "del", name)


@pytest.fixture
def cable():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two network namespaces need root and `ip` (Debian: iproute2); run this test as root")
    made = Cable.__new__(Cable)
    try:
        made.__init__()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        with contextlib.suppress(subprocess.SubprocessError):
            made.remove()
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
    yield made
    made.remove()


@pytest.fixture
def machines(command, tiny, place, cable, tmp_path):
    """`machines(override, …)` starts the command in both namespaces; the first one's is the address.

    Each has a folder for temporary files of its own, as machines have.
    """

    def start(*overrides):
        variables = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "DEEPLIGHTNING_MEET_SECONDS": "40"}
        running = []
        for number, name in enumerate(cable.names):
            (tmp_path / name).mkdir()
            own = {"NODE_RANK": str(number), "NAMESPACE": name, "TMPDIR": str(tmp_path / name)}
            main = "test_nodes:in_namespace"
            running.append(command.start("train", tiny, *TWO, *overrides, cwd=place, main=main, **variables, **own))
        return running

    return start


def test_two_machines_are_one_run(machines, alone, tracked):
    """Losses and weights are those of two processes on one machine; nobody says which network interface to use."""
    first, second = (each.end() for each in machines())
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    assert digest(first.folder / "last.ckpt") == digest(alone.folder / "last.ckpt")
    ours, theirs = tracked(first.folder).series(), tracked(alone.folder).series()
    assert [ours[name] for name in ours if "loss" in name] == [theirs[name] for name in theirs if "loss" in name]
    assert tracked(first.folder).status == "FINISHED"


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
        assert "waited in vain for 8 s, as long as engine.params.timeout allows" in note
    assert tracked(first.folder).status == "FAILED"
