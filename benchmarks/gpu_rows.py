"""Measure the memory of each engine on a ViT, and speed beside a plain script and a raw loop, for benchmarks/gpu.py.

Programs run one at a time, but for the starts of the ViT's runs; a ratio is of figures of the same round.
"""

import contextlib
import importlib.util
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from side_by_side import OURS, PEERS, Bound, table
from timed import make_pictures, run

LIMIT_SECONDS = 150.0  # of one program

ENGINES = ["null", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
PLAIN, RAW, SELF = "plain script, DataLoader", "raw loop, data on the GPU", "deeplightning"
GRAPHS, RECORDED = "reduce-overhead", "graphs"

OPTIMIZER = "type: torch.optim.SGD, params: {lr: 0.1, momentum: 0.9, weight_decay: 0.0005, nesterov: true}"
CIFAR = """\
seed: 0
data:
  module:
    type: train_own.Pictures
    params:
      {size: 32, mode: RGB, classes: 10, augment: [{type: deeplightning.data.augment.RandomCrop, params: {padding: 4}},
       {type: deeplightning.data.augment.RandomHorizontalFlip}]}
  root: 'FOLDER'
  batch_size: BATCH
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: NETWORK, params: PARAMS}
  optimizer: {OPTIMIZER}
  scheduler:
    {type: torch.optim.lr_scheduler.OneCycleLR, params: {max_lr: 0.1, total_steps: auto}, call: {interval: step}}
  loss: {type: torch.nn.CrossEntropyLoss, params: {label_smoothing: 0.1}}
engine: {gpus: GPUS, precision: PRECISION, channels_last: true, compile: COMPILE}
train: {num_epochs: EPOCHS, export: false, callbacks: [{type: gpu_notes.Epochs}]}
logger: {params: {tracking_uri: 'STORE'}, log_every_n_steps: 50, pictures: null}
"""
VIT = """\
seed: 0
data:
  module: {type: train_own.Pictures, params: {size: SIZE, mode: RGB, classes: 10}}
  root: 'FOLDER'
  batch_size: BATCH
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: deeplightning.model.vit.ViT, params: PARAMS}
  optimizer: {type: torch.optim.AdamW, params: {lr: 0.0001}}
  loss: {type: torch.nn.CrossEntropyLoss}
engine: {backend: ENGINE, gpus: GPUS, processes: PROCESSES, precision: PRECISION, params: WRAP}
train:
  max_steps: STEPS
  export: false
  limit_batches: {val: 0}
  callbacks: [{type: gpu_notes.Turn, params: {lock: 'LOCK', folder: 'NOTES'}}]
logger: {params: {tracking_uri: 'STORE', system_metrics: false}, pictures: null}
"""


@dataclass(frozen=True)
class Size:
    """Size of a measurement.

    Attributes:
        pictures: made up, 32 x 32, of which a tenth validates.
        network, params: what learns them.
        batches: for the rows of speed.
        vit: keyword arguments of the ViT; `vit_batch` and `vit_steps` of its runs.
    """

    pictures: int
    network: str
    params: dict[str, Any]
    batches: tuple[int, ...]
    vit: dict[str, Any]
    vit_batch: int
    vit_steps: int


FULL = Size(
    *(50_000, "deeplightning.model.resnet.ResNet18", {"num_classes": 10, "small_images": True}, (128, 512)),
    *({"num_classes": 10, "image_size": 224, "patch_size": 16, "width": 1024, "depth": 24, "heads": 16}, 64, 12),
)
TINY = Size(
    *(200, "train_network.Small", {"channels": 3, "size": 32}, (32,)),
    *({"num_classes": 10, "image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2}, 8, 4),
)


# ---- what the parts share


class NoTime(Exception):
    """Raised if no time is left for a program."""


@dataclass
class Bench:
    """Settings and results that the parts share.

    Attributes:
        size: of what is measured.
        device: cuda or cpu.
        place: a folder for all that is made.
        end: the clock at which all of it must have ended.
        said: Markdown, by part.
        bounds: each promise with its figure.
        failed: parts and programs that did.
        raw: the numbers.
        warm: ends when the compiled graphs are in the cache.
    """

    size: Size
    device: str
    place: Path
    end: float = float("inf")
    rounds: int = 1
    said: dict[str, str] = field(default_factory=dict)
    bounds: list[Bound] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    warm: Future[None] | None = None
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def folder(self, name: str = "run") -> Path:
        """Return the path of a new folder, which is not created."""
        return self.place / f"{name}-{next(self.numbers)}"

    def say(self, part: str, title: str, note: str, text: str) -> None:
        self.said[part] = f"## {title}\n\n{note}\n\n{text}"
        print(f"\n{self.said[part]}", flush=True)

    def config(self, text: str, **values: Any) -> Path:
        """Write a config whose placeholders in capitals are replaced."""
        path = self.folder("config").with_suffix(".yaml")
        values |= {"GPUS": 1 if self.on_gpu else "null", "PRECISION": "bf16" if self.on_gpu else 32}
        words = {"STORE": str(self.place / "mlruns"), **values}
        path.write_text(re.sub(r"\b[A-Z]{4,}\b", lambda word: _yaml(words.get(word[0], word[0])), text))
        return path

    def run(self, command: Sequence[str]) -> Any:
        """Run a program; return its `timed.Took`.

        Raises:
            NoTime: there is too little left.
            RuntimeError: it fails.
        """
        if self.left < 20:
            raise NoTime
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.place / "inductor"), "TIMED_STEPS": "", "HF_HUB_OFFLINE": "1"}
        try:
            return run(command, self.folder(), min(LIMIT_SECONDS, self.left), **cache)
        except RuntimeError:
            if self.left <= 0:  # it was stopped
                raise NoTime from None
            raise


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- memory


def memory(bench: Bench) -> None:
    """Measure memory and speed of each engine for a large network; the runs start together and train in turn."""
    size, engines = bench.size, ENGINES if bench.on_gpu else ["null", "ddp"]
    if importlib.util.find_spec("deepspeed") is None:
        engines = [engine for engine in engines if not engine.startswith("deepspeed")]
    folder, lock = bench.place / "large", bench.place / "turn"
    make_pictures(folder, size.vit_batch * (size.vit_steps + 2) * 10 // 9 + 1, size.vit["image_size"], 3, 10)
    commands = {}
    for engine in engines:
        notes = bench.folder(engine)
        notes.mkdir()
        words = {"SIZE": size.vit["image_size"], "FOLDER": str(folder), "BATCH": size.vit_batch, "PARAMS": size.vit}
        words |= {"ENGINE": engine, "STEPS": size.vit_steps, "LOCK": str(lock), "NOTES": str(notes)}
        words |= {"WRAP": {"wrap": ["Block"]} if engine == "fsdp" else {}}
        words |= {"PROCESSES": 2 if engine != "null" and not bench.on_gpu else 1}
        commands[engine] = (notes, [*OURS, "train", str(bench.config(VIT, **words))])
    with ThreadPoolExecutor(_at_once(bench)) as pool:
        ends = {engine: pool.submit(bench.run, command) for engine, (_, command) in commands.items()}
    rows = []
    for engine, end in ends.items():
        try:
            end.result()
        except NoTime:
            rows.append([engine, "not measured: no time left", "-"])
            continue
        except RuntimeError as error:
            bench.failed.append(f"memory, {engine}: {str(error).strip().splitlines()[-1]}")
            rows.append([engine, "FAILED", "-"])
            continue
        noted = [json.loads(path.read_text()) for path in commands[engine][0].glob("*.json")]
        most = max((each["bytes"] or 0 for each in noted), default=0)
        rows.append([engine, f"{noted[0]['rate']:,.0f}", f"{most / 2**30:.1f}" if most else "-"])
        bench.raw.setdefault("memory", {})[engine] = noted
    shape = f"{size.vit['depth']} blocks, width {size.vit['width']}, {size.vit['image_size']} pixels"
    note = f"ViT of {shape}; AdamW, batch {size.vit_batch}, {size.vit_steps} steps, "
    note += "bf16, one GPU." if bench.on_gpu else "32 bits, CPU processes."
    bench.say("memory", "Memory of each engine", note, table(["engine", "samples/s", "peak GiB"], rows))


def _at_once(bench: Bench) -> int:
    """Return how many runs of the large network may start together: each keeps its weights while another trains."""
    if not bench.on_gpu:
        return 1
    import torch

    return 6 if torch.cuda.get_device_properties(0).total_memory > 60 * 2**30 else 1


# ---- speed


@dataclass(frozen=True)
class Row:
    """Program in the table of speed.

    Attributes:
        program: PLAIN, RAW or SELF.
        compile: the mode of torch.compile, or `graphs`, which compiles nothing; None: eager mode.
    """

    program: str
    batch: int
    compile: str | None = None

    @property
    def name(self) -> str:
        return f"{self.program}, {self.compile}" if self.compile else self.program


def rows_of(size: Size) -> list[Row]:
    """Return the rows to measure, the most informative first."""
    small, *larger = size.batches
    rows = [Row(program, small) for program in (PLAIN, RAW, SELF)]
    rows += [Row(program, batch) for batch in larger for program in (RAW, SELF)]
    rows += [Row(SELF, batch, RECORDED) for batch in size.batches]
    rows += [Row(program, small, GRAPHS) for program in (RAW, SELF)]
    return rows + [Row(PLAIN, batch) for batch in larger]


def command_of(bench: Bench, row: Row, data: Path, epochs: int) -> list[str]:
    """Return the command of a row's program for so many epochs."""
    size = bench.size
    if row.program == SELF:
        words = {"FOLDER": str(data), "BATCH": row.batch, "NETWORK": size.network, "PARAMS": size.params}
        words |= {"OPTIMIZER": OPTIMIZER, "EPOCHS": epochs, "COMPILE": row.compile or "false"}
        return [*OURS, "train", str(bench.config(CIFAR, **words))]
    loader = "workers" if row.program == PLAIN else "device"
    words = ["--data", data, "--network", size.network, "--params", json.dumps(size.params), "--loader", loader]
    words += ["--workers", min(8, os.cpu_count() or 1) if bench.on_gpu else 0, "--batch-size", row.batch]
    words += ["--epochs", epochs, "--device", bench.device, *(["--compile", row.compile] if row.compile else [])]
    return [sys.executable, str(PEERS / "gpu_raw.py"), *map(str, words)]


def pictures(bench: Bench, size: int, name: str) -> Path:
    folder = bench.place / name
    if not folder.exists():
        make_pictures(folder, size, 32, 3, 10)
    return folder


def compile_graphs(bench: Bench) -> None:
    """Fill the cache of compiled graphs by runs that are not measured, while the tests run."""
    few = pictures(bench, 12 * bench.size.batches[0], "few")
    for row in rows_of(bench.size):
        if row.compile == GRAPHS:
            with contextlib.suppress(NoTime, RuntimeError):  # the measured run will tell
                bench.run(command_of(bench, row, few, 1))


def speed(bench: Bench) -> None:
    """Measure pictures per second of the last of two epochs, and seconds of the whole job, of each program in turn."""
    data = pictures(bench, bench.size.pictures, "pictures")
    if bench.warm is not None:
        bench.warm.result()
    found: dict[Row, list[dict[str, float]]] = {}
    missing: dict[Row, str] = {}
    rows = [row for row in rows_of(bench.size) if bench.on_gpu or not row.compile]
    for number in range(bench.rounds):
        for row in rows[number % len(rows) :] + rows[: number % len(rows)]:
            try:
                found.setdefault(row, []).append(timing(bench.run(command_of(bench, row, data, 2))))
            except NoTime:
                missing[row] = "not measured: no time left"
            except (RuntimeError, ValueError) as error:
                missing[row] = "FAILED"
                bench.failed.append(f"speed, {row.name}, batch {row.batch}: {str(error).strip().splitlines()[-1]}")
    found = {row: some for row, some in found.items() if some}
    lines = [speed_line(row, found.get(row), missing.get(row, "not measured")) for row in rows]
    note = f"{bench.size.network.rpartition('.')[2]}, {bench.size.pictures * 9 // 10:,} made-up pictures of 32 x 32, "
    note += (
        "SGD, two epochs, each with validation and checkpoint; pictures per second are of the last epoch without these"
    )
    note += f"; {'bf16, channels_last' if bench.on_gpu else '32 bits, on the CPU'}; {bench.rounds} round(s)."
    head = ["program", "batch", "pictures/s", "µs a step", "first step, s", "job, s"]
    bench.say("speed", "Speed", note, table(head, lines))
    bench.raw["speed"] = {f"{row.name}, batch {row.batch}": some for row, some in found.items()}
    bench.bounds += bounds_of(found, bench.size)


def timing(took: Any) -> dict[str, float]:
    """Return pictures per second of a program's last epoch, seconds to its first step, and seconds of the job.

    Raises:
        ValueError: it has printed none.
    """
    epochs = re.findall(r"^epoch \d+ seconds ([\d.]+) pictures (\d+)$", took.output, re.MULTILINE)
    first = re.search(r"^first step at ([\d.]+)$", took.output, re.MULTILINE)
    if not epochs or first is None:
        raise ValueError(f"no epoch in the output:\n{took.output[-500:]}")
    seconds, seen = epochs[-1]
    return {"rate": int(seen) / float(seconds), "start": float(first[1]) - took.begun, "wall": took.wall}


def speed_line(row: Row, some: Sequence[dict[str, float]] | None, otherwise: str) -> list[str]:
    if not some:
        return [row.name, str(row.batch), otherwise, "-", "-", "-"]
    rate, start, wall = (statistics.median(each[name] for each in some) for name in ("rate", "start", "wall"))
    return [row.name, str(row.batch), f"{rate:,.0f}", f"{1e6 * row.batch / rate:,.0f}", f"{start:.1f}", f"{wall:.1f}"]


def bounds_of(found: dict[Row, list[dict[str, float]]], size: Size) -> list[Bound]:
    """Return the promises; a figure is None if one of its rows was not measured."""
    small, large = size.batches[0], size.batches[-1]

    def against(one: Row, other: Row, of: str = "rate") -> float | None:
        if len(found.get(one, ())) != len(found.get(other, ())) or not found.get(one):
            return None
        pairs = zip(found[one], found[other], strict=True)
        return statistics.median(ours[of] / theirs[of] for ours, theirs in pairs)

    graphs, ours = Row(SELF, small, GRAPHS), Row(SELF, small)
    recorded, recorded_large = Row(SELF, small, RECORDED), Row(SELF, large, RECORDED)
    rate = "pictures/s of the"
    return [
        Bound(f"batch {small}: {rate} plain script's", against(ours, Row(PLAIN, small)), 1.25, True),
        Bound(f"batch {large}: {rate} raw loop's", against(Row(SELF, large), Row(RAW, large)), 0.95, True),
        Bound(
            f"batch {small}, `compile: graphs`: {rate} plain script's", against(recorded, Row(PLAIN, small)), 1.25, True
        ),
        Bound(
            f"batch {large}, `compile: graphs`: {rate} raw loop's", against(recorded_large, Row(RAW, large)), 0.95, True
        ),
        Bound(f"graphs: {rate} raw loop's with graphs", against(graphs, Row(RAW, small, GRAPHS)), 0.9, True),
        Bound(
            f"`compile: graphs`: {rate} raw loop's with graphs", against(recorded, Row(RAW, small, GRAPHS)), 0.9, True
        ),
        Bound(f"graphs: {rate} raw loop's without", against(graphs, Row(RAW, small)), 1.15, True),
        Bound("job of two epochs: seconds of the plain script's", against(ours, Row(PLAIN, small), "wall"), 1.0),
        Bound("the job, `compile: graphs`", against(recorded, Row(PLAIN, small), "wall"), 1.0),
    ]
