"""Each row of the table of loaders in docs/how-to/own-data.md: what is exact on resume and on several processes."""

import re

import pytest
import torch
from tiny import digest

MODULE = """\
import itertools
import random

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset, default_collate

from deeplightning.data.of_datasets import OfDatasets
from deeplightning.data.samplers import BucketedDistributedSampler
from deeplightning.task.classif import Classification


def sample(index):
    x = torch.rand(4, generator=torch.Generator().manual_seed(index))
    return {"x": x, "y": (x.sum() > 2).long(), "index": torch.tensor(index)}


class Samples(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return sample(index)


class Noise:
    def __init__(self):
        self.rng, self.state = np.random.default_rng(1), np.random.RandomState(2)

    def __call__(self, x):
        return x + self.rng.normal() + self.state.rand()


class Noisy(Samples):
    \"\"\"Draws from its own generators and those of its transforms.\"\"\"

    def __init__(self):
        self.random, self.transforms = random.Random(3), [Noise(), Noise()]

    def __getitem__(self, index):
        found = sample(index)
        for transform in self.transforms:
            found["x"] = transform(found["x"]) * self.random.random()
        return found


class Stream(IterableDataset):
    def __init__(self, *counts, divided=False):
        self.counts, self.divided = counts, divided

    def __iter__(self):
        started = distributed.is_initialized()
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if started else (0, 1)
        samples = map(sample, range(self.counts[min(rank, len(self.counts) - 1)]))
        return itertools.islice(samples, rank, None, world) if self.divided else samples


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(39, -1, -1))

    def __len__(self):
        return 40


class Drawn(Backwards):
    \"\"\"An order that torch's generator draws.\"\"\"

    def __iter__(self):
        return iter(torch.randperm(40).tolist())


class Counted(Backwards):
    \"\"\"An order that depends on the number of iterators before.\"\"\"

    def __init__(self):
        self.count = 0

    def __iter__(self):
        self.count += 1
        return iter(torch.randperm(40, generator=torch.Generator().manual_seed(self.count)).tolist())


class Endless(Sampler):
    def __iter__(self):
        return itertools.cycle(range(40))


class Pairs(BatchSampler):
    def __init__(self, sampler=None, batch_size=8, drop_last=False):
        super().__init__(Backwards() if sampler is None else sampler, batch_size, drop_last)


def collate(samples):
    batch = default_collate(samples)
    return batch | {"x": batch["x"] * 2}


def loader(kind):
    if kind in ("stream", "copied", "uneven", "empty"):
        counts = {"uneven": (56, 40), "empty": (40, 0)}.get(kind, (40,))
        return DataLoader(Stream(*counts, divided=kind == "stream"), 8)
    data = Samples()
    return {
        "in order": lambda: DataLoader(data, 8),
        "shuffle": lambda: DataLoader(data, 8, shuffle=True),
        "sampler": lambda: DataLoader(data, 8, sampler=Backwards()),
        "drawn sampler": lambda: DataLoader(data, 8, sampler=Drawn()),
        "counted sampler": lambda: DataLoader(data, 8, sampler=Counted()),
        "endless": lambda: DataLoader(data, 8, sampler=Endless()),
        "batch sampler": lambda: DataLoader(data, batch_sampler=Pairs()),
        "buckets": lambda: DataLoader(
            data, 8, sampler=BucketedDistributedSampler(data, 1, 8, range(40), min_samples_per_bucket=1)
        ),
        "collate": lambda: DataLoader(data, 8, collate_fn=collate),
        "dict": lambda: {"a": DataLoader(data, 8), "b": DataLoader(data, 8, sampler=Backwards())},
        "shorter": lambda: [DataLoader(data, 8), DataLoader(Subset(data, range(12)), 8, shuffle=True)],
        "combined": lambda: CombinedLoader([DataLoader(data, 8), DataLoader(data, 4)], "max_size_cycle"),
        "own generators": lambda: DataLoader(Noisy(), 8, shuffle=True),
        "workers": lambda: DataLoader(data, 8, num_workers=1, persistent_workers=True),
    }[kind]()


class Data(pl.LightningDataModule):
    def __init__(self, cfg, kind, sets=1):
        super().__init__()
        self.kind, self.sets, self.prepare_data_per_node = kind, sets, True

    def prepare_data(self):
        print("prepared", flush=True)

    def train_dataloader(self):
        return loader(self.kind)

    def val_dataloader(self):
        samples = Noisy() if self.kind == "own generators" else Samples()
        return [DataLoader(samples, 8) for _ in range(self.sets)] if self.sets else []


class Task(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.net, self.seen = torch.nn.Linear(4, 2), []

    def loss(self, batch):
        x = torch.nn.functional.dropout(batch["x"], 0.1, self.training)
        return torch.nn.functional.cross_entropy(self.net(x), batch["y"])

    def training_step(self, batch, batch_idx):
        parts = list(batch.values()) if isinstance(batch, dict) and "x" not in batch else batch
        parts = [parts] if isinstance(parts, dict) else parts
        self.seen += [index for part in parts for index in part["index"].tolist()]
        return sum(self.loss(part) for part in parts)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self):
        print("seen", self.current_epoch, self.global_rank, self.seen, flush=True)
        self.seen = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)


class DerivedData(OfDatasets):
    def __init__(self, cfg, kind, sets=0):
        super().__init__(cfg, train=Samples())
        self.kind = kind

    def train_dataloader(self):
        return loader(self.kind)


class DerivedTask(Classification):
    def training_step(self, batch, batch_idx):
        x, y = (torch.cat([torch.as_tensor(part[name]) for part in batch]) for name in "xy")
        return super().training_step({"input": x, "label": y}, batch_idx)
"""
CONFIG = """\
seed: 3
data: {module: {type: loaders.Data, params: {kind: in order, sets: 0}}, batch_size: 8}
model: {module: {type: loaders.Task}, optimizer: null}
train: {num_epochs: 2, export: false, checkpoint: {monitor: null}}
logger: {pictures: null, params: {tracking_uri: STORE, system_metrics: false}}
"""
KINDS = [
    *("in order", "shuffle", "sampler", "drawn sampler", "counted sampler", "batch sampler", "collate", "dict"),
    *("combined", "shorter", "own generators", "workers", "stream", "buckets"),
]


@pytest.fixture(scope="module")
def train(command, tmp_path_factory):
    """`train(kind, override, …)` trains with a loader of a kind, in an experiment of this name."""
    folder = tmp_path_factory.mktemp("loaders")
    (folder / "loaders.py").write_text(MODULE)
    (folder / "config.yaml").write_text(CONFIG.replace("STORE", str(folder / "store")))

    def run(kind, *overrides, experiment=None, code=0, ranks=1):
        settings = (f"data.module.params.kind='{kind}'", f"logger.params.experiment_name='{experiment or kind}'")
        more = (f"engine.processes={ranks}", "engine.backend=ddp") if ranks > 1 else ()
        return command("train", "config.yaml", *settings, *more, *overrides, cwd=folder, ranks=ranks, code=code)

    return run


def seen(outcome, rank=0, epoch=0):
    """Return the indices that a rank printed for an epoch."""
    out = outcome.ranks[rank].out if outcome.ranks else outcome.out
    return [int(word) for word in re.search(rf"^seen {epoch} {rank} \[(.*)\]$", out, re.MULTILINE)[1].split(",")]


def weights(outcome):
    return digest(outcome.folder / "last.ckpt")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "stream" else pytest.mark.slow) for k in KINDS])
def test_a_resumed_run_ends_with_the_same_weights_where_the_table_says_so(kind, train):
    """A run that is interrupted after an epoch, or in the middle of the second, ends with the weights of an
    uninterrupted one, except with a sampler that counts its iterators."""
    expected = weights(train(kind))
    for number, cut in enumerate(("train.num_epochs=1", "train.max_steps=8")):
        first = train(kind, cut, experiment=f"{kind} {number}")
        resumed = train(kind, "train.resume_ckpt=auto", experiment=f"{kind} {number}")
        assert resumed.folder == first.folder
        assert (weights(resumed) == expected) == (kind != "counted sampler"), cut


def test_a_module_derived_from_ours_resumes_inside_its_first_epoch(train):
    """The run has a shuffled loader, and one that starts again before the interruption."""
    overrides = [
        *("data.module.type=loaders.DerivedData", "model.module.type=loaders.DerivedTask", "train.num_epochs=1"),
        "model.network={type: torch.nn.Linear, params: {in_features: 4, out_features: 2}}",
        *("model.optimizer={type: torch.optim.SGD, params: {lr: 0.5}}", "model.loss={type: torch.nn.CrossEntropyLoss}"),
    ]
    expected = weights(train("shorter", *overrides, experiment="derived"))
    train("shorter", *overrides, "train.max_steps=3", experiment="interrupted")
    resumed = train("shorter", *overrides, "train.resume_ckpt=auto", experiment="interrupted")
    assert weights(resumed) == expected


@pytest.mark.parametrize("kind", ["sampler", "stream", pytest.param("batch sampler", marks=pytest.mark.slow)])
def test_two_processes_share_the_samples_of_a_loader(kind, train):
    """Each sample is read once, in an order that Lightning draws or as the stream divides itself, without a warning;
    several validation loaders are used, and one process prepares the data."""
    outcome = train(kind, "train.num_epochs=1", "data.module.params.sets=2", ranks=2)
    parts = [seen(outcome, rank) for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == [*range(40)]
    assert [each.out.count("prepared") for each in outcome.ranks] == [1, 0]
    assert "not divided" not in outcome.err


def test_a_stream_that_is_not_divided_is_reported(train):
    """A stream that each process reads completely is one warning at the start, with the remedy."""
    outcome = train("copied", "train.num_epochs=1", ranks=2)
    assert seen(outcome, 0) == seen(outcome, 1) == [*range(40)]
    warning = "the training stream Stream is not divided among the processes: 2 of them read the same first batch"
    assert outcome.err.count(warning) == 1
    assert "itertools.islice(samples, RANK, None, WORLD)" in outcome.err


def test_streams_of_unequal_length_end_an_epoch_together(train):
    """Each epoch ends after the last batch that all processes have; one warning gives the number."""
    outcome = train("uneven", ranks=2)
    assert [len(seen(outcome, rank, epoch)) for rank in (0, 1) for epoch in (0, 1)] == [40] * 4
    warning = "Stream has unequal lengths: each epoch ends for all after 5 batches, where the shortest ends"
    assert outcome.err.count(warning) == 1


def test_a_stream_without_samples_for_a_process_ends_the_run(train):
    """All processes exit with code 5, and the error names the stream and the rank."""
    outcome = train("empty", code=5, ranks=2)
    errors = "".join(each.err for each in outcome.ranks)
    assert "the training stream Stream has 0 batches for rank 1 in epoch 1" in errors


def test_a_sampler_without_a_length_trains_for_the_given_steps(train):
    """torch's Sampler has no `__len__`; the epoch has no end, and `max_steps` ends the run."""
    outcome = train("endless", "train.num_epochs=null", "train.max_steps=7")
    assert seen(outcome) == [index % 40 for index in range(56)]


def test_generators_of_validation_data_continue_where_they_were(train):
    """The metrics of a validation after a resume are those of an uninterrupted run."""

    def values(epochs, *more, experiment):
        keeps = ("data.module.params.sets=1", "train.checkpoint={monitor: val_loss, save_top_k: 9}")
        done = train("own generators", *keeps, f"train.num_epochs={epochs}", *more, experiment=experiment)
        kept = torch.load(done.folder / "last.ckpt", weights_only=True)["callbacks"]["Checkpoints"]["kept"]
        return sorted((entry["epoch"], entry["value"]) for entry in kept)

    expected = values(2, experiment="noisy")
    values(1, experiment="noisy part")
    assert values(2, "train.resume_ckpt=auto", experiment="noisy part") == expected
