"""The loader of in-memory datasets yields the same batches as torch's DataLoader."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from deeplightning.data import datasets as datasets_module
from deeplightning.data.datasets import InMemory, InMemoryLoader
from deeplightning.data.samplers import BatchIndices

SIZE = 21
CPU = torch.device("cpu")  # stands for any device, since there may be no other


def small_dataset(rows: bool = False) -> InMemory:
    pixels = torch.arange(SIZE * 6, dtype=torch.uint8).reshape(SIZE, 1, 2, 3)
    labels = torch.arange(SIZE) % 4
    return InMemory({"image": pixels}, {"label": labels}, torch.arange(SIZE).flip(0) if rows else None)


def same(one, other) -> bool:
    one, other = list(one), list(other)
    return len(one) == len(other) > 0 and all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype
        for a, b in zip(one, other, strict=True)
        for name in ("image", "label", "index")
    )


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("shuffle", "world", "batch_size"), [(True, 1, 4), (False, 2, 4), (True, 2, 5), (False, 4, 5)])
def test_the_batches_are_those_of_torch(rows, shuffle, world, batch_size):
    """Batches and len() are the same in each epoch, after resuming inside one, and for a rank that needs padding."""
    for rank in range(world):
        options = {"num_replicas": world, "rank": rank, "shuffle": shuffle, "seed": 3}
        samplers = [BatchIndices(range(SIZE), batch_size, **options) for _ in range(2)]
        ours = InMemoryLoader(small_dataset(rows), batch_size=None, sampler=samplers[0])
        theirs = DataLoader(small_dataset(rows), batch_size=None, sampler=samplers[1])
        assert len(ours) == len(theirs)
        for epoch, start in ((0, 0), (1, 1), (2, 0)):
            for sampler in samplers:
                sampler.set_epoch(epoch)
                sampler.start = start
            assert same(ours, theirs)
        last = list(ours)[-1]
        if last["index"].tolist() == [-1]:
            assert torch.equal(last["image"][0], small_dataset(rows).images[SIZE - 1])


@pytest.mark.parametrize("device", [None, CPU])
def test_the_order_is_fixed_when_an_iteration_begins(device):
    """`set_epoch` during an iteration affects the next one only; an empty list of batches yields nothing."""
    sampler = BatchIndices(range(SIZE), 4, shuffle=True)
    loader = InMemoryLoader(small_dataset(), batch_size=None, sampler=sampler)
    expected, loader.device = list(loader), device
    under_way = iter(loader)
    first = [next(under_way)] if device is None else []
    sampler.set_epoch(5)
    assert same(expected, [*first, *under_way])
    assert not same(expected, loader)
    assert list(small_dataset().batches([], CPU)) == []


@pytest.mark.parametrize("device", [None, CPU])
def test_batches_do_not_share_memory(device):
    """A task that writes into a batch changes no other batch, nor the dataset or its order."""
    loader = InMemoryLoader(small_dataset(), batch_size=None, sampler=BatchIndices(range(SIZE), 4))
    wanted, loader.device = list(loader), device
    for _ in range(2):
        batches = []
        for batch in loader:
            batches.append({name: values.clone() for name, values in batch.items()})
            for values in batch.values():
                values.fill_(99)
        assert same(wanted, batches)
        if device is not None:
            loader.dataset.move(device)


def test_other_datasets_and_samplers_are_left_to_torch():
    """With another dataset or sampler the loader behaves like torch's."""
    sampler = SequentialSampler(range(4))
    assert next(iter(InMemoryLoader(torch.arange(4), batch_size=2, sampler=sampler))).tolist() == [0, 1]
    batches = InMemoryLoader(small_dataset(), batch_size=None, sampler=[[3, 1], [2, 0]])
    assert [batch["index"].tolist() for batch in batches] == [[3, 1], [2, 0]]


@pytest.mark.parametrize("moved", [False, True], ids=["gathered on the CPU", "picked on the device"])
@pytest.mark.parametrize("rows", [False, True])
def test_batches_for_a_device_are_those_of_the_cpu(rows, moved):
    """They are the same in each epoch, after resuming inside one, and for a rank that needs padding; moving the dataset
    during an epoch changes none of its batches."""
    for rank, world in ((0, 1), (1, 2), (3, 4)):
        sampler = BatchIndices(range(SIZE), 5, num_replicas=world, rank=rank, shuffle=True, seed=3)
        there, here = (InMemoryLoader(small_dataset(rows), batch_size=None, sampler=sampler) for _ in range(2))
        there.device = CPU
        for epoch, start in ((0, 0), (1, 1), (2, 0)):
            sampler.set_epoch(epoch)
            sampler.start = start
            under_way = iter(there)
            first = next(under_way)
            if moved:
                there.dataset.move(CPU)
            assert same([first, *under_way], here)
        assert bool(there.dataset.on_device) is moved


def test_pictures_move_in_parts(monkeypatch):
    """A dataset larger than one part is moved in the order of its samples, even if its rows are mapped in another
    order; `size` is its number of bytes on the device."""
    monkeypatch.setattr(datasets_module, "_COPY_BYTES", 4 * 6)
    for rows in (False, True):
        dataset = small_dataset(rows)
        dataset.move(CPU)
        assert torch.equal(dataset.on_device["image"], dataset.images)
        assert dataset.size == SIZE * 6
        assert dataset.on_device["image"].data_ptr() != dataset.large["image"].data_ptr()


def test_masks_move_with_their_pictures():
    """Batches of pictures with masks are the same before and after moving to the device."""
    pixels, masks = small_dataset().images, torch.arange(SIZE * 6, dtype=torch.uint8).reshape(SIZE, 2, 3)
    dataset = InMemory({"image": pixels, "mask": masks}, {})
    assert dataset.size == 2 * SIZE * 6
    positions = [np.array([3, 1]), np.array([-1])]
    wanted = [dataset[part] for part in positions]
    for _ in range(2):
        found = list(dataset.batches(positions, CPU))
        assert [list(batch) for batch in found] == [list(batch) for batch in wanted] == [["image", "mask", "index"]] * 2
        assert all(torch.equal(a[n], b[n]) for a, b in zip(found, wanted, strict=True) for n in a)
        dataset.move(CPU)
