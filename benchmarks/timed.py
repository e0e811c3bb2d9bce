"""Time trainings of different programs in new processes in the same way, and make the pictures that they train on.

`run` starts a command with `peers/sitecustomize.py` on its path, which times the optimizer steps.
"""

import contextlib
import gzip
import hashlib
import json
import os
import signal
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PEERS = Path(__file__).resolve().parent / "peers"
ROOT = PEERS.parents[1]
LIMIT_SECONDS = 300  # of one command
PICTURES = 10_000  # of which a tenth validates


# ---- a command


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of one process.

    Attributes:
        cpu, clock: its CPU seconds, and the machine's clock, at the end of each step.
        children: CPU seconds of the processes that it had waited for by the first.
        memory: the most that it held, MiB.
    """

    cpu: Sequence[float]
    clock: Sequence[float]
    children: float
    memory: float


@dataclass(frozen=True)
class Took:
    """What a training took.

    Attributes:
        cpu: CPU seconds, user and system, of the whole process tree.
        wall: seconds.
        begun: the machine's clock at its start.
        output: what it said.
        folder: its working directory.
        processes: those that made steps, the one with the lowest process number first.
        weights: the digest of those that it ended with; "": it left none, or nobody has looked.
    """

    cpu: float
    wall: float
    begun: float
    output: str
    folder: Path
    processes: Sequence[Steps]
    weights: str = ""

    @property
    def start(self) -> float:
        """CPU seconds until the first optimizer step has ended."""
        return self.processes[0].children + self.processes[0].cpu[0]

    @property
    def start_wall(self) -> float:
        """Seconds until the first optimizer step has ended."""
        return self.processes[0].clock[0] - self.begun

    @property
    def memory(self) -> float:
        """MiB that the largest process held at most."""
        return max(each.memory for each in self.processes)

    def per_step(self, steps: int, clock: bool = False) -> float:
        """Return the CPU seconds of one step, of all processes together, without the time between epochs.

        The first epoch is left out if there are several; of the others it is the median.

        Args:
            steps: of an epoch.
            clock: return seconds of the first process by the machine's clock instead.
        """
        return sum(
            _per_step(each.clock if clock else each.cpu, steps) for each in self.processes[: 1 if clock else None]
        )


def _per_step(times: Sequence[float], steps: int) -> float:
    epochs = [times[first : first + steps] for first in range(0, len(times), steps)]
    whole = [epoch for epoch in epochs[1:] or epochs if len(epoch) > 1]
    return statistics.median((epoch[-1] - epoch[0]) / (len(epoch) - 1) for epoch in whole)


def run(command: Sequence[str], folder: Path, limit: float = LIMIT_SECONDS, **variables: str) -> Took:
    """Run a command in a new process and a new folder, with compiled bytecode and one thread.

    Args:
        limit: seconds, after which it is killed.

    Raises:
        RuntimeError: it fails, or takes too long.
    """
    folder.mkdir(parents=True)
    env = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE" and not n.startswith("MLFLOW_")}
    path = os.pathsep.join([str(PEERS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MLFLOW_DISABLE_TELEMETRY": "true"}
    env |= {"TIMED_STEPS": str(folder / "steps"), "GIT_PYTHON_REFRESH": "quiet", **variables}
    with tempfile.TemporaryFile() as said:
        begun = time.monotonic()
        child = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        too_long = threading.Timer(limit, end)
        too_long.start()
        try:
            _, status, used = os.wait4(child.pid, 0)
        except BaseException:
            end()
            raise
        finally:
            too_long.cancel()
        wall = time.monotonic() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read().decode(errors="replace")
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}:\n{output[-3000:]}")
    files = sorted(folder.glob("steps.*"), key=lambda path: int(path.suffix[1:]))
    processes = [_steps(json.loads(path.read_text())) for path in files]
    return Took(used.ru_utime + used.ru_stime, wall, begun, output, folder, processes)


def _steps(noted: dict[str, Any]) -> Steps:
    return Steps(noted["cpu"], noted["clock"], noted["children"], noted["memory"] / 1024)


# ---- several, in turn


def in_turn(
    programs: Mapping[str, Callable[[int], Took]], rounds: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, list[Took]]:
    """Run each program once a round; each round begins with another.

    Args:
        programs: called with the number of the round.
        say: is told what is done.
    """
    taken: dict[str, list[Took]] = {name: [] for name in programs}
    names = list(programs)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            took = programs[name](number)
            taken[name].append(took)
            say(f"round {number + 1}: {name}: {took.cpu:.1f} CPU s, {took.wall:.1f} s")
    return taken


def ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of one figure divided by another of the same round."""
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


# ---- what came out


def digest(checkpoint: Path) -> str:
    """Return the first twelve digits of the SHA-256 of the network's weights in a checkpoint.

    Memory layout, and the name that the program gives the network, do not matter.
    """
    import torch

    total = hashlib.sha256()
    for name, tensor in torch.load(checkpoint, weights_only=True)["state_dict"].items():
        total.update(name.removeprefix("network.").encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()[:12]


# ---- pictures


def make_mnist(folder: Path, source: Path | None = None) -> None:
    """Write the four IDX files in `MNIST/raw`: 10,000 pictures for training, and 100 for the test, which nothing uses.

    Args:
        source: a folder that holds IDX files of MNIST, packed or not: the pictures are those of its training files, or
            else of its test files. None: scikit-learn's digits, three times as large, moved at random.

    Raises:
        FileNotFoundError: there are none in `source`.
        ValueError: there are too few.
    """
    images, labels = _digits() if source is None else _idx_files(source)
    if len(labels) < PICTURES:
        raise ValueError(f"{source}: {len(labels):,} pictures are too few; the bounds are for {PICTURES:,}")
    images, labels = images[:PICTURES], labels[:PICTURES]
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", len(labels)), ("t10k", 100)):
        for kind, array in (("images-idx3", images[:count]), ("labels-idx1", labels[:count])):
            header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (raw / f"{name}-{kind}-ubyte").write_bytes(header + array.tobytes())


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pictures, uint8 (10000, 28, 28), and labels, (10000,), the same each time."""
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.RandomState(6)
    chosen = rng.randint(len(digits.target), size=PICTURES)
    large = np.kron(digits.images[chosen] * (255 / 16), np.ones((1, 3, 3))).astype(np.uint8)
    images = np.zeros((PICTURES, 28, 28), np.uint8)
    for image, digit, (down, right) in zip(images, large, rng.randint(5, size=(PICTURES, 2)), strict=True):
        image[down : down + 24, right : right + 24] = digit
    return images, digits.target[chosen].astype(np.uint8)


def _idx_files(source: Path) -> tuple[np.ndarray, np.ndarray]:
    for name in ("train", "t10k"):
        found = [sorted(source.rglob(f"{name}-{kind}-ubyte*")) for kind in ("images-idx3", "labels-idx1")]
        if all(found):
            images, labels = (_idx(paths[0]) for paths in found)
            return images, labels
    raise FileNotFoundError(f"{source}: holds no train-images-idx3-ubyte, nor t10k-images-idx3-ubyte, with labels")


def _idx(path: Path) -> np.ndarray:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def make_pictures(folder: Path, count: int, size: int, channels: int, classes: int) -> None:
    """Write `pictures.npz`: random pixels, and as many labels of each class."""
    rng = np.random.RandomState(6)
    shape = (count, size, size) if channels == 1 else (count, size, size, channels)
    folder.mkdir(parents=True)
    images = rng.randint(256, size=shape).astype(np.uint8)
    np.savez(folder / "pictures.npz", images=images, labels=np.arange(count) % classes)
