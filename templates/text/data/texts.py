"""Texts of one column of a CSV file become a data module, classes are in another; a tenth validates, a tenth tests."""

import logging
from pathlib import Path

import numpy as np

from deeplightning.data.data_errors import DataError
from deeplightning.data.text import TextData, Texts
from deeplightning.table_format import decoded, named_columns, records

log = logging.getLogger(__name__)


class TextsOfColumns(TextData):
    """The rows of a CSV file with a header.

    Args:
        cfg: the whole config; `seed` decides which rows validate and test.
        file: its path, from the working directory.
        text, label: names of columns.
        delimiter: between columns.
        encoding: of the file.
        class_names: the values of the column `label`, in the order of their numbers.
        options: see `TextData`.

    Raises:
        DataError: the file lacks a column, or has a label that is none of the classes.
    """

    def __init__(self, cfg, file, text, label, class_names, delimiter=",", encoding="utf-8", **options):
        super().__init__(cfg, class_names=class_names, **options)
        self.file, self.columns = Path(file).expanduser(), (text, label)
        self.delimiter, self.encoding = delimiter, encoding

    def read(self):
        """The rows of each set; a row without text or label is left out."""
        numbers = {name: number for number, name in enumerate(self.class_names)}
        texts, labels, lines, incomplete = [], [], [], 0
        (_, header), *rows = records(decoded(self.file.read_bytes(), self.encoding), self.delimiter)
        header = named_columns(header, rows[0][1] if rows else ())
        for line, values in rows:
            row = dict(zip(header, values, strict=False))
            text, label = (row.get(column, "").strip() for column in self.columns)
            if not text or not label:
                incomplete += 1
            elif label not in numbers:
                raise DataError(f"{self.file}, line {line}: {label!r} is none of {self.class_names}")
            else:
                texts.append(text)
                labels.append(numbers[label])
                lines.append(line)
        if not texts:
            raise DataError(f"{self.file}: no row has values in the columns {self.columns}")
        if incomplete:
            log.warning("%s: %d rows without text or label are left out", self.file, incomplete)
        found = Texts(texts, np.array(labels, np.int64), np.array(lines), self.file, self.columns[0], self.encoding)
        order = np.random.RandomState(self.cfg.seed).permutation(len(found))
        tenth = max(1, len(found) // 10)
        parts = {"val": order[:tenth], "test": order[tenth : 2 * tenth], "train": order[2 * tenth :]}
        return {name: found.take(np.sort(positions)) for name, positions in parts.items()}
