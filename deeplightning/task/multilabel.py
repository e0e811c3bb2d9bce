"""Multilabel classification: predict an independent probability for each label of a sample.

Shapes: B batch, N samples, K labels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multilabel_average_precision, multilabel_f1_score

from deeplightning.batches import class_names_of
from deeplightning.config.part_config import PartConfig
from deeplightning.task.metrics import Collected
from deeplightning.task.networks import LabelError, MisfitError, Probabilities, check_output_count, output_error
from deeplightning.task.pixel_input import ImageTask
from deeplightning.task.rows import RowTask
from deeplightning.task.supervised import Batch, Supervised


class MeanAveragePrecision(Collected):
    """Mean of the labels' average precisions, in [0, 1]; labels that no sample has are left out. nan if none occurs.
    Equals scikit-learn's `average_precision_score` of the labels that occur."""

    def compute(self) -> Tensor:
        scores, truth = super().compute()
        occurs = truth.any(0)
        if not occurs.any():
            return scores.new_tensor(torch.nan)
        scores, truth = scores[:, occurs], truth[:, occurs]
        found: Tensor = multilabel_average_precision(scores, truth, scores.shape[1], "none", validate_args=False)
        return found.mean()


class F1(Collected):
    """Mean of the labels' F1 scores, in [0, 1]. A label is predicted if its probability is at least its threshold; a
    label that is neither true nor predicted counts as 0. Equals scikit-learn's `f1_score(average="macro")`.

    Attributes:
        thresholds: of each label; empty: 0.5 each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thresholds: list[float] = []

    def compute(self) -> Tensor:
        scores, truth = super().compute()
        answered = above_thresholds(scores, self.thresholds).float()
        return multilabel_f1_score(answered, truth, scores.shape[1], average="macro", validate_args=False)


class Labels(Supervised):
    """Base of both tasks of this file: logits (B, K) against labels (B, K) of 0 and 1.

    The end of each validation chooses a threshold for each label: the one with the best F1 score on the validation set,
    halfway between the two probabilities that it separates. Thresholds are saved in the checkpoint and the bundle, and
    an answer has the labels whose probability is at least their threshold.

    Attributes:
        thresholds: of each label; empty before the end of the first validation: 0.5 each.
    """

    truth_name = "label"
    metric_names = ("map", "f1")
    uniform = True

    def __init__(self, cfg: PartConfig):
        super().__init__(cfg)
        self.class_names: list[str] = []
        self.thresholds: list[float] = []
        self.collected = Collected()

    def default_metrics(self) -> dict[str, object]:
        return {"map": MeanAveragePrecision(), "f1": F1()}

    def measured(self, outputs: Any) -> Tensor:
        """Return probabilities, because torchmetrics would mistake logits between 0 and 1 for them."""
        return outputs.detach().float().sigmoid()

    def truth(self, batch: Batch) -> Tensor:
        """Return the labels, float (B, K)."""
        of_table = isinstance(batch, Mapping) and "target" in batch and "label" not in batch
        labels = self.column(batch, "target" if of_table else "label")
        if labels.ndim != 2 and not of_table:
            raise LabelError(
                f"the batches of the data have `label` {tuple(labels.shape)}; a task with several labels needs `label` "
                "(B, K), 0 or 1 for each label of a sample. For a table, list a column of 0 and 1 for each label in "
                "data.module.params.target",
                "data.module",
            )
        return (labels if labels.ndim == 2 else labels[:, None]).float()

    def _measure(self, stage: str, outputs: object, truth: Tensor, *rest: Any, **others: Any) -> dict[str, Tensor]:
        return super()._measure(stage, outputs, truth.long(), *rest, **others)  # torchmetrics refuses floats

    def _add_empty_batch(self, stage: str, outputs: object, truth: Tensor) -> None:
        super()._add_empty_batch(stage, outputs, truth.long())

    def check_outputs(self, outputs: object) -> None:
        """Raise MisfitError unless the outputs are logits (B, K), one for each label of the data."""
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            raise output_error(self.cfg.model.network.type, outputs, "(B, K): a number for each label")
        check_output_count(outputs, self.class_names, "labels")

    def check_truth(self, outputs: Tensor, truth: Tensor) -> None:
        """Raise MisfitError if the numbers of labels and outputs differ, LabelError if a value is not 0 or 1."""
        if outputs.shape != truth.shape:
            given, wanted = outputs.shape[1], truth.shape[1]
            message = f"{self.cfg.model.network.type} gives {given} number(s) for each sample, the data {wanted} labels"
            raise MisfitError(message, "model.network")
        if not self.class_names:
            self.class_names = self._names_or_numbers(outputs.shape[1])
        if self._may_read(truth) and bool((wrong := (truth != 0) & (truth != 1)).any()):
            row, column = wrong.nonzero()[0].tolist()
            value, name = truth[row, column].item(), self.class_names[column]
            message = f"the data hold {value:g} for the label {name}; a label is 1 where a sample has it, else 0"
            raise LabelError(message, "data.module")

    # ---- thresholds

    def remember(self, inputs: Tensor, outputs: Tensor, truth: Tensor) -> None:
        """Collect probabilities and labels of the validation, from which thresholds are chosen."""
        self.collected.update(self.measured(outputs), truth.long())

    def on_validation_epoch_end(self) -> None:
        if self.collected.update_count:
            scores, truth = map(torch.atleast_2d, self.collected.compute())  # torchmetrics reduces (1, 1) to a scalar
            self.collected.reset()
            if len(scores) and not self.trainer.sanity_checking:
                self._set_thresholds(best_thresholds(scores.cpu().numpy(), truth.cpu().numpy()))
        super().on_validation_epoch_end()

    def _set_thresholds(self, thresholds: list[float]) -> None:
        self.thresholds = thresholds
        for metric in self.metrics.modules():
            if isinstance(metric, F1):
                metric.thresholds = thresholds

    def answers(self, batch: Batch, outputs: Tensor) -> dict[str, Any]:
        """Return a row per sample: predicted and true labels, separated by |, and all probabilities."""
        scores = self.measured(outputs)
        names = self._names_or_numbers(scores.shape[1])
        columns: dict[str, object] = {"predicted_labels": _join_names(names, above_thresholds(scores, self.thresholds))}
        if "label" in batch or "target" in batch:
            columns["labels"] = _join_names(names, self.truth(batch) == 1)
        return columns | {f"probability_{name}": scores[:, number] for number, name in enumerate(names)}

    def answer_details(self) -> dict[str, Any]:
        """Return the threshold of each label, which the bundle keeps."""
        return {"thresholds": self.thresholds or [0.5] * len(self.class_names)}

    def inference_model(self) -> nn.Module:
        """Return a module that maps inputs (N, …) to probabilities float32 (N, K), on the CPU, in eval mode."""
        return self.exported(Probabilities(self.network, getattr(self, "normalise", None), exclusive=False))

    # ---- checkpoints

    def travels(self) -> dict[str, object]:
        return {**super().travels(), "thresholds": self.thresholds}

    def arrives(self, saved: dict[str, Any]) -> None:
        self._set_thresholds(saved["thresholds"])
        if len(saved) > 1:  # otherwise the run that saved it had no spec of its inputs
            super().arrives(saved)


class ImageMultilabel(Labels, ImageTask):
    """Trains `model.network` on {"image": uint8 (B, C, H, W), "label": (B, K) of 0 and 1, "index": int64 (B,)}.

    The data module provides `image_spec`, which normalises pixels, and `class_names`, the names of the labels; both are
    saved in the checkpoint.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics`; by default `map`, the mean average
    precision, and `f1`, the mean F1 score of the labels. The thresholds are chosen on the validation set, so `val_f1`
    is optimistic; `test_f1` is what to expect.
    """

    kind = "image_multilabel"


class Multilabel(Labels, RowTask):
    """The same for rows of a table, signals and arrays: batches of {"input": float32 (B, …), "label" or "target":
    (B, K) of 0 and 1, "index": int64 (B,)}.

    The names of the labels are the data module's `class_names`, or for a table its `target_names`. The metrics are
    those of `ImageMultilabel`.
    """

    gives = "multilabel"

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        self.class_names = class_names_of(data) or list(getattr(data, "target_names", None) or self.class_names)


def above_thresholds(scores: Tensor, thresholds: list[float]) -> Tensor:
    """Return the predicted labels, bool (B, K), for probabilities (B, K) and one threshold per label; empty: 0.5."""
    # float64 like the thresholds: rounded to float32, one could equal the probability above or below it.
    return scores.double() >= torch.tensor(thresholds or [0.5], dtype=torch.float64, device=scores.device)


def best_thresholds(scores: np.ndarray, truth: np.ndarray) -> list[float]:
    """Return for each label the threshold with the best F1 score, and the highest of equally good ones. It is halfway
    between the lowest probability that it accepts and the next lower one.

    Args:
        scores: probabilities, float (N, K), N ≥ 1.
        truth: (N, K) of 0 and 1.

    Returns:
        K numbers from 0 to 1; 0.5 for a label that no sample has.
    """
    found = []
    for label in range(scores.shape[1]):
        order = np.argsort(-scores[:, label], kind="stable")
        ranked, right = scores[order, label].astype(np.float64), np.cumsum(truth[order, label])  # (N,)
        f1 = 2 * right / (np.arange(1, len(ranked) + 1) + max(1, right[-1]))
        below = np.append(ranked[1:], 0.0)
        f1[:-1][ranked[:-1] == ranked[1:]] = -1  # equal probabilities cannot be separated
        best = int(f1.argmax())
        found.append(float((ranked[best] + below[best]) / 2) if right[-1] else 0.5)
    return found


def _join_names(names: list[str], which: Tensor) -> list[str]:
    """Return the names of each row's labels, bool (B, K), separated by |."""
    return ["|".join(name for name, has in zip(names, row, strict=True) if has) for row in which.tolist()]
