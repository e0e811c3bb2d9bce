"""Pictures with several labels each, or none: a file names the labels of each picture; split, resized and batched.

B batch, N pictures, K labels.
"""

import csv
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import Batch, Samples
from deeplightning.data.images import ImageFiles
from deeplightning.data.loading import SET_NAMES, SPLITS, by_set, checked_names
from deeplightning.data.splits import deal
from deeplightning.words import did_you_mean

log = logging.getLogger(__name__)


class Line(NamedTuple):
    """What a file of labels says of a picture: where, which, what it has, and the set that it is of (None: no word of
    it)."""

    number: int
    name: str
    labels: list[str]
    split: str | None


@dataclass(frozen=True)
class LabelFile:
    """A file of labels: CSV with a header, or JSON lines (.jsonl).

    Attributes:
        path: of the file.
        separator, file_column, labels_column: as of `LabelledImages`.
    """

    path: Path
    separator: str = "|"
    file_column: str = "file"
    labels_column: str = "labels"

    def lines(self) -> Iterator[Line]:
        """Yield one for each picture; raise DataError if a line is not as it should be."""
        are_divided: bool | None = None
        for number, row in self._rows():
            name, labels, given = row[self.file_column], row[self.labels_column], row.get("split")
            if not isinstance(name, str) or not name:
                raise self._fault(number, f"{self.file_column} must name a picture, not {name!r}.")
            if isinstance(labels, str):
                labels = [label.strip() for label in labels.split(self.separator) if label.strip()]
            if not isinstance(labels, list) or not all(isinstance(label, str) and label for label in labels):
                raise self._fault(number, f"{self.labels_column} must be a list of names, not {labels!r:.100}.")
            split = SET_NAMES.get(str(given).strip().lower())
            if (split is None) != (given is None) or are_divided not in (None, split is not None):
                words = "the split must be train, val or test in each line, or in none"
                raise self._fault(number, f"{words}, not {given!r:.100}.")
            are_divided = split is not None
            yield Line(number, name, labels, split)

    def _rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each line, and what is in it."""
        with self.path.open(encoding="utf-8-sig", newline="") as stream:
            try:
                if self.path.suffix.lower() == ".jsonl":
                    for number, text in enumerate(stream, 1):
                        if text.strip():
                            yield number, self._object(number, text)
                    return
                reader = csv.DictReader(stream, strict=True)
                self._require(reader.fieldnames or [], "header: there is no column")
                for row in reader:
                    if None in row or None in row.values():
                        raise self._fault(
                            reader.line_num,
                            "this line has another number of columns than the header. Labels are divided by "
                            f"{self.separator!r}, or a comma in them is in quotes.",
                        )
                    yield reader.line_num, row
            except UnicodeDecodeError as error:
                raise DataError(f"{self.path} is not in UTF-8 ({error}); save it as UTF-8.") from error
            except csv.Error as error:
                raise self._fault(reader.line_num, f"cannot be read as CSV: {error}.") from error

    def _object(self, number: int, text: str) -> dict[str, Any]:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._fault(number, f"this is not JSON: {error}.") from error
        if not isinstance(row, dict):
            raise self._fault(number, "this is no JSON object, as {...}.")
        self._require(list(row), f"line {number}: there is no key")
        return row

    def _require(self, names: Sequence[str], words: str) -> None:
        for key, name in (("file_column", self.file_column), ("labels_column", self.labels_column)):
            if name not in names:
                raise DataError(
                    f"{self.path}, {words} {name!r}.{did_you_mean(name, names)} There are: "
                    f"{', '.join(map(str, names)) or 'none'}. data.module.params.{key} names another."
                )

    def _fault(self, line: int, words: str) -> DataError:
        return DataError(f"{self.path}, line {line}: {words}")


class LabelledImages(ImageFiles):
    """Pictures in `data.root` whose labels are in a file there:

    - CSV with a header (`.csv`): a column `file`, and a column `labels`, as `cat|dog`; empty: the picture has none.
    - JSON lines (`.jsonl`): `{"file": "1.jpg", "labels": ["cat", "dog"]}` in each line.

    A further column or key `split` says of each picture whether it is of train, val or test. Without it they are
    divided 80/10/10 by the seed, such that rare labels get into each set: a picture counts as of its rarest label.

    A batch is {"image": uint8 (B, C, H, W), "label": float32 (B, K) of 0 and 1, "index": int64 (B,)}.

    Args:
        cfg: the whole config.
        labels: the file, in `data.root`.
        images: the folder in `data.root` that the names of the pictures begin in.
        class_names: the labels, in order; None: all that occur, sorted.
        separator: between the labels of a picture in a CSV file.
        file_column, labels_column: what these columns, or keys, are called.
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
            raise DataConfigError(f"data.module.params.separator must be one or more signs, not {separator!r}.")
        self.root = self.root_folder(labels)
        self.file = self.root / labels
        self.folder = self.root / images
        self._named = {"labels": self.file, "images": self.folder}
        self.label_file = LabelFile(self.file, separator, file_column, labels_column)
        self.named = self.class_names = checked_names(class_names)

    def example_batch(self, size: int) -> Batch:
        """Make up a batch as every `ImageData`; each label is one of the first row's, and then of every other's. Reads
        the labels where `class_names` does not give them.

        Raises:
            DataError: the file of labels is missing, or not as it should be.
        """
        if not self.class_names:
            self.check()
            self._name_classes(list(self.label_file.lines()))
        labels = torch.randint(2, (size, len(self.class_names)), generator=Generator().manual_seed(1)).float()
        labels[0] = 1
        return {**super().example_batch(size), "label": labels}

    def read(self) -> dict[str, Samples]:
        lines = list(self.label_file.lines())
        if not lines:
            raise DataError(f"{self.file} names no picture.")
        self._name_classes(lines)
        numbers = {name: number for number, name in enumerate(self.class_names)}
        labels, paths = np.zeros((len(lines), len(numbers)), np.float32), dict[str, int]()
        for row, line in enumerate(lines):
            path = str(self.folder / line.name)
            if path in paths:
                raise DataError(f"{self.file}, line {line.number}: {line.name} is in line {paths[path]} already.")
            paths[path] = line.number
            for label in line.labels:
                if label not in numbers:
                    raise DataError(
                        f"{self.file}, line {line.number}: {label!r} is none of data.module.params.class_names."
                        f"{did_you_mean(label, numbers)} There are: {', '.join(numbers):.300}."
                    )
                labels[row, numbers[label]] = 1
        missing = [path for path in paths if not Path(path).is_file()]
        if missing:
            more = f" So are {len(missing) - 1} more." if len(missing) > 1 else ""
            raise DataError(
                f"{self.file}, line {paths[missing[0]]}: the picture {missing[0]} is missing.{more} "
                "data.module.params.images names the folder that the names begin in."
            )
        without = [name for name, count in zip(self.class_names, labels.sum(0), strict=True) if not count]
        if without:
            log.warning("No picture in %s has the label %s", self.file, ", ".join(without[:20]))
        whole = Samples([*paths], labels)
        if all(line.split is None for line in lines):
            return {"all": whole}
        return by_set(whole, np.array([SPLITS[None].index(str(line.split)) for line in lines]), str(self.file))

    def _name_classes(self, lines: list[Line]) -> None:
        self.class_names = self.named or sorted({label for line in lines for label in line.labels})
        if not self.class_names:
            raise DataError(f"{self.file} names no label at all in its {self.label_file.labels_column}.")

    def _folds(self, samples: Any, number: int, purpose: int) -> np.ndarray:
        """Divide evenly by the rarest label of each picture, so that each set gets its part of it."""
        counts = samples.labels.sum(0)  # (K,)
        rarity = np.where(samples.labels > 0, counts, np.inf)  # (N, K)
        rarest = np.where(samples.labels.any(1), rarity.argmin(1), samples.labels.shape[1])
        return deal(rarest, number, self.cfg.seed, purpose)

    def _describe(self) -> str:
        return f"LabelledImages of {self.file}"
