"""A user's LightningModule, which the config names: its training loop, hooks, validation, logging and processes."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import digest
from PIL import Image

from deeplightning.task.img_classif import ImageClassification

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loop"

CONFIG = """\
seed: 7
data:
  module: {type: deeplightning.data.digits.Digits, params: {limit: 80}}    # 72 train, 8 validate
  batch_size: 8
model:
  module: {type: own_tasks.Loop}
  network: {type: torch.nn.Linear, params: {in_features: 64, out_features: 10}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1, export: false}
logger:
  params: {tracking_uri: STORE, system_metrics: false}
  log_every_n_steps: 1
"""

TASKS = '''\
"""Tasks of the user."""

import pathlib
import time

import matplotlib.figure
import pytorch_lightning as pl
import torch

from deeplightning.config.target import build


class Task(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.network, self.loss = cfg, build(cfg.model.network), build(cfg.model.loss)

    def judge(self, batch):
        return self.loss(self.network(batch["image"].flatten(1).float() / 255), batch["label"])

    def training_step(self, batch, batch_idx):
        loss = self.judge(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.judge(batch), batch_size=len(batch["label"]))

    def configure_optimizers(self):
        return build(self.cfg.model.optimizer, self.parameters())


class Loop(Task):
    """Manual forward, loss, backward and step; it may discard the accumulated gradients at batch 2."""

    def __init__(self, cfg, accumulate=4, reset=False):
        super().__init__(cfg)
        self.automatic_optimization = False
        self.accumulate, self.reset, self.gradients = accumulate, reset, []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.judge(batch)
        self.manual_backward(loss / self.accumulate)
        if self.reset and batch_idx == 1:
            optimizer.zero_grad()
            assert all(p.grad is None or not p.grad.any() for p in self.parameters())
        if batch_idx % self.accumulate == self.accumulate - 1:
            self.gradients.append(self.network.weight.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss)

    def on_train_end(self):
        if self.global_rank == 0:
            torch.save(self.gradients, "gradients.pt")


class Hooks(Task):
    """Logs from Lightning's hooks."""

    def on_train_epoch_start(self):
        self.began = self.global_step

    def on_after_backward(self):
        self.log("grad_norm", self.network.weight.grad.norm())

    def on_train_epoch_end(self):
        self.log("steps_of_epoch", float(self.global_step - self.began))
        figure = matplotlib.figure.Figure(figsize=(1, 1))
        figure.subplots().plot([0, 1])
        self.logger.experiment.log_figure(self.logger.run_id, figure, "by_client.png")
        self.logger.log_picture("by_logger", figure)
        self.logger.log("by_kind", torch.rand(3, 4, 5))

    def on_train_start(self):
        self.log("rank", float(self.global_rank), rank_zero_only=True)
        print(f"rank {self.global_rank} of {self.trainer.world_size}", flush=True)


class Waits(Task):
    """Rank 0 enters a barrier only when rank 1 is about to wait there."""

    def on_train_start(self):
        here, done = pathlib.Path("rank1_is_here"), pathlib.Path("rank0_was_here")
        if self.global_rank == 0:
            while not here.exists():
                time.sleep(0.01)
            done.touch()
        else:
            here.touch()
        self.trainer.strategy.barrier()
        assert done.exists()
        print(f"rank {self.global_rank} passed", flush=True)
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory, store):
    """A working directory with user tasks and a config."""
    folder = tmp_path_factory.mktemp("own_tasks")
    (folder / "own_tasks.py").write_text(TASKS)
    (folder / "own.yaml").write_text(CONFIG.replace("STORE", str(store)))
    return folder


@pytest.fixture(scope="module")
def learn(command, place):
    """`learn(TASK, override, …)` trains one of the tasks."""

    def run(task, *overrides, ranks=1):
        settings = [f"model.module.type=own_tasks.{task}", f"engine.processes={ranks}", *overrides]
        return command("train", "own.yaml", *settings, cwd=place, ranks=ranks, code=0)

    return run


@pytest.fixture(scope="module")
def loop(learn, place):
    """A run with a manual loop, and the gradients of its steps."""
    outcome = learn("Loop")
    return outcome, torch.load(place / "gradients.pt", weights_only=True)


# ---- a manual loop


def test_gradients_are_added_up_by_hand_on_one_process_and_two(loop, learn, place, tracked):
    """A task that accumulates 4 batches itself gets the same gradients from batches of 8 and from batches of 4 on each
    of two processes; Lightning counts its steps."""
    one, first = loop
    assert torch.load(one.folder / "last.ckpt", weights_only=True)["global_step"] == len(first) == 2  # of 9 batches
    learn("Loop", "data.batch_size=4", ranks=2)
    torch.testing.assert_close(torch.load(place / "gradients.pt", weights_only=True), first, rtol=1e-4, atol=1e-6)
    assert len(tracked(one.folder).series()["train_loss"]) == 9  # Lightning logs a point per batch


@pytest.mark.slow
def test_a_reset_inside_an_accumulation_begins_anew(loop, learn, place):
    """A step after a reset has the gradients of the batches since the reset only."""
    total = loop[1][0]
    learn("Loop", "model.module.params={reset: true}")
    reset = torch.load(place / "gradients.pt", weights_only=True)[0]
    learn("Loop", "model.module.params={accumulate: 2}")
    pair = torch.load(place / "gradients.pt", weights_only=True)[0] / 2
    torch.testing.assert_close(pair + reset, total)  # the two halves of the four batches, with no step between
    assert not torch.equal(reset, total)


# ---- hooks, state, processes


def test_what_hooks_log_appears(learn, tracked):
    """Values that training steps, validation steps and hooks log are metrics; figures and pictures are PNG files."""
    outcome = learn("Hooks")
    metrics = tracked(outcome.folder).metrics
    assert {"train_loss", "val_loss", "grad_norm"} <= metrics.keys()
    assert metrics["steps_of_epoch"] == 9
    for name in ("by_client", "by_logger", "by_kind"):
        with Image.open(outcome.folder / f"{name}.png") as image:
            image.verify()
    assert "rank 0 of 1" in outcome.out
    assert "one process" in outcome.out  # the table at the start


def test_ranks_know_themselves_and_wait_for_each_other(learn, place):
    """Two processes have ranks 0 and 1, and `barrier()` waits for both."""
    outcome = learn("Waits", "logger.ranks=[0, 1]", ranks=2)
    assert [f"rank {number} passed" in rank.out for number, rank in enumerate(outcome.ranks)] == [True, True]
    assert "CPU, ddp" in outcome.out


# ---- the example


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_trains_on_one_process_and_two(ranks, command, store, tmp_path):
    """A run of the example that resumes after the first epoch ends with the weights of an uninterrupted one."""
    settings = [f"logger.params.tracking_uri={store}", "logger.params.system_metrics=false", "stages=[train]"]
    settings += [f"engine.processes={ranks}", "data.module.params.limit=150", "train.num_epochs=2"]

    def train(*overrides):
        return command("train", EXAMPLE / "own_loop.yaml", *settings, *overrides, cwd=tmp_path, ranks=ranks, code=0)

    uninterrupted, half = train(), train("train.num_epochs=1")
    resumed = train(f"train.resume_ckpt='{half.folder}'")
    assert digest(resumed.folder / "last.ckpt") == digest(uninterrupted.folder / "last.ckpt")
    assert json.loads((uninterrupted.folder / "best.json").read_text())["value"] > 0.1
    assert re.search(r"epoch 2 of 2 .*train_loss.*val_acc", uninterrupted.out)


def test_each_step_clears_the_gradients_through_the_hook_of_the_task(fit):
    """`optimizer_zero_grad` of the task and `zero_grad` of its optimizer are called once per step, even if they are set
    on the instance; `last.ckpt` counts these calls."""
    calls = []

    class Keeps(ImageClassification):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            zero_grad = optimizer.zero_grad
            optimizer.zero_grad = lambda set_to_none=True: calls.append("optimizer") or zero_grad(set_to_none)
            return optimizer

    def made(cfg):
        task = Keeps(cfg)

        def clear(epoch, batch_idx, optimizer):
            calls.append("task")
            optimizer.zero_grad(set_to_none=False)

        task.optimizer_zero_grad = clear
        return task

    done = fit("train.num_epochs=1", task=made)
    assert calls == ["task", "optimizer"] * 9
    progress = torch.load(done.folder / "last.ckpt", weights_only=True)["loops"]["fit_loop"]
    counts = progress["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    assert counts["zero_grad"]["total"]["completed"] == counts["step"]["total"]["completed"] == 9
