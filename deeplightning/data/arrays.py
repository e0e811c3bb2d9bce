"""Read arrays of numbers with a class or numbers for each from a file of numpy's.

`deeplightning.array_spec.ArraySpec` prepares them.

N samples, C channels, T steps of a signal; the shape of one array is any, (C, …).
"""

import math
import mmap
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deeplightning.array_spec import ArrayError, ArraySpec
from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import Batch, Divisible, InMemory, OnDemand
from deeplightning.data.loading import MOST_CLASSES, ColumnData, Moments, checked_names

_CHUNK = 4096  # arrays of which mean and deviation are summed at a time


@dataclass(frozen=True)
class Arrays(Divisible):
    """Arrays before they are prepared.

    Attributes:
        inputs: an array or a mapped file, (R, C, …).
        rows: of each sample, int64 (N,).
        targets: (N,) or (N, T).
        labels: int64 (N,), by which the samples are divided evenly.
    """

    shared = ("inputs",)

    inputs: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> Any:  # a loader worker maps the file again; numpy would send it all numbers
        found: Any = self.inputs
        if isinstance(found, np.memmap) and isinstance(found.base, mmap.mmap):  # not a part of a mapped array
            order = "C" if found.flags.c_contiguous else "F"
            found = (found.filename, found.dtype, "r", found.offset, found.shape, order)
        return _arrays, (found, self.rows, self.targets, self.labels)

    def load(self, positions: np.ndarray | slice) -> np.ndarray:
        """Return some inputs in memory, (n, C, …)."""
        found: np.ndarray = self.inputs[self.rows[positions]]
        return found


def _arrays(inputs: Any, *columns: np.ndarray) -> Arrays:
    return Arrays(np.memmap(*inputs) if isinstance(inputs, tuple) else inputs, *columns)


def _scaled(spec: ArraySpec, samples: Arrays, positions: np.ndarray) -> Batch:
    """Return arrays of a mapped file, prepared, float32 (B, C, …)."""
    return {"input": torch.from_numpy(spec.scaled(samples.load(positions)))}


class ArrayData(ColumnData):
    """Arrays of .npz files in `data.root`, of which each has the inputs (N, C, …) and the targets (N,) or (N, T). Files
    that are not compressed are mapped into memory. A data module of your own subclasses it and has its own `read`.

    One file is divided 80/10/10; with a file for the tests, a tenth of the training samples validates, or one fold of
    `data.num_splits`. Targets that are whole numbers or texts are classes, others are numbers that are predicted.
    Batches have `input` float32 (B, C, …), `label` int64 (B,) or `target` float32 (B,) or (B, T), and `index`.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train: name of the training file; it may be missing only where a subclass reads something else.
        validation, test: names of further files; None: samples of the training file.
        inputs, targets: the names of the arrays in the files.
        class_names: the name of each class, in the order of the numbers; None: the numbers or texts themselves.
        normalise: whether mean and deviation of the training samples, for each channel, make them numbers around 0.
        limit: use at most this many training samples (validation included) and as many test samples, a seeded choice.

    Attributes:
        array_spec: how an array is prepared; there after `setup`.
    """

    takes_any_length = False  # of the arrays that are predicted, see `ArraySpec`

    def __init__(
        self,
        cfg: PartConfig,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        *,
        inputs: str = "x",
        targets: str = "y",
        class_names: Sequence[str] | None = None,
        normalise: bool = True,
        limit: int | None = None,
    ):
        super().__init__(cfg, limit)
        self.array_spec: ArraySpec | None = None
        if train is None and type(self).read is ArrayData.read:
            raise DataConfigError("data.module.params.train must name the training file; it is null.")
        self.name_files(train=train, val=validation, test=test)
        self.inputs, self.targets, self.normalise = inputs, targets, normalise
        self.class_names = checked_names(None if class_names is None else [str(name) for name in class_names])

    def read(self) -> dict[str, Any]:
        """Read the samples of each set, or of all; raise DataError if a file is not as it should be."""
        found = {name: self.samples_of(*self._arrays(path), str(path)) for name, path in self.files.items()}
        return found if len(found) > 1 else {"all": found["train"]}

    def _arrays(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        return mapped(path, self.inputs), mapped(path, self.targets)

    def samples_of(self, inputs: np.ndarray, targets: np.ndarray, source: str) -> Arrays:
        """Return samples of arrays (N, C, …) and targets (N,) or (N, T): numbers or texts.

        Args:
            source: where they are from, for messages.

        Raises:
            DataError: they do not fit together, or are not of these kinds.
        """
        if inputs.ndim < 2 or inputs.dtype.kind not in "biuf":
            raise DataError(f"{source}: the inputs are {inputs.dtype} {inputs.shape}, and not numbers (N, C, …).")
        if len(inputs) != len(targets) or not len(inputs):
            raise DataError(f"{source}: {len(inputs)} inputs and {len(targets)} targets; there must be one for each.")
        kind, rows = targets.dtype.kind, np.arange(len(inputs))
        if targets.ndim == 1 and kind in "biuUS":
            labels = self._labels(targets, source)
            return Arrays(inputs, rows, labels, labels)
        if kind not in "fiu" or targets.ndim not in (1, 2) or not np.isfinite(targets).all():
            raise DataError(
                f"{source}: targets of type {targets.dtype} {targets.shape} are neither classes (N,) nor finite "
                "numbers (N,) or (N, T)."
            )
        return Arrays(inputs, rows, targets.astype(np.float64).reshape(len(targets), -1), np.zeros(len(targets), int))

    def _labels(self, targets: np.ndarray, source: str) -> np.ndarray:
        """Return the class of each sample, int64 (N,). Names that are not given are found in the first targets."""
        if targets.dtype.kind in "US":
            targets = targets if targets.dtype.kind == "U" else np.char.decode(targets, "utf-8", "backslashreplace")
            if not self.class_names:
                self.class_names = [str(word) for word in np.unique(targets)]
            numbers = {name: number for number, name in enumerate(self.class_names)}
            labels = np.array([numbers.get(str(word), -1) for word in targets], np.int64)
        else:
            labels = targets.astype(np.int64)
            if not self.class_names:
                self.class_names = [str(number) for number in range(min(int(labels.max()), MOST_CLASSES) + 1)]
        if ((labels < 0) | (labels >= len(self.class_names))).any():
            place = int(((labels < 0) | (labels >= len(self.class_names))).argmax())
            raise DataError(
                f"{source}: target {place} is {targets[place]!s:.40}, and the {len(self.class_names)} classes are "
                f"{', '.join(self.class_names):.200}. Classes are texts, or numbered from 0; other numbers are floats."
            )
        return labels

    # ---- preparing

    def learn(self, train: Arrays) -> None:
        """Compute mean and deviation; raise DataError if an input is not finite."""
        shape, moments = train.inputs.shape[1:], Moments()
        self.array_spec = ArraySpec(shape, takes_any_length=self.takes_any_length)
        if self.normalise:
            for start in range(0, len(train), _CHUNK):
                part = np.moveaxis(train.load(slice(start, start + _CHUNK)).astype(np.float64), 1, -1)
                moments.add(part.reshape(-1, shape[0]))
            if not np.isfinite(moments.std).all():
                raise DataError(f"{self._describe()}: the training inputs have numbers that are not finite.")
            std = np.where(moments.std > 0, moments.std, 1.0)
            self.array_spec = replace(self.array_spec, mean=tuple(moments.mean.tolist()), std=tuple(std.tolist()))
        if not self.class_names:
            targets = train.targets
            names = [f"target_{n}" for n in range(targets.shape[1])] if targets.shape[1] > 1 else ["target"]
            of_targets = Moments()
            of_targets.add(targets)
            self.learn_targets(names, of_targets)

    def _prepare(self, samples: Arrays) -> InMemory | OnDemand:
        spec = self.array_spec
        assert spec is not None, "`setup` has read the samples"
        if samples.inputs.shape[1:] != spec.shape:
            found, wanted = samples.inputs.shape[1:], spec.shape
            raise DataError(f"{self._describe()}: the inputs of a set are {found}, those of the training set {wanted}.")
        target = torch.from_numpy(samples.targets)
        if self.class_names:
            others = {"label": target}
        else:
            others = {"target": (target[:, 0].clone() if target.shape[1] == 1 else target).float()}
        if not self._fits(4 * math.prod(spec.shape)):
            return OnDemand(samples, partial(_scaled, spec), others)
        try:
            return InMemory({"input": torch.from_numpy(spec.scaled(samples.load(slice(None))))}, others)
        except ArrayError as error:
            raise DataError(f"{self._describe()}: {error}") from error

    def example_inputs(self, number: int) -> dict[str, np.ndarray]:
        """Return arrays that a bundle is proved on, before they are prepared, of the validation set where there is one:
        (n, C, …)."""
        return {"arrays": (self._samples.get("val") or self._samples["train"]).load(slice(number))}


def mapped(path: Path, key: str) -> np.ndarray:
    """Return an array of an .npz file, mapped into memory where the file is not compressed. Nothing is unpickled.

    Raises:
        DataError: the file cannot be read, or has no such array.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if key not in names:
                raise DataError(f"{path} has no array {key!r}; it has {', '.join(names)}.")
            entry = archive.getinfo(f"{key}.npy")
            if entry.compress_type != zipfile.ZIP_STORED:
                with np.load(path, allow_pickle=False) as file:
                    return np.asarray(file[key])
        with path.open("rb") as stream:
            stream.seek(entry.header_offset + 26)
            lengths = stream.read(4)  # of the name and of what is behind it, in the file's own header
            start = entry.header_offset + 30 + sum(int.from_bytes(lengths[n : n + 2], "little") for n in (0, 2))
            stream.seek(start)
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            if dtype.hasobject:
                raise DataError(f"{path}: array {key!r} holds Python objects, and not numbers or texts.")
            return np.memmap(path, dtype, "r", stream.tell(), shape, "F" if fortran else "C")
    except (OSError, ValueError, zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{path} cannot be read as an .npz file: {error}.") from error
