"""Image classification: training, metrics, schedules and freezing equal independently computed references."""

import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import sklearn.metrics
import torch
from torch import nn

from deeplightning.config.examine import load_config
from deeplightning.engine.sharded import parameters_on_meta
from deeplightning.faults import UserError
from deeplightning.model import cnn
from deeplightning.run.assemble import init_module
from deeplightning.task.img_classif import SHEET_SIZE, ImageClassification
from deeplightning.task.metrics import Accuracy, SampleMean
from deeplightning.task.networks import MisfitError
from deeplightning.task.optimize import freeze

# ---- metrics


METRIC = "{{type: torchmetrics.classification.Multiclass{}, params: {{num_classes: 10, average: {}}}}}"


@pytest.mark.parametrize("by_default", [True, False])
def test_validation_metrics_are_those_of_the_whole_set(by_default, fit):
    """Validation loss, accuracy and metrics equal scikit-learn's on all samples, which batches of 4 do not divide."""
    named = {"acc": ("Accuracy", "micro"), "f1": ("F1Score", "micro"), "macro": ("F1Score", "macro")}
    metrics = ", ".join(f"{name}: {METRIC.format(*of)}" for name, of in named.items())
    sizes = ["data.module.params.limit=117", "data.batch_size=4", "data.num_splits=5", "train.num_epochs=1"]
    fitted = fit(*sizes, *([] if by_default else [f"model.metrics={{{metrics}}}"]))
    dataset = fitted.data.dataset("val")
    with torch.inference_mode():
        outputs = fitted.task.inference_model()(dataset.images).double()
    probabilities, labels = (outputs / outputs.sum(1, keepdim=True)).numpy(), dataset.labels.numpy()
    predicted = probabilities.argmax(1)
    expected = {
        "loss": sklearn.metrics.log_loss(labels, probabilities, labels=range(10)),
        "acc": sklearn.metrics.accuracy_score(labels, predicted),
    }
    for name, average in () if by_default else (("f1", "micro"), ("macro", "macro")):
        expected[name] = sklearn.metrics.f1_score(labels, predicted, average=average)
    assert {name: fitted.series(f"val_{name}")[-1][1] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_means_and_shares_count_samples():
    """A mean weights batches by their samples, and does not skip NaN."""
    mean, accuracy = SampleMean(), Accuracy()
    mean.update(torch.tensor(1.0), 3)
    mean.update(torch.tensor(5.0), 1)
    assert mean.compute() == 2.0
    mean.update(torch.tensor(float("nan")), 1)
    assert mean.compute().isnan()
    accuracy.update(torch.eye(3), torch.tensor([0, 1, 0]))
    accuracy.update(torch.eye(3)[:1], torch.tensor([0]))
    assert accuracy.compute() == 0.75


def test_several_losses_are_added_by_weight_and_each_is_logged(fit):
    """`train_loss` is 1 x `train_ce` + 0.5 x `train_margin` at each step; validation logs all three as well."""
    losses = "{ce: {type: torch.nn.CrossEntropyLoss}, margin: {type: torch.nn.MultiMarginLoss, weight: 0.5}}"
    fitted = fit("~model.loss", f"model.loss={losses}", "train.num_epochs=1")
    total, ce, margin = ([value for _, value in fitted.series(f"train_{name}")] for name in ("loss", "ce", "margin"))
    assert total == pytest.approx([a + 0.5 * b for a, b in zip(ce, margin, strict=True)], rel=1e-6)
    total, ce, margin = (fitted.series(f"val_{name}")[-1][1] for name in ("loss", "ce", "margin"))
    assert total == pytest.approx(ce + 0.5 * margin, rel=1e-6)


@pytest.mark.parametrize("several", [False, True], ids=["one loss", "several"])
def test_the_task_logs_what_it_declares(several, fit):
    """`logged_metrics`, which `check` reads, has exactly the metrics that a training and a test log."""
    loss = "{type: torch.nn.CrossEntropyLoss}"
    fitted = fit(*([f"model.loss={{sharp: {loss}, soft: {loss}}}"] if several else []), "train.num_epochs=1")
    logged = {*fitted.trainer.callback_metrics}
    fitted.trainer.test(fitted.task, fitted.data, verbose=False)
    stages, losses = ("train", "val", "test"), ("sharp", "soft") if several else ()
    declared = {
        name.format(stage=stage, metric="acc", loss=loss)
        for name in ImageClassification.logged_metrics
        for stage in stages
        for loss in (losses if "{loss}" in name else ("",))
    }
    assert logged | {*fitted.trainer.callback_metrics} == declared


# ---- optimizer and schedule


@pytest.mark.parametrize(
    ("interval", "steps", "batches", "expected"),
    [
        *(("step", 5, factor, [0.05, 0.05, 0.025, 0.025, 0.0125]) for factor in (1, 2)),
        ("epoch", 20, 1, [0.05] * 18 + [0.025] * 2),
    ],
)
def test_a_schedule_steps_by_its_interval_and_frequency(interval, steps, batches, expected, fit):
    """The learning rate changes after `frequency` optimizer steps, of one batch or two, or epochs of nine batches."""
    halves = "{type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}, call: {frequency: 2}}"
    scheduler = [f"model.scheduler={halves}", f"model.scheduler.call.interval={interval}"]
    length = ["~train.num_epochs", f"train.max_steps={steps}", f"train.accumulator_factor={batches}"]
    fitted = fit(*scheduler, *length)
    assert fitted.seen.rates == pytest.approx(expected)
    assert [value for _, value in fitted.series("lr")] == pytest.approx(expected)


def test_parameters_whose_name_matches_get_their_own_values(fit):
    """A parameter gets the values of the first group that matches, or else those of the optimizer."""
    fitted = fit(
        "model.optimizer.params.weight_decay=0.1",
        "model.optimizer.groups=[{match: 'bias', weight_decay: 0.0}, {match: 'weight$', lr: 0.5}]",
        "train.num_epochs=1",
    )
    groups = fitted.trainer.optimizers[0].param_groups
    named = dict(fitted.task.network.named_parameters())
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.0, 0.05), (0.1, 0.5)]
    biases = sum("bias" in name for name in named)
    assert [len(group["params"]) for group in groups] == [biases, len(named) - biases]


# ---- frozen parts


@pytest.mark.parametrize(("trainable", "more"), [("head", set()), ("['0.*bias', classifier]", {"features.0.bias"})])
def test_only_what_is_named_learns(trainable, more, fit):
    """Frozen tensors stay bit-identical; the optimizer has only the others, and these change."""
    start = fit("train.num_epochs=1", "train.limit_batches.train=1", "model.optimizer.params.lr=0.0").task.network
    fitted = fit(f"model.trainable={trainable}", "train.num_epochs=1")
    expected = {"classifier.weight", "classifier.bias"} | more
    before, after = dict(start.named_parameters()), dict(fitted.task.network.named_parameters())
    assert {name for name in before if not torch.equal(before[name], after[name])} == expected
    held = {id(p) for group in fitted.trainer.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(after[name]) for name in expected}


def test_batch_norm_of_a_frozen_part_keeps_its_running_means(fit):
    """Frozen modules train in evaluation mode, and their buffers stay bit-identical, also over validations."""
    settings = ["model.network={type: own.Normed}", "train.checkpoint.monitor=null"]
    start = fit(*settings, "train.limit_batches.train=1", "model.optimizer.params.lr=0.0", "model.trainable=head")
    fitted = fit(*settings, "model.trainable=head")
    before, after = start.task.network.state_dict(), fitted.task.network.state_dict()
    assert {name for name in after if not torch.equal(before[name], after[name])} == {"4.weight", "4.bias"}
    assert torch.equal(before["1.running_mean"], torch.zeros(4))
    assert [module.training for module in fitted.task.network] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("trainable", "evaluated"),
    [
        ("head", ["0", "0.0", "0.1", "0.2", "1"]),
        (["^0.0", "^2"], ["0.1", "1"]),
        (["^0.1", "^2"], ["0.0", "1"]),
        (["^1|^2"], ["0", "0.0", "0.1", "0.2"]),
        ("all", []),
    ],
)
def test_frozen_modules_are_in_evaluation_mode(trainable, evaluated):
    """A module is in evaluation mode with its children if all its parameters are frozen; a module with buffers alone
    is, unless a pattern matches it."""
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    network = nn.Sequential(body, nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    freeze(network, trainable)
    assert [name for name, module in network.named_modules() if not module.training] == evaluated


# ---- errors


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("metrics={values: METRIC}", r"model\.metrics\.values: torch has another use for this name"),
        ("loss={half: LOSS, b: LOSS}", r"model\.loss\.half: torch has another use for this name"),
        ("metrics={loss: METRIC}", r"model\.metrics\.loss: a loss is logged"),
        ("loss={loss: LOSS, b: LOSS}", r"model\.loss\.loss: a loss is logged"),
        ("loss={acc: LOSS, b: LOSS}", r"model\.metrics\.acc: a loss is logged"),
    ],
)
def test_a_name_that_is_taken_is_refused(override, words, fit):
    """A loss or metric cannot have the name of an attribute of torch's modules or of another logged series."""
    types = {"METRIC": "deeplightning.task.metrics.Accuracy", "LOSS": "torch.nn.CrossEntropyLoss"}
    for name, type_name in types.items():
        override = override.replace(name, f"{{type: {type_name}}}")
    with pytest.raises((MisfitError, UserError), match=words):
        fit(f"model.{override}")


@pytest.mark.parametrize(
    ("network", "error"),
    [
        ("network.params.num_classes=5", r"10 classes \(labels 0 to 9\), the network 5 outputs"),
        ("network={type: torch.nn.Conv2d, params: {in_channels: 1, out_channels: 10, kernel_size: 8}}", "row per"),
    ],
)
def test_a_network_on_meta_is_checked_by_the_first_batch(network, error, tiny, place, monkeypatch):
    """The first outputs of a network that an engine builds on the `meta` device are checked."""
    monkeypatch.chdir(place)
    cfg = load_config(tiny, [f"model.{network}"])
    task, data = init_module(cfg, "model"), init_module(cfg, "data")
    data.setup("test")
    task.trainer = SimpleNamespace(datamodule=data, state=SimpleNamespace(fn="predict"))
    task.setup("test")
    with parameters_on_meta():
        task.configure_model()
    task.network.to_empty(device="cpu")
    with pytest.raises(ValueError, match=error):
        task.predict_step(next(iter(data.test_dataloader())), 0)


def test_any_callable_is_a_network_an_optimizer_and_a_schedule(fit):
    """Functions of the user can create the network, the optimizer and the schedule."""
    settings = ["model.network={type: own.network, params: {width: 12}}", "model.optimizer.type=own.optimizer"]
    fitted = fit(*settings, "model.scheduler.type=own.schedule", "train.num_epochs=1")
    assert fitted.task.network[1].out_features == 12
    assert isinstance(fitted.trainer.optimizers[0], torch.optim.RMSprop)
    assert fitted.seen.rates == pytest.approx([0.05] * 9)
    assert fitted.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.005)


def test_the_sheet_of_a_validation_has_the_pictures_that_are_worth_most():
    """The sheet has, over all batches, the most confident mistakes, then the least confident correct answers."""
    task = ImageClassification.__new__(ImageClassification)
    task.__dict__.update(_sheet=None, _confusion_indices=[])
    random = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(400, 3, generator=random), torch.randint(3, (400,), generator=random)
    images = torch.arange(400).view(400, 1, 1, 1)
    for part in (*(slice(n, n + 7) for n in range(0, 200, 7)), slice(203, 203), slice(203, 400)):
        task.remember(images[part], logits[part], labels[part])
    probability, predicted = logits.softmax(1).max(1)
    worth = torch.where(predicted == labels, 1 - probability, 1 + probability)
    best = worth.argsort(descending=True)[:SHEET_SIZE]
    assert task.__dict__["_sheet"]["image"].flatten().tolist() == best.tolist()
    assert sum(map(len, task.__dict__["_confusion_indices"])) == 400


def test_a_batch_of_which_nothing_counts_does_not_end_a_run(fit):
    """In batches of one sample, those of the ignored class have the loss 0, not NaN, also in a single process."""
    fitted = fit("model.loss.params={ignore_index: 3}", "data.batch_size=1", "train.num_epochs=1")
    losses = [value for _, value in fitted.series("train_loss")]
    assert 0 in losses
    assert all(map(math.isfinite, losses))


def test_a_batch_without_weight_ends_a_run_before_it_changes_weights(fit):
    """A batch whose classes all have weight 0 has no gradient; the run ends before NaN gets into the network."""
    weight = "model.loss.params={weight: [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]}"
    with pytest.raises(UserError, match="train_loss is nan"):
        fit(weight, "data.batch_size=1", "train.num_epochs=1")


def test_a_schedule_that_replaces_the_rates_of_groups_is_refused(fit):
    """OneCycleLR with one `max_lr` would train all groups alike; a list keeps them apart."""
    cycle = "model.scheduler={{type: OneCycleLR, params: {{max_lr: {}, total_steps: auto}}, call: {{interval: step}}}}"
    groups = "model.optimizer.groups=[{match: bias, lr: 0.001}]"
    with pytest.raises(MisfitError, match="a list with a rate for each group"):
        fit(groups, cycle.format(0.1))
    optimizer = fit(groups, cycle.format("[0.01, 0.1]")).trainer.optimizers[0]
    assert [group["max_lr"] for group in optimizer.param_groups] == [0.01, 0.1]


def test_a_network_that_comes_in_evaluation_mode_is_trained(fit, monkeypatch):
    """Hugging Face's `from_pretrained` returns one."""
    made = cnn.SimpleCNN
    monkeypatch.setattr(cnn, "SimpleCNN", lambda **params: made(**params).eval())
    assert all(part.training for part in fit("train.num_epochs=1").task.network.modules())


def test_a_plateau_of_steps_judges_each_steps_own_loss(fit):
    """The loss of each step is logged, whatever the interval of logging."""
    params = "{factor: 0.5, patience: 0, threshold: 0.0}"
    rule = f"{{type: ReduceLROnPlateau, params: {params}, call: {{interval: step, monitor: train_loss}}}}"
    fitted = fit(f"model.scheduler={rule}", "~train.num_epochs", "train.max_steps=9", "logger.log_every_n_steps=4")
    losses = [value for _, value in fitted.series("train_loss")]
    assert len(losses) == 9
    rate, best, expected = 0.05, math.inf, []
    for loss in losses:
        expected.append(rate)
        rate, best = (rate, loss) if loss < best else (rate / 2, best)
    assert fitted.seen.rates == pytest.approx(expected)


def test_schedules_follow_each_other(fit):
    """`SequentialLR` gets schedules of the same optimizer."""
    home = "torch.optim.lr_scheduler"
    parts = f"[{{type: {home}.ConstantLR, params: {{factor: 0.1, total_iters: 2}}}}, "
    parts += f"{{type: {home}.ExponentialLR, params: {{gamma: 0.5}}}}]"
    rule = f"{{type: SequentialLR, params: {{schedulers: {parts}, milestones: [2]}}, call: {{interval: step}}}}"
    fitted = fit(f"model.scheduler={rule}", "~train.num_epochs", "train.max_steps=5")
    assert fitted.seen.rates == pytest.approx([0.005, 0.005, 0.05, 0.025, 0.0125])


SGD = torch.optim.SGD


class Wrapper(torch.optim.Optimizer):
    """Like timm's Lookahead: torch's constructor is not called."""

    def __init__(self, params, **more):
        self.of = SGD(params, **more)
        self.param_groups, self.defaults, self.state = self.of.param_groups, self.of.defaults, self.of.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure=None):
        return self.of.step(closure)

    def state_dict(self):
        return self.of.state_dict()


def test_a_schedule_of_an_optimizer_without_hooks_advances(fit, monkeypatch):
    """Lightning advances it after each batch."""
    monkeypatch.setattr(torch.optim, "SGD", Wrapper)
    halves = "{type: ExponentialLR, params: {gamma: 0.5}, call: {interval: step}}"
    fitted = fit(f"model.scheduler={halves}", "~train.num_epochs", "train.max_steps=3")
    assert [value for _, value in fitted.series("lr")] == pytest.approx([0.05, 0.025, 0.0125])
