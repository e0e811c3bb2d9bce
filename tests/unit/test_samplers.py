"""BatchIndices: each sample once over all ranks, in an order that depends only on seed and epoch."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from modules import data_config, on_rank
from torch.utils.data import Dataset, DistributedSampler, Subset

from deeplightning.data.of_datasets import OfDatasets
from deeplightning.data.samplers import PADDING, BatchIndices, sort_values
from deeplightning.engine.process_group import CountsOnce, EachOnce
from deeplightning.faults import RunError


def ranks(size: int, batch_size: int, world: int, **options) -> list[list[list[int]]]:
    """Return the batches of each rank."""
    return [list(BatchIndices(range(size), batch_size, num_replicas=world, rank=r, **options)) for r in range(world)]


def interleaved(batches: list[list[int]]) -> list[int]:
    """Return the global batch from which one step's batches of all ranks were taken."""
    return [row for rows in itertools.zip_longest(*batches) for row in rows if row is not None]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 7])
@pytest.mark.parametrize("size", [1, 2, 13, 16, 50])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_index_once(size, world, batch_size, shuffle):
    """Over all ranks each position occurs once, every rank has the same number of batches, and no batch is empty."""
    batches = ranks(size, batch_size, world, shuffle=shuffle)
    assert {-(-size // (batch_size * world))} == {len(of_rank) for of_rank in batches}
    rows = [row for of_rank in batches for batch in of_rank for row in batch]
    assert list(range(size)) == sorted(row for row in rows if row != PADDING)
    assert all(batch and len(batch) <= batch_size for of_rank in batches for batch in of_rank)
    assert all(type(row) is int for row in rows)
    padding = [batch for of_rank in batches for batch in of_rank if PADDING in batch]
    assert padding == [of_rank[-1] for of_rank in batches if of_rank[-1] == [PADDING]]


@pytest.mark.parametrize(("size", "drop_last"), [(64, False), (61, False), (61, True)])
def test_processes_see_what_one_process_sees(size, drop_last):
    """At each step, 2 processes with batches of 4, or 4 with 2, get the samples of one with 8, in the same order."""
    expected = ranks(size, 8, 1, shuffle=True, seed=5, drop_last=drop_last)[0]
    for world, batch_size in ((2, 4), (4, 2), (8, 1)):
        parts = ranks(size, batch_size, world, shuffle=True, seed=5, drop_last=drop_last)
        steps = [[row for row in interleaved(list(step)) if row != PADDING] for step in zip(*parts, strict=True)]
        assert expected == steps


@pytest.mark.parametrize(
    ("shape", "drop_last", "expected"),
    [
        ((5, 2, 1), False, [[[0, 1], [2, 3], [4]]]),
        ((10, 3, 2), False, [[[0, 2, 4], [6, 8]], [[1, 3, 5], [7, 9]]]),
        ((7, 2, 3), False, [[[0, 3], [6]], [[1, 4], [PADDING]], [[2, 5], [PADDING]]]),
        ((7, 2, 3), True, [[[0, 3]], [[1, 4]], [[2, 5]]]),
        ((1, 2, 3), False, [[[0]], [[PADDING]], [[PADDING]]]),
        ((0, 4, 2), False, [[], []]),
        ((7, 4, 2), True, [[], []]),
    ],
)
def test_rank_takes_every_nth(shape, drop_last, expected):
    """Rank r of R takes every R-th position of the global batch, starting at r; a rank without a sample gets a padding
    entry. Evaluation keeps the order of the data in each epoch."""
    assert ranks(*shape, drop_last=drop_last) == expected
    for rank, batches in enumerate(expected):
        sampler = BatchIndices(range(shape[0]), shape[1], num_replicas=shape[2], rank=rank, drop_last=drop_last)
        sampler.set_epoch(2)
        assert list(sampler) == batches


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 7, 12, 13])
def test_the_samples_of_a_batch_are_known_beforehand(size, world, drop_last):
    """`samples_of` returns the size of each batch, on this rank and on average over ranks, without padding."""
    samplers = [BatchIndices(range(size), 2, num_replicas=world, rank=r, drop_last=drop_last) for r in range(world)]
    for step, batches in enumerate(zip(*samplers, strict=True)):
        held = [sum(row != PADDING for row in batch) for batch in batches]
        assert [sampler.samples_of(step) for sampler in samplers] == [(own, sum(held) / world) for own in held]


def test_order_depends_on_seed_and_epoch_alone():
    """Each (seed, epoch) has its own order, which is the same in each iteration; the two are not simply added."""
    orders = {}
    for seed, epoch in itertools.product(range(4), range(4)):
        sampler = BatchIndices(range(40), 40, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        orders[seed, epoch] = tuple(next(iter(sampler)))
        assert orders[seed, epoch] == tuple(next(iter(sampler)))
    assert len(set(orders.values())) == 16


def test_order_is_frozen():
    """The order of seed 42 is the same in all versions, so that runs can be reproduced and resumed."""
    sampler = BatchIndices(range(10), 10, shuffle=True, seed=42)
    assert list(sampler) == [[1, 8, 5, 3, 7, 9, 4, 0, 6, 2]]


def test_start_resumes_one_epoch():
    """`start` skips batches in each iteration of this epoch, and none of the next; the length does not change."""
    sampler = BatchIndices(range(20), 3, shuffle=True, seed=1)
    expected = list(sampler)
    sampler.start = 4
    assert len(expected) == len(sampler) == 7
    iter(sampler)  # as a loader with workers does
    assert expected[4:] == list(sampler)
    sampler.set_epoch(0)
    assert expected[4:] == list(sampler)
    sampler.set_epoch(1)
    assert len(list(sampler)) == 7
    sampler.set_epoch(0)
    assert expected == list(sampler)
    sampler.start = 7
    assert list(sampler) == []


def test_order_is_fixed_when_iteration_begins():
    """`set_epoch` does not change the current iteration."""
    sampler = BatchIndices(range(20), 3, shuffle=True)
    expected = list(sampler)
    iterator = iter(sampler)
    first = next(iterator)
    sampler.set_epoch(3)
    assert expected == [first, *iterator]


def test_lightning_leaves_it_alone():
    """It is a DistributedSampler, which Lightning does not wrap, and it needs no process group."""
    assert isinstance(BatchIndices(range(3), 1, num_replicas=2, rank=1), DistributedSampler)


@pytest.mark.parametrize(("options", "words"), [({"batch_size": 0}, "batch_size"), ({"rank": 2}, "rank")])
def test_impossible_arguments(options, words):
    """A batch size of 0 and a rank outside the world are refused."""
    with pytest.raises(ValueError, match=words):
        BatchIndices(range(3), **{"batch_size": 1, "num_replicas": 2, **options})


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_evaluation_set_is_split_without_repeating_a_sample(shuffle, drop_last):
    """For up to 40 samples, 4 processes and batches of 6, each sample occurs once, processes have equally many batches,
    and none is empty or too large. Only batches of one and fewer samples than processes are impossible."""
    for samples, world, size in itertools.product(range(41), range(1, 5), range(1, 7)):
        each = [
            EachOnce(DistributedSampler(range(samples), world, rank, shuffle=shuffle), size, drop_last)
            for rank in range(world)
        ]
        if not all(once.is_possible for once in each):
            assert not any(once.is_possible for once in each)
            assert size == 1 or samples < world
            continue
        batches = [list(once) for once in each]
        assert {len(of) for of in batches} == {len(each[0])}
        assert all(0 < len(batch) <= size for of in batches for batch in of)
        seen = [position for of in batches for batch in of for position in batch]
        assert len(set(seen)) == len(seen) > samples - world * size
        assert drop_last or sorted(seen) == list(range(samples))


@pytest.mark.parametrize("evaluates", [True, False])
def test_evaluation_gathers_rows_even_if_a_process_has_fewer(evaluates):
    """The last row is repeated, as plain Lightning repeats a sample. In training, sizes are not exchanged."""
    gathered = []

    class Gathers:
        def all_gather(self, tensor, group=None, sync_grads=False):
            gathered.append(tensor.tolist())
            return torch.stack([tensor, tensor + 1])  # the other process has a row more

    strategy = type("Strategy", (CountsOnce, Gathers), {})()
    strategy.lightning_module = SimpleNamespace(trainer=SimpleNamespace(training=not evaluates))
    with pytest.warns(UserWarning, match="repeats the last row") if evaluates else nullcontext():
        strategy.all_gather(torch.tensor([[1.0], [2.0]]))
    assert gathered == ([2, [[1.0], [2.0], [2.0]]] if evaluates else [[[1.0], [2.0]]])
    strategy.all_gather(torch.tensor(5.0))
    assert gathered[-1] == 5.0
    if evaluates:
        with pytest.raises(RunError, match="no rows from some processes, up to 1 from others"):
            strategy.all_gather(torch.zeros(0, 1))


class Sized(Dataset):
    """Six samples, and columns of sizes and labels that are not part of the samples."""

    sizes = [6, 1, 5, 2, 4, 3]  # noqa: RUF012
    labels = torch.tensor([0, 1, 1, 1, 1, 1])

    def __len__(self):
        return 6

    def __getitem__(self, position):
        return torch.tensor([float(position)])


def test_a_subset_has_the_columns_of_its_dataset():
    """A fold, and a subset of a subset, as `random_split` returns, have the values of their samples."""
    data = OfDatasets(data_config(num_splits=3, fold=1, batch_size=2), Subset(Sized(), [5, 4, 3, 2, 1]))
    parts = [on_rank(data).dataset(split) for split in ("train", "val")]
    found = [(sort_values(part, "sizes").tolist(), [int(n) for n in part.labels]) for part in parts]
    positions = [[int(part.of.dataset.indices[n]) for n in part.of.indices] for part in parts]
    assert sorted(positions[0] + positions[1]) == [1, 2, 3, 4, 5]
    assert found == [([Sized.sizes[n] for n in at], [int(Sized.labels[n]) for n in at]) for at in positions]
    with pytest.raises(ValueError, match=r"the training set \(Subset\) has no such column"):
        sort_values(parts[0], "lengths", batched=True)


def test_a_fold_takes_the_rows_of_pandas_by_position():
    """A shuffled or filtered frame has other labels of rows than positions."""

    class Frame(Sized):
        labels = pd.Series([0, 1, 1, 1, 1, 1], index=[5, 4, 3, 2, 1, 0])

    part = on_rank(OfDatasets(data_config(num_splits=3, batch_size=2), Frame())).dataset("train")
    assert [int(n) for n in part.labels] == [int(Frame.labels.iloc[n]) for n in part.of.indices]


def test_a_task_that_cannot_tell_padding_gets_each_sample_once():
    """Nine samples in batches of four on two processes leave one process without a sample: batches are smaller."""
    numbers, seen = [torch.tensor([float(n)]) for n in range(9)], []
    for rank in range(2):
        data = on_rank(OfDatasets(data_config(batch_size=4), numbers, test=numbers), rank, 2)
        seen += [x for batch in data.test_dataloader() for x in batch.flatten().tolist()]
    assert sorted(seen) == [float(n) for n in range(9)]
