"""The loader of sets in memory gives what torch's would, batch by batch."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from deeplightning.data import loader as loader_module
from deeplightning.data.datasets import InMemory, Samples
from deeplightning.data.loader import InMemoryLoader
from deeplightning.data.samplers import BatchIndices

SIZE = 21


def made(rows: bool = False) -> InMemory:
    pixels = torch.arange(SIZE * 6, dtype=torch.uint8).reshape(SIZE, 1, 2, 3)
    samples = Samples(pixels.numpy(), np.arange(SIZE) % 4)
    return InMemory(samples, pixels, torch.arange(SIZE).flip(0) if rows else None)


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
    """In each epoch, resumed in the middle, with the padding of a rank that has none left; and len() is the same."""
    for rank in range(world):
        options = {"num_replicas": world, "rank": rank, "shuffle": shuffle, "seed": 3}
        samplers = [BatchIndices(range(SIZE), batch_size, **options) for _ in range(2)]
        ours = InMemoryLoader(made(rows), batch_size=None, sampler=samplers[0])
        theirs = DataLoader(made(rows), batch_size=None, sampler=samplers[1])
        assert len(ours) == len(theirs)
        for epoch, start in ((0, 0), (1, 1), (2, 0)):
            for sampler in samplers:
                sampler.set_epoch(epoch)
                sampler.start = start
            assert same(ours, theirs)
        last = list(ours)[-1]
        if last["index"].tolist() == [-1]:
            assert torch.equal(last["image"][0], made(rows).images[SIZE - 1])


def test_the_order_is_fixed_when_an_iteration_begins():
    """Another epoch that is set meanwhile is that of the next iteration."""
    sampler = BatchIndices(range(SIZE), 4, shuffle=True)
    loader = InMemoryLoader(made(), batch_size=None, sampler=sampler)
    whole = list(loader)
    under_way = iter(loader)
    first = next(under_way)
    sampler.set_epoch(5)
    assert same(whole, [first, *under_way])
    assert not same(whole, loader)


def test_batches_do_not_share_memory():
    """With each other, with the set, or with the order."""
    sampler = BatchIndices(range(SIZE), 4)
    loader = InMemoryLoader(made(), batch_size=None, sampler=sampler)
    wanted = list(loader)
    for batch in loader:
        for values in batch.values():
            values.fill_(99)
    assert same(wanted, loader)


def test_anything_else_is_left_to_torch():
    """Another set or another sampler."""
    sampler = SequentialSampler(range(4))
    assert next(iter(InMemoryLoader(torch.arange(4), batch_size=2, sampler=sampler))).tolist() == [0, 1]
    batches = InMemoryLoader(made(), batch_size=None, sampler=[[3, 1], [2, 0]])
    assert [batch["index"].tolist() for batch in batches] == [[3, 1], [2, 0]]


def test_pinned_where_there_is_an_accelerator(monkeypatch):
    """Every part of a batch; where there is none, torch's warning is kept for torch's loader."""
    sampler = BatchIndices(range(SIZE), 4)
    loader = InMemoryLoader(made(), batch_size=None, sampler=sampler, pin_memory=True)
    assert same(loader, InMemoryLoader(made(), batch_size=None, sampler=sampler))
    pinned = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(loader_module, "_pinned", lambda batch: pinned.append(batch) or batch)
    assert len(list(loader)) == len(pinned) == 6
    monkeypatch.undo()
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append(self) or self)
    batch = next(iter(InMemoryLoader(made(), batch_size=None, sampler=sampler)))
    assert loader_module._pinned(batch).keys() == batch.keys()
    assert len(calls) == 3
