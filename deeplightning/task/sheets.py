"""Many pictures become one, for people to look at. C channels, H height, W width."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pytorch_lightning as pl

LARGE = 64
"""Pixels that the longer side of each picture should have on a sheet."""


def sheet(images: Tensor, columns: int = 4) -> Tensor:
    """Lay pictures, uint8 (n, C, H, W), n up to columns², on a square sheet, uint8 (C, columns s H, columns s W), on
    the CPU; small ones are enlarged, each pixel to s by s, and places that are left are black."""
    images = images[: columns**2].cpu()
    images = torch.cat([images, images.new_zeros((columns**2 - len(images), *images.shape[1:]))])
    scale = max(1, LARGE // max(images.shape[2:]))
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    return torch.cat([torch.cat(list(row), dim=2) for row in images.split(columns)], dim=1)


def keep_best(kept: dict[str, Tensor] | None, found: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the `count` samples that are worth most, of those kept before and of a batch; a batch whose pictures have
    another size than those kept is left out.

    Args:
        kept: columns by name, each of n samples: `worth` (n,), `image` (n, C, H, W) and others. None: a first batch.
        found: the columns of the batch.
    """
    if kept is not None and kept["image"].shape[1:] != found["image"].shape[1:]:
        return kept
    for before in (None, kept):  # first of the batch alone, which is large
        if before is not None:
            found = {name: torch.cat([before[name], column]) for name, column in found.items()}
        best = found["worth"].topk(min(count, len(found["worth"]))).indices
        found = {name: column[best] for name, column in found.items()}
    return found


def epoch_suffix(task: "pl.LightningModule") -> str:
    """Return `_E` for the names of an epoch's pictures, E padded to the count's width; "" outside a training."""
    if task.trainer.state.fn != "fit":
        return ""
    return f"_{str(task.current_epoch).zfill(len(str(max(task.trainer.max_epochs or 1, 1))))}"
