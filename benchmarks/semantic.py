"""Plant faults of meaning in shipped configs: each value is valid by itself, but they do not fit together.

Each is a config, overrides, and the keys one of which must be told.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import side_by_side

F1 = "torchmetrics.classification.MulticlassF1Score"
TWO = "{g: {type: torch.optim.SGD, params: {lr: 0.1}}, d: {type: torch.optim.SGD, params: {lr: 0.1}}}"
BASE, CIFAR = "configs/base.yaml", "configs/cifar10_resnet18.yaml"
OWN, EVEN = "examples/own_code/reconstruction.yaml", "examples/own_code/even_or_odd.yaml"


@dataclass(frozen=True)
class Planted:
    """A fault: what it is, where it is put, and the keys of which one must be told."""

    what: str
    config: str
    overrides: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """What `check --dry-run` said: the key and place of the fault that was planted, and its CPU seconds."""

    key: str | None
    message: str
    seconds: float


def _plant(what: str, config: str, overrides: list[str], *keys: str) -> Planted:
    return Planted(what, config, tuple(overrides), keys)


PLANTED = [
    _plant("a misspelt monitor", BASE, ["train.checkpoint.monitor=val_acuracy"], "train.checkpoint.monitor"),
    _plant("stopping by a test metric", BASE, ["train.early_stop={metric: test_loss}"], "train.early_stop.metric"),
    _plant(
        "a monitor of a metric that was renamed",
        BASE,
        [f"model.metrics={{f1: {{type: {F1}, params: {{num_classes: 10}}}}}}"],
        "train.checkpoint.monitor",
    ),
    _plant("too few outputs", BASE, ["model.network.params.num_classes=9"], "model.network"),
    _plant("too many outputs", CIFAR, ["model.network.params.num_classes=1000"], "model.network"),
    _plant("wrong channels", BASE, ["model.network.params.num_channels=3"], "model.network"),
    _plant("a wrong picture size", BASE, ["data.module.params={image_size: 9}"], "model.network"),
    _plant("a network for other inputs", EVEN, ["model.network.params.inputs=100"], "model.network"),
    _plant("two outputs too few", OWN, ["model.network.params.outputs=62"], "model.loss", "model.module"),
    _plant("a regression loss on labels", BASE, ["model.loss={type: torch.nn.MSELoss}"], "model.loss"),
    _plant("a loss that wants logarithms of two classes", BASE, ["model.loss={type: torch.nn.BCELoss}"], "model.loss"),
    _plant("a loss per sample", BASE, ["model.loss.params={reduction: none}"], "model.loss"),
    _plant("an unknown reduction", BASE, ["model.loss.params={reduction: men}"], "model.loss"),
    _plant(
        "a regression metric",
        BASE,
        ["model.metrics={acc: {type: torchmetrics.MeanSquaredError}}"],
        "model.metrics.acc",
    ),
    _plant(
        "a metric of other classes",
        BASE,
        [f"model.metrics={{acc: {{type: {F1}, params: {{num_classes: 7}}}}}}"],
        "model.metrics.acc",
    ),
    _plant(
        "a metric of one number per class",
        BASE,
        [f"model.metrics={{acc: {{type: {F1}, params: {{num_classes: 10, average: none}}}}}}"],
        "model.metrics.acc",
    ),
    _plant(
        "two optimizers, DeepSpeed",
        BASE,
        ["engine.backend=deepspeed_stage_2", f"model.optimizer={TWO}"],
        "model.optimizer",
    ),
    _plant(
        "clip by value, DeepSpeed",
        BASE,
        ["engine.backend=deepspeed_stage_2", "train.gradient_clip={value: 1.0, algorithm: value}"],
        "train.gradient_clip",
    ),
    _plant("two optimizers for a task of one", BASE, [f"model.optimizer={TWO}"], "model.optimizer", "model.module"),
    _plant(
        "precision 64, DeepSpeed", BASE, ["engine.backend=deepspeed_stage_3", "engine.precision=64"], "engine.precision"
    ),
    _plant("a negative learning rate", BASE, ["model.optimizer.params.lr=-0.1"], "model.optimizer"),
    _plant("Nesterov's momentum without any", CIFAR, ["model.optimizer.params.momentum=0"], "model.optimizer"),
    _plant("groups that match nothing", CIFAR, ["model.optimizer.groups=[{match: norm_, lr: 0}]"], "model.optimizer"),
    _plant("nothing that learns", BASE, ["model.trainable=[nothing_is_called_so]"], "model.trainable"),
    _plant(
        "a plateau without a metric",
        BASE,
        ["model.scheduler={type: torch.optim.lr_scheduler.ReduceLROnPlateau}"],
        "model.scheduler.call.monitor",
    ),
    _plant("a schedule without its length", BASE, ["~model.scheduler.params.total_steps"], "model.scheduler"),
    _plant(
        "an augmentation of numbers between 0 and 1",
        BASE,
        ["data.module.params={augment: [{type: torch.nn.Sigmoid}]}"],
        "data.module.params.augment",
    ),
    _plant("LBFGS, DeepSpeed", BASE, ["engine.backend=deepspeed_stage_1", "model.optimizer.type=torch.optim.LBFGS"],
           "model.optimizer"),
]  # fmt: skip


def told(planted: Planted, cwd: Path) -> Told:
    """Run `check --dry-run` on a planted fault in a new process; return its report."""
    command = [*side_by_side.OURS, "check", planted.config, *planted.overrides, "--dry-run", "--format", "json"]
    ended = side_by_side.run(command, cwd)
    try:
        faults = json.loads(ended.output[ended.output.index("{\n") :])["faults"]
    except ValueError:
        return Told(None, ended.output[-200:], ended.seconds)
    hit = next((f for f in faults if any(_is_at(f["key"], key) for key in planted.keys)), None)
    if hit is None:
        return Told(None, "; ".join(f"{f['key']}: {f['message']}" for f in faults), ended.seconds)
    return Told(hit["key"], hit["message"], ended.seconds)


def _is_at(key: str | None, wanted: str) -> bool:
    return key is not None and f"{key}.".startswith(f"{wanted}.")
