"""A task of one's own: a network squeezes pictures through a few numbers and gives them back.

A task is a LightningModule that takes the whole config. It builds what the config names by `build`, and logs metrics as
`<stage>_<name>`. The command, checkpoints, tracking, several processes and resuming need no more of it.
"""

import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import MeanMetric

from deeplightning.config.target import build


class Reconstruction(pl.LightningModule):
    """Trains `model.network` to answer a picture with its own pixels, from 0 to 1, in one row.

    A batch is {"image": uint8 (B, C, H, W), "index": int64 (B,)}; rows with index -1 fill a batch up and do not count.
    """

    logged_metrics = ("train_loss", "val_loss", "test_loss")  # for `deeplightning check`, which runs nothing of it

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.network = build(cfg.model.network)
        self.loss = build(cfg.model.loss)
        # Exact over several processes, which the means of Lightning's own `self.log` are not (2.6).
        self.means = nn.ModuleDict({"val_loss": MeanMetric(), "test_loss": MeanMetric()})

    def training_step(self, batch, batch_idx):
        _, loss = self._judge(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self._count("val_loss", batch)

    def test_step(self, batch, batch_idx):
        self._count("test_loss", batch)

    def _judge(self, batch):
        """The pictures that count, (B, C, H, W) from 0 to 1, and their mean loss."""
        images = batch["image"][batch["index"] >= 0].float() / 255
        return images, self.loss(self.network(images), images.flatten(1))

    def _count(self, name, batch):
        images, loss = self._judge(batch)
        if len(images):  # of several processes, one may have none left in the last batch
            self.means[name].update(loss, len(images))
        self.log(name, self.means[name])

    def configure_optimizers(self):
        return build(self.cfg.model.optimizer, self.parameters())

    def pictures(self, stage):
        """What is shown in the run folder and in MLflow after a validation: (C, H, W), numbers from 0 to 1."""
        first = next(iter(self.trainer.val_dataloaders))["image"][:8].float().to(self.device) / 255  # (8, 1, H, W)
        with torch.no_grad():
            back = self.network(first).view_as(first).clamp(0, 1)
        rows = [torch.cat(list(pictures), dim=2) for pictures in (first, back)]  # (1, H, 8 W), originals on top
        return {f"{stage}_reconstruction": torch.cat(rows, dim=1).cpu()}
