"""Write the tables of scikit-learn that the configs in this folder use, as CSV files with a header:

python examples/tables/write.py [FOLDER]
"""

import csv
import sys
from pathlib import Path

from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine


def main(folder: Path) -> None:
    """Write `wine.csv`, `breast_cancer.csv` and `diabetes.csv` to a folder, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, target, found in (
        ("wine", "kind", load_wine()),  # 178 wines: 13 measurements, one of three kinds
        ("breast_cancer", "diagnosis", load_breast_cancer()),  # 569 samples: 30 measurements, malignant or benign
        ("diabetes", "progression", load_diabetes(scaled=False)),  # 442 patients: 10 measurements, a number
    ):
        values = found.target if name == "diabetes" else found.target_names[found.target]
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*found.feature_names, target])
            writer.writerows([*row, value] for row, value in zip(found.data.tolist(), values.tolist(), strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tables"))
