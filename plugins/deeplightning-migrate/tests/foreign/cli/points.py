"""Modules as Lightning's manual shows them for LightningCLI: plain arguments, nothing of Deep Lightning."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    """A hidden layer with dropout."""

    def __init__(self, width: int = 8, activation: str = "relu", dropout: float = 0.0):
        super().__init__()
        self.layer, self.activation = nn.Linear(4, width), getattr(torch, activation)
        self.dropout = nn.Dropout(dropout)
        self.width = width

    def forward(self, x):
        return self.dropout(self.activation(self.layer(x)))


class Points(pl.LightningDataModule):
    """Points whose class is the sign of their sum."""

    def __init__(self, batch_size: int = 16, samples: int = 96):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        x = torch.randn(self.hparams.samples, 4, generator=torch.Generator().manual_seed(1))
        self.points = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.points, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.points, self.hparams.batch_size)


class Plain(pl.LightningModule):
    """Builds its network and optimizer from numbers."""

    def __init__(self, hidden: int = 4, lr: float = 1e-3, dropout: float = 0.0):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = Encoder(hidden, dropout=dropout)
        self.head = nn.Linear(hidden, 2)

    def forward(self, x):
        return self.head(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Composed(Plain):
    """Gets its network as an object, and optimizer and schedule as callables."""

    def __init__(
        self,
        encoder: nn.Module,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ):
        pl.LightningModule.__init__(self)
        self.encoder, self.optimizer, self.scheduler = encoder, optimizer, scheduler
        self.head = nn.Linear(encoder.width, 2)

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


class Shrink(pl.Callback):
    """Multiplies all weights by a factor at the end of each epoch."""

    def __init__(self, factor: float = 1.0):
        self.factor = factor

    def on_train_epoch_end(self, trainer, pl_module):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(self.factor)


class Alternating(Composed):
    """Steps two optimizers manually, one for each of its networks."""

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        optimizer1: OptimizerCallable = torch.optim.Adagrad,
        optimizer2: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ):
        pl.LightningModule.__init__(self)
        self.automatic_optimization = False
        self.encoder, self.head = encoder, head
        self.optimizer1, self.optimizer2, self.scheduler = optimizer1, optimizer2, scheduler

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(x), y))
            optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        first, second = self.optimizer1(self.encoder.parameters()), self.optimizer2(self.head.parameters())
        return [first, second], [self.scheduler(first)]
