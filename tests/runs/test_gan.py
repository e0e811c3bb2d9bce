"""Adversarial training: two named networks, each with its optimizer, are trained, evaluated, saved and resumed."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import digest, weights
from example_code import copy_code, module_of
from PIL import Image

from deeplightning.config.examine import check

InceptionScore = module_of("dcgan/gan.py").InceptionScore
CONFIG = """\
seed: 7
data:
  module: {type: deeplightning.data.digits.Digits, params: {limit: 150}}    # 134 train, 16 validate, 150 test
  batch_size: 16
model:
  module: {type: gan.Gan, params: {scorer_epochs: 4}}
  network:
    generator:
      type: dcgan.Generator
      params: {image_size: 8, num_channels: 1, latent_size: 6, width: 8}
    discriminator: {type: dcgan.Discriminator, params: {image_size: 8, num_channels: 1, width: 8}}
    scorer: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer:
    generator: {type: torch.optim.Adam, params: {lr: 0.002, betas: [0.5, 0.999]}}
    discriminator: {type: torch.optim.SGD, params: {lr: 0.01, momentum: 0.5}}
    scorer: {type: torch.optim.Adam, params: {lr: 0.01}}
  scheduler:
    generator: {type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}}
    discriminator: {type: torch.optim.lr_scheduler.StepLR, params: {step_size: 1, gamma: 0.1}}
  loss: {type: torch.nn.BCEWithLogitsLoss}
train: {num_epochs: 2, export: false, checkpoint: {monitor: val_score, mode: max}}
logger:
  params: {tracking_uri: STORE, system_metrics: false}
  log_every_n_steps: 4
"""
QUIET = "logger.pictures=null"


@pytest.fixture(scope="module")
def place(tmp_path_factory, store):
    """A working directory with the config."""
    folder = tmp_path_factory.mktemp("gan")
    copy_code("dcgan", folder)
    (folder / "gan.yaml").write_text(CONFIG.replace("STORE", str(store)))
    return folder


@pytest.fixture(scope="module")
def learn(command, place):
    """`learn(override, …)` trains on digits."""

    def run(*overrides, ranks=1, code=0):
        return command("train", "gan.yaml", f"engine.processes={ranks}", *overrides, cwd=place, ranks=ranks, code=code)

    return run


@pytest.fixture(scope="module")
def run(learn):
    """The folder of a run of two epochs and a test."""
    return learn("stages=[train, test]").folder


@pytest.fixture(scope="module")
def half(learn):
    """A run of one epoch, and its weights, which a resumed run will replace."""
    outcome = learn(QUIET, "train.num_epochs=1")
    return outcome, weights(outcome.folder / "last.ckpt")


# ---- metrics and pictures


def test_losses_rates_and_scores_are_logged(run, tracked):
    """`loss_d` and `loss_g` are logged at steps 0, 4, 8 …, where a step updates both networks; so are epoch means, a
    score per epoch, and the learning rate of each optimizer by name, which follows its own schedule."""
    series = tracked(run).series()
    assert [step for step, _ in series["loss_d"]] == [step for step, _ in series["loss_g"]] == list(range(0, 18, 4))
    assert all(math.isfinite(value) and value > 0 for value in dict(series["loss_g"]).values())
    means = ("train_loss_d", "train_loss_g", "val_loss_d", "val_loss_g", "val_score", "val_score_real")
    assert {name: [step for step, _ in series[name]] for name in means} == {name: [8, 17] for name in means}
    assert "step" not in series
    assert [step for step, _ in series["lr-generator"]] == list(range(0, 18, 4))
    rates = [value for _, value in series["lr-generator"]]
    assert rates == pytest.approx([0.002] * 3 + [0.001] * 2)  # by epochs
    assert [value for _, value in series["lr-discriminator"]] == pytest.approx([0.01] * 3 + [0.001] * 2)
    assert series["lr"] == series["lr-generator"]
    assert "lr-scorer" not in series


def test_the_score_decides_which_weights_are_best(run, tracked):
    """`best.json` has the largest `val_score`, which is between 1 and the number of classes; the test has its score."""
    scores = dict(tracked(run).series()["val_score"])
    best = json.loads((run / "best.json").read_text())
    assert best["metric"] == "val_score"
    assert best["value"] == pytest.approx(max(scores.values()))
    assert all(1 <= score <= 10 for score in scores.values())
    results = json.loads((run / "test_results.json").read_text())
    assert 1 <= results["test_score"] <= results["test_score_real"] <= 10
    assert results["test_scorer_acc"] > 0.5  # after four epochs of 134 digits, of ten classes
    assert results["test_loss_d"] > 0


def test_samples_are_pictures_of_each_epoch(run):
    """Each epoch saves one sheet of 64 generated digits, from the same noise."""
    assert {path.name for path in run.glob("samples*.png")} == {"samples_0.png", "samples_1.png"}
    first, second = (np.asarray(Image.open(run / f"samples_{epoch}.png")) for epoch in (0, 1))
    assert first.shape == (64, 64, 3)
    assert (first != second).any()
    assert len({tile.tobytes() for row in np.split(first, 8) for tile in np.split(row, 8, 1)}) > 32


# ---- checkpoints


def test_both_networks_change_and_the_scorer_does_not(run, half):
    """Both networks learn in each epoch; the scorer is trained before and does not change; the checkpoint contains both
    schedules, and both optimizers by the names of their networks."""
    first, second = half[1], weights(run / "last.ckpt")
    changed = {name.split(".")[1] for name, tensor in first.items() if not torch.equal(tensor, second[name])}
    assert changed == {"generator", "discriminator"}
    assert first["scorer_trained"] == 1
    saved = torch.load(run / "last.ckpt", weights_only=True)
    assert [state["param_groups"][0]["name"] for state in saved["optimizer_states"]] == ["generator", "discriminator"]
    assert len(saved["lr_schedulers"]) == 2


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_as_an_uninterrupted_one(inside, run, half, learn, tracked):
    """A run resumed after the first epoch, or inside the second, ends with the same weights to the last bit; the scorer
    is not trained again, and the epoch's means include the batches before the interruption."""
    cut = learn(QUIET, "train.max_steps=24") if inside else half[0]
    resumed = learn(QUIET, f"train.resume_ckpt='{cut.folder}'")
    assert digest(resumed.folder / "last.ckpt") == digest(run / "last.ckpt")
    assert "scorer     trained" in cut.out
    assert "scorer     trained" not in resumed.out
    ours, theirs = (tracked(folder).series() for folder in (resumed.folder, run))
    for name in ("train_loss_d", "train_loss_g", "val_score"):
        assert ours[name][-1][1] == pytest.approx(theirs[name][-1][1], rel=1e-6)


# ---- several processes


SEEN = '''\
"""Records the gradients of each optimizer; and a generator that ignores its noise."""

import pytorch_lightning as pl
import torch


class Gradients(pl.Callback):
    def __init__(self, file):
        self.file, self.seen = file, {"generator": [], "discriminator": []}

    def on_train_start(self, trainer, module):
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(self.look)

    def look(self, optimizer, *_):
        found = torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]])
        self.seen[optimizer.param_groups[0]["name"]].append(found)

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            torch.save(self.seen, self.file)


class Constant(torch.nn.Module):
    latent_size = 2

    def __init__(self):
        super().__init__()
        self.pixels = torch.nn.Parameter(torch.linspace(-0.5, 0.5, 64).view(1, 1, 8, 8))

    def forward(self, noise):
        return self.pixels.expand(len(noise), 1, 8, 8)
'''


def test_two_processes_learn_from_the_mean_over_all_samples(learn, place, tmp_path):
    """Two processes with batches of one compute the gradients of one process with batches of two, also at the end of
    the epoch, where one process has no sample. Noise and batch norm, which differ by process, are excluded."""
    (place / "seen.py").write_text(SEEN)
    sgd = "{type: torch.optim.SGD, params: {lr: 0.01}}"
    settings = ["data.module.params.limit=6", "data.num_splits=6", "train.num_epochs=1", "~model.scheduler", QUIET]
    settings += ["model.network.generator={type: seen.Constant}", f"model.optimizer.generator={sgd}"]
    settings += ["~model.network.scorer", "~model.optimizer.scorer", "train.checkpoint.monitor=null"]
    found = {}
    for ranks in (1, 2):
        file = tmp_path / f"{ranks}.pt"
        look = f"train.callbacks=[{{type: seen.Gradients, params: {{file: '{file}'}}}}]"
        learn(*settings, look, f"data.batch_size={2 // ranks}", ranks=ranks)
        found[ranks] = torch.load(file, weights_only=True)
    for name in ("generator", "discriminator"):
        assert len(found[1][name]) == len(found[2][name]) == 3
        assert found[1][name][0].abs().max() > 0
        torch.testing.assert_close(found[2][name], found[1][name], rtol=1e-4, atol=1e-7)


# ---- the score


def test_the_inception_score_is_that_of_its_definition():
    """The score is exp of the mean divergence from the mean prediction over all batches; K for certain and balanced
    predictions, 1 for uniform ones."""
    torch.manual_seed(0)
    logits, score = 2 * torch.randn(30, 4), InceptionScore(4)
    for part in logits.split([7, 20, 3]):
        score.update(part)
    p = logits.double().softmax(1).numpy()
    divergence = (p * np.log(p / p.mean(0))).sum(1)
    assert score.compute().item() == pytest.approx(math.exp(divergence.mean()), rel=1e-6)
    score.reset()
    score.update(100 * torch.eye(4))
    assert score.compute().item() == pytest.approx(4)
    score.reset()
    score.update(torch.zeros(5, 4))
    assert score.compute().item() == pytest.approx(1)


# ---- config faults

ADAM = "{type: torch.optim.Adam, params: {lr: 0.001}}"
FAULTS = {
    "an optimizer is missing": (["~model.optimizer.discriminator"], "model.optimizer: `discriminator` is missing"),
    "of the scorer": (["~model.optimizer.scorer"], "model.optimizer: `scorer` is missing"),
    "a network is missing": (["~model.network.discriminator"], "model.network: `discriminator` is missing"),
    "one optimizer for all": (
        ["~model.optimizer", f"model.optimizer={ADAM}", "~model.scheduler"],
        "model.optimizer: gan.Gan needs several by name",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), FAULTS.values(), ids=FAULTS)
def test_check_finds_names_that_do_not_match(overrides, message, place, monkeypatch):
    """`check` reports a missing name as one config fault, without importing anything."""
    monkeypatch.chdir(place)
    faults = check("gan.yaml", overrides).faults
    assert [message in str(fault) for fault in faults] == [True], faults
    assert faults[0].exit_code == 2


def test_maps_do_not_go_with_a_task_of_one_network(learn, command, place):
    """Image classification trains one network: maps are exit code 2, and `check` reports each map."""
    one = "model.module={type: deeplightning.task.img_classif.ImageClassification}"
    outcome = learn("~model.module", one, "train.checkpoint.monitor=null", code=2)
    assert "takes one network, not several by name" in outcome.err
    outcome = command("check", "gan.yaml", "~model.module", one, "train.checkpoint.monitor=null", cwd=place, code=2)
    assert all(f"takes one {part}, not several by name" in outcome.err for part in ("network", "optimizer"))


def test_a_dry_run_takes_a_step(command, place):
    """`check --dry-run` trains the scorer and both networks on a synthetic batch without faults; a monitored score that
    no network computes is reported."""
    command("check", "gan.yaml", "--dry-run", cwd=place, code=0)
    no_scorer = ("~model.network.scorer", "~model.optimizer.scorer")
    outcome = command("check", "gan.yaml", "--dry-run", *no_scorer, cwd=place, code=2)
    assert "no metric is called 'val_score'" in outcome.err
