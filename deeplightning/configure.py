"""The public door from Python: a config becomes a data module, a task and a trainer.

cfg = load_config("configs/base.yaml")
data, task = init_module(cfg, "data"), init_module(cfg, "model")
trainer = init_trainer(cfg)
trainer.fit(task, data)
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplightning.config import check
from deeplightning.config.combinations import conflicts, hints
from deeplightning.config.fault import Notice, place_of
from deeplightning.config.report import Report
from deeplightning.config.schema import Config, backend_of
from deeplightning.config.space import misfits, space_of
from deeplightning.config.target import build
from deeplightning.engine.place import own_rank
from deeplightning.engine.plan import occupied, settle, trainer_arguments
from deeplightning.private.lazy_imports import import_lazily

if TYPE_CHECKING:
    import pytorch_lightning as pl


DECIDED = "DEEPLIGHTNING_DECIDED"
"""The environment variable in which rank 0 tells the processes that Lightning starts what it has decided, as JSON."""


def decided(what: str, decide: Callable[[], Any]) -> Any:
    """What one process must decide for all, a plain value: rank 0 does, and the processes that it starts take that.

    Processes that somebody else starts (torchrun, Slurm) decide each for themselves; a run whose processes disagree
    does not begin (see `deeplightning.callbacks.record.Record`).
    """
    known = json.loads(os.environ.get(DECIDED, "{}"))
    if own_rank() == 0 or what not in known:
        known[what] = decide()
        os.environ[DECIDED] = json.dumps(known)
    return known[what]


def examine(
    path: str | Path, overrides: list[str] | None = None, *, importing: bool = False, beside: bool = True
) -> Report:
    """All that is wrong with a config here, and the config as it would run.

    Args:
        importing: import what the config names, which decides what its source cannot.
        beside: let names come from the config's folder too.
    """
    if importing:
        import_lazily()
    report = check.examine(path, overrides, importing=importing, beside=beside)
    cfg = report.config
    if cfg is None or None in (cfg.engine, cfg.data, cfg.model, cfg.train, cfg.logger):
        return report  # a section is no mapping: there is nothing to settle
    asked = replace(cfg.engine, backend=backend_of(cfg.engine))
    settled, lacking = settle(cfg)
    cfg.notices = [*(cfg.notices or []), *settled, *clear_secrets(cfg), *unjudged(cfg)]
    report.hints += hints(cfg, asked)
    wrong = {key for fault in report.faults for key in (fault.key or "", f"{fault.key}.type")}
    broken = list(conflicts(cfg, asked, report.places, skip=wrong.__contains__))
    lacking = [fault for fault in lacking if fault.key not in wrong]
    report.add(*lacking, *(fault for rule, fault in broken if not rule.at_start))
    report.at_start += [fault for rule, fault in broken if rule.at_start]
    if not lacking:
        places = report.places
        report.at_start += [replace(f, place=place_of(str(f.key), places)) for f in occupied(cfg.engine)]
    if cfg.seed is None:
        cfg.seed = decided("seed", lambda: secrets.randbelow(2**31))
        cfg.notices.append(Notice(f"seed: null → {cfg.seed} (drawn)", unasked=False, key="seed"))
    if cfg.tune is not None and not any(str(fault.key).startswith("tune.") for fault in report.faults):
        given = [*(overrides or []), "tune=null"]
        found = space_of(cfg.tune.space)
        report.add(
            *misfits(found, lambda more: examine(path, given + more, importing=importing, beside=beside), report)
        )
    return report


def load_config(path: str | Path, overrides: list[str] | None = None, *, beside: bool = True) -> Config:
    """The config of a file with its overrides, checked and settled: what runs is what it says.

    Args:
        beside: let names come from the config's folder too; not from a run folder, which holds no code to be imported.

    Raises:
        ConfigError: with every fault, each with its place.
        SetupError: the machine lacks what the engine needs.
        CheckpointError: a stage needs weights, and none are named.
    """
    report = examine(path, overrides, importing=True, beside=beside)
    report.add(*report.at_start)
    cfg = report.checked()
    if cfg.secrets:
        cfg.secrets.to_environment()
    return cfg


def clear_secrets(cfg: Config) -> list[Notice]:
    """A warning for each secret that is written in clear."""
    literals = cfg.secrets.literals if cfg.secrets else {}
    return [
        Notice(
            f"{'.'.join(map(str, path))}: a secret in clear. The run keeps ${{oc.env:{name}}} in its place; write that "
            f"into the config, and set the environment variable {name}",
            key=".".join(map(str, path)),
        )
        for name, (path, _) in literals.items()
    ]


def unjudged(cfg: Config) -> list[Notice]:
    """A warning where checkpoints inside an epoch are saved at other moments than validations."""
    kept, often = cfg.train.checkpoint, cfg.train.val_every_n_epoch
    share, monitor = kept.every_n_epochs, kept.monitor
    if "train" not in cfg.stages or monitor is None or share is None or not 0 < share < 1:
        return []
    of_training, of_epoch = monitor.startswith("train_"), monitor.endswith("_epoch")
    if of_training and not of_epoch:
        return []
    validations = share / often if 0 < often < 1 else 0  # from one checkpoint to the next
    if validations > 0.5 and math.isclose(validations, round(validations)):
        return []
    remedy = f"train.val_every_n_epoch={share:g}{' and a metric of the validation' if of_training else ''}"
    key = "train.checkpoint.every_n_epochs"
    text = (
        f"{key} is {share:g} and train.val_every_n_epoch is {often!s:.20}: nothing is validated when a checkpoint "
        "inside an epoch is saved, so it becomes last.ckpt, and is none of the best by "
        f"{monitor}. To judge it too: {remedy}"
    )
    return [Notice(text, key=key)]


def init_module(cfg: Config, section: str) -> Any:
    """The data module (`data`) or the task (`model`) of a config. What its constructor draws follows from the seed."""
    from deeplightning.callbacks.steps import seed_all
    from deeplightning.engine.compute import lay_channels_last
    from deeplightning.engine.quick import leave_out_empty_hooks, note_signatures
    from deeplightning.engine.room import refuse_what_does_not_fit

    assert cfg.seed is not None, "load_config draws one"
    seed_all(cfg.seed, 0)
    module = build(getattr(cfg, section).module, cfg)
    if section == "model":
        note_signatures(module)
        leave_out_empty_hooks(module)
        if cfg.engine.channels_last:
            lay_channels_last(module)
        if cfg.engine.gpus is not None:
            refuse_what_does_not_fit(module, cfg)
    return module


def init_trainer(cfg: Config) -> pl.Trainer:
    """A Lightning Trainer for a config. Opens no run and writes nothing: that begins with `fit`."""
    import pytorch_lightning as pl

    from deeplightning.callbacks import all_of
    from deeplightning.callbacks.console import to_terminal
    from deeplightning.engine import compute
    from deeplightning.engine.checkpoint_io import SafeCheckpointIO
    from deeplightning.engine.cluster import cluster
    from deeplightning.engine.compiling import prepare_to_compile

    to_terminal(cfg)
    compute.prepare(cfg.engine)
    if cfg.engine.compile and "train" in cfg.stages:
        prepare_to_compile(cfg.engine)
    train, clip = cfg.train, cfg.train.gradient_clip
    limits = train.limit_batches
    often = train.val_every_n_epoch
    from_start = train.accumulator_epoch == 0
    return pl.Trainer(
        **trainer_arguments(cfg),
        max_epochs=-1 if train.num_epochs is None else train.num_epochs,
        max_steps=-1 if train.max_steps is None else train.max_steps,
        check_val_every_n_epoch=max(1, int(often)),
        val_check_interval=float(often) if often < 1 else 1.0,
        accumulate_grad_batches=train.accumulator_factor if from_start else 1,
        gradient_clip_val=clip.value if clip else None,
        gradient_clip_algorithm=clip.algorithm if clip else None,
        limit_train_batches=limits.train if limits else 1.0,
        limit_val_batches=limits.val if limits else 1.0,
        limit_test_batches=limits.test if limits else 1.0,
        limit_predict_batches=limits.test if limits else 1.0,
        callbacks=all_of(cfg),
        plugins=[SafeCheckpointIO(), cluster()],
        logger=False,  # the record hands them over when the run opens
        log_every_n_steps=1,  # deeplightning.callbacks.steps.LogSteps says which steps are due
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
