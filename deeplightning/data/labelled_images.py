"""Load pictures with any number of labels each, which a file lists.

B batch, N pictures, K labels.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import Batch, Samples
from deeplightning.data.images import ImageFiles
from deeplightning.data.loading import checked_names
from deeplightning.data.splits import SET_NAMES, SPLITS, assign_folds, divide_by_set
from deeplightning.table_format import decoded
from deeplightning.words import did_you_mean


class Line(NamedTuple):
    """A picture in a file of labels: line number, name of the picture, its labels, and its set (None: not given)."""

    number: int
    name: str
    labels: list[str]
    split: str | None


def label_lines(
    path: Path, separator: str = "|", file_column: str = "file", labels_column: str = "labels"
) -> Iterator[Line]:
    """Yield the pictures in a file of labels, CSV with a header or JSON lines (.jsonl).

    Args:
        separator, file_column, labels_column: see `LabelledImages`.

    Raises:
        DataError: a line is invalid.
    """
    are_divided, numbers = None, dict[Path, int]()
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        if not isinstance(row, dict) or None in row or (path.suffix.lower() != ".jsonl" and None in row.values()):
            hint = f"a JSON object, or as many values as the header. Quote commas; {separator!r} separates labels"
            raise DataError(f"{where}: a line must have {hint}.")
        for key, column in (("file_column", file_column), ("labels_column", labels_column)):
            if column not in row:
                raise DataError(
                    f"{where}: there is no {column!r}.{did_you_mean(column, row)} There are: {', '.join(row)}. "
                    f"Rename one, or name it in data.module.params.{key}."
                )
        name, labels, given = row[file_column], row[labels_column], row.get("split")
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}: {file_column} must name a picture, not {name!r}.")
        if (before := numbers.setdefault(Path(name), number)) != number:
            raise DataError(
                f"{where}: {name} is in line {before} already; put all labels of a picture in one line, such as "
                f"cat{separator}dog."
            )
        if isinstance(labels, str):
            labels = [label.strip() for label in labels.split(separator) if label.strip()]
        if not isinstance(labels, list) or not all(isinstance(label, str) and label for label in labels):
            raise DataError(f"{where}: {labels_column} must be a list of names, not {labels!r:.100}.")
        split = SET_NAMES.get(str(given).strip().lower())
        if (split is None) != (given is None) or are_divided not in (None, split is not None):
            rule = "the split must be train, val or test in each line, or in none"
            raise DataError(f"{where}: {rule}, not {given!r:.100}.")
        are_divided = split is not None
        yield Line(number, name, [*dict.fromkeys(labels)], split)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each line."""
    number = 0
    try:
        stream = io.StringIO(decoded(path.read_bytes()), newline="")
        if path.suffix.lower() == ".jsonl":
            for number, text in enumerate(stream, 1):
                if text.strip():
                    yield number, json.loads(text)
            return
        delimiter = max(",;\t", key=stream.readline().count)
        stream.seek(0)
        reader = csv.DictReader(stream, delimiter=delimiter, strict=True)
        for row in reader:
            number = reader.line_num
            yield number, row
    except UnicodeError as error:
        raise DataError(f"{path} is not in UTF-8 ({error}); save it as UTF-8.") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"{path}, at line {number} or the next, cannot be read: {error}.") from error


class LabelledImages(ImageFiles):
    """Pictures in `data.root` whose labels are in a file there:

    - CSV with a header (`.csv`): a column `file`, and a column `labels` such as `cat|dog`, which may be empty.
    - JSON lines (`.jsonl`): `{"file": "1.jpg", "labels": ["cat", "dog"]}` in each line.

    Another column or key `split` assigns each picture to train, val or test. Without it, pictures are split 80/10/10 by
    the seed, stratified by the rarest label of each picture, so that rare labels occur in each set.

    A batch is {"image": uint8 (B, C, H, W), "label": float32 (B, K) of 0 and 1, "index": int64 (B,)}.

    Args:
        cfg: the whole config.
        labels: name of the file in `data.root`.
        images: the folder in `data.root` that the names of the pictures are relative to.
        class_names: the labels, in order; None: all that occur, sorted.
        separator: between the labels of a picture in a CSV file.
        file_column, labels_column: the names of these columns or keys.
        options: see `deeplightning.data.images.ImageFiles`, such as image_size.
    """

    def __init__(
        self,
        cfg: PartConfig,
        labels: str = "labels.csv",
        images: str = ".",
        class_names: Sequence[str] | None = None,
        separator: str = "|",
        file_column: str = "file",
        labels_column: str = "labels",
        **options: Any,
    ):
        super().__init__(cfg, **options)
        if Path(labels).suffix.lower() not in (".csv", ".jsonl"):
            raise DataConfigError(f"data.module.params.labels must be a file *.csv or *.jsonl, not {labels!r}.")
        if not isinstance(separator, str) or not separator:
            raise DataConfigError(f"data.module.params.separator must be one or more characters, not {separator!r}.")
        self.root = self.root_folder(labels)
        self.file = self.root / labels
        self.folder = self.root / images
        self._required_paths = {"labels": self.file, "images": self.folder}
        self.columns = separator, file_column, labels_column
        self._given_names = self.class_names = checked_names(class_names)

    def example_batch(self, size: int) -> Batch:
        """Make up a batch, see `ImageData`; the first row has every label, the others random ones. Reads the labels
        unless `class_names` lists them.

        Raises:
            DataError: the file of labels is missing or invalid.
        """
        if not self.class_names:
            self.check()
            self._set_class_names(list(label_lines(self.file, *self.columns)))
        labels = torch.randint(2, (size, len(self.class_names)), generator=Generator().manual_seed(1)).float()
        labels[0] = 1
        return {**super().example_batch(size), "label": labels}

    def read(self) -> dict[str, Samples]:
        lines = list(label_lines(self.file, *self.columns))
        if not lines:
            raise DataError(f"{self.file} names no picture.")
        self._set_class_names(lines)
        numbers = {name: number for number, name in enumerate(self.class_names)}
        labels, paths = np.zeros((len(lines), len(numbers)), np.float32), dict[str, int]()
        for row, line in enumerate(lines):
            paths[str(self.folder / line.name)] = line.number
            for label in line.labels:
                if label not in numbers:
                    raise DataError(
                        f"{self.file}, line {line.number}: {label!r} is not in data.module.params.class_names."
                        f"{did_you_mean(label, numbers)} There are: {', '.join(numbers):.300}."
                    )
                labels[row, numbers[label]] = 1
        if missing := next((path for path in paths if not Path(path).is_file()), None):
            raise DataError(
                f"{self.file}, line {paths[missing]}: the picture {missing} is missing. Set data.module.params.images "
                "to the folder that the names are relative to."
            )
        whole = Samples([*paths], labels)
        if all(line.split is None for line in lines):
            return {"all": whole}
        return divide_by_set(whole, np.array([SPLITS[None].index(str(line.split)) for line in lines]), str(self.file))

    def _set_class_names(self, lines: list[Line]) -> None:
        self.class_names = self._given_names or sorted({label for line in lines for label in line.labels})
        if not self.class_names:
            raise DataError(f"{self.file} names no label at all.")

    def _folds(self, samples: Any, number: int, purpose: int) -> np.ndarray:
        """Divide, stratified by the rarest label of each picture, so that each set gets its share of it."""
        counts = samples.labels.sum(0)  # (K,)
        rarity = np.where(samples.labels > 0, counts, np.inf)  # (N, K)
        rarest = np.where(samples.labels.any(1), rarity.argmin(1), samples.labels.shape[1])
        return assign_folds(rarest, number, self.cfg.seed, purpose)

    def _describe(self) -> str:
        return f"LabelledImages of {self.file}"
