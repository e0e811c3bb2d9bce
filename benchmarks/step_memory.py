"""Count the bytes of a training step under each engine with one process, on the CPU, tensor by tensor.

    .venv/bin/python benchmarks/step_memory.py

trains a Vision Transformer by AdamW for three steps under `null` and DeepSpeed's stages, each in a fresh process, and
prints a Markdown table of the third step. Counted is what tensors hold, not what an allocator reserves; a GPU has other
kernels, which may save other activations. `deeplightning train` replaces these engines by `null` where one process runs
on the CPU, so each strategy is given to Lightning's Trainer directly.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # private; torch has no public one (2.15)
from torch.utils._pytree import tree_leaves  # private as well

from deeplightning.model.vit import ViT

# What Lightning 2.6 and DeepSpeed 0.19 take where nothing is set, to compare ours with.
_LARGE = {
    "reduce_bucket_size": 200_000_000,
    "sub_group_size": 1_000_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
}
LIBRARY = "with the libraries' sizes"
ENGINES = ["null"]
ENGINES += [f"deepspeed_stage_{stage}{more}" for stage in (1, 2, 3) for more in ("", f", {LIBRARY}")]
STEP = 2  # the optimizer has its state from the second step on


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make while it is on, until their memory is freed.

    Attributes:
        phase: what is going on, set from outside.
        total: bytes held now.
        made: phase in which it was made → bytes held now.
        peaks: phase → the most bytes held while it lasted, and `made` at that moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "set-up"
        self.total = 0
        self.made: Counter[str] = Counter()
        self.peaks: dict[str, tuple[int, Counter[str]]] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._note(tensor)
        return made

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes and size:
            weakref.finalize(storage, self._free, key, self.phase)
            self._add(key, self.phase, size)
        if self.total > self.peaks.get(self.phase, (0,))[0]:
            self.peaks[self.phase] = self.total, self.made.copy()

    def _add(self, key: int, phase: str, size: int) -> None:
        self._sizes[key] = size
        self.total += size
        self.made[phase] += size

    def _free(self, key: int, phase: str) -> None:
        size = self._sizes.pop(key)
        self.total -= size
        self.made[phase] -= size


class Task(pl.LightningModule):
    """A classifier of pictures that tells the counter which phase of a step it is in."""

    def __init__(self, network: dict[str, int], live: Live):
        super().__init__()
        self.sizes, self.live, self.computed_in = network, live, ""
        self.network: Any = None

    def configure_model(self) -> None:
        if self.network is None:
            torch.manual_seed(0)
            self.network = ViT(10, **self.sizes)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.live.phase = "forward"
        logits = self.network(batch[0])
        self.computed_in = str(logits.dtype).removeprefix("torch.")
        loss = nn.functional.cross_entropy(logits.float(), batch[1])
        self.live.phase = "backward"
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.live.phase = "optimizer"

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Counts(pl.Callback):
    """Leaves in `found` what is held after the step number STEP, and its peaks."""

    def __init__(self, live: Live):
        self.live = live
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.live.peaks.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.live.phase = "between"
        if batch_idx != STEP:
            return
        peaks = self.live.peaks
        forward, made = peaks["forward"]
        numbers = sum(getattr(p, "ds_numel", p.numel()) for p in pl_module.parameters())
        self.found = {
            "computed in": pl_module.computed_in,
            "numbers": numbers,
            **held(pl_module.network, trainer.optimizers[0]),
            "forward": made["forward"],
            "peak": max(forward, peaks["backward"][0]),
            "peak of the optimizer": peaks["optimizer"][0],
        }


def held(network: nn.Module, optimizer: Any) -> dict[str, int]:
    """Return the bytes in this process after a step; shared memory counts once, under the first of these names:
    parameters, the optimizer's own copy of weights, its state, gradients, buckets of DeepSpeed."""
    zero, optimizer = optimizer, getattr(optimizer, "optimizer", optimizer)
    parameters = list(network.parameters())
    kept = [value for state in optimizer.state.values() for value in state.values()]
    buckets = [bucket.buffer for bucket in getattr(zero, "ipg_buckets", {}).values()]
    names: dict[str, Iterable[Any]] = {
        "parameters": [*parameters, *(p.ds_tensor for p in parameters if hasattr(p, "ds_tensor"))],
        "own weights": list(optimizer.state),
        "state": kept,
        "gradients": [*(p.grad for p in parameters), getattr(zero, "grad_partitions_flat_buffer", None)],
        "buckets": [*buckets] if zero is not optimizer else [],
    }
    seen: set[int] = set()
    return {name: sum(_new_bytes(tensor, seen) for tensor in tensors) for name, tensors in names.items()}


def _new_bytes(tensor: Any, seen: set[int]) -> int:
    """Return the bytes of the memory behind a tensor; 0 if it was counted, or there is no tensor."""
    if isinstance(tensor, list):
        return sum(_new_bytes(each, seen) for each in tensor)
    if not isinstance(tensor, Tensor):
        return 0
    storage = tensor.untyped_storage()
    if not storage.nbytes() or storage.data_ptr() in seen:
        return 0
    seen.add(storage.data_ptr())
    return storage.nbytes()


def count(engine: str, precision: str, network: dict[str, int], batch: int) -> dict[str, Any]:
    """Train in this process, and return the callback's result."""
    live = Live()
    counts = Counts(live)
    size = network["image_size"]
    samples = torch.randn(batch * (STEP + 1), 3, size, size), torch.randint(0, 10, (batch * (STEP + 1),))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples), batch)
    with live:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=_strategy(engine),
            precision=precision,  # type: ignore[arg-type]
            max_epochs=1,
            logger=False,
            callbacks=[counts],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Task(network, live), loader)
    return counts.found


def _strategy(engine: str) -> Any:
    word, _, sizes = engine.partition(", ")
    if word == "null":
        return "auto"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deeplightning.engine.zero import DeepSpeed

    config = {"zero_optimization": _LARGE} if sizes else {}
    return DeepSpeed(stage=int(word[-1]), config=config)


HEAD = ["engine", "computed in", "parameters", "own weights", "state", "gradients", "buckets", "made in forward"]
HEAD += ["peak of forward and backward", "peak of the optimizer"]


def row(engine: str, found: dict[str, Any]) -> list[str]:
    """Return a line of the table, in MiB."""
    names = ("parameters", "own weights", "state", "gradients", "buckets", "forward", "peak", "peak of the optimizer")
    word, *more = engine.split(", ")
    return [
        ", ".join([f"`{word}`", *more]),
        found["computed in"],
        *(f"{found[name] / 2**20:,.1f}" for name in names),
    ]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--precision", default="bf16-mixed", choices=["32-true", "bf16-mixed", "bf16-true"])
    for name, value in (
        ("depth", 6),
        ("width", 512),
        ("heads", 8),
        ("batch", 8),
        ("image-size", 64),
        ("patch-size", 8),
    ):
        words.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    words.add_argument("--engine", choices=ENGINES, help="count this one, in this process, and print JSON")
    options = words.parse_args()
    network = {name: getattr(options, name) for name in ("depth", "width", "heads", "image_size", "patch_size")}
    if options.engine is not None:
        with contextlib.redirect_stdout(sys.stderr):
            found = count(options.engine, options.precision, network, options.batch)
        print(json.dumps(found))
        return
    rows = []
    for engine in ENGINES:
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            sys.exit(f"{engine} ended with {ended.returncode}:\n{ended.stderr}")
        found = json.loads(ended.stdout.splitlines()[-1])
        rows.append(row(engine, found))
        print(f"{engine}: {found}", file=sys.stderr, flush=True)
    print(f"Python {platform.python_version()}, torch {torch.__version__}; {found['numbers']:,} parameters; MiB\n")
    lines = [HEAD, ["---", "---", *["---:"] * (len(HEAD) - 2)], *rows]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))


if __name__ == "__main__":
    main()
