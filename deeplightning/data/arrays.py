"""Read arrays from .npz files, each with a class or numbers to be predicted.

`deeplightning.array_spec.ArraySpec` prepares them.

N samples, R rows of the file, C channels, T targets; one array has any shape (C, …).
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
from deeplightning.data.loading import MAX_CLASSES, ColumnData, Moments, checked_names

_CHUNK_ARRAYS = 4096  # per step of the sums for mean and deviation


@dataclass(frozen=True)
class Arrays(Divisible):
    """Arrays before they are prepared.

    Attributes:
        inputs: an array or a mapped file, (R, C, …).
        rows: the row of each sample in `inputs`, int64 (N,).
        targets: (N,) or (N, T).
        labels: int64 (N,), by which splits are stratified.
    """

    shared = ("inputs",)

    inputs: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> Any:  # a loader worker maps the file again; numpy would pickle all numbers
        found: Any = self.inputs
        if isinstance(found, np.memmap) and isinstance(found.base, mmap.mmap):  # not a view of a mapped array
            order = "C" if found.flags.c_contiguous else "F"
            found = (found.filename, found.dtype, "r", found.offset, found.shape, order)
        return _restored, (found, self.rows, self.targets, self.labels)

    def load(self, positions: np.ndarray | slice) -> np.ndarray:
        """Return the inputs of these samples in memory, (n, C, …)."""
        found: np.ndarray = self.inputs[self.rows[positions]]
        return found


def _restored(inputs: Any, *columns: np.ndarray) -> Arrays:
    return Arrays(np.memmap(*inputs) if isinstance(inputs, tuple) else inputs, *columns)


def _load_batch(spec: ArraySpec, samples: Arrays, positions: np.ndarray) -> Batch:
    """Return prepared arrays of a mapped file, float32 (B, C, …); raise DataError if a number is not finite."""
    try:
        return {"input": torch.from_numpy(spec.scaled(samples.load(positions)))}
    except ArrayError as error:
        raise DataError(f"a batch of arrays: {error}") from error


class ArrayData(ColumnData):
    """Arrays in .npz files in `data.root`, each with inputs (N, C, …) and targets (N,) or (N, T). Uncompressed files
    are mapped into memory. To load arrays from elsewhere, subclass it and override `read`.

    A single file is split 80/10/10. With a test file, a tenth of the training samples, or one fold of
    `data.num_splits`, is for validation. Targets that are whole numbers or texts are classes; others are predicted as
    numbers. Batches have `input` float32 (B, C, …), `label` int64 (B,) or `target` float32 (B,) or (B, T), and `index`.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train: name of the training file; required unless a subclass overrides `read`.
        validation, test: names of further files; None: samples of the training file.
        inputs, targets: the names of the arrays in the files.
        class_names: the name of each class, in the order of the numbers; None: the numbers or texts themselves.
        normalise: whether to standardise each channel by mean and deviation of the training samples.
        limit: use at most this many training samples (validation included), and test samples, chosen by the seed.

    Attributes:
        array_spec: how an array is prepared; set by `setup`.
    """

    takes_any_length = False  # at inference, see `ArraySpec`

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
        """Read the samples of each set, or "all" of a single file; raise DataError if a file is invalid."""
        found = {name: self.samples_of(*self._map_file(path), str(path)) for name, path in self.files.items()}
        return found if len(found) > 1 else {"all": found["train"]}

    def _map_file(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        return mapped(path, self.inputs), mapped(path, self.targets)

    def samples_of(self, inputs: np.ndarray, targets: np.ndarray, source: str) -> Arrays:
        """Return the samples of inputs (N, C, …) and targets (N,) or (N, T), numbers or texts.

        Args:
            source: where they come from, for messages.

        Raises:
            DataError: the lengths differ, or a dtype or shape is not supported.
        """
        if inputs.ndim < 2 or inputs.dtype.kind not in "biuf":
            raise DataError(f"{source}: the inputs are {inputs.dtype} {inputs.shape}, not numbers (N, C, …).")
        if len(inputs) != len(targets) or not len(inputs):
            raise DataError(f"{source}: {len(inputs)} inputs and {len(targets)} targets; each input needs one target.")
        kind, rows = targets.dtype.kind, np.arange(len(inputs))
        if targets.ndim == 1 and kind in "biuUS":
            labels = self._labels(targets, source)
            return Arrays(inputs, rows, labels, labels)
        if kind not in "bfiu" or targets.ndim not in (1, 2) or not np.isfinite(targets).all():
            raise DataError(
                f"{source}: targets of type {targets.dtype} {targets.shape} are neither classes (N,) nor finite "
                "numbers (N,) or (N, T)."
            )
        return Arrays(inputs, rows, targets.astype(np.float64).reshape(len(targets), -1), np.zeros(len(targets), int))

    def _labels(self, targets: np.ndarray, source: str) -> np.ndarray:
        """Return the class of each sample, int64 (N,). If no class names are given, the first targets define them."""
        if targets.dtype.kind in "US":
            targets = targets if targets.dtype.kind == "U" else np.char.decode(targets, "utf-8", "backslashreplace")
            if not self.class_names:
                self.class_names = [str(word) for word in np.unique(targets)]
            numbers = {name: number for number, name in enumerate(self.class_names)}
            labels = np.array([numbers.get(str(word), -1) for word in targets], np.int64)
        else:
            labels = targets.astype(np.int64)
            if not self.class_names:
                self.class_names = [str(number) for number in range(min(int(labels.max()), MAX_CLASSES) + 1)]
        if ((labels < 0) | (labels >= len(self.class_names))).any():
            row = int(((labels < 0) | (labels >= len(self.class_names))).argmax())
            raise DataError(
                f"{source}: target {row} is {targets[row]!s:.40}, but the {len(self.class_names)} classes are "
                f"{', '.join(self.class_names):.200}. Classes are texts, or numbered from 0; other numbers are floats."
            )
        return labels

    # ---- preparing

    def learn(self, train: Arrays) -> None:
        """Compute mean and deviation of the inputs; raise DataError if one is not finite."""
        shape, moments = train.inputs.shape[1:], Moments()
        self.array_spec = ArraySpec(shape, takes_any_length=self.takes_any_length)
        if self.normalise:
            for start in range(0, len(train), _CHUNK_ARRAYS):
                part = np.moveaxis(train.load(slice(start, start + _CHUNK_ARRAYS)).astype(np.float64), 1, -1)
                moments.add(part.reshape(-1, shape[0]))
            if not np.isfinite(moments.std).all():
                raise DataError(f"{self._describe()}: the training inputs contain numbers that are not finite.")
            std = np.where(moments.std > 0, moments.std, 1.0)
            self.array_spec = replace(self.array_spec, mean=tuple(moments.mean.tolist()), std=tuple(std.tolist()))
        if not self.class_names:
            targets = train.targets
            names = [f"target_{n}" for n in range(targets.shape[1])] if targets.shape[1] > 1 else ["target"]
            target_moments = Moments()
            target_moments.add(targets)
            self.learn_targets(names, target_moments)

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
            on_demand = OnDemand(samples, partial(_load_batch, spec), others)
            on_demand.needs_workers = isinstance(samples.inputs, np.memmap)  # each would get a copy of another array
            return on_demand
        try:
            return InMemory({"input": torch.from_numpy(spec.scaled(samples.load(slice(None))))}, others)
        except ArrayError as error:
            raise DataError(f"{self._describe()}: {error}") from error

    def example_inputs(self, number: int) -> dict[str, np.ndarray]:
        """Return unprepared arrays to verify a bundle with, (n, C, …), from the validation set if there is one."""
        return {"arrays": (self._samples.get("val") or self._samples["train"]).load(slice(number))}


def mapped(path: Path, key: str) -> np.ndarray:
    """Return an array of an .npz file, mapped into memory if it is not compressed. Nothing is unpickled.

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
            lengths = stream.read(4)  # of the name and the extra field, in the local header
            start = entry.header_offset + 30 + sum(int.from_bytes(lengths[n : n + 2], "little") for n in (0, 2))
            stream.seek(start)
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            if dtype.hasobject:
                raise DataError(f"{path}: array {key!r} has Python objects, not numbers or texts.")
            return np.memmap(path, dtype, "r", stream.tell(), shape, "F" if fortran else "C")
    except DataError:
        raise
    except Exception as error:  # numpy, zipfile, zlib and lzma each have their own
        raise DataError(f"{path} cannot be read as an .npz file: {error}.") from error
