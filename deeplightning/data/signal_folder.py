"""Load signals from files, one folder per class: .npy, .csv and .wav become arrays of shape (C, T).

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
    """Signals in `data.root`, in one of two layouts; hidden files are ignored.

    - `CLASS/*.npy`: split 80/10/10 within each class by the seed.
    - `train/CLASS/*.npy` and, optionally, `val/…` and `test/…` with the same classes. Without `val`, or with
      `data.num_splits`, a tenth or a fold of `train` is for validation. `deeplightning.data.class_folders` has details.

    A .npy file has a signal of shape (C, T) or (T,); a .csv file has a line per step and a column per channel, with or
    without a header; a .wav file has samples of 8, 16, 24 or 32 bits, which become numbers from -1 to 1.

    Args:
        cfg: the whole config.
        length: T; longer signals are truncated at the end and shorter ones padded with zeros, also at inference; None:
            all signals must have the same length.
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
        """Raise DataError if there is no folder of a class."""
        self.folders.classes()

    def read(self) -> dict[str, Any]:
        """Read the signals; raise DataError if there are none, or a file is invalid."""
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
                f"{path}: the signal is {shown(signal.shape)} (channels x steps), not {shown(others[0].shape)} like "
                "those before it; set data.module.params.length to truncate or pad the steps."
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
