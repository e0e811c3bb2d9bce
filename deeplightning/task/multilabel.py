"""Several labels for one sample, or none: a network learns the probability of each label by itself.

Shapes: B batch, N samples, K labels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multilabel_average_precision, multilabel_f1_score

from deeplightning.config.part_config import PartConfig
from deeplightning.task.metrics import Collected
from deeplightning.task.networks import LabelError, MisfitError, Probabilities, check_number, refusal
from deeplightning.task.pixel_input import ImageTask
from deeplightning.task.rows import RowTask
from deeplightning.task.supervised import Batch, Supervised


class MeanAveragePrecision(Collected):
    """The mean of the labels' average precisions, in [0, 1]; a label that no sample has is left out. nan: none has any.
    scikit-learn's `average_precision_score` of the labels that occur."""

    def compute(self) -> Tensor:
        scores, truth = super().compute()
        occurs = truth.any(0)
        if not occurs.any():
            return scores.new_tensor(torch.nan)
        scores, truth = scores[:, occurs], truth[:, occurs]
        found: Tensor = multilabel_average_precision(scores, truth, scores.shape[1], "none", validate_args=False)
        return found.mean()


class F1(Collected):
    """The mean of the labels' F1 scores, in [0, 1], where a sample has the labels whose probability is at least their
    threshold; a label that is neither true nor answered counts as 0. scikit-learn's `f1_score(average="macro")`.

    Attributes:
        thresholds: of each label; empty: 0.5 each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thresholds: list[float] = []

    def compute(self) -> Tensor:
        scores, truth = super().compute()
        answered = chosen(scores, self.thresholds).float()
        return multilabel_f1_score(answered, truth, scores.shape[1], average="macro", validate_args=False)


class Labels(Supervised):
    """What both tasks of this file share: logits (B, K) against labels (B, K) of 0 and 1.

    At the end of each validation a threshold is chosen for each label: the one with the best F1 score on the validation
    set, half-way between the two probabilities that it divides. It travels in the checkpoint and the bundle, and an
    answer has the labels whose probability is at least their threshold.

    Attributes:
        thresholds: of each label; empty: 0.5 each, no validation has ended yet.
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
        """Return probabilities: torchmetrics would take logits between 0 and 1 for such."""
        return outputs.detach().float().sigmoid()

    def truth(self, batch: Batch) -> Tensor:
        """Return the labels, float (B, K)."""
        of_table = isinstance(batch, Mapping) and "target" in batch and "label" not in batch
        labels = self.column(batch, "target" if of_table else "label")
        if labels.ndim != 2 and not of_table:
            raise LabelError(
                f"the batches of the data have `label` {tuple(labels.shape)}; a task with several labels needs `label` "
                "(B, K), 0 or 1 for each label of a sample. Of a table, data.module.params.target names a column of 0 "
                "and 1 for each",
                "data.module",
            )
        return (labels if labels.ndim == 2 else labels[:, None]).float()

    def _count(self, stage: str, outputs: object, truth: Tensor, *rest: Any, **others: Any) -> dict[str, Tensor]:
        return super()._count(stage, outputs, truth.long(), *rest, **others)  # torchmetrics refuses labels of floats

    def _join(self, stage: str, outputs: object, truth: Tensor) -> None:
        super()._join(stage, outputs, truth.long())

    def check_outputs(self, outputs: object) -> None:
        """Raise MisfitError unless they are logits (B, K), one for each label of the data."""
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            raise refusal(self.cfg.model.network.type, outputs, "(B, K): a number for each label")
        check_number(outputs, self.class_names, "labels")

    def check_truth(self, outputs: Tensor, truth: Tensor) -> None:
        """Raise MisfitError for another number of labels than of outputs, LabelError for a value that is not 0 or 1."""
        if outputs.shape != truth.shape:
            given, wanted = outputs.shape[1], truth.shape[1]
            message = f"{self.cfg.model.network.type} gives {given} number(s) for each sample, the data {wanted} labels"
            raise MisfitError(message, "model.network")
        if self._may_look(truth) and bool((wrong := (truth != 0) & (truth != 1)).any()):
            row, column = wrong.nonzero()[0].tolist()
            value, name = truth[row, column].item(), self._names(truth.shape[1])[column]
            message = f"the data hold {value:g} for the label {name}; a label is 1 where a sample has it, else 0"
            raise LabelError(message, "data.module")

    # ---- thresholds

    def take_form(self, inputs: Tensor, outputs: Tensor) -> None:
        super().take_form(inputs, outputs)
        self.class_names = self._names(outputs.shape[1])

    def remember(self, inputs: Tensor, outputs: Tensor, truth: Tensor) -> None:
        """Keep probabilities and labels of the validation, by which thresholds are chosen."""
        self.collected.update(self.measured(outputs), truth.long())

    def on_validation_epoch_end(self) -> None:
        if self.collected.update_count:
            scores, truth = map(torch.atleast_2d, self.collected.compute())  # torchmetrics makes one number of (1, 1)
            self.collected.reset()
            if len(scores) and not self.trainer.sanity_checking:
                self._use(best_thresholds(scores.cpu().numpy(), truth.cpu().numpy()))
        super().on_validation_epoch_end()

    def _use(self, thresholds: list[float]) -> None:
        self.thresholds = thresholds
        for metric in self.metrics.modules():
            if isinstance(metric, F1):
                metric.thresholds = thresholds

    def answers(self, batch: Batch, outputs: Tensor) -> dict[str, Any]:
        """Return a row per sample: the labels of the answer and the true ones, divided by |, and all probabilities."""
        scores = self.measured(outputs)
        names = self._names(scores.shape[1])
        columns: dict[str, object] = {"predicted_labels": _joined(names, chosen(scores, self.thresholds))}
        if "label" in batch or "target" in batch:
            columns["labels"] = _joined(names, self.truth(batch) == 1)
        return columns | {f"probability_{name}": scores[:, number] for number, name in enumerate(names)}

    def answer_details(self) -> dict[str, Any]:
        """Return what a bundle says of its answers: the threshold of each label."""
        return {"thresholds": self.thresholds or [0.5] * len(self.class_names)}

    def inference_model(self) -> nn.Module:
        """Return what maps inputs (N, …) to probabilities float32 (N, K), on the CPU, in eval mode."""
        return self.exported(Probabilities(self.network, getattr(self, "normalise", None), exclusive=False))

    # ---- travelling

    def travels(self) -> dict[str, object]:
        return {**super().travels(), "thresholds": self.thresholds}

    def arrives(self, saved: dict[str, Any]) -> None:
        self._use(saved["thresholds"])
        if len(saved) > 1:  # else the data module said nothing of its inputs
            super().arrives(saved)


class ImageMultilabel(Labels, ImageTask):
    """Trains `model.network` on {"image": uint8 (B, C, H, W), "label": (B, K) of 0 and 1, "index": int64 (B,)}.

    The data module says how its pixels are normalised (`image_spec`) and what the labels are called (`class_names`);
    both travel in the checkpoint.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics`; by default `map`, the mean average
    precision, and `f1`, the mean F1 score of the labels by their thresholds. Those of a validation are chosen on it, so
    `val_f1` is the best that can be had there, and `test_f1` what to expect.
    """

    kind = "image_multilabel"


class Multilabel(Labels, RowTask):
    """The same for rows of a table, signals and arrays: batches of {"input": float32 (B, …), "label" or "target":
    (B, K) of 0 and 1, "index": int64 (B,)}.

    The labels are called as the data module says (`class_names`, or the columns of a table: `target_names`). Metrics
    are those of `ImageMultilabel`.
    """

    gives = "multilabel"

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        names = getattr(data, "class_names", None) or getattr(data, "target_names", None)
        self.class_names = list(names or self.class_names)


def chosen(scores: Tensor, thresholds: list[float]) -> Tensor:
    """Return which labels an answer has, bool (B, K), by probabilities (B, K) and a threshold for each; none: 0.5."""
    # In 64 bits, as the thresholds are: rounded to 32, one may be the probability above or below it.
    return scores.double() >= torch.tensor(thresholds or [0.5], dtype=torch.float64, device=scores.device)


def best_thresholds(scores: np.ndarray, truth: np.ndarray) -> list[float]:
    """Return for each label the threshold with the best F1 score, of equals the highest; half-way between the least
    probability that it lets through and the next.

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
        f1[:-1][ranked[:-1] == ranked[1:]] = -1  # equal probabilities are not divided
        best = int(f1.argmax())
        found.append(float((ranked[best] + below[best]) / 2) if right[-1] else 0.5)
    return found


def _joined(names: list[str], which: Tensor) -> list[str]:
    """Return the names of each row's labels, bool (B, K), divided by |."""
    return ["|".join(name for name, has in zip(names, row, strict=True) if has) for row in which.tolist()]
