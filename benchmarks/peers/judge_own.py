"""Our validation beside a bare loop of forward passes over the same pictures, in turn in one process; for
benchmarks/train.py.

    judge_own.py CONFIG

trains by a config, and prints the CPU seconds of both at each epoch but the first, as JSON.
"""

import json
import sys
import time

import numpy as np
import pytorch_lightning as pl
import torch
from train_own import Pictures

from deeplightning.config.examine import load_config
from deeplightning.data.datasets import Samples
from deeplightning.run.assemble import init_module, init_trainer


class Judged(Pictures):
    """One batch to learn from, and noise of 28x28 to validate with.

    Args:
        count: samples of the validation.
    """

    def __init__(self, cfg, count: int):
        super().__init__(cfg, size=28, mode="L", classes=10)
        self.count = count

    def read(self) -> dict[str, Samples]:
        random = np.random.RandomState(0)
        images = random.randint(0, 255, (self.count, 28, 28), dtype=np.uint8)
        labels = random.randint(0, 10, self.count)
        few = self.cfg.data.batch_size
        return {"train": Samples(images[:few], labels[:few]), "val": Samples(images, labels)}


class Timed(pl.Callback):
    """Times each validation, and after it the bare loop."""

    def __init__(self) -> None:
        self.turns: list[dict[str, float]] = []

    def on_validation_start(self, trainer, task) -> None:
        self.begun = time.process_time()

    def on_validation_end(self, trainer, task) -> None:
        ours = time.process_time() - self.begun
        pictures, size = trainer.val_dataloaders.dataset.large["image"], task.cfg.data.batch_size
        begun = time.process_time()
        with torch.inference_mode():
            for first in range(0, len(pictures), size):
                task.network(task.normalise(pictures[first : first + size]))
        self.turns.append({"ours": ours, "bare": time.process_time() - begun})


def main() -> None:
    torch.set_num_threads(1)
    cfg = load_config(sys.argv[1])
    data, task, trainer, timed = init_module(cfg, "data"), init_module(cfg, "model"), init_trainer(cfg), Timed()
    trainer.callbacks.append(timed)
    trainer.fit(task, data)
    print(json.dumps(timed.turns[1:]))


if __name__ == "__main__":
    main()
