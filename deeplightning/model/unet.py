"""The U-Net: a class for each pixel, from what is near it and what the whole picture shows (Ronneberger et al. 2015,
https://arxiv.org/abs/1505.04597).

B batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


class UNet(nn.Module):
    """A way down of `depth` halvings and a way up that is joined, at each size, by what the way down had there.

    Unlike the paper's, its convolutions pad, so that the answer has the picture's size, and batch norm follows each.
    With its default width and depth it has 0.48 million parameters; the paper's is `width: 64, depth: 4`.

    Args:
        num_classes: K, at least 1.
        num_channels: C, at least 1.
        width: channels at full size; they double with each halving.
        depth: halvings, at least 1. Pictures have a height and a width that 2**depth divides.
        image_size: pixels, one number for a square or [H, W], to have them checked when the network is built. None:
            they are checked when a picture comes.

    Raises:
        ValueError: if an argument is impossible.
    """

    def __init__(
        self,
        num_classes: int,
        num_channels: int = 3,
        width: int = 16,
        depth: int = 3,
        image_size: int | Sequence[int] | None = None,
    ):
        super().__init__()
        for name, number in (
            ("num_classes", num_classes),
            ("num_channels", num_channels),
            ("width", width),
            ("depth", depth),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
        self.depth = depth
        if image_size is not None:
            sides = image_size if isinstance(image_size, Sequence) else [image_size, image_size]
            if len(sides) != 2 or not all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sides):
                raise ValueError(f"image_size must be null, one whole number or [height, width], not {image_size!r}")
            self._check_size(*sides)
        widths = [width * 2**level for level in range(depth + 1)]
        self.start = _twice(num_channels, width)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _twice(above, below)) for above, below in pairwise(widths)
        )
        upwards = widths[-2::-1]  # from the smallest size but one to the picture's
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose2d(2 * channels, channels, kernel_size=2, stride=2) for channels in upwards
        )
        self.up = nn.ModuleList(_twice(2 * channels, channels) for channels in upwards)
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """
        Args:
            images: float (B, C, H, W).

        Returns:
            Logits of each pixel, float (B, K, H, W).

        Raises:
            ValueError: if H or W is no multiple of 2**depth.
        """
        self._check_size(images.shape[2], images.shape[3])
        found = [self.start(images)]  # (B, width, H, W)
        for down in self.down:
            found.append(down(found[-1]))  # (B, 2 width, H / 2, W / 2) …
        pixels = found.pop()
        for enlarge, up in zip(self.enlarge, self.up, strict=True):
            pixels = up(torch.cat([found.pop(), enlarge(pixels)], dim=1))
        return self.head(pixels)

    def _check_size(self, height: int, width: int) -> None:
        step = 2**self.depth
        if height % step or width % step:
            near = [max(step, round(side / step) * step) for side in (height, width)]
            raise ValueError(
                f"pictures of {height}x{width} pixels cannot be halved {self.depth} times: this UNet of depth "
                f"{self.depth} takes sizes that {step} divides, such as {near[0]}x{near[1]}"
            )


def _twice(given: int, made: int) -> nn.Sequential:
    """Two convolutions of 3x3, each with batch norm and ReLU: (B, given, H, W) → (B, made, H, W)."""
    layers: list[nn.Module] = []
    for channels in (given, made):
        layers += [
            nn.Conv2d(channels, made, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(made),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
