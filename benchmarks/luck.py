"""Measure how often `deeplightning compare` is right: coverage of its intervals, and its verdicts on two pairs of
settings.

    .venv/bin/python benchmarks/luck.py                # the simulation: 15 CPU seconds
    .venv/bin/python benchmarks/luck.py --digits 16    # and the digits, with so many seeds: 3 CPU minutes

The simulation draws 1,000 experiments of each kind, whose truth is known, with fixed seeds. It ends with 1 unless 93 to
97 of 100 intervals contain the truth. The digits are trained with 16 seeds for each setting, from which the true
differences are estimated, and each five seeds among them are compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from deeplightning_lab import evidence
from deeplightning_lab.evidence import Interval

DRAWS = 1_000
RESAMPLES = 1_999
LEAST, MOST = 0.93, 0.97

Draw = Callable[[np.random.Generator, int], Interval]


@dataclass(frozen=True)
class Case:
    """A kind of experiment.

    Attributes:
        name: in words.
        truth: the difference that the interval should contain.
        draw: an experiment, and the interval that `compare` gives.
    """

    name: str
    truth: float
    draw: Draw


def _paired(rng: np.random.Generator, seed: int) -> Interval:
    """Draw five seeds; the seed shifts both settings alike, as a split of the data does."""
    of_seed = rng.normal(0.95, 0.02, 5)
    one, two = of_seed + rng.normal(0, 0.01, 5), of_seed + rng.normal(0.01, 0.012, 5)
    return evidence.paired_interval(two - one, RESAMPLES, seed)


def _skewed_pairs(rng: np.random.Generator, seed: int) -> Interval:
    """Draw five pairs of accuracies near 1, which have a long tail on one side."""
    return evidence.paired_interval(rng.beta(60, 2, 5) - rng.beta(40, 2, 5), RESAMPLES, seed)


def _unpaired(rng: np.random.Generator, seed: int) -> Interval:
    """Draw five seeds and ten others, with another spread."""
    return evidence.unpaired_interval(rng.normal(0.9, 0.01, 5), rng.normal(0.92, 0.03, 10), RESAMPLES, seed)


def _skewed(rng: np.random.Generator, seed: int) -> Interval:
    """Draw five seeds and five others, accuracies near 1."""
    return evidence.unpaired_interval(rng.beta(40, 2, 5), rng.beta(60, 2, 5), RESAMPLES, seed)


def _samples(rng: np.random.Generator, seed: int) -> Interval:
    """Draw 360 test samples that two networks answer: 5 % only B answers correctly, 3 % only A."""
    return evidence.sample_interval(rng.choice([-1.0, 0.0, 1.0], 360, p=[0.03, 0.92, 0.05]), RESAMPLES, seed)


def _errors(rng: np.random.Generator, seed: int) -> Interval:
    """Draw 200 test samples with squared errors, as of a regression."""
    return evidence.sample_interval(rng.gamma(2, 0.5, 200) - rng.gamma(2, 0.4, 200), RESAMPLES, seed)


CASES = [
    Case("5 pairs of runs, normal", 0.01, _paired),
    Case("5 pairs of runs, accuracies near 1", 60 / 62 - 40 / 42, _skewed_pairs),
    Case("5 and 10 runs, unequal spreads", 0.02, _unpaired),
    Case("5 and 5 runs, accuracies near 1", 60 / 62 - 40 / 42, _skewed),
    Case("360 test samples, right or wrong", 0.02, _samples),
    Case("200 test samples, squared errors", 0.2, _errors),
]


def coverage(case: Case, draws: int = DRAWS, seed: int = 0) -> float:
    """Return the share of experiments whose interval contains the truth."""
    rng = np.random.default_rng([seed, CASES.index(case)])
    intervals = (case.draw(rng, number) for number in range(draws))
    return sum(found.low <= case.truth <= found.high for found in intervals) / draws


# ---- the digits

CONFIG = """\
seed: 0
data: {module: {type: deeplightning.data.digits.Digits}, batch_size: 32}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.cnn.SimpleCNN, params: {num_classes: 10, num_channels: 1, image_size: 8}}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: 6, export: false}
stages: [train, test]
logger: {params: {tracking_uri: mlruns, system_metrics: false}, pictures: null}
"""
SETTINGS = {"base": [], "short": ["train.num_epochs=2"], "slower": ["model.optimizer.params.lr=0.045"]}
FIVE = 5


def groups(folder: Path, seeds: int) -> dict[str, Path]:
    """Train each setting with so many seeds; return the folders of the groups."""
    (folder / "digits.yaml").write_text(CONFIG)
    found = {}
    for name, words in SETTINGS.items():
        command = [sys.executable, "-m", "deeplightning", "train", "digits.yaml", "--seeds", str(seeds), *words]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        found[name] = Path(ended.stdout.splitlines()[-1].removeprefix("Artifact storage path: "))
    return found


def judged(a: Path, b: Path) -> tuple[float, list[tuple[str, str]]]:
    """Return the difference in `test_acc` over all seeds, and for each five consecutive seeds the state and the
    sentences."""
    from deeplightning_lab.groups import group_of, runs_in
    from deeplightning_lab.significance import compare

    sides = []
    for folder in (a, b):
        inside = runs_in(folder)
        assert inside is not None
        sides.append(inside[0])
    whole = compare(group_of("A", sides[0]), group_of("B", sides[1]), "test_acc")
    difference = next(row.difference for row in whole.rows if row.metric == "test_acc")
    found = []
    for first in range(len(sides[0]) - FIVE + 1):
        parts = [group_of(name, side[first : first + FIVE]) for name, side in zip("AB", sides, strict=True)]
        few = compare(*parts, "test_acc")
        state = next(row.state for row in few.rows if row.metric == "test_acc")
        found.append((state, " ".join(few.sentences)))
    return difference, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--digits", type=int, metavar="SEEDS", help="train the digits with so many seeds, 5 at least")
    arguments = parser.parse_args()
    print("| experiment | intervals with the truth, of 100 |\n| --- | ---: |")
    kept = True
    for case in CASES:
        share = coverage(case, arguments.draws)
        kept &= LEAST <= share <= MOST
        print(f"| {case.name} | {100 * share:.1f} |", flush=True)
    if arguments.digits:
        with tempfile.TemporaryDirectory() as folder:
            made = groups(Path(folder), arguments.digits)
            for name in ("short", "slower"):
                difference, found = judged(made[name], made["base"])
                counts = Counter(state for state, _ in found)
                print(f"\nbase less {name}, over {arguments.digits} seeds: {100 * difference:+.2f} points")
                print(f"five seeds: {json.dumps(counts)}; the first five:\n{found[0][1]}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
