"""scikit-learn's diabetes data become a data module; a network for them."""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import Dataset

from deeplightning.data.of_datasets import OfDatasets

SCALE = 1 / np.sqrt(442)
"""The standard deviation of each input, whose mean is 0."""

MEAN, STD = 152.1, 77.1
"""Of the target."""


class Rows(Dataset):
    """Rows of numbers: inputs float (N, F), targets float (N,)."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = torch.from_numpy(inputs).float(), torch.from_numpy(targets).float()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, position):
        return {"input": self.inputs[position], "target": self.targets[position]}


def patients(cfg):
    """The data module: 354 patients for training, 44 for validation and 44 for the test; `seed` deals them."""
    inputs, targets = load_diabetes(return_X_y=True)  # (442, 10), (442,)
    order = np.random.RandomState(cfg.seed).permutation(len(targets))
    val, test, train = (Rows(inputs[i], targets[i]) for i in np.split(order, [44, 88]))
    return OfDatasets(cfg, train=train, val=val, test=test)


class Perceptron(nn.Module):
    """One hidden layer between standardised inputs and the scale of the target.

    Args:
        inputs: numbers of a row.
        width: of the hidden layer.
    """

    def __init__(self, inputs: int, width: int = 32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows float (B, F) → float (B, 1)."""
        return self.layers(rows / SCALE) * STD + MEAN
