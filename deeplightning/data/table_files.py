"""Read tables from files with pyarrow: CSV, JSON lines and Parquet become columns of numbers or words.

It does not import torch, since `deeplightning init` reads tables with it, too. N rows.
"""

import codecs
import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, json, parquet

from deeplightning.data.data_errors import DataError
from deeplightning.table_format import (
    DELIMITERS,
    TableError,
    TableFormat,
    above_header,
    aligned,
    named_columns,
    records,
)
from deeplightning.table_spec import Words, word_of
from deeplightning.words import is_number

HEAD_BYTES = 2**20
"""Length of the start of a file that is read to recognise its format."""

_CONVERSIONS = {
    **dict.fromkeys((".xlsx", ".xlsm", ".xls", ".ods"), "pandas.read_excel('{0}').to_csv('{1}.csv', index=False)"),
    ".dta": "pandas.read_stata('{0}').to_csv('{1}.csv', index=False)",
    ".json": "pandas.read_json('{0}').to_json('{1}.jsonl', orient='records', lines=True)",
}
"""Command that converts an unsupported file to a supported one, by file extension."""

Types = Mapping[str, str]
"""The type of each column by name: number, or category or word, which are both read as words."""


class TableFile:
    """A table in a file.

    Args:
        path: CSV with a header, JSON lines (.jsonl, .ndjson) or Parquet (.parquet, .pq); the first two may be
            compressed (.gz, .bz2, .zst).
        form: how values are written; for Parquet and JSON lines, only missing words and decimal sign are used.

    Attributes:
        names: of the columns.
        above: number of lines above the header of a CSV file.

    Raises:
        DataError: the file cannot be read, or has two columns of one name.
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
                self.names = self._json().column_names
                named_columns(self.names)
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

    def _open(self, types: Types | None, reads_ahead: bool = True) -> csv.CSVStreamingReader:
        """Open a CSV file for some columns, all as text; None: all columns, with the types of the first block."""
        words = {form for word in self.form.missing_words for form in (word, word.upper(), word.capitalize())}
        read = csv.ReadOptions(
            use_threads=reads_ahead, skip_rows=self.above, column_names=self.names, skip_rows_after_names=1,
            encoding=self.form.encoding,
        )  # fmt: skip
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
        """Return names and types of the columns; for CSV, the types are inferred from the first block.

        There, numbers with leading zeros are texts, and texts that are numbers with thousands separators are numbers.

        Raises:
            DataError: the table cannot be read.
        """
        with self._as_data_errors():
            if self.kind == "parquet":
                return parquet.read_schema(self.path)
            if self.kind == "json":
                return self._json().schema
            with self._open(None, reads_ahead=False) as reader:
                schema = reader.schema
            with self._open(dict.fromkeys(self.names, "word"), reads_ahead=False) as reader:
                block = reader.read_next_batch()
        for index, field in enumerate(schema):
            texts = block.column(index)
            if pa.types.is_integer(field.type) and pc.any(pc.match_substring_regex(texts, r"^\s*0\d+\s*$")).as_py():
                schema = schema.set(index, field.with_type(pa.string()))
            elif pa.types.is_string(field.type) and texts.null_count < len(texts):
                with contextlib.suppress(ValueError):
                    _numbers(texts, self.form)
                    schema = schema.set(index, field.with_type(pa.float64()))
        return schema

    # ---- all kinds

    def batches(self, types: Types, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows in parts that fit into memory.

        Args:
            types: of the columns to read.
            rows: number of rows in a part, for Parquet.

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
            DataError: the table cannot be read, or a value does not have the type of its column.
        """
        before = 0
        for batch in self.batches(types, rows):
            yield {name: self._values(name, batch.column(name), kind, before) for name, kind in types.items()}
            before += len(batch)

    def _values(self, name: str, column: pa.Array, kind: str, before: int) -> "np.ndarray | Words":
        """Return a column as float64 (N,), NaN if missing, or as words; `before`: number of rows in earlier parts."""
        if pa.types.is_dictionary(column.type):
            column = pc.cast(column, column.type.value_type)
        if pa.types.is_temporal(column.type):
            column = pc.cast(column, pa.string())
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        try:
            if kind != "number":
                texts = pc.cast(column, pa.string())
                is_float = pa.types.is_floating(column.type)  # Arrow writes the whole number 1e12 as 1e+12
                return _words(pc.cast(texts, pa.float64()) if is_float else texts, self.form)
            return _numbers(column, self.form) if is_text else _present(pc.cast(column, pa.float64(), False), self.form)
        except pa.ArrowException as error:
            wanted = "numbers" if kind == "number" else "words"
            raise DataError(
                f"{self.path}, column {name}: values of type {column.type} are not {wanted}: {_first_line(error)}."
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
        """Raise errors of libraries as DataError, with a hint."""
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeError) as error:
            hint = ""
            if self.kind != "json" and (isinstance(error, UnicodeError) or "UTF8" in str(error)):
                hint = f" It is not in {self.form.encoding}; set data.module.params.encoding, for example to latin-1."
            elif "columns, got" in str(error):
                hint = f" Quote values that contain {self.form.delimiter!r}; remove lines that are not rows."
            elif self.kind == "json":
                hint = " JSON lines need one object per line, in UTF-8, with values of one type for each key."
            raise DataError(f"{self.path} cannot be read as a table: {_first_line(error)}.{hint}") from error
        except TableError as error:
            raise DataError(f"{self.path}: {error}") from error


def guess_format(path: Path) -> TableFormat:
    """Infer delimiter, decimal sign and encoding of a file from its first megabyte.

    Raises:
        DataError: the file cannot be read, or has no header; numbers are one only if they are 0, 1, …, as in pandas.
    """
    if kind_of_file(path) != "csv":
        return TableFormat()
    data = head(path)
    is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not data.startswith(codecs.BOM_UTF32_LE)
    if b"\0" in data and not is_wide:
        raise DataError(
            f"{path} is not a text file in UTF-8, or in UTF-16 with a byte order mark; a table is CSV, JSON lines or "
            "Parquet; CSV and JSON lines may be compressed (.gz, .bz2, .zst)."
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
        found = found[:-1] if len(found) > 2 and len(data) == HEAD_BYTES else found
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
    is_comma = only_commas > only_points or (delimiter != "," and not only_points and any("," in one for one in commas))
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
        size: number of rows that were read.
        is_whole: whether these are all rows.
        counts: by column, the number of occurrences of each text, stripped, in order of first occurrence; "" stands for
            missing values.
        types: by column, the name of a type that is neither number nor text.
    """

    file: TableFile
    size: int
    is_whole: bool
    counts: dict[str, dict[str, int]]
    types: dict[str, str]


def first_rows(path: Path, form: TableFormat, limit: int) -> FirstRows:
    """Read at most `limit` rows of a table; raise DataError if it cannot be read."""
    file, batches = TableFile(path, form), list[pa.RecordBatch]()
    for batch in file.batches(dict.fromkeys(file.names, "word"), 2**16):
        batches.append(batch)
        if sum(map(len, batches)) > limit:
            break
    empty = pa.schema([(name, pa.string()) for name in file.names])
    found = pa.Table.from_batches(batches, None if batches else empty)
    table, counts = found.slice(0, limit), dict[str, dict[str, int]]()
    types = dict[str, str]()
    for name in file.names:
        column = table.column(name)
        try:
            texts = pc.cast(column, pa.string())
        except pa.ArrowException:  # lists, bytes that are not text, …
            counts[name], types[name] = {"": len(table)}, str(column.type)
            continue
        each = pc.value_counts(pc.fill_null(pc.utf8_trim_whitespace(texts), ""))
        counts[name] = dict(zip(each.field("values").to_pylist(), each.field("counts").to_pylist(), strict=True))
    return FirstRows(file, len(table), len(found) <= limit, counts, types)


def kind_of_file(path: Path) -> str:
    """Return parquet, json (JSON lines) or csv, by the extension of a file.

    Raises:
        DataError: the format is not supported; the message has a command that converts the file.
    """
    end = Path(re.sub(r"\.(gz|bz2|zst)$", "", path.name.lower())).suffix
    if end in _CONVERSIONS:
        command = f'python -c "import pandas; {_CONVERSIONS[end]}"'.format(path.name, path.stem)
        raise DataError(f"{path}: {end} files are not supported as tables. In its folder, this converts it: {command}")
    return "parquet" if end in (".parquet", ".pq") else "json" if end in (".jsonl", ".ndjson") else "csv"


def head(path: Path) -> bytes:
    """Return the first `HEAD_BYTES` bytes of a file, decompressed; raise DataError if it cannot be read."""
    try:
        with pa.input_stream(str(path)) as file:
            return file.read(HEAD_BYTES)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as a table: {_first_line(error)}.") from error


def text_of(data: bytes, encoding: str) -> str:
    """Return the text of the first bytes of a file; the last character may be cut off."""
    return codecs.getincrementaldecoder(encoding)().decode(data, final=len(data) < HEAD_BYTES).removeprefix("\ufeff")


def _numbers(texts: pa.Array, form: TableFormat) -> np.ndarray:
    """Convert texts to float64 (N,) like `TableFormat.number`; NaN if missing. Raise ValueError, with its row, from 0,
    and the text, if one is not a number."""
    is_gap = pc.is_in(pc.utf8_lower(texts), pa.array(form.missing_words, texts.type))
    plain = pc.if_else(is_gap, pa.scalar(None, texts.type), texts)
    try:  # fast path: no blanks or thousands separators
        if form.decimal == ",":
            if pc.any(pc.match_substring(plain, ".")).as_py():
                raise pa.ArrowInvalid
            plain = pc.replace_substring(plain, ",", ".")
        return _present(pc.cast(plain, pa.float64()), form)
    except pa.ArrowException:
        found = _words(texts, form)
    numbers = np.full(len(found.words) + 1, np.nan)
    for index, word in enumerate(found.words):
        if not form.is_missing(word):
            try:
                numbers[index] = form.number(word)
            except ValueError:
                raise ValueError(int((found.indices == index).argmax()), word) from None
    return numbers[found.indices]


def _present(column: pa.Array, form: TableFormat) -> np.ndarray:
    """Return numbers as float64 (N,), with NaN in place of those that are missing words."""
    numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
    gaps = [float(word) for word in form.missing_words if is_number(word)]  # such as inf or -999
    return np.where(np.isin(numbers, gaps), np.nan, numbers)


def _words(column: pa.Array, form: TableFormat) -> Words:
    """Return stripped texts, or floating point numbers, as words."""
    encoded = pc.dictionary_encode(column if pa.types.is_floating(column.type) else pc.utf8_trim_whitespace(column))
    values = encoded.dictionary.to_pylist()
    missing = [number for number, value in enumerate(values) if form.is_missing(value)]
    indices = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return Words([*map(word_of, values)], np.where(np.isin(indices, missing), -1, indices))


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")
