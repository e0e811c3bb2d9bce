"""Adversarial training: two networks by name, each with its optimizer, are trained, judged, kept and resumed."""

import copy
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from conftest import digest, weights
from PIL import Image

from deeplightning.checks.check import check
from deeplightning.checks.examine import load_config
from deeplightning.run.assemble import init_module, init_trainer
from deeplightning.task.gan import InceptionScore

CONFIG = """\
seed: 7
data:
  module: {type: deeplightning.data.digits.Digits, params: {limit: 150}}    # 134 train, 16 validate, 150 test
  batch_size: 16
model:
  module: {type: deeplightning.task.gan.Gan, params: {scorer_epochs: 4}}
  network:
    generator:
      type: deeplightning.model.dcgan.Generator
      params: {image_size: 8, num_channels: 1, latent_size: 6, width: 8}
    discriminator: {type: deeplightning.model.dcgan.Discriminator, params: {image_size: 8, num_channels: 1, width: 8}}
    scorer: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer:
    generator: {type: torch.optim.Adam, params: {lr: 0.002, betas: [0.5, 0.999]}}
    discriminator: {type: torch.optim.SGD, params: {lr: 0.01, momentum: 0.5}}
    scorer: {type: torch.optim.Adam, params: {lr: 0.01}}
  scheduler:
    generator: {type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}}
    discriminator:
      type: torch.optim.lr_scheduler.OneCycleLR
      params: {max_lr: 0.01, total_steps: auto}
      call: {interval: step}
  loss: {type: torch.nn.BCEWithLogitsLoss}
train: {num_epochs: 2, export: false, checkpoint: {monitor: val_score, mode: max}}
logger:
  params: {tracking_uri: STORE, system_metrics: false}
  log_every_n_steps: 4
"""
QUIET = "logger.pictures=null"
TOTAL = "model.scheduler.discriminator.params.total_steps=18"  # what `auto` is in two epochs


@pytest.fixture(scope="module")
def place(tmp_path_factory, store):
    """A working directory with the config."""
    folder = tmp_path_factory.mktemp("gan")
    (folder / "gan.yaml").write_text(CONFIG.replace("STORE", str(store)))
    return folder


@pytest.fixture(scope="module")
def learn(command, place):
    """`learn(override, …)` trains on digits."""

    def run(*overrides, ranks=1, code=0):
        outcome = command("train", "gan.yaml", f"engine.processes={ranks}", *overrides, cwd=place, ranks=ranks)
        assert {code} == {each.code for each in outcome.ranks or [outcome]}, outcome
        return outcome

    return run


@pytest.fixture(scope="module")
def run(learn):
    """The folder of a run of two epochs, and a test."""
    return learn("stages=[train, test]").folder


@pytest.fixture(scope="module")
def half(learn):
    """A run of one epoch, and its weights, which a run that goes on will replace."""
    outcome = learn(QUIET, "train.num_epochs=1", TOTAL)
    return outcome, weights(outcome.folder / "last.ckpt")


# ---- what is logged


def test_losses_rates_and_scores_are_logged(run, tracked):
    """`loss_d` and `loss_g` at steps 0, 4, 8 …, one step for both networks; their epoch means; a score at each epoch;
    and the learning rate of each optimizer by its name, moved by its own schedule, at the steps of the losses."""
    series = tracked(run).series()
    assert [step for step, _ in series["loss_d"]] == [step for step, _ in series["loss_g"]] == list(range(0, 18, 4))
    assert all(math.isfinite(value) and value > 0 for value in dict(series["loss_g"]).values())
    means = ("train_loss_d", "train_loss_g", "val_loss_d", "val_loss_g", "val_score", "val_score_real")
    assert {name: [step for step, _ in series[name]] for name in means} == {name: [8, 17] for name in means}
    assert "step" not in series
    assert [step for step, _ in series["lr-generator"]] == list(range(0, 18, 4))
    rates = [value for _, value in series["lr-generator"]]
    assert rates == pytest.approx([0.002] * 3 + [0.001] * 2)  # by epochs
    torch_one = torch.optim.SGD([torch.zeros(1)], lr=0.01, momentum=0.5)
    cycle = torch.optim.lr_scheduler.OneCycleLR(torch_one, 0.01, total_steps=18)
    expected = []
    for batch in range(18):
        expected += [torch_one.param_groups[0]["lr"]] if batch % 4 == 0 else []
        torch_one.step()
        if batch < 17:
            cycle.step()
    assert [value for _, value in series["lr-discriminator"]] == pytest.approx(expected)
    assert series["lr"] == series["lr-generator"]
    assert "lr-scorer" not in series


def test_the_score_decides_which_weights_are_best(run, tracked):
    """`best.json` has the larger `val_score`, which is from 1 to the number of classes; the test has one of its own."""
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
    """64 made digits after each epoch, of the same noise and different weights, and none else."""
    assert {path.name for path in run.glob("samples*.png")} == {"samples_0.png", "samples_1.png"}
    first, second = (np.asarray(Image.open(run / f"samples_{epoch}.png")) for epoch in (0, 1))
    assert first.shape == (512, 512)
    assert (first != second).any()
    blocks = first.reshape(64, 8, 64, 8)
    assert (blocks == blocks[:, :1, :, :1]).all()  # each pixel enlarged to 8 x 8
    assert len({tile.tobytes() for row in np.split(first, 8) for tile in np.split(row, 8, 1)}) > 32


# ---- what is kept


def test_both_networks_change_and_the_scorer_does_not(run, half):
    """Between the epochs both networks learn; the scorer has learned before and stays as it is; both optimizers and
    schedules are in the checkpoint, under the names of their networks."""
    first, second = half[1], weights(run / "last.ckpt")
    changed = {name.split(".")[1] for name, tensor in first.items() if not torch.equal(tensor, second[name])}
    assert changed == {"generator", "discriminator"}
    assert first["scorer_trained"] == 1
    saved = torch.load(run / "last.ckpt", weights_only=True)
    assert [state["param_groups"][0]["name"] for state in saved["optimizer_states"]] == ["generator", "discriminator"]
    assert len(saved["lr_schedulers"]) == 2


@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_ends_as_an_uninterrupted_one(inside, run, half, learn, tracked):
    """Resumed after the first epoch, or inside the second, both networks end with the same weights to the last bit, the
    scorer does not learn again, and the epoch's means count what came before."""
    cut = learn(QUIET, "train.max_steps=24", TOTAL) if inside else half[0]
    resumed = learn(QUIET, TOTAL, f"train.resume_ckpt='{cut.folder}'")
    assert digest(resumed.folder / "last.ckpt") == digest(run / "last.ckpt")
    assert "scorer     has learned" in cut.out
    assert "scorer     has learned" not in resumed.out
    ours, theirs = (tracked(folder).series() for folder in (resumed.folder, run))
    for name in ("train_loss_d", "train_loss_g", "val_score"):
        assert ours[name][-1][1] == pytest.approx(theirs[name][-1][1], rel=1e-6)


@pytest.mark.slow
def test_early_stopping_follows_the_score(learn):
    """A score that never gets so much better ends the training, with a reason."""
    stop = "train.early_stop={metric: val_score, mode: max, delta: 100, patience: 1}"
    outcome = learn(QUIET, stop, "train.num_epochs=9")
    assert "stopped    early, after epoch 2: val_score was no better" in outcome.out


# ---- several processes


SEEN = '''\
"""What optimizers are given, written down; and a generator to which the noise does not matter."""

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


@pytest.mark.parametrize(
    ("size", "accumulate", "steps"),
    [
        (2, {}, 3),
        pytest.param(4, {2: ["data.batch_size=1", "train.accumulator_factor=2"]}, 2, marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_from_the_mean_over_all_samples(size, accumulate, steps, learn, place, tmp_path):
    """Two processes with batches of one give each network the gradients that one process with batches of two gives it,
    and accumulated by twos those of batches of four, also at the end of the epoch, where one of the two has no sample
    left. Noise and batch norm, of which each process has its own, are left out of it."""
    (place / "seen.py").write_text(SEEN)
    sgd = "{type: torch.optim.SGD, params: {lr: 0.01}}"
    settings = ["data.module.params.limit=6", "data.num_splits=6", "train.num_epochs=1", "~model.scheduler", QUIET]
    settings += ["model.network.generator={type: seen.Constant}", f"model.optimizer.generator={sgd}"]
    settings += ["~model.network.scorer", "~model.optimizer.scorer", "train.checkpoint.monitor=null"]
    found = {}
    for ranks in (1, 2):
        file = tmp_path / f"{ranks}.pt"
        look = f"train.callbacks=[{{type: seen.Gradients, params: {{file: '{file}'}}}}]"
        learn(*settings, look, f"data.batch_size={size // ranks}", *accumulate.get(ranks, []), ranks=ranks)
        found[ranks] = torch.load(file, weights_only=True)
    for name in ("generator", "discriminator"):
        assert len(found[1][name]) == len(found[2][name]) == steps
        assert found[1][name][0].abs().max() > 0
        torch.testing.assert_close(found[2][name], found[1][name], rtol=1e-4, atol=1e-7)


def test_two_processes_end_alike(learn):
    """A whole run under ddp: both processes end well, with one score and one sheet of samples for each epoch."""
    outcome = learn("data.batch_size=8", ranks=2)
    assert {path.name for path in outcome.folder.glob("samples*.png")} == {"samples_0.png", "samples_1.png"}
    assert json.loads((outcome.folder / "best.json").read_text())["value"] >= 1


# ---- accumulation

LINEAR = '''\
"""Networks without batch norm, which write down what they are given."""

import torch


class Maker(torch.nn.Module):
    latent_size = 5

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(5, 64), []

    def forward(self, noise):
        self.seen.append(noise.detach().clone())
        return self.layer(noise).tanh().view(-1, 1, 8, 8)


class Judge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(64, 7), torch.nn.ELU(), torch.nn.Linear(7, 1)
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), *layers)
        self.seen = []

    def forward(self, pictures):
        self.seen.append(pictures.detach().clone())
        return self.layers(pictures)[:, 0]
'''
SGD = "{type: torch.optim.SGD, params: {lr: 0.5}}"
PLAIN = [
    "model.network={generator: {type: linear.Maker}, discriminator: {type: linear.Judge}}",
    f"model.optimizer={{generator: {SGD}, discriminator: {SGD}}}",
    *("~model.scheduler", "train.checkpoint.monitor=null", QUIET),
]


class Fed(pl.Callback):
    """Notes the weights before the first step, and the gradients of each."""

    def on_train_start(self, trainer, module):
        self.before = copy.deepcopy(module.networks.state_dict())
        self.networks, self.gradients = module.networks, {"generator": [], "discriminator": []}
        for network in module.networks.values():
            network.seen.clear()
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(self.look)

    def look(self, optimizer, *_):
        found = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
        self.gradients[optimizer.param_groups[0]["name"]].append(torch.cat(found))

    def on_train_epoch_end(self, trainer, module):
        self.noise, self.pictures = (list(n.seen) for n in module.networks.values())


@pytest.fixture
def trained(place, monkeypatch, tmp_path):
    """`trained(override, …)` trains networks without batch norm in this process."""
    (place / "linear.py").write_text(LINEAR)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    logger = f"logger={{type: pytorch_lightning.loggers.CSVLogger, params: {{save_dir: '{tmp_path}', name: runs}}}}"

    def run(*overrides):
        cfg = load_config("gan.yaml", [*PLAIN, "~logger", logger, "logger.per_rank_files=false", *overrides])
        data, task, trainer, fed = init_module(cfg, "data"), init_module(cfg, "model"), init_trainer(cfg), Fed()
        trainer.callbacks.append(fed)
        trainer.fit(task, data)
        fed.step = trainer.global_step
        return fed

    return run


def of_one_batch(fed, noise, real):
    """The gradients of both networks in a plain loop of torch: the discriminator takes its step, then the generator."""
    networks = {"generator": type(fed.networks["generator"])(), "discriminator": type(fed.networks["discriminator"])()}
    for name, network in networks.items():
        network.load_state_dict({k[len(name) + 1 :]: v for k, v in fed.before.items() if k.startswith(name)})
    make, judge, loss = *networks.values(), torch.nn.functional.binary_cross_entropy_with_logits
    on_real, on_made = judge(real), judge(make(noise).detach())
    (loss(on_real, torch.ones_like(on_real)) + loss(on_made, torch.zeros_like(on_made))).backward()
    first = torch.cat([p.grad.flatten() for p in judge.parameters()])
    with torch.no_grad():
        for p in judge.parameters():
            p -= 0.5 * p.grad
    taken_for = judge(make(noise))
    loss(taken_for, torch.ones_like(taken_for)).backward()
    return {"discriminator": first, "generator": torch.cat([p.grad.flatten() for p in make.parameters()])}


@pytest.mark.parametrize(("limit", "samples"), [(150, 64), (65, 58)], ids=["whole", "a short tail"])
def test_accumulated_batches_have_the_gradients_of_one(limit, samples, trained):
    """4 x 16 pictures, or 3 x 16 and 10, and a plain loop over all of them at once: both networks' gradients are equal
    within 1e-6, though the generator learns from a discriminator that has taken its step."""
    limits = [f"data.module.params.limit={limit}", "train.limit_batches={train: 4}", "train.num_epochs=1"]
    fed = trained("train.accumulator_factor=4", *limits)
    real, noise = torch.cat(fed.pictures[:8:2]), torch.cat(fed.noise[:4])
    assert len(real) == len(noise) == samples
    for name, expected in of_one_batch(fed, noise, real).items():
        assert len(fed.gradients[name]) == 1
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(fed.gradients[name][0], expected, rtol=0, atol=1e-6)


def test_the_tail_of_an_epoch_is_a_step_of_both_networks(trained):
    """Nine batches by fours, from the second epoch on: 9 and 3 steps of each network."""
    fed = trained("train.accumulator_factor=4", "train.accumulator_epoch=1")
    assert {name: len(found) for name, found in fed.gradients.items()} == {"generator": 12, "discriminator": 12}
    assert fed.step == 24


def test_an_accumulating_run_resumes_bit_for_bit(learn, tracked):
    """Ended inside the second epoch and resumed: the weights, schedules and means of a run that was not interrupted; a
    schedule by steps counts steps, of which `auto` knows the number; and points lie at steps."""
    settings = [*PLAIN, "train.accumulator_factor=4", "logger.log_every_n_steps=1"]
    cycle = "{type: torch.optim.lr_scheduler.OneCycleLR, params: {max_lr: 0.5, total_steps: TOTAL}"
    schedule = f"model.scheduler={{discriminator: {cycle}, call: {{interval: step}}}}}}"
    settings.remove("~model.scheduler")
    whole = learn("~model.scheduler", schedule.replace("TOTAL", "auto"), *settings)
    series = tracked(whole.folder).series()
    assert [step for step, _ in series["loss_d"]] == [step for step, _ in series["loss_g"]] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in series["train_loss_g"]] == [2, 5]
    rates = dict(series["lr-discriminator"])
    assert rates[1] == pytest.approx(max(rates.values()), rel=0.1)
    assert rates[5] == pytest.approx(min(rates.values()))
    said = "first loss "
    assert (said in whole.out, said + "nan" in whole.out) == (True, False)
    fixed = ["~model.scheduler", schedule.replace("TOTAL", "6")]
    cut = learn(*fixed, *settings, "train.max_steps=8")
    resumed = learn(*fixed, *settings, f"train.resume_ckpt='{cut.folder}'")
    assert digest(resumed.folder / "last.ckpt") == digest(whole.folder / "last.ckpt")
    ours = tracked(resumed.folder).series()
    for name in ("train_loss_d", "train_loss_g"):
        assert ours[name][-1][1] == pytest.approx(series[name][-1][1], rel=1e-6)


# ---- the score


def test_the_inception_score_is_that_of_its_definition():
    """exp of the mean divergence from the mean answer, over all batches at once; K where answers are sure and even."""
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


# ---- what does not fit

ADAM = "{type: torch.optim.Adam, params: {lr: 0.001}}"
FAULTS = {
    "an optimizer is missing": (["~model.optimizer.discriminator"], "model.optimizer: `discriminator` is missing"),
    "of the scorer": (["~model.optimizer.scorer"], "model.optimizer: `scorer` is missing"),
    "a network is missing": (["~model.network.discriminator"], "model.network: `discriminator` is missing"),
    "one optimizer for all": (
        ["~model.optimizer", f"model.optimizer={ADAM}", "~model.scheduler"],
        "model.optimizer: deeplightning.task.gan.Gan needs several by name",
    ),
    "an optimizer of no network": ([f"model.optimizer.critic={ADAM}"], "no network is called `critic`. There are: gen"),
    "a schedule of no network": (
        ["model.scheduler.generater={type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}}"],
        "no network is called `generater`. Did you mean generator?",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_names_that_do_not_fit_are_told_by_check(case, place, monkeypatch):
    """Without importing anything, one note each, which is a fault of the config."""
    monkeypatch.chdir(place)
    overrides, words = FAULTS[case]
    faults = check("gan.yaml", overrides).faults
    assert [words in str(fault) for fault in faults] == [True], faults
    assert faults[0].exit_code == 2


AT_START = {
    "no use for it": (
        ["model.network.critic={type: torch.nn.Identity}", f"model.optimizer.critic={ADAM}"],
        "model.network.critic: this task has no use for it; it takes generator, discriminator, scorer",
    ),
    "the losses": (["model.loss={one: {type: torch.nn.BCEWithLogitsLoss}}"], "model.loss: this task needs one"),
    "another size": (
        ["model.network.generator.params.image_size=16"],
        "model.network.generator: deeplightning.model.dcgan.Generator gives (1, 1, 16, 16) for (1, 6), and (1, 1, 8",
    ),
    "a generator that takes no noise": (
        ["model.network.generator={type: torch.nn.Identity}"],
        "model.network.generator: it has no attribute `latent_size`",
    ),
    "a discriminator of two numbers": (
        ["model.network.discriminator={type: torch.nn.Flatten}"],
        "model.network.discriminator: torch.nn.Flatten gives (1, 64) for (1, 1, 8, 8), and (1,) is needed",
    ),
    "head": (["model.trainable=head"], "model.trainable: with several networks"),
    "an engine": (["engine.backend=fsdp", "engine.processes=2"], "engine.backend: two networks are trained in turn"),
    "a schedule of the scorer": (
        ["model.scheduler.scorer={type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}}"],
        "model.scheduler.scorer: the scorer learns at one rate",
    ),
    "a scorer of too few classes": (
        ["model.network.scorer.params.num_classes=9"],
        "model.network.scorer: deeplightning.model.cnn.SimpleCNN gives (1, 9) for (1, 1, 8, 8), and (1, 10) is needed",
    ),
    "a plateau without its metric": (
        ["model.scheduler.generator={type: torch.optim.lr_scheduler.ReduceLROnPlateau}"],
        "model.scheduler.generator.call.monitor: ReduceLROnPlateau needs a metric",
    ),
}


def begin(*overrides):
    """What happens before data are read, without a run."""
    cfg = load_config("gan.yaml", list(overrides))
    data, task = init_module(cfg, "data"), init_module(cfg, "model")
    task.trainer = SimpleNamespace(estimated_stepping_batches=18, max_epochs=2, ckpt_path=None)
    task.image_spec, task.class_names = data.image_spec, data.class_names
    task.configure_model()
    task.configure_optimizers()


@pytest.mark.parametrize("case", AT_START)
def test_what_does_not_fit_is_told_before_data_are_read(case, place, monkeypatch):
    """One note each, which is a fault of the config or of the data."""
    monkeypatch.chdir(place)
    overrides, words = AT_START[case]
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        begin(*overrides)
    assert told.value.exit_code in (2, 3)


def test_what_does_not_fit_ends_the_run_at_its_start(learn):
    """Exit 2 and one note, before a run is opened."""
    outcome = learn("model.network.generator.params.image_size=16", code=2)
    assert outcome.err.startswith("error: model.network.generator: deeplightning.model.dcgan.Generator gives (1, 1, 16")
    assert outcome.err.count("error:") == 1
    assert "Artifact storage path" not in outcome.out


def test_maps_do_not_go_with_a_task_of_one_network(learn, command, place):
    """Image classification trains one network: maps are exit 2, in words, and `check` says so too, of each map."""
    one = "model.module={type: deeplightning.task.img_classif.ImageClassification}"
    outcome = learn("~model.module", one, "train.checkpoint.monitor=null", code=2)
    assert "takes one network, not several by name" in outcome.err
    outcome = command("check", "gan.yaml", "~model.module", one, "train.checkpoint.monitor=null", cwd=place)
    assert outcome.code == 2
    assert all(f"takes one {part}, not several by name" in outcome.err for part in ("network", "optimizer"))


def test_a_dry_run_takes_a_step(command, place):
    """`check --dry-run` trains the scorer and both networks on a made-up batch, and finds nothing wrong; a score that
    nobody computes is named."""
    outcome = command("check", "gan.yaml", "--dry-run", cwd=place)
    assert outcome.code == 0, outcome
    outcome = command("check", "gan.yaml", "--dry-run", "~model.network.scorer", "~model.optimizer.scorer", cwd=place)
    assert outcome.code == 2, outcome
    assert "no metric is called 'val_score'" in outcome.err


@pytest.mark.slow
def test_a_schedule_follows_the_score(learn, tracked):
    """ReduceLROnPlateau by the score of each epoch: with a threshold that nothing reaches the rate falls."""
    params = "{mode: max, patience: 0, threshold: 100, factor: 0.1}"
    plateau = f"type: torch.optim.lr_scheduler.ReduceLROnPlateau, params: {params}, call: {{monitor: val_score}}"
    schedule = f"model.scheduler={{generator: {{{plateau}}}}}"
    outcome = learn(QUIET, "~model.scheduler", schedule, "train.num_epochs=3")
    rates = [value for _, value in tracked(outcome.folder).series()["lr-generator"]]
    assert rates[0] == pytest.approx(0.002)
    assert rates[-1] == pytest.approx(0.0002)
