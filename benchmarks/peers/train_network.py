"""The networks that benchmarks/train.py trains, in every program the same. Nothing but torch is imported for them.

Shapes: N pictures, C channels, H height, W width, K classes.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Small(nn.Module):
    """Pictures (N, C, size, size) to logits (N, 10): two convolutions, two linear layers; 102,130 parameters for one
    channel of 28 pixels."""

    def __init__(self, channels: int = 1, size: int = 28):
        super().__init__()
        side = ((size - 2) // 2 - 2) // 2
        self.first, self.second = nn.Conv2d(channels, 16, 3), nn.Conv2d(16, 32, 3)
        self.hidden, self.last = nn.Linear(32 * side * side, 120), nn.Linear(120, 10)

    def forward(self, images: Tensor) -> Tensor:
        images = F.max_pool2d(F.relu(self.first(images)), 2)
        images = F.max_pool2d(F.relu(self.second(images)), 2)
        return self.last(F.relu(self.hidden(images.flatten(1))))


class Two(nn.Module):
    """Pictures of one pixel (N, 1, 1, 1) to logits (N, 2) by two parameters: a step is nothing but its overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(1, 2, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.weigh(images.flatten(1))


def build(name: str, seed: int) -> nn.Module:
    """`small`, `small32` (three channels of 32 pixels), `two` or `resnet18` with the weights that a run of ours starts
    from: its `deeplightning.callbacks.random_state.seed_all(seed, 0)`, in three lines."""
    high, low = np.random.SeedSequence([seed, 0]).generate_state(2)
    torch.manual_seed(int(high) << 32 | int(low))
    if name == "resnet18":
        from torchvision.models import resnet18

        return resnet18(num_classes=10)
    return {"small": Small, "small32": lambda: Small(3, 32), "two": Two}[name]()
