"""Convert arrays of numbers to the input of a network: `ArraySpec` converts signals and arrays of any shape to float32.

Training and serving both call it, so they cannot disagree. Uses numpy and the standard library only. `read_signal`
reads signal files. Letters: N arrays, C channels, T steps of a signal.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from deeplightning.words import InputError, are_numbers, is_number, is_whole, require_keys

MAGIC = b"\x93NUMPY"
"""First bytes of a file in numpy's format."""

SIGNALS = (".npy", ".csv", ".wav")
"""File name extensions of signals, in lower or upper case."""

_NUMERIC_KINDS = "biuf"


class ArrayError(InputError):
    """Raised for an array that cannot be used.

    Attributes:
        status: 400, or 415 if it is not an array.
    """


@dataclass(frozen=True)
class ArraySpec:
    """Describe how arrays are prepared for one network.

    Attributes:
        shape: of one array; (C, T) for a signal.
        mean, std: one number, or one for each entry of the first dimension; the array becomes (array - mean) / std, in
            float64. Empty: 0 and 1.
        takes_any_length: whether `prepare` fits arrays of another length, see `fitted`.

    Raises:
        ValueError: a value is impossible.
    """

    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    takes_any_length: bool = False

    def __post_init__(self) -> None:
        sides = self.shape
        if not isinstance(sides, list | tuple) or not sides or not all(is_whole(side, 1) for side in sides):
            raise ValueError(f"shape must be one or more whole numbers of at least 1, not {sides!r}")
        object.__setattr__(self, "shape", tuple(sides))
        for name, default in (("mean", 0.0), ("std", 1.0)):
            values = getattr(self, name)
            if not are_numbers(values) or len(values) not in (0, 1, sides[0]):
                raise ValueError(f"{name} must be 1 or {sides[0]} finite numbers, not {values!r}")
            object.__setattr__(self, name, tuple(map(float, values)) or (default,))
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, not {self.std!r}")

    @cached_property
    def _scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and std, float64, which broadcast against one array."""
        ones = (1,) * (len(self.shape) - 1)
        return np.array(self.mean).reshape(-1, *ones), np.array(self.std).reshape(-1, *ones)

    def prepare(self, values: object) -> np.ndarray:
        """Convert one array to float32 of the shape.

        Args:
            values: an array of numbers, nested lists of them, or the bytes of a file in numpy's format.

        Raises:
            ArrayError: it has another shape, or an element is not a finite number.
        """
        found = read_npy(values) if isinstance(values, bytes | bytearray | memoryview) else _array(values)
        if self.shape[0] == 1 and 0 < found.ndim == len(self.shape) - 1:  # (T,) of one channel
            found = found[None]
        if self.takes_any_length and found.size and found.shape[:-1] == self.shape[:-1]:
            found = fitted(found, self.shape[-1])
        if found.shape != self.shape:
            raise ArrayError(f"The array has the shape {shown(found.shape)}, not {shown(self.shape)}.")
        return self.scaled(found)

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """Scale one or several arrays, (…, *shape), for the network; return float32.

        Raises:
            ArrayError: a number is not finite.
        """
        mean, std = self._scale
        with np.errstate(over="ignore", invalid="ignore"):
            prepared: np.ndarray = ((values - mean) / std).astype(np.float32)
        if not np.isfinite(prepared).all():
            at = np.argwhere(~np.isfinite(prepared))[0].tolist()
            raise ArrayError(f"The number at {at} is {values[tuple(at)]!s:.40}, which is not finite, or too large.")
        return prepared

    def stack(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Stack prepared arrays; return float32 (N, *shape)."""
        return np.stack(rows)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON types, for a checkpoint and a bundle."""
        values = {"shape": list(self.shape), "mean": list(self.mean), "std": list(self.std)}
        return values | ({"takes_any_length": True} if self.takes_any_length else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ArraySpec":
        """Reverse `to_dict`.

        Raises:
            ValueError: a key is missing or unknown, or a value is impossible.
        """
        require_keys("an array spec", values, ("shape", "mean", "std"), ["takes_any_length"])
        return cls(**values)


def fitted(values: np.ndarray, length: int) -> np.ndarray:
    """Cut the last dimension of an array at its end, or fill it with zeros, to a length."""
    values = values[..., :length]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, length - values.shape[-1])])


def _array(values: object) -> np.ndarray:
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError):
        raise ArrayError("The lists of an array must be of the same length at each level.") from None
    if found.dtype.kind not in _NUMERIC_KINDS:
        raise ArrayError("An array holds numbers only.")
    return found


def read_npy(data: bytes | bytearray | memoryview) -> np.ndarray:
    """Read an array in numpy's format (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).

    Nothing is unpickled, and no more memory is allocated than the file has.

    Raises:
        ArrayError: it is not such a file, or contains anything other than numbers.
    """
    data = bytes(data)
    if not data.startswith(MAGIC):
        raise ArrayError("This is not an array in numpy's format (.npy).", 415)
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
        if dtype.kind not in _NUMERIC_KINDS:
            raise ArrayError(f"The array holds {dtype.name}, and not numbers.")
        found: np.ndarray = np.ndarray(shape, dtype, data, stream.tell(), order="F" if is_fortran else "C")
        if found.shape != shape or found.nbytes != len(data) - stream.tell():
            raise ArrayError("The array has fewer or more numbers than its header says.")
        return found
    except ArrayError:
        raise
    except Exception as error:  # parsing a hostile header may raise anything
        raise ArrayError(f"The array is cut off, or its header cannot be read: {error!s:.100}.") from error


def shown(shape: Sequence[int]) -> str:
    """Format a shape for messages: `3 x 100`."""
    return " x ".join(map(str, shape)) or "no dimension"


def read_signal(path: Path) -> np.ndarray:
    """Read a signal, float32 or float64 (C, T), from a file with one of the extensions in `SIGNALS`.

    A .npy file has an array (C, T) or (T,). A .csv file has a line for each step and a column for each channel, with or
    without a header, separated by commas, semicolons, tabs or blanks. A .wav file has samples of 8, 16, 24 or 32 bits,
    which become numbers from -1 to 1.

    Raises:
        ArrayError: it cannot be read, or has another shape.
        OSError: the file cannot be opened.
    """
    readers = {".npy": lambda file: read_npy(file.read_bytes()), ".csv": _csv, ".wav": _wav}
    try:
        signal = readers[path.suffix.lower()](path)
    except (ArrayError, OSError):
        raise
    except Exception as error:  # csv and wave raise their own exceptions
        hint = ". Save it with PCM samples: ffmpeg -i FILE -c:a pcm_s16le NEW.wav" * (path.suffix.lower() == ".wav")
        raise ArrayError(f"this is not a signal: {error}{hint}") from error
    signal = signal[None] if signal.ndim == 1 else signal
    if signal.ndim != 2 or 0 in signal.shape:
        raise ArrayError(f"a signal is of shape (C, T) or (T,), not {signal.shape}")
    return signal


def _csv(path: Path) -> np.ndarray:
    from deeplightning.table_format import decoded  # imported lazily: a server does not need it

    text = [line.strip(" ") for line in decoded(path.read_bytes(), "latin-1").rstrip().splitlines()]
    delimiter = next((sign for sign in "\t;, " if sign in (text or [""])[-1]), ",")
    if delimiter != ",":
        text = [line.replace(",", ".") for line in text]
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True)
    lines = [(reader.line_num, line) for line in reader if line]
    if lines and any(cell and not is_number(cell) for cell in lines[0][1]):
        _, header = lines.pop(0)
        if delimiter == "," and len(header) == 1 and lines and len(lines[0][1]) == 2:
            raise ValueError(f"{header[0]!r:.60} is one column, line {lines[0][0]} has two values; write 0.5 for 0,5")
    for number, line in lines:
        if len(line) != len(lines[0][1]) or not all(map(is_number, line)):
            raise ValueError(f"line {number}, {delimiter.join(line)!r:.60}, must have a number for each channel")
    return np.array([[float(cell) for cell in line] for _, line in lines]).T


def _wav(path: Path) -> np.ndarray:
    import wave  # imported lazily: a server does not need it

    tag = (content := path.read_bytes()).find(b"fmt ") + 8
    if content[tag : tag + 2] + content[tag + 24 : tag + 26] == b"\xfe\xff\1\0":  # extensible PCM, new in Python 3.12
        content = content[:tag] + b"\1\0" + content[tag + 2 :]
    with wave.open(io.BytesIO(content), "rb") as file:
        width, channels, frames = file.getsampwidth(), file.getnchannels(), file.getnframes()
        data = file.readframes(frames)
    if len(data) < (size := width * channels * frames) < 0x7FFF0000:  # more: written to a pipe, of unknown length
        raise ArrayError(f"this signal is cut off: the file has {len(data):,} of {size:,} bytes of samples")
    values: np.ndarray
    if width == 1:
        values = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif width == 3:
        whole = np.pad(np.frombuffer(data, np.uint8).reshape(-1, 3), ((0, 0), (1, 0)))
        values = whole.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        values = np.frombuffer(data, f"<i{width}").astype(np.float32) / float(2 ** (8 * width - 1))
    return values.reshape(-1, channels).T
