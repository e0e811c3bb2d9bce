"""A network for rows of a table: embedded categories and numbers, then fully connected layers.

B batch, F columns of the table, O outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class TableNet(nn.Module):
    """A multilayer perceptron with residual blocks, after Gorishniy et al. 2021, https://arxiv.org/abs/2106.11959.

    Args:
        num_numbers: number of numeric columns, which come first in a row.
        cardinalities: number of values of each category column; these follow.
        num_outputs: O.
        width: width of the hidden layers.
        depth: number of residual blocks.
        embedding: maximum size of a category's embedding; columns with few values get a smaller one.
        dropout: probability of dropout of hidden units.

    Raises:
        ValueError: there are no columns, or a size is invalid.
    """

    def __init__(
        self,
        num_numbers: int,
        num_outputs: int,
        cardinalities: Sequence[int] = (),
        width: int = 128,
        depth: int = 2,
        embedding: int = 16,
        dropout: float = 0.1,
    ):
        super().__init__()
        if min(num_outputs, width, embedding) < 1 or min(num_numbers, depth) < 0:
            raise ValueError("num_outputs, width and embedding must be at least 1, num_numbers and depth at least 0")
        if num_numbers + len(cardinalities) < 1:
            raise ValueError("num_numbers and cardinalities are of no column at all")
        self.num_numbers = num_numbers
        sizes = [min(embedding, (cardinality + 1) // 2) for cardinality in cardinalities]
        self.embeddings = nn.ModuleList(
            nn.Embedding(cardinality, size) for cardinality, size in zip(cardinalities, sizes, strict=True)
        )
        self.first = nn.Linear(num_numbers + sum(sizes), width)
        self.blocks = nn.ModuleList(_block(width, dropout) for _ in range(depth))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, num_outputs))

    def forward(self, rows: Tensor) -> Tensor:
        """Return outputs (B, O) for rows, float32 (B, F).

        Raises:
            ValueError: the rows have another number of columns.
        """
        expected = self.num_numbers + len(self.embeddings)
        if rows.shape[1] != expected:
            raise ValueError(
                f"a row has {rows.shape[1]} columns, and the network takes {self.num_numbers} numbers and "
                f"{len(self.embeddings)} categories"
            )
        parts = [rows[:, : self.num_numbers]]
        for column, embed in enumerate(self.embeddings, self.num_numbers):
            parts.append(embed(rows[:, column].long()))
        hidden = self.first(torch.cat(parts, 1))  # (B, width)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


def _block(width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
    )
