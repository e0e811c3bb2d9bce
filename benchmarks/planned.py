"""Compare the memory that `deeplightning plan --memory` predicts with that of two networks under six engines on CPU
processes.

    .venv/bin/python benchmarks/planned.py

trains each for three steps by the command of a user and counts tensor by tensor. Prints a Markdown table; ends with 1
where parameters, gradients or state differ by a byte, or the peak by more than 15 %.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import side_by_side
import torch
from deeplightning_plan.memory_tracker import MemoryTracker, Phases, state_of
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
ENGINES = ["null", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
NETWORKS = {
    "mlp": "{type: planned.Wide}",
    "vit": "{type: deeplightning.model.vit.ViT, params: "
    "{num_classes: 10, num_channels: 1, image_size: 8, patch_size: 2, width: 96, depth: 4, heads: 3}}",
}
NAMES = ("parameters", "gradients", "state", "peak")
MAX_DIFFERENCE = 0.15

CONFIG = """\
seed: 7
data: {module: {type: deeplightning.data.digits.Digits}, batch_size: 32}
model:
  module: {type: deeplightning.task.img_classif.ImageClassification}
  network: NETWORK
  optimizer: {type: torch.optim.AdamW, params: {lr: 0.001}}
  loss: {type: torch.nn.CrossEntropyLoss}
engine: {backend: ENGINE, processes: PROCESSES, precision: PRECISION}
train: {num_epochs: 1, limit_batches: {train: 3, val: 0, test: 0}, export: false, callbacks: [CALLBACKS]}
stages: [train]
logger: {params: {tracking_uri: 'FOLDER/mlruns', system_metrics: false}, pictures: null}
"""


class Wide(nn.Module):
    """Images (N, 1, 8, 8) to logits (N, 10), in layers whose sizes two processes cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [layer for _ in range(4) for layer in (nn.Linear(251, 251), nn.ReLU())]
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 251), nn.ReLU(), *hidden, nn.Linear(251, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Counts(Phases):
    """Writes into `folder/held-RANK.json` what each process holds, and the most that the second step held."""

    def __init__(self, folder: str):
        super().__init__(MemoryTracker())
        self.folder = Path(folder)
        self.found: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.tracker.__enter__()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        zero = optimizer
        kept: list[Any] = [
            *(p.grad for p in pl_module.parameters()),
            getattr(zero, "grad_partitions_flat_buffer", None),
        ]
        for partition in getattr(zero, "averaged_gradients", {}).values():
            kept += partition if isinstance(partition, list) else [partition]
        self.found["gradients"] = self.tracker.add("gradients", kept)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
        optimizer: Any = trainer.optimizers[0]
        inner = getattr(optimizer, "optimizer", optimizer)
        own = [key for key in inner.state if key not in set(pl_module.parameters())]
        self.found["state"] = self.tracker.add("state", [*state_of(optimizer), *own])
        shares = [p.ds_tensor for p in pl_module.parameters() if hasattr(p, "ds_tensor")]
        self.found["shares"] = self.tracker.add("parameters", shares)
        self.found["parameters"] = self.tracker.add("parameters", [*pl_module.parameters(), *shares])
        super().on_train_batch_end(trainer, pl_module, *rest)
        if trainer.should_stop:
            self.found["phases"] = self.tracker.peaks
            self.found["peak"] = max(sum(kinds.values()) for kinds in self.tracker.peaks.values())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.tracker.__exit__(None, None, None)
        (self.folder / f"held-{trainer.global_rank}.json").write_text(json.dumps(self.found))


def config(network: str, engine: str, precision: str, folder: Path, callbacks: str) -> Path:
    """Write the config of a training into a folder."""
    words = {"NETWORK": NETWORKS[network], "ENGINE": engine, "PROCESSES": 1 if engine == "null" else 2}
    words |= {"PRECISION": precision, "CALLBACKS": callbacks, "FOLDER": folder}
    text = CONFIG
    for word, value in words.items():
        text = text.replace(word, str(value))
    path = folder / f"{network}-{engine}.yaml"
    path.write_text(text)
    return path


def measured(network: str, engine: str, precision: str, folder: Path) -> dict[str, Any]:
    """Return the memory of the first process in a training.

    Raises:
        RuntimeError: the command fails.
    """
    callbacks = f"{{type: planned.Counts, params: {{folder: '{folder}'}}}}"
    path = config(network, engine, precision, folder, callbacks)
    ended = side_by_side.run([*side_by_side.OURS, "train", str(path)], HERE)
    if ended.code:
        raise RuntimeError(f"{path.name} ended with {ended.code}:\n{ended.output}")
    return json.loads((folder / "held-0.json").read_text())


def planned(network: str, engine: str, precision: str, folder: Path) -> Any:
    """Return the plan's row for the same training, without callbacks."""
    from deeplightning_plan.memory_table import plan_memory

    from deeplightning.config.examine import load_config

    cfg = load_config(str(config(network, engine, precision, folder, "")))
    if engine == "fsdp":
        cfg.engine.params = {"wrap": 1_000_000}  # the engine's own; a plan without it takes the repeated block
    plan, _ = plan_memory(cfg, None, None)
    return next(row for row in plan.rows if row.engine == engine and not row.recompute)


HEAD = ["network", "engine", "parameters", "gradients", "state", "peak, planned", "peak, measured", "apart"]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--precision", default="32", choices=["32", "bf16"])
    options = words.parse_args()
    sys.path.insert(0, str(HERE))
    print(f"Python {platform.python_version()}, torch {torch.__version__}; KiB of the first process\n")
    print("\n".join(f"| {' | '.join(line)} |" for line in (HEAD, ["---"] * 2 + ["---:"] * 6)))
    wrong = []
    for network in NETWORKS:
        for engine in ENGINES:
            with tempfile.TemporaryDirectory() as place:
                found = measured(network, engine, options.precision, Path(place))
                row = planned(network, engine, options.precision, Path(place))
            found["parameters"] = found["shares"] or found["parameters"]
            if engine == "deepspeed_stage_2":  # cuts its gradients after the hook that looks at them
                found["gradients"] = row.held["gradients"]
            exact = all(row.held[name] == found[name] for name in NAMES[:3])
            apart = row.peak / found["peak"] - 1
            sizes = [f"{found[name] / 1024:,.1f}" for name in NAMES[:3]]
            sizes += [f"{row.peak / 1024:,.0f}", f"{found['peak'] / 1024:,.0f}", f"{apart:+.1%}"]
            print(f"| {network} | `{engine}` | {' | '.join(sizes)} |", flush=True)
            if not exact or abs(apart) > MAX_DIFFERENCE:
                wrong.append(f"{network} under {engine}")
    if wrong:
        sys.exit(f"not as planned: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
