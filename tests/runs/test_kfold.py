"""Cross-validation: the example trains on each fold and says what was reached."""

import re
import subprocess
from pathlib import Path

import pytest
from commands import environment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "kfold" / "kfold.yaml"


def test_folds_are_listed_side_by_side(command, tmp_path):
    """A run of each fold has its number in its name, and `runs` shows the metric that folds are compared by."""
    small = ["train.num_epochs=1", "data.module.params={limit: 100}", "logger.params.experiment_name=folds"]
    for fold in (0, 4):
        command("train", EXAMPLE, f"data.fold={fold}", *small, cwd=tmp_path, code=0)
    outcome = command("runs", "--name", "folds", "--metric", "val_acc", cwd=tmp_path)
    fields = [line.split("  ") for line in outcome.out.splitlines()]
    assert [of[4] for of in fields] == ["fold 4", "fold 0"]
    assert all(re.fullmatch(r"val_acc [01]\.\d{4}", of[5]) for of in fields)


@pytest.mark.slow
def test_the_script_trains_on_all_folds_and_tells_the_mean(tmp_path):
    """A line per fold, and the mean and standard deviation of what they reached."""
    script = ["bash", str(EXAMPLE.with_name("kfold.sh")), "train.num_epochs=1", "data.module.params={limit: 100}"]
    done = subprocess.run(script, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    values = [float(re.fullmatch(rf"fold {4 - n}: val_acc (\d\.\d{{4}})", line)[1]) for n, line in enumerate(lines[:5])]
    mean = sum(values) / 5
    spread = (sum(value**2 for value in values) / 5 - mean**2) ** 0.5
    assert lines[5] == f"mean {mean:.4f}, standard deviation {spread:.4f}"
