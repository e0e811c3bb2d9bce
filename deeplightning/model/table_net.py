"""A network for rows of a table: embedded categories and numbers, then a linear layer beside fully connected ones.

B batch, F columns of the table, M members, O outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deeplightning.model.sizes import check_sizes


class TableNet(nn.Module):
    """A linear layer plus an ensemble of multilayer perceptrons that share their hidden layers (wide and deep, Cheng et
    al. 2016, https://arxiv.org/abs/1606.07792; TabM, Gorishniy et al. 2025, https://arxiv.org/abs/2410.24210).

    Each member multiplies the inputs by factors of its own and has output weights of its own. In training, each row
    goes through one member, drawn at random, so that the loss is that of single members; otherwise the output is the
    mean of all members. Linear layer and output weights begin at zero: the network begins as a linear model.

    Args:
        num_numbers: number of numeric columns, which come first in a row.
        cardinalities: number of values of each category column; these follow.
        num_outputs: O.
        width: width of the hidden layers.
        depth: number of residual blocks.
        embedding: maximum size of a category's embedding; columns with few values get a smaller one.
        dropout: probability of dropout of hidden units.
        members: M; with 1, a single network.

    Raises:
        ValueError: there are no columns, or a size is invalid.
    """

    def __init__(
        self,
        num_numbers: int,
        num_outputs: int,
        cardinalities: Sequence[int] = (),
        width: int = 64,
        depth: int = 1,
        embedding: int = 16,
        dropout: float = 0.1,
        members: int = 8,
    ):
        super().__init__()
        check_sizes(num_outputs=num_outputs, width=width, embedding=embedding, members=members)
        if min(num_numbers, depth) < 0 or num_numbers + len(cardinalities) < 1:
            raise ValueError("num_numbers and depth must be at least 0, and there must be a column")
        self.num_numbers, self.members = num_numbers, members
        sizes = [min(embedding, (cardinality + 1) // 2) for cardinality in cardinalities]
        embeddings = [nn.Embedding(*each) for each in zip(cardinalities, sizes, strict=True)]
        self.embeddings = nn.ModuleList(embeddings)
        inputs = num_numbers + sum(sizes)
        self.linear = nn.Linear(inputs, num_outputs)
        for values in (*self.linear.parameters(), *(each.weight.data[:1] for each in embeddings)):
            nn.init.zeros_(values)  # code 0, which no training row may have, begins without effect
        self.factors = nn.Parameter(1 + torch.randn(members, inputs) * (members > 1))
        self.hidden = nn.Sequential(
            nn.Linear(inputs, width), *(_Block(width, dropout) for _ in range(depth)), nn.LayerNorm(width), nn.ReLU()
        )
        self.weights = nn.Parameter(torch.zeros(members, width, num_outputs))

    def forward(self, rows: Tensor) -> Tensor:
        """Return outputs (B, O) for rows, float32 (B, F).

        Raises:
            ValueError: the rows have the wrong number of columns.
        """
        expected = self.num_numbers + len(self.embeddings)
        if rows.shape[1] != expected:
            raise ValueError(
                f"a row has {rows.shape[1]} columns, but the network takes {self.num_numbers} numbers and "
                f"{len(self.embeddings)} categories"
            )
        parts = [rows[:, : self.num_numbers]]
        for column, embed in enumerate(self.embeddings, self.num_numbers):
            parts.append(embed(rows[:, column].long()))
        inputs = torch.cat(parts, 1)
        if self.training:
            member = torch.randint(self.members, (len(rows),), device=rows.device)
            hidden = self.hidden(inputs * self.factors[member])  # (B, width)
            return self.linear(inputs) + (hidden.unsqueeze(1) @ self.weights[member]).squeeze(1)
        hidden = self.hidden(inputs * self.factors.unsqueeze(1))  # (M, B, width)
        return self.linear(inputs) + (hidden @ self.weights).mean(0)


class _Block(nn.Sequential):
    def __init__(self, width: int, dropout: float):
        layers = (nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * width, width))
        super().__init__(nn.LayerNorm(width), *layers)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden)
