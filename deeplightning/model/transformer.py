"""A small transformer that classifies short texts, trained from scratch.

B batch, L tokens, W width, H heads, K classes.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from deeplightning.model.attention import Block
from deeplightning.model.sizes import check_sizes


class TextTransformer(nn.Module):
    """The encoder of Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762) with pre-norm (Xiong et al. 2020,
    https://arxiv.org/abs/2002.04745): embeddings, sinusoidal positions, layers of attention and feed-forward, and one
    linear layer on the pooled states. Padding is masked, so more of it does not change the output.

    Args:
        num_classes: K, at least 1.
        vocabulary_size: number of different tokens; may be larger than the data's.
        width: W, a multiple of 2 and of num_heads.
        num_layers: at least 1.
        num_heads: H, at least 1.
        hidden: width of the hidden feed-forward layers; None: 4 W.
        dropout: probability of dropout, from 0 to 1.
        pooling: classify the mean over a text's tokens ("mean") or its last token ("end").
        max_length: maximum number of tokens of a text; the memory of attention grows with its square.
        padding: token that is masked.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        num_classes: int,
        vocabulary_size: int,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        hidden: int | None = None,
        dropout: float = 0.1,
        pooling: Literal["mean", "end"] = "mean",
        max_length: int = 512,
        padding: int = 0,
    ):
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        check_sizes(num_classes=num_classes, vocabulary_size=vocabulary_size, width=width, num_layers=num_layers)
        check_sizes(num_heads=num_heads, hidden=hidden, max_length=max_length)
        if width % num_heads or width % 2:
            raise ValueError(f"width must be a multiple of 2 and of num_heads ({num_heads}), not {width}")
        if pooling not in ("mean", "end"):
            raise ValueError(f"pooling must be mean or end, not {pooling!r}")
        if not 0 <= padding < vocabulary_size:
            raise ValueError(f"padding must be a token, from 0 to {vocabulary_size - 1}, not {padding!r}")
        self.vocabulary_size, self.max_length, self.padding = vocabulary_size, max_length, padding
        self.width, self.pooling = width, pooling
        self.embedding = nn.Embedding(vocabulary_size, width, padding_idx=padding)
        with torch.no_grad():  # scaled embeddings then have the magnitude of the positions, as in the paper
            self.embedding.weight.mul_(width**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(width, num_heads, hidden, dropout, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, float (B, K).

        Args:
            tokens: int64 (B, L).

        Raises:
            ValueError: there are more tokens than `max_length`.
        """
        if tokens.shape[1] > self.max_length:
            raise ValueError(f"a text has {tokens.shape[1]} tokens, and max_length is {self.max_length}")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        # The first token always counts, since an empty text has no mean.
        seen = (tokens != self.padding) | (positions == 0)  # (B, L)
        embedded = self.embedding(tokens) * math.sqrt(self.width)
        states = self.dropout(embedded + self._position_encoding(positions).to(embedded.dtype))  # (B, L, W)
        for layer in self.layers:
            states = layer(states, seen[:, None, None, :])
        states = self.norm(states)
        if self.pooling == "mean":
            weights = seen.to(states.dtype)[:, :, None]
            pooled = (states * weights).sum(1) / weights.sum(1)  # (B, W)
        else:
            last = seen.sum(1, keepdim=True) - 1  # (B, 1)
            pooled = (states * (positions == last).to(states.dtype)[:, :, None]).sum(1)
        return self.classifier(self.dropout(pooled))

    def _position_encoding(self, positions: Tensor) -> Tensor:
        """Return sinusoidal position encodings, float (L, W), the sines first (section 3.5 of Vaswani et al.)."""
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # the default may have 16 bits
        halves = torch.arange(self.width // 2, device=positions.device, dtype=dtype)
        angles = positions[:, None] * torch.exp(halves * (-2 * math.log(10_000) / self.width))  # (L, W / 2)
        return torch.cat([angles.sin(), angles.cos()], 1)
