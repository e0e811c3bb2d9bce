"""Random augmentation of training images: batched operations on uint8 tensors, on the device that they are on.

Random numbers come from torch's global generator of that device, so nothing is copied. A seed gives the same images on
any number of devices of one kind, but different images on a GPU and on a CPU.
B batch, C channels, H height, W width.
"""

import torch
from torch import nn

from deeplightning.words import is_whole


class RandomHorizontalFlip(nn.Module):
    """Mirrors each image left to right with probability `p`, from 0 to 1."""

    def __init__(self, p: float = 0.5):
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must be a probability from 0 to 1, not {p!r}")
        self.p = p

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return augmented images, uint8 (B, C, H, W), like the input."""
        flipped = torch.rand(len(images), device=images.device) < self.p  # (B,)
        return torch.where(flipped[:, None, None, None], images.flip(-1), images)


class RandomCrop(nn.Module):
    """Shifts each image by up to `padding` pixels up or down and left or right; uncovered pixels become black."""

    def __init__(self, padding: int):
        super().__init__()
        if not is_whole(padding, 0):
            raise ValueError(f"padding must be a whole number of pixels, at least 0, not {padding!r}")
        self.padding = padding

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return augmented images, uint8 (B, C, H, W), like the input."""
        batch, _, height, width = images.shape
        tops, lefts = torch.randint(2 * self.padding + 1, (2, batch), device=images.device)
        padded = nn.functional.pad(images, [self.padding] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view (B, C, 2 padding + 1, 2 padding + 1, H, W)
        return windows[torch.arange(batch, device=images.device), :, tops, lefts]
