"""A contrastive encoder: a batch has two views of each sample, and the loss is InfoNCE."""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    def __init__(self, start: int, stop: int):
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images[start:stop], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[start:stop])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        views = [image + 0.1 * torch.randn_like(image) for _ in range(2)]
        return views, self.labels[index]


class ViewsData(pl.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Views(0, 320), batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(Views(320, 480), batch_size=self.batch_size)


class Contrastive(pl.LightningModule):
    def __init__(self, encoder: nn.Module, temperature=0.2, lr=0.01, max_epochs=2):
        super().__init__()
        self.save_hyperparameters(ignore=["encoder"])
        self.encoder = encoder

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.hparams.max_epochs)
        return [optimizer], [schedule]

    def info_nce(self, batch, mode="train"):
        views, _ = batch
        features = nn.functional.normalize(self.encoder(torch.cat(views)), dim=1)
        similar = features @ features.T / self.hparams.temperature
        similar = similar.masked_fill(torch.eye(len(similar), dtype=torch.bool, device=similar.device), -9e15)
        other = torch.arange(len(similar), device=similar.device).roll(len(similar) // 2)
        loss = nn.functional.cross_entropy(similar, other)
        self.log(mode + "_loss", loss)
        self.log(mode + "_acc_top1", (similar.argmax(1) == other).float().mean())
        return loss

    def training_step(self, batch, batch_idx):
        return self.info_nce(batch)

    def validation_step(self, batch, batch_idx):
        self.info_nce(batch, mode="val")
