"""A loss weighs batches by its denominator: a step learns, and a validation measures, what one batch of all samples
would give, on any number of processes and with any number of accumulated batches.

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


def truth_of(label, index, kind):
    """The truth of samples, (B,) to (B, …)."""
    if kind == "classes":
        return label
    if kind == "pixels":
        classes = (label[:, None] * torch.arange(1, 5) + index[:, None]) % 11
        return classes.masked_fill(classes == 10, -100)
    return (label[:, None] * torch.arange(3, 13) % 3 == 0).float()


class Task(Supervised):
    def __init__(self, cfg, kind="classes"):
        super().__init__(cfg)
        self.kind_of_truth = kind

    def inputs(self, batch):
        return (batch["image"].flatten(1).float() / 255).to(self.dtype)

    def truth(self, batch):
        truth = truth_of(batch["label"], batch["index"], self.kind_of_truth)
        return truth.to(self.dtype) if truth.is_floating_point() else truth


class Net(nn.Module):
    def __init__(self, pixels=0):
        super().__init__()
        self.linear, self.pixels = nn.Linear(64, 10 * max(1, pixels)), pixels
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(0.1 * torch.arange(parameter.numel()).double().sin().view_as(parameter))

    def forward(self, x):
        outputs = self.linear(x)
        return outputs.unflatten(1, (10, self.pixels)) if self.pixels else outputs


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
    """Plain loaders."""

    def __init__(self, cfg, stream=False, count=101):
        super().__init__()
        self.cfg, self.stream, self.count = cfg, stream, count

    def train_dataloader(self):
        rows = Rows(95, 0)
        return DataLoader(Stream(rows) if self.stream else rows, self.cfg.data.batch_size)

    def val_dataloader(self):
        return DataLoader(Rows(self.count, 1), batch_size=self.cfg.data.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Plain(pl.LightningModule):
    """A task as in Lightning's manual."""

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

    def predict_step(self, batch, batch_idx):
        return {"index": batch["index"]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
'''

WEIGHT = [1.0, 1.0, 20.0, 1.0, 0.5, 1.0, 1.0, 3.0, 1.0, 0.1]
ONE = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
CASES = {  # name: the loss, its params, the truth, params of the network
    "weight": ("torch.nn.CrossEntropyLoss", {"weight": WEIGHT}, "classes", {}),
    "smoothed": ("torch.nn.CrossEntropyLoss", {"weight": WEIGHT, "label_smoothing": 0.1}, "classes", {}),
    "one": ("torch.nn.CrossEntropyLoss", {"weight": ONE}, "classes", {}),
    "unweighted": ("torch.nn.CrossEntropyLoss", {}, "pixels", {"pixels": 4}),
    "positive": ("torch.nn.BCEWithLogitsLoss", {"pos_weight": WEIGHT, "weight": WEIGHT}, "labels", {}),
    "own": ("mine.OfSmall", {}, "classes", {}),
}
ACCUMULATED = {"weight": 3, "unweighted": 4, "one": 3, "own": 4, "smoothed": 1, "positive": 4}
"""Number of accumulated batches of each case."""
SAMPLES = 20
"""Samples of a batch on all processes: an epoch of 134 samples has six such batches and a short one."""


def learn() -> None:
    """Train each case; called in each process of a job."""
    from deeplightning.config.examine import load_config
    from deeplightning.run.train import launch

    path, folder, backend, processes = sys.argv[1:]
    for name, (loss, params, kind, network) in CASES.items():
        logger = f"type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{folder}', name: {name}}}"
        overrides = [
            f"model.module={{type: mine.Task, params: {{kind: {kind}}}}}",
            "~model.network",
            f"model.network={{type: mine.Net, params: {json.dumps(network)}}}",
            f"model.loss={{type: {loss}, params: {json.dumps(params)}}}",
            f"train.accumulator_factor={ACCUMULATED[name]}",
            *(f"engine.processes={processes}", f"engine.backend={backend}"),
            f"data.batch_size={SAMPLES // int(processes)}",
            *("~logger", f"logger={{{logger}, pictures: null}}"),
        ]
        launch(load_config(path, overrides))


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder with user code."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    return folder


@pytest.fixture(scope="module")
def own(mine):
    """The names that the user code defines."""
    namespace: dict = {}
    exec((mine / "mine.py").read_text(), namespace)
    return namespace


@pytest.fixture
def order(fit):
    """The digits of each epoch in training order, and those of the validation."""
    fitted = fit("train.callbacks=[{type: own.Batches, params: {file: batches.pt}}]", f"data.batch_size={SAMPLES}")
    seen = torch.load("batches.pt", weights_only=True)
    Path("batches.pt").unlink()
    learned, validated = fitted.data.dataset("train"), fitted.data.dataset("val")
    epochs = torch.cat(seen["train"]).chunk(2)
    return {"epochs": [learned[epoch] for epoch in epochs], "val": validated[torch.arange(len(validated))]}


def by_torch(name: str, order: dict, own: dict) -> tuple[dict, float]:
    """Train a case with plain torch in 64 bits; return the weights and the validation loss."""
    loss, params, kind, network = CASES[name]
    net = own["Net"](**network).double()
    tensors = {key: torch.tensor(v).double() if isinstance(v, list) else v for key, v in params.items()}
    loss = own["OfSmall"]() if name == "own" else getattr(nn, loss.rpartition(".")[2])(**tensors)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    size = SAMPLES * ACCUMULATED[name]

    def value(batch):
        truth = own["truth_of"](batch["label"], batch["index"], kind)
        truth = truth.double() if truth.is_floating_point() else truth
        return loss(net(batch["image"].flatten(1).double() / 255), truth)

    for epoch in order["epochs"]:
        for first in range(0, len(epoch["label"]), size):
            optimizer.zero_grad()
            value({key: column[first : first + size] for key, column in epoch.items()}).backward()
            optimizer.step()
    return net.state_dict(), value(order["val"]).item()


SLOW = ["fsdp", *(f"deepspeed_stage_{n}" for n in (1, 2, 3))]


@pytest.mark.parametrize("backend", ["null", "ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_each_loss_learns_what_torch_learns(backend, request, command, tiny, mine, tmp_path, order, own):
    """Losses of torch.nn with class weights or an ignored class, and a loss that defines its denominator, give the
    weights and the validation loss of plain torch within 1e-6. Batches are accumulated by 3 and 4, the last one is
    short, the last step of an epoch has fewer batches, and one process has a batch in which no sample counts.
    test_denominators.py covers the other losses."""
    start = request.getfixturevalue("jobs") if "deepspeed" in backend else command
    processes = 1 if backend == "null" else 2
    start(tiny, tmp_path, backend, processes, cwd=mine, ranks=processes, main="test_losses:learn", code=0)
    for name in CASES:
        run = tmp_path / name / "version_0"
        expected, value = by_torch(name, order, own)
        found = weights(run / "last.ckpt")
        initial = own["Net"](**CASES[name][3]).state_dict()
        assert max((expected[n] - initial[n]).abs().max() for n in initial) > 0.001, name
        off = max((found[f"network.{n}"].double() - expected[n]).abs().max().item() for n in expected)
        last = [float(row["val_loss"]) for row in csv_rows(run / "metrics.csv") if row.get("val_loss")][-1]
        assert (off, last) == (pytest.approx(0, abs=1e-6), pytest.approx(value, rel=1e-6, abs=1e-6)), name


# ---- loaders of the user


@pytest.fixture
def with_loaders(command, tiny, mine):
    """`with_loaders(override, …)` trains one epoch with the data module `mine.Loaders`."""

    def run(*overrides, task="mine.Plain", params="{}", ranks=1):
        modules = (f"data.module={{type: mine.Loaders, params: {params}}}", f"model.module={{type: {task}}}")
        settings = (*modules, "train.num_epochs=1", f"engine.processes={ranks}")
        return command("train", tiny, *settings, *overrides, cwd=mine, ranks=ranks, code=0)

    return run


@pytest.mark.parametrize(("task", "stream"), [("mine.Task", True), ("mine.Plain", False)])
def test_the_last_batches_of_a_plain_loader_weigh_their_samples(task, stream, with_loaders, own):
    """With any task, and with a stream of unknown length, each step learns from the mean over its samples: 95 samples
    in batches of 10, accumulated by 4, are steps of 40, 40 and 15."""
    outcome = with_loaders(
        *("data.batch_size=10", "train.accumulator_factor=4", "~model.network", "model.network={type: mine.Net}"),
        *("~model.optimizer", "model.optimizer={type: torch.optim.SGD, params: {lr: 0.1}}"),
        task=task,
        params=f"{{stream: {stream}}}",
    )
    found = weights(outcome.folder / "last.ckpt")
    prefix = "" if task == "mine.Plain" else "network."
    rows, net = own["Rows"](95, 0), own["Net"]().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in (slice(0, 40), slice(40, 80), slice(80, 95)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(rows.image[step].flatten(1).double() / 255), rows.label[step]).backward()
        optimizer.step()
    expected = net.state_dict()
    assert max((found[prefix + n].double() - expected[n]).abs().max() for n in expected) < 1e-6


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_each_sample_of_a_plain_loader_counts_once_on_two_processes(backend, with_loaders, tracked):
    """A task as in Lightning's manual measures the same on two processes as on one: 101 samples in batches of 50."""
    found = {}
    for processes in (1, 2):
        outcome = with_loaders(
            *("data.batch_size=50", "model.optimizer.params.lr=0.0", "stages=[train,validate,test]"),
            f"engine.backend={backend if processes > 1 else 'null'}",
            ranks=processes,
        )
        assert "DistributedSampler" not in outcome.err
        results = [json.loads((outcome.folder / f"{stage}_results.json").read_text()) for stage in ("val", "test")]
        found[processes] = results[0] | results[1] | {"loss": tracked(outcome.folder).series()["val_loss"][0][1]}
    assert found[2] == pytest.approx(found[1], abs=1e-6)
    assert (found[2]["val_index"], found[2]["test_index"]) == (50, 50)


def test_a_set_that_cannot_be_split_evenly_is_reported(with_loaders):
    """With three samples in batches of one on two processes, one sample counts twice; one warning reports it."""
    outcome = with_loaders("data.batch_size=1", "engine.backend=ddp", params="{count: 3}", ranks=2)
    assert "".join(each.err for each in outcome.ranks).count("3 samples cannot be split") == 1


WARM = """
import torch
from torch import nn


class Warm(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
"""


def test_a_loss_with_parameters_is_reported(command, tiny, tmp_path):
    """The optimizer has only the network's parameters: one warning names the loss."""
    (tmp_path / "warm.py").write_text(WARM)
    outcome = command("train", tiny, "model.loss={type: warm.Warm}", "train.max_steps=1", cwd=tmp_path, code=0)
    assert outcome.err.count("model.loss: Warm has parameters") == 1


# ---- losses that cannot be weighed

SEVERAL = (
    "~model.loss",
    "model.loss={ce: {type: torch.nn.CrossEntropyLoss, params: {ignore_index: 3}, weight: 0.5}, "
    "margin: {type: torch.nn.MultiMarginLoss}}",
)


def test_a_loss_that_adds_up_is_reported_before_the_first_step(train):
    """A loss with `reduction: sum` depends on batch size and processes: one warning names it and the fix."""
    outcome = train("model.loss={type: torch.nn.CrossEntropyLoss, params: {reduction: sum}}", "train.max_steps=1")
    assert outcome.err.count("`reduction: sum`") == 1
    assert "model.loss: CrossEntropyLoss has `reduction: sum`" in outcome.err


def test_several_losses_that_divide_by_different_numbers_are_reported_where_batches_accumulate(train):
    """Gradients of accumulated batches cannot be weighed for each loss: one warning names the losses."""
    settings = (*SEVERAL, "train.max_steps=2")
    assert train(*settings, "train.accumulator_factor=2").err.count("ce, margin do not all divide") == 1
    assert "do not all divide" not in train(*settings).err


def test_several_losses_each_weigh_batches_by_what_they_divide_by(job, tracked):
    """Without accumulation, two processes give the weights, points and epoch values of one; a validation in batches of
    3 gives the result of one batch."""
    settings = (*SEVERAL, "logger.log_every_n_steps=1")
    one = job(*settings, "data.batch_size=134", ranks=1).folder
    two = job(*settings, "data.batch_size=67").folder
    ours, theirs = weights(two / "last.ckpt"), weights(one / "last.ckpt")
    assert max((ours[name] - theirs[name]).abs().max() for name in ours) < 1e-6
    expected, series = tracked(one).series(), tracked(two).series()
    for name in ("train_loss", "train_ce", "train_loss_epoch", "train_ce_epoch", "val_loss", "val_ce", "val_margin"):
        assert series[name] == [(step, pytest.approx(value, abs=1e-6)) for step, value in expected[name]]
    frozen = (*settings, "model.optimizer.params.lr=0.0", "train.num_epochs=1")
    runs = [tracked(job(*frozen, f"data.batch_size={size}", ranks=1).folder) for size in (3, 134)]
    small, large = (run.series()["val_loss"][0][1] for run in runs)
    assert small == pytest.approx(large, abs=1e-6)


def test_processes_may_predict_different_numbers_of_batches(with_loaders):
    """Of 101 samples in batches of 50, one process has two batches and the other one; each sample has one row."""
    settings = ("data.batch_size=50", "stages=[train,predict]", "engine={backend: ddp, params: {timeout: 30}}")
    outcome = with_loaders(*settings, ranks=2)
    assert [int(row["index"]) for row in csv_rows(outcome.folder / "predictions.csv")] == [*range(101)]
