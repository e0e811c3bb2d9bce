"""Read tables from files with pyarrow: CSV, JSON lines and Parquet become columns of numbers or words.

It imports no torch, so that `deeplightning init` reads a table as a training does. N rows.
"""

import codecs
import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, json, parquet

from deeplightning.data.data_errors import DataError
from deeplightning.table_spec import DELIMITERS, TableError, TableFormat, Words, above_header, named_columns, records

HEAD = 2**20
"""Bytes of a file by which its format is recognised."""

MEMORY = 4
"""How many times its size, in a file of CSV, a table takes in memory while it is read: 3 to 5 times, by its numbers."""

_EXCEL = "python -c \"import pandas; pandas.read_excel('{0}').to_csv('{1}.csv', index=False)\""
_CONVERTED = {
    ".xlsx": f"pip install openpyxl && {_EXCEL}",
    ".xlsm": f"pip install openpyxl && {_EXCEL}",
    ".xls": f"pip install xlrd && {_EXCEL}",
    ".ods": f"pip install odfpy && {_EXCEL}",
    ".zip": "unzip {0}",
    ".xz": "unxz {0}",
    ".dta": "python -c \"import pandas; pandas.read_stata('{0}').to_csv('{1}.csv', index=False)\"",
    ".json": "python -c \"import pandas; pandas.read_json('{0}').to_json('{1}.jsonl', orient='records', lines=True)\"",
}
"""The command that makes a table which can be read of a file that cannot, by the end of its name."""

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
        self._parse = csv.ParseOptions(delimiter=form.delimiter, quote_char=quote, newlines_in_values=quote in text)

    # ---- CSV

    def _open(self, types: Types | None, threads: bool = True) -> csv.CSVStreamingReader:
        """Open a CSV file for some columns, all as text; None: for all, as what its first block looks like."""
        words = {form for word in self.form.missing_words for form in (word, word.upper(), word.capitalize())}
        read = csv.ReadOptions(
            use_threads=threads,
            skip_rows=self.above,
            column_names=self.names,
            skip_rows_after_names=1,
            encoding=self.form.encoding,
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
            if pa.types.is_integer(field.type) and has_leading_zeros(texts):
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
        with contextlib.ExitStack() as opened, self._as_data_errors(types):
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
            yield self._columns(pa.Table.from_batches([batch]), types, before)
            before += len(batch)

    def read(self, types: Types) -> dict[str, "np.ndarray | Words"]:
        """Return all rows, by column; raise DataError as `parts` does."""
        if self.kind == "parquet" and self.path.is_dir():
            with self._as_data_errors():
                return self._columns(parquet.read_table(self.path, columns=list(types)), types)
        return self._columns(pa.Table.from_batches([*self.batches(types, 2**20)]), types)

    def memory(self, types: Types) -> int:
        """Return about how many bytes of memory reading takes; 0 of a folder of Parquet, which has no parts."""
        if self.path.is_dir():
            return 0
        if self.kind == "parquet":
            with self._as_data_errors():
                return parquet.read_metadata(self.path).num_rows * len(types) * 8 * MEMORY
        return self.path.stat().st_size * MEMORY

    def _columns(self, table: pa.Table, types: Types, before: int = 0) -> dict[str, "np.ndarray | Words"]:
        return {name: self._values(name, table.column(name), kind, before) for name, kind in types.items()}

    def _values(self, name: str, column: pa.ChunkedArray, kind: str, before: int) -> "np.ndarray | Words":
        """Return a column as float64 (N,), NaN where it is missing, or as words; `before`: rows of former parts."""
        if pa.types.is_dictionary(column.type):
            column = pc.cast(column, column.type.value_type)
        if pa.types.is_temporal(column.type):
            column = pc.cast(column, pa.string())
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        try:
            if kind != "number":
                return _words(pc.cast(column, pa.string()), self.form)
            if not is_text:
                return pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False).astype(np.float64)
        except pa.ArrowException as error:
            what = "numbers" if kind == "number" else "words"
            raise DataError(
                f"{self.path}, column {name}: values of type {column.type} are not {what}: {_first(error)}."
            ) from error
        found = []
        for chunk in column.chunks:
            try:
                found.append(_numbers(chunk, self.form))
            except ValueError as error:
                row, word = error.args
                raise DataError(
                    f"{self.path}, column {name}, row {before + row + 1}: {word!r} is not a number. If it stands for a "
                    "missing value, list it in data.module.params.missing_words; otherwise set "
                    f"data.module.params.columns.{name} to category or ignore."
                ) from None
            before += len(chunk)
        return np.concatenate(found) if found else np.empty(0)

    @contextlib.contextmanager
    def _as_data_errors(self, types: Types | None = None) -> Iterator[None]:
        """Raise what is wrong with a table as one note for people."""
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeError) as error:
            found = self._with_row(types, error)
            raise DataError(f"{self.path} cannot be read as a table: {_first(found)}.{self._hint(found)}") from error
        except TableError as error:
            raise DataError(f"{self.path}: {error}") from error

    def _hint(self, error: Exception) -> str:
        if isinstance(error, UnicodeError) or "UTF8" in str(error):
            return f" It is not in {self.form.encoding}; set data.module.params.encoding, such as latin-1 or utf-16."
        return self._rows_hint() if re.search(r"Row #\d+: Expected \d+ columns, got", str(error)) else ""

    def _rows_hint(self) -> str:
        """Return the command that leaves the lines of the table, where others are above, between or below them."""
        rows, name = list[tuple[int, int, list[str]]](), self.path.name  # first and last line, values
        with contextlib.suppress(TableError):
            for line, values in records(text_of(data := head(self.path), self.form.encoding), self.form.delimiter):
                rows.append((line - sum(value.count("\n") for value in values), line, values))
        rows = rows[: len(rows) - (len(data) == HEAD)]  # where the first bytes end, a line is cut off
        parts = itertools.groupby(rows, lambda row: len(row[2]) == len(self.names))
        others = [[*part] for is_row, part in parts if not is_row]
        if 2 * sum(map(len, others)) < len(rows):
            cut = ";".join(f"{part[0][0]},{part[-1][1]}d" for part in others)
            hint = f" A value that has {self.form.delimiter!r} in it needs quotes."
            return hint + f" To leave other lines out: sed '{cut}' {name} >table.csv" * (len(others) <= 10)
        runs = [[*run] for width, run in itertools.groupby(rows, lambda row: len(row[2])) if width > 1]
        if not runs:
            return ""
        run = max(runs, key=len)
        first, (_, last, _) = rows.index(run[0]), run[-1]
        above = rows[first - 1][2] if first else []
        first -= len(above) > 1 and len(named_columns(above, run[0][2])) == len(run[0][2])  # the header
        start = rows[first][0]
        command = f"tail -n +{start}" if last == rows[-1][1] else f"sed -n '{start},{last}p'"
        return f" If line {start} is the header: {command} {name} >table.csv"

    def _with_row(self, types: Types | None, error: Exception) -> Exception:
        """Return the same error with the number of the row, which pyarrow knows of CSV where it reads in one thread."""
        if types and self.kind == "csv" and isinstance(error, pa.ArrowInvalid) and "Row #" not in str(error):
            try:
                with self._open(types, threads=False) as reader:
                    for _ in reader:
                        pass
            except pa.ArrowInvalid as again:
                return again
        return error


def guess_format(path: Path) -> TableFormat:
    """Return delimiter, decimal sign and encoding of a file, by its first megabyte.

    Raises:
        DataError: it cannot be read, or has no header; a header of numbers is 0, 1, …, as pandas numbers columns.
    """
    if kind_of_file(path) != "csv":
        return TableFormat()
    data = head(path)
    if b"\0" in data and not data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path} is not a text file; a table is CSV, JSON lines or Parquet.")
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
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
        width = len(first) if abs(len(first) - len(header)) == 1 else len(header)  # see `named_columns`
        same = sum(len(values) == width for values in found[1:]) / max(1, len(found) - 1)
        if len(header) > 1 and (same, rank) > best and (sign != " " or same == 1):
            best, delimiter, rows = (same, rank), sign, found
    header = (rows or [values for _, values in itertools.islice(records(text), 1)] or [[]])[0]
    if header != [str(n) for n in range(len(header))] and all(_is_number(name, TableFormat()) for name in header):
        names = f"$(seq -f column_%g -s '{delimiter}' {len(header)})"
        raise DataError(
            f"{path}: the first line, {', '.join(header[:8])}, names no columns; put a header above it: "
            f'sed -i "1i {names}" {path.name}'
        )
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


class FirstRows:
    """The first rows of a table, as texts.

    Attributes:
        file: the table.
        rows: how many were read.
        is_whole: whether there are no others.
        types: the type of each column that is neither number nor text, by name.

    Raises:
        DataError: the table cannot be read.
    """

    def __init__(self, path: Path, form: TableFormat, most: int):
        self.file = TableFile(path, form)
        batches = list[pa.RecordBatch]()
        for batch in self.file.batches(dict.fromkeys(self.file.names, "word"), 2**16):
            batches.append(batch)
            if sum(map(len, batches)) > most:
                break
        nothing = pa.schema([(name, pa.string()) for name in self.file.names])
        found = pa.Table.from_batches(batches) if batches else nothing.empty_table()
        self._table, self.is_whole = found.slice(0, most), len(found) <= most
        self.rows = len(self._table)
        self.types = {field.name: str(field.type) for field in self._table.schema if pa.types.is_nested(field.type)}

    def first(self) -> dict[str, str]:
        """Return the values of the first row."""
        return {name: self._texts(name).slice(0, 1).to_pylist()[0] or "" for name in self.file.names}

    def counts(self, name: str) -> dict[str, int]:
        """Return how often each text is in a column, without blanks around it; "" for what is missing."""
        found = pc.value_counts(pc.fill_null(self._texts(name), ""))
        return dict(zip(found.field("values").to_pylist(), found.field("counts").to_pylist(), strict=True))

    def _texts(self, name: str) -> pa.ChunkedArray:
        column = self._table.column(name)
        if name in self.types:
            return pa.chunked_array([pa.array([""] * len(column))])
        return pc.utf8_trim_whitespace(pc.cast(column, pa.string()))


def kind_of_file(path: Path) -> str:
    """Return parquet, json (JSON lines) or csv, by the end of a file's name.

    Raises:
        DataError: it is something that is not read; the message has the command that converts it.
    """
    name = path.name.lower()
    for end in (".gz", ".bz2", ".zst"):
        name = name.removesuffix(end)
    end = Path(name).suffix
    if end in _CONVERTED:
        command = _CONVERTED[end].format(path.name, path.stem)
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
    text = codecs.getincrementaldecoder(encoding)().decode(data, final=len(data) < HEAD)
    return text.removeprefix("\ufeff")


def has_leading_zeros(texts: "pa.Array | pa.ChunkedArray") -> bool:
    """Return whether some are codes such as 00501, whose zeros a number would lose."""
    return bool(pc.any(pc.match_substring_regex(texts, r"^\s*0\d+\s*$")).as_py())


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


def _words(texts: "pa.Array | pa.ChunkedArray", form: TableFormat) -> Words:
    """Return texts as words without blanks around them."""
    encoded = pc.dictionary_encode(pc.utf8_trim_whitespace(texts))
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    words = encoded.dictionary.to_pylist()
    gone = {number for number, word in enumerate(words) if form.is_missing(word)}
    indices = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    if gone:
        indices = np.where(np.isin(indices, list(gone)), -1, indices)
    return Words(["" if word is None else word for word in words], indices)


def _first(error: Exception) -> str:
    return str(error).split("\n")[0].rstrip(".")
