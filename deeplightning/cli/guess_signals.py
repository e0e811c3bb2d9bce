"""Find the classes, channels and length of signals in a folder per class, for the config of a new project."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from deeplightning.cli.guess import Guess, class_folders, errors_of_data, evenly, some
from deeplightning.config.target import find
from deeplightning.faults import SetupError, count

MAX_SHOWN = 20_000
"""Maximum number of values of a signal that is written as an example."""


def signals(data: Path) -> Guess:
    """Inspect a folder per class with .npy, .csv or .wav files, or `train` and perhaps `val` and `test` with these.

    Raises:
        SetupError: the data are something else.
    """
    read_signal: Any = find("deeplightning.data.signal_folder.read_signal")
    files, values, notes = class_folders(data, "signal", (".npy", ".csv", ".wav"))
    first, shapes = None, Counter[tuple[int, int]]()
    for path in evenly(files):
        with errors_of_data():
            signal = read_signal(path)  # (C, T)
        first = signal if first is None else first
        shapes[signal.shape] += 1
    channels = sorted({shape[0] for shape in shapes})
    if len(channels) > 1:
        raise SetupError(f"the signals in {data} have {some(channels)} channels; all must have the same number")
    lengths = sorted(shape[1] for shape in shapes.elements())
    length = None if lengths[0] == lengths[-1] else lengths[len(lengths) // 2]
    values |= {"channels": channels[0], "length": length}
    steps_of = f"{lengths[0]} steps" if length is None else f"{lengths[0]} to {lengths[-1]} steps, brought to {length}"
    notes.append(f"{count(len(files), 'signal')} of {count(channels[0], 'channel')} and {steps_of}")
    if channels[0] > lengths[-1]:
        notes.append("more channels than steps: if the axes are swapped, save array.T, of shape (C, T)")
    steps = length or lengths[0]
    if first is None or channels[0] * steps > MAX_SHOWN:
        return Guess(values, notes, files[0] if files[0].suffix.lower() == ".npy" else None)
    body = json.dumps({"signal": [[round(float(value), 6) for value in row[:steps]] for row in first]})
    return Guess(values, notes, "signal.json", {"signal.json": f"{body}\n"})
