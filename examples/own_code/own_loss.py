"""A custom loss: a module that is called with the network's output and the true labels."""

import torch
from torch import nn


class FocalLoss(nn.Module):
    """Cross-entropy in which a sample has less weight, the more confident the network is (https://arxiv.org/abs/1708.02002).

    Args:
        gamma: exponent of the weight; 0 is cross-entropy.
    """

    def __init__(self, gamma: float = 2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Map logits (B, K) and labels, int64 (B,), to the mean loss of the batch, ()."""
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")  # (B,)
        return ((1 - torch.exp(-losses)) ** self.gamma * losses).mean()
