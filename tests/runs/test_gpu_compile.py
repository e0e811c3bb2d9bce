"""On a GPU, CUDA graphs learn what eager mode learns and are recorded once.

Skipped without a GPU. Each run is a new process: CUDA does not survive a fork.
"""

import json

import pytest
import torch
from commands import real
from conftest import digest, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

OWN = '''\
"""User code: callbacks and networks."""

import json
import pathlib

import pytorch_lightning as pl
from torch import nn

import deeplightning.model.cnn


class Notes(pl.Callback):
    """Records statistics of the compiler."""

    def on_train_end(self, trainer, module):
        from torch._dynamo.utils import counters

        graphs = counters["stats"].get("unique_graphs", 0)
        parts = [getattr(module, "_compiled_step", None), *getattr(module, "_compiled_parts", ())]
        recorded = sum(getattr(part, "_replay", None) is not None for part in parts)
        skips = counters["inductor"].get("cudagraph_skips", 0)
        found = {"graphs": graphs, "skips": skips, "recorded": recorded}
        pathlib.Path("notes.json").write_text(json.dumps(found))


class Changes(pl.Callback):
    """Changes the network Drawing at the second epoch."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            convolution, _, _, _, dropout, last = module.network
            convolution.weight.requires_grad_(False)
            dropout.p = 0.75
            last.weight.data = last.weight.data.clone()


class Drawing(nn.Sequential):
    """Has batch norm and draws random numbers."""

    def __init__(self):
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5)]
        super().__init__(*layers, nn.Linear(144, 10))


class Recurrent(nn.Module):
    """Its LSTM keeps its weights in a separate list."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, images):
        return self.head(self.lstm(images[:, 0])[0][:, -1])


class Waits(deeplightning.model.cnn.SimpleCNN):
    """Synchronizes: reads a value of its pictures."""

    def __init__(self):
        super().__init__(num_classes=10, num_channels=1, image_size=[8, 8])

    def forward(self, images):
        return super().forward(images) * (1 if images.mean().item() < 1000 else 2)
'''
LIMIT_SECONDS = 600  # with an empty cache of the compiler


@pytest.fixture
def learned(tiny, tmp_path):
    """`learned(override, …)` is the outcome of a run on one GPU and the statistics of its compiler."""
    (tmp_path / "own.py").write_text(OWN)

    def run(*overrides):
        settings = ["engine.gpus=1", "train.callbacks=[{type: own.Notes}]", *overrides]
        options = {"cwd": tmp_path, "limit": LIMIT_SECONDS, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        outcome = real("train", tiny, *settings, **options, code=0)
        return outcome, json.loads((tmp_path / "notes.json").read_text())

    return run


@pytest.mark.parametrize(
    "settings",
    [[], ["train.accumulator_factor=3", "train.gradient_clip={value: 0.5}"], ["engine.backend=ddp"]],
    ids=["plain", "accumulated", "ddp"],
)
def test_cuda_graphs_learn_what_eager_mode_does_and_are_recorded_once(settings, learned):
    """With short last batches, validation and test, a run ends with eager mode's weights, one graph and no skip."""
    settings = ["train.num_epochs=2", "stages=[train, test]", *settings]
    expected = weights(learned(*settings)[0].folder / "last.ckpt")
    done, notes = learned(*settings, "engine.compile=reduce-overhead")
    assert notes["skips"] == 0
    if "engine.backend=ddp" not in settings:  # which may split a graph at its buckets
        assert notes["graphs"] == 1
    for name, values in weights(done.folder / "last.ckpt").items():
        torch.testing.assert_close(values, expected[name], atol=1e-3, rtol=1e-2)


def assert_same(found, expected):
    """Assert that the weights of two runs are the same to the last bit."""
    assert digest(found.folder / "last.ckpt") == digest(expected.folder / "last.ckpt")


# Eager mode and a recorded step launch the same kernels in the same order.
DRAWING = "model.network={type: own.Drawing}"
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
    """A recorded step gives the same weights, buffers and random numbers; short last batches run eagerly."""
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
    """A run stopped in either epoch and resumed, which records its step again, ends with the same bits."""
    uninterrupted, _ = learned(*SAME, *settings)
    first, _ = learned(*SAME, *settings, stopped)
    resumed, _ = learned(*SAME, *settings, f"train.resume_ckpt={first.folder}")
    assert_same(resumed, uninterrupted)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("Waits", "engine.compile=graphs: this step cannot be recorded: "),
        ("Recurrent", "engine.compile=graphs: a recorded step would not train network.lstm."),
    ],
)
def test_a_network_that_cannot_be_recorded_is_refused(network, reason, tiny, tmp_path):
    """Recording a network that synchronizes or moves its weights is exit code 2, with the reason and an alternative."""
    (tmp_path / "own.py").write_text(OWN)
    settings = ["engine.gpus=1", "engine.compile=graphs", f"model.network={{type: own.{network}}}"]
    done = real("train", tiny, *settings, cwd=tmp_path, limit=LIMIT_SECONDS, code=2)
    assert reason in done.err
    assert "engine.compile=reduce-overhead" in done.err
    assert "Traceback" not in done.err


def test_a_network_that_a_callback_changes_is_recorded_again(learned):
    """The step is recorded again if trainable layers, dropout or weights change; it learns what eager mode learns."""
    callbacks = "train.callbacks=[{type: own.Notes}, {type: own.Changes}]"
    settings = [*SAME, DRAWING, callbacks, "model.trainable=[^0, ^5]"]
    eager, _ = learned(*settings)
    done, _ = learned(*settings, "engine.compile=graphs")
    assert "so the step is recorded again" in done.out + done.err
    assert_same(done, eager)
