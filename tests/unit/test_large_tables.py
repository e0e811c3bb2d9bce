"""Tables are read into the cache in chunks, and larger ones prepared batch by batch: the same bits as in memory."""

import csv
import errno
import os
import pickle
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pytest
from modules import data_config
from pyarrow import parquet

from deeplightning.data import loading, table, table_rows
from deeplightning.data.data_errors import DataConfigError, DataError
from deeplightning.data.datasets import OnDemand
from deeplightning.data.loading import Moments
from deeplightning.data.table import TableData
from deeplightning.data.table_files import TableFile
from deeplightning.table_format import TableFormat

ROWS = 24_000  # of `place`: 1.5 MB, which pyarrow reads in two chunks
HEADER = ["age", "weight", "city", "new", "customer", "part", "day", "price", "kind"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The folder of the cache."""
    folder = tmp_path_factory.mktemp("a user") / "cache"
    monkeypatch.setenv("DEEPLIGHTNING_CACHE", str(folder))
    return folder


@pytest.fixture
def small(monkeypatch):
    """Statistics are computed over more than one chunk."""
    monkeypatch.setattr(table_rows, "CHUNK_ROWS", 5000)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Orders as CSV and Parquet: numbers and categories with missing values, and columns that split the rows."""
    folder, random = tmp_path_factory.mktemp("orders"), np.random.default_rng(0)
    age, weight = random.normal(40, 12, ROWS), random.lognormal(3, 4, ROWS)
    city = random.choice(["Bern", " Genf ", "Zug, ZG", "Zürich", "n/a", ""], ROWS)
    customer, part = random.integers(0, 3000, ROWS), random.choice(["train", "Train", "valid", "test"], ROWS)
    day = random.integers(0, 10**9, ROWS)
    with (folder / "orders.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for n in range(ROWS):
            kind = ["small", "large", "10", "9"][min(3, int(random.exponential()))]
            date = "" if n % 5000 == 7 else np.datetime64(int(day[n]), "s")
            gap = "" if n % 9 == 0 else f"{age[n]:.3f}"
            new = str(bool(n % 3)).lower()
            row = [gap, weight[n], city[n], new, f"no. {customer[n]}", part[n], date, f"{weight[n] + age[n]:.4f}", kind]
            writer.writerow(row)
    rows = arrow_csv.read_csv(folder / "orders.csv")
    parquet.write_table(rows, folder / "orders.parquet")
    parquet.write_table(rows.slice(0, 9000), folder / "some.parquet")
    parquet.write_table(rows.slice(9000, 4000), folder / "more.parquet")
    return folder


def ready(root, in_memory, stage=None, *, train="orders.csv", target="kind", columns=None, **params):
    """Return a table after `setup`. `in_memory`: True uses no disk; False keeps no inputs in memory; None keeps rows on
    disk and inputs in memory."""
    data = {name: params.pop(name) for name in ("seed", "num_splits", "fold", "num_workers") if name in params}
    if "only" not in params:
        columns = {"customer": "ignore", "part": "ignore", "day": "ignore"} | (columns or {})
    config = data_config(root, **{"seed": 1, "batch_size": 256} | data)
    module = TableData(config, train, target, missing=params.pop("missing", "fill"), columns=columns or {}, **params)
    with pytest.MonkeyPatch.context() as patch:
        if in_memory:
            patch.setenv("DEEPLIGHTNING_CACHE", "off")
        if in_memory is False:
            patch.setattr(loading, "IN_MEMORY_LIMIT", 0)
        module.setup(stage)
    return module


def batches(module, splits=("train", "val", "test")):
    return {split: list(getattr(module, f"{split}_dataloader")()) for split in splits}


def as_bytes(found):
    """Return batches as plain values, with the bytes of each tensor."""
    return {
        split: [{name: (v.dtype, v.shape, v.numpy().tobytes()) for name, v in batch.items()} for batch in some]
        for split, some in found.items()
    }


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"num_splits": 4, "fold": 2, "seed": 5},
        {"group": "customer"},
        {"time": "day", "columns": {"day": "ignore"}},
        {"split": "part"},
        {"target": ["price", "weight"], "only": ["city", "age"]},
        {"columns": {"age": "category", "customer": "category"}},
        {"train": "orders.parquet", "time": "day"},
        {"train": "some.parquet", "validation": "more.parquet", "test": "orders.parquet", "target": "price"},
    ],
    ids=str,
)
@pytest.mark.parametrize("in_memory", [False, None])
def test_a_table_on_disk_gives_the_bits_of_one_in_memory(in_memory, params, place, small):
    """A table on disk and the same table in memory have the same spec, classes, target statistics, splits, batches and
    examples, bit for bit, however the rows are split."""
    wanted, found = ready(place, True, **params), ready(place, in_memory, **params)
    assert not isinstance(wanted.dataset("train"), OnDemand)
    assert isinstance(found.dataset("train"), OnDemand) is (in_memory is False)
    assert found.table_spec == wanted.table_spec
    for name in ("class_names", "target_names", "target_mean", "target_std"):
        assert getattr(found, name) == getattr(wanted, name)
    assert as_bytes(batches(found)) == as_bytes(batches(wanted))
    np.testing.assert_array_equal(found.example_inputs(20)["rows"], wanted.example_inputs(20)["rows"])
    assert as_bytes({"": [found.example_batch(7)]}) == as_bytes({"": [wanted.example_batch(7)]})
    assert found.dataset("val")[[-1]]["index"].tolist() == [-1]


@pytest.mark.parametrize("train", ["orders.csv", "orders.parquet"])
def test_the_latest_rows_test(train, place):
    """Rows are ordered by days since 1970, for CSV and Parquet alike; rows without a date count as the oldest."""
    found = ready(place, True, train=train, time="day", columns={"day": "ignore"})
    days = {split: rows.column("day") for split, rows in found._samples.items()}
    assert np.nanmax(days["train"]) <= days["val"].min()
    assert days["val"].max() <= days["test"].min()
    assert np.isnan(days["train"]).any()


def write_times(place, write):
    """Write `times.csv` with a time, its position and one of two classes in each row."""
    rows = []
    for n, step in enumerate([*range(993, 1005), *range(1993, 2005)]):  # some of these could be years
        time = write.format(year=2019 + n // 12, month=n % 12 + 1, day=28 - n, count=n, step=step)
        rows.append(f"{time},{n},{'ab'[n % 2]}")
    (place / "times.csv").write_text("\n".join(["when,x,kind", *rows, ""]))


@pytest.mark.parametrize(
    "write",
    ["{year}/{month}/1", "{year}-{month}", "week {count}", "step {step}", "{year} {month:02}", "{year}.{month}.1"],
)
def test_times_that_are_texts_are_ordered_by_their_numbers(write, place):
    """Texts are ordered by the numbers in them, although some of these have more digits than others."""
    write_times(place, write)
    found = ready(place, True, train="times.csv", only=["x"], time="when")
    column = found.table_spec.columns[0]
    inputs = {split: found.dataset(split).large["input"][:, 0].numpy() for split in ("train", "val", "test")}
    numbers = {split: sorted(np.rint(x * column.std + column.mean).tolist()) for split, x in inputs.items()}
    assert [*numbers["train"], *numbers["val"], *numbers["test"]] == [*range(24)]


@pytest.mark.parametrize(
    "write", ["{day:02}.{month:02}.{year}", "{month}/{day}/19", "Q1 {year}", "Jan {year}", "Jan-{month:02}"]
)
def test_times_that_texts_do_not_order_are_refused(write, place):
    """A date with the year at its end would sort by its day, and rows of the future would train."""
    write_times(place, write)
    with pytest.raises(DataError, match=r"column when: .* does not begin with its year"):
        ready(place, True, train="times.csv", only=["x"], time="when")


@pytest.mark.slow
@pytest.mark.run
def test_loader_workers_map_the_same_file(place):
    """Loader workers read the same rows as the process; a worker receives the path of the file, not its rows."""
    found = ready(place, False, stage="validate", num_workers=1)
    wanted = ready(place, True, stage="validate")
    assert as_bytes(batches(found, ["val"])) == as_bytes(batches(wanted, ["val"]))
    assert len(pickle.dumps(found.dataset("val").samples.table)) < 1000


def broken(path, at, column, value, keep):
    """Write the first `keep` rows of a file into `broken.csv`, with another value in the rows `at`, from 1."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[: keep + 1]
    for row in at if isinstance(at, list) else [at]:
        rows[row][HEADER.index(column)] = value
    with (path.parent / "broken.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.mark.parametrize(
    ("row", "column", "value", "params", "words"),
    [
        (23000, "weight", "heavy", {}, "column weight, row 23000: 'heavy' is not a number"),
        (
            [*range(1, 9001)],
            "kind",
            "",
            {"columns": {"kind": "category"}},
            "column kind: the target is missing or not finite in 9,000 of 9,000 rows, first in row 1. No row is left",
        ),
        (8000, "weight", "inf", {"split": "part"}, "column weight, row 8000: inf is not finite, or too large"),
        (8000, "weight", "inf", {}, "column weight, row 8000: inf is not finite, or too large"),
        (8000, "part", "rest", {"split": "part"}, "column part, row 8000: 'rest' is not a set"),
        (8000, "age", "", {"missing": "refuse"}, r"column age, row \d+: the value is missing, as are \d+ of"),
    ],
)
def test_errors_name_the_row(row, column, value, params, words, place, small):
    """An error in a table that is read in chunks has the number of its row."""
    broken(place / "orders.csv", row, column, value, ROWS if row == 23000 else 9000)
    with pytest.raises((DataError, DataConfigError), match=words):
        ready(place, False, train="broken.csv", **params)


def test_the_first_quote_may_be_anywhere(tmp_path):
    """The first value of several lines may come after the first chunk."""
    lines = ["of a long note"] * 9
    rows = [[number, (" " if number < 10_000 else "\n").join(lines)] for number in range(30_000)]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["number", "note"], *rows])
    parts = [*TableFile(tmp_path / "t.csv", TableFormat()).parts({"note": "word"}, 1000)]
    assert [part["note"].words[place] for part in parts for place in part["note"].indices] == [row[1] for row in rows]


def test_a_column_of_names_is_refused_before_memory_is_full(place, monkeypatch, cache):
    """More different texts than fit in memory are an error with the remedy, and leave nothing in the cache."""
    monkeypatch.setattr(table_rows, "MAX_WORDS", 500)
    (place / "named.csv").write_text((place / "orders.csv").read_text().replace("customer", "name", 1))
    with pytest.raises(DataError, match="column name: more than 500 different texts") as caught:
        ready(place, False, train="named.csv", only=["name", "age"])
    assert "data.module.params.columns.name to ignore" in str(caught.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_mean_and_deviation_of_parts():
    """Over one chunk they equal numpy's bit for bit; over several they differ by rounding only, far from 0 too."""
    values = np.random.default_rng(0).normal(1e6, 3.0, (50_000, 2))
    one, many = Moments(), Moments()
    one.add(values)
    for part in np.array_split(values, 7):
        many.add(part)
    assert (one.mean.tolist(), one.std.tolist()) == (values.mean(0).tolist(), values.std(0).tolist())
    np.testing.assert_allclose(many.mean, values.mean(0), rtol=1e-14)
    np.testing.assert_allclose(many.std, values.std(0), rtol=1e-10)


@pytest.mark.parametrize("value", [0.1, 19.99, -3.3])
def test_a_constant_has_no_deviation(value):
    """A constant that rounding would give another mean has a deviation of 0, in one chunk or several."""
    values = np.full((1437, 2), value)
    assert values.std(0).all()
    for count in (1, 3):
        moments = Moments()
        for part in np.array_split(values, count):
            moments.add(part)
        assert (moments.mean.tolist(), moments.std.tolist()) == ([value] * 2, [0.0, 0.0])


def test_the_size_of_the_inputs_decides(place, monkeypatch):
    """Inputs are kept in memory up to a limit on the total size of all splits."""
    size = ROWS * 4 * len(ready(place, None).table_spec.columns)
    for limit, fits in ((size, True), (size - 1, False)):
        monkeypatch.setattr(loading, "IN_MEMORY_LIMIT", limit)
        assert isinstance(ready(place, None).dataset("test"), OnDemand) is not fits


# The cache


@pytest.fixture
def counted(monkeypatch):
    """The names of the files that were read."""
    read, parts = [], table.TableFile.parts

    def counting(file, *args):
        read.append(file.path.name)
        yield from parts(file, *args)

    monkeypatch.setattr(table.TableFile, "parts", counting)
    return read


def folders(cache):
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_read_once(place, counted, cache):
    """Another seed, fold or limit reads no file again; another column kind does."""
    for options in ({}, {"seed": 9}, {"num_splits": 3, "fold": 1}, {"limit": 500}, {"missing": "fill"}):
        ready(place, False, **options)
    assert counted == ["orders.csv"]
    ready(place, False, columns={"weight": "ignore"})
    assert counted == ["orders.csv"] * 2
    assert len(folders(cache)) == 2


def test_a_changed_file_is_read_again(place, tmp_path, counted):
    """The content decides, even if size and modification time are the same."""
    path = tmp_path / "orders.csv"
    text = (place / "orders.csv").read_text()
    path.write_text(text)
    before = path.stat()
    first = ready(tmp_path, False)
    path.write_text(text.replace("Bern", "Biel"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = ready(tmp_path, False)
    assert counted == ["orders.csv"] * 2
    assert "Bern" in first.table_spec.categories[0].categories
    assert "Biel" in second.table_spec.categories[0].categories


def test_a_file_that_changes_while_it_is_read(place, tmp_path, counted, cache, monkeypatch):
    """The run ends with an error, and the cache keeps nothing."""
    path, parts = tmp_path / "orders.csv", table.TableFile.parts
    path.write_text((place / "orders.csv").read_text())

    def changing(*args):
        yield from parts(*args)
        with path.open("a") as file:
            file.write("\n")

    monkeypatch.setattr(table.TableFile, "parts", changing)
    with pytest.raises(DataError, match="was changed while it was read"):
        ready(tmp_path, False)
    assert folders(cache) == []


@pytest.mark.parametrize(("lost", "how"), [("rows", "cut"), ("index", "cut"), ("index", "missing")])
def test_an_incomplete_cache_folder_is_read_again(lost, how, place, cache, counted):
    """A file of it that is truncated or missing makes the table be read from its source."""
    wanted = as_bytes(batches(ready(place, False)))
    path = cache / folders(cache)[0] / lost
    os.truncate(path, 800) if how == "cut" else path.unlink()
    assert as_bytes(batches(ready(place, False))) == wanted
    assert counted == ["orders.csv"] * 2


def test_a_full_disk(place, cache, monkeypatch, caplog):
    """The log has the reason, no file remains, and the table is read into memory."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert ready(place, None).dataset("train").labels.any()
    assert f"orders.csv is read into memory: {cache}: No space left on device" in caplog.text
    assert folders(cache) == []


def test_a_table_in_use_keeps_its_place(place, monkeypatch, caplog):
    """It is not evicted for another one; test_cache.py tests the order of eviction."""
    used = ready(place, False, "test", only=["age"])
    size = sum(file.stat().st_size for file in used._samples["test"].table.path.iterdir())
    monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", str(1.5 * size / 2**30))
    ready(place, False, "test", only=["city"])
    assert "allow beside the folders in use" in caplog.text
    assert used._samples["test"].table.path.is_dir()
    monkeypatch.setenv("DEEPLIGHTNING_CACHE_LIMIT", "0.0001")
    assert ready(place, False, "test", only=["new"])._samples["test"].table.path is None


CHILD = """
import sys, threading, time
import pyarrow.csv, pyarrow.parquet, torch, pytorch_lightning
from modules import data_config
from deeplightning.data import loading
from deeplightning.data.table import TableData

def own():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    while True:
        taken.append(own())
        time.sleep(0.005)

taken = [own()]
threading.Thread(target=watch, daemon=True).start()
loading.IN_MEMORY_LIMIT = 0
module = TableData(data_config(sys.argv[1], batch_size=512), "large.csv", "label")
module.setup()
assert sum(len(batch["index"]) for batch in module.train_dataloader()) > 500_000
print(max(taken) - taken[0])
"""


def write_large(path, size):
    """Write a table of `size` bytes or more: 18 numbers, 2 categories and a label in each row."""
    random, lines = np.random.default_rng(0), []
    for _ in range(2000):
        numbers = ",".join(f"{value:.5f}" for value in random.normal(0, 100, 18))
        lines.append(f"{numbers},{random.choice(['red', 'green'])},{random.integers(99)}x,{random.integers(4)}y\n")
    block = "".join(lines)
    with path.open("w") as file:
        file.write(",".join([*(f"x{n}" for n in range(18)), "colour", "size", "label"]) + "\n")
        for _ in range(-(-size // len(block))):
            file.write(block)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_stays_bounded(tmp_path, cache):
    """Training on a 300 MB table on disk adds at most 200 MB of memory, even the first time, when the file is read; in
    memory the table would take three times its size."""
    write_large(tmp_path / "large.csv", 300 * 10**6)
    for _ in range(2):
        command, tests = [sys.executable, "-c", CHILD, str(tmp_path)], {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, env=os.environ | tests, capture_output=True, text=True, check=True)
        assert float(done.stdout) * 1024 < 200e6, done.stdout


def test_a_row_without_a_valid_split_has_its_number_in_the_file(place):
    """Rows that are left out because they have no target are counted too."""
    rows = [f"{n},{'' if n == 3 else 'ab'[n % 2]},{'rest' if n == 9 else 'train'}" for n in range(1, 21)]
    (place / "sets.csv").write_text("\n".join(["x,kind,part", *rows, ""]))
    with pytest.raises(DataError, match="column part, row 9: 'rest' is not a set"):
        ready(place, True, train="sets.csv", only=["x"], split="part")


@pytest.mark.parametrize("more", [{}, {"group": "customer"}])
def test_only_the_named_columns_are_inputs(more, place):
    """`only` applies also if `columns` lists others, as the config of `init` does."""
    kinds = {"age": "number", "city": "category", "customer": "category"}
    found = ready(place, True, only=["age"], columns=kinds, **more)
    assert [column.name for column in found.table_spec.columns] == ["age"]


def test_rounding_errors_of_a_constant_are_no_deviation():
    """Sums of shares differ from 1 in the last bit; divided by that, 0.99 would be -8e13."""
    moments = Moments()
    moments.add(np.array([1.0, 0.9999999999999999, 1.0000000000000002] * 50))
    assert moments.std == 0
    moments.add(np.array([np.nan]))
    assert np.isnan(moments.std)


@pytest.mark.parametrize(("cached", "workers"), [(True, 2), (False, 0)])
def test_rows_in_memory_are_not_sent_to_workers(cached, workers, place, monkeypatch):
    """Without the cache each worker would get a copy of all rows."""
    if not cached:
        monkeypatch.setenv("DEEPLIGHTNING_CACHE", "off")
    assert ready(place, False, stage="fit", num_workers=2).train_dataloader().num_workers == workers


@pytest.mark.parametrize("short", [False, True], ids=["+09:00", "+09"])
def test_times_with_offsets_are_ordered_as_moments(tmp_path, short):
    """The clock of each row may be in another time zone; the latest rows are the test set."""
    moments = [datetime(2024, 3, 31, tzinfo=UTC) + timedelta(hours=n) for n in range(24)]
    zones = [timezone(timedelta(hours=hours)) for hours in (9, -8)]
    words = [each.astimezone(zones[n % 2]).isoformat()[: 22 if short else None] for n, each in enumerate(moments)]
    rows = pa.table({"when": words, "x": [float(n) for n in range(24)], "kind": ["a", "b"] * 12})
    parquet.write_table(rows, tmp_path / "zones.parquet")
    found = ready(tmp_path, True, train="zones.parquet", only=["x"], time="when")
    numbers = [found._samples[split].column("x").tolist() for split in ("train", "val", "test")]
    assert max(numbers[0]) < min(numbers[1])
    assert max(numbers[1]) < min(numbers[2])
