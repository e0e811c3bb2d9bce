"""Our network for tables beside scikit-learn's `HistGradientBoosting`, on scikit-learn's own tables.

    .venv/bin/python benchmarks/tables.py

trains each config of `examples/tables` once per seed, as shipped, by `deeplightning train … --multirun`. A seed draws
another split: 80 % of the rows train, 10 % validate, 10 % test. `HistGradientBoosting` has its default parameters. It
learns from the same training rows and from the validation rows as well, since it does not use these otherwise, and is
tested on the same test rows. Prints Markdown, and ends with 1 when fewer than two of the three tables come within one
point.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import accuracy_score, mean_absolute_error, r2_score

from deeplightning import init_module, load_config

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tables"
TABLES = ("wine", "breast_cancer", "diabetes")
POINT = 0.01
LONGEST = 3600  # seconds of all runs of one table


def ours(name: str, data: Path, seeds: int) -> list[dict[str, float]]:
    """Trains the shipped config once per seed, and reads what each run measured on its test set."""
    command = [sys.executable, "-m", "deeplightning", "train", str(EXAMPLE / f"{name}.yaml")]
    command += [f"data.root={data}", f"logger.params.tracking_uri={data / 'mlruns'}", "train.export=false"]
    command += ["logger.pictures=null", f"seed=range({seeds})", "--multirun"]
    done = subprocess.run(command, cwd=data, check=True, capture_output=True, text=True, timeout=LONGEST)
    table = Path(done.stdout.splitlines()[-1].removeprefix("Artifact storage path: ")) / "runs.csv"
    with table.open(newline="") as file:
        folders = [Path(row["folder"]) for row in csv.DictReader(file)]
    found = []
    for folder in folders:
        results = json.loads((folder / "test_results.json").read_text())
        if "test_acc" in results:
            found.append({"accuracy": results["test_acc"]})
        else:
            with (folder / "test_predictions.csv").open(newline="") as file:
                rows = [(float(row["target"]), float(row["prediction"])) for row in csv.DictReader(file)]
            found.append(of_numbers(*np.array(rows).T))
    return found


def theirs(name: str, data: Path, seed: int) -> dict[str, float]:
    """Trains `HistGradientBoosting` on the rows that the config's data module draws with a seed."""
    cfg = load_config(EXAMPLE / f"{name}.yaml", [f"data.root={data}", f"seed={seed}"])
    module: Any = init_module(cfg, "data")
    module.setup(None)
    sets = {split: module.dataset(split) for split in ("train", "val", "test")}
    inputs = {split: found.inputs.numpy() for split, found in sets.items()}  # trees do not mind that they are scaled
    column = "label" if module.class_names else "target"
    truth = {split: found.others[column].numpy() for split, found in sets.items()}
    model: Any = HistGradientBoostingClassifier if module.class_names else HistGradientBoostingRegressor
    model = model(random_state=seed)
    model.fit(*(np.concatenate([part["train"], part["val"]]) for part in (inputs, truth)))
    answers = model.predict(inputs["test"])
    if module.class_names:
        return {"accuracy": float(accuracy_score(truth["test"], answers))}
    return of_numbers(truth["test"], answers)


def of_numbers(truth: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """R2 and the mean absolute error of predictions (N,)."""
    return {"R2": float(r2_score(truth, answers)), "mean absolute error": float(mean_absolute_error(truth, answers))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("tables", nargs="*", default=TABLES, help=f"of {', '.join(TABLES)}; all by default")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(TABLES):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(TABLES)}")
    close = 0
    print(
        "| table | metric | Deep Lightning | HistGradientBoosting | difference | within a point |\n" + "|---" * 6 + "|"
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        subprocess.run([sys.executable, str(EXAMPLE / "write.py"), folder], check=True, timeout=60)
        for name in arguments.tables:
            pairs = (ours(name, data, arguments.seeds), [theirs(name, data, seed) for seed in range(arguments.seeds)])
            for metric in pairs[0][0]:
                own, other = ([found[metric] for found in side] for side in pairs)
                difference = statistics.mean(own) - statistics.mean(other)
                is_close = difference >= -POINT
                close += is_close and metric in ("accuracy", "R2")
                word = {True: "yes", False: "no"}[is_close] if metric in ("accuracy", "R2") else ""
                print(
                    f"| {name} | {metric} | {spread(own)} | {spread(other)} | {difference:+.4f} | {word} |", flush=True
                )
    print(f"\nMean and standard deviation over {arguments.seeds} seeds, each with its own split.")
    return int(close < min(2, len(arguments.tables)))


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.4f} ± {statistics.pstdev(values):.4f}"


if __name__ == "__main__":
    sys.exit(main())
