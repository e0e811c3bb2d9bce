"""Image classification: predict the class of a picture, with its probability.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from typing import Any

import torch
from torch import Tensor

from deeplightning.task.classes import Classification
from deeplightning.task.pixel_input import ImageTask, keep_best, pixels_of

SHEET_SIZE = 16
"""Number of pictures on the sheet of a validation."""


class ImageClassification(Classification, ImageTask):
    """Trains `model.network` on batches of {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}.

    The data module provides `image_spec`, which normalises pixels, and `class_names`; both are saved in the checkpoint.
    """

    kind = "image_classification"
    sample = "picture"

    def remember(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Store label and prediction of each validation sample, and the most instructive pictures of this process: the
        most confident mistakes, then the least confident right answers."""
        super().remember(images, logits, labels)
        probability, predicted = logits.float().softmax(1).max(1)
        worth = torch.where(predicted == labels, 1 - probability, 1 + probability)  # (B,)
        found = {"image": images, "label": labels, "predicted": predicted, "p": probability, "worth": worth}
        self._sheet = keep_best(self._sheet, found, SHEET_SIZE)

    def pictures(self, stage: str) -> dict[str, Any]:
        """Draw the figures of every classification, and a sheet of samples."""
        found = super().pictures(stage)
        if not found or self._sheet is None:
            return found
        from deeplightning.figures import class_plots  # as in `Classification`

        names = self._names_or_numbers(self._num_outputs)
        columns = [self._sheet[name].cpu() for name in ("image", "label", "predicted", "p")]
        answer, sample = class_plots.answer, class_plots.Sample
        samples = [
            sample(pixels_of(image), *answer(names[label], names[predicted], float(p)), bool(label == predicted))
            for image, label, predicted, p in zip(*columns, strict=True)
        ]
        wrong = sum(not sample.is_right for sample in samples)
        words = f"Validation samples: {wrong or 'no'} mistake{'' if wrong == 1 else 's'}{' first' if wrong else ''}"
        return found | {
            "val_predictions": class_plots.sheet(samples, words, "then the right answers that are least confident")
        }
