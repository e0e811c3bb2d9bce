"""Prepare the network before training: initial weights from a checkpoint, run or file of tensors (`model.init_from`),
64-bit precision, and activation checkpointing (`engine.activation_checkpointing`)."""

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from deeplightning.engine.checkpoint_reading import read_file, read_weights, whole_shapes
from deeplightning.faults import CheckpointError, ConfigError, Fault, nearest
from deeplightning.runfolder import RunFolder, from_start
from deeplightning.tracking import resolve_run

log = logging.getLogger("deeplightning")


class StartWeights(Callback):
    """Load weights from a file into the task before training, unless a run is resumed.

    Tensors are matched by shape and name, in the task or in its network. Others keep their initial values and are
    listed in a warning, so that a network with another last layer can start from a trained one.

    Args:
        name: a path, or a RUN whose best weights are used.
        tracking_uri: the store in which a run's id is looked up.

    Raises:
        CheckpointError: (in the hooks) there are no such weights, or none fits.
    """

    def __init__(self, name: str, tracking_uri: str | None):
        self.name, self.tracking_uri = name, tracking_uri
        self._weights: dict[str, Any] | None = None  # {} after loading, so that later stages keep the trained ones

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage in ("fit", "validate") and trainer.ckpt_path is None and self._weights is None:
            self.path = self._find()
            self._weights = _read_tensors(self.path)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._load(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate" and trainer.ckpt_path is None:  # `num_epochs: 0`
            self._load(trainer)

    def _find(self) -> Path:
        path = from_start(self.name)
        if path.is_file() or path.suffix in (".ckpt", ".safetensors", ".pt", ".pth"):
            return path
        folder = RunFolder(resolve_run(self.name, self.tracking_uri))
        for path in (folder.best, folder.last, folder.bundle_weights, folder.path / "model.safetensors"):
            if path.is_file():
                return path
        raise CheckpointError(Fault(f"{folder.path}: there are no weights in this folder", "model.init_from"))

    def _load(self, trainer: Trainer) -> None:
        module, weights, self._weights = trainer.lightning_module, self._weights, {}
        if not weights:
            return
        settings = {name for name, _ in module.named_buffers() if name.startswith("losses.")}  # such as class weights
        weights = {name: tensor for name, tensor in weights.items() if name not in settings}
        ours = {name: tensor for name, tensor in whole_shapes(module).items() if name not in settings}
        prefixes = ["", *(f"{name}." for name, _ in module.named_children())]
        prefix = max(prefixes, key=lambda start: sum(start + name in ours for name in weights))
        found = {prefix + name: tensor for name, tensor in weights.items()}
        fit = {name: t for name, t in found.items() if name in ours and ours[name].shape == t.shape}
        if not fit:
            raise CheckpointError(Fault(f"no tensor of {self.path} fits the network", "model.init_from"))
        trainer.strategy.load_model_state_dict({"state_dict": fit}, strict=False)
        log.info("starts     from %d of %d tensors of %s", len(fit), len(weights), self.path)
        has_tokens = getattr(module, "text_spec", None) is not None
        content = read_file(self.path) if has_tokens and self.path.suffix != ".safetensors" else {}
        saved = content.get(getattr(module, "checkpoint_key", ""))
        if isinstance(saved, dict) and saved.get("content") not in (None, module.travels().get("content")):  # type: ignore[operator]
            log.warning(
                "model.init_from: %s has other tokens, so its embeddings belong to other words; set "
                "data.module.params.vocabulary to the vocabulary.txt of its bundle",
                self.path,
            )
        if left := [name for name in {**ours, **found} if name not in fit]:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            log.warning("model.init_from: not loaded, because names or shapes differ: %s%s", ", ".join(left[:3]), more)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        return read_weights(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(Fault(f"{path} cannot be read: {error}", "model.init_from")) from error


class Double(Callback):
    """Convert the task to 64 bits (`engine.precision`) before weights are restored: if the constructor builds the
    network, Lightning 2.6 would round them to 32 bits."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.double()


class Recompute(Callback):
    """Checkpoint activations: modules repeat their forward pass during the backward pass, with the same random numbers.

    Source: https://arxiv.org/abs/1604.06174

    Args:
        modules: names in the network, such as `layers.0`, or classes, such as `TransformerEncoderLayer`.

    Raises:
        ConfigError: (when training begins) the network has no such module.
    """

    def __init__(self, modules: Sequence[str]):
        self.modules = modules

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not earlier, so that the hooks of a strategy around a module's forward pass apply to both passes.
        names = [(name.partition(".")[2], module) for name, module in pl_module.named_modules() if "." in name]
        for pattern in self.modules:
            selected = [module for name, module in names if pattern in (name, _class_name(module))]
            if not selected:
                choices = {name for name, _ in names} | {_class_name(module) for _, module in names}
                message = f"no module has the name or class {pattern}.{nearest(pattern, choices)}"
                raise ConfigError(Fault(message, "engine.activation_checkpointing", found=pattern))
            for module in selected:
                if not isinstance(module.forward, partial):  # selected by both name and class
                    module.forward = partial(_recomputed, module, module.forward)


def _recomputed(module: nn.Module, forward: Callable[..., Any], /, *inputs: Any, **named: Any) -> Any:
    """Call `forward` with recomputation, which must not update buffers again, such as the means of batch norm."""
    passes = itertools.count()

    def one_pass(*inputs: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or next(passes) == 0:  # compiled code updates them once
            return forward(*inputs, **named)
        kept = [(one, *item) for one in module.modules() for item in one.named_buffers("", False, False)]
        for owner, name, buffer in kept:
            setattr(owner, name, buffer.clone())
        try:
            return forward(*inputs, **named)
        finally:  # torch ends a recomputation by an exception
            for owner, name, buffer in kept:
                setattr(owner, name, buffer)

    return checkpoint(one_pass, *inputs, use_reentrant=False, **named)


def _class_name(module: nn.Module) -> str:
    """Return the class name of a module without the prefix that `fully_shard` adds (torch 2.15)."""
    return type(module).__name__.removeprefix("FSDP")
