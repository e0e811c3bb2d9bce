"""The set-up of the environment is killed at a random moment, up to three times; the next one completes it."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from commands import environment

from storm.place import Place, Skipped, expect

WHAT = "kill -9 of env.sh while it makes the environment"
HOUR = 10
LIMIT = 1800
ROOT = Path(__file__).resolve().parents[3]


def case(draw: random.Random, place: Place) -> str:
    """Kill the set-up of one clone, then complete it."""
    longest = float((place.once("seconds", _measure) / "seconds").read_text())
    clone = _clone(place.folder)
    ends = []
    for _ in range(draw.randint(1, 3)):
        delay = draw.uniform(0, longest)
        with (place.folder / "log").open("a") as log:
            running = subprocess.Popen(
                ["bash", "env.sh"], cwd=clone, env=environment(), stdout=log, stderr=log, start_new_session=True
            )
            try:
                running.wait(delay)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
            ends.append(f"{running.wait()} after {delay:.0f} s")
    what = ", ".join(ends)
    done = _set_up(clone)
    expect(done.returncode == 0, f"{what}: started again, the set-up ends with {done.returncode}", done.stdout[-2000:])
    _works(clone, what)
    return what


def _clone(folder: Path) -> Path:
    clone = folder / "a clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    return clone


def _set_up(clone: Path) -> subprocess.CompletedProcess[str]:
    merged: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(["bash", "env.sh"], cwd=clone, env=environment(), **merged)


def _works(clone: Path, what: str) -> None:
    """Import the packages that training needs, and the commands of the clone."""
    code = "import deepspeed, flask, mlflow, omegaconf, pytorch_lightning, torchvision, yaml, deeplightning.cli"
    done = subprocess.run(
        [clone / ".venv" / "bin" / "python", "-c", code], cwd=clone, env=environment(), capture_output=True, text=True
    )
    expect(done.returncode == 0, f"{what}: a package is missing", done.stderr[-2000:])


def _measure(folder: Path) -> None:
    """Measure an undisturbed set-up; skip the kind if it fails, for example without a package index."""
    clone = _clone(folder)
    begun = time.monotonic()
    done = _set_up(clone)
    if done.returncode != 0:
        raise Skipped(f"env.sh fails on this machine: {done.stdout.strip().splitlines()[-1]}")
    _works(clone, "undisturbed")
    (folder / "seconds").write_text(str(time.monotonic() - begun))
    shutil.rmtree(clone)
