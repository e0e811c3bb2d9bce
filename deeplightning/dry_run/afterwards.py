"""Try what follows training: save and load a checkpoint, and run a new task on a batch as the export does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_fabric.plugins import CheckpointIO
from pytorch_lightning.utilities import move_data_to_device

from deeplightning.config.target import build
from deeplightning.dry_run.attempt import Attempt
from deeplightning.kinds import KINDS

_WEIGHTS = ("state_dict", "optimizer_states")
"""Of a checkpoint; they are large, and are copied where they are loaded."""


class InMemory(CheckpointIO):
    """Keep the last checkpoint in memory, and load it as from a file: what the user has added is on the CPU.

    Attributes:
        kept: the checkpoint; every rank has one, though only the first is asked to save it.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.kept = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return {
            name: value if name in _WEIGHTS else move_data_to_device(value, torch.device("cpu"))
            for name, value in self.kept.items()
        }

    def remove_checkpoint(self, path: Any) -> None:
        self.kept = {}


def save(attempt: Attempt) -> str:
    """Save a checkpoint as each epoch of a run does.

    Returns:
        Its name.
    """
    attempt.stage = "while a checkpoint is saved"
    path = str(attempt.folder / "last.ckpt")
    attempt.trainer.save_checkpoint(path)
    return path


def answer(attempt: Attempt) -> None:
    """Have a new task answer one batch on the CPU, as the export of a run's best weights does first."""
    task, batch = attempt.task, attempt.batch
    kind = KINDS.get(str(getattr(task, "kind", "")))
    specs = [name for name in ("image_spec", "text_spec", "row_spec") if getattr(task, name, None) is not None]
    key = {"image": "image", "text": "tokens"}.get(kind.takes if kind else "", "input")
    if kind is None or not specs or not hasattr(task, "inference_model") or not isinstance(batch, Mapping):
        return
    if not isinstance(batch.get(key), torch.Tensor) or attempt.trainer.global_rank != 0:
        return
    attempt.stage = "in the export"
    checkpoint = attempt.trainer.strategy.checkpoint_io.load_checkpoint("")
    fresh = attempt.task = build(attempt.cfg.model.module, attempt.cfg)
    fresh.on_load_checkpoint(checkpoint)
    fresh.configure_model()
    model = fresh.eval().inference_model()
    with torch.inference_mode():
        model(batch[key].cpu())
