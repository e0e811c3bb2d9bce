"""Lightning callbacks of a run: checkpoints, logs, pictures, seeds, signals and the terminal."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deeplightning.config.schema import Config, Target
from deeplightning.config.target import build
from deeplightning.launch import hooks_here

if TYPE_CHECKING:
    import pytorch_lightning as pl

T = TypeVar("T")

TRIAL = "DEEPLIGHTNING_TRIAL"
"""The environment variable that makes a run a trial of a search; see `deeplightning.callbacks.trial`."""


def callback_of(trainer: Any, kind: type[T]) -> T:
    """The trainer's callback of a class."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


def all_of(cfg: Config) -> list[pl.Callback]:
    """Return the callbacks of a run, in the order in which their hooks are called."""
    from dataclasses import asdict

    from pytorch_lightning.callbacks import EarlyStopping

    from deeplightning.callbacks.checkpoints import Checkpoints
    from deeplightning.callbacks.console import Console
    from deeplightning.callbacks.describe import Describe
    from deeplightning.callbacks.flops import Flops
    from deeplightning.callbacks.gathered import Gathered, PendingGradients
    from deeplightning.callbacks.generators import Generators
    from deeplightning.callbacks.gradients import AdaptiveClip, GradientNorm, Warmup
    from deeplightning.callbacks.histograms import Histograms
    from deeplightning.callbacks.memory import Memory
    from deeplightning.callbacks.order import in_order
    from deeplightning.callbacks.recompute import Recompute
    from deeplightning.callbacks.record import Record
    from deeplightning.callbacks.results import Results, ShowPictures
    from deeplightning.callbacks.sample_weights import SampleWeights
    from deeplightning.callbacks.signals import Signals
    from deeplightning.callbacks.start import StartWeights
    from deeplightning.callbacks.steps import (
        AccumulateFrom,
        FiniteLoss,
        LogSteps,
        SameBuffers,
        ScheduleSteps,
        Seeds,
        StreamEnds,
        ValidateParts,
        draws_as_lightning,
    )
    from deeplightning.callbacks.threads import MeasuredThreads
    from deeplightning.tracking.build import prepare
    from deeplightning.tracking.environment import redacted

    loggers = []
    for target in (cfg.logger, *cfg.logger.extra):
        # Trackers write these down; their addresses, which may hold a password, they do not.
        names = {name: value for name, value in target.params.items() if name in ("tags", "run_name")}
        params = prepare(target.type, target.params | redacted(names, cfg.redact))
        loggers.append(build(Target(type=target.type, params=params, place=target.place, name=target.name)))
    train, every = cfg.train, cfg.logger.log_every_n_steps
    assert cfg.seed is not None, "load_config draws one"
    record = Record(cfg, loggers, Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    hooks = hooks_here()
    checkpoints = Checkpoints(train.checkpoint, record, background=not hooks.copies_files, off=train.fast)
    callbacks: list[pl.Callback] = [
        record,
        Generators() if draws_as_lightning(cfg) else Seeds(cfg.seed),
        StreamEnds(),
        LogSteps(every if isinstance(every, int) else asdict(every)),
        FiniteLoss(),
        SampleWeights(),
        ScheduleSteps(),
        SameBuffers(),
        Console(cfg, record, checkpoints),
        Results(record),
        Describe(cfg, record),
        Memory(record),
        Gathered(),
        PendingGradients(),
    ]
    if cfg.model.init_from is not None:
        callbacks.append(StartWeights(cfg.model.init_from, cfg.logger.params.get("tracking_uri")))
    if cfg.engine.activation_checkpointing:
        callbacks.append(Recompute(cfg.engine.activation_checkpointing))
    if cfg.engine.threads == "auto":
        callbacks.append(MeasuredThreads())
    if cfg.engine.profiler == "flops":
        callbacks.append(Flops(record))
    if cfg.logger.gradient_norm:
        callbacks.append(GradientNorm())
    if train.gradient_clip is not None and train.gradient_clip.algorithm == "agc":
        callbacks.append(AdaptiveClip(train.gradient_clip.value))
    if shares := _warmups(cfg):
        callbacks.append(Warmup(shares))
    if cfg.logger.pictures is not None:
        callbacks.append(ShowPictures(cfg.logger.pictures, record))
    if cfg.logger.histograms is not None:
        callbacks.append(Histograms(cfg.logger.histograms, record))
    if train.val_every_n_epoch < 1 and not train.fast:
        callbacks.append(ValidateParts(train.val_every_n_epoch))
    if train.accumulator_factor > 1 and train.accumulator_epoch > 0:
        callbacks.append(AccumulateFrom(train.accumulator_epoch, train.accumulator_factor))
    if train.early_stop is not None:
        stop = train.early_stop  # whose mode is null where it does not train
        callbacks.append(EarlyStopping(stop.metric, stop.delta, stop.patience, mode=stop.mode or "min"))
    if TRIAL in os.environ:
        from deeplightning.callbacks.trial import Trial

        callbacks.append(Trial(record, os.environ[TRIAL]))
    callbacks += [checkpoints, Signals(hooks), *hooks.callbacks(cfg, record, checkpoints)]
    return in_order(callbacks, [build(target) for target in train.callbacks])


def _warmups(cfg: Config) -> dict[str, float]:
    """The share of warm-up of each schedule that has one, by the name of its optimizer; "": there is one schedule."""
    schedules = cfg.model.scheduler
    named = schedules if isinstance(schedules, dict) else {"": schedules}
    return {name: schedule.warmup for name, schedule in named.items() if schedule is not None and schedule.warmup > 0}
