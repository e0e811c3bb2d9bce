"""Base of classification tasks: logits against labels, probabilities, a confusion matrix.

Shapes: B batch, K classes.
"""

from typing import Any

import torch
from torch import Tensor, bincount, nn

from deeplightning import transfer
from deeplightning.batches import class_names_of
from deeplightning.config.part_config import PartConfig
from deeplightning.task.metrics import Accuracy
from deeplightning.task.networks import LabelError, Probabilities, check_output_count, output_error
from deeplightning.task.supervised import Batch, Supervised


class Classification(Supervised):
    """Task whose network returns logits (B, K) and whose batches have `label` int64 (B,).

    Attributes:
        sample: noun for one sample, for messages.
        class_names: the name of each label, in order; empty if the data module gives none.
    """

    sample = "sample"
    truth_name = "label"
    metric_names: tuple[str, ...] = ("acc",)
    uniform = True

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self.class_names: list[str] = []
        self._confusion_indices: list[Tensor] = []  # label * K + prediction, of each validation batch
        self._num_outputs = 0
        self._label_ranges: dict[object, tuple[int, int] | None] = {}  # smallest and largest label by stage

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.class_names = class_names_of(getattr(self.trainer, "datamodule", None)) or self.class_names

    def truth(self, batch: Batch) -> Tensor:
        """Return the labels, int64 (B,). Floats are returned unchanged, and `check_truth` refuses them."""
        labels = self.column(batch, "label")
        return labels if labels.is_floating_point() else labels.long()  # torch's losses accept no other integer type

    def default_metrics(self) -> dict[str, object]:
        return {"acc": Accuracy()}

    def measured(self, outputs: Any) -> Tensor:
        """Return log-probabilities for other metrics: torchmetrics mistakes logits from 0 to 1 for probabilities."""
        has_accuracy = self.cfg.model.metrics is None and type(self).default_metrics is Classification.default_metrics
        return super().measured(outputs) if has_accuracy else super().measured(outputs).log_softmax(1)

    def check_outputs(self, outputs: object) -> None:
        """Raise MisfitError unless the outputs are logits (B, K), one for each class of the data."""
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            raise output_error(self.cfg.model.network.type, outputs, f"(B, K): one row per {self.sample}")
        check_output_count(outputs, self.class_names, f"classes (labels 0 to {len(self.class_names) - 1})")

    def check_truth(self, outputs: Tensor, truth: Tensor) -> None:
        """Check that each label is one of the classes.

        Raises:
            LabelError: labels are not whole numbers (B,), or one has no output. On a GPU, the labels of our data
                modules' sets are checked once if they are on the CPU; those of other sets in the first epoch only.
        """
        if truth.ndim != 1 or truth.dtype != torch.int64:
            found = f"{str(truth.dtype).removeprefix('torch.')} {tuple(truth.shape)}"
            raise LabelError(
                f"the labels of a batch are {found}, not whole numbers ({len(truth)},), one for each {self.sample}; "
                "have the data module give `label` as torch.int64, for example `labels.long().flatten()`",
                "data.module",
            )
        if not self.class_names:
            self.class_names = self._names_or_numbers(outputs.shape[1])
        low, high = self._label_range(truth)
        if low < 0 or high >= outputs.shape[1]:
            raise LabelError(
                f"the data holds label {low if low < 0 else high}, the network has {outputs.shape[1]} outputs "
                f"(labels 0 to {outputs.shape[1] - 1}); correct the data or set model.network.params.num_classes",
                "model.network",
            )

    def _label_range(self, truth: Tensor) -> tuple[int, int]:
        """Return the smallest and largest label of a batch or of its whole dataset; (0, 0) if they are not checked."""
        if not transfer.is_asynchronous(truth.device):
            return int(truth.min()), int(truth.max())
        stage = self.trainer.state.stage
        if stage not in self._label_ranges:
            labels = self._dataset_labels()
            self._label_ranges[stage] = None if labels is None else (int(labels.min()), int(labels.max()))
        dataset_range = self._label_ranges[stage]
        if dataset_range is None and self.current_epoch == 0:
            low, high = torch.stack(torch.aminmax(truth)).tolist()
            return int(low), int(high)
        return dataset_range or (0, 0)

    def _dataset_labels(self) -> Tensor | None:
        """Return all labels of the stage's dataset, or None if it does not have them on the CPU."""
        trainer = self.trainer
        evaluated = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        loader: object = trainer.train_dataloader if trainer.training else evaluated
        dataset: Any = getattr(loader, "dataset", None)  # a user's `labels` may not be those of its samples
        labels = dataset.labels if hasattr(dataset, "needs_workers") else None
        is_column = isinstance(labels, Tensor) and labels.device.type == "cpu" and labels.ndim == 1 and len(labels) > 0
        return labels if is_column else None

    def answers(self, batch: Batch, outputs: Tensor) -> dict[str, Any]:
        probability, predicted = outputs.float().softmax(1).max(1)
        columns: dict[str, object] = {"label": batch["label"]} if "label" in batch else {}
        names = self.class_names
        return columns | {
            "predicted_class": predicted,
            "predicted_label": [names[i] if i < len(names) else str(i) for i in predicted.tolist()],
            "predicted_probability": probability,
        }

    def inference_model(self) -> nn.Module:
        """Return a module that maps inputs (N, …) to probabilities float32 (N, K), on the CPU, in eval mode."""
        return self.exported(Probabilities(self.network, getattr(self, "normalise", None)))

    # ---- pictures

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._confusion_indices = []

    def remember(self, inputs: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Store label and prediction of each validation sample, in 8 bytes."""
        self._num_outputs = logits.shape[1]
        self._confusion_indices.append(labels * logits.shape[1] + logits.argmax(1))

    def pictures(self, stage: str) -> dict[str, Any]:
        """Draw the confusion matrix and the precision and recall of each class, of the last validation.

        Called on every process, because counts are summed over processes; only rank 0 returns drawings. Nothing is
        drawn for more than `MAX_MATRIX_CLASSES` classes.
        """
        from deeplightning.figures import class_plots, measures  # most processes and verbs draw nothing

        number = self._num_outputs
        if stage != "val" or not self._confusion_indices or number > class_plots.MAX_MATRIX_CLASSES:
            return {}
        counts = bincount(torch.cat(self._confusion_indices), minlength=number * number).view(number, number)
        confusion = self.trainer.strategy.reduce(counts, reduce_op="sum").cpu().numpy()
        if not self.trainer.is_global_zero:
            return {}
        names = self._names_or_numbers(number)
        per_class = measures.from_counts(confusion.diagonal(), confusion.sum(0), confusion.sum(1))
        return {
            "val_confusion_matrix": class_plots.confusion_matrix(confusion, names, "validation"),
            "val_classes": class_plots.precision_recall(per_class, names, "validation"),
        }
