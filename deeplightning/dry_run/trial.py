"""A config is tried out: a made-up batch goes through a training and a validation step, and what does not fit is named.

Nothing is read, opened or written: no data, no run, no checkpoint, no network connection. The CPU does it in one
process; where the run has several, two more do the same, and what they log and exchange is compared.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import re
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import LightningEnvironment
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from deeplightning import own_code
from deeplightning.callbacks.recompute import Recompute
from deeplightning.callbacks.steps import LogSteps, Seeds
from deeplightning.config.schema import Config, Optimizer, Target
from deeplightning.config.target import build, find, needs
from deeplightning.dry_run.pair import Pair
from deeplightning.engine.plan import trainer_arguments, world_size
from deeplightning.faults import Fault, UserError, nearest
from deeplightning.private.messages import Sentence, says
from deeplightning.run.assemble import init_module
from deeplightning.words import first_line

SAMPLES = 5
"""Of the made-up batch: enough for batch norm, few enough for a large network; odd, so that shapes are rarely equal by
chance."""

STEPS = 1000  # the length of a training whose data are not looked at


# Hooks that Lightning has given up, and what stands for them today.
_RETIRED = {
    "training_epoch_end": "on_train_epoch_end(self)",
    "validation_epoch_end": "on_validation_epoch_end(self)",
    "test_epoch_end": "on_test_epoch_end(self)",
    "predict_epoch_end": "on_predict_epoch_end(self)",
    "training_step_end": "training_step(self, batch, batch_idx)",
    "validation_step_end": "validation_step(self, batch, batch_idx)",
    "test_step_end": "test_step(self, batch, batch_idx)",
    "on_epoch_start": "on_train_epoch_start(self)",
    "on_epoch_end": "on_train_epoch_end(self)",
    "on_batch_start": "on_train_batch_start(self, batch, batch_idx)",
    "on_batch_end": "on_train_batch_end(self, outputs, batch, batch_idx)",
    "on_pretrain_routine_start": "on_fit_start(self)",
    "on_pretrain_routine_end": "on_fit_start(self)",
    "configure_sharded_model": "configure_model(self)",
}


def dry_run(cfg: Config) -> tuple[list[Fault], list[Fault]]:
    """Builds what a config describes as training would, and takes one batch through its steps.

    The batch is the data module's `example_batch(size)`. What a callback of the user's own does in its hooks, it does
    here too; loggers are not built.

    Args:
        cfg: a config from `load_config`; it is left as it is.

    Returns:
        What is wrong, and what could not be tried.
    """
    trial = _Trial(cfg)
    pair: Any = Pair(lambda note: _as_rank(cfg, note)) if world_size(cfg.engine) > 1 else contextlib.nullcontext()
    with _undisturbed(), _offline(), tempfile.TemporaryDirectory() as folder, pair:
        trial.run(Path(folder))
        if isinstance(pair, Pair) and trial.is_through and not trial.faults:
            difference, certain = pair.difference()
            told_in = trial.faults if certain else trial.untried
            told_in += [Fault(difference, "model.module")] if difference else []

    def told(notes: list[Fault]) -> list[Fault]:
        clean = [replace(f, message=cfg.redact(f.message), place=f.place or _place(cfg, f.key)) for f in notes]
        return list(dict.fromkeys(clean))

    return told(trial.faults), told(trial.untried)


def _as_rank(cfg: Config, note: Callable[[str], None]) -> str | None:
    """The same as one of two processes, which have a process group; each name that is logged by every rank is noted.

    Returns:
        What is wrong, if anything.
    """
    log = pl.LightningModule.log

    def noted(self: Any, name: str, *values: Any, **options: Any) -> None:
        if not options.get("rank_zero_only"):
            note(name)
        log(self, name, *values, **options)

    pl.LightningModule.log = noted  # type: ignore[method-assign]  # this process does nothing else
    trial = _Trial(cfg)
    trial.cfg.engine.processes, trial.cfg.engine.backend = 2, "ddp"
    trial.cfg.engine.params = {"process_group_backend": "gloo", "find_unused_parameters": True}
    with tempfile.TemporaryDirectory() as folder:
        trial.run(Path(folder))
    return trial.faults[0].message if trial.faults else None


class _Found(Exception):
    """A fault that was seen while a step ran."""

    def __init__(self, fault: Fault):
        self.fault = fault


class _Offline(OSError):
    """Something wanted the network."""


class _Trial:
    """Tries a config until nothing more can be found: what is at fault is taken out, and the rest is tried again."""

    def __init__(self, cfg: Config):
        self.asked = cfg
        self.cfg = on_one_cpu(cfg)
        self.faults: list[Fault] = []
        self.untried: list[Fault] = []
        self.is_through = False  # whether a batch went through all steps
        self.left_out: list[str] = []  # parts of names that would be logged if nothing were at fault

    def run(self, folder: Path) -> None:
        engine, mine = self.asked.engine, self.cfg.engine
        if mine.precision != engine.precision:
            message = f"{engine.precision} needs a GPU; {mine.precision} was tried instead"
            self.untried.append(Fault(message, "engine.precision"))
        if engine.compile:
            self.untried.append(Fault("a dry run does not compile", "engine.compile"))
        if self.asked.model.init_from is not None:
            self.untried.append(Fault("the weights were not read", "model.init_from"))
        of_workers = {name: value for name, value in self.asked.data.loader.items() if name in OF_WORKERS}
        try:
            DataLoader([], batch_size=None, num_workers=self.asked.data.num_workers, **of_workers)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            self.faults.append(Fault(f"torch's DataLoader refuses it: {error}", "data.loader"))
        for _ in range(10):  # each fault that can be taken out shows the next
            attempt = _Attempt(self.cfg, self.asked, folder)
            try:
                attempt.run()
                found = attempt.faults
            except (Exception, SystemExit) as error:
                if isinstance(error.__context__, KeyboardInterrupt):  # Lightning makes a SystemExit of it
                    raise KeyboardInterrupt from None
                if _wants_network(error):
                    if self.without_weights():
                        continue
                    message = "wants a network connection, which a dry run does not use; nothing behind it was tried"
                    self.untried.append(Fault(message + own_code.line_of(error), "model.module"))
                    return
                found = attempt.faults + attempt.faults_of(error)
                if any(_needs_gpu(self.asked, fault) for fault in found):
                    message = f"the CPU cannot compute this network in {mine.precision}; 32 was tried instead"
                    self.untried.append(Fault(message, "engine.precision"))
                    mine.precision = 32
                    continue
            self.untried += attempt.untried
            if not found:
                self.is_through = attempt.batch is not None
                self.faults += self.unlogged(attempt) if attempt.batch is not None else self.parts()
                return
            taken_out = [self.take_out(fault) for fault in found if fault not in self.faults]
            self.faults += found
            if not taken_out or not all(taken_out):
                break
        parts = self.parts()
        # A task that stumbles over a part is not at fault itself.
        reasons = {_reason(fault) for fault in parts}
        self.faults = [f for f in self.faults if f.key != "model.module" or _reason(f) not in reasons]
        self.faults += [f for f in parts if f.key not in {known.key for known in self.faults}]
        self.untried.append(Fault("what comes behind a fault was not tried, nor whether monitored metrics are logged"))

    def without_weights(self) -> bool:
        """Takes weights that would be downloaded out of the networks' params; false if there are none."""
        found = False
        for target in _targets(self.cfg.model.network):
            for name, value in target.params.items():
                if (name.startswith("weights") or name == "pretrained") and value not in (None, False):
                    target.params[name], found = False if value is True else None, True
                    message = "these weights are not on this machine yet; random ones were tried"
                    self.untried.append(Fault(message, f"{target.name}.params.{name}"))
        return found

    def take_out(self, fault: Fault) -> bool:
        """Changes the config such that it goes without what is at fault; false where it cannot."""
        key, model, train = fault.key or "", self.cfg.model, self.cfg.train
        if match := re.match(r"model\.metrics\.([^.]+)", key):
            self.left_out.append(match[1])
            (model.metrics or {}).pop(match[1], None)
        elif match := re.match(r"train\.callbacks\.\d+", key):
            self.left_out.append("")
            train.callbacks = [c for c in train.callbacks if c.name != match[0]]
        elif key.startswith("model.optimizer") and isinstance(model.optimizer, Optimizer):
            model.optimizer.groups = []
            if not key.startswith("model.optimizer.groups"):
                model.optimizer.type, model.optimizer.params = "torch.optim.SGD", {"lr": 0.0}
                model.scheduler = None  # it was made for that optimizer
        elif key.startswith("model.scheduler"):
            model.scheduler = None
        elif key == "model.trainable":
            model.trainable = "all"
        elif key.startswith("train.gradient_clip"):
            train.gradient_clip = None
        elif key == "engine.activation_checkpointing":
            self.cfg.engine.activation_checkpointing = None
        elif key == "train.accumulator_factor":
            train.accumulator_factor = 1
        elif key == "engine.params.find_unused_parameters":
            self.asked = copy.deepcopy(self.asked)
            self.asked.engine.params["find_unused_parameters"] = True
        elif key == "data.module.params.augment":
            self.cfg.data.module.params.pop("augment", None)
        else:
            return False
        return True

    def unlogged(self, attempt: _Attempt) -> list[Fault]:
        """Names that something waits for and nobody logs."""
        if "train" not in self.asked.stages or self.asked.train.num_epochs == 0:
            return []
        faults = []
        for key, name, when in self.monitors(attempt):
            there, late = attempt.logged[when], attempt.logged["epoch"]
            if name in there:
                continue
            if any(left in name for left in self.left_out):
                self.untried.append(Fault(f"whether {name} is logged, since what may log it is at fault", key))
                continue
            known = ", ".join(sorted(there)) or "none"
            if name in late:
                moment = {"step": "after a training step", "validation": "after a validation inside an epoch"}[when]
                message = f"{name} is not there yet when it is asked for, {moment}; there are then {known}"
            else:
                message = f"no metric is called {name!r}; a training and a validation step log {known}."
                message += nearest(name, there)
            faults.append(Fault(message, key))
        return faults

    def monitors(self, attempt: _Attempt) -> Iterator[tuple[str, str, str]]:
        """Key, name and moment (the end of a `step`, a `validation` or an `epoch`) of each metric waited for."""
        train = self.asked.train
        judged = "validation" if train.val_every_n_epoch < 1 else "epoch"
        if train.checkpoint.monitor is not None:
            yield "train.checkpoint.monitor", train.checkpoint.monitor, judged
        if train.early_stop is not None:
            usual = train.val_every_n_epoch == 1
            yield "train.early_stop.metric", train.early_stop.metric, "epoch" if usual else "validation"
        for target in _targets(self.asked.model.scheduler):
            call = getattr(target, "call", None)
            if call is not None and call.monitor is not None:
                yield f"{target.name}.call.monitor", call.monitor, "step" if call.interval == "step" else "epoch"
        for target, callback in attempt.callbacks:
            if isinstance(getattr(callback, "monitor", None), str):
                yield f"{target.name}.params.monitor", callback.monitor, "epoch"

    def parts(self) -> list[Fault]:
        """What is wrong with single parts, each built alone: their users did not come so far."""
        model, faults = self.cfg.model, []
        optimizer: Any = None

        def attempt(target: Target, *given: Any, **more: Any) -> Any:
            try:
                return build(target, *given, **more)
            except Exception as error:
                if not _wants_network(error):
                    faults.extend(_Attempt(self.cfg, self.asked, Path()).faults_of(error, target))
                return None

        for section in (model.network, model.loss, model.metrics):
            for target in _targets(section):
                attempt(target)
        for target in _targets(model.optimizer):
            optimizer = attempt(target, [nn.Parameter(torch.zeros(2, 2))])
        for target in _targets(model.scheduler) if optimizer is not None else ():
            numbers = {name: STEPS for name, value in target.params.items() if value == "auto"}
            attempt(target, optimizer, **numbers)
        for target in self.cfg.train.callbacks:
            attempt(target)
        return faults


OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Settings of a loader's processes, of which a dry run has none."""


def on_one_cpu(cfg: Config) -> Config:
    """A copy of a config that runs in this process, on the CPU."""
    mine = copy.deepcopy(cfg)
    engine = mine.engine
    if engine.gpus is not None:  # half precision on CPU is bf16, see `deeplightning.engine.plan.settle`
        words = {16: "bf16-mixed", "16-mixed": "bf16-mixed", "16-true": "bf16-true"}
        engine.precision = words.get(engine.precision, engine.precision)  # type: ignore[arg-type, assignment]
    engine.gpus, engine.backend, engine.params, engine.profiler = None, None, {}, None
    engine.processes = engine.num_nodes = 1
    engine.compile = engine.sync_batchnorm = engine.deterministic = engine.keep_memory = False
    engine.threads = None
    mine.data.num_workers = 0
    for name in OF_WORKERS:
        mine.data.loader.pop(name, None)
    mine.model.init_from = mine.train.resume_ckpt = None
    return mine


class _Attempt:
    """One way through a config, up to the first thing that stops it."""

    def __init__(self, cfg: Config, asked: Config, folder: Path):
        self.cfg, self.asked, self.folder = cfg, asked, folder
        self.faults: list[Fault] = []
        self.untried: list[Fault] = []
        self.data: Any = None
        self.task: Any = None
        self.batch: Any = None
        self.trainer: Any = None
        self.callbacks: list[tuple[Target, Any]] = []
        self.logged: dict[str, set[str]] = {}
        self.stage = "before the first step"

    def run(self) -> None:
        """
        Raises:
            Exception: whatever a part raises; `faults_of` tells what it means.
        """
        self.batch = self.example()
        try:
            task = self.task = init_module(self.cfg, "model")
        except Exception as error:
            if _wants_network(error):
                raise
            self.faults += self.faults_of(error, self.cfg.model.module)
            return
        self.inspect(task)
        if self.faults:
            return
        for target in self.cfg.train.callbacks:
            try:
                self.callbacks.append((target, build(target)))
            except Exception as error:
                self.faults += self.faults_of(error, target)
        if self.faults:
            return
        look = _Look(self)
        stages, epochs = self.cfg.stages, self.cfg.train.num_epochs
        trainer = self.trainer = self.make_trainer(look)
        source: dict[str, Any] = {"datamodule": self.data}
        if self.data is None:
            source = {"train_dataloaders": _loader(None)}
        if "train" in stages and epochs != 0:
            trainer.fit(task, **source)
            self.logged["epoch"] = set(trainer.callback_metrics)
            self.judge(look)
        if self.batch is None:
            return
        for stage in ("validate", "test", "predict"):
            if stage in stages or (stage == "validate" and "train" in stages and epochs == 0):
                self.stage = {"validate": "in the validation step"}.get(stage, f"in the {stage} step")
                getattr(trainer, stage)(
                    task, datamodule=self.data, **({} if stage == "predict" else {"verbose": False})
                )
                self.numbers()

    def example(self) -> Any:
        """A batch of the data module, which from here on gives that and nothing else; None where there is none."""
        target = self.cfg.data.module
        try:
            data = init_module(self.cfg, "data")
        except Exception as error:
            self.faults += self.faults_of(error, target)
            self.untried.append(Fault("without data no step was tried", "data.module"))
            return None
        try:
            make = getattr(data, "example_batch", None)
            batch = make(SAMPLES) if make is not None else None
        except Exception as error:
            lacks = needs(error)
            reason = f"{target.type}.example_batch {lacks or f'fails: {_words(error)}{own_code.line_of(error)}'}"
            code = 3 if lacks else getattr(error, "exit_code", 2)
            self.faults.append(Fault(reason, "data.module", exit_code=code))
            batch = None
        self.data = data
        if self.faults:
            self.untried.append(Fault("without an example no step was tried", "data.module"))
        elif batch is None:
            message = f"{target.type} offers no example_batch(size), so no step was tried"
            self.untried.append(Fault(message, "data.module"))
        elif getattr(data, "image_spec", None) is not None and not getattr(data, "class_names", None):
            message = "its classes are not known yet; whether the network has an output for each was not tried"
            self.untried.append(Fault(message, "data.module"))
        loader = _loader(batch)
        for hook in ("prepare_data", "setup", "teardown"):
            setattr(data, hook, lambda *_, **__: None)
        for hook in ("train", "val", "test", "predict"):
            setattr(data, f"{hook}_dataloader", lambda: loader)
        return batch

    def inspect(self, task: Any) -> None:
        """What a task lacks, and what of it Lightning has given up."""
        cls, stages, train = type(task), self.cfg.stages, self.cfg.train
        needed = {}
        if "train" in stages and train.num_epochs != 0:
            needed = {"training_step": "(self, batch, batch_idx), which returns the loss"}
            needed["configure_optimizers"] = "(self), which returns the optimizer"
        judged = train.limit_batches is None or train.limit_batches.val != 0
        if ("train" in stages and judged) or "validate" in stages:
            needed["validation_step"] = "(self, batch, batch_idx), which logs what is judged by, such as val_loss"
        if "test" in stages:
            needed["test_step"] = "(self, batch, batch_idx), which logs what is judged by, such as test_loss"
        name = self.cfg.model.module.type
        for method, words in needed.items():
            if not is_overridden(method, task):
                near = nearest(method, [n for n in vars(cls) if not n.startswith("__")])
                self.fault(f"{name} lacks {method}{words}.{near}", "model.module")
        for old, new in _RETIRED.items():
            if callable(getattr(cls, old, None)) and not hasattr(pl.LightningModule, old):
                self.fault(
                    f"{name} has {old}, which Lightning calls no more (since 2.0); today it is {new}", "model.module"
                )
        if "optimizer_idx" in inspect.signature(task.training_step).parameters:
            self.fault(
                f"{name}: Lightning gives training_step no optimizer_idx any more (since 2.0); set "
                "`self.automatic_optimization = False` and step `self.optimizers()` in training_step",
                "model.module",
            )
        if not task.automatic_optimization:
            if train.gradient_clip is not None:
                message = (
                    f"{name} steps its optimizers itself, so Lightning cannot clip; call `self.clip_gradients` in its "
                    "training_step and set this to null"
                )
                self.fault(message, "train.gradient_clip")
            if train.accumulator_factor > 1:
                message = f"{name} steps its optimizers itself, so Lightning cannot accumulate; set this to 1"
                self.fault(message, "train.accumulator_factor")

    def make_trainer(self, look: _Look) -> pl.Trainer:
        train, clip = self.cfg.train, self.cfg.train.gradient_clip
        assert self.cfg.seed is not None, "load_config draws one"
        kept: list[pl.Callback] = [Seeds(self.cfg.seed), LogSteps(1)]
        if self.cfg.engine.activation_checkpointing:
            kept.append(Recompute(self.cfg.engine.activation_checkpointing))
        for _, callback in self.callbacks:
            if not isinstance(callback, Checkpoint | EarlyStopping):  # they write, and end what misses a name
                kept.append(callback)
        trainer = _Trainer(
            **trainer_arguments(self.cfg),
            max_epochs=-1 if train.num_epochs is None else train.num_epochs,
            max_steps=-1 if train.max_steps is None else train.max_steps,
            accumulate_grad_batches=train.accumulator_factor,
            gradient_clip_val=clip.value if clip else None,
            gradient_clip_algorithm=clip.algorithm if clip else None,
            limit_val_batches=0 if train.limit_batches and train.limit_batches.val == 0 else 1.0,
            callbacks=[*kept, look],
            plugins=[LightningEnvironment()],  # also under Slurm and torchrun there is this process only
            logger=_Nowhere(self.folder),
            default_root_dir=self.folder,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # How long an epoch is, only the data know: a schedule of a fixed length is taken to fit.
        lengths = [target.params.get("total_steps") for target in _targets(self.cfg.model.scheduler)]
        trainer.length = min([STEPS, *(n for n in lengths if isinstance(n, int)), train.max_steps or STEPS])
        return trainer

    def judge(self, look: _Look) -> None:
        """What a training that came to its end says."""
        self.numbers()
        if self.batch is None or self.faults:
            return
        name, task = self.cfg.model.module.type, self.task
        if not look.learned and task.automatic_optimization:
            self.fault(f"{name}.training_step returned no loss, so there was no optimizer step", "model.module")
        params = self.asked.engine.params
        waits = self.asked.engine.backend == "ddp" and not (
            params.get("find_unused_parameters") or params.get("static_graph")
        )
        if waits and look.unused and task.automatic_optimization:
            names = ", ".join(look.unused[:3]) + (f" and {len(look.unused) - 3} more" if len(look.unused) > 3 else "")
            message = f"{names} got no gradient, and ddp waits for one of each parameter; set this to true"
            self.fault(message, "engine.params.find_unused_parameters")

    def numbers(self) -> None:
        """Logged values must be single numbers, and losses finite."""
        for name, value in self.trainer.callback_metrics.items():
            stage, _, rest = name.partition("_")
            metric = next((n for n in self.cfg.model.metrics or {} if rest in (n, f"{n}_epoch")), None)
            key = f"model.metrics.{metric}" if metric else "model.module"
            if value.numel() != 1:
                self.fault(
                    f"{name} is {_tensor(value)}, not one number" + ("; see its `average`" if metric else ""), key
                )
            elif stage in ("val", "test") and rest == "loss" and not math.isfinite(value):
                self.fault(f"{name} is {float(value)} on a batch of random values", "model.loss")

    def fault(self, message: str, key: str) -> None:
        if key not in {fault.key for fault in self.faults if fault.key != "model.module"}:
            self.faults.append(Fault(message, key))

    # ---- what an exception says

    def faults_of(self, error: BaseException, building: Target | None = None) -> list[Fault]:
        """The faults that an exception stands for; `building`: while this target was built."""
        if isinstance(error, _Found):
            return [error.fault]
        if isinstance(error, UserError):
            return error.faults
        if hasattr(error, "exit_code"):
            key, message = _leading_key(str(error))
            known = getattr(error, "key", None) or key
            where = known or (building.name if building else "model.module")
            return [Fault(message, where, exit_code=getattr(error, "exit_code", 2))]
        if isinstance(error, MisconfigurationException):
            return [self.misconfigured(error, building)]
        lacks = needs(error)
        reason = lacks or f"{_words(error)}{own_code.line_of(error)}"
        code = 3 if lacks else 2
        if isinstance(error, KeyError) and isinstance(self.batch, Mapping) and error.args[0] not in self.batch:
            reason += f"; a batch has {', '.join(map(str, self.batch))}"
        if building is not None:  # a slip of ours, or what `build` did not translate
            return [Fault(f"{building.type} cannot be built: {reason}", building.name, exit_code=code)]
        owner, taken = self.owner(error)
        if code == 2 and own_code.lines_of(error) and (owner is None or _is_own(owner)):
            code = 1  # a training ends with its traceback
        if owner is None:
            if says(error, Sentence.NO_GRADIENT):
                return [Fault(_UNCONNECTED, "model.loss" if self.cfg.model.loss else "model.module")]
            message = f"{self.cfg.model.module.type} fails {self.stage}: {reason}"
            fault = Fault(message, "model.module", exit_code=code)
            if self.batch is None:  # it may need what the data module says when it has its data
                self.untried.append(fault)
                return []
            return [fault]
        key = str(owner.name)
        if key == "data.module" and "augment" in owner.params and taken == "augment":
            key, taken = "data.module.params.augment", ""
        given = f" given {taken}" if taken else ""
        message = f"{owner.type}{given} fails {self.stage}: {reason}.{_advice(key, taken)}"
        return [Fault(message, key, exit_code=code)]

    def misconfigured(self, error: BaseException, building: Target | None) -> Fault:
        """What Lightning says of a config, in the config's words where it says it in its own."""
        words, scheduler = " ".join(str(error).split()), self.cfg.model.scheduler
        if "ReduceLROnPlateau" in words:
            if isinstance(scheduler, Target) and "ReduceLROnPlateau" in scheduler.type:
                message = "ReduceLROnPlateau needs a metric to follow, for example val_loss"
                return Fault(message, f"{scheduler.name}.call.monitor")
            wanted = '{"scheduler": …, "monitor": "val_loss"}'
            message = (
                f"{self.cfg.model.module.type}.configure_optimizers gives a ReduceLROnPlateau no metric to follow;"
            )
            return Fault(f"{message} as `lr_scheduler` return {wanted}", "model.module")
        if building is None and self.trainer is None and self.callbacks:
            return Fault(f"Lightning refuses them: {words}", "train.callbacks")
        owner = building or self.owner(error)[0]
        return Fault(f"{owner.type}: {words}" if owner else words, str(owner.name) if owner else "model.module")

    def owner(self, error: BaseException) -> tuple[Target | None, str]:
        """Whose code an exception comes from: the innermost part of the config on the stack, and what it was given."""
        within = False  # inside of Lightning, which an optimizer's step calls for the loss
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            value, code = frame.f_locals.get("self"), frame.f_code
            within = within or "pytorch_lightning" in code.co_filename
            if code.co_name == "__getattr__":  # of a module, for whoever asked it for what it has not
                continue
            if value is not None and value is self.task:
                break
            if within and isinstance(value, torch.optim.Optimizer):
                continue
            owner = self.part(value)
            if owner is not None:
                if owner is self.cfg.data.module:
                    return owner, "augment" if code.co_name == "on_after_batch_transfer" else ""
                given = {name: frame.f_locals.get(name) for name in code.co_varnames[1 : code.co_argcount]}
                tensors = [f"{name} {_tensor(v)}" for name, v in given.items() if isinstance(v, torch.Tensor)]
                return owner, ", ".join(tensors)
        return None, ""

    def part(self, value: Any) -> Target | None:
        """The target that an object was made from."""
        model = self.cfg.model
        if value is not None and value is self.data:
            return self.cfg.data.module
        if isinstance(value, pl.Callback):
            return next((target for target, callback in self.callbacks if callback is value), None)
        if isinstance(value, torch.optim.Optimizer):
            return _of_class(value, model.optimizer)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return _of_class(value, model.scheduler)
        if isinstance(value, nn.Module) and isinstance(self.task, nn.Module):
            path = next((name for name, module in self.task.named_modules() if module is value), None)
            return self.at(path) if path else None
        return None

    def at(self, path: str) -> Target | None:
        """The target that the module at a path inside the task belongs to."""
        model, names = self.cfg.model, path.split(".")
        for depth in range(1, len(names) + 1):
            module, name = self.task.get_submodule(".".join(names[:depth])), names[depth - 1]
            sections: tuple[Any, ...] = (model.metrics,) if isinstance(module, Metric) else (model.network, model.loss)
            for section in sections:
                found = [t for t in _targets(section) if _is_of(module, t)]
                named = [t for t in found if str(t.name).endswith(f".{name}")]
                if found:
                    return (named or found)[0]
        for name in names:  # what a function made has no class to know it by
            for section, words in ((model.network, ("network", "net", "model")), (model.loss, ("loss", "losses"))):
                if isinstance(section, dict) and name in section:
                    return section[name]
                if isinstance(section, Target) and name in words:
                    return section
        return None


class _Look(pl.Callback):
    """Looks on while a step is tried, and ends the training after it."""

    def __init__(self, attempt: _Attempt):
        self.attempt = attempt
        self.learned = False
        self.unused: list[str] = []
        self._weights: dict[str, torch.Tensor] = {}
        self._broken: str | None = None  # the first module that gave what is not finite

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        task = self.attempt.cfg.model.module.type
        if not any(optimizer.param_groups for optimizer in trainer.optimizers) and pl_module.automatic_optimization:
            raise _Found(Fault(f"{task}.configure_optimizers gives no optimizer: nothing would learn", "model.module"))
        self.attempt.stage = "in the training step"
        for config in trainer.lr_scheduler_configs:
            config.frequency, config.strict = 1, False  # each schedule steps; a missing metric is told of later
        self._weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        for name, module in pl_module.named_modules():
            if name and not isinstance(module, Metric):
                module.register_forward_hook(self._watch(name))

    def _watch(self, name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            numbers = isinstance(output, torch.Tensor) and output.is_floating_point()
            if self._broken is None and numbers and not torch.isfinite(output).all():
                self._broken = name

        return hook

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        attempt, self.learned = self.attempt, True
        if loss.numel() != 1:
            message = f"the loss is {_tensor(loss)}, not one number; a loss's `reduction` is mostly mean"
            raise _Found(Fault(message, "model.loss" if attempt.cfg.model.loss else "model.module"))
        if trainer.global_step == 0 and not torch.isfinite(loss).all():
            raise _Found(self._not_finite(pl_module, float(loss.detach())))

    def _not_finite(self, module: pl.LightningModule, loss: float) -> Fault:
        said = f"the loss of the first training step is {loss}"
        bad = [name for name, p in module.named_parameters() if not torch.isfinite(p).all()]
        path = bad[0].rpartition(".")[0] if bad else self._broken
        owner = self.attempt.at(path) if path else None
        key = str(owner.name) if owner else "model.loss" if self.attempt.cfg.model.loss else "model.module"
        if bad:
            return Fault(f"{said}: {bad[0]} begins with values that are not finite", key)
        if path:
            kind = type(module.get_submodule(path)).__name__
            return Fault(f"{said}: {path} ({kind}) is the first module whose output is not finite", key)
        return Fault(said, key)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        learning = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        self.unused = [name for name, p in learning.items() if p.grad is None]
        if len(self.unused) == len(learning):
            raise _Found(Fault(_UNCONNECTED, "model.loss" if self.attempt.cfg.model.loss else "model.module"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.attempt.logged["step"] = set(trainer.callback_metrics)
        self.attempt.stage = "in the validation step"
        trainer.should_stop = True
        # How far a step goes is the learning rate's business: the network is judged as it was built.
        parameters = dict(pl_module.named_parameters())
        with torch.no_grad():
            for name, value in self._weights.items():
                parameters[name].copy_(value)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attempt.logged["validation"] = set(trainer.callback_metrics)
        self.attempt.stage = "at the end of the epoch"
        self.attempt.numbers()  # before Lightning stumbles over what is not one number
        if self.attempt.faults:
            raise _Found(self.attempt.faults.pop())

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.attempt.logged = {moment: set() for moment in ("step", "validation", "epoch")}


_UNCONNECTED = "the loss depends on no parameter that learns, so no gradient reaches the network; is it detached?"


class _Trainer(pl.Trainer):
    """A Trainer of one batch an epoch that gives schedules a usual length."""

    length = STEPS

    @property
    def estimated_stepping_batches(self) -> int:
        return self.length


class _Nowhere(DummyLogger):
    """Takes everything and keeps nothing; files that a callback puts beside a run's go to a folder that is removed."""

    def __init__(self, folder: Path):
        super().__init__()
        self.artifact_folder = folder

    @property
    def save_dir(self) -> str:
        return str(self.artifact_folder)

    @property
    def log_dir(self) -> str:
        return str(self.artifact_folder)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing but the result is said: no news of Lightning's, no warnings; what others print goes to stderr."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "deeplightning")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        # torch only warns where it spreads labels (B,) against answers (B, 1) to (B, B): a loss of something else.
        warnings.filterwarnings("error", message="Using a target size")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _loader(batch: Any) -> DataLoader:
    """Gives one batch, or none."""
    batches: Any = [] if batch is None else [batch]
    return DataLoader(batches, batch_size=None)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Whoever asks for a host gets an `_Offline`."""
    known = socket.getaddrinfo

    def refuse(*_: Any, **__: Any) -> Any:
        raise _Offline("a dry run uses no network")

    socket.getaddrinfo = refuse
    try:
        yield
    finally:
        socket.getaddrinfo = known


def _wants_network(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _Offline) or isinstance(getattr(error, "reason", None), _Offline):
            return True
        error = error.__cause__ or error.__context__
    return False


# ---- config


def _targets(section: Any) -> list[Any]:
    """The targets of a section that holds one, several by name, or none."""
    return [] if section is None else list(section.values()) if isinstance(section, dict) else [section]


def _is_of(value: Any, target: Target) -> bool:
    """Whether an object is an instance of the class that a target names."""
    try:
        found = find(target.type)
    except ValueError:
        return False
    return isinstance(found, type) and isinstance(value, found)


def _is_own(target: Target) -> bool:
    """Whether the class or function that a target names is the user's own."""
    module = sys.modules.get(find(target.type).__module__)
    return own_code.is_theirs(getattr(module, "__file__", None) or "<")


def _of_class(value: Any, section: Any) -> Target | None:
    targets = _targets(section)
    return next((t for t in targets if _is_of(value, t)), targets[0] if targets else None)


def _place(cfg: Config, key: str | None) -> str | None:
    """Where the target that a key names was written."""
    model = cfg.model
    sections = (model.network, model.loss, model.metrics, model.optimizer, model.scheduler)
    targets = [cfg.data.module, model.module, *cfg.train.callbacks, *(t for s in sections for t in _targets(s))]
    return next((target.place for target in targets if target.name == key), None)


def _leading_key(message: str) -> tuple[str | None, str]:
    """A message that begins with the config key it is about, divided."""
    match = re.match(r"((?:data|model|train|engine)\.[\w.]*\w):? (.*)", message, re.DOTALL)
    return (match[1], match[2]) if match else (None, message)


def _needs_gpu(asked: Config, fault: Fault) -> bool:
    return asked.engine.gpus is not None and bool(re.search(r"not implemented for '(BFloat16|Half)'", fault.message))


# ---- words


def _reason(fault: Fault) -> str:
    return fault.message.partition(": ")[2]


def _words(error: BaseException) -> str:
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line.rstrip('.')}"


def _tensor(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _advice(key: str, taken: str) -> str:
    """The next step, where the shapes tell one."""
    floats, labels = re.search(r"float\d+ \(\d+, (\d+)\)", taken), re.search(r"int64 \(\d+,\)", taken)
    if not (floats and labels):
        return ""
    if key.startswith("model.loss"):
        return " Labels of classes go with torch.nn.CrossEntropyLoss"
    if key.startswith("model.metrics"):
        return (
            f" For labels of classes take one of torchmetrics.classification.Multiclass…, with num_classes: {floats[1]}"
        )
    return ""
