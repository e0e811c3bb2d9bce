"""Balanced batches contain each class equally often in an epoch; class weights are counted from any training set."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.utils.data import DataLoader, IterableDataset

from deeplightning.data.data_errors import DataConfigError
from deeplightning.data.samplers import PADDING, BalancedBatches
from deeplightning.data.train_sampler import train_sampler
from deeplightning.run.resolve_auto import class_counts, class_weights, label_counts, positive_weights

LABELS = np.array([5] * 90 + [2] * 9 + [0] * 2)  # three classes, not numbered consecutively


def positions(world=1, batch_size=8, epoch=0, **options):
    """Return the positions of an epoch in order, at each step those of all ranks."""
    made = [BalancedBatches(LABELS, batch_size // world, num_replicas=world, rank=r, **options) for r in range(world)]
    for sampler in made:
        sampler.set_epoch(epoch)
    steps = zip(*made, strict=True)
    found = [[batch[n] for n in range(len(step[0])) for batch in step if n < len(batch)] for step in steps]
    return [position for step in found for position in step if position != PADDING]


def test_each_class_has_its_share_of_an_epoch():
    """An epoch has as many positions as samples. Samples of a rare class repeat equally often, up to one; samples of a
    frequent class do not repeat. The class that gets the remainder differs between epochs."""
    for epoch in range(4):
        found = positions(epoch=epoch)
        assert len(found) == len(LABELS)
        shares = Counter(LABELS[found].tolist())
        assert sorted(shares.values()) == [33, 34, 34]
        times = Counter(found)
        assert {times[p] for p in range(90)} <= {0, 1}
        assert {times[p] for p in range(90, 99)} <= {3, 4}
        assert {times[p] for p in range(99, 101)} <= {16, 17}
    assert len({Counter(LABELS[positions(epoch=e)].tolist())[5] for e in range(4)}) == 2


def test_the_order_follows_from_seed_and_epoch():
    """The order is the same for the same seed and epoch and for any number of processes, and differs otherwise. Classes
    are mixed, and a resumed epoch continues after the completed batches."""
    first = positions(seed=3)
    assert first == positions(seed=3) == positions(seed=3, world=2)
    assert first not in (positions(seed=3, epoch=1), positions(seed=4))
    assert len(set(LABELS[first[:20]])) == 3
    sampler = BalancedBatches(LABELS, 8, seed=3)
    sampler.start = 5
    assert [p for batch in sampler for p in batch] == first[40:]


class Labelled:
    """A set without a column of labels, with batches that have `label`."""

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, rows):
        return {"label": torch.from_numpy(LABELS[rows])}


class Numbers(Labelled):
    """A set with numbers as targets."""

    def __getitem__(self, rows):
        return {"target": torch.zeros(len(rows))}


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


def test_labels_come_from_a_column_or_from_the_samples():
    """Both give the same order; a set without classes is refused with a remedy."""
    cfg = SimpleNamespace(seed=1, data=SimpleNamespace(batch_size=4, sampler="balanced"))
    column = type("Column", (), {"labels": torch.from_numpy(LABELS), "__len__": lambda self: len(LABELS)})()
    assert list(train_sampler(cfg, column)) == list(train_sampler(cfg, Labelled()))
    with pytest.raises(
        DataConfigError, match=r"balanced: the training set \(Numbers\) has no class for each sample; remove"
    ):
        train_sampler(cfg, Numbers())
    with pytest.raises(DataConfigError, match="needs a training set with a length, not Endless"):
        train_sampler(cfg, Endless())
    masks = type("Masks", (), {"labels": torch.zeros(3, 2, 2, dtype=torch.int64), "__len__": lambda self: 3})()
    with pytest.raises(DataConfigError, match=r"has no class for each sample; .*int64 \(3, 2, 2\)"):
        train_sampler(cfg, masks)


def test_classes_are_counted_however_the_data_module_has_them():
    """Classes are counted from the samples of a set, the batches of a loader, or the pixels of masks without those that
    have no class; None if there are no classes."""
    expected = [2, 0, 9, 0, 0, 90]
    of_set = SimpleNamespace(dataset=lambda split: Labelled())
    rows = [{"label": int(label), "index": -1 if n == 0 else n} for n, label in enumerate([5, *LABELS])]
    of_loader = SimpleNamespace(train_dataloader=lambda: DataLoader(rows, batch_size=7))
    assert class_counts(of_set).tolist() == class_counts(of_loader).tolist() == expected
    assert class_counts(of_set, 7).tolist() == [*expected, 0]
    masks = [{"mask": torch.tensor([[0, 1], [1, 255]])}, {"mask": torch.tensor([[-1, 1], [1, 1]])}]
    assert class_counts(SimpleNamespace(train_dataloader=lambda: masks), 3).tolist() == [1, 5, 0]
    for none in ([{"target": torch.ones(3)}], [{"label": torch.ones(3)}], [(1, 2)], []):
        assert class_counts(SimpleNamespace(train_dataloader=lambda none=none: none)) is None
    assert class_weights(np.array([1, 0, 3])) == [2.0, 0.0, 0.66666667]


def test_labels_of_several_are_counted_however_the_data_module_has_them():
    """Labels are counted from the column of a set or the batches of a loader without its padding rows; a single target
    of 0 and 1 is a label. The weights equal scikit-learn's for the two values of each label."""
    labels = torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 0, 1], [0, 0, 1]])
    column = type("Column", (), {"labels": labels, "__len__": lambda self: 4})()
    rows = [{"target": row, "index": n} for n, row in enumerate(labels)] + [{"target": labels[0], "index": -1}]
    for data in (
        SimpleNamespace(dataset=lambda split: column),
        SimpleNamespace(train_dataloader=lambda: DataLoader(rows, batch_size=3)),
    ):
        positives, samples = label_counts(data)
        assert (positives.tolist(), samples) == ([3, 1, 2], 4)
    assert positive_weights(positives, samples) == pytest.approx([1 / 3, 3, 1])
    for of_label, weight in zip(labels.T.numpy(), positive_weights(positives, samples), strict=True):
        negative, positive = compute_class_weight("balanced", classes=np.array([0, 1]), y=of_label)
        assert weight == pytest.approx(positive / negative)
    single = SimpleNamespace(train_dataloader=lambda: [{"target": torch.tensor([1.0, 0, 0])}])
    assert label_counts(single)[0].tolist() == [1]
    for none in ([{"target": torch.full((3, 2), 0.5)}], [{"label": torch.ones(3).long()}], [(1, 2)], []):
        assert label_counts(SimpleNamespace(train_dataloader=lambda none=none: none)) is None


def test_many_classes_are_found_in_one_pass():
    """The positions of each class are in order; a pass for each class would take minutes for millions of rows."""
    labels = np.random.default_rng(0).integers(0, 20_000, 1_000_000)
    found = BalancedBatches(labels, 64).by_class
    assert all(members.base is found[0].base is not None for members in found)  # parts of one sort
    assert [len(members) for members in found] == np.unique(labels, return_counts=True)[1].tolist()
    for label in (0, 7, 19_999):
        np.testing.assert_array_equal(found[label], np.flatnonzero(labels == label))
