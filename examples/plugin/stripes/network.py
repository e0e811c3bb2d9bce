"""Network `type: StripeNet`."""

from torch import Tensor, nn


class StripeNet(nn.Module):
    """One convolution, the log of the mean square of each filter over the picture, and a linear layer.

    Args:
        num_classes: K.
        filters: number of filters.
    """

    def __init__(self, num_classes: int, filters: int = 16):
        super().__init__()
        self.filters = nn.Conv2d(1, filters, 7, padding=3)
        self.classifier = nn.Linear(filters, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map pictures (N, 1, H, W) to logits (N, K)."""
        strength = self.filters(images).square().mean((2, 3))  # (N, filters)
        return self.classifier((strength + 1e-6).log())
