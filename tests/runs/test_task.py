"""Image classification: what is learned, counted, scheduled and frozen, against references computed anew."""

from types import SimpleNamespace

import pytest
import sklearn.metrics
import torch
from torch import nn

from deeplightning.config.examine import load_config
from deeplightning.engine.sharded import parameters_on_meta
from deeplightning.faults import UserError
from deeplightning.run.assemble import init_module
from deeplightning.task.img_classif import SHEET_SIZE, ImageClassification
from deeplightning.task.metrics import Accuracy, SampleMean
from deeplightning.task.networks import MisfitError
from deeplightning.task.optimize import freeze

# ---- metrics


def answers(fitted, split):
    """Probabilities (N, K) and labels (N,) of a whole set, in one piece."""
    everything = fitted.data.dataset(split)
    model = fitted.task.inference_model()
    with torch.inference_mode():
        probabilities = model(everything.images).double()
    return (probabilities / probabilities.sum(1, keepdim=True)).numpy(), everything.labels.numpy()


METRIC = "{{type: torchmetrics.classification.Multiclass{}, params: {{num_classes: 10, average: {}}}}}"


@pytest.mark.parametrize("by_default", [True, False])
def test_validation_metrics_are_those_of_the_whole_set(by_default, fit):
    """`val_loss`, `val_acc`, which is there by default, and metrics by target equal scikit-learn's on all samples,
    though batches of 4 do not divide them."""
    named = {"acc": ("Accuracy", "micro"), "f1": ("F1Score", "micro"), "macro": ("F1Score", "macro")}
    metrics = ", ".join(f"{name}: {METRIC.format(*of)}" for name, of in named.items())
    sizes = ["data.module.params.limit=117", "data.batch_size=4", "data.num_splits=5", "train.num_epochs=1"]
    fitted = fit(*sizes, *([] if by_default else [f"model.metrics={{{metrics}}}"]))
    probabilities, labels = answers(fitted, "val")
    predicted = probabilities.argmax(1)
    expected = {
        "loss": sklearn.metrics.log_loss(labels, probabilities, labels=range(10)),
        "acc": sklearn.metrics.accuracy_score(labels, predicted),
    }
    if not by_default:
        expected["f1"] = sklearn.metrics.f1_score(labels, predicted, average="micro")
        expected["macro"] = sklearn.metrics.f1_score(labels, predicted, average="macro")
    assert {name: fitted.series(f"val_{name}")[-1][1] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_means_and_shares_count_samples():
    """Batches of different sizes weigh by their samples, and a value that is no number is not left out."""
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
    """`train_loss` is 1 x `train_ce` + 0.5 x `train_margin` at each step; validation has all three too."""
    margin = "{type: torch.nn.MultiMarginLoss, weight: 0.5}"
    fitted = fit(
        "~model.loss", f"model.loss={{ce: {{type: torch.nn.CrossEntropyLoss}}, margin: {margin}}}", "train.num_epochs=1"
    )
    total, ce, margin = ([value for _, value in fitted.series(f"train_{name}")] for name in ("loss", "ce", "margin"))
    assert total == pytest.approx([a + 0.5 * b for a, b in zip(ce, margin, strict=True)], rel=1e-6)
    total, ce, margin = (fitted.series(f"val_{name}")[-1][1] for name in ("loss", "ce", "margin"))
    assert total == pytest.approx(ce + 0.5 * margin, rel=1e-6)


@pytest.mark.parametrize("several", [False, True], ids=["one loss", "several"])
def test_the_task_logs_what_it_declares(several, fit):
    """`logged_metrics`, which `check` reads, is what a training and a test leave in `callback_metrics`."""
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
    """The learning rate of each optimizer step, of one batch or two; nine batches are an epoch."""
    halves = "{type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.5}, call: {frequency: 2}}"
    scheduler = [f"model.scheduler={halves}", f"model.scheduler.call.interval={interval}"]
    accumulated = f"train.accumulator_factor={batches}"
    fitted = fit(*scheduler, "~train.num_epochs", f"train.max_steps={steps}", accumulated)
    assert fitted.seen.rates == pytest.approx(expected)
    assert [value for _, value in fitted.series("lr")] == pytest.approx(expected)


def test_parameters_whose_name_matches_get_their_own_values(fit):
    """`groups`: the first match wins, the rest have the usual values."""
    fitted = fit(
        "model.optimizer.params.weight_decay=0.1",
        "model.optimizer.groups=[{match: 'bias', weight_decay: 0.0}, {match: 'weight$', lr: 0.5}]",
        "train.num_epochs=1",
    )
    groups = fitted.trainer.optimizers[0].param_groups
    named = dict(fitted.task.network.named_parameters())
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(0.0, 0.05), (0.1, 0.5)]
    assert [len(group["params"]) for group in groups] == [
        sum("bias" in name for name in named),
        sum("bias" not in name for name in named),
    ]


# ---- what learns


@pytest.mark.parametrize(("trainable", "more"), [("head", set()), ("['0.*bias', classifier]", {"features.0.bias"})])
def test_only_what_is_named_learns(trainable, more, fit):
    """Frozen tensors stay bit for bit, the optimizer holds only the others, and those change."""
    start = fit("train.num_epochs=1", "train.limit_batches.train=1", "model.optimizer.params.lr=0.0").task.network
    fitted = fit(f"model.trainable={trainable}", "train.num_epochs=1")
    expected = {"classifier.weight", "classifier.bias"} | more
    before, after = dict(start.named_parameters()), dict(fitted.task.network.named_parameters())
    assert {name for name in before if not torch.equal(before[name], after[name])} == expected
    held = {id(p) for group in fitted.trainer.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(after[name]) for name in expected}


def test_batch_norm_of_a_frozen_part_keeps_its_running_means(fit):
    """Under `model.trainable` the buffers of frozen modules stay bit for bit, over validations too, and the head learns
    from what plain torch computes with the body in evaluation mode."""
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
def test_modules_of_which_nothing_learns_are_in_evaluation_mode(trainable, evaluated):
    """A module whose parameters are frozen is in evaluation mode with all in it; one that has buffers alone is, unless
    a pattern names it."""
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    network = nn.Sequential(body, nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    freeze(network, trainable)
    assert [name for name, module in network.named_modules() if not module.training] == evaluated


# ---- what does not fit


@pytest.mark.parametrize(
    "override",
    [
        "model.metrics={values: {type: torchmetrics.MeanMetric}}",
        "model.loss={half: {type: torch.nn.CrossEntropyLoss}, b: {type: torch.nn.CrossEntropyLoss}}",
    ],
)
def test_names_that_torch_uses_are_refused(override, fit):
    """Of losses and metrics; the note names the key."""
    words = r"model\.(metrics\.values|loss\.half): torch has another use for this name"
    with pytest.raises((MisfitError, UserError), match=words):
        fit(override)


@pytest.mark.parametrize(
    ("network", "error"),
    [
        ("model.network.params.num_classes=5", r"10 classes \(labels 0 to 9\), the network 5 outputs"),
        (
            "model.network={type: torch.nn.Conv2d, params: {in_channels: 1, out_channels: 10, kernel_size: 8}}",
            "row per",
        ),
    ],
)
def test_a_network_without_its_numbers_yet_is_checked_by_the_first_batch(network, error, tiny, place, monkeypatch):
    """Where an engine builds the parameters on `meta`, nothing is tried out; the first outputs are checked instead."""
    monkeypatch.chdir(place)
    cfg = load_config(tiny, [network])
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
    """Functions of the user's make them; what they give is used."""
    settings = ["model.network={type: own.network, params: {width: 12}}", "model.optimizer.type=own.optimizer"]
    fitted = fit(*settings, "model.scheduler.type=own.schedule", "train.num_epochs=1")
    assert fitted.task.network[1].out_features == 12
    assert isinstance(fitted.trainer.optimizers[0], torch.optim.RMSprop)
    assert fitted.seen.rates == pytest.approx([0.05] * 9)
    assert fitted.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.005)


def test_the_sheet_of_a_validation_has_the_pictures_that_are_worth_most():
    """Of all batches, an empty one among them: mistakes first, the surest first, then the least sure right answers."""
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


@pytest.mark.parametrize(
    "override",
    [
        "model.metrics={loss: {type: deeplightning.task.metrics.Accuracy}}",
        "model.loss={loss: {type: torch.nn.CrossEntropyLoss}, b: {type: torch.nn.CrossEntropyLoss}}",
        "model.loss={acc: {type: torch.nn.CrossEntropyLoss}, b: {type: torch.nn.CrossEntropyLoss}}",
    ],
)
def test_a_name_is_of_a_loss_or_of_a_metric(override, fit):
    """Both would be logged under it."""
    with pytest.raises((MisfitError, UserError), match=r"model\.(metrics\.(loss|acc)|loss\.loss): a loss is logged"):
        fit(override)
