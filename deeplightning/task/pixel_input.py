"""Base of tasks whose inputs are pictures: 8-bit pixels are normalised inside the network's graph.

Shapes: B batch, C channels, H height, W width.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from deeplightning.batches import class_names_of
from deeplightning.config.part_config import PartConfig
from deeplightning.image_spec import MODES, ImageSpec
from deeplightning.task.networks import MisfitError, check_trained_names, try_network
from deeplightning.task.supervised import Supervised


class Normalise(nn.Module):
    """Normalise pixels from 0 to 255: (pixel / 255 - mean) / std, per channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Convert uint8 (B, C, H, W) to floats of the network's precision.

        The operations are those of torchvision's ToTensor and Normalize, so results are identical to the last digit.
        """
        return images.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)


class ImageTask(Supervised):
    """Task whose inputs are pictures, `image` uint8 (B, C, H, W) in each batch.

    The data module provides `image_spec`, which normalises pixels, and `class_names`, if it has classes; both are saved
    in the checkpoint. Without an `image_spec`, 8-bit pixels are divided by 255, and a spec without normalisation is
    inferred if all validation batches have one size and are 8-bit or floats from 0 to 1, as from torchvision's
    ToTensor.
    """

    input_name = "image"

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self.normalise: nn.Module | None = None
        self.image_spec: ImageSpec | None = None
        self.class_names: list[str] = []
        self._inferred: ImageSpec | None = None  # from validation batches, or from a checkpoint that inferred it
        self._may_infer = True
        self._sheet: dict[str, Tensor] | None = None  # the most instructive samples of a validation

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._sheet = None

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        self.class_names = class_names_of(data) or self.class_names
        if getattr(data, "image_spec", None) is not None:
            self._set_spec(data.image_spec, self.class_names)

    def _set_spec(self, image_spec: ImageSpec, class_names: list[str]) -> None:
        self.image_spec, self.class_names = image_spec, list(class_names)
        device = self._stage_metrics("train")["loss"].device  # engines that shard restore when the task is on a GPU
        self.normalise = Normalise(image_spec.mean, image_spec.std).to(device, self.dtype)  # type: ignore[arg-type]
        # Read by torch's DDP: these buffers are equal on all processes and need not be broadcast at each step.
        self._ddp_params_and_buffers_to_ignore = ["normalise.mean", "normalise.std"]

    def forward(self, images: Tensor) -> object:
        """Return the network's outputs for pictures, uint8 (B, C, H, W), or floats as the network expects them."""
        return super().forward(self.normalised(images))

    def normalised(self, images: Tensor) -> Tensor:
        """Convert uint8 pictures (B, C, H, W) to normalised floats; floats are returned unchanged.

        Raises:
            MisfitError: the data module has no `image_spec`, and the pictures are neither grey nor RGB.
        """
        if images.dtype != torch.uint8:
            return images
        if self.normalise is None:
            self._inferred = _plain_spec(images)
            if self._inferred is None:
                raise MisfitError(
                    f"the data gives uint8 batches {tuple(images.shape)}, and its data module no `image_spec`; "
                    "pictures (B, 1, H, W) and (B, 3, H, W) need none. Give floats, or add the `image_spec`"
                )
            self._set_spec(self._inferred, self.class_names)
        return cast(Tensor, cast(nn.Module, self.normalise)(images))

    def try_out(self, network: nn.Module) -> None:
        """Pass a black picture through the network; raise MisfitError if it does not fit."""
        spec = self.image_spec
        if spec is None:
            return
        shape = (1, spec.channels, spec.height, spec.width)
        message = f"{self.cfg.model.network.type} does not take the data's pictures {shape}"
        self.check_outputs(try_network(network, torch.zeros(shape), message))

    def infer_spec(self, inputs: Tensor, outputs: Any) -> None:
        """Infer the spec of pictures that the data module does not describe."""
        if not (self._may_infer and self.image_spec is self._inferred and len(inputs)):
            return
        spec = _plain_spec(inputs)
        if self._inferred is None and spec is not None and inputs.min() >= 0 and inputs.max() <= 1:
            self._set_spec(spec, self.class_names)
            self._inferred = spec
        elif self._inferred is None or self._inferred != spec:
            self._may_infer, self.image_spec, self._inferred = False, None, None

    def travels(self) -> dict[str, object]:
        if self.image_spec is None:
            return {}
        return {"image_spec": self.image_spec.to_dict(), "class_names": self.class_names}

    def arrives(self, saved: dict[str, Any]) -> None:
        if self.image_spec is None:
            self._set_spec(ImageSpec.from_dict(saved["image_spec"]), saved["class_names"])
            self._inferred = self.image_spec
        else:
            check_trained_names(self.class_names, saved["class_names"])


def _plain_spec(images: Tensor) -> ImageSpec | None:
    """Return a spec of a batch's size without normalisation, or None if the batch does not contain pictures."""
    mode = {channels: mode for mode, channels in MODES.items()}.get(images.shape[1]) if images.ndim == 4 else None
    is_picture = mode is not None and (images.dtype == torch.uint8 or images.is_floating_point())
    return ImageSpec(images.shape[2], images.shape[3], str(mode)) if is_picture else None


def keep_best(kept: dict[str, Tensor] | None, found: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the `count` samples of highest `worth` among those kept before and those of a batch. A batch is ignored if
    its pictures have another size than those kept.

    Args:
        kept: columns by name, each of n samples: `worth` (n,), `image` (n, C, H, W) and others; None before the first.
        found: the columns of the batch.
    """
    if kept is not None and kept["image"].shape[1:] != found["image"].shape[1:]:
        return kept
    for before in (None, kept):  # first reduce the batch alone, which is large
        if before is not None:
            found = {name: torch.cat([before[name], column]) for name, column in found.items()}
        best = found["worth"].topk(min(count, len(found["worth"]))).indices
        found = {name: column[best] for name, column in found.items()}
    return found


def pixels_of(image: Tensor) -> np.ndarray:
    """Convert a picture (C, H, W) on the CPU to uint8 (H, W, 3), or to (H, W) of its first channel if it does not have
    three. Floats are scaled to the range from black to white."""
    if image.is_floating_point():
        low, high = torch.aminmax(image)
        image = ((image - low) / (high - low).clamp(min=1e-9) * 255).byte()
    found: np.ndarray = (image.permute(1, 2, 0) if len(image) == 3 else image[0]).numpy()
    return found
