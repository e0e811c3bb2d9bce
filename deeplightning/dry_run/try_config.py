"""Try a config out: pass a made-up batch through its steps in one CPU process, and report what does not fit.

Nothing is read, opened or written: no data, no run, no checkpoint, no network connection. An entry point of the group
`deeplightning.dry_run` may repeat it on other devices and in several processes.
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

import torch
from torch import nn
from torch.utils.data import DataLoader

from deeplightning import own_code
from deeplightning.config.auto_values import unfilled
from deeplightning.config.plugins import DRY_RUN, load
from deeplightning.config.schema import Config, Optimizer, Target
from deeplightning.config.target import build
from deeplightning.dry_run.diagnosis import Attempt, faults_of, targets_of
from deeplightning.dry_run.isolation import OF_WORKERS, drop_weights, offline, on_one_cpu, undisturbed, wants_network
from deeplightning.dry_run.one_batch import STEPS, take_steps
from deeplightning.engine.plan import world_size
from deeplightning.faults import Fault, nearest, not_installed
from deeplightning.private.messages import Sentence


def dry_run(cfg: Config) -> tuple[list[Fault], list[Fault]]:
    """Build what a config describes as training would, and pass one batch through its steps.

    The batch is the data module's `example_batch(size)`. Hooks of the user's own callbacks run; loggers are not built.
    One CPU process does this. For a config of GPUs or several processes the plug-in repeats it on those devices.

    Args:
        cfg: a config from `load_config`; it is not changed.

    Returns:
        The faults, and what could not be tried.
    """
    trial, several = Trial(cfg), world_size(cfg.engine) > 1
    on_gpu = cfg.engine.gpus is not None or (cfg.asked or {}).get("engine.gpus") == "auto"
    devices = load(DRY_RUN, "plan") if several or on_gpu else None
    there = devices(cfg, on_gpu) if devices is not None else contextlib.nullcontext()
    with undisturbed(), offline(), tempfile.TemporaryDirectory() as folder, there as compare:
        trial.run(Path(folder))
        if _needs_devices(trial.faults, several, on_gpu):
            trial.is_through, trial.faults, trial.untried = True, [], []
        if compare is not None:
            compare(trial)
        elif several or on_gpu:
            key = "engine.gpus" if on_gpu else "engine.processes"
            trial.untried.append(Fault(f"tried in one process on the CPU only; {not_installed('plan')}", key))

    def distinct(notes: list[Fault]) -> list[Fault]:
        clean = [replace(f, message=cfg.redact(f.message), place=f.place or _place(cfg, f.key)) for f in notes]
        return list(dict.fromkeys(clean))

    return distinct(trial.faults), distinct(trial.untried)


def _needs_devices(faults: list[Fault], several: bool, on_gpu: bool) -> bool:
    """Return whether the user's own code failed for lack of a GPU, a process group or the variables of a rank."""
    wanted = [Sentence.NO_CUDA.value] if on_gpu else []
    wanted += [Sentence.NO_GROUP.value, r"'(LOCAL_RANK|NODE_RANK|WORLD_SIZE)'"] if several else []
    return any(re.search("|".join(wanted), fault.message) for fault in faults) if wanted else False


class Trial:
    """Try a config until no further fault is found: remove the part at fault, and try the rest again.

    Attributes:
        faults: what is wrong.
        untried: what could not be tried.
        is_through: whether a batch went through all steps.
    """

    def __init__(self, cfg: Config):
        self.asked = cfg
        self.cfg = on_one_cpu(cfg)
        self.faults: list[Fault] = []
        self.untried: list[Fault] = []
        self.is_through = False
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
                    if keys := drop_weights(self.cfg):
                        message = "these weights are not on this machine yet; random ones were tried"
                        self.untried += [Fault(message, key) for key in keys]
                        continue
                    message = "wants a network connection, which a dry run does not use; nothing behind it was tried"
                    self.untried.append(Fault(message + own_code.line_of(error), "model.module"))
                    return
                found = attempt.faults + faults_of(attempt, error)
                lacks_half = [re.search(r"not implemented for '(BFloat16|Half)'", fault.message) for fault in found]
                if engine.gpus is not None and any(lacks_half):
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

    def take_out(self, fault: Fault) -> bool:
        """Remove what is at fault from the config; return False where that is impossible."""
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
        """Return faults for monitored metrics that nothing logs."""
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
        """Yield key, name and moment (the end of a `step`, a `validation` or an `epoch`) of each monitored metric."""
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
        """Build each part alone, and return its faults: no step has used them."""
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
    """Return where the target that a key names is written."""
    model = cfg.model
    sections = (model.network, model.loss, model.metrics, model.optimizer, model.scheduler)
    targets = [cfg.data.module, model.module, *cfg.train.callbacks, *(t for s in sections for t in targets_of(s))]
    return next((target.place for target in targets if target.name == key), None)


def _reason(fault: Fault) -> str:
    return fault.message.partition(": ")[2]
