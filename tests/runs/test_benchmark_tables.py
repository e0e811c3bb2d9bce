"""benchmarks/tables.py compares with scikit-learn's models on the same rows, and judges by a standard error."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import tables


def compared(monkeypatch, capsys, own):
    """The exit code and what is printed for breast_cancer, where a forest is right in 0.90 and 0.94 of the rows."""
    monkeypatch.setattr(sys, "argv", ["tables.py", "--seeds", "2", "breast_cancer"])
    scores = [{"linear": 0.80, "forest": 0.90, "boosting": 1.0}, {"linear": 0.80, "forest": 0.94, "boosting": 1.0}]
    monkeypatch.setattr(tables, "write_table", lambda name, data: True)
    monkeypatch.setattr(tables, "subprocess", SimpleNamespace(run=lambda *words, **options: None))
    monkeypatch.setattr(tables, "theirs", lambda project, seed: scores[seed])
    monkeypatch.setattr(tables, "ours", lambda project, seeds: own)
    return tables.main(), capsys.readouterr().out


@pytest.mark.parametrize(
    ("own", "code", "row"),
    [
        ([0.89, 0.93], 1, "0.9200 ± 0.0200 | -0.0100 | 0.0000 | worse |"),
        ([0.88, 0.94], 0, "0.9200 ± 0.0200 | -0.0100 | 0.0100 | within |"),
        ([0.93, 0.95], 0, "0.9200 ± 0.0200 | +0.0200 | 0.0100 | within |"),
    ],
)
def test_the_mean_may_be_one_standard_error_below(own, code, row, monkeypatch, capsys):
    """The error is that of the differences by seed; boosting is shown and not judged."""
    found, out = compared(monkeypatch, capsys, own)
    assert found == code
    assert f"| forest | {row}" in out
    assert "| linear | 0.8000 ± 0.0000 |" in out
    assert "| boosting | 1.0000 ± 0.0000 |" in out
    assert out.count("within |") + out.count("worse |") == 2


@pytest.mark.run
def test_the_models_learn_from_the_rows_of_the_project(tmp_path):
    """`init` writes the project; each model tells wines apart."""
    assert tables.write_table("wine", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["breast_cancer.csv", "diabetes.csv", "wine.csv"]
    command = [sys.executable, "-m", "deeplightning", "init", str(tmp_path / "p"), "--kind", "table"]
    command += ["--data", str(tmp_path / "wine.csv"), "--target", "kind"]
    subprocess.run(command, check=True, timeout=60)
    found = tables.theirs(tmp_path / "p", 0)
    assert [*found] == [*tables.RIVALS]
    assert min(found.values()) > 0.8


def test_a_table_whose_package_is_missing_is_left_out(tmp_path, monkeypatch):
    """Nothing is written for it."""
    monkeypatch.setitem(tables.PACKAGED, "fair", ("no_such_package", "fair.csv"))
    assert not tables.write_table("fair", tmp_path)
    assert not [*tmp_path.iterdir()]
