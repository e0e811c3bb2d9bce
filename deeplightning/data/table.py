"""Split the rows of a table and convert them to arrays of numbers.

`deeplightning.table_spec.TableSpec` prepares them.

N rows, F columns that the network takes, T columns that it predicts.
"""

import calendar
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from deeplightning.config.part_config import PartConfig
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import InMemory, OnDemand
from deeplightning.data.loading import ColumnData, Moments
from deeplightning.data.splits import SET_NAMES, SPLITS, assign_folds, divide_by_set
from deeplightning.data.table_files import TableFile
from deeplightning.data.table_rows import Rows, Table, encoded, numbers_of, read_table
from deeplightning.table_format import DELIMITERS, MISSING, TableError, TableFormat
from deeplightning.table_spec import Codes, Column, TableSpec, Words
from deeplightning.words import did_you_mean

log = logging.getLogger("deeplightning.data")

KINDS = ("number", "category", "ignore")

_MONTHS = "|".join(filter(None, [*calendar.month_name, *calendar.month_abbr]))
_YEAR_NOT_FIRST = re.compile(
    rf"(?!\d{{4}})(\d\d?([-/.])\d\d?\2\d\d|.*\b(19|20)\d\d\b)|.*(?<![a-z])({_MONTHS})(?![a-z])", re.IGNORECASE
)
"""Matches times such as 31.12.2019, 12/31/19, Jan-20 or 2020-Jan-31."""
_WITH_OFFSET = re.compile(r"\d{4}-\d\d-\d\d.\d\d:[\d:.]+(Z|[+-]\d\d(:?\d\d)?)")

MAX_CATEGORIES = 1000
"""Most distinct words of a text column that is a category by default; `columns` in the config allows more."""


class TableData(ColumnData):
    """Rows of one table, or of one for each set, in `data.root`: CSV with a header, JSON lines or Parquet.

    Rows without a target are left out, and their number is logged. Each class occurs in the training set, unless
    `split`, `group`, `time` or separate files determine the sets.

    A single table is split 80/10/10. With a test table, a tenth of the training rows, or one fold of `data.num_splits`,
    is for validation. A column of numbers is standardised by mean and deviation of the training rows; a column of texts
    or booleans is a category. Batches have `input` float32 (B, F), `label` int64 (B,) or `target` float32 (B,) or
    (B, T), and `index`.

    A table is read once, in parts, into the user's cache (`deeplightning.data.table_rows`), which this run and later
    ones map into memory; without a cache, it is read into memory. Inputs larger than
    `deeplightning.data.loading.IN_MEMORY_LIMIT` are prepared for each batch. The results are the same. Memory use is a
    few bytes per row (position, class and order) and the distinct words of each column.

    Args:
        cfg: the whole config; `seed` and `data` are read.
        train: name of the table; *.parquet is Parquet, *.jsonl JSON lines, any other name CSV. CSV and JSON lines may
            be compressed (.gz, .bz2, .zst). Empty lines and comments (#) above the header of CSV are skipped.
        validation, test: names of further tables; None: rows of the training table.
        target: the column to be predicted, or several columns of numbers. A category makes it a classification, and
            numbers a regression.
        columns: number, category or ignore by column name: how to treat a column. For other columns it is inferred.
        only: the columns that the network takes; None: all but the target and the ignored ones.
        missing: "refuse", or "fill": with the mean for numbers, and with an additional category for categories.
        unknown: "other": a category that no training row has becomes the same additional category; or "refuse".
        split: the column that assigns each row to train, val or test.
        group: a column such as a customer; rows with the same value are in the same set.
        time: a column of numbers, dates, or texts that start with the year if they have one; the latest rows are for
            testing, the latest of the others for validation. A row without a time is the oldest.
        limit: use at most this many training rows (validation included), and test rows, chosen by the seed.
        delimiter: of CSV, the character between the values of a row, such as ";" or "\\t".
        decimal: the decimal sign of numbers, "." or ",". The other one, an apostrophe or a blank may separate
            thousands.
        encoding: of CSV, such as utf-8, utf-16 or latin-1.
        missing_words: texts that stand for a missing value, in any case. The empty text always does.

    Attributes:
        table_spec: how a row is prepared; set by `setup`.
    """

    def __init__(
        self,
        cfg: PartConfig,
        train: str,
        target: str | Sequence[str],
        validation: str | None = None,
        test: str | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        only: Sequence[str] | None = None,
        missing: Literal["refuse", "fill"] = "refuse",
        unknown: Literal["other", "refuse"] = "other",
        split: str | None = None,
        group: str | None = None,
        time: str | None = None,
        limit: int | None = None,
        delimiter: str = ",",
        decimal: Literal[".", ","] = ".",
        encoding: str = "utf-8",
        missing_words: Sequence[str] = MISSING,
    ):
        super().__init__(cfg, limit)
        try:
            self.format = TableFormat(delimiter, decimal, encoding, missing_words)  # type: ignore[arg-type]
        except ValueError as error:
            raise DataConfigError(f"data.module.params.{error}.") from None
        self.table_spec: TableSpec | None = None
        self.name_files(train=train, val=validation, test=test)
        self.targets = [target] if isinstance(target, str) else list(target)
        if not self.targets:
            raise DataConfigError("data.module.params.target must name at least one column; it is empty.")
        self.kinds = {str(name): kind for name, kind in (columns or {}).items()}  # YAML reads 2020 as a number
        for name, kind in self.kinds.items():
            if kind not in KINDS:
                raise DataConfigError(
                    f"data.module.params.columns.{name} must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {kind!r}."
                )
        options = {"split": split, "group": group, "time": time}
        given = {option: column for option, column in options.items() if column is not None}
        self.split_by: str | None = next(iter(given), None)
        self.divider: str | None = next(iter(given.values()), None)
        has_folds = cfg.data.num_splits is not None
        excluded = {"split": validation or test or has_folds, "time": has_folds}
        if len(given) > 1 or excluded.get(str(self.split_by)):
            raise DataConfigError(
                f"data.module.params.{self.split_by}: set only one of split, group and time; split cannot be combined "
                "with validation, test or data.num_splits, and time not with data.num_splits."
            )
        self.only = None if only is None else list(only)
        self.missing, self.unknown = missing, unknown

    # ---- reading

    def read(self) -> dict[str, Any]:
        """Read the tables; raise DataError if one cannot be read, lacks a column, or has a value of another kind."""
        types = self._types(TableFile(self.files["train"], self.format))
        files = {name: TableFile(path, self.format) for name, path in self.files.items()}
        named = {*self.kinds, *self.targets}
        bounded = [name for name, kind in types.items() if kind == "category" and name not in named]
        rows = {name: self._rows(file.path, read_table(file, types, bounded)) for name, file in files.items()}
        if self.split_by == "split":
            return self._by_column(rows["train"])
        return rows if len(rows) > 1 else {"all": rows["train"]}

    def _types(self, file: TableFile) -> dict[str, str]:
        """Return the type of each column of the training table: number, category, or word (for the column that
        determines the sets). Raise DataError or DataConfigError if the table cannot be read, or lacks a column that the
        config names."""
        path, schema = file.path, file.schema()
        for key, names in (
            ("target", self.targets),
            ("columns", self.kinds),
            ("only", self.only or []),
            (str(self.split_by), [] if self.divider is None else [self.divider]),
        ):
            for name in names:
                if name not in schema.names:
                    columns = ", ".join(schema.names)
                    sign = next((sign for sign in DELIMITERS if len(schema) == 1 and sign in columns), None)
                    hint = f" Its header is one column; set data.module.params.delimiter to {sign!r}." if sign else ""
                    near = did_you_mean(name, schema.names)
                    raise DataConfigError(
                        f"data.module.params.{key}: {path} has no column {name!r}.{near} Its columns: {columns:.300}."
                        f"{hint}"
                    )
        types = {}
        for field in schema:
            name, own = field.name, _kind_of(field.type)
            kind = self.kinds.get(name)
            if name == self.divider and not self._is_named(name) and name not in self.targets:
                is_moment = pa.types.is_date(field.type) or pa.types.is_timestamp(field.type)
                is_number = own == "number" or is_moment  # of a moment the days since 1970
                kind = "number" if self.split_by == "time" and is_number else "word"
            elif self.only is not None and name not in {*self.only, *self.targets}:
                kind = "ignore"
            elif kind is None:
                kind = own
            if kind is None or (kind == "ignore" and name in self.targets):
                raise DataConfigError(
                    f"data.module.params.columns.{name}: the values in {path} are of type {field.type}. Set it to "
                    "category, number (days of dates) or, unless it is the target, ignore."
                )
            if kind != "ignore":
                types[name] = kind
        for name in self.targets if len(self.targets) > 1 else ():
            if types[name] != "number":
                raise DataConfigError(
                    f"data.module.params.target: several target columns must all be numbers; {name} is a category."
                )
        return types

    def _is_named(self, column: str) -> bool:
        """Return whether `columns` makes this column an input."""
        return self.kinds.get(column, "ignore") != "ignore" and (self.only is None or column in self.only)

    def _rows(self, path: Path, table: Table) -> Rows:
        """Return the rows that have all targets; raise DataError if there are none."""
        dtype = np.int32 if len(table) < 2**31 else np.int64
        every = np.arange(len(table), dtype=dtype)
        targets = [table.column(name, every) for name in self.targets]
        gaps = [values.indices < 0 if isinstance(values, Words) else ~np.isfinite(values) for values in targets]
        absent = np.logical_or.reduce(gaps)
        labels = targets[0].indices if isinstance(targets[0], Words) else np.zeros(len(table))
        rows = Rows(table, every, labels.astype(dtype))
        if not len(table):
            raise DataError(f"{path} has a header and no rows.")
        if not absent.any():
            return rows
        message = f"{path}, column {', '.join(self.targets)}: the target is missing or not finite in "
        message += f"{int(absent.sum()):,} of {len(absent):,} rows, first in row {int(absent.argmax()) + 1}"
        if absent.all():
            raise DataError(f"{message}. No row is left to train on; name another column in data.module.params.target.")
        log.warning("%s. These rows are left out.", message)
        return rows.take(np.flatnonzero(~absent))

    # ---- splitting

    def _by_column(self, rows: Rows) -> dict[str, Any]:
        words = rows.column(str(self.divider))
        assert isinstance(words, Words), "`_types` makes it words"
        names = [SET_NAMES.get(word.lower()) for word in words.words]
        sets = np.array([*(SPLITS[None].index(name) if name else -1 for name in names), -1], np.int8)[words.indices]
        if (sets < 0).any():
            row = int((sets < 0).argmax())
            word = "an empty value" if words.indices[row] < 0 else repr(words.words[words.indices[row]])
            raise DataError(
                f"{self.files['train']}, column {self.divider}, row {rows.positions[row] + 1}: {word} is not a set; "
                "it must be train, val or test."
            )
        return divide_by_set(rows, sets, f"{self.files['train']}, column {self.divider}")

    def _folds(self, samples: Any, number: int, purpose: int) -> np.ndarray:
        if self.split_by == "group":
            values = samples.column(str(self.divider))
            _, groups = np.unique(values.indices if isinstance(values, Words) else values, return_inverse=True)
            if groups.max() + 1 < number:
                raise DataError(
                    f"{self._describe()}: column {self.divider} has {groups.max() + 1} values, too few for {number} "
                    "folds."
                )
            return assign_folds(np.zeros(groups.max() + 1, np.int64), number, self.cfg.seed, purpose)[groups]
        if self.split_by == "time":
            values = samples.column(str(self.divider))
            if isinstance(values, Words):
                wrong = [*filter(_YEAR_NOT_FIRST.match, values.words)]
                texts = {re.sub(r"\d+", "", word, count=1) for word in values.words}  # such as "step " of "step 2001"
                has_counts = len(wrong) < len(values.words) and len(texts) == 1
                if wrong and not has_counts:
                    raise DataError(
                        f"{self._describe()}, column {self.divider}: {wrong[0]!r:.60} names its month or does not "
                        "begin with its year, so it cannot be sorted. data.module.params.time needs numbers, or dates "
                        "such as 2024-02-29."
                    )
                # Numbers compare by value, so that 2024/2/9 is before 2024/10/1.
                parts = {w: [int(p) if n % 2 else p for n, p in enumerate(re.split(r"(\d+)", w))] for w in values.words}
                if all(map(_WITH_OFFSET.fullmatch, values.words)):
                    with suppress(ValueError):  # a day that there is not
                        parts = {word: [self.format.number(word)] for word in values.words}  # in UTC
                ranks = {word: rank for rank, word in enumerate(sorted(values.words, key=lambda w: (parts[w], w)))}
                keys = np.array([*map(ranks.__getitem__, values.words), -1])[values.indices]
            else:
                keys = np.where(np.isnan(values), -np.inf, values)
            latest_first = np.argsort(keys, kind="stable")[::-1]
            folds = np.empty(len(keys), np.int64)
            folds[latest_first] = np.arange(len(keys)) * number // len(keys)
            return folds
        return super()._folds(samples, number, purpose)

    # ---- preparing

    def learn(self, train: Rows) -> None:
        """Make the spec; raise DataError if a column has too many categories, or only missing values."""
        path, moments = self.files["train"], dict[str, Moments]()
        words, seen = dict[str, Sequence[str]](), dict[str, np.ndarray]()
        target_moments = Moments()
        for part in train.parts():
            for name, values in part.items():
                if isinstance(values, Words):
                    words[name] = values.words
                    seen.setdefault(name, np.zeros(len(values.words) + 1, bool))[values.indices] = True
                else:
                    moments.setdefault(name, Moments()).add(values[np.isfinite(values)])
            if self.targets[0] not in words:
                target_moments.add(np.stack([part[name] for name in self.targets], 1))
        found = {name: [words[name][n] for n in np.flatnonzero(mask[:-1]).tolist()] for name, mask in seen.items()}
        columns = [
            _column(path, name, found[name] if name in found else moments[name], name in self.kinds)
            for name in part
            if name not in self.targets and (name != self.divider or self._is_named(name))
        ]
        if not columns:
            raise DataError(f"{path} has no column for the network besides the target.")
        self.table_spec = TableSpec(tuple(columns), self.unknown, self.missing, self.format)
        if self.targets[0] in found:
            self.class_names = sorted(found[self.targets[0]], key=_natural_key)
        else:
            self.learn_targets(self.targets, target_moments)

    def _prepare(self, samples: Rows) -> InMemory | OnDemand:
        spec = self.table_spec
        assert spec is not None, "`setup` has read the rows"
        split = next(split for split, rows in self._samples.items() if rows is samples)
        is_fold = split == "val" and self.cfg.data.num_splits is not None  # rows of the training file
        path = self.files["train" if is_fold or split not in self.files else split]
        target = samples.column(self.targets[0])
        small = {"label": self._classes(target, path)} if isinstance(target, Words) else {}
        fits = self._fits(4 * len(spec.columns))
        inputs = np.empty((len(samples) if fits else 0, len(spec.columns)), np.float32)
        start = 0
        try:
            for part in samples.parts():
                rows = spec.encode(part, samples.positions[start:])  # even if not stored, to find errors now
                if fits:
                    inputs[start : start + len(rows)] = rows
                start += len(rows)
        except TableError as error:
            raise DataError(
                f"{path}: {error}. data.module.params.missing=fill and unknown=other accept such values."
            ) from error
        targets = () if self.class_names else self.targets
        if not fits:
            on_demand = OnDemand(samples, partial(encoded, spec, targets), small)
            on_demand.needs_workers = samples.table.path is not None  # each would get a copy of rows in memory
            return on_demand
        small |= numbers_of(targets, {name: samples.column(name) for name in targets})
        return InMemory({"input": torch.from_numpy(inputs)}, small)

    def _classes(self, target: Words, path: Path) -> torch.Tensor:
        """Return the class of each row of a file, int64 (N,)."""
        codes = Codes(self.class_names)
        labels = np.array([*(codes.find(word, -1) for word in target.words), -1])[target.indices]
        if (labels < 0).any():
            raise DataError(
                f"{path}, column {self.targets[0]}: no training row has the class "
                f"{target.words[target.indices[(labels < 0).argmax()]]!r}."
            )
        return torch.from_numpy(labels)

    def example_inputs(self, number: int) -> dict[str, np.ndarray]:
        """Return rows to verify a bundle with, from the validation set if there is one: JSON objects, (n,)."""
        assert self.table_spec is not None, "`setup` has read the rows"
        found = self._samples.get("val") or self._samples["train"]
        part, columns = found.load(np.arange(min(number, len(found)))), dict[str, list[Any]]()
        for name in (column.name for column in self.table_spec.columns):
            values = part[name]
            if isinstance(values, Words):
                columns[name] = [None if code < 0 else values.words[code] for code in values.indices.tolist()]
            else:
                columns[name] = [None if math.isnan(value) else value for value in values.tolist()]
        rows = zip(*columns.values(), strict=True)
        return {"rows": np.array([json.dumps(dict(zip(columns, row, strict=True))) for row in rows])}


def _natural_key(word: str) -> tuple[int, float, str]:
    """Return the sort key of a class name: numbers by value, then texts."""
    try:
        return (0, float(word), word)
    except ValueError:
        return (1, 0.0, word)


def _kind_of(found: pa.DataType) -> str | None:
    """Return the kind of a column of an Arrow type, or None if the config must set it."""
    types = pa.types
    if types.is_integer(found) or types.is_floating(found) or types.is_decimal(found):
        return "number"
    if types.is_dictionary(found):
        return _kind_of(found.value_type)
    return "category" if types.is_string(found) or types.is_large_string(found) or types.is_boolean(found) else None


def _column(path: Path, name: str, found: list[str] | Moments, is_named: bool) -> Column:
    """Return how a column is prepared, from its words or numbers in the training rows. Raise DataError if it has no
    values, or more than `MAX_CATEGORIES` categories and the config does not name it."""
    if not (found.count if isinstance(found, Moments) else found):
        raise DataError(
            f"{path}, column {name}: no training row has a value. Set data.module.params.columns.{name}=ignore."
        )
    if isinstance(found, Moments):
        mean, std = float(found.mean), float(found.std)
        return Column(name, "number", mean, std if std > 0 and math.isfinite(std) else 1.0)
    if len(found) > MAX_CATEGORIES and not is_named:
        raise DataError(
            f"{path}, column {name}: {len(found):,} different texts in the training rows. Set "
            f"data.module.params.columns.{name} to ignore, or to category if you mean that many."
        )
    return Column(name, "category", categories=tuple(sorted(found, key=_natural_key)))
