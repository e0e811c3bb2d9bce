"""Measure the CPU seconds of a trial of a search beside the same training in a new process.

    .venv/bin/python benchmarks/search.py

trains the shipped digits for one epoch in fresh processes, and searches with few and with many trials: the difference
is what a trial costs, the search's own share in it. Rounds take turns; a ratio is of medians. Prints Markdown, and ends
with 1 when a trial takes more than a quarter.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BOUND = 0.25
FEW, MANY = 2, 7
CONFIG = Path(__file__).parents[1] / "configs" / "base.yaml"
SMALL = ["train.num_epochs=1", "train.export=false", "stages=[train]", "logger.pictures=null"]
SEARCH = (
    "tune={metric: val_acc, mode: max, num_trials: COUNT, name: NAME, space: {model.scheduler.params.max_lr: "
    "{log_uniform: [1e-4, 1]}, data.batch_size: {choice: [16, 32, 64, 128]}}}"
)


def cpu_of(folder: Path, *words: str) -> float:
    """Return the CPU seconds of a command and of all processes that it started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "deeplightning", words[0], str(CONFIG), *SMALL, *words[1:]]
    store = f"logger.params.tracking_uri={folder}/runs"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, store], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    fresh, trial = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cpu_of(folder, "train")  # makes the store
        for number in range(rounds):
            fresh.append(cpu_of(folder, "train"))
            few, many = (
                cpu_of(folder, "tune", SEARCH.replace("COUNT", str(count)).replace("NAME", f"s{number}-{count}"))
                for count in (FEW, MANY)
            )
            trial.append((many - few) / (MANY - FEW))
    ratio = statistics.median(trial) / statistics.median(fresh)
    print("| one epoch of the digits | CPU seconds |\n|---|---|")
    print(f"| `deeplightning train`, a fresh process | {statistics.median(fresh):.2f} |")
    print(f"| a trial of `deeplightning tune`, forked | {statistics.median(trial):.2f} |")
    print(f"\nA trial takes {ratio:.2f} of a fresh process (at most {BOUND}); {rounds} rounds.")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
