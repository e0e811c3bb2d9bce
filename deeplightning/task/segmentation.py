"""Semantic segmentation: predict the class of each pixel.

Shapes: B batch, C channels, H height, W width, K classes.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from deeplightning.config.part_config import PartConfig
from deeplightning.task.networks import LabelError, MisfitError, Probabilities, check_output_count, output_error
from deeplightning.task.pixel_input import ImageTask, keep_best, pixels_of
from deeplightning.task.supervised import Batch

log = logging.getLogger("deeplightning")

NO_CLASS = 255
"""Value in a batch's masks of pixels that are excluded from losses and metrics."""

IGNORED = -100
"""Value of the same pixels in the truth; the default `ignore_index` of torch's losses."""

MAX_CLASSES = 256

MAX_SHOWN = 8
"""Number of pictures of a validation that are drawn."""


class Segmentation(ImageTask):
    """Trains `model.network` on batches of {"image": uint8 (B, C, H, W), "mask": uint8 (B, H, W), "index": int64 (B,)}.

    The network returns (B, K, H, W). Losses and metrics are called with these outputs and the truth, int64 (B, H, W),
    in which excluded pixels are -100, the default `ignore_index` of torch's losses.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics`; by default `iou`, the mean over classes,
    and `acc`, the share of correct pixels.
    """

    kind = "image_segmentation"
    truth_name = "mask"

    metric_names = ("iou", "acc")

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self._num_classes = 0  # outputs of the network per pixel

    def truth(self, batch: Batch) -> Tensor:
        mask = self.column(batch, "mask")
        if mask.is_floating_point():
            message = f"the masks are {mask.dtype}, not whole numbers; torchvision's ToTensor, for one, divides by 255"
            raise LabelError(message, "data.module")
        return mask.long().masked_fill(mask == NO_CLASS, IGNORED)

    def default_metrics(self) -> dict[str, object]:
        return {"iou": IoU(), "acc": PixelAccuracy()}

    def check_outputs(self, outputs: object) -> None:
        name = self.cfg.model.network.type
        if not isinstance(outputs, Tensor) or outputs.ndim != 4:
            raise output_error(name, outputs, "(B, K, H, W): a number per class and pixel")
        spec = self.image_spec
        if spec is not None and spec is not self._inferred and outputs.shape[2:] != (spec.height, spec.width):
            raise MisfitError(
                f"{name} gives {outputs.shape[2]}x{outputs.shape[3]} pixels for pictures of "
                f"{spec.height}x{spec.width}; segmentation needs one for each",
                "model.network",
            )
        check_output_count(outputs, self.class_names, "classes", " per pixel")
        self._num_classes = outputs.shape[1]

    def check_truth(self, outputs: Any, truth: Tensor) -> None:
        if truth.shape != (len(outputs), *outputs.shape[2:]):
            raise MisfitError(f"the masks are {tuple(truth.shape)}, the network gives {tuple(outputs.shape)}")
        if self._may_read(truth) and (high := int(truth.max())) >= outputs.shape[1]:
            raise LabelError(
                f"the masks hold class {high}, the network has {outputs.shape[1]} outputs per pixel (classes 0 to "
                f"{outputs.shape[1] - 1}); correct the data or set model.network.params.num_classes",
                "model.network",
            )

    def answers(self, batch: Batch, outputs: Tensor) -> dict[str, Any]:
        """Return a row per picture: the share of each class in the answer and, if there is a mask, IoU and accuracy."""
        columns: dict[str, object] = {}
        answered = outputs.argmax(1)  # (B, H, W)
        if "mask" in batch:
            counts = confusion_counts(answered, self.truth(batch))
            columns |= {"iou": mean_iou(counts), "acc": pixel_accuracy(counts)}
        for number, name in enumerate(self._names_or_numbers(outputs.shape[1])):
            columns[f"share_{name}"] = (answered == number).float().mean((1, 2))
        return columns

    # ---- pictures

    def remember(self, inputs: Tensor, outputs: Tensor, truth: Tensor) -> None:
        """Keep the pictures of this process with the smallest share of correct pixels."""
        answered = outputs.argmax(1)
        counts = truth >= 0
        right = ((answered == truth) & counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)  # (B,)
        right = right.where(counts.flatten(1).any(1), 1.0)  # nothing to judge: shown last
        self._sheet = keep_best(
            self._sheet, {"image": inputs, "truth": truth, "answered": answered, "worth": -right}, MAX_SHOWN
        )

    def pictures(self, stage: str) -> dict[str, Any]:
        """Draw up to eight pictures of the last validation, the least accurate first: plain, overlaid with their true
        classes, and overlaid with the predicted classes."""
        if stage != "val" or not self._sheet or not len(self._sheet["worth"]) or not self.trainer.is_global_zero:
            return {}
        from deeplightning.figures import class_plots  # most processes and verbs draw nothing

        columns = {name: column.cpu() for name, column in self._sheet.items()}
        images = np.stack([np.atleast_3d(pixels_of(image)) for image in columns["image"]])
        truth, answered, worth = (columns[name].numpy() for name in ("truth", "answered", "worth"))
        shown = images, truth, answered, self._names_or_numbers(self._num_classes), -worth
        return {"val_segmentation": class_plots.overlays(*shown)}

    # ---- export

    def travels(self) -> dict[str, object]:
        own = super().travels()
        if own and not own["class_names"]:  # the data module gives none: the server uses their numbers as names
            own["class_names"] = self._names_or_numbers(self._num_classes)
        return own

    def inference_model(self) -> nn.Module:
        """Return a module that maps uint8 (N, C, H, W) to the probability of each class for each pixel, float32
        (N, K, H, W), on the CPU, in eval mode."""
        return self.exported(Probabilities(self.network, self.normalise))


# ---- metrics


def confusion_counts(answered: Tensor, truth: Tensor) -> Tensor:
    """Return diagonal, column and row sums of each sample's confusion matrix, without excluded pixels.

    Args:
        answered: int64 (B, H, W).
        truth: int64 (B, H, W); negative values are excluded.

    Returns:
        int64 (B, 3, 256): for each class the numbers of correct, of predicted and of true pixels.
    """
    size = len(truth)
    begin = torch.arange(size, device=truth.device).view(-1, 1, 1) * MAX_CLASSES
    kept = truth >= 0
    groups = ((begin + truth)[kept & (answered == truth)], (begin + answered)[kept], (begin + truth)[kept])
    counts = [torch.bincount(group, minlength=size * MAX_CLASSES).view(size, MAX_CLASSES) for group in groups]
    return torch.stack(counts, dim=1)


def mean_iou(counts: Tensor) -> Tensor:
    """Return the mean intersection over union of the classes that occur in truth or answers, or nan if none does.

    Args:
        counts: see `confusion_counts`, int64 (…, 3, K).

    Returns:
        float (…).
    """
    right, answered, true = counts.unbind(-2)
    union = answered + true - right
    return (right / union.clamp(min=1)).sum(-1) / (union > 0).sum(-1)


def pixel_accuracy(counts: Tensor) -> Tensor:
    """Return the share of correct pixels, without excluded ones, int64 (…, 3, K) → float (…)."""
    return counts[..., 0, :].sum(-1) / counts[..., 2, :].sum(-1)


class _PixelCounts(Metric):
    """Counts the pixels of each class over all samples and processes, as exact as one confusion matrix of them all."""

    full_state_update = False
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(3, MAX_CLASSES, dtype=torch.long), dist_reduce_fx="sum")
        self._has_warned = False

    def update(self, outputs: Tensor, truth: Tensor) -> None:
        """Add a batch: outputs (B, K, H, W), truth int64 (B, H, W), negative for excluded pixels."""
        self.counts.add_(confusion_counts(outputs.argmax(1), truth).sum(0))

    def forward(self, outputs: Tensor, truth: Tensor) -> Tensor:
        """Add a batch and return its own value."""
        before = self.counts.clone()
        self.update(outputs, truth)
        return self.value(self.counts - before)

    def compute(self) -> Tensor:
        """Return the value over all pixels. Warn once if they all have the same true class."""
        classes = self.counts[2].nonzero().flatten().tolist()
        if len(classes) == 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: all scored pixels are of class %d. A network that always answers this class scores 1. Check the "
                "masks of this set",
                type(self).__name__,
                classes[0],
            )
        return self.value(self.counts)

    def value(self, counts: Tensor) -> Tensor:
        """Return the metric of counts int64 (3, 256), see `confusion_counts`."""
        raise NotImplementedError


class IoU(_PixelCounts):
    """Intersection over union, in [0, 1]: of one class, or the mean over the classes that occur in truth or answers.

    Args:
        of: the number of one class; None: the mean. The result is nan for a class that does not occur.

    Raises:
        ValueError: `of` is not the number of a class.
    """

    def __init__(self, of: int | None = None):
        super().__init__()
        if of is not None and (not isinstance(of, int) or isinstance(of, bool) or not 0 <= of < MAX_CLASSES):
            raise ValueError(f"of must be a class number from 0 to {MAX_CLASSES - 1}, or null for the mean, not {of!r}")
        self.of = of

    def value(self, counts: Tensor) -> Tensor:
        return mean_iou(counts if self.of is None else counts[:, self.of : self.of + 1])


class PixelAccuracy(_PixelCounts):
    """Share of pixels whose largest output is that of their class, without excluded pixels; in [0, 1]."""

    def value(self, counts: Tensor) -> Tensor:
        return pixel_accuracy(counts)
