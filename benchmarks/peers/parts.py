"""The parts of configs/base.yaml as users of LightningCLI and Hydra write them: a data module and a task with plain
arguments. The network is ours, which is a plain module."""

import pytorch_lightning as pl
import pytorch_lightning.cli
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningDataModule):
    """scikit-learn's handwritten digits, float (B, 1, 8, 8) with labels int64 (B,), split 80/10/10."""

    def __init__(self, batch_size: int, num_workers: int = 0):
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        whole = TensorDataset(pixels, torch.tensor(digits.target))
        shuffled = torch.Generator().manual_seed(42)
        self.parts = torch.utils.data.random_split(whole, [0.8, 0.1, 0.1], shuffled)

    def _loader(self, part: int) -> DataLoader:
        return DataLoader(self.parts[part], self.batch_size, shuffle=part == 0, num_workers=self.num_workers)

    def train_dataloader(self) -> DataLoader:
        return self._loader(0)

    def val_dataloader(self) -> DataLoader:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader:
        return self._loader(2)


class Classifier(pl.LightningModule):
    """Trains a network to tell classes apart.

    Args:
        network: pictures (B, C, H, W) to logits (B, K).
        loss: logits and labels to a number.
        optimizer: called with the parameters.
        scheduler: called with the optimizer.
        interval: the scheduler steps after each `epoch` or `step`.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: pl.cli.OptimizerCallable,
        scheduler: pl.cli.LRSchedulerCallable,
        interval: str = "epoch",
    ):
        super().__init__()
        self.network, self.loss = network, loss
        self.optimizer, self.scheduler, self.interval = optimizer, scheduler, interval

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return self.loss(self.network(images), labels)

    def validation_step(self, batch, batch_idx):
        self._judge(batch, "val")

    def test_step(self, batch, batch_idx):
        self._judge(batch, "test")

    def _judge(self, batch, stage: str) -> None:
        images, labels = batch
        logits = self.network(images)
        self.log(f"{stage}_loss", self.loss(logits, labels))
        self.log(f"{stage}_acc", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [{"scheduler": self.scheduler(optimizer), "interval": self.interval}]
