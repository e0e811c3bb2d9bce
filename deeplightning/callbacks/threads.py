"""Measure on the first batches whether one thread or all are faster (`engine.threads: auto`); Lightning does not."""

import logging
import statistics
import time

import pytorch_lightning as pl
import torch

log = logging.getLogger("deeplightning")

BATCHES = 7  # that each number of threads is given


class MeasuredThreads(pl.Callback):
    """Give the first batches of a training to one thread and to all in turn, and the others to the faster.

    Beside busy neighbours two threads may take half as long again as one, waiting for each other; alone they are faster
    where there is much to compute. Numbers of threads round differently: a run whose threads are measured does not
    repeat bit for bit.
    """

    def __init__(self) -> None:
        self._taken: dict[int, list[float]] = {}
        self._began = 0.0

    def on_train_start(self, *_: object) -> None:
        available = torch.get_num_threads()
        self._taken = {1: [], available: []} if available > 1 else {}

    def on_train_batch_start(self, *_: object) -> None:
        if self._taken:
            torch.set_num_threads(min(self._taken, key=lambda threads: len(self._taken[threads])))
            self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if not self._taken:
            return
        self._taken[torch.get_num_threads()].append(time.perf_counter() - self._began)
        if min(map(len, self._taken.values())) < BATCHES:
            return
        # The first of each warms up.
        found = {threads: statistics.median(seconds[1:]) for threads, seconds in self._taken.items()}
        self._taken = {}
        best = min(found, key=found.__getitem__)
        torch.set_num_threads(best)
        times = ", ".join(f"{1000 * seconds:.1f} ms a batch with {threads}" for threads, seconds in found.items())
        log.info("threads    %d (%s)", best, times)
        for logger in trainer.loggers:
            if hasattr(logger, "log_tags"):
                logger.log_tags({"threads": best})
