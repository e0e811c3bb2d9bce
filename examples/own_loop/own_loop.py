"""A custom loop: explicit forward pass, loss, backward pass and step; gradients of four batches are accumulated, with
one process or several.

A task is a LightningModule that takes the whole config. With `automatic_optimization = False`, Lightning calls
`training_step` for each batch and ignores what it returns; the command, checkpoints, tracking, several processes and
resuming work as usual.
"""

import contextlib

import pytorch_lightning as pl
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from deeplightning.config.target import build


class OwnLoop(pl.LightningModule):
    """Trains `model.network` to classify pictures.

    A batch is {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}; rows with index -1 pad a batch
    and do not update_metrics.

    Args:
        cfg: the whole config.
        num_classes: K.
        accumulate: number of batches per optimizer step.
    """

    def __init__(self, cfg, num_classes: int, accumulate: int = 4):
        super().__init__()
        self.automatic_optimization = False
        self.cfg, self.accumulate = cfg, accumulate
        self.network = build(cfg.model.network)
        self.loss = build(cfg.model.loss)  # one value per row, (B,)
        self.metrics = torch.nn.ModuleDict(
            {
                f"{stage}_{name}": metric
                for stage in ("val", "test")
                for name, metric in (("loss", MeanMetric()), ("acc", MulticlassAccuracy(num_classes, average="micro")))
            }
        )

    # ---- training

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        losses, counts = self.row_losses(batch)
        loss = losses.sum() / counts.sum().clamp(min=1)
        first = batch_idx - batch_idx % self.accumulate
        num_batches = min(self.accumulate, self.trainer.num_training_batches - first)  # fewer in the last step
        is_last = batch_idx == first + num_batches - 1
        with contextlib.nullcontext() if is_last else self.no_sync():
            self.manual_backward(loss / num_batches)
        if is_last:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss)
        return {"loss": loss}

    def no_sync(self):
        """Skip gradient synchronization: the sum over the batches is synchronized once."""
        if self.trainer.world_size == 1:
            return contextlib.nullcontext()
        return self.trainer.strategy.block_backward_sync()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()  # not done by Lightning with manual optimization

    def configure_optimizers(self):
        optimizer = build(self.cfg.model.optimizer, self.parameters())
        return [optimizer], [build(self.cfg.model.scheduler, optimizer)]

    def row_losses(self, batch):
        """Return the loss of each row, (B,), 0 for rows that do not update_metrics, and whether each counts, (B,)."""
        counts = batch["index"] >= 0
        logits = self.network(batch["image"].float() / 255)
        return self.loss(logits, batch["label"]) * counts, counts

    # ---- validation and test

    def validation_step(self, batch, batch_idx):
        self.update_metrics("val", batch)

    def test_step(self, batch, batch_idx):
        self.update_metrics("test", batch)

    def update_metrics(self, stage, batch):
        counts = batch["index"] >= 0
        logits, labels = self.network(batch["image"].float() / 255)[counts], batch["label"][counts]
        if len(labels):  # with several processes, one may have no rows in the last batch
            self.metrics[f"{stage}_loss"].update(self.loss(logits, labels))
            self.metrics[f"{stage}_acc"].update(logits, labels)

    def on_validation_epoch_end(self):
        self.log("val_loss", self.metrics["val_loss"])
        self.log("val_acc", self.metrics["val_acc"])

    def on_test_epoch_end(self):
        self.log("test_loss", self.metrics["test_loss"])
        self.log("test_acc", self.metrics["test_acc"])
