"""A custom network: a plain module with plain keyword arguments, which are the `params` in the config."""

import torch
from torch import nn


class Perceptron(nn.Module):
    """Two linear layers.

    Args:
        inputs: number of values in a picture, channels x height x width.
        outputs: number of outputs, such as the number of classes.
        width: size of the hidden layer.
    """

    def __init__(self, inputs: int, outputs: int, width: int = 64):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map float (B, C, H, W) to float (B, outputs); for classes these are logits, without softmax."""
        return self.layers(images)
