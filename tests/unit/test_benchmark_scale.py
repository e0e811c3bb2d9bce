"""benchmarks/scale.py measures what it says, and judges by slopes."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "peers")]

import scale  # noqa: E402
import scale_rows  # noqa: E402

SIZES = (10, 100, 1000, 3000, 10_000)


def measured(cost, **row):
    row = scale_rows.Row("r", "R", "s", "", SIZES, SIZES, lambda size, place: {"one": cost(size)}, **row)
    return scale.Measured(row, "one", {size: cost(size) for size in SIZES})


@pytest.mark.parametrize(
    ("cost", "growth", "kept"),
    [
        (lambda n: 3 + n / 1000, 1.0, True),
        (lambda n: 3 + (n / 1000) ** 2, 2.0, False),
        (lambda n: 3.0, 0.0, True),
        (lambda n: n / 10, 1.0, True),
    ],
    ids=["linear behind a start", "quadratic behind a start", "flat", "linear"],
)
def test_a_long_start_hides_no_growth(cost, growth, kept):
    found = measured(cost)
    assert found.growth == pytest.approx(growth, abs=0.02)
    assert found.kept is kept


def test_what_fails_is_in_the_table_and_not_kept(tmp_path):
    """The sizes behind it are left out."""

    def fails(size, place):
        if size > 3000:
            raise RuntimeError("no room")
        return {"one": 1.0}

    row = scale_rows.Row("r", "R", "s", "", SIZES, SIZES, fails)
    (found,) = scale.measure(row, tmp_path, False, lambda text: None)
    assert found.cells(SIZES) == ["one", "1", "1", "1", "1", "no room", "0.00", "flat", "1.05", "NOT kept"]


def test_a_row_measures_the_command(tmp_path):
    """A config of three files is checked and explained in fresh processes."""
    found = scale_rows.files(3, scale_rows.Place(tmp_path))
    assert found.keys() == {"`check`", "`explain`"}
    assert min(found.values()) > 0
