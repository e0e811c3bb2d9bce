"""A config is tried out: a made-up batch goes through a training and a validation step, and what does not fit is named.

Nothing is read, opened or written: no data, no run, no checkpoint, no network connection. The CPU does it in one
process; where the run has several, two more do the same, and what they log and exchange is compared.
"""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

from deeplightning import own_code
from deeplightning.config.automatic import unfilled
from deeplightning.config.schema import Config, Optimizer, Target
from deeplightning.config.target import build
from deeplightning.dry_run.attempt import Attempt
from deeplightning.dry_run.diagnosis import faults_of, targets_of
from deeplightning.dry_run.isolation import OF_WORKERS, offline, on_one_cpu, undisturbed, wants_network
from deeplightning.dry_run.on_gpu import compute_on_gpu, refuse_on_cpu, wants_gpu
from deeplightning.dry_run.ranks import Event, Ranks, Reporter
from deeplightning.dry_run.steps import STEPS, take_steps
from deeplightning.engine.plan import world_size
from deeplightning.faults import Fault, nearest
from deeplightning.private.messages import Sentence


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
    several, gpu = world_size(cfg.engine) > 1, wants_gpu(cfg)
    ranks = Ranks(lambda rank, report: _as_rank(cfg, rank, report), 2 if several else 1) if several or gpu else None
    with undisturbed(), offline(), tempfile.TemporaryDirectory() as folder, ranks or contextlib.nullcontext():
        trial.run(Path(folder))
        if _is_left_to_ranks(trial.faults, several, gpu):
            trial.is_through, trial.faults, trial.untried = True, [], []
        if ranks is not None and trial.is_through and not trial.faults:
            difference, certain = ranks.difference()
            told_in = trial.faults if certain else trial.untried
            told_in += [Fault(difference, ranks.key)] if difference else []

    def distinct(notes: list[Fault]) -> list[Fault]:
        clean = [replace(f, message=cfg.redact(f.message), place=f.place or _place(cfg, f.key)) for f in notes]
        return list(dict.fromkeys(clean))

    return distinct(trial.faults), distinct(trial.untried)


def _is_left_to_ranks(faults: list[Fault], several: bool, gpu: bool) -> bool:
    """Whether the user's own code wants what only the processes have: a GPU, a process group, or a rank."""
    wanted = [Sentence.NO_CUDA.value] if gpu else []
    wanted += [Sentence.NO_GROUP.value, r"'(LOCAL_RANK|NODE_RANK|WORLD_SIZE)'"] if several else []
    return any(re.search("|".join(wanted), fault.message) for fault in faults) if wanted else False


def _as_rank(cfg: Config, rank: int, report: Reporter) -> Event:
    """The same as one of the processes: on a pretended GPU if the config asks for some, and in a process group if there
    are two. Each name that is logged by every rank is noted, and what each builds.

    Returns:
        How it ends, with what is wrong, if anything.
    """
    log, wrap = pl.LightningModule.log, DDPStrategy.configure_ddp
    gpu = compute_on_gpu(cfg, rank) if wants_gpu(cfg) else None

    def noted(self: Any, name: str, *values: Any, **options: Any) -> None:
        if not options.get("rank_zero_only"):
            report("log", name)
        if gpu is not None and options.get("sync_dist") and world_size(cfg.engine) > 1:
            refuse_on_cpu(gpu, values[:1] or options.get("value"), f"`{name}` is exchanged by sync_dist=True,")
        log(self, name, *values, **options)

    def compared(self: DDPStrategy) -> None:
        report("parameters", _parameters_of(self.model), "")
        wrap(self)

    pl.LightningModule.log = noted  # type: ignore[method-assign]  # this process does nothing else
    DDPStrategy.configure_ddp = compared  # type: ignore[method-assign]
    trial = _Trial(cfg)
    if world_size(cfg.engine) > 1:
        trial.cfg.engine.processes, trial.cfg.engine.backend = 2, "ddp"
        trial.cfg.engine.params = {"process_group_backend": "gloo", "find_unused_parameters": True}
    if gpu is not None:
        report.look = lambda given, words: refuse_on_cpu(gpu, given, words)
    with tempfile.TemporaryDirectory() as folder:
        trial.run(Path(folder))
    if not trial.faults:
        return Event("end")
    fault, refused = trial.faults[0], gpu is not None and bool(gpu.refused)
    where = "on a pretended GPU " if gpu is not None else ""
    return Event("error", f"{where}{fault.message}", key=fault.key or "model.module", is_certain=gpu is None or refused)


def _parameters_of(task: Any) -> str:
    """Names and shapes of the parameters, one a line, each with the line of the user's own class around it."""
    lines, places = [], dict[str, str]()
    for path, module in task.named_modules():
        code = getattr(type(module).__init__, "__code__", None)
        place = places.get(path.rpartition(".")[0], places.get("", ""))
        if code is not None and own_code.is_theirs(code.co_filename):
            place = f" ({own_code.short(code.co_filename)}:{code.co_firstlineno})"
        places[path] = place
        for name, parameter in module.named_parameters(recurse=False):
            lines.append(f"{path}{path and '.'}{name} {tuple(parameter.shape)}{place}")
    return "\n".join(lines)


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
            attempt = Attempt(self.cfg, self.asked, folder)
            try:
                take_steps(attempt)
                found = attempt.faults
            except (Exception, SystemExit) as error:
                if isinstance(error.__context__, KeyboardInterrupt):  # Lightning makes a SystemExit of it
                    raise KeyboardInterrupt from None
                if wants_network(error):
                    if self.without_weights():
                        continue
                    message = "wants a network connection, which a dry run does not use; nothing behind it was tried"
                    self.untried.append(Fault(message + own_code.line_of(error), "model.module"))
                    return
                found = attempt.faults + faults_of(attempt, error)
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
        for target in targets_of(self.cfg.model.network):
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
        elif key.startswith("engine.params.tensor_"):
            self.asked = copy.deepcopy(self.asked)
            self.asked.engine.params |= {"tensor_parallel": 1, "tensor_plan": None}
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

    def unlogged(self, attempt: Attempt) -> list[Fault]:
        """Names that something waits for and nobody logs."""
        if "train" not in self.asked.stages or self.asked.train.num_epochs == 0 or not attempt.logged:
            return []  # no step was taken
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

    def monitors(self, attempt: Attempt) -> Iterator[tuple[str, str, str]]:
        """Key, name and moment (the end of a `step`, a `validation` or an `epoch`) of each metric waited for."""
        train = self.asked.train
        judged = "validation" if train.val_every_n_epoch < 1 else "epoch"
        if train.checkpoint.monitor is not None:
            yield "train.checkpoint.monitor", train.checkpoint.monitor, judged
        if train.early_stop is not None:
            usual = train.val_every_n_epoch == 1
            yield "train.early_stop.metric", train.early_stop.metric, "epoch" if usual else "validation"
        for target in targets_of(self.asked.model.scheduler):
            call = getattr(target, "call", None)
            if call is not None and call.monitor is not None:
                yield f"{target.name}.call.monitor", call.monitor, "step" if call.interval == "step" else "epoch"
        for target, callback in attempt.callbacks:
            if isinstance(getattr(callback, "monitor", None), str):
                yield f"{target.name}.params.monitor", callback.monitor, "epoch"

    def parts(self) -> list[Fault]:
        """What is wrong with single parts, each built alone: their users did not come so far."""
        model, faults = self.cfg.model, []
        optimizer: object = None

        def attempt(target: Target, *given: object, **more: object) -> Any:
            try:
                return build(target, *given, **more)
            except Exception as error:
                if not wants_network(error):
                    faults.extend(faults_of(Attempt(self.cfg, self.asked, Path()), error, target))
                return None

        waiting = [params for _, params, _ in unfilled(self.cfg)]  # for the data
        for section in (model.network, model.loss, model.metrics):
            for target in targets_of(section):
                if not any(target.params is params for params in waiting):
                    attempt(target)
        for target in targets_of(model.optimizer):
            optimizer = attempt(target, [nn.Parameter(torch.zeros(2, 2))])
        for target in targets_of(model.scheduler) if optimizer is not None else ():
            numbers = {name: STEPS for name, value in target.params.items() if value == "auto"}
            attempt(target, optimizer, **numbers)
        for target in self.cfg.train.callbacks:
            attempt(target)
        return faults


def _place(cfg: Config, key: str | None) -> str | None:
    """Where the target that a key names was written."""
    model = cfg.model
    sections = (model.network, model.loss, model.metrics, model.optimizer, model.scheduler)
    targets = [cfg.data.module, model.module, *cfg.train.callbacks, *(t for s in sections for t in targets_of(s))]
    return next((target.place for target in targets if target.name == key), None)


def _needs_gpu(asked: Config, fault: Fault) -> bool:
    return asked.engine.gpus is not None and bool(re.search(r"not implemented for '(BFloat16|Half)'", fault.message))


def _reason(fault: Fault) -> str:
    return fault.message.partition(": ")[2]
