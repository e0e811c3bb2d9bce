"""Describe a training set as YAML: counts, means and standard deviations, from the batches of its data module.

Values are exact: pixels and labels are counted as integers, floats are summed in 64 bits. No network is built.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from deeplightning.batches import class_names_of
from deeplightning.config.schema import Config
from deeplightning.config.tree import line
from deeplightning.faults import ConfigError, Fault
from deeplightning.run.assemble import init_module
from deeplightning.run.resolve_auto import LABELS, add_label_counts, class_weights, positive_weights

MAX_COLUMNS = 64
"""Inputs with more columns get one mean and one standard deviation over all of them."""


def statistics(cfg: Config) -> str:
    """Return the statistics of a config's training set, as YAML.

    Pictures, uint8 (B, C, H, W), give `mean` and `std` per channel on the scale 0 to 1, as an image folder takes them.
    Labels, int64 (B,) or per pixel (B, H, W), give `classes`, the count of each, and `class_weights`, N / (K n) for K
    classes that occur and n samples of one. Multiple labels, float (B, K) of 0 and 1, give `labels`, the samples that
    have each, and `pos_weight`, (N - n) / n. Other floats, (B,) or (B, F), give mean and std of each column. Stds are
    divided by N. Training pictures are not augmented.

    Raises:
        DataError: the data are missing or damaged.
        ConfigError: the training batches of the data module are not mappings of tensors.
    """
    options = {name: value for name, value in cfg.data.loader.items() if name != "drop_last"}
    cfg.data = replace(cfg.data, sampler=None, loader=options)  # each sample once
    data: Any = init_module(cfg, "data")
    data.prepare_data()
    data.setup("fit")
    samples, columns = 0, dict[str, Any]()
    for batch in data.train_dataloader():
        if not isinstance(batch, Mapping):
            message = f"gives batches that are a {type(batch).__name__}, not a mapping of names to tensors"
            raise ConfigError(Fault(f"{cfg.data.module.type} {message}", "data.module"))
        arrays = {name: values.cpu().numpy() for name, values in batch.items() if hasattr(values, "cpu")}
        if "index" in arrays:
            keep = arrays.pop("index") >= 0
            arrays = {name: values[keep] for name, values in arrays.items()}
        samples += len(next(iter(arrays.values()), ()))
        for name, values in arrays.items():
            if (column := columns.setdefault(name, _column_for(name, values))) is not None:
                column.add(values)
    names = class_names_of(data) or [str(name) for name in getattr(data, "target_names", None) or []]
    lines = [f"# the training set of {cfg.data.module.type}", f"samples: {samples}"]
    for name, column in columns.items():
        lines += column.lines(name, names) if column is not None else []
    return "\n".join(lines) + "\n"


def _column_for(name: str, values: np.ndarray) -> object:
    if values.dtype == np.uint8 and values.ndim == 4:
        return _Pixels(values.shape[1])
    if values.dtype.kind == "f" and values.ndim <= 2:
        return _MultipleLabels() if name in LABELS and values.ndim == 2 else _Numbers()
    if values.dtype.kind in "iu" and name in ("label", "target", "mask"):
        return _Labels()
    return None  # tokens of a text have no statistics


class _Pixels:
    """Count how often each channel has each of the 256 values."""

    def __init__(self, channels: int):
        self.counts = np.zeros((channels, 256), dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """Add a batch, uint8 (B, C, H, W)."""
        for channel, counts in enumerate(self.counts):
            counts += np.bincount(values[:, channel].ravel(), minlength=256)

    def lines(self, name: str, class_names: list[str]) -> list[str]:
        scale = np.arange(256) / 255
        mean = self.counts @ scale / self.counts.sum(1)
        spread = np.sqrt((self.counts * (scale - mean[:, None]) ** 2).sum(1) / self.counts.sum(1))
        return [
            "# per channel of the pictures, on the scale 0 to 1, for data.module.params of an image folder",
            f"mean: {line([_rounded(value) for value in mean])}",
            f"std: {line([_rounded(value) for value in spread])}",
        ]


class _Labels:
    """Count how often each class occurs."""

    def __init__(self) -> None:
        self.counts = np.zeros(0, dtype=np.int64)
        self.ignored = 0  # negative labels, which losses skip by `ignore_index`
        self.of_pixels = False

    def add(self, values: np.ndarray) -> None:
        """Add a batch of whole numbers, (B,) or (B, H, W)."""
        self.of_pixels = values.ndim > 1
        self.ignored += int((values < 0).sum())
        self.counts = add_label_counts(values, self.counts)

    def lines(self, name: str, class_names: list[str]) -> list[str]:
        names = class_names or [str(label) for label in range(len(self.counts))]
        counts = np.pad(self.counts, (0, max(0, len(names) - len(self.counts))))
        ignored = self.ignored + int(counts[len(names) :].sum())  # such as 255 in a mask
        counts = counts[: len(names)]
        of = "pixels" if self.of_pixels else "samples"
        return [
            f"# {of} of each class",
            f"classes: {line({n: int(count) for n, count in zip(names, counts, strict=True)})}",
            *([f"without_class: {ignored}"] if ignored else []),
            "# weights of a loss that balance the classes, as with model.loss.params.weight=balanced",
            f"class_weights: {line(class_weights(counts))}",
        ]


class _Numbers:
    """Compute mean and std of each column, from sums of differences to the first batch's mean."""

    def __init__(self) -> None:
        self.count, self.offset = 0, np.zeros(())
        self.sums, self.squares = np.zeros(()), np.zeros(())

    def add(self, values: np.ndarray) -> None:
        """Add a batch of floats, (B,) or (B, F)."""
        values = values.astype(np.float64)
        if values.ndim == 2 and values.shape[1] > MAX_COLUMNS:
            values = values.ravel()
        if self.count == 0:
            self.offset = values.mean(0)
        differences = values - self.offset
        self.count += len(differences)
        self.sums, self.squares = self.sums + differences.sum(0), self.squares + (differences**2).sum(0)

    def lines(self, name: str, class_names: list[str]) -> list[str]:
        shift = self.sums / self.count
        mean, std = self.offset + shift, np.sqrt(np.maximum(0, self.squares / self.count - shift**2))
        columns = [[_rounded(value) for value in np.atleast_1d(found)] for found in (mean, std)]
        return [f"{name}: {line(dict(zip(('mean', 'std'), columns, strict=True)))}"]


class _MultipleLabels(_Numbers):
    """Count the samples that have each label; with a value other than 0 or 1 the columns are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.are_labels, self.positives = True, np.zeros((), np.int64)
        self.samples = 0

    def add(self, values: np.ndarray) -> None:
        """Add a batch of floats, (B, K)."""
        super().add(values)
        self.are_labels &= bool(((values == 0) | (values == 1)).all())
        self.positives, self.samples = self.positives + (values == 1).sum(0), self.samples + len(values)

    def lines(self, name: str, class_names: list[str]) -> list[str]:
        if not self.are_labels:
            return super().lines(name, class_names)
        counts = [int(count) for count in self.positives]
        names = class_names or [str(label) for label in range(len(counts))]
        return [
            "# samples that have each label",
            f"labels: {line(dict(zip(names, counts, strict=True)))}",
            "# weights of a loss that balance each label, as with model.loss.params.pos_weight=balanced",
            f"pos_weight: {line(positive_weights(self.positives, self.samples))}",
        ]


def _rounded(value: float) -> float:
    """Round a number to 8 significant digits."""
    return float(f"{value:.8g}")
