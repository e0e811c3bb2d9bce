"""Each row of the table of loaders in docs/how-to/own-data.md: what is exact on resume and on several processes."""

import re
from pathlib import Path

import pytest
from tiny import digest

MODULE = """\
import itertools
import random

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch import distributed
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset

from deeplightning.data.of_datasets import OfDatasets
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
    \"\"\"Draws from generators of its own and of its transforms.\"\"\"

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
        there = distributed.is_initialized()
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if there else (0, 1)
        samples = map(sample, range(self.counts[min(rank, len(self.counts) - 1)]))
        return itertools.islice(samples, rank, None, world) if self.divided else samples


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(39, -1, -1))

    def __len__(self):
        return 40


class Drawn(Sampler):
    \"\"\"An order that is drawn from torch's generator.\"\"\"

    def __iter__(self):
        return iter(torch.randperm(40).tolist())

    def __len__(self):
        return 40


class Counted(Sampler):
    \"\"\"An order that depends on how often it was asked for.\"\"\"

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        self.asked += 1
        return iter(torch.randperm(40, generator=torch.Generator().manual_seed(self.asked)).tolist())

    def __len__(self):
        return 40


class Pairs(BatchSampler):
    def __init__(self, sampler=None, batch_size=8, drop_last=False):
        super().__init__(Backwards() if sampler is None else sampler, batch_size, drop_last)


def collate(samples):
    return {"x": torch.stack([s["x"] for s in samples]) * 2, "y": torch.stack([s["y"] for s in samples]),
            "index": torch.stack([s["index"] for s in samples])}


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
        "batch sampler": lambda: DataLoader(data, batch_sampler=Pairs()),
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
        return [DataLoader(Samples(), 8) for _ in range(self.sets)] if self.sets else []


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
ROWS = {  # exact after an epoch, exact inside an epoch
    "in order": (True, True),
    "shuffle": (True, True),
    "sampler": (True, True),
    "drawn sampler": (True, True),
    "counted sampler": (False, False),
    "batch sampler": (True, True),
    "collate": (True, True),
    "dict": (True, True),
    "combined": (True, True),
    "shorter": (True, True),
    "own generators": (True, True),
    "workers": (True, True),
    "stream": (True, True),
}


@pytest.fixture(scope="module")
def train(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loaders")
    (folder / "loaders.py").write_text(MODULE)
    (folder / "config.yaml").write_text(CONFIG.replace("STORE", str(folder / "store")))

    def run(kind, *overrides, code=0, ranks=1):
        name = f"logger.params.experiment_name='{kind}'"
        more = (f"engine.processes={ranks}", "engine.backend=ddp") if ranks > 1 else ()
        words = (f"data.module.params.kind='{kind}'", name, *more, *overrides)
        return command("train", "config.yaml", *words, cwd=folder, ranks=ranks, code=code)

    return run


def seen(outcome, rank=0, epoch=0):
    out = outcome.ranks[rank].out if outcome.ranks else outcome.out
    return [int(word) for word in re.search(rf"^seen {epoch} {rank} \[(.*)\]$", out, re.MULTILINE)[1].split(",")]


def weights(outcome):
    return digest(Path(outcome.folder) / "last.ckpt")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("shorter", "stream") else pytest.mark.slow) for k in ROWS]
)
def test_a_resumed_run_ends_with_the_same_weights_where_the_table_says_so(kind, train):
    """Uninterrupted, interrupted after an epoch, and in the middle of the second."""
    whole = weights(train(kind))
    found = []
    for cut in ("train.num_epochs=1", "train.max_steps=8"):
        parted = f"{kind} {cut[6:9]}"
        begun = train(kind, cut, f"logger.params.experiment_name='{parted}'")
        ended = train(kind, "train.resume_ckpt=auto", f"logger.params.experiment_name='{parted}'")
        assert ended.folder == begun.folder
        found.append(weights(ended) == whole)
    assert tuple(found) == ROWS[kind]


def test_a_module_derived_from_ours_resumes_inside_its_first_epoch(train):
    """With a shuffled loader, and one that begins again before the interruption."""
    parts = {"data.module.type": "loaders.DerivedData", "model.module.type": "loaders.DerivedTask"}
    parts["model.network"] = "{type: torch.nn.Linear, params: {in_features: 4, out_features: 2}}"
    parts["model.optimizer"] = "{type: torch.optim.SGD, params: {lr: 0.5}}"
    parts |= {"model.loss": "{type: torch.nn.CrossEntropyLoss}", "train.num_epochs": 1}
    words = [f"{key}={value}" for key, value in parts.items()]
    whole = weights(train("shorter", *words, "logger.params.experiment_name=derived"))
    train("shorter", *words, "train.max_steps=3", "logger.params.experiment_name=parted")
    ended = train("shorter", *words, "train.resume_ckpt=auto", "logger.params.experiment_name=parted")
    assert weights(ended) == whole


@pytest.mark.parametrize("kind", ["sampler", "stream", pytest.param("batch sampler", marks=pytest.mark.slow)])
def test_two_processes_share_the_samples_of_a_loader(kind, train):
    """Each sample once, in an order that Lightning draws, or as a stream divides itself, without a warning; several
    validation loaders are judged, one process prepares the data."""
    outcome = train(kind, "train.num_epochs=1", "data.module.params.sets=2", ranks=2)
    parts = [seen(outcome, rank) for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == [*range(40)]
    assert [each.out.count("prepared") for each in outcome.ranks] == [1, 0]
    assert "not divided" not in outcome.err


def test_a_stream_that_is_not_divided_is_reported(train):
    """At the start, with what to write."""
    outcome = train("copied", "train.num_epochs=1", ranks=2)
    assert seen(outcome, 0) == seen(outcome, 1) == [*range(40)]
    words = "the training stream Stream is not divided among the processes: 2 of them read the same first batch"
    assert outcome.err.count(words) == 1
    assert "itertools.islice(samples, RANK, None, WORLD)" in outcome.err


def test_streams_of_unequal_length_end_an_epoch_together(train):
    """After the last step that all can take; one warning says where."""
    outcome = train("uneven", ranks=2)
    assert [len(seen(outcome, rank, epoch)) for rank in (0, 1) for epoch in (0, 1)] == [40] * 4
    words = "Stream has unequal lengths: each epoch ends for all after 5 batches, where the shortest ends"
    assert outcome.err.count(words) == 1


def test_a_stream_without_samples_for_a_process_ends_the_run(train):
    """With the stream and the process, exit code 5; nobody waits."""
    outcome = train("empty", code=5, ranks=2)
    words = "".join(each.err for each in outcome.ranks)
    assert "the training stream Stream has 0 batches for rank 1 in epoch 1" in words
