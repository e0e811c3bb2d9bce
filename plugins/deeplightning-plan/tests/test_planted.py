"""What fails on a GPU or with several processes alone is named before a run, on a machine with neither."""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from deeplightning_plan import compared_ranks as ranks
from deeplightning_plan.compared_ranks import Ranks
from deeplightning_plan.fake_gpu import CPU, FakeGpu, NotOnCPU, mark_of
from planted import ALL, DEVICES, HEAD, named_line

from deeplightning.dry_run.diagnosis import DeviceError

GOOD = """\
seed: 7
stages: [train, test]
data:
  module: {type: deeplightning.data.digits.Digits}
  root: nowhere
  batch_size: 16
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 2}
"""

USUAL = {
    "a tensor made in forward",
    "the sum of a metric that is no state",
    "a device by number, where each rank has its own",
    "a table that a checkpoint brings to the CPU",
    "a constant on the GPU, which the export has not",
    "a barrier of one rank while a checkpoint is saved",
    "another number of layers on each rank",
}
"""They need different parts of a dry run each; the others are tested before a release."""

RIGHT = '''\
"""What people write for GPUs, and for machines without one."""

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.sequence, self.classes = nn.LSTM(8, 10, batch_first=True), nn.Embedding(10, 10)
        self.register_buffer("shift", torch.zeros(64))

    def forward(self, x):
        x = self.last(self.first(x.flatten(1))) + self.shift
        lengths = torch.full((len(x),), 8)
        packed = nn.utils.rnn.pack_padded_sequence(x.view(-1, 8, 8), lengths, batch_first=True)
        answers, lengths = nn.utils.rnn.pad_packed_sequence(self.sequence(packed)[0], batch_first=True)
        seen = torch.arange(8)[None] < lengths[:, None]
        answers = answers * seen.to(x.device)[..., None]
        with torch.autocast(x.device.type, enabled=False):
            return answers.float().sum(1) / torch.tensor(8.0) + self.classes(torch.arange(10, device=x.device)).mean(0)


class Own(ImageClassification):
    def training_step(self, batch, batch_idx):
        torch.zeros(len(batch["label"])).to(GPU) + batch["label"]
        torch.zeros(10, device=batch["label"].device)[batch["label"]] = torch.tensor(1.0)
        batch["label"].new_zeros(3) + torch.zeros_like(batch["label"])[:3]
        torch.tensor([float(n) for n in batch["label"]]).numpy()
        if torch.cuda.is_available() and batch["image"].is_cuda:
            batch["image"].cuda().detach().cpu().numpy()
            torch.cuda.synchronize()
        loss = super().training_step(batch, batch_idx)
        if dist.is_initialized():
            dist.all_reduce(loss.detach().clone())
            dist.all_gather_object([None] * dist.get_world_size(), {"rank": self.global_rank})
        return loss

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("own", torch.tensor(1.0, device=self.device), sync_dist=True)


class Notes(pl.Callback):
    def __init__(self):
        self.total = 0.0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.total += outputs["loss"]
        norms = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None])
        assert norms.device == module.device and norms.is_cuda == (module.device.type == "cuda")

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["norms"] = [p.detach().cpu().numpy().sum() for p in module.parameters()]
'''


@pytest.fixture
def tried(command, tmp_path):
    """`tried(code, override, …)` tries out a config with a user's module `own`, as `check --dry-run` does."""

    def run(code, *overrides, **options):
        (tmp_path / "own.py").write_text(HEAD + code)
        (tmp_path / "good.yaml").write_text(GOOD)
        return command("check", "good.yaml", "--dry-run", *overrides, cwd=tmp_path, **options)

    return run


def overrides_of(planted):
    engine = f"engine.gpus={planted.gpus}" if planted.gpus else "engine.processes=2"
    return [*re.split(r" (?=\w+\.\w+[.=])", planted.part), engine]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.slow) for n in ALL])
def test_a_fault_of_devices_or_ranks_is_named(name, tried):
    """In one message, with file and line of the user's own code."""
    planted = ALL[name]
    outcome = tried(planted.code, *overrides_of(planted))
    faults = [
        line for line in outcome.err.splitlines() if line.startswith("error: ") and "engine.gpus: asks" not in line
    ]
    assert len(faults) == 1, outcome
    assert planted.words in faults[0]
    assert f"own.py:{named_line(planted.code)}" in faults[0]
    assert outcome.code in (2, 5)
    assert "Traceback" not in outcome.err


def test_there_are_enough_of_both():
    assert len(DEVICES) >= 20
    assert len(ALL) - len(DEVICES) >= 10


@pytest.mark.parametrize("engine", ["gpus=1", "gpus=2", "processes=2", "gpus=1 engine.precision=bf16-mixed"])
def test_what_is_right_on_a_gpu_is_no_fault(engine, tried):
    """Packed sequences, tied weights, a device that is chosen at import, numbers on the CPU, collectives of all ranks:
    the only thing wrong is that this machine has no GPU."""
    own = ["model.network={type: own.Network}", "model.module.type=own.Own", "train.callbacks=[{type: own.Notes}]"]
    outcome = tried(RIGHT, *own, *f"engine.{engine}".split(" "))
    faults = [line for line in outcome.err.splitlines() if line.startswith(("error: ", "unchecked: "))]
    has_gpus = torch.cuda.device_count() >= 2
    wanted = ["asks for 1 GPU;", "asks for 2 GPUs;"] if "gpus" in engine and not has_gpus else []
    assert [any(words in fault for words in wanted) for fault in faults] == [True] * bool(wanted), outcome
    assert outcome.code == (3 if wanted else 0)


# ---- processes that wait for ever, and their end


WAITS = """\
import time, torch
from torch import distributed
from deeplightning_plan.compared_ranks import Event
def wait_for_ever(rank, report):
    if rank == 1:
        distributed.recv(torch.zeros(1), 0)
    report("log", "here")
    time.sleep(1000)
    return Event("end")
"""
"""Rank 1 waits for what rank 0 does not send."""


def test_ranks_that_wait_for_ever_are_given_up_with_the_place_of_each(monkeypatch, tmp_path):
    """A time-out ends them; the message has the last collective and the line of each."""
    monkeypatch.setattr(ranks, "SILENCE_SECONDS", 3.0)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "waits_for_ever.py").write_text(WAITS)
    act = importlib.import_module("waits_for_ever").wait_for_ever
    begun = time.monotonic()
    with Ranks(act) as both:
        message, certain = both.difference()
    assert time.monotonic() - begun < 30
    assert not certain
    assert "rank 0 last entered no collective (now at " in message
    assert "waits_for_ever.py:8)" in message
    assert re.search(r"rank 1 last entered recv_? \(.*waits_for_ever.py:6\)", message), message
    assert not any(process.is_alive() for process in both.processes)


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_process_outlives_a_dry_run_that_is_interrupted(number, tmp_path):
    """Neither after Ctrl-C nor where it is killed, in the middle of a step."""
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
    while any(is_there(int(file.read_text())) for file in files):
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- the pretended GPU itself

GPU = torch.device("cuda", 0)


def test_a_number_on_the_cpu_mixes_only_where_a_gpu_takes_it():
    """An operator takes it, `stack` does not; nor may it be changed by what is on the GPU."""
    with FakeGpu(GPU, 1, strict=True):
        number, there = torch.tensor(2.0), torch.ones(3, device="cuda")
        assert (there * number).device == GPU
        for mixed in (
            lambda: torch.stack([number, there[0]]),
            lambda: number.add_(there[0]),
            lambda: there[0] + there.cpu(),
        ):
            with pytest.raises(DeviceError):
                mixed()
        with pytest.raises(NotOnCPU, match="can't convert cuda:0 device type tensor to numpy"):
            there.numpy()
        with pytest.raises(TypeError, match="can't convert"):
            there.__array__()


def test_what_moves_is_a_copy():
    """As on a GPU, what becomes of the copy changes nothing on the CPU."""
    with FakeGpu(GPU, 1, strict=True):
        here = torch.zeros(3)
        for there in (here.cuda(), here.to("cuda:0"), torch.as_tensor(here, device=0), here.to(GPU)):
            there.add_(1)
            assert (there.device, mark_of(here)) == (GPU, CPU)
            assert (there.get_device(), there.is_cuda, there.is_cpu) == (0, True, False)
        assert here.sum() == 0
        assert here.cpu() is here or here.cpu().device == CPU


def test_what_nobody_has_marked_is_on_the_cpu():
    """Tensors that were made at import, and by classes that torch's modes do not see."""
    early = torch.ones(2)
    with FakeGpu(GPU, 1, strict=True) as mode:
        for tensor in (early, torch.FloatTensor([1.0, 2.0])):
            with pytest.raises(DeviceError):
                tensor + torch.ones(2, device="cuda")
        assert len(mode.refused) == 2
        with contextlib.suppress(DeviceError):
            torch.ones(1, device="cuda:3")
        assert "invalid device ordinal: cuda:3" in str(mode.refused[-1])
