"""On a GPU: CUDA graphs learn what eager mode learns and are recorded once.

Skipped where there is no GPU. Each run is a fresh process: CUDA does not survive a fork.
"""

import json

import pytest
import torch
from commands import real
from conftest import weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

NOTES = '''\
"""Notes what the compiler did."""

import json
import pathlib

import pytorch_lightning as pl


class Notes(pl.Callback):
    def on_train_end(self, trainer, module):
        from torch._dynamo.utils import counters

        graphs = counters["stats"].get("unique_graphs", 0)
        parts = [getattr(module, "_compiled_step", None), *getattr(module, "_compiled_parts", ())]
        recorded = sum(getattr(part, "_replay", None) is not None for part in parts)
        skips = counters["inductor"].get("cudagraph_skips", 0)
        found = {"graphs": graphs, "skips": skips, "recorded": recorded}
        pathlib.Path("notes.json").write_text(json.dumps(found))
'''
OWN = '''\
from torch import nn

import deeplightning.model.cnn


class Drawing(nn.Sequential):
    """With batch norm and random numbers."""

    def __init__(self):
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5)]
        super().__init__(*layers, nn.Linear(144, 10))


class Recurrent(nn.Module):
    """Its LSTM holds its weights in a list of its own."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, images):
        return self.head(self.lstm(images[:, 0])[0][:, -1])


class Waits(deeplightning.model.cnn.SimpleCNN):
    """Reads a number of its pictures."""

    def __init__(self):
        super().__init__(num_classes=10, num_channels=1, image_size=[8, 8])

    def forward(self, images):
        return super().forward(images) * (1 if images.mean().item() < 1000 else 2)
'''
CHANGING = """\
import pytorch_lightning as pl
import torch


class Changes(pl.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            convolution, _, _, _, dropout, last = module.network
            convolution.weight.requires_grad_(False)
            dropout.p = 0.75
            last.weight.data = last.weight.data.clone()
"""
LONGEST = 600  # seconds: a cold compilation


@pytest.fixture
def learned(tiny, tmp_path):
    """`learned(override, …)` is the outcome of a run on one GPU, and what the compiler did."""
    (tmp_path / "notes.py").write_text(NOTES)
    (tmp_path / "layers.py").write_text(OWN)

    def run(*overrides):
        given = ["engine.gpus=1", "train.callbacks=[{type: notes.Notes}]", *overrides]
        outcome = real(
            "train", tiny, *given, cwd=tmp_path, limit=LONGEST, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), code=0
        )
        return outcome, json.loads((tmp_path / "notes.json").read_text())

    return run


@pytest.mark.parametrize(
    "settings",
    [[], ["train.accumulator_factor=3", "train.gradient_clip={value: 0.5}"], ["engine.backend=ddp"]],
    ids=["plain", "accumulated", "ddp"],
)
def test_cuda_graphs_learn_what_eager_mode_does_and_are_recorded_once(settings, learned):
    """Weights and train_loss of a run with short last batches, validation and test; one graph, which nothing skips."""
    settings = ["train.num_epochs=2", "stages=[train, test]", *settings]
    expected = weights(learned(*settings)[0].folder / "last.ckpt")
    done, notes = learned(*settings, "engine.compile=reduce-overhead")
    assert notes["skips"] == 0
    if "engine.backend=ddp" not in settings:  # which may divide a graph by its buckets
        assert notes["graphs"] == 1
    for name, values in weights(done.folder / "last.ckpt").items():
        torch.testing.assert_close(values, expected[name], atol=1e-3, rtol=1e-2)


def assert_same(found, expected):
    """The weights of two runs are the same to the last bit."""
    ours = weights(expected.folder / "last.ckpt")
    for name, values in weights(found.folder / "last.ckpt").items():
        assert torch.equal(values, ours[name]), name


# Eager mode and a recorded step launch the same kernels in the same order.
DRAWING = "model.network={type: layers.Drawing}"
SAME = ["train.num_epochs=2", "engine.deterministic=true"]


@pytest.mark.parametrize(
    "settings",
    [
        ["engine.precision=bf16", "engine.channels_last=true"],
        ["train.accumulator_factor=3", "train.gradient_clip={value: 0.5}", DRAWING],
        ["engine.precision=16", DRAWING, "model.optimizer={type: torch.optim.Adam, params: {lr: 0.01}}"],
        ["engine.backend=ddp", DRAWING],
    ],
    ids=["bf16, channels last", "accumulated, clipped, batch norm", "scaled loss, random numbers", "ddp"],
)
def test_a_recorded_step_learns_what_eager_mode_does_bit_for_bit(settings, learned):
    """Weights, with short last batches that run eagerly; so do buffers, and the numbers that a network draws."""
    eager, _ = learned(*SAME, *settings)
    done, notes = learned(*SAME, *settings, "engine.compile=graphs")
    assert notes == {"graphs": 0, "skips": 0, "recorded": 1}
    assert_same(done, eager)


@pytest.mark.parametrize(
    ("settings", "stopped"),
    [
        ([DRAWING, "engine.compile=graphs"], "train.max_steps=12"),
        (["engine.compile=reduce-overhead"], "train.max_steps=5"),
    ],
)
def test_a_resumed_run_with_graphs_ends_like_one_that_was_not_stopped(settings, stopped, learned):
    """Bit for bit, stopped in either epoch; a resumed run records its step again."""
    whole, _ = learned(*SAME, *settings)
    first, _ = learned(*SAME, *settings, stopped)
    resumed, _ = learned(*SAME, *settings, f"train.resume_ckpt={first.folder}")
    assert_same(resumed, whole)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("Waits", "engine.compile=graphs: this step cannot be recorded: "),
        ("Recurrent", "engine.compile=graphs: a recorded step would not train network.lstm."),
    ],
)
def test_a_network_that_cannot_be_recorded_is_refused(network, reason, tiny, tmp_path):
    """Exit code 2, the reason, and what to set instead: an LSTM moves the weights that it is given."""
    (tmp_path / "layers.py").write_text(OWN)
    given = ["engine.gpus=1", "engine.compile=graphs", f"model.network={{type: layers.{network}}}"]
    done = real("train", tiny, *given, cwd=tmp_path, limit=LONGEST, code=2)
    assert reason in done.err
    assert "engine.compile=reduce-overhead" in done.err
    assert "Traceback" not in done.err


def test_a_network_that_a_callback_changes_is_recorded_again(learned, tmp_path):
    """Layers that freeze, begin to learn, or drop out more from the second epoch on: eager mode's weights."""
    (tmp_path / "changing.py").write_text(CHANGING)
    callbacks = "train.callbacks=[{type: notes.Notes}, {type: changing.Changes}]"
    settings = [*SAME, DRAWING, callbacks, "model.trainable=[^0, ^5]"]
    eager, _ = learned(*settings)
    done, _ = learned(*settings, "engine.compile=graphs")
    assert "so the step is recorded again" in done.out + done.err
    assert_same(done, eager)
