"""Provide a config that trains in a fraction of a second, user code for it, and digests of a checkpoint's weights.

The tests share them through `conftest`, and the storm (`tests/storm`) uses them without pytest.
"""

import csv
import hashlib
import subprocess
from pathlib import Path
from typing import Any

TINY = """\
seed: 7
data:
  module: {type: deeplightning.data.digits.Digits, params: {limit: 150}}    # 134 train, 16 validate, 150 test
  batch_size: 16
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 2, export: false}
logger:
  params: {tracking_uri: STORE, system_metrics: false}
  log_every_n_steps: 4
  pictures: null
"""

SEED = """\
data:
  root: /data
  dataset: MNIST
  module: {type: deeplightning.data.mnist.MNIST}
  num_workers: 4
  batch_size: 256                  # per process
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.01, weight_decay: 0.01, momentum: 0.9}}
  scheduler:
    {type: torch.optim.lr_scheduler.ExponentialLR, params: {gamma: 0.99}, call: {interval: epoch, frequency: 1}}
  loss: {type: torch.nn.CrossEntropyLoss, params: }
engine: {backend: deepspeed_stage_3, gpus: [0, 1], num_nodes: 1, precision: 32}
train: {num_epochs: 10, val_every_n_epoch: 1, accumulator_epoch: 0, accumulator_factor: 1, resume_ckpt: null}
logger:
  type: pytorch_lightning.loggers.MLFlowLogger
  params: {experiment_name: Default, tracking_uri: mlruns}
  log_every_n_steps: 10
"""
"""The first config of the project, as published."""

PAIRS = """\
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Pairs(pl.LightningDataModule):
    def __init__(self, cfg):
        super().__init__()

    def setup(self, stage):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        self.set = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.set, 16)

    val_dataloader = test_dataloader = train_dataloader


"""

PAIRS_CONFIG = """\
seed: 5
data: {module: {type: pairs.Pairs}, batch_size: 16}
model:
  module: {type: pairs.Task}
  network: {type: torch.nn.Identity}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1}}
  loss: null
logger: {params: {tracking_uri: STORE, system_metrics: false}}
"""

OWN = '''\
"""User code in the working directory."""

import json
import os
import pathlib
import signal
import time

import numpy as np
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import BaseFinetuning
from torch import nn

from deeplightning.data.digits import Digits
from deeplightning.task.img_classif import ImageClassification


class NaN(torch.nn.CrossEntropyLoss):
    def forward(self, outputs, targets):
        return super().forward(outputs, targets) * torch.nan


class Raises(ImageClassification):
    """Fails in its third batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyError("a fault of the user's")
        return super().training_step(batch, batch_idx)


class Norms(pl.Callback):
    """Logs metrics whose names are known only at run time, at the steps that many Lightning examples use."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict({f"norm/{name}": tensor.norm() for name, tensor in pl_module.named_parameters()})


class Stuck(ImageClassification):
    """Waits in its first batch until a file exists."""

    def __init__(self, cfg, file):
        super().__init__(cfg)
        self.file = pathlib.Path(file)

    def training_step(self, batch, batch_idx):
        print("stuck", flush=True)
        while not self.file.exists():
            time.sleep(0.01)
        return super().training_step(batch, batch_idx)


class Guarded(Digits):
    """Takes a secret param."""

    def __init__(self, cfg, token, **params):
        super().__init__(cfg, **params)
        self.token = token


class Waits(pl.Callback):
    """Waits in the third batch of the second epoch, or in the validation after it, until a file exists."""

    def __init__(self, until, validating=False):
        self.until = pathlib.Path(until)
        self.validating = validating

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2 and not self.validating:
            self.wait()

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and self.validating:
            self.wait()

    def wait(self):
        print("waits", flush=True)
        while not self.until.exists():
            time.sleep(0.01)


class Killed(pl.Callback):
    """Sends its process SIGKILL before a training batch, or before a validation batch of that epoch."""

    def __init__(self, epoch, batch, validating=False):
        self.at, self.validating = (epoch, batch), validating

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        if self.validating:
            self.on_train_batch_start(trainer, module, batch, trainer.fit_loop.epoch_loop.batch_progress.current.ready)


class Measured(pl.LightningModule):
    """Logs epoch metrics as shown in the manuals of Lightning and torchmetrics."""

    def __init__(self, cfg):
        super().__init__()
        self.network = nn.Linear(64, 10)
        kinds = {"acc": "MulticlassAccuracy", "f1": "MulticlassF1Score", "recall": "MulticlassRecall"}
        metrics = {name: getattr(torchmetrics.classification, kind)(10) for name, kind in kinds.items()}
        self.measures = torchmetrics.MetricCollection(metrics, prefix="train_")
        self.mean, self.val_mean = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        outputs = self.network(batch["image"].float().flatten(1) / 255)
        loss = nn.functional.cross_entropy(outputs, batch["label"])
        self.measures.update(outputs, batch["label"])
        self.mean.update(loss.detach())
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(outputs))
        self.log("train_most", loss, on_step=False, on_epoch=True, reduce_fx="max", batch_size=1)
        self.log("train_sum", loss, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.measures.compute())
        self.log("train_mean", self.mean.compute())
        self.measures.reset()
        self.mean.reset()

    def validation_step(self, batch, batch_idx):
        self.val_mean.update(self.network(batch["image"].float().flatten(1) / 255).mean())

    def on_validation_epoch_end(self):
        self.log("val_mean", self.val_mean.compute())
        self.val_mean.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(pl.LightningModule):
    """Steps one optimizer at each batch and another at every second batch, counted across epochs."""

    def __init__(self, cfg):
        super().__init__()
        self.automatic_optimization = False
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        outputs = self.head(self.body(batch["image"].float().flatten(1) / 255))
        loss = nn.functional.cross_entropy(outputs, batch["label"])
        self.manual_backward(loss)
        if (self.trainer.current_epoch * self.trainer.num_training_batches + batch_idx) % 2:
            body.step()
            body.zero_grad()
        head.step()
        head.zero_grad(set_to_none=False)
        self.log("train_loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


class Thaws(BaseFinetuning):
    """Freezes all but the last layer, including batch norm, and unfreezes them at the second epoch."""

    def freeze_before_training(self, module):
        self.freeze(list(module.network)[:-1], train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(list(module.network)[:-1], optimizer, lr=0.02)


class Normed(nn.Sequential):
    """A network with convolutions and batch norm."""

    def __init__(self):
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
        super().__init__(*layers)


class MemoryHungry(nn.Module):
    """Allocates 8 MB per sample; raises torch.OutOfMemoryError for more than `most` samples."""

    def __init__(self, most=1000):
        super().__init__()
        self.last, self.most = nn.Linear(64, 10), most

    def forward(self, images):
        if len(images) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        much = torch.ones(len(images), 2_000_000)
        return self.last(images.flatten(1)) * much[:, :1]


class Tied(nn.Module):
    """A network whose two layers share their weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, images):
        return self.last(self.second(self.first(images.flatten(1)).relu()).relu())


class Partitioned(pl.Callback):
    """Prints whether DeepSpeed has partitioned every parameter when a test begins."""

    def on_test_start(self, trainer, module):
        held = [(p.ds_status.name, p.numel()) for p in module.network.parameters()]
        state = "all in parts" if set(held) == {("NOT_AVAILABLE", 0)} else str(held)
        print("parameters of the test:", state, flush=True)


class AsksForSteps(ImageClassification):
    """Builds its schedule from the number of steps, as Lightning's manual shows."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Gradients(pl.Callback):
    """Saves the gradients that the optimizer gets at each step, in one vector."""

    def __init__(self, file):
        self.file = file
        self.seen = []

    def look(self, optimizer, *_):
        self.seen.append(torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]))

    def on_train_start(self, trainer, module):
        trainer.optimizers[0].register_step_post_hook(self.look)

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            torch.save(self.seen, self.file)


class Stops(pl.Callback):
    """Stops training after a number of batches, or at the first validation."""

    def __init__(self, batch=None):
        self.batch = batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop |= batch_idx + 1 == self.batch

    def on_validation_end(self, trainer, pl_module):
        trainer.should_stop |= self.batch is None


class StopsItself(ImageClassification):
    """Stops training after the number of batches in the variable STOPS."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.trainer.should_stop |= str(batch_idx + 1) == os.environ.get("STOPS")


class Batches(pl.Callback):
    """Saves the sample indices of each training and validation batch."""

    def __init__(self, file):
        self.file, self.seen = file, {"train": [], "val": []}

    def on_train_batch_start(self, trainer, module, batch, *_):
        self.seen["train"].append(batch["index"])

    def on_validation_batch_start(self, trainer, module, batch, *_):
        self.seen["val"].append(batch["index"])

    def on_train_end(self, trainer, module):
        torch.save(self.seen, self.file)


class SavedColumn(pl.Callback):
    """Saves a column of each batch of each epoch, in one file per process."""

    def __init__(self, folder, column):
        self.folder, self.column, self.seen = pathlib.Path(folder), column, []

    def on_train_epoch_start(self, trainer, module):
        self.seen.append([])

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen[-1].append(batch[self.column].tolist())

    def on_train_end(self, trainer, module):
        (self.folder / f"saw_{trainer.global_rank}.json").write_text(json.dumps(self.seen))


class Weights(pl.Callback):
    """Saves the task's weights after each optimizer step."""

    def __init__(self, file):
        self.file = file
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append({name: value.clone() for name, value in module.state_dict().items()})

    def on_train_end(self, trainer, module):
        torch.save(self.seen, self.file)


class SameDigits(Digits):
    """The same `size` digits in every set."""

    def __init__(self, cfg, size, **params):
        super().__init__(cfg, **params)
        self.size = size

    def read(self):
        digits = super().read()["all"]
        return {name: digits.take(np.arange(self.size)) for name in ("train", "val", "test")}


class Dropout(nn.Module):
    """A network that draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))

    def forward(self, images):
        return self.layers(images)


def network(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def optimizer(groups, lr, momentum):
    return torch.optim.RMSprop(groups, lr=lr, momentum=momentum)


def schedule(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1**epoch)


class Words(nn.Module):
    """Averages the embeddings of the tokens to logits of two classes."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Embedding(2, 2)

    def forward(self, tokens):
        return self.classes(tokens).mean(1)


class Constant(nn.Module):
    """A loss that never changes."""

    def forward(self, logits, labels):
        return 0 * logits.sum() + 1.5


class NoNumber(nn.Module):
    """A loss that is NaN outside training."""

    def forward(self, logits, labels):
        loss = nn.functional.cross_entropy(logits, labels)
        return loss if torch.is_grad_enabled() else loss * float("nan")
'''


def weights(checkpoint: Path) -> dict[str, Any]:
    """Return the weights in a checkpoint; shards are merged."""
    import torch

    from deeplightning.engine.checkpoint_reading import read_checkpoint

    content = torch.load(checkpoint, weights_only=True)
    return (read_checkpoint(checkpoint) if "pieces" in content else content)["state_dict"]


def digest(checkpoint: Path) -> str:
    """Return the SHA-256 of the weights in a checkpoint file."""
    import torch

    total = hashlib.sha256()
    for name, tensor in weights(checkpoint).items():
        values = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)  # NumPy has no bfloat16
        total.update(name.encode() + values.numpy().tobytes())
    return total.hexdigest()


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file by the names in its header."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def git(folder: Path, *arguments: str) -> None:
    """Run Git in a folder, with an author's name and email set."""
    author = ["-c", "user.name=N", "-c", "user.email=n@e"]
    subprocess.run(["git", "-C", str(folder), *author, *arguments], check=True, capture_output=True)


def write_pairs(folder: Path, store: Path, task: str, settings: str) -> None:
    """Write `pairs.py` with a data module of pairs (x, y) and the class `Task`, and `c.yaml` with more settings."""
    (folder / "pairs.py").write_text(PAIRS + task)
    (folder / "c.yaml").write_text(PAIRS_CONFIG.replace("STORE", str(store)) + settings)
