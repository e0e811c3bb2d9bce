"""A loss of one's own: a module that is called with what the network says and what is right."""

import torch
from torch import nn


class FocalLoss(nn.Module):
    """Cross-entropy that counts samples less the surer the network is of them (https://arxiv.org/abs/1708.02002).

    Args:
        gamma: 0 is cross-entropy.
    """

    def __init__(self, gamma: float = 2.0):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """logits (B, K), labels int64 (B,) → mean over the batch, ()."""
        surprise = nn.functional.cross_entropy(logits, labels, reduction="none")  # (B,)
        return ((1 - torch.exp(-surprise)) ** self.gamma * surprise).mean()
