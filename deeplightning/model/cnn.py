"""A small convolutional network for small pictures, such as MNIST.

B batch, C channels, H height, W width, K classes.
"""

from collections.abc import Sequence

import torch
from torch import nn

from deeplightning.model.sizes import check_pictures, check_sizes, height_and_width


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
        check_sizes(num_classes=num_classes, num_channels=num_channels)
        self.image_size = height, width = height_and_width("image_size", image_size, least=4)
        self.features = nn.Sequential(
            nn.Conv2d(num_channels, 16, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 16, H/2, W/2)
            nn.Conv2d(16, 32, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 32, H/4, W/4)
        )
        self.classifier = nn.Linear(32 * (height // 4) * (width // 4), num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, float (B, K).

        Args:
            images: float (B, C, H, W).

        Raises:
            ValueError: the images do not have the network's `image_size`.
        """
        check_pictures(self, images, self.image_size)
        return self.classifier(self.features(images).flatten(1))
