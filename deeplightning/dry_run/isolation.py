"""Isolate a dry run from the machine: one CPU process, no network, no messages, no permanent files."""

from __future__ import annotations

import contextlib
import copy
import logging
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import CheckpointIO
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities import move_data_to_device

from deeplightning.config.schema import Config, targets_of


class _NetworkError(OSError):
    """Raised if code uses the network."""


WORKER_SETTINGS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Loader settings that need worker processes, which a dry run does not have."""


def on_one_cpu(cfg: Config) -> Config:
    """Return a copy of a config that runs in this process on the CPU."""
    mine = copy.deepcopy(cfg)
    engine = mine.engine
    if engine.gpus is not None:  # half precision on CPU is bf16, see `config.machine.resolve_engine`
        words = {16: "bf16-mixed", "16-mixed": "bf16-mixed", "16-true": "bf16-true"}
        engine.precision = words.get(engine.precision, engine.precision)  # type: ignore[arg-type, assignment]
    engine.gpus, engine.backend, engine.params, engine.profiler = None, None, {}, None
    engine.processes = engine.num_nodes = 1
    engine.compile = engine.sync_batchnorm = engine.deterministic = engine.keep_memory = False
    engine.threads = None
    mine.data.num_workers = 0
    for name in WORKER_SETTINGS:
        mine.data.loader.pop(name, None)
    mine.model.init_from = mine.train.resume_ckpt = None
    return mine


def drop_weights(cfg: Config) -> list[str]:
    """Replace weights that networks would download with random ones.

    Returns:
        The keys of the params that were changed.
    """
    changed = []
    for target in targets_of(cfg.model.network):
        for name, value in target.params.items():
            if (name.startswith("weights") or name == "pretrained") and value not in (None, False):
                target.params[name] = False if value is True else None
                changed.append(f"{target.name}.params.{name}")
    return changed


class DiscardingLogger(DummyLogger):
    """Discards all metrics; files that callbacks write go to a temporary folder."""

    def __init__(self, folder: Path):
        super().__init__()
        self.artifact_folder = folder

    @property
    def save_dir(self) -> str:
        return str(self.artifact_folder)

    log_dir = save_dir


_WEIGHTS = ("state_dict", "optimizer_states")
"""Checkpoint keys with large tensors, which are copied anyway when they are loaded."""


class InMemory(CheckpointIO):
    """Keeps the last checkpoint in memory and loads it as if from a file: values that the user added are on the CPU.

    Attributes:
        kept: the checkpoint. Every rank has one, although Lightning saves on the first only.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.kept = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        cpu = torch.device("cpu")
        return {n: v if n in _WEIGHTS else move_data_to_device(v, cpu) for n, v in self.kept.items()}

    def remove_checkpoint(self, path: Any) -> None:
        self.kept = {}


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Silence warnings and messages of Lightning, and redirect stdout to stderr, so that only the result is printed."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        # torch only warns if it broadcasts labels (B,) and outputs (B, 1) to (B, B), which gives a wrong loss.
        warnings.filterwarnings("error", message="Using a target size")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Raise `_NetworkError` in all code that resolves a host name."""
    original = socket.getaddrinfo

    def refuse(*_: object, **__: object) -> Any:
        raise _NetworkError("a dry run uses no network")

    socket.getaddrinfo = refuse
    try:
        yield
    finally:
        socket.getaddrinfo = original


def wants_network(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _NetworkError) or isinstance(getattr(error, "reason", None), _NetworkError):
            return True
        error = error.__cause__ or error.__context__
    return False
