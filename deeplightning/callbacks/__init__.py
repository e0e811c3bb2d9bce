"""Lightning callbacks of a run: checkpoints, logs, pictures, seeds, signals and the terminal."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deeplightning.config.schema import Config, Target
from deeplightning.config.target import build, find
from deeplightning.launch import hooks_here

if TYPE_CHECKING:
    import pytorch_lightning as pl

T = TypeVar("T")

_BATCH_HOOKS = [f"on_{stage}_batch_{at}" for stage in ("train", "validation", "test") for at in ("start", "end")]
_BATCH_HOOKS += ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]

TRIAL = "DEEPLIGHTNING_TRIAL"
"""The environment variable that makes a run a trial of a search; see `deeplightning.callbacks.trial`."""


def callback_of(trainer: Any, kind: type[T]) -> T:
    """Return the trainer's callback of a class."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))


def run_callbacks(cfg: Config) -> list[pl.Callback]:
    """Return the callbacks of a run in the order of their hooks. Lightning moves checkpoint callbacks to the end."""
    from pytorch_lightning.callbacks import Callback, EarlyStopping

    from deeplightning.callbacks import gathered, random_state, results, steps
    from deeplightning.callbacks.checkpoints import Checkpoints
    from deeplightning.callbacks.console import Console
    from deeplightning.callbacks.record import Record
    from deeplightning.callbacks.sample_weights import SampleWeights
    from deeplightning.callbacks.signals import Signals
    from deeplightning.tracking.build import prepare
    from deeplightning.tracking.environment import redacted
    from deeplightning.tracking.user_calls import UserCalls

    loggers = []
    for target in (cfg.logger, *cfg.logger.extra):
        # Trackers store these, but not their own address, which may contain a password.
        names = {name: value for name, value in target.params.items() if name in ("tags", "run_name")}
        params = prepare(target.type, target.params | redacted(names, cfg.redact))
        loggers.append(build(Target(type=target.type, params=params, place=target.place, name=target.name)))
    train, clip, logs, every = cfg.train, cfg.train.gradient_clip, cfg.logger, cfg.logger.log_every_n_steps
    assert cfg.seed is not None, "load_config draws one"
    calls, hooks = UserCalls(), hooks_here()
    started = f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.urandom(3).hex()}"  # several runs may start together
    record = Record(cfg, loggers, calls, Path("runs") / started)
    checkpoints = Checkpoints(train.checkpoint, record, off=train.fast)
    callbacks: list[pl.Callback] = []
    if cfg.model.init_from is not None:  # first: missing weights must fail before a run is opened
        from deeplightning.callbacks.start import StartWeights

        callbacks.append(StartWeights(cfg.model.init_from, cfg.logger.params.get("tracking_uri")))
    callbacks += [
        record,  # before the others, which need an open run
        random_state.Generators() if random_state.draws_as_lightning(cfg) else random_state.Seeds(cfg.seed),
        steps.StreamEnds(),
    ]
    schedules = cfg.model.scheduler if isinstance(cfg.model.scheduler, dict) else {"": cfg.model.scheduler}
    if shares := {name: each.warmup for name, each in schedules.items() if each is not None and each.warmup > 0}:
        from deeplightning.callbacks.gradients import Warmup

        callbacks.append(Warmup(shares))  # before LogSteps, which logs the scaled rate
    callbacks += [
        steps.LogSteps(every if isinstance(every, int) else asdict(every)),
        steps.FiniteLoss(),
        SampleWeights(),
        steps.ScheduleSteps(),
        steps.SameBuffers(),
        Console(cfg, record, checkpoints),
        results.Results(record),
        gathered.Gathered(),
        gathered.PendingGradients(),
    ]
    late = (train.accumulator_epoch, train.accumulator_factor)
    optional: list[tuple[object, str, tuple[Any, ...]]] = [  # whether it is wanted, its class, its arguments
        (cfg.engine.precision in (64, "64-true"), "start.Double", ()),
        (cfg.engine.activation_checkpointing, "start.Recompute", (cfg.engine.activation_checkpointing,)),
        (logs.gradient_norm, "gradients.GradientNorm", ()),
        (clip and clip.algorithm == "agc", "gradients.AdaptiveClip", (clip and clip.value,)),
        (cfg.engine.profiler == "flops", "on_request.Flops", (record,)),
        (logs.pictures is not None, "on_request.ShowPictures", (logs.pictures, record)),
        (logs.histograms is not None, "on_request.Histograms", (logs.histograms, record)),
        (train.val_every_n_epoch < 1 and not train.fast, "steps.ValidateParts", (train.val_every_n_epoch,)),
        (late[0] > 0 and late[1] > 1, "steps.AccumulateFrom", late),
    ]
    callbacks += [find(f"deeplightning.callbacks.{name}")(*given) for wanted, name, given in optional if wanted]
    if train.early_stop is not None:
        stop = train.early_stop  # its mode is null if the run does not train
        at_end = (stop.metric.startswith("train") and stop.metric.endswith("_epoch")) or None  # else as in Lightning
        more: dict[str, Any] = {"mode": stop.mode or "min", "check_on_train_epoch_end": at_end}
        callbacks.append(EarlyStopping(stop.metric, stop.delta, stop.patience, **more))
    callbacks += [build(target) for target in train.callbacks]
    if TRIAL in os.environ:  # after the user's callbacks, whose metrics it reports
        from deeplightning.callbacks.trial import Trial

        callbacks.append(Trial(record, os.environ[TRIAL]))
    # Last: a checkpoint contains the states of all others, and a signal takes effect after all have handled the batch.
    callbacks += [checkpoints, Signals(hooks), *hooks.callbacks(cfg, record, checkpoints)]
    # Lightning skips hooks that are None and calls the others in a profiler context: a hundred per step.
    for callback in callbacks:
        for name in _BATCH_HOOKS if type(callback).__module__.startswith("deeplightning.") else ():
            if getattr(type(callback), name) is getattr(Callback, name):
                setattr(callback, name, None)
    return callbacks
