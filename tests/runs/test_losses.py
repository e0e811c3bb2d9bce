"""A loss weighs batches by what it divides by: what is learned and measured is that of the whole batch, on any number
of processes, in any number of accumulated batches.

References are plain torch: the loss of all samples of a step at once.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import weights
from tiny import csv_rows
from torch import nn

MINE = '''
import torch
import pytorch_lightning as pl
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from deeplightning.task.supervised import Supervised


def made(label, index, kind):
    """The truth of samples, (B,) to (B, …)."""
    if kind == "classes":
        return label
    if kind == "pixels":
        found = (label[:, None] * torch.arange(1, 5) + index[:, None]) % 11
        return found.masked_fill(found == 10, -100)
    return (label[:, None] * torch.arange(3, 13) % 3 == 0).float()


class Task(Supervised):
    def __init__(self, cfg, kind="classes"):
        super().__init__(cfg)
        self.kind_of_truth = kind

    def inputs(self, batch):
        return (batch["image"].flatten(1).float() / 255).to(self.dtype)

    def truth(self, batch):
        found = made(batch["label"], batch["index"], self.kind_of_truth)
        return found.to(self.dtype) if found.is_floating_point() else found


class Net(nn.Module):
    def __init__(self, places=0):
        super().__init__()
        self.linear, self.places = nn.Linear(64, 10 * max(1, places)), places
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(0.1 * torch.arange(parameter.numel()).double().sin().view_as(parameter))

    def forward(self, x):
        found = self.linear(x)
        return found.unflatten(1, (10, self.places)) if self.places else found


class OfSmall(nn.Module):
    """The mean over the samples of classes below 4."""

    def forward(self, logits, labels):
        small = labels < 4
        return nn.functional.cross_entropy(logits[small], labels[small], reduction="sum") / small.sum().clamp(min=1)

    def denominator(self, logits, labels):
        return (labels < 4).sum()


class Rows(Dataset):
    def __init__(self, count, seed):
        pixels = torch.randint(256, (count, 1, 8, 8), generator=torch.Generator().manual_seed(seed))
        self.image, self.label = pixels.byte(), pixels.flatten(1).sum(1) % 10

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return {"image": self.image[i], "label": self.label[i], "index": torch.tensor(i)}


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (self.rows[i] for i in range(len(self.rows)))


class Loaders(pl.LightningDataModule):
    """Plain loaders of a user's."""

    def __init__(self, cfg, stream=False, count=101):
        super().__init__()
        self.cfg, self.stream, self.count = cfg, stream, count

    def train_dataloader(self):
        rows = Rows(95, 0)
        return DataLoader(Stream(rows) if self.stream else rows, self.cfg.data.batch_size)

    def val_dataloader(self):
        return DataLoader(Rows(self.count, 1), self.cfg.data.batch_size)

    test_dataloader = val_dataloader


class Plain(pl.LightningModule):
    """A task as Lightning's manual has it."""

    def __init__(self, cfg):
        super().__init__()
        self.linear, self.lr = Net().linear, cfg.model.optimizer.params["lr"]

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.linear(batch["image"].flatten(1).float() / 255), batch["label"])

    def validation_step(self, batch, batch_idx):
        size = len(batch["index"])
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True, batch_size=size)
        self.log("val_index", batch["index"].float().mean(), sync_dist=True, batch_size=size)

    def test_step(self, batch, batch_idx):
        self.log("test_index", batch["index"].float().mean(), sync_dist=True, batch_size=len(batch["index"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
'''

WEIGHT = [1.0, 1.0, 20.0, 1.0, 0.5, 1.0, 1.0, 3.0, 1.0, 0.1]
ONE = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
CASES = {  # name: the loss, its params, the truth, params of the network
    "weight": ("torch.nn.CrossEntropyLoss", {"weight": WEIGHT}, "classes", {}),
    "smoothed": ("torch.nn.CrossEntropyLoss", {"weight": WEIGHT, "label_smoothing": 0.1}, "classes", {}),
    "one": ("torch.nn.CrossEntropyLoss", {"weight": ONE}, "classes", {}),
    "unweighted": ("torch.nn.CrossEntropyLoss", {}, "pixels", {"places": 4}),
    "positive": ("torch.nn.BCEWithLogitsLoss", {"pos_weight": WEIGHT, "weight": WEIGHT}, "labels", {}),
    "own": ("mine.OfSmall", {}, "classes", {}),
}
SAMPLES = 20
"""Of one batch on all processes: the 134 samples of an epoch are six of them and a short one."""


def learn() -> None:
    """Called in each process of a job: a training for each case."""
    from deeplightning.config.examine import load_config
    from deeplightning.run.train import launch

    path, folder, backend, processes, cases = sys.argv[1:]
    for name, factor in json.loads(cases):
        loss, params, kind, network = CASES[name]
        logger = f"type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{folder}', name: {name}_{factor}}}"
        overrides = [
            f"model.module={{type: mine.Task, params: {{kind: {kind}}}}}",
            "~model.network",
            f"model.network={{type: mine.Net, params: {json.dumps(network)}}}",
            f"model.loss={{type: {loss}, params: {json.dumps(params)}}}",
            f"train.accumulator_factor={factor}",
            *(f"engine.processes={processes}", f"engine.backend={backend}"),
            f"data.batch_size={SAMPLES // int(processes)}",
            *("~logger", f"logger={{{logger}, pictures: null}}"),
        ]
        launch(load_config(path, overrides))


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder with a user's own code."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def own(mine):
    namespace: dict = {}
    exec((mine / "mine.py").read_text(), namespace)
    return namespace


@pytest.fixture
def order(fit):
    """The digits of each epoch in the order in which they are learned, and those of the validation."""
    fitted = fit("train.callbacks=[{type: own.Batches, params: {file: batches.pt}}]", f"data.batch_size={SAMPLES}")
    seen = torch.load("batches.pt", weights_only=True)
    Path("batches.pt").unlink()
    learned, validated = fitted.data.dataset("train"), fitted.data.dataset("val")
    epochs = torch.cat(seen["train"]).chunk(2)
    return {"epochs": [learned[epoch] for epoch in epochs], "val": validated[torch.arange(len(validated))]}


def by_torch(name: str, factor: int, order: dict, own: dict) -> tuple[dict, float]:
    """Weights after the training and the validation loss, in 64 bits."""
    loss, params, kind, network = CASES[name]
    net = own["Net"](**network).double()
    tensors = {key: torch.tensor(v).double() if isinstance(v, list) else v for key, v in params.items()}
    judge = own["OfSmall"]() if name == "own" else getattr(nn, loss.rpartition(".")[2])(**tensors)
    steps = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def value(batch):
        truth = own["made"](batch["label"], batch["index"], kind)
        return judge(
            net(batch["image"].flatten(1).double() / 255), truth.double() if truth.is_floating_point() else truth
        )

    for epoch in order["epochs"]:
        for first in range(0, len(epoch["label"]), SAMPLES * factor):
            steps.zero_grad()
            value({key: column[first : first + SAMPLES * factor] for key, column in epoch.items()}).backward()
            steps.step()
    return net.state_dict(), value(order["val"]).item()


def assert_that_of_torch(folder: Path, cases: list[tuple[str, int]], order: dict, own: dict) -> None:
    """Weights and validation loss within 1e-6."""
    for name, factor in cases:
        run = folder / f"{name}_{factor}" / "version_0"
        expected, value = by_torch(name, factor, order, own)
        found = weights(run / "last.ckpt")
        start = own["Net"](**CASES[name][3]).state_dict()
        assert max((expected[n] - start[n]).abs().max() for n in start) > 0.001, name
        off = max((found[f"network.{n}"].double() - expected[n]).abs().max().item() for n in expected)
        last = [float(row["val_loss"]) for row in csv_rows(run / "metrics.csv") if row.get("val_loss")][-1]
        assert (off, last) == (pytest.approx(0, abs=1e-6), pytest.approx(value, rel=1e-6, abs=1e-6)), (name, factor)


PAIRS = [("weight", 3), ("unweighted", 4), ("one", 3), ("own", 4), ("smoothed", 1), ("positive", 4)]


@pytest.mark.parametrize(
    ("backend", "processes", "cases"),
    [
        *(("null", 1, PAIRS), ("ddp", 2, PAIRS)),
        pytest.param("fsdp", 2, PAIRS, marks=pytest.mark.slow),
        *(pytest.param(f"deepspeed_stage_{n}", 2, PAIRS, marks=pytest.mark.slow) for n in (1, 2, 3)),
    ],
)
def test_each_loss_learns_what_torch_learns(
    backend, processes, cases, request, command, tiny, mine, tmp_path, order, own
):
    """Losses of torch.nn with class weights or an ignored class, and one with a denominator of its own, accumulated by
    3 and 4: with a short last batch, with a step of fewer batches at the end of an epoch, and where a process has a
    batch of which nothing counts. test_denominators.py has the other losses."""
    start = request.getfixturevalue("jobs") if "deepspeed" in backend else command
    given = (tiny, tmp_path, backend, processes, json.dumps(cases))
    start(*given, cwd=mine, ranks=processes, main="test_losses:learn", code=0)
    assert_that_of_torch(tmp_path, cases, order, own)


# ---- loaders of a user's own: 95 samples in batches of 10, accumulated by 4, are steps of 40, 40 and 15


def sums_of_own_loader(own, batches: list[list[int]]) -> dict[str, torch.Tensor]:
    """Weights after steps over these samples, by plain torch in 64 bits."""
    rows, net = own["Rows"](95, 0), own["Net"]().double()
    steps = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches:
        steps.zero_grad()
        nn.functional.cross_entropy(net(rows.image[batch].flatten(1).double() / 255), rows.label[batch]).backward()
        steps.step()
    return net.state_dict()


@pytest.mark.parametrize(("task", "stream"), [("mine.Task", True), ("mine.Plain", False)])
def test_the_last_batches_of_a_plain_loader_weigh_their_samples(task, stream, command, tiny, mine, own):
    """For any task, and for a stream, whose length nobody knows: each step is the mean over its samples."""
    outcome = command(
        *("train", tiny, f"data.module={{type: mine.Loaders, params: {{stream: {stream}}}}}", "data.batch_size=10"),
        *(f"model.module={{type: {task}}}", "~model.network", "model.network={type: mine.Net}"),
        *("~model.optimizer", "model.optimizer={type: torch.optim.SGD, params: {lr: 0.1}}"),
        *("train.accumulator_factor=4", "train.num_epochs=1"),
        cwd=mine,
        code=0,
    )
    found = weights(outcome.folder / "last.ckpt")
    prefix = "" if task == "mine.Plain" else "network."
    expected = sums_of_own_loader(own, [[*range(40)], [*range(40, 80)], [*range(80, 95)]])
    assert max((found[prefix + n].double() - expected[n]).abs().max() for n in expected) < 1e-6


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_each_sample_of_a_plain_loader_counts_once_on_two_processes(backend, command, tracked, tiny, mine):
    """101 samples in batches of 50, validated and tested by a task as Lightning's manual has it: values of one process,
    the mean of the positions among them, which is 50."""
    found = {}
    for processes in (1, 2):
        outcome = command(
            *("train", tiny, "data.module={type: mine.Loaders}", "data.batch_size=50"),
            "model.module={type: mine.Plain}",
            *("model.optimizer.params.lr=0.0", "train.num_epochs=1", "stages=[train,validate,test]"),
            *(f"engine.processes={processes}", f"engine.backend={backend if processes > 1 else 'null'}"),
            cwd=mine,
            ranks=processes,
            code=0,
        )
        assert "DistributedSampler" not in outcome.err
        results = [json.loads((outcome.folder / f"{stage}_results.json").read_text()) for stage in ("val", "test")]
        found[processes] = results[0] | results[1] | {"loss": tracked(outcome.folder).series()["val_loss"][0][1]}
    assert found[2] == pytest.approx(found[1], abs=1e-6)
    assert (found[2]["val_index"], found[2]["test_index"]) == (50, 50)


def test_a_set_that_cannot_be_split_evenly_is_reported(command, tiny, mine):
    """Three samples in batches of one on two processes: one counts twice, which a warning says once."""
    outcome = command(
        *("train", tiny, "data.module={type: mine.Loaders, params: {count: 3}}", "data.batch_size=1"),
        *("model.module={type: mine.Plain}", "train.num_epochs=1", "engine.processes=2", "engine.backend=ddp"),
        cwd=mine,
        ranks=2,
        code=0,
    )
    told = "".join(each.err for each in outcome.ranks)
    assert told.count("3 samples cannot be split") == 1


# ---- losses that no weight makes right


def test_a_loss_that_adds_up_is_reported_before_the_first_step(train):
    """`reduction: sum` depends on batches and processes: one warning names the loss and what to set."""
    outcome = train("model.loss={type: torch.nn.CrossEntropyLoss, params: {reduction: sum}}", "train.max_steps=1")
    assert outcome.err.count("`reduction: sum`") == 1
    assert "model.loss: CrossEntropyLoss has `reduction: sum`" in outcome.err


def test_several_losses_that_divide_by_different_numbers_are_reported_where_batches_accumulate(train):
    """Gradients of accumulated batches cannot be weighed for each loss: one warning names the losses."""
    losses = (
        "~model.loss",
        "model.loss={ce: {type: torch.nn.CrossEntropyLoss, params: {ignore_index: 3}}, "
        "margin: {type: torch.nn.MultiMarginLoss}}",
    )
    once = ("train.max_steps=2",)
    assert train(*losses, *once, "train.accumulator_factor=2").err.count("ce, margin do not all divide") == 1
    assert "do not all divide" not in train(*losses, *once).err


def test_several_losses_each_weigh_batches_by_what_they_divide_by(job, tracked):
    """Without accumulation: weights, points and values of epochs on two processes are those of one; and a validation in
    batches of 3 gives what one batch gives."""
    settings = (
        *("~model.loss", "logger.log_every_n_steps=1"),
        "model.loss={ce: {type: torch.nn.CrossEntropyLoss, params: {ignore_index: 3}, weight: 0.5}, "
        "margin: {type: torch.nn.MultiMarginLoss}}",
    )
    whole = job(*settings, "data.batch_size=134", ranks=1).folder
    spread = job(*settings, "data.batch_size=67").folder
    ours, theirs = weights(spread / "last.ckpt"), weights(whole / "last.ckpt")
    assert max((ours[name] - theirs[name]).abs().max() for name in ours) < 1e-6
    expected, series = tracked(whole).series(), tracked(spread).series()
    for name in ("train_loss", "train_ce", "train_loss_epoch", "train_ce_epoch", "val_loss", "val_ce", "val_margin"):
        assert series[name] == [(step, pytest.approx(value, abs=1e-6)) for step, value in expected[name]]
    still = (*settings, "model.optimizer.params.lr=0.0", "train.num_epochs=1")
    small, large = (
        tracked(job(*still, f"data.batch_size={size}", ranks=1).folder).series()["val_loss"][0][1] for size in (3, 134)
    )
    assert small == pytest.approx(large, abs=1e-6)
