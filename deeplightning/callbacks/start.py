"""`model.init_from`: training starts from the weights of a checkpoint, of a run, or of a file of tensors."""

import logging
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from deeplightning.engine.checkpoint_io import read_weights
from deeplightning.engine.sharded import whole_shapes
from deeplightning.faults import CheckpointError, Fault
from deeplightning.runfolder import RunFolder, from_start
from deeplightning.tracking import resolve_run

log = logging.getLogger("deeplightning")


class StartWeights(pl.Callback):
    """Puts weights from a file into the task before it learns, unless a run is resumed.

    Tensors are taken by name (that of the task or of its network alone) and shape; the others keep their first values,
    and a warning names them: so a network with another last layer can start from a trained one.

    Args:
        name: a path, or a RUN, of which it is the best weights.
        tracking_uri: the store in which a run's id is looked up.

    Raises:
        CheckpointError: (in the hooks) there are no such weights, or none fits.
    """

    before = ("Record",)  # weights that are missing end the start before a run is opened

    def __init__(self, name: str, tracking_uri: str | None):
        self.name, self.tracking_uri = name, tracking_uri
        self._weights: dict[str, Any] | None = None  # {} when they have been put in: what is learned since stays

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage in ("fit", "validate") and trainer.ckpt_path is None and self._weights is None:
            self.path = self._find()
            self._weights = _read(self.path)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._fill(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate" and trainer.ckpt_path is None:  # `num_epochs: 0`
            self._fill(trainer)

    def _find(self) -> Path:
        path = from_start(self.name)
        if path.is_file() or path.suffix in (".ckpt", ".safetensors", ".pt", ".pth"):
            return path
        folder = RunFolder(resolve_run(self.name, self.tracking_uri))
        for path in (folder.best, folder.last, folder.bundle_weights, folder.path / "model.safetensors"):
            if path.is_file():
                return path
        raise CheckpointError(Fault(f"{folder.path}: there are no weights in this folder", "model.init_from"))

    def _fill(self, trainer: pl.Trainer) -> None:
        weights, self._weights = self._weights, {}
        if not weights:
            return
        module = trainer.lightning_module
        ours = whole_shapes(module)
        prefixes = ["", *(f"{name}." for name, _ in module.named_children())]
        prefix = max(prefixes, key=lambda start: sum(start + name in ours for name in weights))
        found = {prefix + name: tensor for name, tensor in weights.items()}
        fit = {name: t for name, t in found.items() if name in ours and ours[name].shape == t.shape}
        if not fit:
            raise CheckpointError(Fault(f"no tensor of {self.path} fits the network", "model.init_from"))
        trainer.strategy.load_model_state_dict({"state_dict": fit}, strict=False)
        log.info("starts     from %d of %d tensors of %s", len(fit), len(weights), self.path)
        left = [name for name in {**ours, **found} if name not in fit]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            log.warning(
                "model.init_from: not taken, for want of the same name and shape: %s%s", ", ".join(left[:3]), more
            )


def _read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        return read_weights(path)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(Fault(f"{path} cannot be read: {error}", "model.init_from")) from error
