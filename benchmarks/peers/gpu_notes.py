"""Callbacks that a run of ours has in benchmarks/gpu.py: they print what the other scripts print, and take turns."""

import contextlib
import fcntl
import json
import time
from pathlib import Path

import pytorch_lightning as pl
import torch


def wait_for(device: torch.device) -> None:
    """Returns when a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Epochs(pl.Callback):
    """Prints the seconds and pictures of each epoch, without validation and checkpoint, and when the first step ended.

    The GPU is waited for at the first and last batch of an epoch alone.
    """

    def on_train_epoch_start(self, trainer, module):
        wait_for(trainer.strategy.root_device)
        self.begun = time.monotonic()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 1 and batch_idx == 0:
            print(f"first step at {time.monotonic():.3f}", flush=True)
        if batch_idx + 1 == trainer.num_training_batches:
            wait_for(trainer.strategy.root_device)
            seconds, pictures = time.monotonic() - self.begun, len(trainer.datamodule.dataset("train"))
            print(f"epoch {trainer.current_epoch} seconds {seconds:.4f} pictures {pictures}", flush=True)


class Turn(pl.Callback):
    """Trains only while no other run with this lock does, so that runs may start at the same time and are timed alone.

    Writes samples per second of all processes together, from the third step on, and the most bytes of this one.

    Args:
        lock: a file that the runs share.
        folder: for `RANK.json`.
    """

    def __init__(self, lock, folder):
        self.lock, self.folder = Path(lock), Path(folder)
        self.held = contextlib.ExitStack()

    def on_train_start(self, trainer, module):
        if trainer.global_rank == 0:  # the others wait for it at their first exchange
            file = self.held.enter_context(self.lock.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        trainer.strategy.barrier()
        self.samples = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            wait_for(trainer.strategy.root_device)
            self.begun = time.monotonic()
        elif batch_idx > 1:
            self.samples += len(batch["label"]) * trainer.world_size
        if trainer.global_step == trainer.max_steps:  # the checkpoint that follows is not timed
            wait_for(trainer.strategy.root_device)
            self.seconds = time.monotonic() - self.begun

    def on_train_end(self, trainer, module):
        device = trainer.strategy.root_device
        rate = self.samples / self.seconds
        most = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps({"rate": rate, "bytes": most}))
        self.held.close()
