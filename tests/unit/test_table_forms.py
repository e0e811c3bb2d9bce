"""Table files as users have them: `init`, training and the endpoint read the same rows from a file."""

import contextlib
import datetime
import gzip
import io
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from modules import data_config
from pyarrow import parquet as parquet_file

from deeplightning.cli.guess import Columns
from deeplightning.cli.guess_columns import TARGETS
from deeplightning.cli.init import init
from deeplightning.config.source import read
from deeplightning.config.tree import plain
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.table import TableData
from deeplightning.faults import ConfigError, SetupError
from deeplightning.run.inputs import ENDINGS, inputs_of
from deeplightning.table_format import TableError, TableFormat
from deeplightning.table_spec import Column, TableSpec
from deeplightning.text_spec import TextSpec, vocabulary

pytestmark = pytest.mark.usefixtures("here")

ROWS = 60
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Form:
    """A table file and the expected result of `init`.

    Attributes:
        data: the content of the file.
        columns: the kind of each column.
        target: the column that is predicted.
        notes: parts of the notes.
        params: some of `data.module.params`.
        rows: the number of rows with a target.
        outputs: the number of network outputs.
        kind: the kind of project.
        name: the name of the file.
        options: the options of `init`.
    """

    data: str | bytes
    columns: dict[str, str]
    target: str = "kind"
    notes: tuple[str, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    rows: int = ROWS
    outputs: int = 2
    kind: str = "table"
    name: str = "t.csv"
    options: Columns = field(default_factory=Columns)

    @property
    def content(self) -> bytes:
        return self.data if isinstance(self.data, bytes) else self.data.encode()


def text(
    *,
    header: str = "area,rooms,town,kind",
    delimiter: str = ",",
    area: Callable[[float], str] = lambda value: f"{value:.2f}",
    change: Callable[[int, list[str]], list[str]] = lambda _, row: row,
    above: str = "",
    end: str = "\n",
) -> str:
    """Return sixty flats: a number, a whole number, a category and a class, each row as `change` returns it."""
    rng = random.Random(0)
    lines = [header.replace(",", delimiter)]
    for number in range(ROWS):
        value = rng.uniform(20, 3000)
        row = [area(value), str(rng.randint(1, 6)), rng.choice(["Bern", "Genf", "Zug"]), "ab"[value > 800]]
        lines.append(delimiter.join(change(number, row)))
    return above + end.join(lines) + end


def put(column: int, value: Callable[[int, str], str]) -> Callable[[int, list[str]], list[str]]:
    """Return a change of the values of one column."""
    return lambda number, row: [*row[:column], value(number, row[column]), *row[column + 1 :]]


def swiss(value: float) -> str:
    return f"{value:,.2f}".replace(",", "\u2019")


def german(value: float) -> str:
    return f"{value:,.2f}".translate({ord(","): ".", ord("."): ","})


PLAIN = {"area": "number", "rooms": "number", "town": "category", "kind": "category"}
NUMBERED = {"id": "ignore"} | PLAIN


def with_first(values: Callable[[int], str], name: str = "id") -> str:
    return text(header=f"{name},area,rooms,town,kind", change=lambda number, row: [values(number), *row])


def named(*names: str, kind: str = "category") -> dict[str, str]:
    """Return the columns of `text` with other names."""
    return dict(zip(names, [*["number", "number", "category"], kind], strict=True))


def frame() -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text()))


def parquet(**more: Sequence[object]) -> bytes:
    found = io.BytesIO()
    frame().assign(**more).to_parquet(found)
    return found.getvalue()


FORMS = {
    # ---- files
    "commas": Form(text(), PLAIN, params={"delimiter": ",", "decimal": ".", "encoding": "utf-8"}),
    "tabs": Form(text(delimiter="\t"), PLAIN, notes=(r"delimiter '\t'",), params={"delimiter": "\t"}),
    "a sign in each row": Form(
        text(
            header="note,area,rooms,town,kind",
            change=lambda number, row: ["" if number % 3 else "?", "?" if number == 7 else row[0], *row[1:]],
        ),
        {"note": "ignore"} | PLAIN,
        notes=("ignored, with almost no values: note",),
        params={"missing": "fill"},
    ),
    "blanks": Form(text(delimiter=" "), PLAIN, params={"delimiter": " "}),
    "semicolons and commas in texts": Form(
        text(delimiter=";", change=put(2, lambda _, town: f"{town}, CH")), PLAIN, params={"delimiter": ";"}
    ),
    "decimal commas in quotes": Form(
        text(area=lambda value: f'"{value:.2f}"'.replace(".", ",")), PLAIN, params={"delimiter": ",", "decimal": ","}
    ),
    "decimal commas and thousands": Form(
        text(delimiter="\t", area=german), PLAIN, params={"delimiter": "\t", "decimal": ","}
    ),
    "thousands": Form(text(area=lambda value: f'"{value:,.2f}"'), PLAIN, params={"decimal": "."}),
    "thousands with apostrophes": Form(text(delimiter=";", area=swiss), PLAIN, params={"decimal": "."}),
    "UTF-16": Form(text(delimiter="\t").encode("utf-16"), PLAIN, params={"encoding": "utf-16", "delimiter": "\t"}),
    "Latin-1": Form(
        text(change=put(2, lambda _, town: town.replace("Zug", "Zürich"))).encode("latin-1"), PLAIN,
        notes=("encoding latin-1 (the file is not UTF-8; check that letters such as ü are right)",),
        params={"encoding": "latin-1"}
    ),
    "a euro of Windows": Form(
        text(header="Umsatz €;rooms;town;kind", delimiter=";", area=german).encode("cp1252"),
        named("Umsatz €", "rooms", "town", "kind"), params={"encoding": "cp1252", "decimal": ","}
    ),
    "plain quotes between tabs": Form(
        text(delimiter="\t", change=put(2, lambda _, town: f'"{town}" is its name, 5" tall')), PLAIN
    ),
    "line ends in quotes between tabs": Form(
        text(delimiter="\t", change=put(2, lambda _, town: f'"{town}\n\tCH"')), PLAIN
    ),
    "line ends in quotes": Form(text(change=put(2, lambda _, town: f'"{town}\nCH"')), PLAIN),
    "comments above the header": Form(
        text(above="# made by hand\n# on Monday\n\n"), PLAIN, notes=("3 lines above the header skipped",)
    ),
    "Excel's line": Form(text(above="sep=;\n", delimiter=";"), PLAIN, params={"delimiter": ";"}),
    "header with #": Form(text(header="#area,rooms,town,kind"), named("#area", "rooms", "town", "kind")),
    "gzip": Form(gzip.compress(text().encode()), PLAIN, name="t.csv.gz"),
    "JSON lines": Form(frame().to_json(orient="records", lines=True), PLAIN, name="t.jsonl"),
    "Parquet": Form(parquet(), PLAIN, name="t.parquet"),
    "large, infinite and binary values": Form(
        parquet(
            large=range(2**63, 2**63 + 4096 * ROWS, 4096),  # 64 bits distinguish them
            part=[math.inf, -math.inf, 1.5, 2.5, 3] * 12,
            raw=[b"\xff"] * ROWS,
        ),
        PLAIN | {"large": "number", "part": "number", "raw": "ignore"}, options=Columns("kind"), name="t.parquet",
        notes=("ignored, of type binary: raw", "which are filled: part (24)")
    ),
    "dates, times and decimals": Form(
        parquet(
            day=pd.date_range("2024-01-01 10:00", periods=ROWS, tz="Europe/Zurich"),
            at=[datetime.time(number % 9, 30) for number in range(ROWS)],
            exact=[Decimal(number) / 4 for number in range(ROWS)],
        ),
        PLAIN | {"day": "number", "at": "category", "exact": "number"}, options=Columns("kind"), name="t.parquet"
    ),
    "keys that are not in each line": Form(
        frame().to_json(orient="records", lines=True).replace('"rooms":3,', ""), PLAIN, params={"missing": "fill"},
        name="t.jsonl"
    ),
    "R's row names": Form(text(change=lambda number, row: [f'"{number}"', *row]), {"column_1": "ignore"} | PLAIN),
    # ---- missing values
    "a stray marker": Form(
        text(change=put(0, lambda number, area: "?" if number == 7 else area)), PLAIN,
        notes=("missing-value words in the column area: '?' (1)", "which are filled: area (1)"),
        params={"missing": "fill", "missing_words": ["na", "n/a", "nan", "null", "?"]}
    ),
    "several markers": Form(
        text(change=put(0, lambda number, area: {1: "-", 2: "k.A.", 3: "None", 4: "inf"}.get(number, area))), PLAIN,
        params={"missing_words": ["na", "n/a", "nan", "null", "-", "k.a.", "none", "inf"]}
    ),
    "infinite numbers of R": Form(
        text(change=put(0, lambda number, area: {3: "Inf", 4: "-Inf"}.get(number, area))), PLAIN,
        params={"missing": "fill", "missing_words": ["na", "n/a", "nan", "null", "inf", "-inf"]}
    ),
    "a word in every fifth row": Form(
        text(change=put(0, lambda number, area: "unknown" if number % 5 == 0 else area)), PLAIN | {"area": "ignore"},
        notes=("ignored, different in nearly every row: area",)
    ),
    "a delimiter at the end of the header": Form(text().replace("\n", ",\n", 1), PLAIN),
    "a delimiter at the end of each row": Form(
        text(change=lambda _, row: [*row, ""]), PLAIN | {"column_5": "ignore"},
        notes=("ignored, with almost no values: column_5",)
    ),
    "another delimiter in a name": Form(
        text(header="area,rooms,town,kind|of"), named("area", "rooms", "town", "kind|of"), target="kind|of"
    ),
    "references in names": Form(
        text(header="${x},rooms,town,a/${y}.$z"), named("${x}", "rooms", "town", "a/${y}.$z"), target="a/${y}.$z"
    ),
    "dollars": Form(text(area=lambda value: f'"-${value:,.2f}"'), PLAIN, params={"decimal": "."}),
    "euros": Form(text(delimiter=";", area=lambda value: f"{german(value)} €"), PLAIN, params={"decimal": ","}),
    "per cent": Form(text(area=lambda value: f"\u2212{value:.1f}%"), PLAIN),
    "NA in a column of words": Form(
        text(change=put(2, lambda number, town: "NA" if number == 4 else town)), PLAIN, params={"missing": "fill"}
    ),
    "None is a class": Form(
        text(change=put(3, lambda _, kind: "None" if kind == "a" else "Some")), PLAIN,
        params={"missing_words": ["na", "n/a", "nan", "null"], "missing": "refuse"}
    ),
    "gaps in the target": Form(
        text(change=put(3, lambda number, kind: "" if number % 10 == 0 else kind)), PLAIN,
        notes=("missing values, whose rows are left out: kind (6)",), rows=54
    ),
    "gaps in a target of numbers": Form(
        text(header="area,rooms,town,price", change=put(3, lambda number, _: "n/a" if number < 5 else f"{number}.5")),
        named("area", "rooms", "town", "price", kind="number"), target="price", rows=55, outputs=1, kind="regression"
    ),
    # ---- columns
    "a number of each row": Form(with_first(str), NUMBERED, notes=("ignored, a row number: id",)),
    "customers who come again": Form(with_first(lambda number: str(number % 7)), NUMBERED | {"id": "category"}),
    "an index that is a measure": Form(
        with_first(lambda number: f"{number % 9}.5", "price_index"), {"price_index": "number"} | PLAIN
    ),
    "codes with leading zeros": Form(
        with_first(lambda number: f"{number % 5:05d}", "zip"), {"zip": "category"} | PLAIN
    ),
    "days": Form(
        with_first(lambda number: f"2024-02-{number % 28 + 1:02d}", "day"), {"day": "number"} | PLAIN,
        notes=("dates, as days since 1970-01-01: day",)
    ),
    "days of named months": Form(
        with_first(lambda number: f"{('Jan', 'February')[number % 2]}-{number % 28 + 1}-1995", "day"),
        {"day": "number"} | PLAIN, notes=("dates, as days since 1970-01-01: day",)
    ),
    "a day is no target": Form(
        text(header="area,rooms,town,day", change=put(3, lambda number, _: f"2024-02-{number % 28 + 1:02d}")),
        named("area", "rooms", "town", "day", kind="number"), target="town", outputs=3
    ),
    "the sets of rows": Form(
        with_first(lambda number: ("train", "Train", "valid", "test")[number % 4], "part"), {"part": "ignore"} | PLAIN,
        notes=("ignored, the sets of the rows, which data.module.params.split may name: part",)
    ),
    "a column that is nearly empty": Form(
        with_first(lambda number: "yes" * (number < 2), "note"), {"note": "ignore"} | PLAIN,
        notes=("ignored, with almost no values: note",)
    ),
    # ---- targets
    "price before y": Form(
        text(header="price,y,town,z"), named("price", "y", "town", "z"), target="price",
        notes=("the column price is predicted (by its name)",), outputs=1
    ),
    "the target is named": Form(
        text(), PLAIN | {"town": "category"}, target="town", options=Columns("town"),
        notes=("the column town is predicted (--target)",), outputs=3
    ),
    "columns are left out": Form(
        text(), PLAIN | {"town": "ignore", "area": "ignore"}, options=Columns(ignore=("town", "area")),
        notes=("ignored, by --ignore: area, town",)
    ),
    "whole numbers are classes": Form(
        text(), PLAIN | {"rooms": "category"}, target="rooms", options=Columns("rooms"), outputs=6
    ),
    "many numbers are classes": Form(
        with_first(lambda number: str(number % 25), "level"), {"level": "category"} | PLAIN, target="level",
        options=Columns("level", task="classification"), outputs=25
    ),
}  # fmt: skip


def written(form):
    """Return the config that `init` writes for a form, and its notes."""
    Path(form.name).write_bytes(form.content)
    notes, paths = init(Path("p"), form.kind, Path(form.name), form.options)
    source = read(paths[0])
    assert source.faults == []
    return plain(source.root), "\n".join(notes)


def prepared(params, seed=0, **data):
    """Return a data module with all splits."""
    module = TableData(data_config(".", seed, **data), **params)
    module.setup(None)
    return module


@pytest.mark.parametrize("name", FORMS)
def test_a_table_file_is_read_correctly(name):
    """`init` guesses the columns and the target and reports them, training reads all rows that have a target, and the
    endpoint and `predict` turn the rows of the file into the numbers of the training."""
    form = FORMS[name]
    config, notes = written(form)
    params = config["data"]["module"]["params"]
    assert params["columns"] == form.columns
    assert params["target"] == form.target
    assert {key: params[key] for key in form.params} == form.params
    assert [words for words in form.notes if words not in notes] == []
    assert config["model"]["network"]["params"]["num_outputs"] == form.outputs
    module = prepared(params)
    sets = [module.dataset(split) for split in ("train", "val", "test")]
    inputs = np.concatenate([found.large["input"].numpy() for found in sets])  # (N, F)
    assert len(inputs) == form.rows
    spec = module.table_spec
    if form.kind == "table" and form.outputs > 1:
        assert len(module.class_names) == form.outputs
        assert set(range(form.outputs)) == set(sets[0].small["label"].tolist())
    example = json.loads(Path("p/row.json").read_text())["rows"][0]
    assert any(np.array_equal(spec.prepare(example), row) for row in inputs) or form.rows < ROWS
    if form.name.endswith(".gz"):  # which `predict` does not take
        return
    rows = [row for _, row in inputs_of(Path(form.name), "table", spec)]
    prepared_rows = [spec.prepare(row).tolist() for row in rows if not spec.format.is_missing(row[form.target])]
    assert sorted(map(tuple, prepared_rows)) == sorted(map(tuple, inputs.tolist()))


def test_decimal_commas_and_separators_give_the_same_numbers():
    """Each way to write the areas gives the inputs of the plain one, bit for bit."""
    names = ["decimal commas in quotes", "decimal commas and thousands", "thousands"]
    found = []
    for name in ["commas", *names, "thousands with apostrophes", "gzip", "JSON lines", "Parquet", "UTF-16"]:
        Path(name).mkdir()
        form = FORMS[name]
        Path(name, form.name).write_bytes(form.content)
        _, paths = init(Path(name, "p"), "table", Path(name, form.name))
        params = plain(read(paths[0]).root)["data"]["module"]["params"]
        params["train"] = str(Path(name, params["train"]))
        found.append(prepared(params).dataset("train").large["input"].numpy().tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.jsonl", "r.csv"])
def test_values_of_other_types_are_those_of_the_training(name):
    """Truth values, whole numbers with gaps, dates and decimal numbers of any file or a DataFrame become the numbers of
    a training on the same rows, even if a CSV file has `True`, `TRUE` or `1.0`."""
    names, day = ["t.csv", "t.parquet", "t.jsonl", "r.csv"], pd.Timestamp("2024-02-28")
    values = {
        "flag": [True, False, True, None] * 5,
        "grade": [1.0, None, 2.0, 1e12] * 5,
        "time": [day + pd.Timedelta(hours=number) for number in range(20)],
        "date": [(day + pd.Timedelta(days=number % 3)).date() for number in range(20)],
        "price": [Decimal(number) / 4 for number in range(20)],
        "y": [False, True] * 10,
    }
    rows = pd.DataFrame(values)
    text = str(rows.to_csv("t.csv", index=False) or Path("t.csv").read_text())
    Path("r.csv").write_text(text.replace("True", "TRUE").replace("False", "FALSE"))
    rows.to_parquet("t.parquet")
    jsonable = rows.astype({"time": str, "date": str, "price": float})
    jsonable.to_json("t.jsonl", orient="records", lines=True)
    kinds = dict.fromkeys(("flag", "grade", "date"), "category") | dict.fromkeys(("time", "price"), "number")
    params = {"train": name, "target": "y", "columns": kinds, "missing": "fill"}
    module = prepared(params)
    learned = np.concatenate([module.dataset(split).large["input"].numpy() for split in ("train", "val", "test")])
    sources = [[row for _, row in inputs_of(Path(other), "table", module.table_spec)] for other in names]
    for source in (*sources, rows.to_dict("records")):
        inputs = [module.table_spec.prepare(row).tolist() for row in source]
        assert sorted(map(tuple, inputs)) == sorted(map(tuple, learned.tolist()))
    for other in names:  # as test files
        module = prepared({**params, "test": other, "unknown": "refuse"})
        assert module.dataset("test").small["label"].tolist() == [0, 1] * 10


def test_bytes_of_parquet_are_the_words_of_the_training():
    """Spark and Impala write texts as bytes. Columns of bytes that are not text can be ignored."""
    codes = {"a": pa.array([b"k", b"l"] * 10), "b": pa.array([b"kk", b"ll"] * 10, pa.binary(2))}
    rows = pa.table({**codes, "other": pa.array([b"\xff"] * 20), "y": pa.array(["p", "q"] * 10)})
    parquet_file.write_table(rows, "t.parquet")
    kinds = {"a": "category", "b": "category", "other": "ignore"}
    spec = prepared({"train": "t.parquet", "target": "y", "columns": kinds}).table_spec
    inputs = [spec.prepare(row).tolist() for _, row in inputs_of(Path("t.parquet"), "table", spec)]
    assert inputs == [[1, 1], [2, 2]] * 10


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl"])
def test_truth_values_of_a_file_are_numbers_where_the_config_says_so(name):
    """If the config says so, `predict` reads them as training does; in a request, true is not a number."""
    rows = pd.DataFrame({"smoker": [True, False, False, True] * 5, "y": ["a", "b"] * 10})
    rows.to_parquet("t.parquet")
    rows.to_json("t.jsonl", orient="records", lines=True)
    module = prepared({"train": name, "target": "y", "columns": {"smoker": "number"}})
    spec = module.table_spec
    learned = [module.dataset(split).large["input"].numpy().ravel() for split in ("train", "val", "test")]
    inputs = [spec.prepare(row)[0] for _, row in inputs_of(Path(name), "table", spec)]
    assert sorted(inputs) == sorted(np.concatenate(learned))
    with pytest.raises(TableError, match="Column smoker: True is not a number"):
        spec.prepare({"smoker": True})


@pytest.mark.parametrize("name", ["t.csv.gz", "t.CSV.BZ2", "t.tsv.zst", "t.ndjson", "t.jsonl.gz"])
@pytest.mark.parametrize("takes", ["table", "text"])
def test_predict_reads_the_files_that_a_training_reads(name, takes):
    """It reads JSON lines under both suffixes, and compressed files; a damaged one is an error."""
    text = '{"text": "Zug"}\n{"text": "Bern"}\n' if "json" in name else "text\nZug\nBern\n"
    compression = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}.get(Path(name).suffix.lower())
    with pa.output_stream(name, compression=compression) as file:
        file.write(text.encode())
    of_rows = TableSpec((Column("text", "category", categories=("Zug",)),))
    spec = of_rows if takes == "table" else TextSpec("words", vocabulary(["Zug"]))
    assert name.lower().endswith(ENDINGS[takes])
    found = [one["text"] if takes == "table" else one for _, one in inputs_of(Path(name), takes, spec)]
    assert found == ["Zug", "Bern"]
    Path(name).write_bytes(b"\xff{")
    with pytest.raises((ValueError, OSError)):
        list(inputs_of(Path(name), takes, spec))


@pytest.mark.parametrize("name", ["iris.data", "t.txt", "table"])
def test_predict_reads_a_table_of_any_name(name):
    """It is read as CSV, as in training; another kind of file is refused."""
    spec = TableSpec((Column("text", "category", categories=("Zug",)),), format=TableFormat(";"))
    Path(name).write_text("id;text\n1;Zug\n2;Bern\n", "utf-16")
    assert [row["text"] for _, row in inputs_of(Path(name), "table", spec)] == ["Zug", "Bern"]
    for other, data in (("t.png", b""), ("t.xlsx", b"PK\3\4\0\0")):
        Path(other).write_bytes(data)
        with pytest.raises(ValueError, match="this run takes rows of a table: files end in"):
            list(inputs_of(Path(other), "table", spec))


@pytest.mark.parametrize("counts", [[50, 9, 1], [30, 2, 2, 2, 1, 1], [20, *[1] * 20], [5, 5]])
@pytest.mark.parametrize("seed", range(4))
def test_each_class_is_in_the_training_set(counts, seed):
    """This holds for classes of one or two rows, each seed and each fold; every row is in exactly one split."""
    rows = [f"{number}.5,k{number}" for number, count in enumerate(counts) for _ in range(count)]
    Path("t.csv").write_text("\n".join(["size,kind", *rows]))
    for division in ({}, {"num_splits": 3}, {"num_splits": 3, "fold": 2}):
        module = prepared({"train": "t.csv", "target": "kind"}, seed, **division)
        labels = {split: module.dataset(split).small["label"].tolist() for split in ("train", "val", "test")}
        assert set(labels["train"]) == set(range(len(counts)))
        assert sorted(itertools.chain(*labels.values())) == [n for n, count in enumerate(counts) for _ in range(count)]


def test_errors_of_a_spreadsheet_are_missing_values():
    """A column with many errors, such as #DIV/0!, is still one of numbers."""
    errors = ("#DIV/0!", "#N/A", "#NAME?", "#REF!", "#VALUE!", "#NUM!", "#NULL!")
    rows = [f"{n * 7 if n % 3 else errors[n // 3 % 7]},{n}.5,{'ab'[n % 2]}" for n in range(60)]
    Path("t.csv").write_text("\n".join(["share,area,kind", *rows]))
    notes, _ = init(Path("p"), "table", Path("t.csv"))
    assert "number: share, area" in notes


def test_a_word_that_is_a_class_and_between_numbers_is_refused():
    """The word cannot be both: rows of that class would be dropped, and the network would have an unused output."""
    rows = [f"{'unknown' if n == 7 else n},{n}.5,{('a', 'b', 'Unknown')[n % 3]}" for n in range(60)]
    Path("t.csv").write_text("\n".join(["rooms,area,kind", *rows]))
    with pytest.raises(SetupError, match=r"unknown is a class of the column kind, but a missing value .*ignore rooms"):
        init(Path("p"), "table", Path("t.csv"))
    notes, _ = init(Path("p"), "table", Path("t.csv"), Columns(ignore=("rooms",)))
    assert "3 classes: Unknown (20), a (20), b (20)" in notes[0]


@pytest.mark.parametrize("form", ["CHF {:,.2f}", "(${:,.2f})", "{:.1f} kg"])
def test_amounts_that_are_no_numbers_are_named(form):
    """The message has one of the amounts, whether their column is ignored or the target."""
    rows = [f'{number % 9},"{form.format(number * 99.7)}",{"ab"[number % 2]}' for number in range(60)]
    Path("t.csv").write_text("\n".join(["area,price,kind", *rows]))
    notes, _ = init(Path("p"), "table", Path("t.csv"))
    assert f"ignored, amounts such as {form.format(0)}, not plain numbers: price" in notes
    table = "too many for classes; --target NAME names"
    for kind, words in (("table", table), ("regression", f"but {form.format(0)}")):
        with pytest.raises(SetupError, match=re.escape(words)):
            init(Path("q"), kind, Path("t.csv"), Columns("price"))


@pytest.mark.parametrize("first", [0, 1_700_000_000])
def test_targets_that_float32_tells_apart_badly_are_warned_of(first):
    """Times in seconds since 1970 are rounded to multiples of 128 in 32 bits; times from 0 are exact."""
    Path("t.csv").write_text("\n".join(["a,when", *(f"{n}.5,{first + n * 60}" for n in range(60))]))
    message = "the target when varies by .* float32 numbers are about 2e[+]02 apart: subtract a constant"
    with pytest.warns(UserWarning, match=message) if first else contextlib.nullcontext():
        prepared({"train": "t.csv", "target": "when", "columns": {"when": "number"}})


REFUSED = [
    ("t.xlsx", b"PK", "python -c \"import pandas; pandas.read_excel('t.xlsx').to_csv('t.csv', index=False)\""),
    ("t.json", b"[]", "pandas.read_json('t.json').to_json('t.jsonl', orient='records', lines=True)"),
    ("t.csv", b"a,b\n" + bytes(100), "t.csv is not a text file"),
    ("t.csv", ("a,b\n" + "1,2\n" * 20).encode("utf-32"), "t.csv is not a text file in UTF-8, or in UTF-16 with a byte"),
    ("t.csv", b"1;2\n3;4\n" * 20, "names no columns; put a header above it"),
    ("t.csv", b"5.1, 3.5, Iris-setosa, yes\n4.9, 3.0, Iris-setosa, yes\n" * 10, "Iris-setosa,  yes, names no columns"),
    ("t.jsonl", b'[{"a": 1}]\n', "JSON lines need one object per line"),
    ("t.csv", b"a,b\n" + b"1,2\n" * 9, "t.csv has 9 rows below its header"),
    (
        *("t.csv", b"a, b, c\n" + b'1, 2, "x, y"\n' * 20),
        "A quote in the first row follows a blank, so delimiters inside it",
    ),
    ("t.csv", b"a,b,a, a\n" + b"1,2,3,4\n" * 20, "The columns 1, 3 and 4 have the same name, 'a'; rename all but one"),
    (
        *("t.csv", b"Rents\nby hand\na,b\n" + b"1,2\n" * 20),
        "Quote values that contain ','; remove lines that are not rows",
    ),
]


@pytest.mark.parametrize(("name", "data", "words"), REFUSED)
def test_what_is_not_read_is_refused_with_the_next_step(name, data, words):
    """If a command can convert it, the error has the command; nothing is written."""
    Path(name).write_bytes(data)
    with pytest.raises(SetupError) as error:
        init(Path("p"), "table", Path(name))
    assert words in str(error.value)
    assert not Path("p").exists()


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        (
            *("table", Columns("knd"), ConfigError),
            "--target: t.csv has no column 'knd'. Did you mean kind? Its columns: area",
        ),
        ("table", Columns(ignore=("x",)), ConfigError, "--ignore: t.csv has no column 'x'"),
        ("table", Columns("kind", ("kind",)), ConfigError, "the column kind is the target"),
        ("regression", Columns(task="classification"), ConfigError, "--classification: the kind regression takes no"),
        ("text", Columns(ignore=("area",)), ConfigError, "--ignore: the kind text takes no such option"),
        ("images", Columns("area"), ConfigError, "--target: the kind images takes no such option"),
        ("table", Columns("town", task="regression"), SetupError, "the column town holds no numbers to predict"),
        ("table", Columns("area", task="classification"), SetupError, "area has 60 different values, too many for"),
    ],
)
def test_options_that_do_not_fit_are_refused(kind, options, error, words):
    """The error has the option and the allowed values, or the column and its values."""
    Path("t.csv").write_text(text())
    with pytest.raises(error, match=re.escape(words)):
        init(Path("p"), kind, Path("t.csv"), options)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"delimiter": ";;"}, "data.module.params.delimiter must be one ASCII character"),
        ({"decimal": "'"}, 'data.module.params.decimal must be "." or ","'),
        ({"encoding": "utf-9"}, "data.module.params.encoding must be a codec such as utf-8 or latin-1, not 'utf-9'"),
        ({"missing_words": "?"}, "data.module.params.missing_words must be a list of texts"),
    ],
)
def test_values_of_the_format_are_checked(params, words):
    """The error comes before the file is read."""
    with pytest.raises(DataConfigError, match=words):
        prepared({"train": "none.csv", "target": "kind"} | params)


def test_a_config_by_hand_needs_no_columns():
    """The values decide: codes with leading zeros are categories, and numbers with separators are numbers."""
    Path("t.csv").write_text(text(area=lambda value: f'"{value:,.2f}"', change=put(1, lambda _, rooms: f"0{rooms}")))
    spec = prepared({"train": "t.csv", "target": "kind"}).table_spec
    assert {column.name: column.kind for column in spec.columns} == {
        "area": "number", "rooms": "category", "town": "category"
    }  # fmt: skip


def test_an_unlisted_missing_value_word_is_refused():
    """The error has its row and the key that lists such words."""
    Path("t.csv").write_text(text(change=put(0, lambda number, area: "?" if number == 7 else area)))
    params = {"train": "t.csv", "target": "kind", "columns": {"area": "number"}, "missing": "fill"}
    with pytest.raises(DataError, match=r"column area, row 8: '\?' is not a number.*data.module.params.missing_words"):
        prepared(params)
    assert prepared(params | {"missing_words": ["?"]}).table_spec.format.missing_words == ("?",)


def test_the_manual_lists_the_names_of_targets():
    """They have the order in which `init` looks for them."""
    listed = ", ".join(f"`{name}`" for name in TARGETS)
    for page in ("docs/tutorial/table.md", "docs/how-to/numbers-and-labels.md"):
        assert listed in " ".join((ROOT / page).read_text().split()), page


def test_a_column_may_be_named_by_a_number():
    """YAML reads 2020 as a number, also in an override."""
    Path("t.csv").write_text("\n".join(["2020,2021,kind", *(f"{n},{n % 7},{'ab'[n % 2]}" for n in range(40))]))
    spec = prepared({"train": "t.csv", "target": "kind", "columns": {2020: "ignore"}}).table_spec
    assert [column.name for column in spec.columns] == ["2021"]
    with pytest.raises(DataConfigError, match=r"has no column '2019'\. Do you mean"):
        prepared({"train": "t.csv", "target": "kind", "columns": {2019: "ignore"}})


def test_keys_of_json_lines_may_have_blanks():
    """Training, `init` and `predict` use such keys unchanged as column names."""
    rows = [{"a": n, " b": n % 7, "y": "uv"[n % 2]} for n in range(60)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = prepared({"train": "t.jsonl", "target": "y"}).table_spec
    assert [column.name for column in spec.columns] == ["a", " b"]
    assert len([spec.prepare(row) for _, row in inputs_of(Path("t.jsonl"), "table", spec)]) == 60
    init(Path("p"), "table", Path("t.jsonl"))


def test_a_number_may_stand_for_a_missing_value():
    """A missing word may be a number, also in a file whose numbers are texts; the endpoint treats it the same."""
    pd.DataFrame({"x": ["1", "-999", "3"] * 20, "y": ["a", "b"] * 30}).to_parquet("t.parquet")
    params = {"train": "t.parquet", "target": "y", "columns": {"x": "number"}, "missing": "fill"}
    spec = prepared({**params, "missing_words": ["-999"]}).table_spec
    assert 1 < spec.columns[0].mean < 3
    assert spec.prepare({"x": "-999"})[0] == 0


def test_the_file_of_a_row_that_cannot_be_used_is_named():
    """Rows are counted per file, so the message names the file."""
    Path("a.csv").write_text("\n".join(["x,kind", *(f"{n},{'uv'[n % 2]}" for n in range(40))]))
    for row, words in ((",u", "b.csv: column x, row 2: the value is"), ("3,w", "b.csv, column kind: no training row")):
        Path("b.csv").write_text(f"x,kind\n1,u\n{row}\n")
        with pytest.raises(DataError, match=words):
            prepared({"train": "a.csv", "test": "b.csv", "target": "kind"})


def test_the_file_of_a_row_in_a_fold_is_the_training_file():
    """With folds, the validation rows are rows of the training file, also if a file for validation is given."""
    rows = [f"{n},{'uv'[n % 2]}" for n in range(40)]
    Path("b.csv").write_text("\n".join(["x,kind", *rows]))
    Path("a.csv").write_text("\n".join(["x,kind", *(row if n else ",u" for n, row in enumerate(rows))]))
    for fold in range(2):
        with pytest.raises(DataError, match=r"a\.csv: column x, row 1: the value is"):
            prepared({"train": "a.csv", "validation": "b.csv", "target": "kind"}, num_splits=2, fold=fold)


@pytest.mark.parametrize("first", [1, 1.5])
@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.jsonl"])
def test_a_number_that_stands_for_a_missing_value_may_be_no_text(name, first):
    """It is missing in a file of numbers and in JSON as it is in CSV, which may have it as -999.0."""
    rows = pd.DataFrame({"x": [first, -999, 3] * 20, "y": ["a", "b"] * 30})
    rows.to_csv("t.csv", index=False)
    rows.to_parquet("t.parquet")
    rows.to_json("t.jsonl", orient="records", lines=True)
    spec = prepared({"train": name, "target": "y", "missing": "fill", "missing_words": ["-999"]}).table_spec
    assert 1 < spec.columns[0].mean < 3
    assert [spec.prepare({"x": gap})[0] for gap in (-999, -999.0, "-999", "-999.0", Decimal("-999.00"))] == [0] * 5
    for other in ("t.csv", "t.parquet", "t.jsonl"):
        assert [spec.prepare(row)[0] for _, row in inputs_of(Path(other), "table", spec)][1::3] == [0] * 20


def test_a_missing_word_is_not_compared_with_the_number_of_a_day():
    """1997-05-18 is day 9999 since 1970, and a date."""
    form = TableFormat(missing_words=["9999"])
    assert form.number("1997-05-18") == 9999
    assert math.isnan(form.number("9999.0"))


def test_a_missing_word_is_compared_with_categories_as_text():
    """Numbers that are categories are missing in a request exactly if they were in training."""
    rows = pd.DataFrame({"x": [Decimal("-999.00"), Decimal("1.00")] * 10, "n": [-999, 1] * 10, "y": ["a", "b"] * 10})
    rows.to_parquet("t.parquet")
    params = {"train": "t.parquet", "target": "y", "missing": "fill", "missing_words": ["-999"]}
    spec = prepared({**params, "columns": {"x": "category", "n": "category"}}).table_spec
    assert [list(column.categories) for column in spec.columns] == [["-999.00", "1.00"], ["1"]]
    assert spec.prepare({"x": Decimal("NaN"), "n": None}).tolist() == [0, 0]
    assert [(code > 0).tolist() for code in map(spec.prepare, rows.to_dict("records")[:2])] == [
        [True, False],
        [True] * 2,
    ]


def test_decimals_and_times_of_parquet_have_no_decimal_comma():
    """A run trained on CSV with decimal commas reads typed numbers and times as they are."""
    times = pd.date_range("2024-01-01 10:00", periods=20, freq="h")
    prices = [Decimal(n) + Decimal("0.125") for n in range(1, 21)]
    rows = pd.DataFrame({"price": prices, "at": times, "y": ["a", "b"] * 10})
    rows.to_parquet("t.parquet")
    lines = [f"{str(price).replace('.', ',')};{at};{y}" for price, at, y in rows.itertuples(index=False)]
    Path("t.csv").write_text("\n".join(["price;at;y", *lines]))
    params = {"train": "t.csv", "target": "y", "delimiter": ";", "decimal": ",", "columns": {"at": "number"}}
    spec = prepared(params).table_spec
    csv, parquet = (
        [spec.prepare(row).tolist() for _, row in inputs_of(Path(name), "table", spec)]
        for name in ("t.csv", "t.parquet")
    )
    assert csv == parquet
    prepared({**params, "test": "t.parquet"})


@pytest.mark.parametrize(
    ("word", "missing", "present"),
    [
        ("1", (1, 1.0, Decimal("1.00"), np.float32(1), "1"), (True, np.True_, 10, "true", 1.5)),
        ("-inf", (-math.inf, np.float32(-math.inf), Decimal("-Infinity")), (math.inf, -1e308)),
        ("infinity", (math.inf,), (-math.inf, 10**400)),
        ("-99.9", (-99.9, Decimal("-99.9"), Decimal("-99.90")), (-99,)),
        ("9999999999999999", (9999999999999999,), (10**16,)),
        ("?", (math.nan, Decimal("NaN"), None, " ? "), (0, False, 10**400)),
    ],
)
def test_a_missing_word_is_compared_with_numbers_by_value(word, missing, present):
    """A truth value is no number, and a number of any size and type is compared exactly."""
    form = TableFormat(missing_words=[word])
    assert [value for value in missing if not form.is_missing(value)] == []
    assert [value for value in present if form.is_missing(value)] == []


@pytest.mark.parametrize(
    ("encoding", "town"), [("utf-16-le", "Bern"), ("utf-16-be", "Bern"), ("iso-2022-jp", "\u6771\u4eac")]
)
def test_an_encoding_whose_bytes_are_valid_utf_8_is_read(encoding, town, tmp_path):
    """`predict` uses the encoding of the training; a file in UTF-8 is still accepted."""
    spec = TableSpec((Column("town", "category", categories=(town,)),), format=TableFormat(encoding=encoding))
    for given in (encoding, "utf-8"):
        (tmp_path / "t.csv").write_text(f"id,town\n1,{town}\n", given)
        assert [row["town"] for _, row in inputs_of(tmp_path / "t.csv", "table", spec)] == [town]


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
def test_a_null_byte_does_not_change_the_encoding(encoding, tmp_path):
    """Text in UTF-8 is read as such although the training's file had another encoding."""
    spec = TableSpec((Column("town", "category", categories=("Bern",)),), format=TableFormat(encoding=encoding))
    (tmp_path / "t.csv").write_text("town,id\nZ\u00fcrich,\0\n", "utf-8-sig")
    assert [row["town"] for _, row in inputs_of(tmp_path / "t.csv", "table", spec)] == ["Z\u00fcrich"]
