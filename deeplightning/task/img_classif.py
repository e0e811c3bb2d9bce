"""Image classification: a network learns to tell classes of pictures apart, and says how sure it is.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from deeplightning.task.classes import Classification
from deeplightning.task.errors import MisfitError
from deeplightning.task.images import ImageTask

if TYPE_CHECKING:
    from deeplightning.config.part_config import PartConfig


class Classifier(nn.Module):
    """What a bundle holds: uint8 pictures (B, C, H, W) to probabilities float32 (B, K), or (B, K, H, W) of a
    segmentation."""

    def __init__(self, normalise: nn.Module, network: nn.Module):
        super().__init__()
        self.normalise, self.network = normalise, network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(self.normalise(images)).float().softmax(1)


class ImageClassification(Classification, ImageTask):
    """Trains `model.network` on batches of {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}.

    The data module says how its pixels are normalised (`image_spec`) and what the classes are called (`class_names`);
    both travel in the checkpoint. Rows with index -1 fill up a batch and are not counted.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics` (`acc` by default), weighted by sample.

    Raises:
        ValueError: several networks, optimizers or schedulers, or no loss: this task trains one network.
    """

    kind = "image_classification"
    sample = "picture"

    def __init__(self, cfg: "PartConfig"):
        super().__init__(cfg)
        self._sheet: dict[str, Tensor] | None = None

    # ---- pictures

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._sheet = None

    def remember(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Counts label and answer of each validation sample, and keeps the first pictures."""
        super().remember(images, logits, labels)
        if self._sheet is None:
            first = slice(0, 16)
            probability, predicted = logits[first].float().softmax(1).max(1)
            self._sheet = {"image": images[first], "label": labels[first], "predicted": predicted, "p": probability}

    def pictures(self, stage: str) -> dict[str, Any]:
        """Figures of the last validation: the confusion matrix over all processes, and a sheet of samples.

        Called on every process, since the matrix is summed over them; only rank 0 gets figures.
        """
        found = super().pictures(stage)
        if not found or self._sheet is None or self._confusion is None:
            return found
        from deeplightning.task import figures  # matplotlib takes half a second to import

        names = self.class_names or [str(i) for i in range(len(self._confusion))]
        return found | {"val_predictions": figures.sheet({n: v.cpu() for n, v in self._sheet.items()}, names)}

    # ---- export

    def inference_model(self) -> nn.Module:
        """uint8 (N, C, H, W) to probabilities float32 (N, K), on the CPU, in eval mode."""
        if self.network is None or self.normalise is None:
            raise MisfitError("the data module gave no `image_spec`: there is nothing to prepare pictures by")
        return Classifier(self.normalise, self.network).cpu().float().eval()
