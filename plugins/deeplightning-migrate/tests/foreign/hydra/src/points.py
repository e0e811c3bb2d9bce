"""Modules in the layout of the Lightning-Hydra template."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Dense(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)


class PointsData(pl.LightningDataModule):
    """Points whose class is the sign of their sum."""

    def __init__(self, data_dir: str = "data/", batch_size: int = 16, train_val_test_split=(60, 20, 16)):
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage=None):
        sizes = self.hparams.train_val_test_split
        x = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(1))
        points = TensorDataset(x, (x.sum(1) > 0).long())
        parts = torch.utils.data.random_split(points, sizes, torch.Generator().manual_seed(42))
        self.train, self.val, self.test = parts

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, self.hparams.batch_size)


class PointsTask(pl.LightningModule):
    """Gets its network as an object, optimizer and schedule as partials, and compiles if asked to."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, scheduler, compile: bool):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.accuracy = MulticlassAccuracy(2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.accuracy(logits, y)
        self.log("val/loss", nn.functional.cross_entropy(logits, y))
        self.log("val/acc", self.accuracy)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("test/acc", self.accuracy)

    def setup(self, stage):
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
