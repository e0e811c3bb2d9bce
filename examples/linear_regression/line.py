"""Points near a plane: the data module is a function of the config that returns the data sets."""

import torch
from torch.utils.data import Dataset

from deeplightning.data.of_datasets import OfDatasets

SLOPES, INTERCEPT = torch.tensor([2.0, -1.0, 0.5]), 5.0


class Points(Dataset):
    """Points with three inputs between -1 and 1 and a target: a linear function of the inputs, plus noise."""

    def __init__(self, size, noise, seed):
        random = torch.Generator().manual_seed(seed)
        self.inputs = torch.rand(size, 3, generator=random) * 2 - 1  # (size, 3)
        self.targets = self.inputs @ SLOPES + INTERCEPT + noise * torch.randn(size, generator=random)  # (size,)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, position):
        return {"input": self.inputs[position], "target": self.targets[position]}


def points(cfg, size=1000, noise=0.1):
    """Return training, validation and test set; omit those that you do not have."""
    train, val, test = (Points(count, noise, cfg.seed + k) for k, count in enumerate((size, size // 5, size // 5)))
    return OfDatasets(cfg, train=train, val=val, test=test)
