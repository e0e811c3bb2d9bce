"""Measure the alternatives of a user in the same run: LightningCLI and Hydra on a config equivalent to base.yaml.

They live in `benchmarks/.venv`, with the torch and Lightning that our environment has. Where it cannot
be made that is said, and our own side is measured alone.
"""

import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
ROOT = PEERS.parents[1]
LIMIT_SECONDS = 300  # of one command


@dataclass(frozen=True)
class Ended:
    """How a command ended, the CPU seconds (user and system) of it and the processes it waited for, and the most memory
    of one of these, MiB."""

    code: int
    output: str
    seconds: float
    memory: float


def run(command: list[str], cwd: Path, limit: float = LIMIT_SECONDS, **variables: str) -> Ended:
    """Run a command in a new process, with compiled bytecode and one thread.

    Args:
        limit: seconds, after which it is killed.
        variables: further ones of its environment.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "0"} | variables
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        end = time.monotonic() + limit
        while True:
            pid, status, used = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > end:
                child.kill()
            time.sleep(0.002)
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read().decode(errors="replace")
    return Ended(child.returncode, output, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


# ---- the peers' environment


class NotMade(Exception):
    """Raised if the environment could not be created; the text says why."""


def environment(of: str = "requirements.txt", folder: str = ".venv", say: bool = True) -> str:
    """Return the Python of the peers' environment, which is created if it is missing.

    Args:
        of: what it holds, a file in `benchmarks/peers`.
        folder: where it is, in `benchmarks`.

    Raises:
        NotMade: when it cannot be.
    """
    place, requirements, lock = PEERS.parent / folder, PEERS / of, ROOT / "requirements.lock"
    python, made_from = place / "bin" / "python", place / "made-from"
    wanted = hashlib.sha256(requirements.read_bytes() + lock.read_bytes()).hexdigest()
    if made_from.is_file() and made_from.read_text() == wanted:
        return str(python)
    if say:
        print(f"Making the environment of {of} in {place}", file=sys.stderr, flush=True)
    uv = str(Path(sys.executable).with_name("uv"))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as versions:
        versions.write("\n".join(_locked(lock.read_text(), requirements.read_text())))
        versions.flush()
        _quietly([uv, "venv", "--clear", "--python", sys.executable, str(place)])
        install = [uv, "pip", "install", "--compile-bytecode", "--python", str(python)]
        _quietly([*install, "-r", str(requirements), "-c", versions.name])
    made_from.write_text(wanted)
    return str(python)


def _locked(lock: str, requirements: str) -> list[str]:
    """Return the lock's lines, without hashes, of packages that the requirements do not name."""
    named = {name.lower() for name in re.findall(r"^([\w-]+)", requirements, re.MULTILINE)}
    lines = [line.removesuffix("\\").strip() for line in lock.splitlines() if re.match(r"\w", line)]
    return [line for line in lines if re.split(r"[=\[ ]", line)[0].lower() not in named]


def _quietly(command: list[str]) -> None:
    env = dict(os.environ)
    if "PIP_INDEX_URL" in env:  # what pip is told about the index holds for uv too, which does not read it
        env.setdefault("UV_DEFAULT_INDEX", env["PIP_INDEX_URL"])
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMade(f"{Path(command[0]).name}: {error}") from error
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-200:])
        raise NotMade(re.sub(r"\w+://\S+", "…", reason.strip()))


# ---- commands

OURS = [sys.executable, "-m", "deeplightning"]


def lightning_cli(python: str, config: Path, *more: str) -> list[str]:
    return [python, str(PEERS / "lightning_cli.py"), "fit", "--config", str(config), *more]


def hydra(python: str, program: str, config: Path, *more: str) -> list[str]:
    where = ["--config-path", str(config.parent), "--config-name", config.stem]
    return [python, str(PEERS / program), *where, *more]


# ---- what each says of the same faults

# A name, what stands in base.yaml, LightningCLI's and Hydra's config, what it is replaced by, and the word that one who
# tells of the fault must say.
FAULTS = {
    "an unknown key": ("batch_size: 32", "batchsize: 32", "batchsize"),
    "text for a number": ("lr: 0.003", "lr: quick", "quick"),
    "a class that there is not": ("torch.nn.CrossEntropyLoss", "torch.nn.CrosEntropyLoss", "CrosEntropyLoss"),
    "a misspelt param": ("num_classes: 10", "num_clases: 10", "num_clases"),
}


@dataclass(frozen=True)
class Word:
    """What one program said of one config: of how many faults how many, its exit code, lines of text, and whether it
    names a line of the config."""

    planted: int
    told: int
    code: int
    lines: int
    place: bool


def compare_faults(python: str | None) -> dict[str, dict[str, Word]]:
    """Return what each program reports, by name of the fault ("all four at once" at the end) and by program."""
    found: dict[str, dict[str, Word]] = {}
    cases = [({name}, name) for name in FAULTS] + [(set(FAULTS), "all four at once")]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for planted, name in cases:
            commands = {
                "deeplightning check": [*OURS, "check", str(_planted(ROOT / "configs/base.yaml", planted, place))]
            }
            if python is not None:
                cli = _planted(PEERS / "lightning_cli.yaml", planted, place)
                job = _planted(PEERS / "hydra.yaml", planted, place)
                commands |= {
                    "LightningCLI --print_config": lightning_cli(python, cli, "--print_config"),
                    "LightningCLI fit": lightning_cli(python, cli, "--trainer.max_epochs=0"),
                    "Hydra --cfg job": hydra(python, "hydra_run.py", job, "--cfg", "job"),
                    "Hydra run": hydra(python, "hydra_run.py", job, "trainer.max_epochs=0"),
                }
            words = [FAULTS[fault][2] for fault in planted]
            found[name] = {program: _word(run(command, place), words) for program, command in commands.items()}
    return found


def _planted(config: Path, faults: set[str], place: Path) -> Path:
    """Return a copy of a config with these faults."""
    text = config.read_text()
    for fault in faults:
        right, wrong, _ = FAULTS[fault]
        assert text.count(right) == 1, f"{config.name}: {right}"
        text = text.replace(right, wrong)
    copy = place / config.name
    copy.write_text(text)
    return copy


def _word(ended: Ended, words: list[str]) -> Word:
    """Return what a program reported for planted faults.

    A fault counts as reported if the command fails and the fault's word occurs in the message. That is generous: it may
    occur by chance, in a copy of the config. LightningCLI's list of all options before the message does not count.
    """
    message = re.sub(r"\Ausage: .*?^(?=error: )", "", ended.output, flags=re.DOTALL | re.MULTILINE).strip()
    told = sum(word in message for word in words) if ended.code else 0
    place = bool(ended.code and re.search(r"\.yaml(:\d+|\", line \d+)", message))
    return Word(len(words), told, ended.code, len(message.splitlines()), place)


# ---- CPU seconds


def measure(commands: Mapping[str, list[str]], repetitions: int, cwd: Path) -> dict[str, list[float]]:
    """Return the CPU seconds of each command in new processes: one round that is not counted, then so many rounds in
    turn.

    Raises:
        RuntimeError: a command fails.
    """
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(repetitions + 1):
        for name, command in commands.items():
            ended = run(command, cwd)
            if ended.code:
                raise RuntimeError(f"{name} ended with {ended.code}:\n{ended.output}")
            if number:
                seconds[name].append(ended.seconds)
    return seconds


def largest_config(configs: list[str], cwd: Path) -> tuple[str, dict[str, float]]:
    """Return the config whose check takes the most CPU seconds, and the median of three of each."""
    checks = {name: [*OURS, "check", str(ROOT / name)] for name in configs}
    medians = {name: statistics.median(taken) for name, taken in measure(checks, 3, cwd).items()}
    return max(medians, key=medians.__getitem__), medians


# ---- what is promised


@dataclass(frozen=True)
class Bound:
    """A figure (None: it could not be had) is at most, or at least, a limit."""

    what: str
    figure: float | None
    limit: float
    at_least: bool = False

    @property
    def kept(self) -> bool:
        if self.figure is None:
            return False
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def row(self) -> list[str]:
        figure = "not measured" if self.figure is None else f"{self.figure:.3f}"
        bound = f"{'≥' if self.at_least else '≤'} {self.limit:g}"
        return [self.what, bound, figure, "kept" if self.kept else "NOT kept"]


def table(head: list[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the bounds as Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
