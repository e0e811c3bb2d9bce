"""A table row becomes the same numbers in training and on the server; a row that cannot be prepared is an error."""

import json
import math
import unicodedata
from datetime import UTC, date, datetime, time, timedelta, timezone

import numpy as np
import pandas as pd
import pytest

from deeplightning.table_format import TableError, TableFormat, rows_of_csv
from deeplightning.table_spec import Column, TableSpec, Words

AGE = Column("age", "number", 40.0, 10.0)
CITY = Column("city", "category", categories=("Bern", "Genf"))
SPEC = TableSpec((CITY, AGE), missing="fill")


def test_numbers_come_first_and_are_standardised():
    """Categories are numbered from 1; 0 means a category that the training rows lack."""
    assert SPEC.prepare({"age": 50, "city": "Genf", "more": "is ignored"}).tolist() == [1.0, 2.0]
    assert SPEC.prepare({"age": " 35 ", "city": "Paris"}).tolist() == [-0.5, 0.0]
    assert SPEC.cardinalities == [3]
    assert SPEC.prepare({"age": 50, "city": "Genf"}).dtype == np.float32


@pytest.mark.parametrize(("start", "second"), [(1.7e9, 1), (1.7e18, 1e9)])
def test_times_in_seconds_and_nanoseconds_stay_different(start, second):
    """They are standardised in 64 bits; 32 bits are enough for the minutes of a year."""
    spec = TableSpec((Column("time", "number", start, 1e7 * second),))
    times = start + 60 * second * np.arange(5)
    steps = np.diff(spec.encode({"time": times})[:, 0])
    assert steps == pytest.approx(np.full(4, 6e-6), rel=1e-3)
    assert [spec.prepare({"time": time})[0] for time in times.tolist()] == spec.encode({"time": times})[:, 0].tolist()


@pytest.mark.parametrize("gap", [None, "", "NaN", "n/a", "NULL", math.nan, pd.NA])
def test_a_missing_value_is_filled_or_refused(gap):
    """The spec decides. A number is filled with its mean, a category with 0."""
    assert SPEC.prepare({"age": gap, "city": gap}).tolist() == [0.0, 0.0]
    strict = TableSpec(SPEC.columns)
    with pytest.raises(TableError, match="Column age: the value is missing"):
        strict.prepare({"age": gap, "city": "Bern"})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"city": "Bern"}, "The column age is missing; a row has city, age, and this one has 'city'.$"),
        ({}, "The columns city, age are missing; a row has city, age, and this one has none.$"),
        ({"city;age": "Bern;3"}, "are missing; a row has city, age, and this one has 'city;age'.$"),
        ({f"{n}\x1b": n for n in range(99)}, r"this one has '0.x1b', ('..x1b'(, )?){9}\.$"),
        ({"age": True, "city": "Bern"}, "Column age: True is not a number"),
        ({"age": "old", "city": "Bern"}, "Column age: 'old' is not a number"),
        ({"age": [1], "city": "Bern"}, "Column age: .1. is not a number"),
        ({"age": "1_000", "city": "Bern"}, "Column age: '1_000' is not a number"),
        ({"age": math.inf, "city": "Bern"}, "Column age: inf is not a finite number"),
        ({"age": 10**400, "city": "Bern"}, "Column age: 1000.* is not a finite number"),
        ({"age": 1e300, "city": "Bern"}, "Column age: 1e.300 is too large"),
        ({"age": 1, "city": {}}, "Column city: .* is neither a text nor a number"),
        ({"age": 1, "city": "x" * 99}, "Column city: 'x*… is not a known category; known: Bern, Genf"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row, words):
    """The error has the column, the shortened value and the known categories."""
    with pytest.raises(TableError, match=words) as caught:
        TableSpec(SPEC.columns, unknown="refuse").prepare(row)
    assert caught.value.status == 400


def test_training_and_serving_give_the_same_bits():
    """`encode` of all rows returns the same bits as `prepare` of each row."""
    random = np.random.default_rng(0)
    ages = random.normal(1e6, 3e5, 500)
    ages[::7] = np.nan
    indices = random.integers(-1, 4, 500)
    words = ("Genf", "Paris", "Bern", "Rom")
    spec = TableSpec((Column("age", "number", float(np.nanmean(ages)), float(np.nanstd(ages))), CITY), missing="fill")
    encoded = spec.encode({"age": ages, "city": Words(words, indices)})
    assert (encoded.dtype, encoded.shape) == (np.float32, (500, 2))
    for number, row in enumerate(encoded):
        word = None if indices[number] < 0 else words[indices[number]]
        for age in (float(ages[number]), repr(float(ages[number]))):  # from JSON and from CSV
            assert spec.prepare({"age": age, "city": word}).tolist() == row.tolist()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"age": np.array([1.0, np.nan, np.nan])}, "column age, row 2: the value is missing, as are 2 of 3"),
        ({"age": np.array([1.0, 2.0, np.inf])}, "column age, row 3: inf is not finite"),
        ({"city": Words(["Bern", "Rom"], np.array([0, 1, 0]))}, "column city, row 2: 'Rom' is not a category"),
    ],
)
def test_training_rows_that_cannot_be_used_are_named(columns, words):
    """The error has the column and the row number, from 1."""
    usable = {"age": np.ones(3), "city": Words(["Bern"], np.zeros(3, np.int64))}
    with pytest.raises(TableError, match=words):
        TableSpec(SPEC.columns, unknown="refuse").encode(usable | columns)


def test_a_spec_travels_as_plain_types():
    """A dictionary that is not a spec is refused with the reason."""
    assert TableSpec.from_dict(SPEC.to_dict()) == SPEC
    german = TableSpec(SPEC.columns, format=TableFormat(";", ",", "latin-1", ("?",)))
    assert TableSpec.from_dict(json.loads(json.dumps(german.to_dict()))) == german
    assert german.prepare({"age": "1.050,5", "city": "Bern"}).tolist() == [101.05000305175781, 1.0]
    for change, words in (
        ({"missing": "guess"}, "missing must be one of fill, refuse"),
        ({"columns": []}, "at least one column"),
        ({"columns": [SPEC.to_dict()["columns"][0]] * 2}, "different names"),
        ({"columns": 3}, "must be a list"),
        ({"columns": [{}]}, "a column has exactly the keys"),
        ({"new": 1}, "look at new"),
        ({"format": {"delimiter": ";"}}, "the format of a table has exactly the keys"),
        *(
            ({"format": {"delimiter": ";", "decimal": ".", "encoding": "utf-8", "missing_words": []} | wrong}, words)
            for wrong, words in (
                ({"delimiter": "\xa7"}, "delimiter must be one ASCII character"),
                ({"decimal": [","]}, "decimal must be"),
                ({"encoding": "zlib"}, "encoding must be a codec such as utf-8"),
                ({"missing_words": [None]}, "missing_words must be a list of texts"),
            )
        ),
    ):
        with pytest.raises(ValueError, match=words):
            TableSpec.from_dict(SPEC.to_dict() | change)
    for values, words in (
        (("", "number"), "must be a text that is not empty"),
        (("a", "date"), "must be one of number, category"),
        (("a", "number", math.nan), "mean and std of column a must be finite numbers"),
        (("a", "number", 0.0, 0.0), "and std positive"),
        (("a", "number", 0.0, 1.0, ("x",)), "must have different categories if it is a category"),
        (("a", "category"), "must have different categories if it is a category"),
        (("a", "category", 0.0, 1.0, ("x", "x")), "must have different categories"),
    ):
        with pytest.raises(ValueError, match=words):
            Column(*values)


@pytest.mark.parametrize(
    ("trained", "asked"), [("08:30:00.000000", "08:30:00"), ("2024-02-29 08:30:00", "2024-02-29 08:30:00.000")]
)
def test_a_time_is_the_same_category_with_and_without_its_fraction(trained, asked):
    """Parquet has times with six fractional digits, CSV and JSON usually none; another fraction is another time."""
    spec = TableSpec((Column("start", "category", categories=("05:00:00", trained)),))
    assert [spec.prepare({"start": word}).item() for word in (trained, asked, trained[:-2] + ".5")] == [2, 2, 0]
    as_object = time(8, 30) if trained.startswith("08") else datetime(2024, 2, 29, 8, 30)
    assert spec.prepare({"start": as_object}).item() == 2


def test_numbers_may_be_those_of_numpy_and_pandas():
    """Dates are accepted as well, as in a DataFrame; true is not a number."""
    form = TableFormat()
    assert [form.number(value) for value in (np.int64(3), np.float32(1.5), np.uint8(7))] == [3.0, 1.5, 7.0]
    assert form.number(date(1970, 1, 3)) == form.number(datetime(1970, 1, 3, tzinfo=UTC)) == 2.0
    with pytest.raises(ValueError, match="True"):
        form.number(True)


def test_the_same_moment_is_the_same_number_in_each_time_zone():
    """Local times equal the UTC times that a browser sends; a time without an offset counts as UTC."""
    words = ["2024-07-01 14:00:00+02:00", "2024-07-01T12:00:00.000Z", "2024-07-01 12:00:00+0000", "2024-07-01 12:00:00"]
    assert len({TableFormat().number(word) for word in words}) == 1
    zurich = timezone(timedelta(hours=1))
    assert TableFormat().number(datetime(1970, 1, 3, 1, tzinfo=zurich)) == 2.0


@pytest.mark.parametrize("trained", [",", ";"])
@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_names_in_quotes_are_read_whatever_the_delimiter(sign, trained):
    """Quoted names, as R and Excel write them, may have two lines, and a request may have another delimiter than the
    training table."""
    text = f'"age"{sign}"city, or\nvillage"\n31{sign}"Bern"\n'
    columns = ["age", "city, or\nvillage"]
    rows = rows_of_csv(text, form=TableFormat(trained), columns=columns)
    assert rows == [dict(zip(columns, ("31", "Bern"), strict=True))]


def test_a_table_in_csv_becomes_rows():
    """The first line names the columns, quoted values may contain commas and line ends, and empty lines are ignored."""
    assert rows_of_csv('age, city\n31,"Bern, BE"\n\n32,"a\nb"\n') == [
        {"age": "31", "city": "Bern, BE"},
        {"age": "32", "city": "a\nb"},
    ]
    assert len(rows_of_csv("age\n" + "1\n" * 100, most=10)) == 11
    assert len(rows_of_csv("note\n" + "word " * 50_000)[0]["note"]) == 250_000  # Python's limit is half of it
    for text, words in (
        ("", "The table is empty"),
        ("age\n", "a header and no rows"),
        ("a,b,a\n1,2,3\n", "The columns 1 and 3 have the same name, 'a'; rename one"),
        ("a,b\n1\n", "Line 2 has 1 values, the header 2"),
        ('a\n"1', "Line 2 is not CSV"),
    ):
        with pytest.raises(TableError, match=words):
            rows_of_csv(text)


def test_a_header_of_many_columns_is_read_in_one_pass():
    """A request's header may have as many names as its size allows; comparing all pairs would take minutes."""
    with pytest.raises(TableError, match="Line 2 has 1 values, the header 200001"):
        rows_of_csv("," * 200_000 + "\n1\n")


@pytest.mark.parametrize(("trained", "asked"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_category_is_the_same_in_both_forms_of_unicode(trained, asked):
    """Letters with accents are one character or two; a reader sees no difference."""
    words = [unicodedata.normalize(trained, "H\u00e0 N\u1ed9i"), "Bern"]
    spec = TableSpec((Column("city", "category", categories=tuple(words)),), unknown="refuse")
    other = unicodedata.normalize(asked, words[0])
    assert other != words[0]
    assert spec.prepare({"city": other}).tolist() == [1]
    assert spec.encode({"city": Words([other], np.array([0]))}).tolist() == [[1]]
