"""Provide user code for the runs on GPUs: synthetic pictures, small networks, and callbacks that record or kill.

`gpu_runs.py` copies this file into the working directory of its runs. It needs only torch and Lightning.
"""

import itertools
import json
import os
import pathlib
import signal

import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn

from deeplightning.data.datasets import Samples
from deeplightning.data.images import ImageData, height_width
from deeplightning.image_spec import ImageSpec


class Synthetic(ImageData):
    """Noise with a bright spot at one of ten positions, which is the class; 80 % train, 10 % validation, 10 % test.

    Args:
        size: number of pictures in all sets together.
        image_size: height and width in pixels, a multiple of 8.
    """

    def __init__(self, cfg, size=300, image_size=8, **options):
        super().__init__(cfg, ImageSpec(*height_width(image_size), mode="L", mean=(0.5,), std=(0.25,)), **options)
        self.size, self.class_names = size, [str(number) for number in range(10)]

    def read(self):
        random, labels = np.random.RandomState(6), np.arange(self.size) % 10
        pictures = random.randint(60, size=(self.size, 8, 8)).astype(np.uint8)
        for picture, label in zip(pictures, labels, strict=True):
            row, column = 2 * (label // 4), 2 * (label % 4)
            picture[row : row + 2, column : column + 2] += 150
        times = self.image_spec.height // 8
        return {"all": Samples(pictures.repeat(times, 1).repeat(times, 2), labels.astype(np.int64))}


def network(width, depth=1, norm=False):
    """Build linear layers, whose results on CPU and GPU differ by at most a few millionths."""
    sizes = [64, *[width] * depth]
    layers = [nn.Flatten()]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def mixed():
    """Build convolution, batch norm with its buffers, dropout, layer norm and linear layers."""
    features = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*features, nn.Linear(512, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))


class TooLarge(nn.Module):
    """In training, allocate more memory on the input's device than any GPU has."""

    def __init__(self):
        super().__init__()
        self.layers = network(64)

    def forward(self, images):
        logits = self.layers(images)
        if self.training:
            logits = logits + torch.zeros(2**42, device=images.device, dtype=torch.float32).sum()  # 16 TiB
        return logits


class Notes(pl.Callback):
    """Write the device and the peak GPU memory of each process to `folder/RANK.json`."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def on_train_end(self, trainer, module):
        device = trainer.strategy.root_device
        noted = {"device": str(device), "bytes": torch.cuda.max_memory_allocated(device)}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(noted))


class Killed(pl.Callback):
    """Kill the process after the optimizer step that the environment variable KILL_AT names, if any."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == int(os.environ.get("KILL_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
