"""A transformer block, used by networks for pictures and for texts.

B batch, T tokens, D width.
"""

from torch import Tensor, nn


class Block(nn.Module):
    """Attention, then an MLP, each with layer norm before it and a residual connection.

    Args:
        width: D.
        heads: number of heads; divides `width`.
        mlp_width: width of the MLP's hidden layer.
        dropout: probability.
        attention_dropout: see `Attention`.
    """

    def __init__(self, width: int, heads: int, mlp_width: int, dropout: float, attention_dropout: float = 0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, attention_dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width), nn.GELU(), nn.Dropout(dropout), nn.Linear(mlp_width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map tokens, float (B, T, D), to the same shape; `mask`, bool (B, 1, 1, T), is true for the attended ones."""
        tokens = tokens + self.dropout(self.attention(self.norm1(tokens), mask))
        return tokens + self.dropout(self.mlp(self.norm2(tokens)))


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    Args:
        width: D.
        heads: number of heads; divides `width`.
        dropout: probability with which attention ignores a token in training.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.head_width, self.dropout_p = width // heads, dropout
        self.asked = nn.Linear(width, 3 * width)  # queries, keys and values, side by side
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map tokens, float (B, T, D), to the same shape; `mask` as in `Block`."""
        # (B, T, 3, heads, D / heads)
        projected = self.asked(tokens).unflatten(2, (3, -1, self.head_width))
        queries, keys, values = projected.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, T, D / heads)
        dropout = self.dropout_p if self.training else 0.0
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
        return self.out(attended.transpose(1, 2).flatten(2))
