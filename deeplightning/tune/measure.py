"""A short training in a process of its own: nothing is recorded or saved, and whatever ends it ends that process alone.

What it finds comes back as JSON. Memory is limited from outside: a process that takes more is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import LightningEnvironment

from deeplightning.callbacks.console import one_line_warnings, to_terminal
from deeplightning.callbacks.gradients import AdaptiveClip
from deeplightning.callbacks.recompute import Recompute
from deeplightning.callbacks.sample_weights import SampleWeights
from deeplightning.callbacks.start import StartWeights
from deeplightning.callbacks.steps import LogSteps, Seeds
from deeplightning.config.schema import Config
from deeplightning.engine import compute
from deeplightning.engine.plan import clip_arguments, trainer_arguments
from deeplightning.faults import CheckpointError, ConfigError, RunError, SetupError, UserError
from deeplightning.private.python import forget_exit_functions
from deeplightning.process.failure import exit_code_of, reason_of
from deeplightning.process.terminal import say
from deeplightning.run.assemble import init_module
from deeplightning.tune.worker import end_with
from deeplightning.words import lacks_memory

ALONE = [
    *("stages=[train]", "engine.backend=null", "engine.params={}", "engine.processes=1", "engine.num_nodes=1"),
    *("engine.launcher=null", "engine.max_restarts=0", "engine.profiler=null", "engine.sync_batchnorm=false"),
    *("train.callbacks=[]", "train.resume_ckpt=null", "train.early_stop=null", "train.limit_batches=null"),
    *("train.overfit=null", "train.fast=false", "train.checkpoint.monitor=null", "train.val_every_n_epoch=1"),
    *("model.scheduler=null", "test.ckpt=null", "tune=null", "logger.pictures=null", "logger.histograms=null"),
]
"""Overrides with which one process trains at a constant rate, and does nothing beside it."""

LOOK = 0.02  # seconds between two looks at a child's memory
_ERRORS: dict[int, type[UserError]] = {2: ConfigError, 3: SetupError, 4: CheckpointError, 5: RunError}


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Attributes:
        found: what it sent; None: it had not enough memory.
        peak: bytes of the main memory that it held at most.
    """

    found: dict[str, Any] | None
    peak: int


def one_gpu(cfg: Config) -> list[str]:
    """The override that leaves a run on GPUs the first of them; none where it runs on the CPU."""
    gpus = cfg.engine.gpus
    first = gpus[0] if isinstance(gpus, list) else 0
    return [] if gpus is None else [f"engine.gpus=[{first}]"]


def trained(cfg: Config, *callbacks: pl.Callback) -> pl.Trainer:
    """Trains a config's task with these callbacks, until one of them sets `trainer.should_stop`."""
    assert cfg.seed is not None, "load_config draws one"
    to_terminal(cfg)
    one_line_warnings()
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # one process measures
    logging.getLogger("deeplightning").setLevel(logging.WARNING)
    data, task = init_module(cfg, "data"), init_module(cfg, "model")
    compute.prepare(cfg.engine)
    ours: list[pl.Callback] = [Seeds(cfg.seed), LogSteps(1), SampleWeights()]
    if cfg.model.init_from is not None:
        ours.append(StartWeights(cfg.model.init_from, cfg.logger.params.get("tracking_uri")))
    if cfg.engine.activation_checkpointing:
        ours.append(Recompute(cfg.engine.activation_checkpointing))
    clip = cfg.train.gradient_clip
    if clip is not None and clip.algorithm == "agc":
        ours.append(AdaptiveClip(clip.value))
    trainer = pl.Trainer(
        **trainer_arguments(cfg),
        max_epochs=-1,
        accumulate_grad_batches=cfg.train.accumulator_factor,
        **clip_arguments(cfg),
        limit_val_batches=0,
        callbacks=[*ours, *callbacks],
        plugins=[LightningEnvironment()],
        logger=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, data)
    return trainer


def in_child(work: Callable[[], dict[str, object]], limit: int | None, redact: Callable[[str], str]) -> Outcome:
    """Calls a function in a forked process, which is killed when it holds more main memory than it may.

    Args:
        work: gives what goes into JSON.
        limit: bytes of main memory; None: no limit.
        redact: takes secrets out of a message.

    Raises:
        UserError: what ended it, for other reasons than memory.
        SystemExit: a bug of ours ended it; its traceback has been printed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="deeplightning-measure-") as folder:
        file = Path(folder) / "found.json"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries wait, and hold nothing
            child = os.fork()
        if child == 0:
            _be_child(work, file, parent, redact)
        peak = 0
        try:
            peak, code = _watch(child, limit)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
            raise
        content = json.loads(file.read_text()) if file.is_file() else {}
    if limit is not None and peak > limit:
        return Outcome(None, peak)
    if "found" in content:
        return Outcome(content["found"], peak)
    if content.get("lacks_memory") or code == -signal.SIGKILL:  # the system kills as well
        return Outcome(None, peak)
    if (kind := _ERRORS.get(content.get("code", 1))) is not None:
        raise kind(content["message"])
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if not content:
        raise RunError(f"the process that measured ended with exit code {code} without a message")
    sys.exit(1)


def _watch(child: int, limit: int | None) -> tuple[int, int]:
    """Waits for a child; the most memory that it held, in bytes, and its exit code."""
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            scale = 1 if sys.platform == "darwin" else 1024
            return usage.ru_maxrss * scale, os.waitstatus_to_exitcode(status)
        with contextlib.suppress(psutil.Error):
            if limit is not None and psutil.Process(child).memory_info().rss > limit:
                os.kill(child, signal.SIGKILL)
        time.sleep(LOOK)


def _be_child(work: Callable[[], dict[str, object]], file: Path, parent: int, redact: Callable[[str], str]) -> None:
    """The whole life of a forked process."""
    code, content = 1, dict[str, Any]()
    try:
        forget_exit_functions()  # what is registered is the parent's to do
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # stdout is for the result
        try:
            content, code = {"found": work()}, 0
        except KeyboardInterrupt:
            code = 130
        except BaseException as error:
            content = _told(error, redact)
        if content:
            file.write_text(json.dumps(content))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _told(error: BaseException, redact: Callable[[str], str]) -> dict[str, object]:
    """What a child sends of an error."""
    cause: BaseException | None = error
    while cause is not None:
        if lacks_memory(cause):
            return {"lacks_memory": True}
        cause = cause.__cause__ or cause.__context__
    code = getattr(error, "exit_code", None)
    if code not in _ERRORS:
        say(redact("".join(traceback.format_exception(error))), err=True)
        return {"code": exit_code_of(error), "message": redact(reason_of(error))}
    notes = [str(fault) for fault in error.faults] if isinstance(error, UserError) else [str(error)]
    return {"code": code, "message": redact("; ".join(notes))}
