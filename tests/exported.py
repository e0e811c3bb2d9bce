"""Build a small task of each kind that can be exported, and a run folder with its bundle."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from deeplightning.array_spec import ArraySpec
from deeplightning.export.bundle import export
from deeplightning.image_spec import ImageSpec
from deeplightning.kinds import KINDS
from deeplightning.model.transformer import TextTransformer
from deeplightning.runfolder import RunFolder
from deeplightning.table_spec import Column, TableSpec
from deeplightning.task.networks import Probabilities
from deeplightning.text_spec import TextSpec, vocabulary

LABELS = ["low", "middle", "high"]
TEXTS = ["a fine film", "dull", "it 's not a dull film , and not a fine one either", "unheard-of"]
WORDS = TextSpec("words", vocabulary(TEXTS[:3]), limit=24, column="review")
SHOP = TableSpec((Column("age", "number", 40.0, 10.0), Column("city", "category", categories=("Bern", "Rome"))))
SIGNAL = ArraySpec((2, 12), (0.5,), (2.0,))
RUN = {"id": "abc", "folder_name": "a run", "created": "now", "versions": {}}


class Pixels(nn.Module):
    """Network from uint8 (N, 3, 6, 5) to the output of a kind of picture task."""

    def __init__(self, layers: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.layers, self.last = layers, last

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(images.float() / 255))


def task_of(kind: str, model: nn.Module | None = None) -> tuple[Any, np.ndarray]:
    """Return a task, with a small inference model of the kind or the given one, and samples as a run keeps them."""
    torch.manual_seed(0)
    random, takes, gives = np.random.default_rng(0), KINDS[kind].takes, KINDS[kind].gives
    task: Any = SimpleNamespace(kind=kind, class_names=LABELS)
    last = {"classification": nn.Softmax(1), "segmentation": nn.Softmax(1), "regression": nn.Identity()}
    end = last.get(gives, nn.Sigmoid())
    samples: np.ndarray
    if takes == "image":
        task.image_spec = ImageSpec(6, 5)
        body = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1)]
        if gives in ("classification", "multilabel", "regression"):
            body += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)]
        made: nn.Module = Pixels(nn.Sequential(*body), end)
        samples = random.integers(0, 256, (5, 3, 6, 5), dtype=np.uint8)
    elif takes == "text":
        task.text_spec, samples = WORDS, np.array(TEXTS)
        made = Probabilities(TextTransformer(3, WORDS.size, width=8, num_layers=2, num_heads=2, max_length=24))
    elif takes == "table":
        task.row_spec = SHOP
        samples = np.array([json.dumps({"age": 20 + 5 * n, "city": ("Bern", "Rome")[n % 2]}) for n in range(6)])
        made = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3), end)
    else:
        task.row_spec, samples = SIGNAL, random.normal(size=(6, 2, 12))
        convolutions = (nn.Conv1d(2, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        made = nn.Sequential(*convolutions, nn.Linear(8, 3), end)
    if gives == "multilabel":
        task.answer_details = lambda: {"thresholds": [0.5] * 3}
    network = (made if model is None else model).eval()
    task.inference_model = lambda: network
    return task, samples


def exported(path: Path, kind: str, model: nn.Module | None = None) -> tuple[Any, RunFolder]:
    """Export a task; return it and its run folder."""
    task, samples = task_of(kind, model)
    path.mkdir(parents=True, exist_ok=True)
    export(task, RunFolder(path), samples, RUN)
    return task, RunFolder(path)
