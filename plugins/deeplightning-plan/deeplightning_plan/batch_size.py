"""`deeplightning batch CONFIG`: the largest batch that fits into memory, and the samples per second of each size.

Sizes are powers of two, up or down from the config's, then bisected. Each is tried in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import sized_len

from deeplightning.batches import samples_in
from deeplightning.cli.exit_codes import report
from deeplightning.config.examine import load_config
from deeplightning.config.machine import batch_size
from deeplightning.faults import ConfigError, RunError
from deeplightning.process.failure import describe_exit
from deeplightning.sweep.worker import fork
from deeplightning.words import lacks_memory
from deeplightning_plan.short_training import ONE_PROCESS, one_gpu, train_until_stopped

WARM_UP_BATCHES = 2  # not timed: the first one allocates what later ones reuse, such as the optimizer's state
TIMED_SECONDS = 0.5  # minimum duration of the timed batches
MAX_BATCH = 2**20  # the largest batch to try if the size of the training set is unknown
RESOLUTION = 8  # bisection ends when its bounds differ by no more than the size divided by this
EQUAL_SPEED_SHARE = 0.95  # a batch with this share of the best samples per second counts as equally fast

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(text: str, option: str) -> int:
    """Read a size such as `8GB`, `500 MiB` or `1000000` in bytes.

    Raises:
        ConfigError: the text is not a size, or is 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if not size:
        raise ConfigError(f"{option} must be a size such as 8GB or 500MiB, not {text!r}")
    return size


class _Clock(pl.Callback):
    """Time a number of batches, and more until `TIMED_SECONDS` have passed."""

    def __init__(self, batches: int):
        self.batches = batches
        self.samples = self.done = 0
        self._started = self.seconds = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, _: int
    ) -> None:
        self.done += 1
        if self.done > WARM_UP_BATCHES:
            self.samples += samples_in(batch)
        enough = self.done >= WARM_UP_BATCHES + self.batches and time.perf_counter() - self._started >= TIMED_SECONDS
        if self.done == WARM_UP_BATCHES or enough:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)
            self.seconds, self._started = time.perf_counter() - self._started, time.perf_counter()
        trainer.should_stop = enough


def search(
    config: Path,
    overrides: Sequence[str],
    memory: int | None,
    most: int | None,
    batches: int,
    redact: Callable[[str], str],
) -> Iterator[str]:
    """Find the largest batch for one process.

    Args:
        memory: limit in bytes of the GPU's or main memory; None: all of the GPU's.
        most: the largest batch to try; None: the training set.
        batches: number of timed batches.

    Yields:
        Output lines while sizes are tried; the last is the override with the largest batch.

    Raises:
        ConfigError: a run on the CPU has no memory limit.
        RunError: not even one sample fits.
    """
    requested = load_config(config, list(overrides))
    on_gpu = requested.engine.gpus is not None
    if memory is None and not on_gpu:
        raise ConfigError(
            "on the CPU the largest batch depends on the memory limit, because the system swaps before memory runs "
            "out: give a limit, for example --memory 8GB"
        )
    fixed = [*ONE_PROCESS, *one_gpu(requested)]
    if requested.engine.backend is not None and requested.engine.backend != "ddp":
        yield f"note       one process is measured, without {requested.engine.backend}: it holds all of the weights"
    speeds: dict[int, float] = {}
    known = {"most": most or MAX_BATCH}

    def fits(size: int) -> tuple[bool, str]:
        cfg = load_config(config, [*overrides, *fixed, f"data.batch_size={size}"])

        def measure() -> dict[str, object]:
            if isinstance(cfg.engine.gpus, list) and memory is not None:
                (gpu,) = cfg.engine.gpus
                torch.cuda.set_per_process_memory_fraction(min(1.0, memory / torch.cuda.mem_get_info(gpu)[1]), gpu)
            clock = _Clock(batches)
            trainer = train_until_stopped(cfg, clock)
            device = trainer.strategy.root_device
            held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
            dataset: object = getattr(trainer.train_dataloader, "dataset", None)
            return {"speed": clock.samples / clock.seconds, "memory": held, "samples": sized_len(dataset)}

        result, peak = _in_child(measure, None if on_gpu else memory, redact)
        if result is None:
            return False, f"{size:>10,}  does not fit"
        if result["samples"] is not None:
            known["most"] = min(known["most"], max(1, result["samples"]))
        speeds[size] = result["speed"]
        held = result["memory"] if result["memory"] is not None else peak
        return True, f"{size:>10,}  {result['speed']:>12,.0f}  {held / 1e9:>8.2f} GB"

    yield f"{'batch_size':>10}  {'samples/s':>12}  {'memory':>11}"
    size = 0
    too_large: int | None = None
    tried = 2 ** (min(batch_size(requested), known["most"]).bit_length() - 1)
    while True:
        fitted, line = fits(tried)
        yield line
        size, too_large = (tried, too_large) if fitted else (size, tried)
        if not size and tried == 1:
            limit = f" of {memory / 1e9:g} GB" if memory is not None else ""
            raise RunError(
                f"not even a batch of one sample fits into the memory{limit}; engine.precision=bf16, "
                "engine.activation_checkpointing or a smaller network need less"
            )
        if not size:
            tried //= 2
        elif too_large is None and size < known["most"]:
            tried = min(2 * size, known["most"])
        elif too_large is not None and too_large - size > max(1, size // RESOLUTION):
            tried = (size + too_large) // 2
        else:
            break
    if too_large is None:
        what = "what --max allows" if most is not None and known["most"] == most else "the whole training set"
        yield f"largest    {size}: {what}"
    else:
        yield f"largest    {size}; {too_large} does not fit"
    fastest = min(one for one, speed in speeds.items() if speed >= EQUAL_SPEED_SHARE * max(speeds.values()))
    yield f"fastest    {fastest}: {speeds[fastest]:,.0f} samples/s; larger ones are no more than 5 % faster"
    yield f"data.batch_size={size}"


def _in_child(
    work: Callable[[], dict[str, object]], limit: int | None, redact: Callable[[str], str]
) -> tuple[dict[str, Any] | None, int]:
    """Call a function in a forked process, which is killed when it exceeds a memory limit.

    Args:
        work: returns a value that JSON can represent; its stdout goes to stderr.
        limit: bytes of main memory; None: no limit.
        redact: removes secrets from a message.

    Returns:
        The function's result, or None if the child ran out of memory; and its peak of main memory, in bytes.

    Raises:
        SystemExit: the child failed for a reason other than memory, and has reported it.
        RunError: it was killed, without a message.
    """
    reading, writing = os.pipe()

    def run_child() -> int:
        os.dup2(2, 1)  # stdout is for the result
        try:
            result: object = work()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not lacks_memory(cause):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                return report(error, redact)
            result = None
        os.write(writing, json.dumps(result).encode())
        return 0

    child = fork(run_child)
    os.close(writing)
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        with contextlib.suppress(psutil.Error):
            if limit is not None and psutil.Process(child).memory_info().rss > limit:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    peak, code = ended[2].ru_maxrss * (1 if sys.platform == "darwin" else 1024), os.waitstatus_to_exitcode(ended[1])
    if code == -signal.SIGKILL or (limit is not None and peak > limit):  # the system may have killed it
        return None, peak
    if code < 0:
        raise RunError(describe_exit(code))
    if code > 0:
        sys.exit(code)
    with os.fdopen(reading, "rb") as file:
        return json.loads(file.read()), peak
