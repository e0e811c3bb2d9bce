"""`in_memory: auto` moves pictures to the GPU if they fit after the first step. The CPU stands in for the GPU, and each
test sets its free memory."""

import logging
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from modules import data_config

from deeplightning.data import datasets, loading
from deeplightning.data.arrays import ArrayData, Arrays, mapped
from deeplightning.data.data_errors import DataError
from deeplightning.data.datasets import InMemory, move_if_it_fits
from deeplightning.data.digits import Digits
from deeplightning.data.images import ImageData

CPU = torch.device("cpu")


def made(size: int) -> InMemory:
    """A set that takes `size` bytes."""
    pixels = torch.zeros(size, 1, 1, 1, dtype=torch.uint8)
    return InMemory({"image": pixels}, {"label": torch.zeros(size, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("left", "moved", "words"), [(80, True, "on cpu"), (79, False, "in the memory of the CPU, batches pinned")]
)
def test_what_fits_beside_a_step_is_moved(left, moved, words, monkeypatch, caplog):
    """Pictures move if they take at most half of the free memory, and the log reports it."""
    monkeypatch.setattr(datasets, "free_bytes", lambda device: left)
    sets = [made(30), made(10)]
    with caplog.at_level(logging.INFO):
        move_if_it_fits(sets, CPU)
    assert [bool(one.on_device) for one in sets] == [moved] * 2
    assert words in caplog.text


def test_a_gpu_that_another_process_has_filled_meanwhile_gets_nothing(monkeypatch):
    """If there is no memory for the second set, the first one is moved back."""
    monkeypatch.setattr(datasets, "free_bytes", lambda device: 1000)
    sets = [made(30), made(10)]

    def move(device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    sets[1].move = move
    move_if_it_fits(sets, CPU)
    assert [one.on_device for one in sets] == [{}, {}]


@pytest.mark.parametrize(("in_memory", "moves"), [("auto", True), (None, False), (True, False)])
def test_a_data_module_moves_after_the_first_step(in_memory, moves, monkeypatch):
    """`auto`, the default, moves the sets after the first step, and no other value does; batches that are on the device
    are not copied. The GPU is torch's "meta" device, which has shapes and no values."""
    meta = torch.device("meta")
    monkeypatch.setattr(ImageData, "_gpu", lambda self: meta)
    monkeypatch.setattr(datasets, "free_bytes", lambda device: 2**40)
    cfg = data_config(batch_size=16)
    module = Digits(cfg) if in_memory == "auto" else Digits(cfg, in_memory=in_memory)
    module.setup("fit")
    module.trainer = None
    loader = module.train_dataloader()
    assert loader.device == meta
    module.trainer = SimpleNamespace(training=True)
    for step, batch in zip((40, 40, 41), loader, strict=False):  # of a resumed run that accumulates two batches
        assert {values.device for values in batch.values()} == {meta}
        module.trainer.global_step = step
        assert module.transfer_batch_to_device(batch, meta, 0) is batch
        assert bool(module.dataset("train").on_device) is (moves and step > 40)
    assert bool(module.dataset("val").on_device) is moves


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_loader_worker_maps_arrays_again(tmp_path, order):
    """A pickled set contains the path of the file, not its numbers; a slice of a mapped array stays a slice."""
    values = np.asarray(np.random.default_rng(0).normal(size=(500, 3, 40)), order=order)
    np.savez(tmp_path / "own.npz", x=values)
    inputs = mapped(tmp_path / "own.npz", "x")
    every = np.arange(500)
    sent = pickle.dumps(Arrays(inputs, every, every, every))
    assert len(sent) < 20_000 < values.nbytes
    np.testing.assert_array_equal(pickle.loads(sent).load(every), values)
    part = pickle.loads(pickle.dumps(Arrays(inputs[100:], every[:400], every[:400], every[:400])))
    np.testing.assert_array_equal(part.load(every[:400]), values[100:])


def test_a_whole_number_that_is_no_class_takes_no_memory(tmp_path):
    """A large whole number as a target, such as a price, is refused before each smaller number becomes a class. Bytes
    are classes by their text."""
    inputs = np.arange(40.0).reshape(20, 2)
    for targets, expected in (
        (["höch".encode(), b"low"], ["höch", "low"]),
        ([1, 2], ["0", "1", "2"]),
        ([0, 10**12], None),
    ):
        np.savez(tmp_path / "a.npz", x=inputs, y=np.array(targets * 10))
        module = ArrayData(data_config(tmp_path), "a.npz")
        if expected is None:
            with pytest.raises(DataError, match=r"target 1 is 1000000000000, but .* numbered from 0; other .* floats"):
                module.setup()
        else:
            module.setup()
            assert module.class_names == expected


def test_a_number_that_is_not_finite_is_a_fault_of_the_data_also_if_it_is_read_late(tmp_path, monkeypatch):
    """NaN in an array that is read batch by batch is a data error too."""
    monkeypatch.setattr(loading, "IN_MEMORY_LIMIT", 0)
    inputs, classes = np.arange(40.0).reshape(20, 2), np.array([0, 1] * 10)
    np.savez(tmp_path / "a.npz", x=inputs, y=classes)
    np.savez(tmp_path / "b.npz", x=np.where(inputs == 7, np.nan, inputs), y=classes)
    module = ArrayData(data_config(tmp_path), "a.npz", validation="b.npz")
    module.setup("fit")
    with pytest.raises(DataError, match=r"The number at \[3, 1\] is nan"):
        module.dataset("val")[np.arange(20)]


@pytest.mark.parametrize(("save", "workers"), [(np.savez, 2), (np.savez_compressed, 0)])
def test_arrays_in_memory_are_not_sent_to_workers(save, workers, tmp_path, monkeypatch):
    """Workers map a file; each would get a copy of an array that is in memory."""
    monkeypatch.setattr(loading, "IN_MEMORY_LIMIT", 0)
    save(tmp_path / "a.npz", x=np.arange(40.0).reshape(20, 2), y=np.array([0, 1] * 10))
    module = ArrayData(data_config(tmp_path, num_workers=2), "a.npz")
    module.setup("fit")
    assert module.train_dataloader().num_workers == workers


@pytest.mark.parametrize(("fraction", "free"), [(1.0, 600), (0.25, 150)])
def test_a_limit_of_this_process_counts(fraction, free, monkeypatch):
    """`deeplightning batch --memory` limits torch's allocator, not the GPU."""
    answers = {"mem_get_info": (500, 1000), "memory_reserved": 200, "max_memory_allocated": 100}
    for name, answer in {**answers, "get_per_process_memory_fraction": fraction}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert datasets.free_bytes(torch.device("cuda", 0)) == free
