"""Many pictures become one, for people to look at. C channels, H height, W width."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pytorch_lightning as pl

LARGE = 64
"""Pixels that the longer side of each picture should have on a sheet."""


def sheet(images: Tensor, columns: int = 4) -> Tensor:
    """Pictures, uint8 (n, C, H, W), n up to columns², on a square sheet, uint8 (C, columns s H, columns s W), on the
    CPU; small ones are enlarged, each pixel to s by s, and places that are left are black."""
    images = images[: columns**2].cpu()
    images = torch.cat([images, images.new_zeros((columns**2 - len(images), *images.shape[1:]))])
    scale = max(1, LARGE // max(images.shape[2:]))
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    return torch.cat([torch.cat(list(row), dim=2) for row in images.split(columns)], dim=1)


def epoch_suffix(task: "pl.LightningModule") -> str:
    """`_E` for the names of an epoch's pictures, E padded to the width of the epoch count; "" outside a training."""
    if task.trainer.state.fn != "fit":
        return ""
    return f"_{str(task.current_epoch).zfill(len(str(max(task.trainer.max_epochs or 1, 1))))}"
