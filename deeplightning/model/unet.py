"""The U-Net, a network for semantic segmentation (Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597).

B batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from deeplightning.model.sizes import check_sizes, height_and_width


class UNet(nn.Module):
    """A contracting path of `depth` halvings and an expanding path, with skip connections at each size.

    Unlike the paper's, its convolutions are padded, so the output has the picture's size, and batch norm follows each.
    With the default width and depth it has 0.48 million parameters; the paper's is `width: 64, depth: 4`.

    Args:
        num_classes: K, at least 1.
        num_channels: C, at least 1.
        width: channels at full size; they double with each halving.
        depth: number of halvings, at least 1. 2**depth must divide a picture's height and width.
        image_size: in pixels, one number for a square or [H, W], to check the size when the network is built. None:
            check it in `forward`.

    Raises:
        ValueError: an argument is invalid.
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
        check_sizes(num_classes=num_classes, num_channels=num_channels, width=width, depth=depth)
        self.depth = depth
        if image_size is not None:
            self._check_size(*height_and_width("image_size", image_size))
        widths = [width * 2**level for level in range(depth + 1)]
        self.start = _double_convolution(num_channels, width)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _double_convolution(above, below)) for above, below in pairwise(widths)
        )
        upwards = widths[-2::-1]  # from the second smallest size to the picture's
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose2d(2 * channels, channels, kernel_size=2, stride=2) for channels in upwards
        )
        self.up = nn.ModuleList(_double_convolution(2 * channels, channels) for channels in upwards)
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of each pixel, float (B, K, H, W).

        Args:
            images: float (B, C, H, W).

        Raises:
            ValueError: H or W is not a multiple of 2**depth.
        """
        self._check_size(images.shape[2], images.shape[3])
        skips = [self.start(images)]  # (B, width, H, W)
        for down in self.down:
            skips.append(down(skips[-1]))  # (B, 2 width, H / 2, W / 2) …
        pixels = skips.pop()
        for enlarge, up in zip(self.enlarge, self.up, strict=True):
            pixels = up(torch.cat([skips.pop(), enlarge(pixels)], dim=1))
        return self.head(pixels)

    def _check_size(self, height: int, width: int) -> None:
        step = 2**self.depth
        if height % step or width % step:
            near = [max(step, round(side / step) * step) for side in (height, width)]
            raise ValueError(
                f"pictures of {height}x{width} pixels cannot be halved {self.depth} times: this UNet of depth "
                f"{self.depth} takes multiples of {step}, such as {near[0]}x{near[1]}"
            )


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3x3 convolutions, each with batch norm and ReLU: (B, inputs, H, W) → (B, outputs, H, W)."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)
