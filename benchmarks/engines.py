"""Compare the same training under each engine: losses, time, and memory of each process.

    .venv/bin/python benchmarks/engines.py

trains a network of 282,378 parameters on scikit-learn's digits for two epochs with the user's command, in new
processes, each engine in turn, and prints a Markdown table. There are two CPU processes with 32 samples each; `null` is
one with 64. It exits with 1 if a `train_loss` is more than 0.001 from ddp's.

The config names the network and the callback in this file: the commands run in this folder.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import side_by_side
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

HERE = Path(__file__).resolve().parent

# By default stage 3 does not shard small parameters, and keeps parameters gathered that are used again soon: here, all.
KEPT = "stage3_param_persistence_threshold: 0, stage3_max_live_parameters: 0, stage3_max_reuse_distance: 0"
ALL_SHARED = f"{{config: {{zero_optimization: {{{KEPT}}}}}}}"
ENGINES = {
    "null": "{}",
    "ddp": "{}",
    "fsdp": "{wrap: [Linear]}",
    "deepspeed_stage_1": "{}",
    "deepspeed_stage_2": "{}",
    "deepspeed_stage_3": ALL_SHARED,
    "deepspeed_stage_2_offload": "{}",
    "deepspeed_stage_3_offload": ALL_SHARED,
}
PROCESSES = {engine: 1 if engine == "null" else 2 for engine in ENGINES}
MAX_DIFFERENCE = 1e-3  # of a loss from ddp's

CONFIG = """\
seed: 7
data: {module: {type: deeplightning.data.digits.Digits}, batch_size: BATCH}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: {type: engines.Wide}
  optimizer: {type: torch.optim.Adam, params: {lr: 0.001}}
  loss: {type: torch.nn.CrossEntropyLoss}
engine: {backend: ENGINE, processes: PROCESSES, params: PARAMS}
train: {num_epochs: 2, export: false, callbacks: [{type: engines.Notes, params: {folder: 'FOLDER'}}]}
logger: {params: {tracking_uri: 'FOLDER/mlruns', system_metrics: false}, log_every_n_steps: 1, pictures: null}
"""


class Wide(nn.Module):
    """Network from images (N, 1, 8, 8) to logits (N, 10); 282,378 parameters in layers of 256."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Notes(pl.Callback):
    """Write the memory of each process after training, and the training time, to `folder/memory-RANK.json`."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begun = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        noted = {"seconds": time.perf_counter() - self._begun, **bytes_here(pl_module.network, trainer.optimizers[0])}
        (self.folder / f"memory-{trainer.global_rank}.json").write_text(json.dumps(noted))


def bytes_here(network: nn.Module, optimizer: Any) -> dict[str, int]:
    """Return the bytes in this process: the network's parameters, the optimizer's state, and the optimizer's own
    weights.

    DeepSpeed's optimizers have a copy of their share of the weights in 32 bits.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed's is around the one that steps
    parameters = list(network.parameters())
    here = [parameter.data for parameter in parameters] + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    states = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
    shared = {id(parameter) for parameter in parameters}
    copies = [key for key in optimizer.state if id(key) not in shared]
    return {"parameters": _bytes(here), "state": _bytes(states), "copies": _bytes(copies)}


def _bytes(tensors: list[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


@dataclass(frozen=True)
class Run:
    """Result of one training.

    Attributes:
        losses: `train_loss` by step.
        val_loss: at the end.
        wall, cpu: seconds of the command, CPU seconds of all its processes.
        seconds: from the first batch to the end of training, validation and checkpoints included.
        held: bytes in each process.
    """

    losses: dict[int, float]
    val_loss: float
    wall: float
    cpu: float
    seconds: float
    held: list[dict[str, int]]


def config(engine: str, folder: Path) -> str:
    """Return the text of the config; the run's output goes to the folder."""
    processes = PROCESSES[engine]
    words = {"BATCH": 64 // processes, "ENGINE": engine, "PROCESSES": processes, "PARAMS": ENGINES[engine]}
    text = CONFIG
    for word, value in {**words, "FOLDER": folder}.items():
        text = text.replace(word, str(value))
    return text


def run(engine: str, folder: Path) -> Run:
    """Train under an engine with the user's command.

    Raises:
        RuntimeError: the command fails.
    """
    from mlflow.tracking import MlflowClient

    (folder / "config.yaml").write_text(config(engine, folder))
    begun = time.perf_counter()
    ended = side_by_side.run([*side_by_side.OURS, "train", str(folder / "config.yaml")], HERE)
    wall = time.perf_counter() - begun
    if ended.code:
        raise RuntimeError(f"{engine} ended with {ended.code}:\n{ended.output}")
    place = next(line for line in ended.output.splitlines() if line.startswith("Artifact storage path: "))
    client, number = MlflowClient(f"sqlite:///{folder / 'mlruns' / 'mlflow.db'}"), Path(place).parent.name
    losses = {point.step: point.value for point in client.get_metric_history(number, "train_loss")}
    noted = [json.loads((folder / f"memory-{rank}.json").read_text()) for rank in range(PROCESSES[engine])]
    seconds = noted[0]["seconds"]
    return Run(losses, client.get_run(number).data.metrics["val_loss"], wall, ended.seconds, seconds, noted)


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """Return the largest difference of two series of losses; infinite for different steps, or a loss that is not a
    number."""
    if one.keys() != other.keys() or not one:
        return float("inf")
    differences = [abs(one[step] - other[step]) for step in one]
    return max(differences) if all(difference < float("inf") for difference in differences) else float("inf")


HEAD = ["engine", "`train_loss` from ddp's", "`val_loss`", "wall s", "CPU s", "training s"]
HEAD += ["parameters, KiB", "state, KiB", "own weights, KiB"]


def row(engine: str, runs: list[Run], ddp: Run) -> list[str]:
    """Return a line of the table: medians of seconds, and KiB in each process."""
    middle = [f"{statistics.median(getattr(one, name) for one in runs):.1f}" for name in ("wall", "cpu", "seconds")]
    names = ("parameters", "state", "copies")
    holds = [" + ".join(f"{of_rank[name] / 1024:,.0f}" for of_rank in runs[0].held) for name in names]
    furthest = max(apart(one.losses, ddp.losses) for one in runs)
    return [f"`{engine}`", f"{furthest:.1e}", f"{runs[0].val_loss:.5f}", *middle, *holds]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=3, help="in which each engine has its turn; default 3")
    options = words.parse_args()
    runs: dict[str, list[Run]] = {engine: [] for engine in ENGINES}
    with tempfile.TemporaryDirectory() as place:
        run("null", Path(place))  # makes the tracking store, which is not counted
        for number in range(options.rounds):
            for engine in ENGINES:
                runs[engine].append(run(engine, Path(place)))
                print(f"round {number + 1}: {engine} {runs[engine][-1].wall:.1f} s", file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("pytorch-lightning", "deepspeed"))
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {versions}\n")
    ddp = runs["ddp"][0]
    lines = [HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *(row(engine, some, ddp) for engine, some in runs.items())]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    wrong = [name for name, some in runs.items() if any(apart(one.losses, ddp.losses) > MAX_DIFFERENCE for one in some)]
    if wrong:
        sys.exit(f"more than {MAX_DIFFERENCE} from ddp's losses: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
