"""A process of a run is lost: all are started again, as often as is allowed, and the end is that of an undisturbed run.

The processes that the launcher starts are forked (see `forks`), but for one test, in which all is as a person has it.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import LONGEST, environment
from conftest import OWN, digest
from test_kill import KILLS, SETTINGS, WRITING

FORKED = "forks:main"

LOSSES = '''\
"""A user's own code that goes wrong, in the starts of a launch that WHEN names."""

import os
import pathlib
import signal
import time

import pytorch_lightning as pl
import torch


def note():
    pathlib.Path(os.environ["PIDS"], f"{os.getpid()}").touch()


note()


class At(pl.Callback):
    """Does something at the start of the third batch of the second epoch, in one process."""

    def __init__(self, rank, what, when="0"):
        self.rank, self.what, self.when = rank, what, str(when)
        note()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if (trainer.current_epoch, batch_idx, trainer.global_rank) == (1, 2, self.rank) and start in self.when:
            getattr(self, self.what)(module)

    def kill(self, module):
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self, module):
        os.kill(os.getpid(), signal.SIGSEGV)

    def fault(self, module):
        raise KeyError("a fault of the user's")

    def leave(self, module):
        os._exit(7)

    def spoil(self, module):
        with torch.no_grad():
            next(module.parameters()).fill_(float("nan"))

    def sleep(self, module):
        print("sleeps", flush=True)
        time.sleep(1000)

    def stop(self, module):
        os.kill(os.getpid(), signal.SIGSTOP)
'''


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A working directory with own code."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "losses.py").write_text(LOSSES)
    (folder / "own.py").write_text(OWN)
    one_kill = 'os.environ.get("KILL", "-:0").split(":")'
    assert one_kill in KILLS
    one_each = 'os.environ["KILL"].split(",")[int(os.environ["TORCHELASTIC_RESTART_COUNT"])].split(":")'
    (folder / "kills.py").write_text(KILLS.replace(one_kill, one_each))
    return folder


@pytest.fixture
def launch(command, tiny, here, tmp_path):
    """`launch(override, …)` starts a run that is looked after; nothing is left of it, and no process in its way."""
    temporary, pids = tmp_path / "tmp", tmp_path / "pids"
    temporary.mkdir()
    pids.mkdir()

    def start(*overrides, restarts=1, processes=2, **variables):
        engine = [f"engine.max_restarts={restarts}", f"engine.processes={processes}"]
        launcher = ["engine.launcher={type: deeplightning.engine.launch.Local}"] if not restarts else []
        variables = {"TMPDIR": str(temporary), "PIDS": str(pids), "main": FORKED} | variables
        return command.start("train", tiny, *engine, *launcher, *overrides, cwd=here, **variables)

    yield start
    left = [path.name for path in pids.iterdir() if alive(int(path.name))]
    assert left == [], "processes are left"
    assert list(temporary.iterdir()) == []


def alive(pid, seconds=10):
    """Whether a process does not end."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def at(rank, what, when="0"):
    return f"train.callbacks=[{{type: losses.At, params: {{rank: {rank}, what: {what}, when: '{when}'}}}}]"


def restarts_of(outcome):
    return re.findall(r"^restart .*", outcome.err, re.MULTILINE)


@pytest.fixture(scope="module")
def undisturbed(command, tiny, here, tracked, tmp_path_factory):
    """`undisturbed(processes)` is what a run leaves of which no process is lost: weights, points."""
    known = {}

    def run(processes):
        if processes not in known:
            done = command(
                "train", tiny, f"engine.processes={processes}", "engine.max_restarts=1", cwd=here, main=FORKED
            )
            assert done.code == 0, done
            known[processes] = digest(done.folder / "last.ckpt"), tracked(done.folder).series()
        return known[processes]

    return run


# ---- how often


@pytest.mark.parametrize(
    ("restarts", "when", "code", "needed"),
    [(0, "0", 5, 0), (1, "0", 0, 1), (3, "0", 0, 1), (0, "0123", 5, 0), (1, "0123", 5, 1), (3, "0123", 5, 3)],
    ids=["0-one", "1-one", "3-one", "0-every", "1-every", "3-every"],
)
def test_a_lost_process_is_started_again_as_often_as_allowed(
    restarts, when, code, needed, launch, tracked, undisturbed
):
    """One kill, or one in every start: a line for each restart; one run, which ends like an undisturbed one, or FAILED
    with the last checkpoint named."""
    done = launch(at(1, "kill", when), restarts=restarts).end()
    assert done.code == code, done
    told = restarts_of(done)
    assert len(told) == needed
    for number, line in enumerate(told, start=1):
        assert line.startswith(f"restart {number} of {restarts}: rank 1: a worker was lost: "), line
        assert line.endswith(f"goes on from {done.folder / 'last.ckpt'}")
    run = tracked(done.folder)
    assert run.tags.get("restarts", "0") == str(needed)
    if code == 0:
        assert run.status == "FINISHED"
        assert "failure" not in run.tags
        assert (digest(done.folder / "last.ckpt"), run.series()) == undisturbed(2)
    else:
        assert run.status == "FAILED"
        assert f"the last checkpoint is {done.folder / 'last.ckpt'}" in done.err
        assert len(re.findall("^error", done.err, re.MULTILINE)) == 1
