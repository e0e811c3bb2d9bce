"""Reading inputs of a network from files: rows of tables, texts, arrays and signals.

Formats that the endpoint accepts in a request are read by the endpoint's own readers; Parquet, JSON lines and .wav,
which no client sends, are read here.
"""

import codecs
import contextlib
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deeplightning.array_spec import SIGNALS, read_signal
from deeplightning.image_spec import EXTENSIONS
from deeplightning.table_spec import TableFormat, TableSpec, decoded
from deeplightning.text_spec import TextSpec
from serve.limits import Limits, Refusal
from serve.uploads import arrays_from_json, arrays_from_npy, rows_from_csv, rows_from_json, texts_from_json

TEXT_COLUMNS = ("text", "sentence")
"""Names of a column of texts besides that of the training table; a table with a single column needs none of them."""

_NO_LIMIT = Limits(max_images=10**9)  # a local file may have more rows than a request

PARQUET_ROWS = 1024  # per batch

_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""How a file of lines may be compressed, by the end of its name."""


class Place(NamedTuple):
    """The location of an input: its file, and its number from 1 if the file has several."""

    path: Path
    row: int | None = None

    def __str__(self) -> str:
        return str(self.path) if self.row is None else f"{self.path}, row {self.row}"


def expected(takes: str) -> str:
    """Return the allowed file endings, for a message; without those of compressed files."""
    return f"files end in {', '.join(end for end in ENDINGS[takes] if end.count('.') == 1)}"


def inputs_of(path: Path, takes: str, spec: Any = None) -> Iterator[tuple[Place, Any]]:
    """Yield the inputs of one file as a network prepares them: texts, rows (mappings), arrays; of a picture its path.

    Args:
        takes: of `deeplightning.kinds.INPUTS`.
        spec: prepares a text (`TextSpec`), a row (`TableSpec`) or an array (`ArraySpec`).

    Raises:
        ValueError: the file is of another kind, damaged, or has no inputs.
        OSError: it cannot be read.
    """
    if path.is_dir():
        raise ValueError(f"there is nothing in this folder or below it that this run takes: {expected(takes)}")
    if takes == "image":
        yield Place(path), path
        return
    reader = next((read for end, read in _READERS[takes].items() if path.name.lower().endswith(end)), None)
    if reader is None:
        with _opened(path) as file:  # a file that is missing is not of a wrong kind
            start = file.read(1024)
        is_binary = b"\0" in start and not start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if takes == "table" and not is_binary and not path.name.lower().endswith((*EXTENSIONS, *SIGNALS)):
            reader = _rows  # a training reads any other name as CSV
    if reader is None:
        raise ValueError(f"this run takes {_TAKEN[takes]}: {expected(takes)}")
    number = 0
    try:
        for number, one in enumerate(reader(path, spec), 1):
            yield Place(path, number), one
    except (Refusal, csv.Error, RecursionError) as error:
        raise ValueError(str(error.__cause__ or error)) from error  # the cause says nothing of requests
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}); save the file as UTF-8") from error
    if not number:
        raise ValueError("there is nothing in this file")


def _lines(path: Path, ends: str | None = None, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the lines that are not blank, without blanks, or the characters `ends`, around them."""
    data = _opened(path) if encoding == "utf-8" else io.BytesIO(decoded(_bytes(path), encoding).encode())
    with io.TextIOWrapper(data, encoding="utf-8-sig") as file:
        yield from (line.strip(ends) for line in file if line.strip())


def _opened(path: Path) -> Any:
    """Open the bytes of a file, which may be compressed, as those of a training may be."""
    if path.suffix.lower() not in _COMPRESSED:
        return path.open("rb")
    import pyarrow as pa  # imported lazily: it takes a while

    return pa.input_stream(str(path), compression=_COMPRESSED[path.suffix.lower()])


def _bytes(path: Path) -> bytes:
    with _opened(path) as file:
        return bytes(file.read())


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield JSON objects, one per line."""
    for number, line in enumerate(_lines(path), 1):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"object {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"object {number} is not a JSON object, but a {type(found).__name__}")
        yield found


def _with_all_keys(path: Path) -> Iterator[dict[str, Any]]:
    """Yield JSON objects with all keys of their file: as in training, one that is not there means a missing value."""
    absent = dict[str, None]()
    with contextlib.suppress(ValueError):  # the second reading names the line
        for row in _objects(path):
            absent |= dict.fromkeys(row)
    return (absent | row for row in _objects(path))


def _as_trained(rows: Iterable[dict[str, Any]], spec: TableSpec) -> Iterator[dict[str, Any]]:
    """Yield rows of a typed file, in which a training takes true and false in a column of numbers for 1 and 0."""
    numbers = {column.name for column in spec.numbers}
    for row in rows:
        yield {name: int(v) if isinstance(v, bool) and name in numbers else v for name, v in row.items()}


def _columns(spec: TextSpec) -> list[str]:
    """Return the names that a column of texts may have, that of the training table first."""
    return [*dict.fromkeys((spec.column or TEXT_COLUMNS[0], *TEXT_COLUMNS))]


def _texts(rows: Iterable[Mapping[str, Any]], spec: TextSpec) -> Iterator[str]:
    known = _columns(spec)
    for row in rows:
        names = [name for name in known if name in row] or (list(row) if len(row) == 1 else [])
        if not names:
            columns = ", ".join(map(str, row))
            raise ValueError(f"there is no column {' or '.join(known)}, but {columns:.200}; rename that of the texts")
        if not isinstance(row[names[0]], str):
            raise ValueError(f"{names[0]} is not a text, but {row[names[0]]!r:.80}")
        yield row[names[0]]


def _separated(path: Path, spec: TextSpec, delimiter: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table, whose first line has the column names. Quotes between tabs are plain characters unless
    the training texts are of a column: that was read as a table."""
    if delimiter != "\t" or spec.column is not None:
        form = TableFormat(delimiter, encoding=spec.encoding)
        yield from rows_from_csv(_bytes(path), _NO_LIMIT, _columns(spec), form)
        return
    for number, row in enumerate(csv.DictReader(_lines(path, "\n"), delimiter="\t", quoting=csv.QUOTE_NONE), 1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has not as many columns as the header")
        yield row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # imported lazily: it takes a while
    import pyarrow.compute as pc
    from pyarrow import parquet

    def as_trained(column: Any) -> Any:  # dates, times, decimal numbers and bytes are texts there
        of, kind = pa.types, column.type
        if of.is_temporal(kind) or of.is_decimal(kind) or of.is_binary(kind) or of.is_fixed_size_binary(kind):
            with contextlib.suppress(pa.ArrowException):  # bytes that are no text
                return pc.cast(column, pa.string())
        return column

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS):
                columns = [as_trained(column) for column in batch.columns]
                yield from pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"this Parquet file cannot be read: {error}") from error


def _arrays_of_npy(path: Path, spec: Any) -> list[Any]:
    arrays = arrays_from_npy(_bytes(path), spec.shape)
    of_one_channel = spec.shape[0] == 1
    return [array[None] if of_one_channel and array.ndim < len(spec.shape) else array for array in arrays]  # (T,)


def _signal(path: Path, spec: Any) -> list[Any]:
    signal = read_signal(path)  # (C, T)
    return [signal[0] if signal[:1].shape == (1, *spec.shape) else signal]


def _rows(path: Path, spec: TableSpec) -> list[dict[str, str]]:
    return rows_from_csv(_bytes(path), _NO_LIMIT, [column.name for column in spec.columns], spec.format)


Reader = Callable[[Path, Any], "Iterator[Any] | list[Any]"]

_READERS: dict[str, dict[str, Reader]] = {
    "text": {
        ".txt": lambda path, spec: _lines(path, encoding=spec.encoding),
        ".csv": lambda path, spec: _texts(_separated(path, spec, ","), spec),
        ".tsv": lambda path, spec: _texts(_separated(path, spec, "\t"), spec),
        **dict.fromkeys((".jsonl", ".ndjson"), lambda path, spec: _texts(_objects(path), spec)),
        ".json": lambda path, _: [text.decode() for text in texts_from_json(_bytes(path))],
    },
    "table": {
        ".csv": _rows,
        ".tsv": _rows,
        ".json": lambda path, spec: list(rows_from_json(_bytes(path), spec.shape[0], _NO_LIMIT)),
        **dict.fromkeys((".jsonl", ".ndjson"), lambda path, spec: _as_trained(_with_all_keys(path), spec)),
        **dict.fromkeys((".parquet", ".pq"), lambda path, spec: _as_trained(_parquet(path), spec)),
    },
    "array": {
        ".npy": _arrays_of_npy,
        ".csv": _signal,
        ".wav": _signal,
        ".json": lambda path, spec: list(arrays_from_json(_bytes(path), spec.shape, _NO_LIMIT)),
    },
}

for _readers in (_READERS["text"], _READERS["table"]):
    for _end in (".csv", ".tsv", ".jsonl", ".ndjson"):
        _readers.update(dict.fromkeys((_end + packed for packed in _COMPRESSED), _readers[_end]))

ENDINGS = {"image": EXTENSIONS, **{takes: tuple(readers) for takes, readers in _READERS.items()}}
"""File endings, in lower or upper case, by what a network takes."""

_TAKEN = {"text": "texts", "table": "rows of a table", "array": "arrays or signals"}
