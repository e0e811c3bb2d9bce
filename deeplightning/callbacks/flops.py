"""Measure operations, memory by use and time of training steps: Lightning's ThroughputMonitor has to be given the
number of operations, and its DeviceStatsMonitor logs totals alone."""

import json
import logging
import re
import statistics
from time import perf_counter

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.utils.flop_counter import FlopCounterMode

from deeplightning.callbacks.record import Record
from deeplightning.callbacks.watch import samples_in
from deeplightning.engine.compute import footprint
from deeplightning.runfolder import write_whole

log = logging.getLogger("deeplightning")

TIMED_STEPS = 200
PEAKS = {
    r"H200|H100 80GB HBM3|H100 SXM": (989.4, 494.7, 66.9),
    r"H100 PCIe": (756.0, 378.0, 51.2),
    r"A100": (312.0, 156.0, 19.5),
    r"L40S": (362.0, 183.0, 91.6),
    r"A10": (125.0, 62.5, 31.2),
    r"L4": (121.0, 60.0, 30.3),
    r"V100": (125.0, 15.7, 15.7),
    r"T4": (65.0, 8.1, 8.1),
}
"""By a pattern in the name of a GPU, its peak in 10^12 operations per second without sparsity: in 16 bits, in 32 bits
with TF32, and in plain 32 bits. From NVIDIA's data sheets. V100 and T4 have no TF32; their 16 bits are float16."""


class _Counted(Callback):
    """Count the matrix products, convolutions and attentions of the first batch, forward and backward."""

    def __init__(self) -> None:
        self._counter: FlopCounterMode | None = None
        self._is_counted = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if not self._is_counted:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()

    def _counts(self) -> FlopCounterMode | None:
        """Stop counting; return the counter at the end of the first batch."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            self._is_counted = True
        return counter

    def on_exception(self, *_: object) -> None:
        self._counts()


class Flops(_Counted):
    """Write the operations of the first batch to `flops.txt` in the run's folder: a row for each module, for the first
    process' share of the samples."""

    def __init__(self, record: Record):
        super().__init__()
        self.record = record

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_counted |= not trainer.is_global_zero

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if (counter := self._counts()) is None:
            return
        total, path = counter.get_total_flops(), self.record.folder.flops
        # Names begin with the class of the module that was called first: the task, or its network.
        tops = {type(module).__name__: f"{name}." for name, module in pl_module.named_children()}
        tops[type(pl_module).__name__] = ""
        parts = ((name.partition("."), sum(found.values())) for name, found in counter.get_flop_counts().items())
        sums = {f"{tops.get(top, '')}{rest}".rstrip("."): count for (top, _, rest), count in parts}
        # It lays some of the backward pass to metrics, too (torch 2.15): to modules that have no parameters.
        learning = [n for n, m in pl_module.named_modules() if n and next(m.parameters(), None) is not None]
        rows = [f"{sums[name]:>20,}  {name}" for name in learning if name in sums]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n".join([*rows, f"{total:>20,}  operations in all"]) + "\n")
        log.info("%-10s %s operations in a batch, by module in %s", "FLOPs", f"{total:,}", path.name)


def peak(device: str, precision: str, tf32: bool) -> float | None:
    """Return the peak of a GPU in operations per second; None: it is not known.

    Args:
        device: its name, as CUDA has it.
        precision: as of Lightning, such as `bf16-mixed`.
        tf32: whether products of float32 may use TF32.
    """
    found = next((row for name, row in PEAKS.items() if re.search(rf"(?<![A-Z0-9])({name})(?![0-9A-Z])", device)), None)
    if found is None or precision.startswith("64"):
        return None
    is_half = precision.startswith(("16", "bf16", "transformer-engine"))
    return 1e12 * found[0 if is_half else 1 if tf32 else 2]


class Utilization(_Counted):
    """Log at the end of each epoch `flops_per_second` of the first process, and `mfu` (model FLOPs utilisation), its
    share of the peak of the GPU, where that is known.

    The operations are those of the first batch, for each sample; operations that activation checkpointing repeats count
    twice. The time is that of training without validations and without the first batch, which is slow to count. Source
    of the measure: Chowdhery et al., PaLM, 2022, appendix B.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_sample = 0.0
        self._samples = 0
        self._seconds = 0.0
        self._since: float | None = None  # None: the clock stands

    def _now(self, module: LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        return perf_counter()

    def _pause(self, module: LightningModule) -> None:
        if self._since is not None:
            self._seconds += self._now(module) - self._since
            self._since = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._samples, self._seconds = 0, 0.0
        self._since = self._now(pl_module) if self._is_counted else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, *_: object
    ) -> None:
        if (counter := self._counts()) is None:
            self._samples += samples_in(batch)
            return
        self._of_sample = counter.get_total_flops() / (samples_in(batch) or 1)
        if self._of_sample == 0:
            log.warning("FLOPs      the first batch has none that can be counted; compiled networks hide them")
        self._since = self._now(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and self._is_counted:
            self._since = self._now(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(pl_module)
        if not self._of_sample or not self._samples or self._seconds <= 0:
            return
        speed = self._of_sample * self._samples / self._seconds
        found = {"flops_per_second": speed}
        if pl_module.device.type == "cuda":
            name = torch.cuda.get_device_name(pl_module.device)
            best = peak(name, str(trainer.precision), torch.get_float32_matmul_precision() != "highest")
            if best is not None:
                found["mfu"] = speed / best
        pl_module.log_dict(found, rank_zero_only=True)


class Memory(Callback):
    """Write bytes of the first process by use and the time of its steps to `memory.json`, which `deeplightning plan
    --against RUN` compares with the plan.

    The time is that from the start of a batch to that of the next, the median of the first 200. A GPU that computes
    behind the CPU is no faster in the long run.
    """

    after = ("Record",)

    def __init__(self, record: Record):
        self.record = record
        self._times: list[float] = []
        self._last: float | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = None

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        if len(self._times) >= TIMED_STEPS:
            return
        now = perf_counter()
        if self._last is not None:
            self._times.append(now - self._last)
        self._last = now

    def on_validation_end(self, *_: object) -> None:
        self._last = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not self.record.opened:
            return
        found: dict[str, object] = {"processes": trainer.world_size, **footprint(pl_module, trainer.optimizers)}
        if pl_module.device.type == "cuda":
            found["device"] = torch.cuda.get_device_name(pl_module.device)
            found["peak"] = torch.cuda.max_memory_allocated(pl_module.device)
        if self._times:
            found["seconds"] = statistics.median(self._times)  # of a batch
        path = self.record.folder.memory
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(found, indent=2) + "\n")
        except OSError as error:  # all is trained: a run that is resumed would not come here again
            log.warning("memory     %s is not written: %s", path.name, error)
