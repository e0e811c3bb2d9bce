"""The same training by Lightning's Trainer, tracked by its MLFlowLogger: train_lightning.py --data FOLDER …

Its two classes are what train_cli.py gives to LightningCLI, too.
"""

import argparse
import math

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import MLFlowLogger
from torch.nn import functional as F
from train_data import Batches, loaders
from train_network import build


class Classifier(pl.LightningModule):
    """Trains one of the networks to tell classes apart."""

    def __init__(self, network: str = "small", seed: int = 0, lr: float = 0.05, momentum: float = 0.9):
        super().__init__()
        self.save_hyperparameters()
        self.network = build(network, seed)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.network(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum)


class Data(pl.LightningDataModule):
    """Loaders as a script has them."""

    def __init__(self, folder: str, seed: int = 0, batch_size: int = 64, workers: int = 0, in_memory: bool = False):
        super().__init__()
        self.where, self.workers, self.in_memory = (folder, seed, batch_size), workers, in_memory

    def setup(self, stage: str) -> None:
        if self.in_memory:
            self.sets = [Batches(*self.where, "cpu", learn) for learn in (True, False)]
        else:
            self.sets = loaders(*self.where, self.workers)

    def train_dataloader(self):
        return self.sets[0]

    def val_dataloader(self):
        return self.sets[1]


def main():
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--data")
    words.add_argument("--store", help="an SQLite file")
    words.add_argument("--network", default="small")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--batch-size", type=int, default=64)
    words.add_argument("--epochs", type=int, default=3)
    words.add_argument("--max-steps", type=int, default=-1)
    words.add_argument("--device", default="cpu")
    words.add_argument("--workers", type=int, default=0)
    words.add_argument("--in-memory", action="store_true")
    given = words.parse_args()
    pl.seed_everything(given.seed)
    trainer = pl.Trainer(
        accelerator="gpu" if given.device == "cuda" else "cpu",
        devices=1,
        max_epochs=given.epochs,
        max_steps=given.max_steps,
        log_every_n_steps=10,
        logger=MLFlowLogger("benchmark", tracking_uri=f"sqlite:///{given.store}"),
        callbacks=[ModelCheckpoint(dirpath="checkpoints")],
    )
    data = Data(given.data, given.seed, given.batch_size, given.workers, given.in_memory)
    trainer.fit(Classifier(given.network, given.seed), data)
    print(f"val_acc {trainer.callback_metrics.get('val_acc', math.nan):.4f}")  # stopped early, there is none


if __name__ == "__main__":
    main()
