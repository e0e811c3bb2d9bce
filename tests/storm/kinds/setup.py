"""The set-up of the environment is killed at a random moment, up to three times; the next one makes it whole."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from commands import environment

from storm.place import Place, Skipped, expect

WHAT = "kill -9 of env.sh while it makes the environment"
HOUR = 10
LIMIT = 1800
ROOT = Path(__file__).resolve().parents[3]


def case(draw: random.Random, place: Place) -> str:
    """One clone, and its environment."""
    whole = place.once("seconds", lambda folder: _whole(place, folder))
    longest = float((whole / "seconds").read_text())
    clone = _clone(place.folder)
    told = []
    for _ in range(draw.randint(1, 3)):
        delay = draw.uniform(0, longest)
        with (place.folder / "said").open("a") as said:
            running = subprocess.Popen(
                ["bash", "env.sh"], cwd=clone, env=environment(), stdout=said, stderr=said, start_new_session=True
            )
            try:
                running.wait(delay)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
            told.append(f"{running.wait()} after {delay:.0f} s")
    what = ", ".join(told)
    done = _set_up(clone)
    expect(done.returncode == 0, f"{what}: started again, the set-up ends with {done.returncode}", done.stdout[-2000:])
    _works(clone, what)
    return what


def _clone(folder: Path) -> Path:
    clone = folder / "a clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    return clone


def _set_up(clone: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "env.sh"],
        cwd=clone,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def _works(clone: Path, what: str) -> None:
    """A command of the clone starts, and what trains can be imported."""
    code = "import deepspeed, flask, mlflow, omegaconf, pytorch_lightning, torchvision, yaml, deeplightning.cli"
    done = subprocess.run(
        [clone / ".venv" / "bin" / "python", "-c", code], cwd=clone, env=environment(), capture_output=True, text=True
    )
    expect(done.returncode == 0, f"{what}: the environment lacks something", done.stderr[-2000:])


def _whole(place: Place, folder: Path) -> None:
    """How long a set-up takes that nothing disturbs; there may be no packages to be had."""
    clone = _clone(folder)
    begun = time.monotonic()
    done = _set_up(clone)
    if done.returncode != 0:
        raise Skipped(f"the environment cannot be made here: {done.stdout.strip().splitlines()[-1]}")
    _works(clone, "undisturbed")
    (folder / "seconds").write_text(str(time.monotonic() - begun))
    shutil.rmtree(clone)
