"""Adapter that makes a user's LightningModule exportable: a model with one input, and samples.

Shapes: N samples, C channels, H height, W width.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from deeplightning.array_spec import ArraySpec
from deeplightning.batches import class_names_of, inputs_of, structure
from deeplightning.faults import CheckpointError, ConfigError, Fault
from deeplightning.image_spec import MODES, ImageSpec
from deeplightning.kinds import MAX_COMPARED_NUMBERS, is_plain
from deeplightning.runfolder import RunFolder
from deeplightning.words import first_line

SIZES = (2, 17, 1)
"""Batch sizes that a module must take. A tensor of two samples may pass for a batch of two parts."""


def servable(task: Any, folder: RunFolder) -> Any:
    """Return a task in the form that an export needs (`deeplightning.export.bundle.Exportable`).

    Raises:
        ConfigError: a user's module takes or returns anything but one tensor.
        CheckpointError: the samples of the run cannot be read.
    """
    return OwnModule(task, folder) if is_plain(task) else task


def samples_of(task: pl.LightningModule, data: Any, batch: Any) -> dict[str, np.ndarray]:
    """Return the samples of a batch that a run stores to verify an export.

    These are `images`, uint8 (N, C, H, W), if the inputs are images, else `arrays`, (N, …); and `about`, JSON with the
    inputs' dtype, the names of the outputs and the `image_spec`.

    Args:
        data: the data module; its `image_spec` and `class_names` are used if it has them.
        batch: from a loader. Its first part is `forward`'s argument, unless `example_input_array` has another shape.

    Raises:
        ConfigError: neither is a tensor.
    """
    if not any(is_overridden(name, task) for name in ("forward", "predict_step")):
        raise _unsupported(task, "it has neither `forward` nor `predict_step`")
    inputs, example = inputs_of(_transferred(task, data, batch)), inputs_of(task.example_input_array)
    if isinstance(example, Tensor) and not (isinstance(inputs, Tensor) and inputs.shape[1:] == example.shape[1:]):
        inputs = example
    if not isinstance(inputs, Tensor) or inputs.ndim < 2 or not len(inputs) or inputs.is_complex():
        raise _unsupported(task, f"the inputs of a validation batch are {structure(inputs)}, not a real tensor (N, …)")
    inputs, spec = inputs.detach().cpu(), getattr(data, "image_spec", None)
    about = {"dtype": str(inputs.dtype).removeprefix("torch."), "names": class_names_of(data)}
    modes = {channels: mode for mode, channels in MODES.items()}
    if spec is None and inputs.dtype == torch.uint8 and inputs.ndim == 4 and inputs.shape[1] in modes:
        spec = ImageSpec(inputs.shape[2], inputs.shape[3], modes[inputs.shape[1]])
    if spec is None:
        return {"arrays": inputs.float().numpy(), "about": np.array(json.dumps(about))}
    inputs = inputs if inputs.dtype == torch.uint8 else pixels(inputs, spec)
    return {"images": inputs.numpy(), "about": np.array(json.dumps(about | {"image_spec": spec.to_dict()}))}


def pixels(images: Tensor, spec: ImageSpec) -> Tensor:
    """Convert normalised images, float (N, C, H, W), to uint8 of the same shape."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))
    return ((images.float() * std + mean) * 255).round().clamp(0, 255).byte()


def _transferred(task: pl.LightningModule, data: Any, batch: Any) -> Any:
    """Return a batch after Lightning's transfer hooks; unchanged if these fail without a trainer."""
    try:
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            has_own = isinstance(data, pl.LightningDataModule) and is_overridden(hook, data)
            batch = getattr(data if has_own else task, hook)(batch, 0)
    except Exception:  # raised by the user's hook
        return batch
    return batch


class OwnModule:
    """An `Exportable` for a LightningModule whose `forward` or `predict_step` takes one tensor.

    Attributes:
        kind: answers are the module's numbers, in memory order.
        class_names: a name for each of these numbers.

    Raises:
        ConfigError: the module does not accept the samples, or returns anything but one tensor of numbers.
        CheckpointError: the samples of the run cannot be read.
    """

    def __init__(self, module: pl.LightningModule, folder: RunFolder):
        try:
            with np.load(folder.samples, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                samples: np.ndarray = file["images" if "image_spec" in about else "arrays"][:2]
            dtype, names = getattr(torch, about["dtype"]), about["names"]
            dtype = torch.float32 if dtype.is_floating_point else dtype  # as the weights are
            spec = ImageSpec.from_dict(about["image_spec"]) if "image_spec" in about else None
        except Exception as error:  # numpy, zipfile and zlib each have their own
            message = f"{folder.samples} cannot be read ({first_line(error)}); remove it and run `deeplightning export`"
            raise CheckpointError(message) from error
        self.image_spec, self.row_spec = spec, None if spec else ArraySpec(samples.shape[1:])
        self.kind = "image_regression" if spec else "array_regression"
        self._model = _Forward(module, dtype, spec).cpu().float().eval()
        count = self._count_outputs(module, samples)
        numbered = [f"output_{number}" for number in range(count)] if count > 1 else ["output"]
        self.class_names: list[str] = names if len(names) == count else numbered

    def _count_outputs(self, module: pl.LightningModule, samples: np.ndarray) -> int:
        """Return how many numbers the module returns per sample."""
        name = self._model.name
        for size in SIZES:
            given = torch.from_numpy(np.resize(samples, (size, *samples.shape[1:])))
            try:
                with torch.inference_mode():
                    found = self._model.outputs(given)
            except Exception as error:  # raised by the user's code
                reason = first_line(error).rstrip(".")
                raise _unsupported(module, f"{name} does not take {structure(given)}: {reason}") from error
            is_real = isinstance(found, Tensor) and not found.is_complex() and found.numel() > 0
            if not is_real or (size > 1 and found.shape[:1] != (size,)):
                raise _unsupported(module, f"{name} gives {structure(found)}, not a real tensor (N, …)")
        if (count := found.numel()) > MAX_COMPARED_NUMBERS:
            raise _unsupported(module, f"{name} gives {count:,} numbers a sample; {MAX_COMPARED_NUMBERS:,} are allowed")
        return count

    def inference_model(self) -> nn.Module:
        """Return a model from images uint8 (N, C, H, W) or arrays float32 (N, …) to float32 (N, K), on the CPU."""
        return self._model


class _Forward(nn.Module):
    """A module's `forward`, or its `predict_step` if it has no `forward`, on prepared inputs."""

    mean: Tensor
    std: Tensor

    def __init__(self, module: pl.LightningModule, dtype: torch.dtype, spec: ImageSpec | None):
        super().__init__()
        self.module, self.dtype, self.spec = module, dtype, spec
        self.name = "forward" if is_overridden("forward", module) else "predict_step"
        if spec is not None:
            for name, values in (("mean", spec.mean), ("std", spec.std)):
                self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def outputs(self, inputs: Tensor) -> Any:
        if self.spec is None or self.dtype == torch.uint8:
            inputs = inputs.to(self.dtype)
        else:
            inputs = (inputs.to(self.dtype) / 255 - self.mean) / self.std
        return self.module(inputs) if self.name == "forward" else self.module.predict_step(inputs, 0)

    def state_dict(self, **_: object) -> dict[str, Any]:  # type: ignore[override]
        """Return all weights, also those that the module's own `state_dict` omits."""
        return nn.Module.state_dict(self.module, prefix="module.")

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.outputs(inputs)
        return found.float().reshape(inputs.shape[0], -1)  # some modules squeeze a batch of one


def _unsupported(task: pl.LightningModule, why: str) -> ConfigError:
    name = f"{type(task).__module__}.{type(task).__qualname__}"
    instead = " (or a `predict_step`)" * (not is_overridden("predict_step", task))
    return ConfigError(
        Fault(
            f"{name} cannot be exported: {why}. Give it a `forward` of one tensor{instead}, and "
            "`example_input_array`, a tensor that it takes; or an `inference_model` of its own",
            "model.module",
        )
    )
