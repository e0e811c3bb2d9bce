"""A dry run on one CPU process finds faults that appear only on a GPU or with several processes."""

import contextlib
import importlib
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checks import GOOD
from deeplightning_plan import compared_ranks as ranks
from deeplightning_plan.compared_ranks import Ranks
from deeplightning_plan.fake_gpu import CPU, FakeGpu, NotOnCPU, mark_of

from deeplightning.dry_run.diagnosis import DeviceError
from deeplightning.process.shared_folder import is_alive

OWN = Path(__file__).with_name("planted_own.py")
TASK, NETWORK = "model.module.type=own.{}", "model.network={{type: own.{}}}"
METRIC, CALLBACK = "model.metrics={{acc: {{type: own.{}}}}}", "train.callbacks=[{{type: own.{}}}]"
MIXED = "same device, but found at least two devices"
NO_NUMPY = "can't convert cuda:0 device type tensor to numpy"
INDEXED = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
GENERATOR = "Expected a 'cuda' device type for generator but found 'cpu'"
PLANTED = {
    "MadeInForward": (NETWORK, MIXED),
    "TableOnTheCpu": (TASK, INDEXED),
    "SumThatIsNoState": (METRIC, MIXED),
    "NumberOnTheCpu": (CALLBACK, MIXED),
    "LengthsStay": (f"{TASK} data.module.type=own.WithLengths", MIXED),
    "Numpy": (TASK, NO_NUMPY),
    "FirstGpu": (f"{TASK} engine.gpus=2", "rank 1 fails where rank 0 does not"),
    "SecondGpu": (NETWORK, "invalid device ordinal"),
    "Float32": (f"{NETWORK} engine.precision=bf16-true", "same dtype"),
    "Mask": (NETWORK, MIXED),
    "GradientOnTheCpu": (NETWORK, MIXED),
    "GeneratorOfTheCpu": (NETWORK, GENERATOR),
    "CopyInAList": (TASK, MIXED),
    "TableOfACheckpoint": (TASK, MIXED),
    "ConstantOnTheGpu": (TASK, "in the export"),
    "SumOfTheCpu": (f"{TASK} engine.gpus=2", "No backend type associated with device type cpu: all_reduce"),
    "LogsOnOneRank": (f"{TASK} engine.processes=2", "rank 0 logs `extra`"),
    "KeyOfOneRank": (f"{TASK} engine.processes=2", "rank 1 logs `val_extra`"),
    "NoStep": (f"{TASK} engine.processes=2", "rank 1"),
    "BarrierOfOneRank": (f"{TASK} engine.processes=2", "enters barrier"),
    "OtherNetwork": (
        f"{NETWORK} engine.processes=2",
        "rank 0 has no further parameter where rank 1 has network.layers.2.weight (10, 10)",
    ),
    "OtherCollectives": (f"{TASK} engine.processes=2", "where rank 1 enters broadcast"),
    "FailsOnOneRank": (f"{CALLBACK} engine.processes=2", "rank 1 fails where rank 0 does not"),
}
"""For each class of planted_own.py: overrides that use it, by default on one GPU, and text of the message."""


@pytest.fixture
def tried(command, tmp_path):
    """`tried(override, …)` runs `check --dry-run` for a config with the user's module `own`."""

    def run(*overrides):
        shutil.copy(OWN, tmp_path / "own.py")
        (tmp_path / "good.yaml").write_text(GOOD)
        return command("check", "good.yaml", "--dry-run", "seed=7", "stages=[train,test]", *overrides, cwd=tmp_path)

    return run


def named_line(name):
    """Return the line of a class, or of the helper below it, that a dry run must name."""
    lines = OWN.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"class {name}("))
    return next(n for n, line in enumerate(lines[first:], first + 1) if line.endswith("# named"))


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_of_devices_or_ranks_is_named(name, tried):
    """One error has the cause, and file and line of the user's code."""
    part, words = PLANTED[name]
    on_gpu = [] if "engine.processes" in part else ["engine.gpus=1"]
    outcome = tried(*on_gpu, *re.split(r" (?=\w+\.\w+[.=])", part.format(name)))
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    faults = [line for line in errors if "engine.gpus: asks" not in line]
    assert len(faults) == 1, outcome
    assert words in faults[0]
    assert f"own.py:{named_line(name)}" in faults[0]
    assert outcome.code in (2, 5)
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("engine", ["gpus=2", "processes=2", "gpus=1 engine.precision=bf16-mixed"])
def test_what_is_right_on_a_gpu_is_no_fault(engine, tried):
    """Packed sequences, tied weights, a device chosen at import, CPU scalars and collectives of all ranks are accepted;
    the only error is that this machine has no GPU."""
    own = ["model.network={type: own.Network}", "model.module.type=own.Right", "train.callbacks=[{type: own.Notes}]"]
    outcome = tried(*own, *f"engine.{engine}".split(" "))
    faults = [line for line in outcome.err.splitlines() if line.startswith(("error: ", "unchecked: "))]
    has_gpus = torch.cuda.device_count() >= 2
    wanted = ["asks for 1 GPU;", "asks for 2 GPUs;"] if "gpus" in engine and not has_gpus else []
    assert [any(words in fault for words in wanted) for fault in faults] == [True] * bool(wanted), outcome
    assert outcome.code == (3 if wanted else 0)


# ---- processes that hang, and their end

WAITS = """\
import time, torch
from torch import distributed
from deeplightning_plan.compared_ranks import Event
def wait_forever(rank, report):
    if rank == 1:
        distributed.recv(torch.zeros(1), 0)
    report("log", "here")
    time.sleep(1000)
    return Event("end")
"""
"""Rank 1 waits for a tensor that rank 0 does not send."""


def test_ranks_that_wait_for_ever_are_given_up_with_the_place_of_each(monkeypatch, tmp_path):
    """A timeout ends hanging ranks; the message has the last collective and the line of each."""
    monkeypatch.setattr(ranks, "SILENCE_SECONDS", 3.0)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "waits_forever.py").write_text(WAITS)
    act = importlib.import_module("waits_forever").wait_forever
    begun = time.monotonic()
    with Ranks(act) as both:
        message, certain = both.difference()
    assert time.monotonic() - begun < 30
    assert not certain
    assert "rank 0 last entered no collective (now at " in message
    assert "waits_forever.py:8)" in message
    assert re.search(r"rank 1 last entered recv_? \(.*waits_forever.py:6\)", message), message
    assert not any(process.is_alive() for process in both.processes)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_process_outlives_a_dry_run_that_is_interrupted(number, tmp_path):
    """All processes end after SIGINT and after SIGKILL in the middle of a step."""
    (tmp_path / "waits.py").write_text(
        "import os, sys, time\nfrom deeplightning_plan.compared_ranks import Ranks\n"
        "def act(rank, report):\n    open(f'pid_{rank}', 'w').write(str(os.getpid()))\n"
        "    while True:\n        time.sleep(0.1)\n        report('log', 'x')\n"
        "with Ranks(act) as both:\n    both.difference()\n"
    )
    started = subprocess.Popen([sys.executable, "waits.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    files = [tmp_path / "pid_0", tmp_path / "pid_1"]
    while not all(file.is_file() and file.read_text() for file in files):
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(number)
    assert started.wait(60) != 0
    end = time.monotonic() + 30
    while any(is_alive(int(file.read_text())) for file in files):
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- the fake GPU itself

GPU = torch.device("cuda", 0)


def test_a_number_on_the_cpu_mixes_only_where_a_gpu_takes_it():
    """Operators accept a CPU scalar with a GPU tensor, `stack` does not, and it cannot be modified by a GPU tensor."""
    with FakeGpu(GPU, 1, strict=True):
        number, there = torch.tensor(2.0), torch.ones(3, device="cuda")
        assert (there * number).device == GPU
        stack, add = lambda: torch.stack([number, there[0]]), lambda: number.add_(there[0])
        for mixed in (stack, add, lambda: there[0] + there.cpu()):
            with pytest.raises(DeviceError):
                mixed()
        with pytest.raises(NotOnCPU, match="can't convert cuda:0 device type tensor to numpy"):
            there.numpy()
        with pytest.raises(TypeError, match="can't convert"):
            there.__array__()


def test_what_moves_is_a_copy():
    """As on a GPU, changing the copy does not change the tensor on the CPU."""
    with FakeGpu(GPU, 1, strict=True):
        here = torch.zeros(3)
        for there in (here.cuda(), here.to("cuda:0"), torch.as_tensor(here, device=0), here.to(GPU)):
            there.add_(1)
            assert (there.device, mark_of(here)) == (GPU, CPU)
            assert (there.get_device(), there.is_cuda, there.is_cpu) == (0, True, False)
        assert here.sum() == 0
        assert here.cpu() is here or here.cpu().device == CPU


def test_what_nobody_has_marked_is_on_the_cpu():
    """Tensors created at import, and by classes that torch's modes do not intercept, are on the CPU."""
    early = torch.ones(2)
    with FakeGpu(GPU, 1, strict=True) as mode:
        for tensor in (early, torch.FloatTensor([1.0, 2.0])):
            with pytest.raises(DeviceError):
                tensor + torch.ones(2, device="cuda")
        assert len(mode.refused) == 2
        with contextlib.suppress(DeviceError):
            torch.ones(1, device="cuda:3")
        assert "invalid device ordinal: cuda:3" in str(mode.refused[-1])
