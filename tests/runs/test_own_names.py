"""A user's LightningModule as in Lightning's manual: metric names, optimizers, callbacks and hooks."""

import json
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from tiny import write_pairs
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

OWN = '''\
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint


class Task(pl.LightningModule):
    """Two optimizers stepped manually, a metric collection, and names with slashes."""

    def __init__(self, cfg):
        super().__init__()
        self.automatic_optimization = False
        self.body, self.head, self.seen = nn.Linear(4, 8), nn.Linear(8, 2), []
        classes = {"num_classes": 2, "task": "multiclass"}
        self.val_metrics = torchmetrics.MetricCollection(
            {"acc": torchmetrics.Accuracy(**classes), "f1": torchmetrics.F1Score(**classes)}, prefix="valid/"
        )
        self.test_metrics = self.val_metrics.clone(prefix="test/")

    def setup(self, stage):
        self.seen.append(stage)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0], "y": batch[1]}

    def forward(self, x):
        return self.head(self.body(x).relu())

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch["x"]), batch["y"])
        one, two = self.optimizers()
        one.zero_grad(), two.zero_grad()
        self.manual_backward(loss)
        one.step(), two.step()
        self.log_dict({"train/loss": loss, "train/half": loss / 2}, on_epoch=True)
        self.log("hidden", loss, logger=False, prog_bar=True)
        self.log("unseen", loss)

    def validation_step(self, batch, batch_idx):
        outputs = self(batch["x"])
        self.log("valid/loss", nn.functional.cross_entropy(outputs, batch["y"]), batch_size=len(outputs))
        self.val_metrics(outputs, batch["y"])
        self.log_dict(self.val_metrics, on_step=False, on_epoch=True)

    def test_step(self, batch, batch_idx):
        self.test_metrics(self(batch["x"]), batch["y"])
        self.log_dict(self.test_metrics)

    def configure_optimizers(self):
        return torch.optim.SGD(self.body.parameters(), lr=0.1), torch.optim.Adam(self.head.parameters(), lr=0.01)

    def configure_callbacks(self):
        return [EarlyStopping("valid/f1", mode="max", patience=9), ModelCheckpoint("kept", monitor="valid/acc")]
'''
SETTINGS = """\
stages: [train, test]
train: {num_epochs: 2, export: false, checkpoint: {monitor: valid/acc}, early_stop: {metric: valid/loss, patience: 5}}
"""


def test_names_of_any_form_are_shown_tracked_and_monitored(command, store, tmp_path, tracked):
    """Names with slashes and of a MetricCollection appear in epoch lines, tracker and report, and can be monitored by
    checkpoints, early stopping and user callbacks; `logger=False` keeps a metric out of the tracker."""
    write_pairs(tmp_path, store, OWN, SETTINGS)
    command("check", "c.yaml", cwd=tmp_path, code=0)
    done = command("train", "c.yaml", cwd=tmp_path, code=0)
    (row,) = [line for line in done.out.splitlines() if line.startswith("epoch 2 of 2")]
    shown = [word for word in row.split() if "/" in word or word in ("hidden", "unseen")]
    assert shown[:6] == ["hidden", "train/half", "train/loss", "valid/acc", "valid/f1", "valid/loss"], done
    assert "unseen" not in row
    assert "results    test/acc " in done.out
    run = tracked(done.folder)
    assert {"train/loss_epoch", "valid/acc", "valid/f1", "valid/loss", "test/f1", "unseen"} <= set(run.metrics)
    assert "hidden" not in run.metrics
    assert [step for step, _ in run.series()["test/acc"]] == [0]
    best = json.loads(done.folder.joinpath("best.json").read_text())
    assert best["metric"] == "valid/acc"
    assert best["value"] == max(value for _, value in run.series()["valid/acc"])
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".ckpt"]
    report = (done.folder / "report.html").read_text()
    assert all(f"{name} over the steps: " in report for name in ("loss", "half", "acc", "f1"))


class Plain(pl.LightningModule):
    """Returns from `configure_optimizers` what `configure` builds; has its own loaders."""

    def __init__(self, configure: Any = None):
        super().__init__()
        self.layer, self.configure = nn.Linear(3, 1), configure
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step("val", batch)

    def step(self, stage: str, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log(f"{stage}_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return self.configure(self, SGD(self.parameters(), lr=0.1))

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x[:, :1]), 8)

    val_dataloader = train_dataloader


class ByHand(Plain):
    """Steps two optimizers manually."""

    def __init__(self, configure: Any):
        super().__init__(configure)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.step("train", batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers() or []:
            schedule.step()


class Trains(Plain):
    """Logs one name without a stage, and has no validation."""

    def step(self, stage: str, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("my_error", loss, on_step=False, on_epoch=True)
        return loss

    def val_dataloader(self) -> list[Any]:
        return []


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`", "ignore:Total length of `list`")
def test_a_name_without_a_stage_is_shown_and_judged(fit, caplog):
    """Without validation, the training value of each epoch selects the best checkpoint."""
    caplog.set_level("INFO", "deeplightning")

    def made(cfg: Any) -> Trains:
        cfg.train.checkpoint.monitor, cfg.train.checkpoint.mode = "my_error", "min"
        return Trains(lambda task, one: one)

    done = fit("train.num_epochs=2", task=made, data=lambda cfg: None)
    best = json.loads((done.folder / "best.json").read_text())
    assert best["value"] == pytest.approx(min(value for _, value in done.series("my_error")))
    assert "epoch 2 of 2  my_error 0." in caplog.text


def two(task: Plain) -> tuple[SGD, SGD]:
    return SGD([task.layer.weight], lr=0.1), SGD([task.layer.bias], lr=0.1)


def monitored(one: SGD) -> dict[str, Any]:
    return {"scheduler": ReduceLROnPlateau(one), "monitor": "val_loss"}


def scheduled(both: list[SGD]) -> tuple[list[SGD], list[dict[str, Any]]]:
    return both, [{"scheduler": StepLR(optimizer, 1, 0.5)} for optimizer in both]


class ByGradient(ByHand):
    """Gives `manual_backward` a vector and its gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        errors = (self.layer(batch[0]) - batch[1]).square().flatten()
        self.manual_backward(errors, gradient=torch.full_like(errors, 1 / len(errors)))
        optimizer.step()


class Signs(torch.optim.Optimizer):
    """Has no learning rate."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad.sign()
        return loss


FORMS = {
    "one": (Plain, lambda task, one: one),
    "a list of optimizers": (ByHand, lambda task, one: list(two(task))),
    "two lists": (Plain, lambda task, one: ([one], [StepLR(one, 1, 0.5)])),
    "a dict": (Plain, lambda task, one: {"optimizer": one, "lr_scheduler": StepLR(one, 1, 0.5)}),
    "a dict with a monitor": (Plain, lambda task, one: {"optimizer": one, "lr_scheduler": monitored(one)}),
    "dicts": (ByHand, lambda task, one: tuple({"optimizer": o, "lr_scheduler": StepLR(o, 1, 0.5)} for o in two(task))),
    "optimizers and dicts of schedules": (ByHand, lambda task, one: scheduled(list(two(task)))),
    "None": (Plain, lambda task, one: None),
    "an optimizer without a rate": (Plain, lambda task, one: Signs(task.parameters())),
    "a backward pass from a vector": (ByGradient, lambda task, one: one),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_every_form_of_configure_optimizers_trains_as_lightning_does(fit, form):
    """Training with the loaders of the LightningModule gives the weights of Lightning's Trainer."""
    kind, configure = FORMS[form]
    pl.seed_everything(7)
    plain = kind(configure)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=3, accelerator="cpu", num_sanity_val_steps=0, enable_model_summary=False, **silent).fit(plain)

    def made(cfg: Any) -> Plain:
        task = kind(configure)
        task.load_state_dict(start)
        return task

    ours = fit("train.num_epochs=3", task=made, data=lambda cfg: None).task
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0)
    assert (form == "None") == torch.equal(plain.layer.weight, start["layer.weight"])


def test_a_missing_metric_of_the_users_callback_is_not_the_fault_of_a_key(command, store, tmp_path):
    """Early stopping of the user's module names its metric, and no key of the config."""
    write_pairs(tmp_path, store, OWN.replace('EarlyStopping("valid/f1"', 'EarlyStopping("valid/f2"'), SETTINGS)
    failed = command("train", "c.yaml", cwd=tmp_path, code=2)
    assert "conditioned on metric `valid/f2`" in failed.err
    assert "train.early_stop.metric" not in failed.err
