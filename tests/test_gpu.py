"""Engines on GPUs learn what one CPU process learns, in each precision; what they share out takes less of their memory.

Skipped where there is no GPU, in part where there is one. Each run is a fresh process: CUDA does not survive a fork.
"""

import json

import pytest
import torch
from commands import real

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="there is no GPU")]
TWO = pytest.mark.skipif(GPUS < 2, reason="there are not two GPUs")
COUNTS = [1, pytest.param(2, marks=TWO)]

ENGINES = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
OFFLOAD = ["deepspeed_stage_2_offload", "deepspeed_stage_3_offload"]
# Units and buckets smaller than the wide network: by default all of it would come together at once.
SMALL = 5_000_000
STAGE_3 = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
ALL_SHARED = {"stage3_param_persistence_threshold": 0, **dict.fromkeys(STAGE_3, SMALL)}
PARAMS = {
    "fsdp": {"wrap": ["Linear"]},
    "deepspeed_stage_3": {"reduce_bucket_size": SMALL, "config": {"zero_optimization": ALL_SHARED}},
    "deepspeed_stage_2_offload": {"reduce_bucket_size": SMALL},
    "deepspeed_stage_3_offload": {"config": {"zero_optimization": ALL_SHARED}},
}

OWN = '''\
"""Networks of linear layers, which compute the same on CPU and GPU to a few millionths, and a callback."""

import json
import pathlib

import pytorch_lightning as pl
import torch
from torch import nn


def network(width, depth=1, norm=False):
    sizes = [64, *[width] * depth]
    layers = [nn.Flatten()]
    for before, after in zip(sizes, sizes[1:]):
        layers += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Notes(pl.Callback):
    """Writes down the device of each process, and the most bytes that it held there at a time."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def on_train_end(self, trainer, module):
        device = trainer.strategy.root_device
        noted = {"device": str(device), "bytes": torch.cuda.max_memory_allocated(device)}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(noted))
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A working directory with the code above."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "gpu_own.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def trained(tiny, own):
    """`trained(engine, override, …)` is a run on GPUs; `gpus` is a number or a list, or None for one CPU process.

    Each optimizer step sees 32 samples.
    """

    def run(engine, *overrides, gpus=1, precision=32, code=0):
        processes = len(gpus) if isinstance(gpus, list) else gpus or 1
        settings = {"backend": engine, "gpus": gpus, "precision": precision, "params": PARAMS.get(engine, {})}
        outcome = real(
            "train",
            tiny,
            "model.network={type: gpu_own.network, params: {width: 64}}",
            f"data.batch_size={32 // processes}",
            f"engine={json.dumps(settings)}",
            "logger.log_every_n_steps=1",
            *overrides,
            cwd=own,
        )
        assert outcome.code == code, outcome
        return outcome

    return run


@pytest.fixture(scope="module")
def on_cpu(trained):
    """Two epochs of one CPU process: what all others are compared with."""
    return trained(None, gpus=None)


def assert_alike(found, expected):
    """The losses of every step and epoch are the same to a thousandth."""
    for name in ("train_loss", "train_loss_epoch", "val_loss"):
        assert found[name] == [(step, pytest.approx(value, abs=1e-3)) for step, value in expected[name]], name


@pytest.mark.parametrize("gpus", COUNTS)
@pytest.mark.parametrize("engine", [*ENGINES, *OFFLOAD])
def test_every_engine_learns_what_one_cpu_process_learns(engine, gpus, trained, on_cpu, tracked):
    """In 32 bits the losses on one and on two GPUs are those on the CPU, hence ddp's too."""
    assert_alike(tracked(trained(engine, gpus=gpus).folder).series(), tracked(on_cpu.folder).series())


@pytest.mark.parametrize("gpus", COUNTS)
@pytest.mark.parametrize("precision", [16, "bf16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_learns_in_16_bits(engine, precision, gpus, trained, tracked):
    """The loss falls and is a number; fsdp, which has no loss scale, computes in 16 bits throughout."""
    precision = "16-true" if (engine, precision) == ("fsdp", 16) else precision
    done = trained(engine, "train.num_epochs=4", "data.module.params.limit=600", gpus=gpus, precision=precision)
    losses = [value for _, value in tracked(done.folder).series()["train_loss_epoch"]]
    assert losses[-1] < 0.8 * losses[0]


def test_fsdp_refuses_a_scaled_loss(trained):
    """`16` with fsdp on a GPU: exit code 2, and what to take instead."""
    assert "engine.precision=bf16" in trained("fsdp", precision=16, code=2).err


WIDE = ["model.network.params={width: 2048, depth: 8}", "model.optimizer={type: torch.optim.Adam, params: {lr: 0.001}}"]


def most_bytes(trained, folder, engine):
    """What a wide network takes at most on the fullest of two GPUs."""
    notes = folder / engine
    notes.mkdir()
    callback = f"train.callbacks=[{{type: gpu_own.Notes, params: {{folder: '{notes}'}}}}]"
    trained(engine, *WIDE, "train.max_steps=3", callback, gpus=2)
    return max(json.loads((notes / f"{rank}.json").read_text())["bytes"] for rank in (0, 1))


@TWO
def test_what_is_shared_out_takes_less_memory(trained, tmp_path, record_property):
    """Of a network of 30 million parameters, Adam's state included, fsdp and stage 3 hold less than ddp on each GPU; so
    does stage 2 with the state in the CPU's memory."""
    engines = ("ddp", "fsdp", "deepspeed_stage_3", "deepspeed_stage_2_offload")
    found = {engine: most_bytes(trained, tmp_path, engine) for engine in engines}
    record_property("bytes", found)
    assert max(found[engine] for engine in engines[1:]) < found["ddp"]


@TWO
def test_the_gpu_that_is_named_is_used(trained, tmp_path):
    """`engine.gpus=[1]` computes on the second one."""
    trained("ddp", f"train.callbacks=[{{type: gpu_own.Notes, params: {{folder: '{tmp_path}'}}}}]", gpus=[1])
    (noted,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert noted["device"] == "cuda:1"
    assert noted["bytes"] > 0


@TWO
def test_batch_norm_is_over_all_processes(trained, tracked):
    """Two GPUs with 16 samples each norm and learn as one with 32."""
    norm = "model.network.params.norm=true"
    expected = tracked(trained("ddp", norm).folder).series()
    found = tracked(trained("ddp", norm, "engine.sync_batchnorm=true", gpus=2).folder).series()
    assert_alike(found, expected)


@pytest.mark.parametrize("gpus", COUNTS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed_stage_3"])
def test_a_run_goes_on_from_the_gpu_on_the_cpu_and_back(engine, gpus, trained, on_cpu, tracked):
    """An epoch here and one there end with the loss of two on the CPU."""
    expected = tracked(on_cpu.folder).metrics["val_loss"]
    there, here = (engine, gpus), (None, None)
    for (before, first), (after, second) in ((there, here), (here, there)):
        begun = trained(before, "train.num_epochs=1", gpus=first)
        ended = trained(after, f"train.resume_ckpt='{begun.folder}'", gpus=second)
        assert tracked(ended.folder).metrics["val_loss"] == pytest.approx(expected, abs=1e-3)
