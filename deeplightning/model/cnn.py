"""A small convolutional network for small pictures, such as MNIST.

B batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence

import torch
from torch import nn


class SimpleCNN(nn.Module):
    """Two blocks of 5x5 convolution (padding 2), ReLU and 2x2 max-pooling, 16 and 32 channels, then one linear layer.

    28,938 parameters for 10 classes and 1 channel at 28x28.

    Args:
        num_classes: K, at least 1.
        num_channels: C, at least 1.
        image_size: in pixels, one number for a square or [H, W]; at least 4, since each block halves it.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(self, num_classes: int, num_channels: int, image_size: int | Sequence[int] = 28):
        super().__init__()
        for name, number in (("num_classes", num_classes), ("num_channels", num_channels)):
            if not _is_whole(number) or number < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
        sides = image_size if isinstance(image_size, Sequence) else [image_size, image_size]
        if len(sides) != 2 or not all(_is_whole(side) and side >= 4 for side in sides):
            raise ValueError(
                "image_size must be one whole number or [height, width], each at least 4 because two poolings "
                f"quarter it, not {image_size!r}"
            )
        self.image_size = (sides[0], sides[1])
        self.features = nn.Sequential(
            nn.Conv2d(num_channels, 16, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 16, H/2, W/2)
            nn.Conv2d(16, 32, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 32, H/4, W/4)
        )
        self.classifier = nn.Linear(32 * (sides[0] // 4) * (sides[1] // 4), num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, float (B, K).

        Args:
            images: float (B, C, H, W).

        Raises:
            ValueError: the images do not have the network's `image_size`.
        """
        if images.shape[2:] != self.image_size:
            raise ValueError(
                f"the images are {images.shape[2]}x{images.shape[3]}, but this SimpleCNN was made for "
                f"{self.image_size[0]}x{self.image_size[1]}: give it image_size: [{images.shape[2]}, {images.shape[3]}]"
            )
        return self.classifier(self.features(images).flatten(1))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
