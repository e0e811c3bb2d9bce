"""Signals in files, one folder for each class: .npy, .csv and .wav become arrays of shape (C, T).

C channels, T steps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeplightning.array_spec import SIGNALS as EXTENSIONS
from deeplightning.array_spec import ArrayError, fitted, shown
from deeplightning.array_spec import read_signal as read_file
from deeplightning.config.part_config import PartConfig
from deeplightning.data.arrays import ArrayData
from deeplightning.data.class_folders import ClassFolders
from deeplightning.data.data_errors import DataError, require_whole


class SignalFolder(ArrayData):
    """Signals in `data.root`, in one of two layouts; hidden files do not count.

    - `CLASS/*.npy`: divided 80/10/10 within each class by the seed.
    - `train/CLASS/*.npy`, and where there are such `val/…` and `test/…` with the same classes. Without `val`, or with
      `data.num_splits`, a tenth or a fold of `train` validates. `deeplightning.data.class_folders` has the rules.

    A .npy file has a signal of shape (C, T) or (T,); a .csv file a line for each step and a column for each channel,
    with or without a header; a .wav file samples of 8, 16, 24 or 32 bits, which become numbers from -1 to 1.

    Args:
        cfg: the whole config.
        length: T, to which longer signals are cut at their end and shorter ones are filled with zeros, those of
            predictions too; None: all must have the same.
        normalise, limit: see `deeplightning.data.arrays.ArrayData`.
    """

    def __init__(self, cfg: PartConfig, length: int | None = None, *, normalise: bool = True, limit: int | None = None):
        super().__init__(cfg, normalise=normalise, limit=limit)
        if length is not None:
            require_whole("length", length)
        self.root, self.length = self.root_folder("the signals"), length
        self.takes_any_length = length is not None
        self.folders = ClassFolders(self.root, "signal", EXTENSIONS)

    def check(self) -> None:
        """Raise DataError if the folder is not there."""
        self.folders.classes()

    def read(self) -> dict[str, Any]:
        """Read the signals; raise DataError if there are none, or a file is not as it should be."""
        self.class_names = self.folders.classes()
        found = {}
        for name, (paths, labels) in self.folders.find().items():
            signals = list[np.ndarray]()
            for path in paths:
                signals.append(self._fitted(Path(path), signals))
            found[name] = self.samples_of(np.stack(signals), labels, str(self.root))
        return found

    def _fitted(self, path: Path, others: Sequence[np.ndarray]) -> np.ndarray:
        signal = read_signal(path)
        if self.length is not None:
            signal = fitted(signal, self.length)
        if others and signal.shape != others[0].shape:
            raise DataError(
                f"{path}: the signal is {shown(signal.shape)} (channels x steps), and not {shown(others[0].shape)}, as "
                "those before it; data.module.params.length cuts or fills up the steps."
            )
        return signal


def read_signal(path: Path) -> np.ndarray:
    """Return the signal of a file, float (C, T); raise DataError if it cannot be read, or has another shape."""
    try:
        signal = read_file(path)
    except (OSError, ArrayError) as error:
        raise DataError(f"{path} cannot be read as a signal: {error}") from error
    if not np.isfinite(signal).all():
        channel, step = np.argwhere(~np.isfinite(signal))[0]
        raise DataError(f"{path}: the number of channel {channel} at step {step} is not finite.")
    return signal
