"""An autoencoder of digits that steps its optimizer itself."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
        parts = random_split(data, [320, 160, len(data) - 480], generator=torch.Generator().manual_seed(0))
        self.train, self.val, self.test = parts

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


class AutoEncoder(L.LightningModule):
    def __init__(self, hidden: int = 16, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU())
        self.decoder = nn.Linear(hidden, 64)
        self.example_input_array = torch.zeros(1, 64)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(self(x), x)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train/loss", loss, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.mse_loss(self(batch[0]), batch[0]), prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", nn.functional.mse_loss(self(batch[0]), batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
