"""Compare a training with the alternatives of a user: a script in raw PyTorch, Lightning, LightningCLI.

    .venv/bin/python benchmarks/train.py

trains the same network on the same pictures, in the same order and from the same weights, by the command of each, in
fresh processes on one thread, and prints Markdown: tables of what each takes, and each bound with its figure. Programs
take turns, and a ratio is the median of those in each round. Ends with 1 when a bound is not kept. `--only start loop`
measures parts of it; `--data FOLDER` takes the pictures from IDX files of MNIST, else they are made.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import side_by_side
from side_by_side import Bound, table
from timed import LIMIT_SECONDS, PEERS, Took, digest, in_turn, make_mnist, make_pictures, ratio, run

from deeplightning.config.devices import cpu_computes_bf16

RAW, BY_HAND = "raw PyTorch", "raw PyTorch, batches from memory"
LIGHTNING, CLI = "Lightning, MLFlowLogger", "LightningCLI, MLFlowLogger"
OURS = "deeplightning"
UNTRACKED, FRESH = f"{OURS}, not tracked", f"{OURS}, no store yet"
LAST, BF16 = f"{OURS}, channels_last", f"{OURS}, channels_last, bf16"
LAST_OPTION = "engine.channels_last=true"
SEEDS = 5

CONFIG = """\
seed: SEED
data: {module: {type: MODULE}, root: 'FOLDER', batch_size: BATCH}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: NETWORK}
  optimizer: {type: torch.optim.SGD, params: {lr: 0.05, momentum: 0.9}}
  loss: {type: torch.nn.CrossEntropyLoss}
train: {num_epochs: EPOCHS, export: false}
logger: {params: {tracking_uri: 'STORE'}, log_every_n_steps: 10, pictures: null}
"""
# Data and networks in such a config.
PIXELS = "train_own.Pictures, params: {size: 1, mode: L, classes: 2}"
COLOURS = "train_own.Pictures, params: {size: 32, mode: RGB, classes: 10}"
SMALL32 = "train_network.Small, params: {channels: 3, size: 32}"
RESNET18 = "torchvision.models.resnet18, params: {num_classes: 10}"
OFF = ["~logger", "logger={type: train_own.Nowhere, log_every_n_steps: 10, pictures: null}"]


# ---- what is trained, and by whom


@dataclass(frozen=True)
class Job:
    """A training.

    Attributes:
        data: a folder with MNIST/raw or pictures.npz.
        module: reads it, in a config of ours.
        network: its name in train_network.py; `type` is the one in a config of ours.
        steps: of an epoch.
    """

    data: Path
    module: str
    network: str
    type: str
    steps: int
    batch_size: int = 64
    epochs: int = 3
    seed: int = 0
    max_steps: int = -1
    device: str = "cpu"


@dataclass
class Bench:
    """What the parts share.

    Attributes:
        python: runs the scripts; `cli` says whether LightningCLI is there for it.
        place: a folder for all that is made; `runs` numbers what is run there.
        bounds, raw: what is found: each promise, and the numbers by part.
        warmed: programs whose stores and compiled bytecode are there.
    """

    options: argparse.Namespace
    python: str
    cli: bool
    place: Path
    bounds: list[Bound] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    runs: Iterator[int] = field(default_factory=itertools.count)
    warmed: set[str] = field(default_factory=set)

    @property
    def rounds(self) -> int:
        return self.options.rounds

    def measure(self, part: str, programs: dict[str, Callable[[int], Took]], rounds: int) -> dict[str, list[Took]]:
        """Run each program in turn; report on stderr what each took."""
        ended = {name: lambda number, program=program: finished(program(number)) for name, program in programs.items()}
        taken = in_turn(ended, rounds, lambda text: print(text, file=sys.stderr, flush=True))
        names = ("cpu", "wall", "start", "start_wall", "memory", "weights")
        self.raw[part] = {
            program: [{name: getattr(took, name) for name in names} for took in some] for program, some in taken.items()
        }
        return taken

    @property
    def folder(self) -> Path:
        """For one more run."""
        return self.place / f"run-{next(self.runs)}"

    @functools.cached_property
    def mnist(self) -> Job:
        folder = self.place / "mnist"
        make_mnist(folder, self.options.data)
        return Job(folder, "deeplightning.data.mnist.MNIST", "small", "train_network.Small", -(-9000 // 64))

    def _warm(self, program: Callable[[Job], Took]) -> None:
        """Run a program's first two steps, which are not counted."""
        if program.__name__ not in self.warmed:
            self.warmed.add(program.__name__)
            program(_with(self.mnist, max_steps=2))

    def by_script(self, job: Job, *more: str) -> Took:
        """Train with raw PyTorch."""
        self._warm(self.by_script)
        return run([self.python, str(PEERS / "train_raw.py"), *_words(job), *more], self.folder)

    def by_lightning(self, job: Job, *more: str) -> Took:
        self._warm(self.by_lightning)
        store = ["--store", str(self.place / "lightning.db")]
        return run([self.python, str(PEERS / "train_lightning.py"), *_words(job), *store, *more], self.folder)

    def by_cli(self, job: Job) -> Took:
        self._warm(self.by_cli)
        store = f"sqlite:///{self.place / 'lightning.db'}"
        values = {
            "seed_everything": job.seed,
            "trainer.max_epochs": job.epochs,
            "trainer.max_steps": job.max_steps,
            "trainer.logger.init_args.tracking_uri": store,
            "model.network": job.network,
            "model.seed": job.seed,
            "data.folder": job.data,
            "data.seed": job.seed,
            "data.batch_size": job.batch_size,
        }
        more = [f"--{name}={value}" for name, value in values.items()]
        config = ["fit", "--config", str(PEERS / "train_cli.yaml")]
        return run([self.python, str(PEERS / "train_cli.py"), *config, *more], self.folder)

    def by_us(self, job: Job, *overrides: str, store: Path | None = None) -> Took:
        """Train with `deeplightning train CONFIG override …`, tracked in a store."""
        self._warm(self.by_us)
        folder = self.folder
        config = folder.with_suffix(".yaml")
        config.write_text(config_of(job, store or self.place / "mlruns"))
        stop = [f"train.max_steps={job.max_steps}"] if job.max_steps > 0 else []
        return run([*side_by_side.OURS, "train", str(config), *stop, *overrides], folder)


def config_of(job: Job, store: Path) -> str:
    """Return our config for a training, tracked in a store."""
    words = {"SEED": job.seed, "MODULE": job.module, "FOLDER": job.data, "BATCH": job.batch_size}
    words |= {"NETWORK": job.type, "EPOCHS": job.epochs, "STORE": store}
    return re.sub("|".join(words), lambda word: str(words[word[0]]), CONFIG)


def _words(job: Job) -> list[str]:
    words = ["--data", str(job.data), "--network", job.network, "--seed", str(job.seed), "--device", job.device]
    return [*words, *f"--batch-size {job.batch_size} --epochs {job.epochs} --max-steps {job.max_steps}".split()]


# ---- what is said


def say(title: str, note: str, text: str) -> None:
    print(f"\n## {title}\n\n{note}\n\n{text}", flush=True)


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)


# ---- the parts


def whole(bench: Bench) -> None:
    """Measure three epochs with another seed in each round: cost, equality of weights, accuracy."""
    job = bench.mnist
    programs: dict[str, Callable[[int], Took]] = {
        RAW: lambda n: bench.by_script(_seeded(job, n)),
        BY_HAND: lambda n: bench.by_script(_seeded(job, n), "--in-memory"),
        LIGHTNING: lambda n: bench.by_lightning(_seeded(job, n)),
        OURS: lambda n: bench.by_us(_seeded(job, n)),
        UNTRACKED: lambda n: bench.by_us(_seeded(job, n), *OFF),
    }
    if bench.cli:
        programs[CLI] = lambda n: bench.by_cli(_seeded(job, n))
    programs[LAST] = lambda n: bench.by_us(_seeded(job, n), LAST_OPTION)
    if cpu_computes_bf16():
        programs[BF16] = lambda n: bench.by_us(_seeded(job, n), LAST_OPTION, "engine.precision=bf16")
    taken = bench.measure("whole", programs, bench.rounds)
    bench.raw["whole"]["accuracy"] = {name: [accuracy(took) for took in some] for name, some in taken.items()}
    rows = []
    for name, some in taken.items():
        cells = [f"{middle([t.cpu for t in some]):.2f}", f"{against(taken, name, RAW, 'cpu'):.2f}"]
        cells += [f"{middle([t.wall for t in some]):.2f}", f"{middle([t.start for t in some]):.2f}"]
        cells += [f"{middle([t.memory for t in some]):.0f}", f"{against(taken, name, RAW, 'memory'):.2f}"]
        same = len(some) - unequal(some, taken[RAW])
        rows.append([name, *cells, f"{mean_accuracy(some):.4f}", f"{same} of {len(some)}"])
    head = ["program", "CPU s", "of raw", "wall s", "first step, CPU s", "MiB", "of raw", "val_acc", "weights of raw"]
    note = f"The small network, {job.epochs} epochs of 9,000 pictures, {job.batch_size} at a time, a validation and a "
    note += f"checkpoint after each; {len(taken[RAW])} rounds, each with another seed."
    say("The whole training", note, table(head, rows))
    limit(bench, "whole training", taken, OURS, RAW, 0.75)
    limit(bench, "whole training", taken, OURS, CLI, 0.45)
    what = "whole training, seeds whose weights are not those of raw PyTorch"
    bench.bounds.append(Bound(what, unequal(taken[OURS], taken[RAW]), 0))
    for name, time_limit, points in ((LAST, 0.62, 0.3), (BF16, 0.52, 0.5)):
        limit(bench, "whole training", taken, name, RAW, time_limit)
        less = 100 * (mean_accuracy(taken[RAW]) - mean_accuracy(taken[name])) if name in taken else None
        seeds = f"{min(bench.rounds, SEEDS)} seeds"
        bench.bounds.append(Bound(f"{name}: mean val_acc below raw PyTorch's, points, {seeds}", less, points))
    limit(bench, "whole training", taken, OURS, UNTRACKED, 1.03)
    limit(bench, "memory", taken, OURS, RAW, 0.95, "memory")
    limit(bench, "memory", taken, OURS, CLI, 0.75, "memory")


def batch256(bench: Bench) -> None:
    """Measure the whole training with batches of 256 samples and three seeds."""
    job = _with(bench.mnist, batch_size=256, steps=-(-9000 // 256))
    programs = {RAW: lambda n: bench.by_script(_seeded(job, n)), OURS: lambda n: bench.by_us(_seeded(job, n))}
    taken = bench.measure("batch256", programs, min(3, bench.rounds))
    rows = [[n, f"{middle([t.cpu for t in s]):.2f}", f"{against(taken, n, RAW, 'cpu'):.2f}"] for n, s in taken.items()]
    say("256 at a time", "The same otherwise.", table(["program", "CPU s", "of raw"], rows))
    limit(bench, "whole training, batches of 256", taken, OURS, RAW, 0.75)
    what = "batches of 256, seeds whose weights are not those of raw PyTorch"
    bench.bounds.append(Bound(what, unequal(taken[OURS], taken[RAW]), 0))


def start(bench: Bench) -> None:
    """Measure the time until the first optimizer step, and the cost of creating the store."""
    job = _with(bench.mnist, max_steps=2)
    programs = {
        RAW: lambda n: bench.by_script(job),
        LIGHTNING: lambda n: bench.by_lightning(job),
        OURS: lambda n: bench.by_us(job),
        FRESH: lambda n: bench.by_us(job, store=bench.place / f"fresh-{n}"),
    }
    if bench.cli:
        programs[CLI] = lambda n: bench.by_cli(job)
    taken = bench.measure("start", programs, bench.rounds)
    rows = []
    for name, some in taken.items():
        cells = [f"{middle([t.start for t in some]):.2f}", f"{against(taken, name, RAW, 'start'):.2f}"]
        cells += [f"{middle([t.start_wall for t in some]):.2f}", f"{middle([t.cpu for t in some]):.2f}"]
        rows.append([name, *cells])
    head = ["program", "CPU s", "of raw", "wall s", "all of two steps, CPU s"]
    say("Start to the first optimizer step", f"{bench.rounds} rounds.", table(head, rows))
    limit(bench, "start", taken, OURS, RAW, 0.75, "start")
    limit(bench, "start", taken, OURS, CLI, 0.5, "start")
    more = [fresh.cpu - ours.cpu for fresh, ours in zip(taken[FRESH], taken[OURS], strict=True)]
    # MLflow's migrations, in a thread, once for each store: 1.35 CPU s where MLflow's own logger makes one.
    bench.bounds.append(Bound("a store made over one that is there, CPU s", middle(more), 1.5))


def loop(bench: Bench) -> None:
    """Measure the cost of a step with hardly any computation."""
    folder = bench.place / "pixels"
    make_pictures(folder, 2444, 1, 1, 2)
    job = Job(folder, PIXELS, "two", "train_network.Two", 550, batch_size=4, epochs=12)
    programs = {
        BY_HAND: lambda n: bench.by_script(job, "--in-memory"),
        LIGHTNING: lambda n: bench.by_lightning(job, "--in-memory"),
        OURS: lambda n: bench.by_us(job, "logger.progress=bar"),
    }
    taken = bench.measure("loop", programs, bench.rounds)
    steps = {name: [1e6 * took.per_step(job.steps) for took in some] for name, some in taken.items()}
    bench.raw["loop"]["steps"] = steps
    over = {name: middle([a - b for a, b in zip(steps[name], steps[BY_HAND], strict=True)]) for name in steps}
    rows = [[name, f"{middle(some):.0f}", f"{over[name]:.0f}"] for name, some in steps.items()]
    note = "A network of two parameters, 550 batches of four pixels from memory, points every ten steps, with a bar; "
    note += "the median of eleven epochs behind the first: our thread imports MLflow in some of them, once for a run."
    say("A step", note, table(["program", "CPU µs", "over raw"], rows))
    # Of each round, as a machine that others slow down slows all three; a bound in µs would be one of the machine.
    added = zip(steps[OURS], steps[BY_HAND], steps[LIGHTNING], strict=True)
    share = middle([(ours - raw) / (theirs - raw) for ours, raw, theirs in added])
    bench.bounds.append(
        Bound("what a step adds to raw PyTorch's, points every ten, bar on, of Lightning's", share, 0.18)
    )


def judging(bench: Bench) -> None:
    """Measure a validation of 100,000 pictures of 28x28 beside a bare loop of forward passes, in one process."""
    folder, module = bench.folder, "judge_own.Judged, params: {count: 100000}"
    job = Job(folder, module, "small", "train_network.Small", 1, epochs=bench.rounds + 1)
    folder.with_suffix(".yaml").write_text(config_of(job, bench.place / "mlruns"))
    command = [sys.executable, str(PEERS / "judge_own.py"), str(folder.with_suffix(".yaml"))]
    turns = json.loads(run(command, folder, limit=3 * LIMIT_SECONDS).output.splitlines()[-1])
    bench.raw["judging"] = turns
    share = middle([turn["ours"] / turn["bare"] for turn in turns])
    note = "100,000 pictures, 64 at a time, with loss, accuracy, confusion matrix and the pictures worth a look."
    names = {"bare": "raw PyTorch, forward passes alone", "ours": OURS}
    rows = [[name, f"{middle([turn[who] for turn in turns]):.2f}"] for who, name in names.items()]
    say("A validation", note, table(["program", "CPU s"], rows))
    bench.bounds.append(Bound("a validation, of a bare loop of forward passes", share, 1.05))


def runs(bench: Bench) -> None:
    """Measure runs opened and closed by our logger, in this process, in a store of ten and in one of a thousand, beside
    the same by MLflow's own client in as few calls."""
    from mlflow.entities import Metric, Param

    from deeplightning.tracking import MLflowLogger
    from deeplightning.tracking.mlflow_store import open_client
    from deeplightning.tracking.store import locate

    sizes = (10, 1000)

    def one(size: int) -> float:
        begun = time.process_time()
        logger = MLflowLogger(tracking_uri=bench.place / f"runs-{size}", system_metrics=False)
        logger.log_hyperparams({f"param_{number}": number for number in range(15)})
        for step in range(0, 420, 10):
            logger.log_metrics({"train_loss": 1 / (1 + step)}, step)
        logger.finalize("success")
        return time.process_time() - begun

    def by_client() -> float:
        begun = time.process_time()
        run_id = client.create_run("0", run_name="run").info.run_id
        params = [Param(f"param_{number}", str(number)) for number in range(15)]
        moment = time.time_ns() // 1_000_000
        points = [Metric("train_loss", 1 / (1 + step), moment, step) for step in range(0, 420, 10)]
        client.log_batch(run_id, points, params)
        client.set_terminated(run_id)
        return time.process_time() - begun

    held = {}
    for size in sizes:
        for number in range(size):
            one(size)
            if number == 0:
                held[size] = stored(bench.place / f"runs-{size}")
        held[size] = (stored(bench.place / f"runs-{size}") - held[size]) / (size - 1)
    costs: dict[int, list[float]] = {size: [] for size in sizes}
    client, of_client = open_client(locate(bench.place / f"runs-{sizes[-1]}")), list[float]()
    for _ in range(4 * bench.rounds):
        for size in sizes:
            costs[size].append(one(size))
        of_client.append(by_client())
    bench.raw["runs"] = {"cpu": costs, "client": of_client, "bytes": held}
    rows = [[f"{n:,}", f"{1e3 * middle(costs[n]):.1f}", f"{held[n] / 1024:.1f}"] for n in sizes]
    rows.append(["1,000, by MLflow's client", f"{1e3 * middle(of_client):.1f}", ""])
    note = "Our logger opens a run, tracks 15 parameters and 42 points, and closes it."
    say("Many runs in a store", note, table(["runs in it", "CPU ms of one more", "KiB a run"], rows))
    bench.bounds.append(Bound("a run in a store of 1,000, of one in a store of 10", ratio(costs[1000], costs[10]), 1.3))
    bench.bounds.append(Bound("a run in a store of 1,000, of MLflow's client", ratio(costs[1000], of_client), 1.5))
    bench.bounds.append(Bound("KiB of the store for a run", held[1000] / 1024, 16))


def resnet(bench: Bench) -> None:
    """Measure a step with much computation."""
    folder = bench.place / "colours"
    make_pictures(folder, 1422, 32, 3, 10)
    job = Job(folder, COLOURS, "resnet18", RESNET18, 20, epochs=1)
    programs = {
        RAW: lambda n: bench.by_script(job),
        OURS: lambda n: bench.by_us(job),
        LAST: lambda n: bench.by_us(job, LAST_OPTION),
    }
    if cpu_computes_bf16():
        programs[BF16] = lambda n: bench.by_us(job, LAST_OPTION, "engine.precision=bf16")
    taken = bench.measure("resnet", programs, bench.rounds)
    steps = {name: [1e3 * took.per_step(job.steps) for took in some] for name, some in taken.items()}
    bench.raw["resnet"]["steps"] = steps
    rows = [[name, f"{middle(some):.0f}", f"{ratio(some, steps[RAW]):.2f}"] for name, some in steps.items()]
    say("resnet18", "Pictures of 32x32, 64 at a time.", table(["program", "CPU ms of a step", "of raw"], rows))
    for name, most in ((OURS, 1.02), (LAST, 0.9), (BF16, 0.65)):
        figure = ratio(steps[name], steps[RAW]) if name in steps else None
        bench.bounds.append(Bound(f"resnet18, a step: {name}, of raw PyTorch", figure, most))


def ddp(bench: Bench) -> None:
    """Measure samples per CPU second of two processes that train together, against one."""
    one = _with(bench.mnist, epochs=2)
    two = _with(one, steps=-(-9000 // 128))
    both = ["engine.processes=2", "engine.backend=ddp"]
    programs = {"one process": lambda n: bench.by_us(one), "two processes": lambda n: bench.by_us(two, *both)}
    taken = bench.measure("ddp", programs, bench.rounds)
    rates = {
        name: [64 * len(took.processes) / took.per_step(job.steps) for took in taken[name]]
        for name, job in zip(programs, (one, two), strict=True)
    }
    bench.raw["ddp"]["rates"] = rates
    share = ratio(rates["two processes"], rates["one process"])
    rows = [[name, f"{middle(some):.0f}", f"{ratio(some, rates['one process']):.2f}"] for name, some in rates.items()]
    note = "The small network, 64 at a time in each process; the second epoch."
    say("Two processes", note, table([OURS, "samples per CPU s", "of one"], rows))
    bench.bounds.append(Bound("samples per CPU s of two processes, of one", share, 0.88, at_least=True))


def gpu(bench: Bench) -> None:
    """Measure samples per second and time to the first step on pictures like CIFAR-10's, if there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("\n## On a GPU\n\nThere is no GPU at hand.", flush=True)
        return
    folder = bench.place / "cifar"
    make_pictures(folder, 50_000, 32, 3, 10)
    workers = min(8, os.cpu_count() or 1)
    rows = []
    for network, kind in (("small32", SMALL32), ("resnet18", RESNET18)):
        job = Job(folder, COLOURS, network, kind, -(-45_000 // 512), batch_size=512, epochs=3, device="cuda")
        programs = {
            RAW: lambda n, job=job: bench.by_script(job, "--workers", str(workers)),
            BY_HAND: lambda n, job=job: bench.by_script(job, "--in-memory"),
            LIGHTNING: lambda n, job=job: bench.by_lightning(job, "--workers", str(workers)),
            OURS: lambda n, job=job: bench.by_us(job, "engine.gpus=1"),
        }
        for name, some in bench.measure(f"gpu {network}", programs, bench.rounds).items():
            rate = middle([job.batch_size / took.per_step(job.steps, clock=True) for took in some])
            rows.append([f"{network}, {name}", f"{rate:,.0f}", f"{middle([t.start_wall for t in some]):.2f}"])
    note = f"{torch.cuda.get_device_name()}; pictures of 32x32 in colour, 512 at a time; {workers} workers where there "
    note += "are workers; from the second epoch on."
    say("On a GPU", note, table(["network, program", "samples/s", "first step, s"], rows))


PARTS = {part.__name__: part for part in (whole, batch256, start, loop, judging, runs, resnet, ddp, gpu)}


# ---- what the parts share


def stored(folder: Path) -> int:
    """Return the bytes of a store's database."""
    return sum(path.stat().st_size for path in folder.glob("mlflow.db*"))


def _with(job: Job, **values: Any) -> Job:
    return dataclasses.replace(job, **values)


def _seeded(job: Job, number: int) -> Job:
    return _with(job, seed=number % SEEDS)


def finished(took: Took) -> Took:
    """Add the digest of the weights of a training, and remove their file: resnet18's are large."""
    ours = re.search(r"^Artifact storage path: (.+)$", took.output, re.MULTILINE)
    found = [Path(ours[1]) / "last.ckpt"] if ours else [*took.folder.glob("*.ckpt"), *took.folder.glob("*/*.ckpt")]
    if not found:  # two steps of a script
        return took
    weights = digest(found[0])
    found[0].unlink()
    return dataclasses.replace(took, weights=weights)


def unequal(some: Sequence[Took], others: Sequence[Took]) -> int:
    """Return in how many rounds the weights differ."""
    return sum(one.weights != other.weights for one, other in zip(some, others, strict=True))


def accuracy(took: Took) -> float:
    """Return the last accuracy that a training has reported."""
    return float(re.findall(r"val_acc\D+([\d.]+)", took.output)[-1])


def mean_accuracy(some: Sequence[Took]) -> float:
    return statistics.mean(accuracy(took) for took in some[:SEEDS])


def against(taken: dict[str, list[Took]], one: str, other: str, of: str) -> float:
    """Return the median ratio of one program's figure to another's."""
    return ratio([getattr(took, of) for took in taken[one]], [getattr(took, of) for took in taken[other]])


def limit(
    bench: Bench, what: str, taken: dict[str, list[Took]], one: str, other: str, most: float, of: str = "cpu"
) -> None:
    """Add a promise that one program takes at most so much of what another takes."""
    figure = against(taken, one, other, of) if one in taken and other in taken else None
    bench.bounds.append(Bound(f"{what}: {one}, of {other}", figure, most))


def machine() -> str:
    """Return the versions that the figures depend on."""
    names = ["torch", "torchvision", "pytorch-lightning", "mlflow"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"Python {platform.python_version()}, {os.cpu_count()} cores, one thread; {versions}"


def peers() -> tuple[str, bool]:
    """Return the Python of the scripts and whether it has LightningCLI; ours if their environment cannot be made."""
    try:
        return side_by_side.environment(), True
    except side_by_side.NotMade as error:
        print(f"The peers' environment cannot be made ({error}): scripts run in ours, without LightningCLI.")
        return sys.executable, False


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=5, help="in which each program has its turn; default 5")
    words.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    words.add_argument("--data", type=Path, metavar="FOLDER", help="with IDX files of MNIST; default: digits are made")
    words.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers as well")
    options = words.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no training is left
    python, cli = peers()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as place, contextlib.suppress(KeyboardInterrupt):  # what is there is told
        bench = Bench(options, python, cli, Path(place))
        try:
            bench.mnist  # noqa: B018
        except (OSError, ValueError) as error:
            print(f"--data: {error}", file=sys.stderr)
            sys.exit(3)
        for part in options.only:
            try:
                PARTS[part](bench)
            except RuntimeError as error:
                print(f"\n## {part}\n\nnot measured: {error}", flush=True)
                bench.bounds.append(Bound(part, None, 0))
    rows = [bound.row() for bound in bench.bounds]
    print(f"\n## Bounds\n\n{table(['what', 'bound', 'figure', 'kept'], rows)}")
    if options.json:
        options.json.write_text(json.dumps(bench.raw, indent=1))
    sys.exit(0 if all(bound.kept for bound in bench.bounds) else 1)


if __name__ == "__main__":
    main()
