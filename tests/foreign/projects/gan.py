"""A GAN of points on a ring, as Lightning's manual writes one: two optimizers, each with its networks alone."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.LeakyReLU(0.2), nn.Linear(16, outputs))


class GAN(pl.LightningModule):
    def __init__(self, latent_dim: int = 4, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = network(latent_dim, 2), network(2, 1)
        self.validation_z = torch.randn(8, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def train_dataloader(self):
        angles = torch.linspace(0, 6.28, 160)
        return DataLoader(TensorDataset(torch.stack([angles.cos(), angles.sin()], 1)), batch_size=20, shuffle=True)

    def training_step(self, batch):
        (points,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(points), self.hparams.latent_dim).type_as(points)
        real, fake = torch.ones(len(points), 1).type_as(points), torch.zeros(len(points), 1).type_as(points)

        self.toggle_optimizer(optimizer_g)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self(z)), real)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        on_real = F.binary_cross_entropy_with_logits(self.discriminator(points), real)
        on_fake = F.binary_cross_entropy_with_logits(self.discriminator(self(z).detach()), fake)
        d_loss = (on_real + on_fake) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        betas = (self.hparams.b1, self.hparams.b2)
        optimizers = [
            torch.optim.Adam(net.parameters(), lr=self.hparams.lr, betas=betas)
            for net in (self.generator, self.discriminator)
        ]
        return optimizers, []
