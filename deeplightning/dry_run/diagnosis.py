"""Diagnose an exception of a dry run: find the part of the config that raised it from the objects on the stack."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import Metric

from deeplightning import own_code
from deeplightning.batches import structure
from deeplightning.config.schema import Config, Target, targets_of
from deeplightning.config.target import find, needs
from deeplightning.faults import Fault, UserError
from deeplightning.private.messages import ErrorText, matches
from deeplightning.words import first_line


class DeviceError(RuntimeError):
    """Raised, with torch's message, if another device would refuse what the CPU accepts."""


@dataclass
class Attempt:
    """One pass through a config, up to the first error.

    Attributes:
        cfg: the config as it is tried.
        asked: the config as the user wrote it.
        folder: temporary folder for files that a run would write.
        stage: the current step, in words for messages.
        saved: path of the checkpoint of the training, if any.
        logged: names of the metrics at the end of an epoch, or None if there was no training.
    """

    cfg: Config
    asked: Config
    folder: Path
    stage: str = "before the first step"
    faults: list[Fault] = field(default_factory=list)
    untried: list[Fault] = field(default_factory=list)
    data: Any = None
    task: Any = None
    batch: Any = None
    trainer: Any = None
    callbacks: list[tuple[Target, Any]] = field(default_factory=list)
    logged: set[str] | None = None
    saved: str | None = None

    @property
    def loss_key(self) -> str:
        """Config key for faults of the loss."""
        return "model.loss" if self.cfg.model.loss else "model.module"


def faults_of(attempt: Attempt, error: BaseException, building: Target | None = None) -> list[Fault]:
    """Return the faults behind an exception; `building` is the target that was being built, if any."""
    if isinstance(error, UserError):
        return error.faults
    if isinstance(error.__cause__, DeviceError):  # raised by a metric that wraps it
        error = error.__cause__
    if hasattr(error, "exit_code"):
        # A message may begin with its config key.
        match = re.match(r"((?:data|model|train|engine)\.[\w.]*\w):? (.*)", str(error), re.DOTALL)
        key, message = match.groups() if match else (None, str(error))
        line = own_code.user_location(error.__cause__) if error.__cause__ is not None else ""
        message += line if line not in message else ""
        known = getattr(error, "key", None) or key
        where = known or (building.name if building else "model.module")
        return [Fault(message, where, exit_code=getattr(error, "exit_code", 2))]
    if isinstance(error, MisconfigurationException):
        words = " ".join(str(error).split())
        if building is None and attempt.trainer is None and attempt.callbacks:
            return [Fault(f"Lightning refuses them: {words}", "train.callbacks")]
        part = building or _owner(attempt, error)[0] or attempt.cfg.model.module
        return [Fault(f"{part.type}: {words}", str(part.name))]
    lacks = needs(error)
    reason = lacks or f"{error_in_words(error)}{own_code.user_location(error)}"
    code = 3 if lacks else 2
    if isinstance(error, KeyError) and isinstance(attempt.batch, Mapping) and error.args[0] not in attempt.batch:
        reason += f"; a batch has {', '.join(map(str, attempt.batch))}"
    if building is not None:  # a bug of ours, or an error that `build` did not translate
        return [Fault(f"{building.type} cannot be built: {reason}", building.name, exit_code=code)]
    owner, inputs = _owner(attempt, error)
    if code == 2 and own_code.user_frames(error):
        module = sys.modules.get(find(owner.type).__module__) if owner is not None else None
        if owner is None or own_code.is_user_file(getattr(module, "__file__", None) or "<"):
            code = 5  # as in a training, which shows the traceback
    if owner is None:
        if matches(error, ErrorText.NO_GRADIENT):
            return [Fault(NO_GRADIENT_MESSAGE, attempt.loss_key)]
        line = "" if own_code.user_frames(error) else _line_of_step(attempt)
        message = f"{attempt.cfg.model.module.type} fails {attempt.stage}: {reason}{line}"
        fault = Fault(message, "model.module", exit_code=code)
        if attempt.batch is None:  # it may need values that the data module has only after reading its data
            attempt.untried.append(fault)
            return []
        return [fault]
    key = str(owner.name)
    if key == "data.module" and "augment" in owner.params and inputs == "augment":
        key, inputs = "data.module.params.augment", ""
    given = f" given {inputs}" if inputs else ""
    return [Fault(f"{owner.type}{given} fails {attempt.stage}: {reason}.", key, exit_code=code)]


def _owner(attempt: Attempt, error: BaseException) -> tuple[Target | None, str]:
    """Return the innermost part of the config on the stack, and the tensors that it was called with."""
    within = False  # inside Lightning, which an optimizer's step calls to compute the loss
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        value, code = frame.f_locals.get("self"), frame.f_code
        within = within or "pytorch_lightning" in code.co_filename
        if code.co_name == "__getattr__":  # a missing attribute of a module: the caller is at fault
            continue
        if value is not None and value is attempt.task:
            break
        if within and isinstance(value, torch.optim.Optimizer):
            continue
        owner = _target_of(attempt, value)
        if owner is not None:
            if owner is attempt.cfg.data.module:
                return owner, "augment" if code.co_name == "on_after_batch_transfer" else ""
            given = {name: frame.f_locals.get(name) for name in code.co_varnames[1 : code.co_argcount]}
            tensors = [f"{name} {structure(v)}" for name, v in given.items() if isinstance(v, torch.Tensor)]
            return owner, ", ".join(tensors)
    return None, ""


def _target_of(attempt: Attempt, value: object) -> Target | None:
    """Return the target that an object was built from, if any."""
    model = attempt.cfg.model
    if value is not None and value is attempt.data:
        return attempt.cfg.data.module
    if isinstance(value, pl.Callback):
        return next((target for target, callback in attempt.callbacks if callback is value), None)
    if isinstance(value, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        targets = targets_of(model.optimizer if isinstance(value, torch.optim.Optimizer) else model.scheduler)
        return next((t for t in targets if _is_instance_of(value, t)), targets[0] if targets else None)
    if isinstance(value, nn.Module) and isinstance(attempt.task, nn.Module):
        sections = (model.metrics,) if isinstance(value, Metric) else (model.network, model.loss)
        targets = [target for section in sections for target in targets_of(section)]
        path = next((name for name, module in attempt.task.named_modules() if module is value), "")
        of_class = [target for target in targets if _is_instance_of(value, target)]
        named = [t for t in of_class or targets if str(t.name).endswith(f".{path.rpartition('.')[2]}")]
        return next(iter(named or of_class), None)
    return None


NO_GRADIENT_MESSAGE = "the loss depends on no trainable parameter, so no gradient reaches the network; is it detached?"


def _is_instance_of(value: object, target: Target) -> bool:
    """Return whether an object is an instance of the class that a target names."""
    try:
        found = find(target.type)
    except ValueError:
        return False
    return isinstance(found, type) and isinstance(value, found)


def _line_of_step(attempt: Attempt) -> str:
    """Return ` (file:line)` of the task's step in this stage if it is the user's code, else ""."""
    match = re.match(r"in the (training|validation|test|predict) step", attempt.stage)
    code: Any = getattr(getattr(type(attempt.task), f"{match[1]}_step", None), "__code__", None) if match else None
    if code is None or not own_code.is_user_file(code.co_filename):
        return ""
    return f" ({own_code.short(code.co_filename)}:{code.co_firstlineno})"


def error_in_words(error: BaseException) -> str:
    name, line = type(error).__name__, first_line(error)
    if isinstance(error, DeviceError):
        return line
    return name if line == name else f"{name}: {line.rstrip('.')}"
