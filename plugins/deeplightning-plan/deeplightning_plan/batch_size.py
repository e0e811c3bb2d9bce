"""`deeplightning batch CONFIG`: the largest batch that fits into memory, and how many samples a second each size sees.

Sizes are powers of two from that of the config on, up or down, then bisected. Each is tried in a process of its own.
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
from deeplightning.process.failure import how_it_ended
from deeplightning.sweep.worker import fork
from deeplightning.words import lacks_memory
from deeplightning_plan.short_training import ALONE, one_gpu, trained

WARM_UP_BATCHES = 2  # not timed: the first one makes what the later ones reuse, the optimizer's state among it
LEAST_SECONDS = 0.5  # to time
MOST_SAMPLES = 2**20  # of the largest batch to try if the size of the training set is not known
FINE = 8  # bisection ends when what fits and what does not are nearer than this part of the size
NEARLY = 0.95  # a smaller batch is as fast as the fastest when it sees this share of its samples a second

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def bytes_of(text: str, option: str) -> int:
    """Read a size such as `8GB`, `500 MiB` or `1000000` in bytes.

    Raises:
        ConfigError: the option has none, or 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    size = int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if not size:
        raise ConfigError(f"{option} must be a size such as 8GB or 500MiB, not {text!r}")
    return size


class _Clock(pl.Callback):
    """Time batches: so many, and more where they take less than `LEAST_SECONDS`."""

    def __init__(self, batches: int):
        self.batches = batches
        self.samples = self.done = 0
        self._began = self.seconds = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, _: int
    ) -> None:
        self.done += 1
        if self.done > WARM_UP_BATCHES:
            self.samples += samples_in(batch)
        enough = self.done >= WARM_UP_BATCHES + self.batches and time.perf_counter() - self._began >= LEAST_SECONDS
        if self.done == WARM_UP_BATCHES or enough:
            if pl_module.device.type == "cuda":
                torch.cuda.synchronize(pl_module.device)
            self.seconds, self._began = time.perf_counter() - self._began, time.perf_counter()
        trainer.should_stop = enough


def search(
    config: Path,
    overrides: Sequence[str],
    memory: int | None,
    most: int | None,
    batches: int,
    redact: Callable[[str], str],
) -> Iterator[str]:
    """Find the largest batch of one process.

    Args:
        memory: bytes that a process may hold: of its GPU, or of the main memory. None: all of the GPU's.
        most: the largest batch to try; None: the training set.
        batches: how many are timed.

    Yields:
        lines for a person, as sizes are tried; the last is the override with the largest batch.

    Raises:
        ConfigError: a limit is needed and there is none.
        RunError: not even one sample fits.
    """
    asked = load_config(config, list(overrides))
    on_gpu = asked.engine.gpus is not None
    if memory is None and not on_gpu:
        raise ConfigError(
            "on the CPU the largest batch depends on the memory that it may take, and the system would swap before it "
            "says no: give a limit, for example --memory 8GB"
        )
    fixed = [*ALONE, *one_gpu(asked)]
    if asked.engine.backend is not None and asked.engine.backend != "ddp":
        yield f"note       one process is measured, without {asked.engine.backend}: it holds all of the weights itself"
    speeds: dict[int, float] = {}
    known = {"most": most or MOST_SAMPLES}

    def fits(size: int) -> tuple[bool, str]:
        cfg = load_config(config, [*overrides, *fixed, f"data.batch_size={size}"])

        def measure() -> dict[str, object]:
            if on_gpu and memory is not None:
                torch.cuda.set_per_process_memory_fraction(min(1.0, memory / torch.cuda.mem_get_info(0)[1]), 0)
            clock = _Clock(batches)
            trainer = trained(cfg, clock)
            device = trainer.strategy.root_device
            held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
            dataset: object = getattr(trainer.train_dataloader, "dataset", None)
            return {"speed": clock.samples / clock.seconds, "memory": held, "samples": sized_len(dataset)}

        found, peak = _in_child(measure, None if on_gpu else memory, redact)
        if found is None:
            return False, f"{size:>10,}  does not fit"
        if found["samples"] is not None:
            known["most"] = min(known["most"], max(1, found["samples"]))
        speeds[size] = found["speed"]
        held = found["memory"] if found["memory"] is not None else peak
        return True, f"{size:>10,}  {found['speed']:>12,.0f}  {held / 1e9:>8.2f} GB"

    yield f"{'batch_size':>10}  {'samples/s':>12}  {'memory':>11}"
    size = 0
    too_large: int | None = None
    tried = 2 ** (min(batch_size(asked), known["most"]).bit_length() - 1)
    while True:
        good, line = fits(tried)
        yield line
        size, too_large = (tried, too_large) if good else (size, tried)
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
        elif too_large is not None and too_large - size > max(1, size // FINE):
            tried = (size + too_large) // 2
        else:
            break
    if too_large is None:
        what = "what --max allows" if most is not None and known["most"] == most else "the whole training set"
        yield f"largest    {size}: {what}"
    else:
        yield f"largest    {size}; {too_large} does not fit"
    fastest = min(one for one, speed in speeds.items() if speed >= NEARLY * max(speeds.values()))
    yield f"fastest    {fastest}: {speeds[fastest]:,.0f} samples/s; larger ones are no more than 5 % faster"
    yield f"data.batch_size={size}"


def _in_child(
    work: Callable[[], dict[str, object]], limit: int | None, redact: Callable[[str], str]
) -> tuple[dict[str, Any] | None, int]:
    """Call a function in a forked process, which is killed when it exceeds a memory limit.

    Args:
        work: returns what JSON can hold; what it prints goes to stderr.
        limit: bytes of main memory; None: no limit.
        redact: removes secrets from a message.

    Returns:
        What the function returned, or None if the child ran out of memory; the most main memory that it held, in bytes.

    Raises:
        SystemExit: the child failed for another reason than memory, and has said why.
        RunError: it ended without a word.
    """
    reading, writing = os.pipe()

    def answer() -> int:
        os.dup2(2, 1)  # stdout is for the result
        try:
            found: object = work()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not lacks_memory(cause):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                return report(error, redact)
            found = None
        os.write(writing, json.dumps(found).encode())
        return 0

    child = fork(answer)
    os.close(writing)
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        with contextlib.suppress(psutil.Error):
            if limit is not None and psutil.Process(child).memory_info().rss > limit:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    peak, code = ended[2].ru_maxrss * (1 if sys.platform == "darwin" else 1024), os.waitstatus_to_exitcode(ended[1])
    if code == -signal.SIGKILL or (limit is not None and peak > limit):  # the system kills as well
        return None, peak
    if code < 0:
        raise RunError(how_it_ended(code))
    if code > 0:
        sys.exit(code)
    with os.fdopen(reading, "rb") as file:
        return json.loads(file.read()), peak
