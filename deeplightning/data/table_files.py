"""Read tables from files with pyarrow: CSV, JSON lines and Parquet become columns of numbers or words.

It imports no torch, so that `deeplightning init` reads a table as a training does. N rows.
"""

import codecs
import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, json, parquet

from deeplightning.data.data_errors import DataError
from deeplightning.table_spec import (
    DELIMITERS,
    TableError,
    TableFormat,
    Words,
    above_header,
    aligned,
    named_columns,
    records,
    word_of,
)

HEAD = 2**20
"""Bytes of a file by which its format is recognised."""

_CONVERTED = {
    **dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods"), "pandas.read_excel('{0}').to_csv('{1}.csv', index=False)"),
    ".dta": "pandas.read_stata('{0}').to_csv('{1}.csv', index=False)",
    ".json": "pandas.read_json('{0}').to_json('{1}.jsonl', orient='records', lines=True)",
}
"""What makes a table that can be read of a file that cannot, by the end of its name."""

Types = Mapping[str, str]
"""By the name of a column: number, or category or word, which both give words."""


class TableFile:
    """A table in a file.

    Args:
        path: of CSV with a header, JSON lines (.jsonl, .ndjson) or Parquet (.parquet, .pq); the first two may be
            compressed (.gz, .bz2, .zst).
        form: how its values are written; of Parquet and JSON lines only the missing words and the decimal sign count.

    Attributes:
        names: of its columns.
        above: lines of CSV above the header.

    Raises:
        DataError: it cannot be read, or has two columns of one name.
    """

    def __init__(self, path: Path, form: TableFormat):
        self.path, self.form = path, form
        self.above = 0
        self.kind = kind_of_file(path)
        with self._as_data_errors():
            if self.kind == "parquet":
                self.names: Sequence[str] = parquet.read_schema(path).names
                named_columns(self.names)
                return
            text = text_of(head(path), form.encoding)
            if self.kind == "json":
                self.names = named_columns(self._json().column_names)
                return
            self.above, quote = above_header(text, form.delimiter)
            header, first = [*(row for _, row in itertools.islice(records(text, form.delimiter), 2)), [], []][:2]
            if not header:
                raise DataError(f"{path} cannot be read as a table: Empty CSV file.")
            self.names = named_columns(header, first)
        self._parse = csv.ParseOptions(
            delimiter=form.delimiter, quote_char=quote or False, newlines_in_values=quote is not None
        )

    # ---- CSV

    def _open(self, types: Types | None) -> csv.CSVStreamingReader:
        """Open a CSV file for some columns, all as text; None: for all, as what its first block looks like."""
        words = {form for word in self.form.missing_words for form in (word, word.upper(), word.capitalize())}
        read = csv.ReadOptions(
            skip_rows=self.above, column_names=self.names, skip_rows_after_names=1, encoding=self.form.encoding
        )
        convert = csv.ConvertOptions(
            column_types={name: pa.string() for name in types or ()},
            include_columns=list(types or ()),
            null_values=["", *sorted(words)],
            strings_can_be_null=True,
            decimal_point=self.form.decimal,
        )
        return csv.open_csv(self.path, read_options=read, parse_options=self._parse, convert_options=convert)

    def _json(self) -> pa.Table:
        with pa.input_stream(str(self.path)) as file:
            return json.read_json(file)

    def schema(self) -> pa.Schema:
        """Return names and types of the columns; of CSV those of its first block.

        There, numbers with leading zeros are texts, and texts that are numbers with a separator of thousands are
        numbers.

        Raises:
            DataError: the table cannot be read.
        """
        with self._as_data_errors():
            if self.kind == "parquet":
                return parquet.read_schema(self.path)
            if self.kind == "json":
                return self._json().schema
            with self._open(None) as reader:
                schema = reader.schema
            with self._open(dict.fromkeys(self.names, "word")) as reader:
                block = reader.read_next_batch()
        for place, field in enumerate(schema):
            texts = block.column(place)
            if pa.types.is_integer(field.type) and pc.any(pc.match_substring_regex(texts, r"^\s*0\d+\s*$")).as_py():
                schema = schema.set(place, field.with_type(pa.string()))
            elif pa.types.is_string(field.type) and texts.null_count < len(texts):
                with contextlib.suppress(ValueError):
                    _numbers(texts, self.form)
                    schema = schema.set(place, field.with_type(pa.float64()))
        return schema

    # ---- all kinds

    def batches(self, types: Types, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows in parts that fit into memory.

        Args:
            rows: of a part of Parquet.

        Raises:
            DataError: the table cannot be read, or lacks a column.
        """
        if absent := [name for name in types if name not in self.names]:
            raise DataError(f"{self.path} lacks columns of the training table: {', '.join(absent)}.")
        with contextlib.ExitStack() as opened, self._as_data_errors():
            if self.kind == "parquet":
                file = opened.enter_context(parquet.ParquetFile(self.path))
                yield from file.iter_batches(batch_size=rows, columns=list(types))
            elif self.kind == "json":
                yield from self._json().select(list(types)).to_batches()
            else:
                yield from opened.enter_context(self._open(types))

    def parts(self, types: Types, rows: int) -> Iterator[dict[str, "np.ndarray | Words"]]:
        """Yield the rows in parts that fit into memory, by column.

        Raises:
            DataError: the table cannot be read, or has a value that is not of the kind of its column.
        """
        before = 0
        for batch in self.batches(types, rows):
            yield {name: self._values(name, batch.column(name), kind, before) for name, kind in types.items()}
            before += len(batch)

    def _values(self, name: str, column: pa.Array, kind: str, before: int) -> "np.ndarray | Words":
        """Return a column as float64 (N,), NaN where it is missing, or as words; `before`: rows of former parts."""
        if pa.types.is_dictionary(column.type):
            column = pc.cast(column, column.type.value_type)
        if pa.types.is_temporal(column.type):
            column = pc.cast(column, pa.string())
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        try:
            if kind != "number":
                texts = pc.cast(column, pa.string())
                is_float = pa.types.is_floating(column.type)  # of which Arrow writes 1e+12 for a whole number
                return _words(pc.cast(texts, pa.float64()) if is_float else texts, self.form)
            if not is_text:
                numbers = pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
                infinite = [value for value in (math.inf, -math.inf) if self.form.is_missing(value)]
                return np.where(np.isin(numbers, infinite), np.nan, numbers)
            return _numbers(column, self.form)
        except pa.ArrowException as error:
            what = "numbers" if kind == "number" else "words"
            raise DataError(
                f"{self.path}, column {name}: values of type {column.type} are not {what}: {_first(error)}."
            ) from error
        except ValueError as error:
            row, word = error.args
            raise DataError(
                f"{self.path}, column {name}, row {before + row + 1}: {word!r} is not a number. If it stands for a "
                "missing value, list it in data.module.params.missing_words; otherwise set "
                f"data.module.params.columns.{name} to category or ignore."
            ) from None

    @contextlib.contextmanager
    def _as_data_errors(self) -> Iterator[None]:
        """Raise what is wrong with a table as one note for people."""
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeError) as error:
            hint = ""
            if isinstance(error, UnicodeError) or "UTF8" in str(error):
                hint = (
                    f" It is not in {self.form.encoding}; set data.module.params.encoding, such as latin-1 or utf-16."
                )
            elif "columns, got" in str(error):
                hint = f" A value that has {self.form.delimiter!r} in it needs quotes; remove lines that are not rows."
            elif self.kind == "json":
                hint = " JSON lines hold an object on each line, with values of one type for each key."
            raise DataError(f"{self.path} cannot be read as a table: {_first(error)}.{hint}") from error
        except TableError as error:
            raise DataError(f"{self.path}: {error}") from error


def guess_format(path: Path) -> TableFormat:
    """Return delimiter, decimal sign and encoding of a file, by its first megabyte.

    Raises:
        DataError: it cannot be read, or has no header; a header of numbers is 0, 1, …, as pandas numbers columns.
    """
    if kind_of_file(path) != "csv":
        return TableFormat()
    data = head(path)
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not data.startswith(codecs.BOM_UTF32_LE)
    if b"\0" in data and not is_wide:
        raise DataError(
            f"{path} is not a text file in UTF-8, or in UTF-16 with a byte order mark; a table is CSV, JSON lines or "
            "Parquet, the first two perhaps compressed (.gz, .bz2, .zst)."
        )
    encoding = "utf-16" if is_wide else "utf-8"
    try:
        text = text_of(data, encoding)
    except UnicodeError:  # Windows writes € and dashes between 0x80 and 0x9F, where Latin-1 has control characters
        is_latin = not re.search(rb"[\x80-\x9f]", data) or re.search(rb"[\x81\x8d\x8f\x90\x9d]", data)
        encoding = "latin-1" if is_latin else "cp1252"
        text = data.decode(encoding)
    best, rows = (-1.0, 0), list[list[str]]()
    delimiter = ","
    for rank, sign in enumerate((" ", *sorted(DELIMITERS, key=";\t|,".find, reverse=True))):
        found = list[list[str]]()
        with contextlib.suppress(TableError):
            found.extend(values for _, values in itertools.islice(records(text, sign), 1000))
        found = found[:-1] if len(found) > 2 and len(data) == HEAD else found
        header, first = [*found, [], []][:2]
        width = len(aligned(header, first))
        same = sum(len(values) == width for values in found[1:]) / max(1, len(found) - 1)
        if len(header) > 1 and (same, rank) > best and (sign != " " or same == 1):
            best, delimiter, rows = (same, rank), sign, found
    header, first = [*(rows or [values for _, values in itertools.islice(records(text), 1)]), [], []][:2]
    below = [{value.strip() for value in values} for values in itertools.zip_longest(*rows[1:], fillvalue="")]
    pairs = itertools.zip_longest((name.strip() for name in aligned(header, first)), below, fillvalue="")
    names_nothing = all(_is_number(name, TableFormat()) or name in values for name, values in pairs)
    if header != [str(n) for n in range(len(header))] and names_nothing:
        raise DataError(f"{path}: the first line, {', '.join(header[:8])}, names no columns; put a header above it.")
    cells = [cell.strip() for values in rows[1:] for cell in values if "." in cell or "," in cell]
    points, commas = ({cell for cell in cells if _is_number(cell, TableFormat(decimal=sign))} for sign in ".,")
    only_commas, only_points = len(commas - points), len(points - commas)
    is_comma = only_commas > only_points or (
        delimiter != "," and not only_points and any("," in cell for cell in commas)
    )
    return TableFormat(delimiter, "," if is_comma else ".", encoding)


def _is_number(text: str, form: TableFormat) -> bool:
    try:
        form.number(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a table.

    Attributes:
        file: the table.
        size: how many were read.
        is_whole: whether there are no others.
        counts: by column how often each text is in it, in the order in which they come, without blanks around them; ""
            is what is missing.
        types: by column the name of a type that is neither number nor text.
    """

    file: TableFile
    size: int
    is_whole: bool
    counts: dict[str, dict[str, int]]
    types: dict[str, str]


def first_rows(path: Path, form: TableFormat, most: int) -> FirstRows:
    """Read the first rows of a table; raise DataError if it cannot be read."""
    file, batches = TableFile(path, form), list[pa.RecordBatch]()
    for batch in file.batches(dict.fromkeys(file.names, "word"), 2**16):
        batches.append(batch)
        if sum(map(len, batches)) > most:
            break
    nothing = pa.schema([(name, pa.string()) for name in file.names])
    found = pa.Table.from_batches(batches, None if batches else nothing)
    table, counts = found.slice(0, most), dict[str, dict[str, int]]()
    types = dict[str, str]()
    for name in file.names:
        column = table.column(name)
        try:
            texts = pc.cast(column, pa.string())
        except pa.ArrowException:  # of lists, of bytes that are no text, …
            counts[name], types[name] = {"": len(table)}, str(column.type)
            continue
        each = pc.value_counts(pc.fill_null(pc.utf8_trim_whitespace(texts), ""))
        counts[name] = dict(zip(each.field("values").to_pylist(), each.field("counts").to_pylist(), strict=True))
    return FirstRows(file, len(table), len(found) <= most, counts, types)


def kind_of_file(path: Path) -> str:
    """Return parquet, json (JSON lines) or csv, by the end of a file's name.

    Raises:
        DataError: it is something that is not read; the message has the command that converts it.
    """
    end = Path(re.sub(r"\.(gz|bz2|zst)$", "", path.name.lower())).suffix
    if end in _CONVERTED:
        command = f'python -c "import pandas; {_CONVERTED[end]}"'.format(path.name, path.stem)
        raise DataError(f"{path}: a file {end} is not read as a table. In its folder, this converts it: {command}")
    return "parquet" if end in (".parquet", ".pq") else "json" if end in (".jsonl", ".ndjson") else "csv"


def head(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed; raise DataError if it cannot be read."""
    try:
        with pa.input_stream(str(path)) as file:
            return file.read(HEAD)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as a table: {_first(error)}.") from error


def text_of(data: bytes, encoding: str) -> str:
    """Return the text of the first bytes of a file; the last character may be cut off."""
    return codecs.getincrementaldecoder(encoding)().decode(data, final=len(data) < HEAD).removeprefix("\ufeff")


def _numbers(texts: pa.Array, form: TableFormat) -> np.ndarray:
    """Return texts as float64 (N,), as `TableFormat.number` reads them; NaN where they are missing.

    Raises:
        ValueError: one is not a number; its arguments are the row, from 0, and the text.
    """
    plain = texts
    try:  # the quick way, without blanks and separators of thousands
        if form.decimal == ",":
            if pc.any(pc.match_substring(texts, ".")).as_py():
                raise pa.ArrowInvalid
            plain = pc.replace_substring(texts, ",", ".")
        return pc.cast(plain, pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
    except pa.ArrowException:
        found = _words(texts, form)
    numbers = np.full(len(found.words) + 1, np.nan)
    for place, word in enumerate(found.words):
        if not form.is_missing(word):
            try:
                numbers[place] = form.number(word)
            except ValueError:
                raise ValueError(int((found.indices == place).argmax()), word) from None
    return numbers[found.indices]


def _words(column: pa.Array, form: TableFormat) -> Words:
    """Return texts, without blanks around them, or floating point numbers as words."""
    encoded = pc.dictionary_encode(column if pa.types.is_floating(column.type) else pc.utf8_trim_whitespace(column))
    values = encoded.dictionary.to_pylist()
    gone = [number for number, value in enumerate(values) if form.is_missing(value)]
    indices = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return Words([*map(word_of, values)], np.where(np.isin(indices, gone), -1, indices))


def _first(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")
