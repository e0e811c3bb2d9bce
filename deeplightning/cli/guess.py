"""What data look like: a folder or a file goes in; classes, channels, sizes, mean, std and columns come out, for the
config of a new project. Files are only read. numpy and Pillow are imported where pictures are looked at."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.faults import SetupError, count, printable

if TYPE_CHECKING:
    import numpy as np

MAX_PICTURES = 300  # that are decoded, evenly from all
MAX_SHOWN = 20_000  # numbers of a signal that is written down as an example
MAX_ROWS = 200_000  # of a table that are read
MAX_CLASSES = 1000  # different values of a column; one with more holds no classes
SIDES = (32, 64, 96, 128, 224)
"""Sizes that are proposed where pictures differ in theirs."""
SMALL = 32
"""Pictures of at most so many pixels a side get the small network."""

MAX_FEW = 20
"""Different whole numbers that may be classes."""
MISSING = ("", "na", "n/a", "nan", "null", "none")
"""Words that stand for a missing value, as `deeplightning.table` has it."""

LABELS = ("label", "class", "category", "sentiment", "target", "y")
TARGETS = ("target", "y", "price", "value", "label")
NUMBERED = ("id", "index", "no", "nr", "row")


@dataclass
class Guess:
    """What was found.

    Attributes:
        values: for the template, by name.
        said: lines for the user.
        ask: what `deeplightning ask` may be given: a file, or words; None: nothing.
        files: further ones for the project, by name.
        template: the folder in that of the kind whose templates it has.
    """

    values: dict[str, Any]
    said: list[str]
    ask: Path | str | None = None
    files: dict[str, str] = field(default_factory=dict)
    template: str = "data"


# ---- pictures


def images(data: Path) -> Guess:
    """A folder per class, or `train` and perhaps `val` and `test` with these; or a file `labels.csv` or `labels.jsonl`
    that names the labels of each picture.

    Raises:
        SetupError: it is something else.
    """
    from deeplightning.image import EXTENSIONS, files_below

    _need_folder(data)
    for name in ("labels.csv", "labels.jsonl"):
        if (data / name).is_file() and _names_labels(data / name):
            return _labelled(data, name)
    top = data / "train" if _is_divided(data) else data
    classes = _folders(top)
    if not classes:
        raise SetupError(f"{top} holds no folder; put the pictures of each class into a folder of the class's name")
    if len(classes) == 1:
        raise SetupError(f"{top} holds one folder, {classes[0]}; there must be one for each of two or more classes")
    files: list[Path] = []
    counts = {}
    for name in classes:
        found = sorted(path for path in files_below(top / name) if path.name.lower().endswith(EXTENSIONS))
        if not found:
            raise SetupError(f"{top / name} holds no picture; put some there, or remove the folder")
        counts[name] = len(found)
        files += found
    look = _look_at(files)
    network, params = _network_for(look, len(classes))
    values = {
        "count": len(files),
        "number": len(classes),
        "classes": _some(classes),
        "network": network,
        "params": params,
        "on_bad": "skip" if look.bad else "error",
        **look.values(),
    }
    said = [
        f"{len(classes)} classes, the folders of {top}: {_some([f'{name} ({n})' for name, n in counts.items()])}",
        *look.said(),
        f"a network for them: {network.rpartition('.')[2]}",
    ]
    return Guess(values, said, files[0])


def _names_labels(path: Path) -> bool:
    """Whether a file is one of labels, and not just so called beside a folder per class."""
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        first = stream.readline(10_000)
    return {"file", "labels"} <= set(re.findall(r"\w+", first)) or len(_folders(path.parent)) < 2


def _labelled(data: Path, name: str) -> Guess:
    """Pictures whose labels are in a file of the folder.

    Raises:
        SetupError: the file is not as it should be, or names a picture that is not there.
    """
    from deeplightning.config.target import find

    read: Any = find("deeplightning.data.multilabel.LabelFile")
    try:
        lines = list(read(data / name).lines())
    except Exception as error:
        if getattr(error, "exit_code", None) != SetupError.exit_code:
            raise
        raise SetupError(str(error)) from None
    counts = Counter(label for line in lines for label in line.labels)
    if not counts:
        raise SetupError(f"{data / name} gives no picture a label; as in `1.jpg,cat|dog`")
    below = next((folder for folder in (".", "images") if (data / folder / lines[0].name).is_file()), ".")
    files = [data / below / line.name for line in lines]
    for line, path in zip(lines, files, strict=True):
        if not path.is_file():
            raise SetupError(f"{data / name}, line {line.number}: the picture {path} is missing")
    look = _look_at(files)
    if look.bad:
        raise SetupError(f"{data / name} names pictures that cannot be decoded: {_some(look.bad)}; leave them out")
    classes = sorted(counts)
    network, params = _network_for(look, len(classes))
    values = {"count": len(files), "classes": _some(classes), "labels": name, "images": below, **look.values()}
    said = [
        f"{len(classes)} labels, by {data / name}: {_some([f'{label} ({counts[label]})' for label in classes])}; "
        f"{sum(not line.labels for line in lines)} of the pictures have none",
        *look.said(),
        f"a network for them: {network.rpartition('.')[2]}",
    ]
    return Guess({**values, "network": network, "params": params}, said, files[0], template="labels")


def _network_for(look: _Look, outputs: int) -> tuple[str, dict[str, Any]]:
    """A network for pictures, by its name, and its params."""
    small = max(look.sides) <= SMALL
    params: dict[str, Any] = {"num_classes": outputs, "num_channels": look.channels}
    params |= {"image_size": look.size} if small else {"small_images": max(look.sides) <= 64}
    return "deeplightning.model.cnn.SimpleCNN" if small else "deeplightning.model.resnet.ResNet18", params


def segmentation(data: Path) -> Guess:
    """The folders `images` and `masks`, or `train` and perhaps `val` and `test` with these.

    Raises:
        SetupError: it is something else.
    """
    import numpy as np
    from PIL import Image

    from deeplightning.image import EXTENSIONS, files_below

    _need_folder(data)
    top = data / "train" if (data / "train" / "images").is_dir() else data
    for name in ("images", "masks"):
        if not (top / name).is_dir():
            there = ", ".join(_folders(top)[:8]) or "none"
            raise SetupError(
                f"{top} holds no folder `{name}` (its folders: {there}); put the pictures into `images`, and the "
                "masks, PNG files of the same names whose values are the classes, into `masks`"
            )
    files = sorted(path for path in files_below(top / "images") if path.name.lower().endswith(EXTENSIONS))
    if not files:
        raise SetupError(f"{top / 'images'} holds no picture")
    seen: Counter[int] = Counter()
    for path in _evenly(files):
        mask = (top / "masks" / path.relative_to(top / "images")).with_suffix(".png")
        try:
            with Image.open(mask) as opened:
                if opened.mode not in ("L", "P", "1"):
                    raise SetupError(
                        f"{mask}: a mask of mode {opened.mode}; it must be a grey or palette PNG (mode L or P) whose "
                        "values are the classes 0, 1, 2 …"
                    )
                seen.update(np.unique(np.asarray(opened.convert("L") if opened.mode == "1" else opened)).tolist())
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise SetupError(f"{mask}: the mask of {path} cannot be read: {error}") from None
    kinds = sorted(seen.keys() - {255})
    number = max(kinds, default=0) + 1
    if number > max(2 * len(kinds), 16):
        raise SetupError(
            f"the masks in {top / 'masks'} have the values {_some(kinds)}; they must be the classes, counted from 0, "
            "and 255 where a pixel does not count"
        )
    look = _look_at(files, multiple=8)
    names = [f"class_{value}" for value in range(max(number, 2))]
    values = {"count": len(files), "number": len(names), "names": names, **look.values()}
    said = [
        f"{len(names)} classes, by the values in {top / 'masks'}: {_some(kinds)}"
        + ("; 255 does not count" if 255 in seen else ""),
        "their names are for you to write: data.module.params.class_names",
        *look.said(),
    ]
    return Guess(values, said, files[0])


@dataclass
class _Look:
    """What pictures are like: `sides` is [height, width] to which they are brought, mean and std are per channel on the
    scale 0 to 1."""

    files: int
    looked: int
    bad: list[str]
    grey: bool
    sides: tuple[int, int]
    alike: bool
    mean: list[float]
    std: list[float]

    @property
    def channels(self) -> int:
        return 1 if self.grey else 3

    @property
    def size(self) -> int | list[int]:
        return self.sides[0] if self.sides[0] == self.sides[1] else [*self.sides]

    def values(self) -> dict[str, Any]:
        mode = "L" if self.grey else "RGB"
        return {"size": self.size, "mode": mode, "channels": self.channels, "mean": self.mean, "std": self.std}

    def said(self) -> list[str]:
        found = "all of this size" if self.alike else "of several sizes; brought to one"
        lines = [
            f"{count(self.files, 'picture')}, {'grey' if self.grey else 'RGB'}, {self.sides[0]} x {self.sides[1]} "
            f"pixels ({found}), by {self.looked} of them",
            f"mean {self.mean}, std {self.std}",
        ]
        if self.bad:
            lines.append(f"{count(len(self.bad), 'file')} cannot be decoded and will be left out: {_some(self.bad)}")
        return lines


def _look_at(files: Sequence[Path], multiple: int = 1) -> _Look:
    """Decodes some pictures; their size is brought to a multiple of so many pixels."""
    import numpy as np
    from PIL import Image

    from deeplightning.image import ImageError, ImageSpec

    sizes, modes, bad, good = Counter[tuple[int, int]](), Counter[str](), list[str](), list[Path]()
    upright = ImageSpec(8, 8)
    for path in _evenly(files):
        try:
            upright.decode(path)
            with Image.open(path) as opened:
                turned = opened.getexif().get(0x0112, 1) >= 5  # its camera lay on its side
                width, height = opened.size[::-1] if turned else opened.size
                modes[opened.mode] += 1
        except (ImageError, OSError) as error:
            bad.append(f"{path} ({str(error).rstrip('.')})")
        else:
            sizes[height, width] += 1
            good.append(path)
    if not good:
        raise SetupError(f"none of the pictures can be decoded: {_some(bad)}")
    grey = not modes.keys() - {"L", "1", "I;16", "LA", "I", "F"}
    alike = len(sizes) == 1 and max(next(iter(sizes))) <= SIDES[-1]
    if alike:
        sides = next(iter(sizes))
    else:
        middle = sorted(min(size) for size in sizes.elements())[sum(sizes.values()) // 2]
        sides = (max(side for side in SIDES if side <= max(middle, SIDES[0])),) * 2
    height, width = (max(multiple, side // multiple * multiple, 4) for side in sides)
    alike = alike and (height, width) == sides
    spec = ImageSpec(height, width, mode="L" if grey else "RGB", resize="crop")
    total, squares, pixels = np.zeros(spec.channels), np.zeros(spec.channels), 0
    for path in good:
        values: np.ndarray = spec.decode(path).reshape(-1, spec.channels) / 255  # (H W, C)
        total, squares, pixels = total + values.sum(0), squares + (values**2).sum(0), pixels + len(values)
    mean = total / pixels
    std = np.maximum(np.sqrt(np.maximum(squares / pixels - mean**2, 0)), 0.01)  # of one colour: nothing to divide by
    rounded = [[round(float(value), 4) for value in found] for found in (mean, std)]
    return _Look(len(files), len(good) + len(bad), bad, grey, (height, width), alike, *rounded)


def _evenly(files: Sequence[Path]) -> Sequence[Path]:
    """At most `MAX_PICTURES` of them, from all parts of the list."""
    return files[:: math.ceil(len(files) / MAX_PICTURES)]


def _need_folder(data: Path) -> None:
    if not data.is_dir():
        raise SetupError(f"{data} is no folder; name the one that holds the folders of pictures")


def _is_divided(top: Path) -> bool:
    """Whether there is a folder `train` that holds folders and no picture, as `data.image_folder` has it."""
    from deeplightning.image import EXTENSIONS

    train = top / "train"
    if not train.is_dir() or not _folders(train):
        return False
    return not any(path.is_file() and path.name.lower().endswith(EXTENSIONS) for path in train.iterdir())


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


# ---- signals


def signals(data: Path) -> Guess:
    """A folder per class with .npy, .csv or .wav files, or `train` and perhaps `val` and `test` with these.

    Raises:
        SetupError: it is something else.
    """
    from deeplightning.config.target import find
    from deeplightning.image import files_below

    read_signal: Any = find("deeplightning.data.signal.read_signal")
    _need_folder(data)
    top = data / "train" if (data / "train").is_dir() and _folders(data / "train") else data
    classes = _folders(top)
    if len(classes) < 2:
        raise SetupError(
            f"{top} must hold a folder for each of two or more classes; it has: {_some(classes) or 'none'}"
        )
    files, counts = list[Path](), dict[str, int]()
    for name in classes:
        found = sorted(path for path in files_below(top / name) if path.suffix.lower() in (".npy", ".csv", ".wav"))
        if not found:
            raise SetupError(f"{top / name} holds no signal (.npy, .csv or .wav); put some there, or remove the folder")
        counts[name] = len(found)
        files += found
    first, shapes = None, Counter[tuple[int, int]]()
    for path in _evenly(files):
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
        raise SetupError(f"the signals in {top} have {_some(channels)} channels; all must have the same number")
    lengths = sorted(shape[1] for shape in shapes.elements())
    length = None if lengths[0] == lengths[-1] else lengths[len(lengths) // 2]
    values = {
        "count": len(files),
        "number": len(classes),
        "classes": _some(classes),
        "channels": channels[0],
        "length": length,
    }
    said = [
        f"{len(classes)} classes, the folders of {top}: {_some([f'{name} ({n})' for name, n in counts.items()])}",
        f"{count(len(files), 'signal')} of {count(channels[0], 'channel')} and "
        + (f"{lengths[0]} steps" if length is None else f"{lengths[0]} to {lengths[-1]} steps, brought to {length}"),
    ]
    steps = length or lengths[0]
    if first is None or channels[0] * steps > MAX_SHOWN:
        return Guess(values, said, files[0] if files[0].suffix.lower() == ".npy" else None)
    rows = [[round(float(value), 6) for value in row[:steps]] for row in first]
    body = json.dumps({"signal": [row + [0.0] * (steps - len(row)) for row in rows]})
    return Guess(values, said, "signal.json", {"signal.json": f"{body}\n"})


# ---- tables


@dataclass
class Column:
    """What the values of a column are: how many are there, missing, and numbers; sums of these; some of them all."""

    filled: int = 0
    missing: int = 0
    numbers: int = 0
    total: float = 0.0
    squares: float = 0.0
    offset: float | None = None
    letters: int = 0
    values: Counter[str] = field(default_factory=Counter)

    def add(self, cell: str) -> None:
        cell = cell.strip()
        if cell.lower() in MISSING:
            self.missing += 1
            return
        number = _number(cell)
        if number is not None and not math.isfinite(number):
            self.missing += 1
            return
        self.filled += 1
        self.letters += len(cell)
        if len(self.values) <= MAX_CLASSES:
            self.values[cell] += 1
        if number is not None:
            self.numbers += 1
            self.offset = number if self.offset is None else self.offset
            self.total += number - self.offset
            self.squares += (number - self.offset) ** 2

    def is_numbers(self) -> bool:
        return self.filled > 0 and self.numbers == self.filled

    def mean_std(self) -> tuple[float, float]:
        rest = self.total / self.numbers
        std = math.sqrt(max(self.squares / self.numbers - rest**2, 0))
        return _short((self.offset or 0) + rest), _short(std or 1.0)


@dataclass
class Table:
    """A CSV file: its columns by name, in their order, how many rows were read, and the cells of the first."""

    path: Path
    delimiter: str
    columns: dict[str, Column]
    rows: int
    is_whole: bool
    first: dict[str, str]

    def of(self) -> str:
        return f"{count(self.rows, 'row')}{'' if self.is_whole else ', the first ones,'} of {self.path}"


def table(path: Path) -> Table:
    """The columns of a CSV file with a header.

    Raises:
        SetupError: it cannot be read, or is something else.
    """
    if path.suffix.lower() in (".parquet", ".pq"):
        raise SetupError(
            f"{path}: only CSV is looked at; begin with some of its rows in CSV, and name {path.name} then"
        )
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = max(",;\t", key=file.readline().count)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            names = [name.strip() for name in next(reader, [])]
            _check_header(path, names)
            columns = {name: Column() for name in names}
            rows, first = 0, dict[str, str]()
            for row in reader:
                if not row:
                    continue
                if rows == MAX_ROWS:
                    return Table(path, delimiter, columns, rows, False, first)
                if len(row) > len(names):
                    raise SetupError(
                        f"{path}, line {reader.line_num}: {len(row)} values for {len(names)} columns; a value with "
                        f"{delimiter!r} in it needs quotes"
                    )
                rows += 1
                cells = dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=True))
                first = first or {name: cell.strip() for name, cell in cells.items()}
                for name, cell in cells.items():
                    columns[name].add(cell)
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SetupError(f"{path} is not UTF-8 ({error.reason}); save it as UTF-8") from None
    except csv.Error as error:
        raise SetupError(f"{path} is no CSV file: {error}") from None
    if rows < 10:
        raise SetupError(f"{path} has {count(rows, 'row')} below its header; at least 10 are needed to divide them")
    return Table(path, delimiter, columns, rows, True, first)


def _check_header(path: Path, names: list[str]) -> None:
    if not names:
        raise SetupError(f"{path} is empty")
    if all(_number(name) is not None for name in names) or not any(names):
        raise SetupError(f"{path}: the first line, {_some(names)}, names no columns; put a header above it")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SetupError(f"{path}: two columns are called {printable(twice)!r}; rename one")


def text(data: Path) -> Guess:
    """A CSV file with a column of texts and one of classes.

    Raises:
        SetupError: it is something else.
    """
    found = table(_file_of(data))
    by_length = sorted(found.columns, key=lambda name: -found.columns[name].letters)
    text = by_length[0]
    others = [name for name in found.columns if name != text]
    classes = [name for name in others if 2 <= len(found.columns[name].values) <= min(MAX_CLASSES, found.rows // 2)]
    label = _named(classes, LABELS) or min(classes, key=lambda name: len(found.columns[name].values), default=None)
    if label is None:
        raise SetupError(
            f"{found.path}: beside the texts ({text}) no column has classes, 2 or more values that come again; its "
            f"columns: {_some(list(found.columns))}"
        )
    names = sorted(found.columns[label].values, key=lambda name: (_number(name) is None, _number(name) or 0, name))
    counts = found.columns[label].values
    values = {
        "count": found.rows,
        "number": len(names),
        "classes": _some(names),
        "names": names,
        "text": text,
        "label": label,
        "delimiter": found.delimiter,
    }
    said = [
        f"{found.of()}: texts in the column {text}, classes in the column {label}",
        f"{len(names)} classes: {_some([f'{name} ({counts[name]})' for name in names])}",
        *_missing(found, [text, label]),
    ]
    return Guess(values, said, '--text "a text of yours"')


def rows(data: Path) -> Guess:
    """A CSV file with a column to be predicted: classes, or numbers.

    Raises:
        SetupError: it is something else.
    """
    found = table(_file_of(data))
    used = {name: kind for name, kind in _kinds(found).items() if kind != "ignore"}
    target = _named(list(used), (*LABELS, *TARGETS)) or next(reversed(used), None)
    if target is None or len(used) < 2:
        raise SetupError(f"{found.path}: there must be two columns or more of numbers or categories; {_columns(found)}")
    column = found.columns[target]
    are_classes = used[target] == "category" or (
        2 <= len(column.values) <= min(MAX_FEW, found.rows // 5)
        and all(float(value).is_integer() for value in column.values)
    )
    return _of_rows(found, target, are_classes)


def regression(data: Path) -> Guess:
    """The same with numbers to be predicted.

    Raises:
        SetupError: it is something else.
    """
    found = table(_file_of(data))
    used = {name: kind for name, kind in _kinds(found).items() if kind != "ignore"}
    numbers = [name for name, kind in used.items() if kind == "number"]
    target = _named(numbers, TARGETS) or (numbers[-1] if numbers else None)
    if target is None or len(used) < 2:
        raise SetupError(
            f"{found.path}: there must be two columns or more, and one of numbers to be predicted; {_columns(found)}"
        )
    return _of_rows(found, target, False)


def _of_rows(found: Table, target: str, are_classes: bool) -> Guess:
    if found.delimiter != ",":
        raise SetupError(f"{found.path}: its columns are divided by {found.delimiter!r}; save it with commas")
    column = found.columns[target]
    if column.missing:
        raise SetupError(
            f"{found.path}: {count(column.missing, 'row')} has nothing in the column {target}, which is to be "
            "predicted; remove such rows"
        )
    kinds = _kinds(found) | {target: "category" if are_classes else "number"}
    inputs = [name for name, kind in kinds.items() if kind != "ignore" and name != target]
    words = [len(found.columns[name].values) + 1 for name in inputs if kinds[name] == "category"]
    ignored = [name for name, kind in kinds.items() if kind == "ignore"]
    gaps = {name: found.columns[name].missing for name in inputs if found.columns[name].missing}
    task = "classif.Classification" if are_classes else "regression.Regression"
    values = {
        "count": found.rows,
        "number": len(inputs),
        "file": found.path.name,
        "target": target,
        "missing": "fill" if gaps else "refuse",
        "columns": kinds,
        "task": f"deeplightning.task.{task}",
        "numbers": len(inputs) - len(words),
        "cardinalities": words,
        "outputs": len(column.values) if are_classes else 1,
        "loss": "torch.nn.CrossEntropyLoss" if are_classes else "torch.nn.MSELoss",
        "monitor": "val_acc" if are_classes else "val_rmse",
        "mode": "max" if are_classes else "min",
    }
    classes = [f"{name} ({number})" for name, number in sorted(column.values.items())]
    predicted = (
        f"{len(classes)} classes: {_some(classes)}" if are_classes else "mean {}, std {}".format(*column.mean_std())
    )
    said = [
        f"{found.of()}: the column {target} is predicted, {predicted}",
        *(
            f"{kind}: {_some([name for name in inputs if kinds[name] == kind])}"
            for kind in ("number", "category")
            if any(kinds[name] == kind for name in inputs)
        ),
        *([f"ignored, different in nearly each row, or empty: {_some(ignored)}"] if ignored else []),
    ]
    if gaps:
        said.append(f"missing values, which are filled: {_some([f'{name} ({n})' for name, n in gaps.items()])}")
    row = {name: _cell(found.first[name], kinds[name]) for name in inputs}
    return Guess(values, said, "row.json", {"row.json": json.dumps({"rows": [row]}, ensure_ascii=False) + "\n"})


def _kinds(found: Table) -> dict[str, str]:
    """What each column is taken for: number, category or ignore."""
    kinds = {}
    for name, column in found.columns.items():
        many = len(column.values) > min(MAX_CLASSES, max(MAX_FEW, found.rows // 2))
        empty = column.filled == 0 or not name or name.lower() in NUMBERED
        is_category = not column.is_numbers() and not many
        kinds[name] = (
            "ignore" if empty or (many and not column.is_numbers()) else "category" if is_category else "number"
        )
    return kinds


def _columns(found: Table) -> str:
    kinds = [f"{name} ({kind})" for name, kind in _kinds(found).items()]
    return f"its columns: {_some(kinds)}"


def _cell(text: str, kind: str) -> Any:
    """The value of a cell as JSON has it."""
    if text.lower() in MISSING:
        return None
    return float(text) if kind == "number" else text


def _file_of(data: Path) -> Path:
    if data.is_dir():
        files = sorted(path.name for path in data.iterdir() if path.suffix.lower() in (".csv", ".tsv"))
        hint = f", such as {data / files[0]}" if files else ""
        raise SetupError(f"{data} is a folder; name a CSV file with a header{hint}")
    return data


def _missing(found: Table, columns: list[str]) -> list[str]:
    lacking = {name: found.columns[name].missing for name in columns if found.columns[name].missing}
    if not lacking:
        return []
    return [f"missing values, whose rows are left out: {_some([f'{name} ({n})' for name, n in lacking.items()])}"]


def _named(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    """The first of the names that is one of those wanted, the likeliest first."""
    lowered = {name.lower(): name for name in names}
    return next((lowered[word] for word in wanted if word in lowered), None)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _short(value: float) -> float:
    """A number to 6 digits."""
    return float(f"{value:.6g}")


def _some(words: Sequence[Any]) -> str:
    """The first of them, for a line."""
    listed = ", ".join(printable(str(word)) for word in words[:8])
    return f"{listed}, … ({len(words)})" if len(words) > 8 else listed
