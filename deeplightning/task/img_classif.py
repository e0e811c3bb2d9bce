"""Image classification: a network learns to tell classes of pictures apart, and says how sure it is.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from typing import Any

from torch import Tensor, bincount, nn

from deeplightning.task.errors import LabelError, MisfitError
from deeplightning.task.images import ImageTask
from deeplightning.task.metrics import Accuracy
from deeplightning.task.supervised import Batch


class Classifier(nn.Module):
    """What a bundle holds: uint8 pictures (B, C, H, W) to probabilities float32 (B, K)."""

    def __init__(self, normalise: nn.Module, network: nn.Module):
        super().__init__()
        self.normalise, self.network = normalise, network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(self.normalise(images)).float().softmax(1)


class ImageClassification(ImageTask):
    """Trains `model.network` on batches of {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}.

    The data module says how its pixels are normalised (`image_spec`) and what the classes are called (`class_names`);
    both travel in the checkpoint. Rows with index -1 fill up a batch and are not counted.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics` (`acc` by default), weighted by sample.

    Raises:
        ValueError: several networks, optimizers or schedulers, or no loss: this task trains one network.
    """

    kind = "image_classification"
    metric_names = ("acc",)

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self._confusion: Tensor | None = None
        self._sheet: dict[str, Tensor] | None = None

    def truth(self, batch: Batch) -> Tensor:
        return batch["label"]

    def default_metrics(self) -> dict[str, Any]:
        return {"acc": Accuracy()}

    def check_outputs(self, outputs: Any) -> None:
        """
        Raises:
            MisfitError: they are no logits (B, K).
            LabelError: there are not as many as classes in the data.
        """
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            found = tuple(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            message = f"{self.cfg.model.network.type} gives {found}, not (B, K): one row per picture"
            raise MisfitError(message, "model.network")
        if self.class_names and outputs.shape[1] != len(self.class_names):
            raise LabelError(
                f"the data has {len(self.class_names)} classes (labels 0 to {len(self.class_names) - 1}), the network "
                f"{outputs.shape[1]} outputs; set model.network.params.num_classes={len(self.class_names)}",
                "model.network",
            )

    def check_truth(self, outputs: Tensor, truth: Tensor) -> None:
        """
        Raises:
            LabelError: a label has no output. On a GPU, which a look would stall, told in the first epoch.
        """
        if self.current_epoch == 0 or truth.device.type == "cpu":
            low, high = int(truth.min()), int(truth.max())
            if low < 0 or high >= outputs.shape[1]:
                raise LabelError(
                    f"the data holds label {low if low < 0 else high}, the network has {outputs.shape[1]} outputs "
                    f"(labels 0 to {outputs.shape[1] - 1}); mend the data or set model.network.params.num_classes",
                    "model.network",
                )

    def answers(self, batch: Batch, outputs: Tensor) -> dict[str, Any]:
        probability, predicted = outputs.float().softmax(1).max(1)
        columns: dict[str, Any] = {"index": batch["index"]} if "index" in batch else {}
        if "label" in batch:
            columns["label"] = batch["label"]
        names = self.class_names
        return columns | {
            "predicted_class": predicted,
            "predicted_label": [names[i] if i < len(names) else str(i) for i in predicted.tolist()],
            "predicted_probability": probability,
        }

    # ---- pictures

    def on_validation_epoch_start(self) -> None:
        self._confusion = self._sheet = None

    def remember(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Counts label and answer of each validation sample, and keeps the first pictures."""
        classes, predicted = logits.shape[1], logits.argmax(1)
        pairs = bincount(labels * classes + predicted, minlength=classes * classes).view(classes, classes)
        self._confusion = pairs if self._confusion is None else self._confusion + pairs
        if self._sheet is None:
            first = slice(0, 16)
            probability = logits[first].float().softmax(1).max(1).values
            self._sheet = {
                "image": images[first],
                "label": labels[first],
                "predicted": predicted[first],
                "p": probability,
            }

    def pictures(self, stage: str) -> dict[str, Any]:
        """Figures of the last validation: the confusion matrix over all processes, and a sheet of samples.

        Called on every process, since the matrix is summed over them; only rank 0 gets figures.
        """
        if stage != "val" or self._confusion is None or self._sheet is None:
            return {}
        confusion = self.trainer.strategy.reduce(self._confusion, reduce_op="sum")
        if not self.trainer.is_global_zero:
            return {}
        from deeplightning.task import figures  # matplotlib takes half a second to import

        names = self.class_names or [str(i) for i in range(len(confusion))]
        return {
            "val_confusion_matrix": figures.confusion_matrix(confusion.cpu(), names),
            "val_predictions": figures.sheet({n: v.cpu() for n, v in self._sheet.items()}, names),
        }

    # ---- export

    def inference_model(self) -> nn.Module:
        """uint8 (N, C, H, W) to probabilities float32 (N, K), on the CPU, in eval mode."""
        if self.network is None or self.normalise is None:
            raise MisfitError("the data module gave no `image_spec`: there is nothing to prepare pictures by")
        return Classifier(self.normalise, self.network).cpu().float().eval()
