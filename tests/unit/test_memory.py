"""A network that cannot fit into a GPU is refused before it is moved there: `deeplightning.engine.memory_estimate`.

No GPU is needed: the machine is described, as in test_gpus.py.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deeplightning.checks.examine import load_config
from deeplightning.config.schema import Engine, Target
from deeplightning.engine import devices, memory_estimate
from deeplightning.engine.devices import Gpu, Holder, Machine
from deeplightning.engine.memory_estimate import Need, Size, need, states_of
from deeplightning.faults import SetupError
from deeplightning.run.assemble import init_module

GIB, MIB = 2**30, 2**20
MILLION = Size(10**6, 10**6, 2)
TWO_GPUS = {"gpus": 2}


@pytest.mark.parametrize(
    ("backend", "precision", "weights", "gradients", "state"),
    [
        (None, 32, 4, 4, 8),
        ("ddp", "bf16", 4, 4, 8),
        ("ddp", "bf16-true", 2, 2, 4),
        ("ddp", 64, 8, 8, 16),
        ("fsdp", 32, 2, 2, 4),
        ("deepspeed_stage_1", "bf16", 2, 2, 6),
        ("deepspeed_stage_2", 32, 4, 2, 4),
        ("deepspeed_stage_3", 16, 1, 1, 6),
        ("deepspeed_stage_2_offload", 32, 4, 0, 0),
        ("deepspeed_stage_3_offload", 32, 0, 0, 0),
    ],
)
def test_what_each_of_two_gpus_holds_at_least(backend, precision, weights, gradients, state):
    """Bytes for each parameter under Adam: what an engine shares out is halved, what it offloads is not there."""
    engine = Engine(gpus=1 if backend is None else 2, backend=backend, precision=precision)
    expected = Need(*(value * 10**6 for value in (weights, gradients, state)))
    assert need(MILLION, engine, backend) == expected


@pytest.mark.parametrize(
    ("name", "params", "states"),
    [
        ("torch.optim.Adam", {"lr": 0.1}, 2),
        ("torch.optim.Adam", {"lr": 0.1, "amsgrad": True}, 3),
        ("torch.optim.SGD", {"lr": 0.1}, 0),
        ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}, 1),
        ("torch.optim.Adafactor", {"lr": 0.1}, 0.5),  # a row and a column of 4 for a matrix of 16
        ("torch.optim.LBFGS", {"lr": 0.1}, 0),
        ("no.such.Optimizer", {}, 0),
    ],
)
def test_what_an_optimizer_keeps_is_seen_by_a_step(name, params, states):
    """Of any class, also a user's own; nothing is promised of one that cannot be tried."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert states_of(Target(type=name, params=params)) == states
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def task_on(tiny, place, monkeypatch):
    """`task_on(free, override, …)` is a task, and the config, that trains on a GPU with so many bytes free."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(free, *overrides, fn="fit", **about):
        gpu = Gpu("GPU-1", "NVIDIA A100", 80 * GIB, 79 * GIB)
        monkeypatch.setattr(devices, "machine", lambda: Machine(gpus=(gpu, replace(gpu, uuid="GPU-2")), **about))
        cfg = load_config(tiny, list(overrides))
        task = init_module(cfg, "model")
        task._trainer = SimpleNamespace(state=SimpleNamespace(fn=fn), strategy=SimpleNamespace(local_rank=0))
        full = replace(gpu, free=free, holders=(Holder(4711, 70 * GIB),))
        monkeypatch.setattr(devices, "machine", lambda: Machine(gpus=(full,) * 2, **about))
        return task, cfg

    return make


ADAM = "model.optimizer={type: torch.optim.Adam, params: {lr: 0.1}}"


def test_a_network_that_cannot_fit_is_refused(task_on):
    """Exit code 3: what it needs and for what, how much is free and who holds the rest, and what would fit."""
    task, cfg = task_on(10 * 1024, "engine.gpus=1", ADAM)
    with pytest.raises(SetupError) as caught:
        task.configure_model()
    count = sum(parameter.numel() for parameter in task.parameters())
    (fault,) = caught.value.faults
    assert (fault.key, caught.value.exit_code) == ("engine.gpus", 3)
    assert f"the network of {count / 1e6:.1f} million parameters needs at least" in fault.message
    assert "are free (process 4711 (71,680 MiB) uses it)" in fault.message
    assert "million parameters would fit, without their activations" in fault.message
    assert memory_estimate.need(Size(count, count, 2), cfg.engine, None) == Need(4 * count, 4 * count, 8 * count)


def test_a_backend_that_leaves_room_is_named(task_on):
    """The figures, and engines over the same GPUs that need less than half of what is free."""
    task, cfg = task_on(0, "engine={gpus: 2, backend: ddp}", ADAM)
    task._trainer = None
    task.configure_model()
    count = sum(parameter.numel() for parameter in task.parameters())
    free = 17 * count  # ddp needs 16 a parameter
    assert memory_estimate._others(Size(count, count, 2), cfg, free) == [
        f"`engine.backend={name}`" for name in ("fsdp", "deepspeed_stage_3")
    ]
    assert memory_estimate._others(
        Size(count, count, 2), replace(cfg, engine=replace(cfg.engine, gpus=1)), 9 * count
    ) == [f"`engine.backend=deepspeed_stage_{stage}_offload`" for stage in (2, 3)]


@pytest.mark.parametrize(
    ("free", "about", "fn"),
    [(GIB, {}, "fit"), (0, {}, "test"), (0, {"by_bus": False}, "fit"), (None, {}, "fit")],
    ids=["room", "a test of weights", "another order of CUDA's", "nothing known"],
)
def test_what_may_fit_is_tried(free, about, fn, task_on):
    """Where there is room, where nothing is learned, and where the GPU's memory is not known."""
    task, _ = task_on(free, "engine.gpus=1", ADAM, fn=fn, **about)
    task.configure_model()
    assert task.network is not None
