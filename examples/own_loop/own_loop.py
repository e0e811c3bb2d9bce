"""A loop of one's own: forward, loss, backward and step stand here, line by line; gradients of four batches are added
up by hand, on one process or several.

A task is a LightningModule that takes the whole config. With `automatic_optimization = False` Lightning calls
`training_step` for each batch and does nothing with what it returns; the command, checkpoints, tracking, several
processes and resuming stay as they are.
"""

import contextlib

import pytorch_lightning as pl
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from deeplightning.config.target import build


class OwnLoop(pl.LightningModule):
    """Teaches `model.network` to tell pictures apart.

    A batch is {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}; rows with index -1 fill a batch
    up and do not count.

    Args:
        cfg: the whole config.
        num_classes: K.
        accumulate: batches for each optimizer step.
    """

    def __init__(self, cfg, num_classes: int, accumulate: int = 4):
        super().__init__()
        self.automatic_optimization = False
        self.cfg, self.accumulate = cfg, accumulate
        self.network = build(cfg.model.network)
        self.loss = build(cfg.model.loss)  # (B,): one for each row
        self.metrics = torch.nn.ModuleDict(
            {
                f"{stage}_{name}": metric
                for stage in ("val", "test")
                for name, metric in (("loss", MeanMetric()), ("acc", MulticlassAccuracy(num_classes, average="micro")))
            }
        )

    # ---- learning

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        losses, counts = self.judge(batch)
        loss = losses.sum() / counts.sum().clamp(min=1)
        first = batch_idx - batch_idx % self.accumulate
        together = min(self.accumulate, self.trainer.num_training_batches - first)  # an epoch's last ones may be fewer
        is_last = batch_idx == first + together - 1
        with contextlib.nullcontext() if is_last else self.alone():
            self.manual_backward(loss / together)
        if is_last:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.log("train_loss", loss)
        return {"loss": loss}

    def alone(self):
        """Leaves gradients to this process, where there are several: those of four batches are sent once."""
        if self.trainer.world_size == 1:
            return contextlib.nullcontext()
        return self.trainer.strategy.block_backward_sync()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()  # nobody else does

    def configure_optimizers(self):
        optimizer = build(self.cfg.model.optimizer, self.parameters())
        return [optimizer], [build(self.cfg.model.scheduler, optimizer)]

    def judge(self, batch):
        """The loss of each row, (B,), 0 for those that do not count, and whether it counts, (B,)."""
        counts = batch["index"] >= 0
        logits = self.network(batch["image"].float() / 255)
        return self.loss(logits, batch["label"]) * counts, counts

    # ---- judging

    def validation_step(self, batch, batch_idx):
        self.count("val", batch)

    def test_step(self, batch, batch_idx):
        self.count("test", batch)

    def count(self, stage, batch):
        counts = batch["index"] >= 0
        logits, labels = self.network(batch["image"].float() / 255)[counts], batch["label"][counts]
        if len(labels):  # of several processes, one may have none left in the last batch
            self.metrics[f"{stage}_loss"].update(self.loss(logits, labels))
            self.metrics[f"{stage}_acc"].update(logits, labels)

    def on_validation_epoch_end(self):
        self.log("val_loss", self.metrics["val_loss"])
        self.log("val_acc", self.metrics["val_acc"])

    def on_test_epoch_end(self):
        self.log("test_loss", self.metrics["test_loss"])
        self.log("test_acc", self.metrics["test_acc"])
