"""Augmentation in a run: training pictures are changed, and no others. Each module: tests/runs/test_data.py."""

from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from deeplightning.checks.examine import load_config
from deeplightning.data.cifar import CIFAR10
from deeplightning.data.datasets import Samples
from deeplightning.data.loading import DataOfSets
from deeplightning.run.assemble import init_module

CONFIG = """\
seed: 7
stages: [train, test]
data:
  root: .
  module:
    type: deeplightning.data.cifar.CIFAR10
    params: {augment: [{type: deeplightning.data.augment.RandomHorizontalFlip, params: {p: 1}}]}
  batch_size: 10
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 3, image_size: 32}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.1}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 1}
"""


class Looks(pl.LightningModule):
    """Learns nothing, and keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, list[dict[str, torch.Tensor]]] = {"train": [], "val": [], "test": [], "predict": []}

    def training_step(self, batch, batch_idx):
        self.seen["train"].append(batch)
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch, batch_idx):
        self.seen["val"].append(batch)

    def test_step(self, batch, batch_idx):
        self.seen["test"].append(batch)

    def predict_step(self, batch, batch_idx):
        self.seen["predict"].append(batch)
        return batch["index"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_cifar_is_flipped_in_training_only(tmp_path, monkeypatch):
    """With `p: 1` each training picture comes mirrored at each epoch; all other stages see the files' own pixels."""
    random = np.random.RandomState(0)
    labels = np.arange(40) % 10
    sets = {name: Samples(random.randint(0, 256, (40, 32, 32, 3), np.uint8), labels) for name in ("train", "test")}
    monkeypatch.setattr(CIFAR10, "read", lambda self: dict(sets))
    monkeypatch.setattr(DataOfSets, "check", lambda self: None)
    (tmp_path / "c.yaml").write_text(CONFIG)
    data, task = init_module(load_config(tmp_path / "c.yaml"), "data"), Looks()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, num_sanity_val_steps=1, **quiet)
    trainer.fit(task, data)
    trainer.test(task, data, verbose=False)
    trainer.predict(task, data)
    seen = {stage: sum(len(batch["image"]) for batch in batches) for stage, batches in task.seen.items()}
    assert seen == {"train": 72, "val": 4 + 2 * 4, "test": 40, "predict": 40}
    for stage, batches in task.seen.items():
        dataset = data.dataset("test" if stage == "predict" else stage)
        for batch in batches:
            files = dataset.images[batch["index"]]
            assert torch.equal(batch["image"], files.flip(-1) if stage == "train" else files)
            assert not torch.equal(files, files.flip(-1))


@pytest.mark.parametrize("config", ["cifar10_resnet18", "cifar10_vit"])
def test_the_configs_of_cifar_flip(config):
    """Both shipped configs of CIFAR-10 name crop and flip."""
    cfg = load_config(Path(__file__).parents[2] / "configs" / f"{config}.yaml")
    kinds = [target["type"].rpartition(".")[2] for target in cfg.data.module.params["augment"]]
    assert kinds == ["RandomCrop", "RandomHorizontalFlip"]
