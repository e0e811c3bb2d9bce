"""Regression: predict one or several numbers for each sample.

Shapes: B batch, F features, T targets.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from deeplightning.config.part_config import PartConfig
from deeplightning.task.metrics import Collected
from deeplightning.task.networks import MisfitError, output_error
from deeplightning.task.rows import RowTask, Scaled
from deeplightning.task.supervised import Batch


class MeanSquaredError(Metric):
    """Mean squared error over all samples, targets and processes; equals scikit-learn's `mean_squared_error`."""

    full_state_update = False
    needs_batch = True  # see `Supervised._add_empty_batch`: the first batch sets the shape of `total`
    total: Tensor
    samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64, as in `deeplightning.task.metrics.SampleMean`; one sum per target from the first batch on.
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, truth: Tensor) -> None:
        """Add a batch: outputs and truth, float (B,) or (B, T)."""
        self.total = self.total + (outputs.double() - truth.double()).square().sum(0)
        self.samples = self.samples + len(truth)

    def compute(self) -> Tensor:
        return (self.total / self.samples).mean().float()


class RootMeanSquaredError(MeanSquaredError):
    """Mean over targets of the square root of each target's mean squared error; equals scikit-learn's
    `root_mean_squared_error`."""

    def compute(self) -> Tensor:
        return (self.total / self.samples).sqrt().mean().float()


class Regression(RowTask):
    """Trains `model.network` on {"input": float (B, F), "target": float (B,) or (B, T), "index": int64 (B,)}.

    If the data module has `target_mean` and `target_std`, (T,), the network learns targets of mean 0 and standard
    deviation 1, and the loss is computed on these; metrics, predictions and answers are in the unit of the data.

    Outputs and targets of shape (B, 1) are squeezed to (B,): a loss would broadcast (B,) and (B, 1) to (B, B).
    Metrics: `<stage>_loss`, and `<stage>_mse` and `<stage>_rmse` or those of `model.metrics`, weighted by sample.
    A batch may lack `index`, the position of each sample in its dataset; then no predictions are written.

    An answer of the endpoint also has an interval: prediction ± the `interval` quantile of the absolute errors on the
    validation set. For samples like these it contains the truth with that probability (split conformal prediction,
    Lei et al. 2018, https://arxiv.org/abs/1604.04173).

    Args:
        cfg: the whole config.
        interval: from 0 to 1; null: answers have no interval.

    Attributes:
        target_names: the name of each target; empty if the data module gives none.

    Raises:
        MisfitError: (while running) the network does not accept the inputs, or its outputs do not fit the targets.
    """

    metric_names = ("mse", "rmse")
    uniform = True
    target_mean: Tensor
    target_std: Tensor

    def __init__(self, cfg: PartConfig, interval: float | None = 0.9):
        super().__init__(cfg)
        if interval is not None and not (isinstance(interval, float) and 0 < interval < 1):
            raise ValueError(f"interval must be null or a number between 0 and 1, not {interval!r}")
        self.interval = interval
        self.half_widths: list[float] = []
        self.collected = Collected()
        self.target_names: list[str] = []
        self._set_scale([0.0], [1.0])

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if names := getattr(data, "target_names", None):
            self.target_names = list(names)
            self._set_scale(data.target_mean, data.target_std)

    def _set_scale(self, mean: list[float], std: list[float]) -> None:
        self.is_scaled = (mean, std) != ([0.0], [1.0])
        for name, values in (("target_mean", mean), ("target_std", std)):
            values = values[0] if len(values) == 1 else values  # type: ignore[assignment] # else (B,) becomes (B, 1)
            self.register_buffer(name, torch.tensor(values), persistent=False)
        # Read by torch's DDP: these buffers are equal on all processes and need not be broadcast at each step.
        self._ddp_params_and_buffers_to_ignore = ["target_mean", "target_std"]

    def default_metrics(self) -> dict[str, object]:
        return {"mse": MeanSquaredError(), "rmse": RootMeanSquaredError()}

    def truth(self, batch: Batch) -> Tensor:
        """Return the targets on the scale of the network's outputs, float (B,) or (B, T)."""
        target = _squeezed(super().truth(batch))
        return (target - self.target_mean) / self.target_std if self.is_scaled else target

    def in_units(self, values: Any) -> Any:
        """Convert outputs of the network, float (B,) or (B, T), to the unit of the data."""
        return values * self.target_std + self.target_mean if self.is_scaled else values

    def _measure(self, stage: str, outputs: Any, truth: Tensor, *rest: Any, **others: Any) -> dict[str, Tensor]:
        # In float32 already here: a product of 16-bit outputs and a number has 16 bits.
        return super()._measure(stage, self.in_units(outputs.float()), self.in_units(truth), *rest, **others)

    def remember(self, inputs: Tensor, outputs: Tensor, truth: Tensor) -> None:
        """Collect outputs and truth of the validation, from whose differences intervals are computed."""
        if self.interval is not None:  # also without a spec, which other processes may have: they wait in `compute`
            # Copies, since a CUDA graph reuses the memory of its outputs.
            outputs, truth = (self.in_units(v.float()).unsqueeze(-1).flatten(1).clone() for v in (outputs, truth))
            self.collected.update(outputs, truth)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self.collected.update_count:
            # torchmetrics reduces (1, 1) to a scalar.
            outputs, truth = (torch.atleast_2d(values).double() for values in self.collected.compute())
            self.collected.reset()
            found = (outputs - truth).abs().sort(0).values  # (N, T)
            if len(found) and self.interval is not None:
                rank = min(len(found), math.ceil((len(found) + 1) * self.interval)) - 1
                self.half_widths = found[rank].tolist()

    def forward(self, inputs: Tensor) -> Tensor:
        """Return predictions (B,) or (B, T) for inputs (B, F); raise MisfitError if the network refuses them."""
        try:
            return _squeezed(super().forward(inputs))
        except RuntimeError as error:
            if "shapes cannot be multiplied" not in str(error):
                raise
            shape = tuple(inputs.shape)
            message = f"{self.cfg.model.network.type} does not take the data's inputs {shape}: {error}"
            raise MisfitError(message, "model.network") from error

    def check_outputs(self, outputs: object) -> None:
        if not isinstance(outputs, Tensor) or outputs.ndim not in (1, 2):
            raise output_error(self.cfg.model.network.type, outputs, "(B, T): a number for each target of a sample")

    def check_truth(self, outputs: Tensor, truth: Tensor) -> None:
        if outputs.shape != truth.shape:
            given, wanted = (shape[1] if len(shape) > 1 else 1 for shape in (outputs.shape, truth.shape))
            message = f"{self.cfg.model.network.type} gives {given} number(s) for each sample, the data have {wanted}"
            raise MisfitError(message, "model.network")
        if not self.target_names and outputs.ndim > 1:
            self.target_names = [f"target_{number}" for number in range(outputs.shape[1])]

    def answers(self, batch: Batch, outputs: Tensor) -> dict[str, Any]:
        """Return a row per sample: prediction and target, numbered if there are several."""
        columns = _columns("prediction", self.in_units(outputs.detach().float()))
        return columns | _columns("target", _squeezed(batch["target"])) if "target" in batch else columns

    # ---- checkpoints

    def travels(self) -> dict[str, object]:
        own = super().travels()
        if not own:
            return {}
        mean, std = (v.reshape(-1).tolist() for v in (self.target_mean, self.target_std))
        return own | {"names": self.target_names, "mean": mean, "std": std, "half_widths": self.half_widths}

    def arrives(self, saved: dict[str, Any]) -> None:
        super().arrives(saved)
        self.target_names = self.target_names or saved["names"]
        device = self.target_mean.device  # checkpoints are loaded when the task is already on its device
        self._set_scale(saved["mean"], saved["std"])  # that of the weights, whatever the data are now
        self.target_mean, self.target_std = self.target_mean.to(device), self.target_std.to(device)
        self.half_widths = saved["half_widths"]

    # ---- export

    @property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """Return the name of each number of an answer."""
        return self.target_names or ["target"]

    def answer_details(self) -> dict[str, object]:
        """Return the interval and its half width for each target, which the bundle keeps."""
        return {"interval": self.interval, "half_widths": self.half_widths} if self.half_widths else {}

    def inference_model(self) -> nn.Module:
        """Return a module that maps prepared inputs float32 (N, …) to numbers float32 (N, T) in the unit of the data,
        on the CPU, in eval mode."""
        size, scale = len(self.class_names), (self.target_mean, self.target_std)
        mean, std = (values.detach().cpu().reshape(-1).expand(size).clone() for values in scale)
        return self.exported(Scaled(self.network, mean, std))


def _squeezed(values: object) -> Any:
    """Return (B, 1) as (B,), and anything else unchanged."""
    return values.squeeze(1) if isinstance(values, Tensor) and values.ndim == 2 and values.shape[1] == 1 else values


def _columns(name: str, values: Tensor) -> dict[str, Tensor]:
    if values.ndim == 1:
        return {name: values}
    return {f"{name}_{number}": column for number, column in enumerate(values.unbind(1))}
