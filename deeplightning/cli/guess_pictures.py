"""Find the classes, channels, sizes, mean and std of pictures in a folder per class, or with a file of labels, for the
config of a new project. NumPy and Pillow are imported lazily."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.cli.guess import Guess, class_folders, counted, errors_of_data, evenly, folders, some
from deeplightning.config.target import find
from deeplightning.faults import SetupError, count

if TYPE_CHECKING:
    import numpy as np

SIDES = (32, 64, 96, 128, 224)
"""Sizes to propose if the pictures have different sizes."""
BOXES = ("[aA]nnotations", "labels")
"""Folders in which data sets describe the objects in pictures."""
SMALL = 32
"""Pictures of at most this many pixels per side get the small network."""


def images(data: Path) -> Guess:
    """Inspect a folder per class, or `train` and perhaps `val` and `test` with these; or a file `labels.csv` or
    `labels.jsonl` with the labels of each picture.

    Raises:
        SetupError: the data are something else.
    """
    from deeplightning.image_spec import EXTENSIONS, files_below

    for name in ("labels.csv", "labels.jsonl"):
        if (data / name).is_file():
            return _from_labels(data, name)
    for path in [each for pattern in BOXES for each in (*data.glob(pattern), *data.glob(f"train/{pattern}"))]:
        if any(each.suffix in (".json", ".txt", ".xml") for each in files_below(path)):
            raise SetupError(
                f"{path} describes objects in pictures, as COCO, YOLO and VOC do; no kind supports it. Put parts of "
                "the pictures into a folder for each class, or add masks (--kind segmentation)"
            )
    files, found, notes = class_folders(data, "picture", EXTENSIONS)
    values, seen, bad = examine_pictures(files)
    network = _network_for(values, found["number"])
    values |= {**network, "on_bad": "skip" if bad else "error"}
    return Guess(found | values, [*notes, *seen, _network_note(network)], files[0])


def _from_labels(data: Path, name: str) -> Guess:
    """Inspect pictures whose labels are in a file of the folder.

    Raises:
        SetupError: the file is invalid, or a picture that it names is missing.
    """
    read: Any = find("deeplightning.data.labelled_images.label_lines")
    with errors_of_data():
        lines = list(read(data / name))
        found = [label for line in lines for label in line.labels]
        are_single = len(found) == sum(bool(line.labels) for line in lines)
        separator = next((sign for sign in ";," if are_single and any(sign in label for label in found)), "|")
        lines = list(read(data / name, separator))
    counts = Counter(label for line in lines for label in line.labels)
    if not counts:
        raise SetupError(f"{data / name} labels no picture; a line is, for example, `1.jpg,cat|dog`")
    below = next((folder for folder in (".", *folders(data)) if (data / folder / lines[0].name).is_file()), ".")
    files = [data / below / line.name for line in lines]
    for line, path in zip(lines, files, strict=True):
        if not path.is_file():
            longer = next(path.parent.glob(f"{glob.escape(path.name)}.*"), None)
            hint = f"; write the full name, {longer.name}" if longer else ""
            raise SetupError(f"{data / name}, line {line.number}: the picture {path} is missing{hint}")
    values, seen, bad = examine_pictures(files)
    if bad:
        raise SetupError(f"{data / name} names pictures that cannot be decoded: {some(bad)}; remove them")
    classes = sorted(counts)
    network = _network_for(values, len(classes))
    values |= {"count": len(files), "classes": some(classes), "labels": name, "images": below, "separator": separator}
    values["stages"] = ["train", "test"] if {line.split for line in lines} & {None, "test"} else ["train"]
    notes = [
        f"{len(classes)} labels, by {data / name}: {counted({label: counts[label] for label in classes})}; "
        f"{sum(not line.labels for line in lines)} of the pictures have none",
        *seen,
        _network_note(network),
    ]
    if all(len(line.labels) == 1 for line in lines):
        notes.append("each picture has one label; if none can have more, put the pictures of each label into a folder")
    return Guess(values | network, notes, files[0], template="labels")


def _network_for(values: dict[str, Any], outputs: int) -> dict[str, Any]:
    """Return the name of a network for pictures with these values, and its params."""
    size = values["size"]
    side = size if isinstance(size, int) else max(size)
    params: dict[str, object] = {"num_classes": outputs, "num_channels": values["channels"]}
    if side <= SMALL:
        return {"network": "deeplightning.model.cnn.SimpleCNN", "params": params | {"image_size": size}}
    return {"network": "deeplightning.model.resnet.ResNet18", "params": params | {"small_images": side <= 64}}


def _network_note(network: dict[str, Any]) -> str:
    return f"a network for them: {network['network'].rpartition('.')[2]}"


def examine_pictures(files: Sequence[Path], multiple: int = 1) -> tuple[dict[str, Any], list[str], list[str]]:
    """Decode some pictures.

    Args:
        multiple: the proposed height and width are multiples of this many pixels.

    Returns:
        The size, mode and channels, and per channel mean and std on the scale 0 to 1; notes; undecodable files.
    """
    import numpy as np
    from PIL import Image

    from deeplightning.image_spec import ImageError, ImageSpec, shown_size

    sizes, modes, bad, good = Counter[tuple[int, int]](), Counter[str](), list[str](), list[Path]()
    upright = ImageSpec(8, 8)
    for path in evenly(files):
        try:
            upright.decode(path)
            with Image.open(path) as opened:
                width, height = shown_size(opened)
                modes[opened.mode] += 1
        except (ImageError, OSError) as error:
            bad.append(f"{path} ({str(error).rstrip('.')})")
        else:
            sizes[height, width] += 1
            good.append(path)
    if not good:
        raise SetupError(f"none of the pictures can be decoded: {some(bad)}")
    grey = not modes.keys() - {"L", "1", "I;16", "LA", "I", "F"}
    same_size = len(sizes) == 1 and max(next(iter(sizes))) <= SIDES[-1]
    if same_size:
        sides = next(iter(sizes))
    else:
        middle = sorted(min(size) for size in sizes.elements())[sum(sizes.values()) // 2]
        sides = (max(side for side in SIDES if side <= max(middle, SIDES[0])),) * 2
    height, width = (max(multiple, side // multiple * multiple, 4) for side in sides)
    spec = ImageSpec(height, width, mode="L" if grey else "RGB", resize="crop")
    total, squares, pixels = np.zeros(spec.channels), np.zeros(spec.channels), 0
    for path in good:
        shares: np.ndarray = spec.decode(path).reshape(-1, spec.channels) / 255  # (H W, C)
        total, squares, pixels = total + shares.sum(0), squares + (shares**2).sum(0), pixels + len(shares)
    mean = total / pixels
    std = np.maximum(np.sqrt(np.maximum(squares / pixels - mean**2, 0)), 0.01)  # above 0 for pictures of one colour
    values = {
        "size": height if height == width else [height, width],
        "mode": spec.mode,
        "channels": spec.channels,
        "mean": [round(float(value), 4) for value in mean],
        "std": [round(float(value), 4) for value in std],
    }
    decoded = len(good) + len(bad)
    sizes_are = "all of this size" if same_size and (height, width) == sides else "several sizes, resized to one"
    notes = [
        f"{count(len(files), 'picture')}, {'grey' if grey else 'RGB'}, {height} x {width} pixels, {sizes_are}"
        + (f" (of {decoded:,} that were read)" if decoded < len(files) else ""),
        f"mean {values['mean']}, std {values['std']}",
    ]
    if bad:
        where = f" in a sample of {decoded:,}; training checks all" if decoded < len(files) else ""
        notes.append(f"{count(len(bad), 'file')} cannot be decoded and will be left out{where}: {some(bad)}")
    return values, notes, bad
