"""What tasks share whose samples are pictures: pixels of 8 bits become numbers inside the network's own graph.

Shapes: B batch, C channels, H height, W width.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from deeplightning.config.part_config import PartConfig
from deeplightning.image_spec import MODES, ImageSpec
from deeplightning.task.networks import MisfitError, try_network
from deeplightning.task.supervised import Supervised


class Normalise(nn.Module):
    """Pixels 0 … 255 become numbers around 0: (pixel / 255 - mean) / std, per channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Convert uint8 (B, C, H, W) to floats of the precision that the network computes in.

        The same operations as torchvision's ToTensor and Normalize, so that results are theirs to the last digit.
        """
        return images.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)


class ImageTask(Supervised):
    """A task whose inputs are pictures, `image` uint8 (B, C, H, W) in each batch.

    The data module says how its pixels are normalised (`image_spec`) and what the classes are called (`class_names`,
    where it has such); both travel in the checkpoint. Without an `image_spec`, pixels of 8 bits are divided by 255, and
    validation batches of one size, of 8 bits or of floats from 0 to 1, as torchvision's ToTensor gives, are pictures
    that are not normalised.
    """

    input_name = "image"

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self.normalise: nn.Module | None = None
        self.image_spec: ImageSpec | None = None
        self.class_names: list[str] = []
        self._inferred: ImageSpec | None = None  # of validation batches, or a checkpoint that had it from there
        self._may_infer = True
        self._sheet: dict[str, Tensor] | None = None  # samples of a validation that are worth a look

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._sheet = None

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "image_spec", None) is not None:
            self._describe(data.image_spec, getattr(data, "class_names", []))

    def _describe(self, image_spec: ImageSpec, class_names: list[str]) -> None:
        self.image_spec, self.class_names = image_spec, list(class_names)
        self.normalise = Normalise(image_spec.mean, image_spec.std)
        # What torch's ddp reads: these are the same everywhere, and need not be sent at each step.
        self._ddp_params_and_buffers_to_ignore = ["normalise.mean", "normalise.std"]

    def forward(self, images: Tensor) -> object:
        """Return what the network gives to pictures, uint8 (B, C, H, W), or float as the network takes them."""
        return super().forward(self.normalised(images))

    def normalised(self, images: Tensor) -> Tensor:
        """Return pictures as the network takes them: uint8 (B, C, H, W) as floats; floats as they are.

        Raises:
            MisfitError: the data module does not say how, and they are neither grey nor RGB.
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
            self._describe(self._inferred, self.class_names)
            cast(nn.Module, self.normalise).to(images.device, self.dtype)  # type: ignore[arg-type]
        return cast(Tensor, cast(nn.Module, self.normalise)(images))

    def try_out(self, network: nn.Module) -> None:
        """Pass a black picture through; raise MisfitError if it does not fit."""
        spec = self.image_spec
        if spec is None:
            return
        shape = (1, spec.channels, spec.height, spec.width)
        refusal = f"{self.cfg.model.network.type} does not take the data's pictures {shape}"
        self.check_outputs(try_network(network, torch.zeros(shape), refusal))

    def take_form(self, inputs: Tensor, outputs: Any) -> None:
        """Take the size of pictures that the data module does not describe."""
        if not (self._may_infer and self.image_spec is self._inferred and len(inputs)):
            return
        spec = _plain_spec(inputs)
        if self._inferred is None and spec is not None and inputs.min() >= 0 and inputs.max() <= 1:
            self._describe(spec, self.class_names)
            self._inferred = spec
        elif self._inferred is None or self._inferred != spec:
            self._may_infer, self.image_spec, self._inferred = False, None, None

    def travels(self) -> dict[str, object]:
        if self.image_spec is None:
            return {}
        return {"image_spec": self.image_spec.to_dict(), "class_names": self.class_names}

    def arrives(self, saved: dict[str, Any]) -> None:
        if self.image_spec is None:
            self._describe(ImageSpec.from_dict(saved["image_spec"]), saved["class_names"])
            self._inferred = self.image_spec


def _plain_spec(images: Tensor) -> ImageSpec | None:
    """Return how a picture becomes an input of a batch's size without normalisation; None: these are no pictures."""
    mode = {channels: mode for mode, channels in MODES.items()}.get(images.shape[1]) if images.ndim == 4 else None
    is_picture = mode is not None and (images.dtype == torch.uint8 or images.is_floating_point())
    return ImageSpec(images.shape[2], images.shape[3], str(mode)) if is_picture else None


def keep_best(kept: dict[str, Tensor] | None, found: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the `count` samples that are worth most, of those kept before and of a batch; a batch whose pictures have
    another size than those kept is left out.

    Args:
        kept: columns by name, each of n samples: `worth` (n,), `image` (n, C, H, W) and others. None: a first batch.
        found: the columns of the batch.
    """
    if kept is not None and kept["image"].shape[1:] != found["image"].shape[1:]:
        return kept
    for before in (None, kept):  # first of the batch alone, which is large
        if before is not None:
            found = {name: torch.cat([before[name], column]) for name, column in found.items()}
        best = found["worth"].topk(min(count, len(found["worth"]))).indices
        found = {name: column[best] for name, column in found.items()}
    return found
