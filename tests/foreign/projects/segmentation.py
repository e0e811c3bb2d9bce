"""Segmentation with collections of torchmetrics, a dropout and batch norm."""

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Grey pictures with a bright square, and its mask."""

    def __init__(self, count: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.places = torch.randint(0, 10, (count, 2), generator=generator)
        self.noise = 0.2 * torch.rand(count, 1, 16, 16, generator=generator)

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        mask = torch.zeros(16, 16, dtype=torch.long)
        row, column = self.places[index].tolist()
        mask[row : row + 6, column : column + 6] = 1
        return self.noise[index] + mask, mask


class SquaresData(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Squares(60, 0), batch_size=12, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Squares(24, 1), batch_size=12)

    def test_dataloader(self):
        return DataLoader(Squares(24, 2), batch_size=12)


class Segmentation(pl.LightningModule):
    def __init__(self, channels: int = 8, classes: int = 2, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(channels, classes, 1),
        )
        self.loss = nn.CrossEntropyLoss()
        metrics = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.classification.MulticlassAccuracy(classes, average="micro"),
                "iou": torchmetrics.classification.MulticlassJaccardIndex(classes),
            }
        )
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.net(pictures)

    def _step(self, batch, metrics):
        pictures, masks = batch
        outputs = self(pictures)
        metrics.update(outputs.argmax(1), masks)
        return self.loss(outputs, masks)

    def training_step(self, batch, batch_idx):
        loss = self._step(batch, self.train_metrics)
        self.log("train/loss", loss)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self._step(batch, self.val_metrics))
        self.log_dict(self.val_metrics)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self._step(batch, self.test_metrics))
        self.log_dict(self.test_metrics)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
