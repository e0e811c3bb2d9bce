"""Columns of numbers of a CSV file become a data module; a tenth of the rows validates, a tenth tests. The network for
them standardises what it is given."""

import csv
import logging
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from deeplightning.data.of_datasets import OfDatasets

log = logging.getLogger(__name__)


class Rows(Dataset):
    """Rows of numbers: inputs float (N, F), targets float (N,)."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = torch.from_numpy(inputs).float(), torch.from_numpy(targets).float()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, position):
        return {"input": self.inputs[position], "target": self.targets[position]}


def rows(cfg, file, inputs, target, delimiter=","):
    """The data module: training, validation and test set.

    Args:
        cfg: the whole config; `seed` decides which rows validate and test.
        file: path of a CSV file with a header, from the working directory.
        inputs: names of columns.
        target: name of the column to predict.
        delimiter: between columns.
    """
    values = read(Path(file).expanduser(), [*inputs, target], delimiter)  # (N, F + 1)
    order = np.random.RandomState(cfg.seed).permutation(len(values))
    tenth = max(1, len(values) // 10)
    val, test, train = (Rows(values[i, :-1], values[i, -1]) for i in np.split(order, [tenth, 2 * tenth]))
    return OfDatasets(cfg, train=train, val=val, test=test)


def read(file, columns, delimiter):
    """The columns of a file, float64 (N, columns); a row that lacks a value is left out.

    Raises:
        ValueError: the file lacks a column, or has what is no number in it.
    """
    found, incomplete = [], 0
    with file.open(encoding="utf-8-sig", newline="") as opened:
        table = csv.DictReader(opened, delimiter=delimiter)
        if missing := [name for name in columns if name not in (table.fieldnames or ())]:
            raise ValueError(f"{file} has no column {', '.join(missing)}; it has {', '.join(table.fieldnames or ())}")
        for row in table:
            try:
                values = [float((row[name] or "").strip() or "nan") for name in columns]
            except ValueError as error:
                raise ValueError(f"{file}, line {table.line_num}: {error}") from None
            if np.isfinite(values).all():
                found.append(values)
            else:
                incomplete += 1
    if len(found) < 3:
        raise ValueError(f"{file} has {len(found)} complete rows; at least 3 are needed")
    if incomplete:
        log.warning("%s: %d rows without a value in a column are left out", file, incomplete)
    return np.array(found)


class Perceptron(nn.Module):
    """One hidden layer between standardised inputs and the scale of the target.

    Args:
        mean, std: of each input.
        target_mean, target_std: of the target.
        width: of the hidden layer.
    """

    def __init__(self, mean, std, target_mean, target_std, width=64):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))
        self.target_mean, self.target_std = float(target_mean), float(target_std)
        self.layers = nn.Sequential(nn.Linear(len(mean), width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, inputs):
        """Inputs float (B, F) → float (B, 1)."""
        return self.layers((inputs - self.mean) / self.std) * self.target_std + self.target_mean
