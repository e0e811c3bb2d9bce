"""Train for some steps in one process, without a run, a checkpoint or an evaluation."""

from __future__ import annotations

import logging
import warnings

import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import LightningEnvironment

from deeplightning.callbacks.gradients import AdaptiveClip
from deeplightning.callbacks.log_lines import one_line_warnings, to_terminal
from deeplightning.callbacks.random_state import Seeds
from deeplightning.callbacks.sample_weights import SampleWeights
from deeplightning.callbacks.start import Recompute, StartWeights
from deeplightning.callbacks.steps import LogSteps
from deeplightning.config.schema import Config
from deeplightning.dry_run.one_batch import quiet_arguments
from deeplightning.engine import compute
from deeplightning.run.assemble import init_module

ONE_PROCESS = [
    *("stages=[train]", "engine.backend=null", "engine.params={}", "engine.processes=1", "engine.num_nodes=1"),
    *("engine.launcher=null", "engine.max_restarts=0", "engine.profiler=null", "engine.sync_batchnorm=false"),
    *("train.callbacks=[]", "train.resume_ckpt=null", "train.early_stop=null", "train.limit_batches=null"),
    *("train.overfit=null", "train.fast=false", "train.checkpoint.monitor=null", "train.val_every_n_epoch=1"),
    *("model.scheduler=null", "test.ckpt=null", "tune=null", "logger.pictures=null", "logger.histograms=null"),
]
"""Overrides for one process that trains at a constant rate, and does nothing else."""


def one_gpu(cfg: Config) -> list[str]:
    """Return the override that limits a run to its first GPU, or [] for a run on the CPU."""
    gpus = cfg.engine.gpus
    first = gpus[0] if isinstance(gpus, list) else 0
    return [] if gpus is None else [f"engine.gpus=[{first}]"]


def train_until_stopped(cfg: Config, *callbacks: pl.Callback) -> pl.Trainer:
    """Train a config's task with these callbacks until one of them sets `trainer.should_stop`; return the trainer."""
    assert cfg.seed is not None, "load_config draws one"
    to_terminal(cfg)
    one_line_warnings()
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # one process is enough here
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
        **quiet_arguments(cfg),
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[*ours, *callbacks],
        plugins=[LightningEnvironment()],
        logger=False,
    )
    trainer.fit(task, data)
    return trainer
