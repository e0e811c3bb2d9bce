"""What signals look like, with a folder per class: classes, channels and length, for the config of a new project."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from deeplightning.cli.guess import Guess, evenly, folders, need_folder, some, stages
from deeplightning.faults import SetupError, count

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

MAX_SHOWN = 20_000
"""Numbers of a signal that is written down as an example."""


def signals(data: Path) -> Guess:
    """A folder per class with .npy, .csv or .wav files, or `train` and perhaps `val` and `test` with these.

    Raises:
        SetupError: it is something else.
    """
    from deeplightning.config.target import find
    from deeplightning.image_spec import files_below

    read_signal: Callable[[Path], np.ndarray] = find("deeplightning.data.signal.read_signal")
    need_folder(data)
    top = data / "train" if (data / "train").is_dir() and folders(data / "train") else data
    classes = folders(top)
    if len(classes) < 2:
        raise SetupError(f"{top} must hold a folder for each of two or more classes; it has: {some(classes) or 'none'}")
    files, counts = list[Path](), dict[str, int]()
    for name in classes:
        found = sorted(path for path in files_below(top / name) if path.suffix.lower() in (".npy", ".csv", ".wav"))
        if not found:
            raise SetupError(f"{top / name} holds no signal (.npy, .csv or .wav); put some there, or remove the folder")
        counts[name] = len(found)
        files += found
    first, shapes = None, Counter[tuple[int, int]]()
    for path in evenly(files):
        try:
            signal = read_signal(path)  # (C, T)
        except Exception as error:
            if getattr(error, "exit_code", None) != SetupError.exit_code:
                raise
            raise SetupError(str(error)) from None
        first = signal if first is None else first
        shapes[signal.shape] += 1
    channels = sorted({shape[0] for shape in shapes})
    if len(channels) > 1:
        raise SetupError(f"the signals in {top} have {some(channels)} channels; all must have the same number")
    lengths = sorted(shape[1] for shape in shapes.elements())
    length = None if lengths[0] == lengths[-1] else lengths[len(lengths) // 2]
    which, left_out = stages(data, top)
    values = {
        "stages": which,
        "count": len(files),
        "number": len(classes),
        "classes": some(classes),
        "channels": channels[0],
        "length": length,
    }
    notes = [
        f"{len(classes)} classes, the folders of {top}: {some([f'{name} ({n})' for name, n in counts.items()])}",
        f"{count(len(files), 'signal')} of {count(channels[0], 'channel')} and "
        + (f"{lengths[0]} steps" if length is None else f"{lengths[0]} to {lengths[-1]} steps, brought to {length}"),
        *left_out,
    ]
    steps = length or lengths[0]
    if first is None or channels[0] * steps > MAX_SHOWN:
        return Guess(values, notes, files[0] if files[0].suffix.lower() == ".npy" else None)
    rows = [[round(float(value), 6) for value in row[:steps]] for row in first]
    body = json.dumps({"signal": [row + [0.0] * (steps - len(row)) for row in rows]})
    return Guess(values, notes, "signal.json", {"signal.json": f"{body}\n"})
