"""Image classification: a network learns to tell classes of pictures apart, and says how sure it is.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deeplightning.task.classes import Classification
from deeplightning.task.pixel_input import ImageTask, keep_best

SHOWN = 16
"""Pictures on the sheet of a validation."""


class ImageClassification(Classification, ImageTask):
    """Trains `model.network` on batches of {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}.

    The data module says how its pixels are normalised (`image_spec`) and what the classes are called (`class_names`);
    both travel in the checkpoint.
    """

    kind = "image_classification"
    sample = "picture"

    def remember(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count label and answer of each validation sample, and keep the pictures of this process that are worth a
        look: the most confident mistakes, then the right answers that are least confident."""
        super().remember(images, logits, labels)
        probability, predicted = logits.float().softmax(1).max(1)
        worth = torch.where(predicted == labels, 1 - probability, 1 + probability)  # (B,)
        found = {"image": images, "label": labels, "predicted": predicted, "p": probability, "worth": worth}
        self._sheet = keep_best(self._sheet, found, SHOWN)

    def pictures(self, stage: str) -> dict[str, Any]:
        """Draw those of every classification, and a sheet of samples."""
        found = super().pictures(stage)
        if not found or self._sheet is None:
            return found
        from deeplightning.figures import class_plots  # as in `Classification`

        names = self._names(self._outputs_of_classes)
        columns = [self._sheet[name].cpu() for name in ("image", "label", "predicted", "p")]
        samples = [
            class_plots.Sample(
                _pixels(image), *class_plots.answer(names[label], names[predicted], float(p)), bool(label == predicted)
            )
            for image, label, predicted, p in zip(*columns, strict=True)
        ]
        wrong = sum(not sample.is_right for sample in samples)
        words = f"Validation samples: {wrong or 'no'} mistake{'' if wrong == 1 else 's'}{' first' if wrong else ''}"
        return found | {
            "val_predictions": class_plots.sheet(samples, words, "then the right answers that are least confident")
        }


def _pixels(image: Tensor) -> np.ndarray:
    """Return a picture (C, H, W) of the CPU as uint8 (H, W, 3), or as (H, W) of its first channel unless it has three;
    floats are spread from black to white."""
    if image.is_floating_point():
        low, high = torch.aminmax(image)
        image = ((image - low) / (high - low).clamp(min=1e-9) * 255).byte()
    found: np.ndarray = (image.permute(1, 2, 0) if len(image) == 3 else image[0]).numpy()
    return found
