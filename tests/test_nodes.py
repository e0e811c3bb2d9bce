"""Processes on several machines, or started by somebody else: one run, or a note on each machine and no hang."""

import re
import socket
import threading

import pytest
from conftest import digest

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
