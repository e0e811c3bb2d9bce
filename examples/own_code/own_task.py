"""A custom task: an autoencoder compresses pictures to a few numbers and reconstructs them.

A task is a LightningModule that takes the whole config. It creates the objects of the config with `build`, and logs
metrics as `<stage>_<name>`. The command, checkpoints, tracking, several processes and resuming require nothing else.
"""

import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import MeanMetric

from deeplightning.config.target import build


class Reconstruction(pl.LightningModule):
    """Trains `model.network` to predict the pixels of its input picture, from 0 to 1, as a vector.

    A batch is {"image": uint8 (B, C, H, W), "index": int64 (B,)}; rows with index -1 pad a batch and do not count.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.network = build(cfg.model.network)
        self.loss = build(cfg.model.loss)
        # Exact over several processes, unlike the means of Lightning's `self.log` (2.6).
        self.means = nn.ModuleDict({"val_loss": MeanMetric(), "test_loss": MeanMetric()})

    def training_step(self, batch, batch_idx):
        _, loss = self._loss_of(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self._update("val_loss", batch)

    def test_step(self, batch, batch_idx):
        self._update("test_loss", batch)

    def _loss_of(self, batch):
        """Return the pictures that count, (B, C, H, W) from 0 to 1, and their mean loss."""
        images = batch["image"][batch["index"] >= 0].float() / 255
        return images, self.loss(self.network(images), images.flatten(1))

    def _update(self, name, batch):
        images, loss = self._loss_of(batch)
        if len(images):  # with several processes, one may have no pictures in the last batch
            self.means[name].update(loss, len(images))
        self.log(name, self.means[name])

    def configure_optimizers(self):
        return build(self.cfg.model.optimizer, self.parameters())

    def pictures(self, stage):
        """Return pictures for the run folder and MLflow after a validation: (C, H, W), values from 0 to 1."""
        first = next(iter(self.trainer.val_dataloaders))["image"][:8].float().to(self.device) / 255  # (8, 1, H, W)
        with torch.no_grad():
            restored = self.network(first).view_as(first).clamp(0, 1)
        rows = [torch.cat(list(pictures), dim=2) for pictures in (first, restored)]  # (1, H, 8 W), originals on top
        return {f"{stage}_reconstruction": torch.cat(rows, dim=1).cpu()}
