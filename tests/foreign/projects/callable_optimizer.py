"""A module that gets its network as an object, and its optimizer and schedule as callables."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, inputs: int = 8, hidden: int = 16, outputs: int = 3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))

    def forward(self, x):
        return self.layers(x)


class Rows(pl.LightningDataModule):
    def __init__(self, count: int = 200, batch_size: int = 20):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        rows = torch.randn(self.hparams.count, 8, generator=torch.Generator().manual_seed(1))
        self.rows = TensorDataset(rows, rows[:, :3].argmax(1))

    def train_dataloader(self):
        return DataLoader(self.rows, self.hparams.batch_size, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.rows, self.hparams.batch_size)

    test_dataloader = val_dataloader


class Model(pl.LightningModule):
    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ):
        super().__init__()
        self.net, self.make_optimizer, self.make_scheduler = net, optimizer, scheduler

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        self.log("val_loss", nn.functional.cross_entropy(outputs, y), prog_bar=True)
        self.log("val_acc", (outputs.argmax(1) == y).float().mean(), prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}
