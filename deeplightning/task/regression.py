"""Regression: a network learns to give numbers, one or several for each sample.

Shapes: B batch, F features, T targets.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from deeplightning.task.errors import MisfitError
from deeplightning.task.supervised import Batch, Supervised


class MeanSquaredError(Metric):
    """Mean of the squared errors, over all samples, targets and processes; scikit-learn's `mean_squared_error`."""

    full_state_update = False
    total: Tensor
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        # In 64 bits, as `deeplightning.task.metrics.SampleMean`; of each target, once the first batch tells how many.
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, truth: Tensor) -> None:
        """Adds a batch: outputs and truth, float (B,) or (B, T)."""
        self.total = self.total + (outputs.double() - truth.double()).square().sum(0)
        self.samples = self.samples + len(truth)

    def compute(self) -> Tensor:
        return (self.total / self.samples).mean().float()


class RootMeanSquaredError(MeanSquaredError):
    """The square root of each target's mean squared error, and the mean of these; scikit-learn's
    `root_mean_squared_error`."""

    def compute(self) -> Tensor:
        return (self.total / self.samples).sqrt().mean().float()


class Regression(Supervised):
    """Trains `model.network` on {"input": float (B, F), "target": float (B,) or (B, T), "index": int64 (B,)}.

    Outputs and targets of shape (B, 1) are taken as (B,): a loss would spread one against the other to (B, B).
    Metrics: `<stage>_loss`, and `<stage>_mse` and `<stage>_rmse` or those of `model.metrics`, weighted by sample.
    A batch may lack `index`, the position of each sample in its set; then there is no file of predictions.

    Raises:
        ValueError: several networks, optimizers or schedulers, or no loss: this task trains one network.
        MisfitError: (while running) the network does not take the inputs, or gives what is no number for each target.
    """

    kind = "regression"
    metric_names = ("mse", "rmse")

    def default_metrics(self) -> dict[str, Any]:
        return {"mse": MeanSquaredError(), "rmse": RootMeanSquaredError()}

    def truth(self, batch: Batch) -> Tensor:
        """The targets, float (B,) or (B, T)."""
        return _without_one(batch["target"])

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (B, F) to predictions (B,) or (B, T).

        Raises:
            MisfitError: the network takes another number of features.
        """
        try:
            return _without_one(super().forward(inputs))
        except RuntimeError as error:
            if "shapes cannot be multiplied" not in str(error):
                raise
            shape = tuple(inputs.shape)
            message = f"{self.cfg.model.network.type} does not take the data's inputs {shape}: {error}"
            raise MisfitError(message, "model.network") from error

    def check_outputs(self, outputs: Any) -> None:
        if not isinstance(outputs, Tensor) or outputs.ndim not in (1, 2):
            found = tuple(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            message = f"{self.cfg.model.network.type} gives {found}, not (B, T): a number for each target of a sample"
            raise MisfitError(message, "model.network")

    def check_truth(self, outputs: Tensor, truth: Tensor) -> None:
        if outputs.shape != truth.shape:
            given, wanted = (shape[1] if len(shape) > 1 else 1 for shape in (outputs.shape, truth.shape))
            message = f"{self.cfg.model.network.type} gives {given} number(s) for each sample, the data have {wanted}"
            raise MisfitError(message, "model.network")

    def answers(self, batch: Batch, outputs: Tensor) -> dict[str, Any]:
        """A row per sample: its index, and prediction and target, with a number behind where there are several."""
        if "index" not in batch:
            return {}
        columns = {"index": batch["index"], **_columns("prediction", outputs.detach().float())}
        return columns | _columns("target", self.truth(batch)) if "target" in batch else columns


def _without_one(values: Any) -> Any:
    """(B, 1) as (B,); anything else as it is."""
    return values.squeeze(1) if isinstance(values, Tensor) and values.ndim == 2 and values.shape[1] == 1 else values


def _columns(name: str, values: Tensor) -> dict[str, Tensor]:
    if values.ndim == 1:
        return {name: values}
    return {f"{name}_{number}": column for number, column in enumerate(values.unbind(1))}
