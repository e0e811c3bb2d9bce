"""On a GPU: CUDA graphs learn what eager mode learns and are recorded once; a checkpoint is copied beside training.

Skipped where there is no GPU. Each run is a fresh process: CUDA does not survive a fork.
"""

import json

import pytest
import torch
from commands import real
from conftest import weights

from deeplightning.engine import background
from deeplightning.engine.background import Snapshot
from deeplightning.engine.checkpoint_io import SafeCheckpointIO, read_checkpoint

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
        found = {"graphs": graphs, "skips": counters["inductor"].get("cudagraph_skips", 0)}
        pathlib.Path("notes.json").write_text(json.dumps(found))
'''
LONGEST = 600  # seconds: a cold compilation


@pytest.fixture
def learned(tiny, tmp_path):
    """`learned(override, …)` is the outcome of a run on one GPU, and what the compiler did."""
    (tmp_path / "notes.py").write_text(NOTES)

    def run(*overrides):
        given = ["engine.gpus=1", "train.callbacks=[{type: notes.Notes}]", *overrides]
        cache = str(tmp_path / "cache")
        outcome = real("train", tiny, *given, cwd=tmp_path, limit=LONGEST, XDG_CACHE_HOME=cache)
        assert outcome.code == 0, outcome
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


def test_a_resumed_run_with_cuda_graphs_ends_like_one_that_was_not_stopped(learned):
    """Bit for bit."""
    settings = ["train.num_epochs=2", "engine.compile=reduce-overhead", "engine.deterministic=true"]
    whole = weights(learned(*settings)[0].folder / "last.ckpt")
    first, _ = learned(*settings, "train.max_steps=5")
    resumed, _ = learned(*settings, f"train.resume_ckpt={first.folder}")
    for name, values in weights(resumed.folder / "last.ckpt").items():
        assert torch.equal(values, whole[name]), name


@pytest.mark.parametrize("room", [True, False], ids=["room for a second copy", "no room"])
def test_a_copy_has_the_values_of_its_moment(room, monkeypatch):
    """What the GPU computes after the copy was asked for does not show in it, whether or not it has room to spare."""
    if not room:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    tensors = {name: torch.full((2**22,), float(name), device="cuda") for name in range(8)}
    copied = Snapshot({"state_dict": tensors})
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    found = copied.finished()["state_dict"]
    for name, values in found.items():
        assert values.device.type == "cpu"
        assert torch.equal(values, torch.full((2**22,), float(name)))


def test_a_checkpoint_of_a_gpu_is_written_in_the_background(tmp_path, monkeypatch):
    """It reads like one that was written at once."""
    monkeypatch.setattr(background, "SMALLEST", 0)
    files, weight = SafeCheckpointIO(), torch.randn(1000, 100, device="cuda")
    expected = weight.cpu()
    with files.in_background():
        files.save_checkpoint({"state_dict": {"weight": weight, "again": weight.t()}}, tmp_path / "last.ckpt")
    weight.zero_()
    files.teardown()
    found = read_checkpoint(tmp_path / "last.ckpt")["state_dict"]
    assert torch.equal(found["weight"], expected)
    assert torch.equal(found["again"], expected.t())
