"""Networks of one's own: plain modules with plain keyword arguments, which are the `params` of the config."""

import torch
from torch import nn


class Perceptron(nn.Module):
    """Two linear layers.

    Args:
        inputs: numbers of a picture, channels x height x width.
        outputs: numbers of an answer, for classes their number.
        width: of the layer between.
    """

    def __init__(self, inputs: int, outputs: int, width: int = 64):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float (B, C, H, W) → float (B, outputs); for classes these are logits, no softmax."""
        return self.layers(images)
