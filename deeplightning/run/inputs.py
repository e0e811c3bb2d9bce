"""Read inputs of a network from files: rows of tables, texts, arrays and signals.

Formats that the endpoint accepts in a request are read by the endpoint's own readers. Parquet, JSON lines and .wav,
which clients do not send, are read here.
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
from deeplightning.table_format import TableFormat, decoded
from deeplightning.table_spec import TableSpec
from deeplightning.text_spec import TextSpec
from serve.limits import Limits, Refusal
from serve.uploads import arrays_from_json, arrays_from_npy, rows_from_csv, rows_from_json, texts_from_json

TEXT_COLUMNS = ("text", "sentence")
"""Accepted names of the text column besides that of the training table; a single column may have any name."""

_NO_LIMIT = Limits(max_images=10**9)  # a local file may have more rows than a request

PARQUET_ROWS = 1024  # per batch

_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Compression of text files by the last suffix of their name."""


class Place(NamedTuple):
    """The location of an input: its file, and its number from 1 if the file has several."""

    path: Path
    row: int | None = None

    def __str__(self) -> str:
        return str(self.path) if self.row is None else f"{self.path}, row {self.row}"


def expected(takes: str) -> str:
    """Return the allowed file endings for a message, without those of compressed files."""
    return f"files end in {', '.join(end for end in ENDINGS[takes] if end.count('.') == 1)}"


def inputs_of(path: Path, takes: str, spec: Any = None) -> Iterator[tuple[Place, Any]]:
    """Yield the inputs of one file before preparation: texts, rows (mappings) or arrays; for an image its path.

    Args:
        takes: one of `deeplightning.kinds.INPUTS`.
        spec: prepares a text (`TextSpec`), a row (`TableSpec`) or an array (`ArraySpec`).

    Raises:
        ValueError: the file is of another kind, damaged, or has no inputs.
        OSError: the file cannot be read.
    """
    if path.is_dir():
        raise ValueError(f"this folder and its subfolders have no files that this run takes: {expected(takes)}")
    if takes == "image":
        yield Place(path), path
        return
    reader = next((read for end, read in _READERS[takes].items() if path.name.lower().endswith(end)), None)
    if reader is None:
        with _open_binary(path) as file:  # a missing file raises OSError
            start = file.read(1024)
        is_binary = b"\0" in start and not start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if takes == "table" and not is_binary and not path.name.lower().endswith((*EXTENSIONS, *SIGNALS)):
            reader = _rows  # training reads any other ending as CSV
    if reader is None:
        raise ValueError(f"this run takes {_INPUT_NOUNS[takes]}: {expected(takes)}")
    number = 0
    try:
        for number, one in enumerate(reader(path, spec), 1):
            yield Place(path, number), one
    except (Refusal, csv.Error, RecursionError) as error:
        raise ValueError(str(error.__cause__ or error)) from error  # the cause does not mention requests
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}); save the file as UTF-8") from error
    if not number:
        raise ValueError("this file has no inputs")


def _lines(path: Path, ends: str | None = None, encoding: str = "utf-8") -> Iterator[str]:
    """Yield the non-blank lines, stripped of whitespace or of the characters `ends`."""
    data = _open_binary(path) if encoding == "utf-8" else io.BytesIO(decoded(_read_bytes(path), encoding).encode())
    with io.TextIOWrapper(data, encoding="utf-8-sig") as file:
        yield from (line.strip(ends) for line in file if line.strip())


def _open_binary(path: Path) -> Any:
    """Open a file in binary mode; decompress it if necessary, as in training."""
    if path.suffix.lower() not in _COMPRESSED:
        return path.open("rb")
    import pyarrow as pa  # imported lazily: it takes a while

    return pa.input_stream(str(path), compression=_COMPRESSED[path.suffix.lower()])


def _read_bytes(path: Path) -> bytes:
    with _open_binary(path) as file:
        return bytes(file.read())


def _json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield JSON objects, one per line."""
    for number, line in enumerate(_lines(path), 1):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"object {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"object {number} is not a JSON object, but a {type(found).__name__}")
        yield found


def _complete_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield JSON objects with all keys of their file: as in training, an absent key is a missing value."""
    defaults = dict[str, None]()
    with contextlib.suppress(ValueError):  # the second reading names the line
        for row in _json_objects(path):
            defaults |= dict.fromkeys(row)
    return (defaults | row for row in _json_objects(path))


def _as_trained(rows: Iterable[dict[str, Any]], spec: TableSpec) -> Iterator[dict[str, Any]]:
    """Yield rows of a typed file; as in training, true and false in a numeric column become 1 and 0."""
    numbers = {column.name for column in spec.numbers}
    for row in rows:
        yield {name: int(v) if isinstance(v, bool) and name in numbers else v for name, v in row.items()}


def _columns(spec: TextSpec) -> list[str]:
    """Return the accepted names of the text column, that of the training table first."""
    return [*dict.fromkeys((spec.column or TEXT_COLUMNS[0], *TEXT_COLUMNS))]


def _texts(rows: Iterable[Mapping[str, Any]], spec: TextSpec) -> Iterator[str]:
    accepted = _columns(spec)
    for row in rows:
        names = [name for name in accepted if name in row] or (list(row) if len(row) == 1 else [])
        if not names:
            columns = ", ".join(map(str, row))
            raise ValueError(f"there is no column {' or '.join(accepted)}, but {columns:.200}; rename the text column")
        if not isinstance(row[names[0]], str):
            raise ValueError(f"{names[0]} is not a text, but {row[names[0]]!r:.80}")
        yield row[names[0]]


def _table_rows(path: Path, spec: TextSpec, delimiter: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table whose first line has the column names. In a TSV file, quotes are plain characters
    unless the training texts were read from a table column."""
    if delimiter != "\t" or spec.column is not None:
        form = TableFormat(delimiter, encoding=spec.encoding)
        yield from rows_from_csv(_read_bytes(path), _NO_LIMIT, _columns(spec), form)
        return
    for number, row in enumerate(csv.DictReader(_lines(path, "\n"), delimiter="\t", quoting=csv.QUOTE_NONE), 1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has a different number of columns than the header")
        yield row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # imported lazily: it takes a while
    import pyarrow.compute as pc
    from pyarrow import parquet

    def as_trained(column: Any) -> Any:  # in training, dates, times and bytes are texts
        of, kind = pa.types, column.type
        if of.is_temporal(kind) or of.is_binary(kind) or of.is_fixed_size_binary(kind):
            with contextlib.suppress(pa.ArrowException):  # bytes that are not text
                return pc.cast(column, pa.string())
        return column

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS):
                columns = [as_trained(column) for column in batch.columns]
                yield from pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"this Parquet file cannot be read: {error}") from error


def _signal(path: Path, spec: Any) -> list[Any]:
    signal = read_signal(path)  # (C, T)
    return [signal[0] if signal.shape == (1, *spec.shape) else signal]


def _rows(path: Path, spec: TableSpec) -> list[dict[str, str]]:
    return rows_from_csv(_read_bytes(path), _NO_LIMIT, [column.name for column in spec.columns], spec.format)


Reader = Callable[[Path, Any], "Iterator[Any] | list[Any]"]

_READERS: dict[str, dict[str, Reader]] = {
    "text": {
        ".txt": lambda path, spec: _lines(path, encoding=spec.encoding),
        ".csv": lambda path, spec: _texts(_table_rows(path, spec, ","), spec),
        ".tsv": lambda path, spec: _texts(_table_rows(path, spec, "\t"), spec),
        **dict.fromkeys((".jsonl", ".ndjson"), lambda path, spec: _texts(_json_objects(path), spec)),
        ".json": lambda path, _: [text.decode() for text in texts_from_json(_read_bytes(path), 10**9)],
    },
    "table": {
        ".csv": _rows,
        ".tsv": _rows,
        ".json": lambda path, spec: list(rows_from_json(_read_bytes(path), spec.shape[0], _NO_LIMIT)),
        **dict.fromkeys((".jsonl", ".ndjson"), lambda path, spec: _as_trained(_complete_objects(path), spec)),
        **dict.fromkeys((".parquet", ".pq"), lambda path, spec: _as_trained(_parquet(path), spec)),
    },
    "array": {
        ".npy": lambda path, spec: arrays_from_npy(_read_bytes(path), spec.shape, _NO_LIMIT),
        ".csv": _signal,
        ".wav": _signal,
        ".json": lambda path, spec: list(arrays_from_json(_read_bytes(path), spec.shape, _NO_LIMIT)),
    },
}

for _readers in (_READERS["text"], _READERS["table"]):
    for _end in (".csv", ".tsv", ".jsonl", ".ndjson"):
        _readers.update(dict.fromkeys((_end + packed for packed in _COMPRESSED), _readers[_end]))

ENDINGS = {"image": EXTENSIONS, **{takes: tuple(readers) for takes, readers in _READERS.items()}}
"""File endings, in lower or upper case, by the kind of input."""

_INPUT_NOUNS = {"text": "texts", "table": "rows of a table", "array": "arrays or signals"}
