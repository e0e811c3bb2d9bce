"""Writes tables of scikit-learn as CSV text, for a project without data. Each function imports scikit-learn when it is
called, which takes a second."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any


def wine() -> str:
    """178 wines: 13 measurements, and one of three kinds in the column `kind`."""
    from sklearn.datasets import load_wine

    found: Any = load_wine()
    rows = zip(found.data.tolist(), found.target, strict=True)
    return _csv([*found.feature_names, "kind"], ([*row, str(found.target_names[kind])] for row, kind in rows))


def diabetes() -> str:
    """442 patients: 10 measurements, and the progression of the disease after a year in the column `progression`."""
    from sklearn.datasets import load_diabetes

    found: Any = load_diabetes(scaled=False)
    rows = zip(found.data.tolist(), found.target.tolist(), strict=True)
    return _csv([*found.feature_names, "progression"], ([*row, value] for row, value in rows))


def _csv(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()
