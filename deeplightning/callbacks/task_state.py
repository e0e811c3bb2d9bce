"""What a checkpoint keeps of a task besides its `state_dict`.

`self.save_hyperparameters()` of a user's modules stores plain values only: a checkpoint then loads with `weights_only`,
and `load_from_checkpoint` needs only the other values as arguments.
"""

import weakref
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torchmetrics import Metric

from deeplightning.private.lightning import set_logged_hyperparameters
from deeplightning.private.torch import in_place_version, non_persistent_buffers

_NOT_PLAIN: Any = object()


def log_plain_values(trainer: Trainer, redact: Callable[[str], str]) -> None:
    """Restrict the hyperparameters that Lightning is about to log to plain values, without secrets."""
    for module in _modules(trainer):
        set_logged_hyperparameters(module, _plain_items(module.hparams_initial, redact))


def save_plain_values(trainer: Trainer, checkpoint: dict[str, Any], redact: Callable[[str], str]) -> None:
    """Restrict the hyperparameters in a checkpoint to plain values, without secrets."""
    for module in _modules(trainer):
        key, kind = module.CHECKPOINT_HYPER_PARAMS_KEY, module.CHECKPOINT_HYPER_PARAMS_TYPE
        checkpoint[key] = _plain_items(module.hparams, redact)
        if kind in checkpoint:  # a class of OmegaConf; Lightning accepts this name instead
            checkpoint[kind] = "AttributeDict"


def _modules(trainer: Trainer) -> list[Any]:
    """Return the task and the data module, if they saved hyperparameters."""
    modules = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    return [module for module in modules if module is not None and module.hparams]


def _plain_items(values: Any, redact: Callable[[str], str]) -> dict[Any, Any]:
    found = {key: _plain(values[key], redact) for key in values}
    return {key: value for key, value in found.items() if value is not _NOT_PLAIN}


def _plain(value: Any, redact: Callable[[str], str]) -> Any:
    """Return a value as numbers, strings, tensors, and lists and dicts of these, or `_NOT_PLAIN` otherwise."""
    value = value.item() if isinstance(value, np.generic) else value
    value = vars(value) if isinstance(value, Namespace) else value
    if value is None or type(value) in (bool, int, float, torch.Tensor, torch.dtype, torch.device, torch.Size):
        return value
    if isinstance(value, str | Path):
        return redact(str(value))
    if isinstance(value, Mapping):
        items = {key: _plain(inner, redact) for key, inner in value.items()}
        is_plain = all(isinstance(key, str | int) and inner is not _NOT_PLAIN for key, inner in items.items())
        return items if is_plain else _NOT_PLAIN
    if type(value) in (list, tuple, set):
        inside = [_plain(inner, redact) for inner in value]
        return _NOT_PLAIN if any(inner is _NOT_PLAIN for inner in inside) else type(value)(inside)
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        return _plain(OmegaConf.to_container(value, resolve=True), redact)
    return _NOT_PLAIN


def frozen_names(task: LightningModule) -> list[str]:
    """Return the names of frozen parameters, and of batch norms whose statistics a fine-tuning callback has frozen."""
    untracked = [n for n, m in task.named_modules() if getattr(m, "track_running_stats", None) is False]
    return [name for name, parameter in task.named_parameters() if not parameter.requires_grad] + untracked


def unsaved_tensors(task: LightningModule) -> Iterator[tuple[str, tuple[weakref.ref[torch.Tensor], int], bool]]:
    """Yield the tensors that a task's `state_dict` lacks, except metrics (see `deeplightning.callbacks.gathered`), as
    name, (reference, version, which grows with each in-place change), and whether it is a buffer."""
    for name, module in task.named_modules():
        if isinstance(module, Metric) or type(module).get_extra_state is not nn.Module.get_extra_state:
            continue
        buffers = non_persistent_buffers(module)
        for key, value in {**vars(module), **buffers}.items():
            if isinstance(value, torch.Tensor) and not (value.requires_grad or value.is_inference()):
                yield f"{name}.{key}".lstrip("."), (weakref.ref(value), in_place_version(value)), key in buffers


def restore_frozen(task: LightningModule, frozen: Iterable[object]) -> None:
    """Restore what `frozen_names` returned, since fine-tuning callbacks have frozen parameters again in `setup`."""
    frozen = {name for name in frozen if isinstance(name, str)}
    for name, parameter in task.named_parameters():
        if parameter.requires_grad == (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, module in task.named_modules():
        if hasattr(module, "track_running_stats"):
            module.track_running_stats = name not in frozen
