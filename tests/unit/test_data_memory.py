"""`in_memory: auto`: pictures go to the GPU where the first step leaves room for them. The CPU takes the place of the
GPU, and a test says how much of it is left."""

import logging
from types import SimpleNamespace

import pytest
import torch

from deeplightning.data import datasets
from deeplightning.data.datasets import InMemory, Room
from deeplightning.data.digits import Digits
from deeplightning.data.images import ImageData

CPU = torch.device("cpu")


def made(size: int) -> InMemory:
    """A set that takes `size` bytes."""
    pixels = torch.zeros(size, 1, 1, 1, dtype=torch.uint8)
    return InMemory({"image": pixels}, {"label": torch.zeros(size, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("left", "moved", "words"),
    [
        (80, [True, True], "on cpu"),  # 30 + 10 are half of it
        (79, [True, False], "on cpu"),
        (60, [True, False], "on cpu"),
        (59, [False, False], "in the memory of the CPU, batches pinned"),
    ],
)
def test_what_fits_beside_a_step_is_moved(left, moved, words, monkeypatch, caplog):
    """Training and validation pictures, or the training's alone, if they take at most half of what is left; the log
    says which."""
    monkeypatch.setattr(datasets, "left", lambda device: left)
    sets = [made(30), made(10)]
    with caplog.at_level(logging.INFO):
        assert Room().settle(1, sets, CPU) is False
        assert Room.settle(settled := Room(), 5, sets, CPU) is False
        assert settled.settle(6, sets, CPU) is True
    assert [bool(one.on_device) for one in sets] == moved
    assert words in caplog.text


def test_the_first_step_of_the_process_is_what_is_measured(monkeypatch):
    """Batches that are accumulated, before it, settle nothing; in a resumed run other steps came before."""
    asked = []
    monkeypatch.setattr(datasets, "left", lambda device: asked.append(device) or 1000)
    place, sets = Room(), [made(30)]
    assert [place.settle(step, sets, CPU) for step in (40, 40, 40)] == [False] * 3
    assert asked == []
    assert place.settle(41, sets, CPU) is True
    assert asked == [CPU]


def test_a_gpu_that_another_process_has_filled_meanwhile_gets_nothing(monkeypatch):
    """Half a move is taken back."""
    monkeypatch.setattr(datasets, "left", lambda device: 1000)
    sets = [made(30), made(10)]

    def move(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    sets[0].move, sets[1].move = move, move
    place = Room()
    place.settle(0, sets, CPU)
    assert place.settle(1, sets, CPU) is True
    assert [one.on_device for one in sets] == [{}, {}]


def test_sets_that_are_not_in_memory_are_left_alone(monkeypatch, caplog):
    """There is nothing to move, and nothing to say."""
    monkeypatch.setattr(datasets, "left", lambda device: 1000)
    place = Room()
    place.settle(0, [], CPU)
    with caplog.at_level(logging.INFO):
        assert place.settle(1, [], CPU) is True
    assert caplog.text == ""


@pytest.mark.parametrize(("in_memory", "moves"), [("auto", True), (None, False), (True, False)])
def test_a_data_module_moves_after_the_first_step(in_memory, moves, monkeypatch):
    """`auto`, which is the default, and nothing else; batches that are on the device already are handed on as they are.
    The GPU is torch's "meta" device, which has shapes and no values."""
    meta = torch.device("meta")
    monkeypatch.setattr(ImageData, "_gpu", lambda self: meta)
    monkeypatch.setattr(datasets, "left", lambda device: 2**40)
    data = SimpleNamespace(
        module=None, root=None, batch_size=16, num_workers=0, num_splits=None, fold=0, sampler=None, loader={}
    )
    cfg = SimpleNamespace(seed=1, data=data)
    module = Digits(cfg) if in_memory == "auto" else Digits(cfg, in_memory=in_memory)
    module.setup("fit")
    module.trainer = None
    loader = module.train_dataloader()
    assert loader.device == meta
    module.trainer = SimpleNamespace(training=True, global_step=0)
    for step, batch in zip(range(3), loader, strict=False):
        assert {values.device for values in batch.values()} == {meta}
        module.trainer.global_step = step
        assert module.transfer_batch_to_device(batch, meta, 0) is batch
        assert bool(module.dataset("train").on_device) is (moves and step > 0)
    assert bool(module.dataset("val").on_device) is moves
