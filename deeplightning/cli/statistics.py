"""What a training set is like: its data module's batches go in, counts, means and spreads come out as YAML.

Each number is exact: pixels and labels are counted as whole numbers, floats added up in 64 bits. No network is built.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from deeplightning.config.schema import Config
from deeplightning.config.tree import line
from deeplightning.faults import ConfigError, Fault
from deeplightning.run.assemble import init_module
from deeplightning.run.classes import LABELS, class_weights, counted, positive_weights

MAX_COLUMNS = 64
"""Of inputs with more numbers each, one mean and one deviation are printed, over all of them."""


def statistics(cfg: Config) -> str:
    """The statistics of a config's training set, as YAML.

    Of pictures, uint8 (B, C, H, W): `mean` and `std` per channel on the scale 0 to 1, as an image folder takes them. Of
    labels, int64 (B,) or of each pixel (B, H, W): `classes`, how many there are of each, and `class_weights`, N / (K n)
    for K classes that occur and n of one. Of several labels of a sample, float (B, K) of 0 and 1: `labels`, how many
    samples have each, and `pos_weight`, (N - n) / n. Of other floats, (B,) or (B, F): mean and std of each column. Stds
    are those of all numbers (divided by N). Training pictures are taken as they are before `augment`.

    Raises:
        DataError: the data are not there or damaged.
        ConfigError: the data module gives no training batches that are mappings of tensors.
    """
    options = {name: value for name, value in cfg.data.loader.items() if name != "drop_last"}
    cfg.data = replace(cfg.data, sampler=None, loader=options)  # each sample once
    data: Any = init_module(cfg, "data")
    data.prepare_data()
    data.setup("fit")
    samples, columns = _counted(cfg, data.train_dataloader())
    names = [str(name) for name in getattr(data, "class_names", None) or getattr(data, "target_names", None) or []]
    lines = [f"# the training set of {cfg.data.module.type}", f"samples: {samples}"]
    for name, column in columns.items():
        lines += column.lines(name, names)
    return "\n".join(lines) + "\n"


def _counted(cfg: Config, batches: Iterable[object]) -> tuple[int, dict[str, Any]]:
    samples, columns = 0, dict[str, Any]()
    for batch in batches:
        if not isinstance(batch, Mapping):
            message = f"gives batches that are a {type(batch).__name__}, not a mapping of names to tensors"
            raise ConfigError(Fault(f"{cfg.data.module.type} {message}", "data.module"))
        arrays = {name: values.cpu().numpy() for name, values in batch.items() if hasattr(values, "cpu")}
        if "index" in arrays:
            keep = arrays.pop("index") >= 0
            arrays = {name: values[keep] for name, values in arrays.items()}
        samples += len(next(iter(arrays.values()), ()))
        for name, values in arrays.items():
            if name not in columns:
                columns[name] = _kind(name, values)
            columns[name].add(values)
    return samples, {name: column for name, column in columns.items() if column.lines}


def _kind(name: str, values: np.ndarray) -> object:
    if values.dtype == np.uint8 and values.ndim == 4:
        return _Pixels(values.shape[1])
    if values.dtype.kind == "f" and values.ndim <= 2:
        return _SeveralLabels() if name in LABELS and values.ndim == 2 else _Numbers()
    if values.dtype.kind in "iu" and name in ("label", "target", "mask"):
        return _Labels()
    return _Other()


class _Other:
    """Something that there is nothing to say of, such as the tokens of a text."""

    lines: Any = None

    def add(self, values: np.ndarray) -> None:
        pass


class _Pixels:
    """How often each channel has each of its 256 values."""

    def __init__(self, channels: int):
        self.counts = np.zeros((channels, 256), dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """A batch, uint8 (B, C, H, W)."""
        for channel, counts in enumerate(self.counts):
            counts += np.bincount(values[:, channel].ravel(), minlength=256)

    def lines(self, name: str, class_names: list[str]) -> list[str]:
        scale = np.arange(256) / 255
        mean = self.counts @ scale / self.counts.sum(1)
        spread = [
            np.sqrt(counts @ (scale - m) ** 2 / counts.sum()) for counts, m in zip(self.counts, mean, strict=True)
        ]
        return [
            "# of its pictures, per channel, on the scale 0 to 1: data.module.params of an image folder",
            f"mean: {line([_short(value) for value in mean])}",
            f"std: {line([_short(value) for value in spread])}",
        ]


class _Labels:
    """How often there is each class."""

    def __init__(self) -> None:
        self.counts = np.zeros(0, dtype=np.int64)
        self.ignored = 0  # negative ones, which losses leave out by `ignore_index`
        self.of_pixels = False

    def add(self, values: np.ndarray) -> None:
        """A batch, of whole numbers, (B,) or (B, H, W)."""
        self.of_pixels = values.ndim > 1
        self.ignored += int((values < 0).sum())
        self.counts = counted(values, self.counts)

    def lines(self, name: str, class_names: list[str]) -> list[str]:
        names = class_names or [str(label) for label in range(len(self.counts))]
        counts = np.pad(self.counts, (0, max(0, len(names) - len(self.counts))))
        ignored = self.ignored + int(counts[len(names) :].sum())  # 255 is none of the classes of a mask
        counts = counts[: len(names)]
        of = "pixels" if self.of_pixels else "samples"
        return [
            f"# how many {of} each class has",
            f"classes: {line({n: int(count) for n, count in zip(names, counts, strict=True)})}",
            *([f"without_class: {ignored}"] if ignored else []),
            "# of a loss that weighs each class alike, as model.loss.params.weight=balanced has them",
            f"class_weights: {line(class_weights(counts))}",
        ]


class _Numbers:
    """Mean and spread of each column, by sums of what is left when the first batch's mean is taken away."""

    def __init__(self) -> None:
        self.count, self.offset = 0, np.zeros(())
        self.sums, self.squares = np.zeros(()), np.zeros(())

    def add(self, values: np.ndarray) -> None:
        """A batch of floats, (B,) or (B, F)."""
        values = values.astype(np.float64)
        if values.ndim == 2 and values.shape[1] > MAX_COLUMNS:
            values = values.ravel()
        if self.count == 0:
            self.offset = values.mean(0)
        rest = values - self.offset
        self.count += len(rest)
        self.sums, self.squares = self.sums + rest.sum(0), self.squares + (rest**2).sum(0)

    def lines(self, name: str, class_names: list[str]) -> list[str]:
        rest = self.sums / self.count
        mean, std = self.offset + rest, np.sqrt(np.maximum(0, self.squares / self.count - rest**2))
        columns = [[_short(value) for value in np.atleast_1d(found)] for found in (mean, std)]
        return [f"{name}: {line(dict(zip(('mean', 'std'), columns, strict=True)))}"]


class _SeveralLabels(_Numbers):
    """How many samples have each label; where a value is neither 0 nor 1, they are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.are_labels, self.positives = True, np.zeros((), np.int64)
        self.samples = 0

    def add(self, values: np.ndarray) -> None:
        """A batch of floats, (B, K)."""
        super().add(values)
        self.are_labels &= bool(((values == 0) | (values == 1)).all())
        self.positives, self.samples = self.positives + (values == 1).sum(0), self.samples + len(values)

    def lines(self, name: str, class_names: list[str]) -> list[str]:
        if not self.are_labels:
            return super().lines(name, class_names)
        counts = [int(count) for count in self.positives]
        names = class_names or [str(label) for label in range(len(counts))]
        return [
            "# how many samples have each label",
            f"labels: {line(dict(zip(names, counts, strict=True)))}",
            "# of a loss that weighs both answers of a label alike, as model.loss.params.pos_weight=balanced has them",
            f"pos_weight: {line(positive_weights(self.positives, self.samples))}",
        ]


def _short(value: float) -> float:
    """A number to 8 digits."""
    return float(f"{value:.8g}")
