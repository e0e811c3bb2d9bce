"""Base of supervised tasks: a network, losses and metrics, with values that are means over samples on any number of
processes.

B batch; further dimensions depend on the task.
"""

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from deeplightning.batches import by_name
from deeplightning.config.part_config import PartConfig
from deeplightning.config.target import build
from deeplightning.task.denominators import CANNOT_WEIGH, can_weigh, denominator, divides_by_samples, mean
from deeplightning.task.members import Batch, Members
from deeplightning.task.metrics import FixedDtypeDict, SampleMean
from deeplightning.task.networks import MisfitError, SelectOutput, build_loss, evaluation_mode
from deeplightning.task.optimize import freeze, optimizers
from deeplightning.transfer import Points

if TYPE_CHECKING:
    from pytorch_lightning.utilities.types import OptimizerLRScheduler

    from deeplightning.task.compiled import Compiled

log = logging.getLogger("deeplightning")


class Supervised(Members):
    """Trains `model.network` to predict the truth of each sample. Your own task overrides what the network is called
    with (`inputs`), what it should return (`truth`), and anything else that differs.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics` (`metric_names` by default), weighted by
    sample, and losses by their denominator. Rows of a batch whose `index` is -1 are padding and do not count.

    A batch is a mapping with the columns `input_name` and `truth_name`, or a tuple or list of these two in that order.
    A column `weight` or a third part, float (B,), weights each sample in the losses: sum(weight * loss) / sum(weight).

    Attributes:
        weighed_losses: the losses of the last training batch, each with its denominator, float64 (); empty if all
            divide by the number of samples.
        kind: name of what the task does; its state in checkpoints has this key.

    Raises:
        ValueError: there are several networks, optimizers or schedulers, or no loss.
    """

    # Names in `trainer.callback_metrics`, for callbacks that monitor a metric. {stage}: train, val, test; {metric}: the
    # names under model.metrics; {loss}: the names under model.loss, if there are several. Training steps log train_…,
    # epochs train_…_epoch; `lr` is logged for every task.
    logged_metrics = (
        "{stage}_loss",
        "{stage}_{loss}",
        "{stage}_{metric}",
        "train_loss_epoch",
        "train_{loss}_epoch",
        "train_{metric}_epoch",
        "lr",
    )

    def __init__(self, cfg: PartConfig):
        super().__init__()
        model = cfg.model
        for name in ("network", "optimizer", "scheduler"):
            if isinstance(getattr(model, name), dict):
                raise ValueError(f"this task takes one {name}, not several by name (model.{name})")
        if model.network is None or model.loss is None:
            raise ValueError("this task needs model.network and model.loss")
        self.cfg = cfg
        self.network: nn.Module | None = None
        named = model.loss if isinstance(model.loss, dict) else {"loss": model.loss}
        for section, names in (("loss", named), ("metrics", model.metrics or {})):
            if taken := [name for name in names if hasattr(nn.ModuleDict, name) or "." in name]:
                raise MisfitError(f"model.{section}.{taken[0]}: torch has another use for this name; take another")
        metrics = self.metric_names if model.metrics is None else model.metrics
        clash = [f"metrics.{name}" for name in metrics if name in {"loss", *named}]
        if clash := clash or ["loss.loss"] * (len(named) > 1 and "loss" in named):
            raise MisfitError(f"model.{clash[0]}: a loss is logged under this name; rename one of them")
        self.losses = nn.ModuleDict({name: build_loss(loss, self.loss_arguments) for name, loss in named.items()})
        self.weights = {name: loss.weight for name, loss in named.items()}
        self._divides_by_samples = all(divides_by_samples(loss, self.uniform) for loss in self.losses.values())
        self._combines_batches = True  # whether a step combines several batches; True until training starts
        self.weighed_losses: list[tuple[Tensor, Tensor]] = []
        self.metrics = FixedDtypeDict({f"{stage}_stage": self._build_metrics() for stage in ("train", "val", "test")})
        self._compiled: Compiled | None = None
        self._compiled_step: Any = None
        self._meta_by_shape: dict[tuple[int, ...], object] = {}  # by input shape, see `_meta_outputs`
        self._logged_step, self._points = -1, Points()

    def _build_metrics(self) -> nn.ModuleDict:
        named = self.cfg.model.metrics
        metrics: dict[str, Any] = self.default_metrics() if named is None else {n: build(t) for n, t in named.items()}
        several = self.losses if len(self.losses) > 1 else ()
        metrics["loss"] = SampleMean([self.weights[name] for name in several] if not self._divides_by_samples else ())
        metrics |= {name: SampleMean() for name in several}
        return nn.ModuleDict(metrics)

    def _stage_metrics(self, stage: str) -> dict[str, Any]:
        return dict(cast(nn.ModuleDict, self.metrics[f"{stage}_stage"]).items())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # Lightning sets it fifty times a step; torch would search its parameters
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # ---- setup

    def configure_model(self) -> None:
        """Build the network on the CPU, and check that it fits before data are read.

        Some strategies call this in a context that creates tensors on the GPU, where the same seed would give other
        weights. If an engine shards the network, its parameters may not exist yet, and the first batch reveals a
        misfit.
        """
        if self.network is not None:
            return
        with torch.device("cpu"):
            self.network = network = build(self.cfg.model.network)
            if not network.training:  # from Hugging Face's `from_pretrained`; parts that its constructor freezes stay
                network.train()
            freeze(network, self.cfg.model.trainable)
            if self.cfg.model.output is not None:
                self.select_output = SelectOutput(self.cfg.model.output, self.cfg.model.network.type)
                network.register_forward_hook(self.select_output)
            # DeepSpeed marks a sharded tensor with `ds_id`.
            if not any(p.is_meta or hasattr(p, "ds_id") for p in network.parameters()):
                self.try_out(network)
        if mode := self.cfg.engine.compile:
            from deeplightning.task.compiled import ONLY_OWN_STEPS, Compiled

            if self._compiles_as_one():
                self._compiled = Compiled(mode)
                self._compiled_step = self._compiled.compile(self._compute, self)
            elif mode == "graphs":
                raise MisfitError(ONLY_OWN_STEPS.format(type(self).__name__))
            else:
                network.compile(mode="default" if mode is True else mode)

    def _compiles_as_one(self) -> bool:
        """Return whether network and losses can be compiled together: no engine has hooks in the network, no subclass
        overrides the training step, and all losses weight a batch equally."""
        unsharded = self.cfg.engine.backend in (None, "ddp")
        together = self._divides_by_samples or len(self.losses) == 1
        return unsharded and together and type(self).training_step is Supervised.training_step

    def configure_optimizers(self) -> "OptimizerLRScheduler":
        assert self.network is not None
        return optimizers(self.network, self.cfg.model, self.trainer, self.cfg.engine.fused)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as Lightning does, and also by norms other than the second, which it does not support."""
        clip = self.cfg.train.gradient_clip
        if clip is None and not gradient_clip_val:
            return  # skips Lightning's comparison of strings: 1 % of a small network's step
        if clip is not None and clip.algorithm == "agc":
            return  # a callback clips
        if clip is None or clip.algorithm != "norm" or clip.norm_type == 2:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, clip.value, clip.norm_type)

    # ---- training

    def on_train_start(self) -> None:
        self._combines_batches = self.trainer.world_size > 1 or self.cfg.train.accumulator_factor > 1
        if not self.trainer.is_global_zero:
            return
        is_ours = type(self).configure_optimizers.__module__.startswith("deeplightning.")
        for name, loss in self.losses.items():
            if is_ours and any(parameter.requires_grad for parameter in loss.parameters()):
                message = "%s: %s has parameters, which keep their initial values: the optimizer has the network's"
                log.warning(message, self._loss_key(name), type(loss).__name__)
            if getattr(loss, "reduction", None) == "sum":
                log.warning(
                    "%s: %s has `reduction: sum`, and sums are combined like means: gradients of accumulated batches "
                    "and of processes are averaged, and the loss of an epoch depends on data.batch_size. Set "
                    "`reduction: mean`, and a larger learning rate",
                    *(self._loss_key(name), type(loss).__name__),
                )
        if not self._divides_by_samples and len(self.losses) > 1 and self.cfg.train.accumulator_factor > 1:
            log.warning(
                "model.loss: %s do not all divide by the number of samples, so in a step of accumulated batches each "
                "batch is weighted by its samples. Set train.accumulator_factor=1 to weight each loss by its own "
                "denominator",
                ", ".join(self.losses),
            )

    def _loss_key(self, name: str) -> str:
        return f"model.loss.{name}" if isinstance(self.cfg.model.loss, dict) else "model.loss"

    def forward(self, inputs: Tensor) -> object:
        """Return the outputs of the network for inputs (B, …)."""
        assert self.network is not None
        return self.network(inputs)

    def _outputs(self, inputs: Tensor) -> object:
        outputs = self.forward(inputs)  # `self(inputs)` would start DeepSpeed's step timers a second time
        self.check_outputs(outputs)
        return outputs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, truth = self.inputs(batch), self.truth(batch)
        weight, index = self._weight(batch, len(truth)), _index(batch)
        if self._compiled is not None and weight is None and self._is_compiled(index, batch_idx, inputs, truth):
            return self._training_step_compiled(batch_idx, inputs, truth)
        outputs = self._outputs(inputs)
        if self.trainer.is_last_batch and index is not None:
            # Only the last batch has padding rows; reading the index of each batch would stall a GPU.
            keep = index >= 0
            if not keep.any():
                self._add_empty_batch("train", rows(outputs, slice(0)), truth[:0])
                self._log_step({})
                parts, counts, loss = self._loss(outputs, truth, weight)
                self._set_weighed_losses(parts, {name: torch.zeros_like(count) for name, count in counts.items()})
                return loss  # with weight 0; without a loss the other processes would wait
            outputs, truth, weight = rows(outputs, keep), truth[keep], None if weight is None else weight[keep]
        parts, counts, loss = self._loss(outputs, truth, weight)
        self._set_weighed_losses(parts, counts)
        values = self._measure("train", outputs, truth, parts, counts, loss, wanted=self._must_log_step())
        self._log_step(values, len(truth), counts)
        return loss

    def _set_weighed_losses(self, parts: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
        self.weighed_losses = [(parts[name], count) for name, count in counts.items()]

    def _is_compiled(self, index: Tensor | None, batch_idx: int, inputs: Tensor, truth: Tensor) -> bool:
        assert self._compiled is not None
        last = self.trainer.is_last_batch
        if not self._compiled.takes(inputs, truth, may_be_short=last and batch_idx > 0):
            return False
        return not last or index is None or bool((index >= 0).all())

    def _training_step_compiled(self, batch_idx: int, inputs: Tensor, truth: Tensor) -> Tensor:
        compiled = cast("Compiled", self._compiled)
        self.check_truth(self._meta_outputs(inputs), truth)
        compiled.begin_step(self, inputs.device, accumulates=batch_idx % self.trainer.accumulate_grad_batches > 0)
        outputs, parts, counts, loss = self._compiled_step(inputs, truth)
        own, counts = compiled.detach({**parts, "loss": loss}), compiled.detach(counts)
        self._set_weighed_losses(dict.fromkeys(counts, loss), counts)
        if any(isinstance(v, list) for m in self._stage_metrics("train").values() for v in m.metric_state.values()):
            outputs = compiled.detach(outputs)  # such a metric stores its inputs
        values = self._measure("train", outputs, truth, own, counts, own["loss"], wanted=self._must_log_step())
        self._log_step(values, len(truth), counts)
        return cast(Tensor, loss)

    def _compute(self, inputs: Tensor, truth: Tensor) -> tuple[object, dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Return the outputs of the network and the results of `_weighted`; this is the part that is compiled."""
        outputs = self._outputs(inputs)
        return outputs, *self._weighted(outputs, truth)

    def _meta_outputs(self, inputs: Tensor) -> object:
        """Return outputs for inputs of this shape as tensors on `meta`, without values, computed from one row."""
        shape = tuple(inputs.shape)
        if shape not in self._meta_by_shape:
            devices = [inputs.device] if inputs.device.type == "cuda" else []
            with evaluation_mode(self), torch.random.fork_rng(devices):
                outputs = self._outputs(inputs[:1])
            torch.clear_autocast_cache()  # its cached weights do not require gradients
            self._meta_by_shape[shape] = _on_meta(outputs, shape[0])
        return self._meta_by_shape[shape]

    def _must_log_step(self) -> bool:
        """Return whether the values of this step must be logged and have not been yet."""
        return getattr(self.trainer, "log_every_n_steps", 1) < sys.maxsize and self.global_step != self._logged_step

    def _log_step(self, values: dict[str, Tensor], samples: int = 0, counts: dict[str, Tensor] | None = None) -> None:
        """Log values of a batch as means over all processes: losses weighted by their denominators, metrics by samples.
        A batch without samples has no values."""
        if not self._must_log_step():
            return
        self._logged_step = self.global_step
        if self.trainer.world_size > 1:
            named = self._stage_metrics("train")
            nothing = torch.zeros((), dtype=torch.float64, device=named["loss"].device)  # for a batch without samples
            given = torch.stack([values.get(f"train_{name}", nothing) for name in named])
            of = dict.fromkeys(("loss", *self.losses), next(iter((counts or {}).values()), samples)) | (counts or {})
            weights = torch.stack([nothing + of.get(name, samples) for name in named])
            weighed = torch.where(weights > 0, given * weights, nothing)
            sums, totals = self.trainer.strategy.reduce(torch.stack([weighed, weights]), reduce_op="sum")
            means = sums / totals.where(totals > 0, 1)
            values = {f"train_{name}": value for name, value in zip(named, means, strict=True)}
            if not self._divides_by_samples and len(self.losses) > 1:
                values["train_loss"] = torch.stack([w * values[f"train_{n}"] for n, w in self.weights.items()]).sum()
        # Not with `self.log`, which costs Lightning time at each step until the end of the epoch.
        self.trainer.callback_metrics.update(values)
        self._points.log(self.loggers, values, self.global_step)

    def log_pending(self) -> None:
        """Log the pending values of the last logged step, which exist on a GPU only. Called before a checkpoint."""
        self._points.log_pending()

    def on_train_epoch_end(self) -> None:
        self.log_pending()
        self._log_epoch("train", suffix="_epoch")

    def _loss(
        self, outputs: object, truth: Tensor, weight: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Check the truth and compute the losses, as `_weighted` does."""
        self.check_truth(outputs, truth)
        return self._weighted(outputs, truth, weight)

    def _weighted(
        self, outputs: object, truth: Tensor, weight: Tensor | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Compute the losses; return them, their denominators, float64 (), and their weighted sum. There is a single
        denominator if all losses divide by the samples, and none if these have no weight.

        Raises:
            MisfitError: samples have a weight, and a loss does not support it.
        """
        if weight is not None and (unfit := [name for name, loss in self.losses.items() if not can_weigh(loss)]):
            raise MisfitError(CANNOT_WEIGH.format(type(self.losses[unfit[0]]).__name__), self._loss_key(unfit[0]))
        counts: dict[str, Tensor] = {}
        if weight is not None or not self._divides_by_samples:
            counts = {name: denominator(loss, outputs, truth, weight) for name, loss in self.losses.items()}
        # torch has no deterministic kernel on a GPU for the mean of a loss over pixels.
        exact = truth.device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
        if weight is not None or (counts and (exact or self._combines_batches or not self.training)):
            parts = {name: mean(loss, outputs, truth, counts[name], weight) for name, loss in self.losses.items()}
        else:
            parts = {name: loss(outputs, truth) for name, loss in self.losses.items()}
        if weight is not None and self._divides_by_samples:
            counts = {next(iter(self.losses)): weight.sum(dtype=torch.float64)}
        for name, part in parts.items():
            if not isinstance(part, Tensor) or part.ndim != 0:
                found = tuple(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
                given = f"gives {found}, not a tensor of one number; torch's take `reduction: mean`"
                raise MisfitError(f"{self._loss_key(name)} {given}")
            loss: Any = self.losses[name]
            if name in counts and isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is None:
                parts[name] = part.where(counts[name] != 0, 0)  # if all are ignored, the mean is nan, the gradient 0
        weighted = [part if self.weights[name] == 1 else self.weights[name] * part for name, part in parts.items()]
        return parts, counts, weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum()

    def _measure(
        self,
        stage: str,
        outputs: Any,
        truth: Tensor,
        parts: dict[str, Tensor],
        counts: dict[str, Tensor],
        loss: Tensor,
        wanted: bool = False,
    ) -> dict[str, Tensor]:
        """Add a batch to the stage's metrics; return the values of this batch if `wanted`."""
        values = {}
        measured = self.measured(outputs)
        for name, metric in self._stage_metrics(stage).items():
            if name == "loss" and len(counts) > 1:
                value = loss.detach()
                metric.update(torch.stack([*parts.values()]).detach(), torch.stack([*counts.values()]))
            elif name == "loss" or name in parts:
                value = (loss if name == "loss" else parts[name]).detach()
                metric.update(value, counts.get(name, next(iter(counts.values()), len(truth))))
            elif wanted:
                value = metric(measured, truth)
            else:
                metric.update(measured, truth)
            if wanted:
                if not isinstance(value, Tensor) or value.numel() != 1:
                    found = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
                    raise MisfitError(f"model.metrics.{name}: gives {found}, not one number; see its `average`")
                values[f"{stage}_{name}"] = value.float().reshape(())
        return values

    def _add_empty_batch(self, stage: str, outputs: Any, truth: Tensor) -> None:
        """Add a batch without rows to metrics whose states depend on it: processes cannot gather a list that is empty
        on one of them (torchmetrics 1.9), or tensors of other dimensions."""
        for metric in self._stage_metrics(stage).values():
            states = metric.metric_state.values()
            if hasattr(metric, "needs_batch") or any(isinstance(value, list) and not value for value in states):
                metric.update(self.measured(outputs), truth)

    def _log_epoch(self, stage: str, suffix: str = "") -> None:
        for name, metric in self._stage_metrics(stage).items():
            self.log(f"{stage}_{name}{suffix}", metric)  # Lightning computes it over all processes and resets it

    # ---- evaluation

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, object]:
        return self._evaluate("val", batch)

    def on_validation_epoch_end(self) -> None:
        self._log_epoch("val")

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, object]:
        return self._evaluate("test", batch)

    def on_test_epoch_end(self) -> None:
        self._log_epoch("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, object]:
        return self._prediction_columns(batch, self._evaluation_outputs(self.inputs(batch)))

    def _evaluation_outputs(self, inputs: Tensor) -> object:
        """Return outputs for a batch of an evaluation.

        If they are written to a file, a short batch is padded: rounding in kernels depends on the number of rows, and
        the number of processes decides which samples are in a short batch. With equally many rows in each batch, files
        of 1, 2 and 3 processes were equal to the last digit (CPU, torch 2.15, November 2026).
        """
        missing = (self.cfg.data.batch_size or 0) - len(inputs)  # null: the data module does not take the config
        if self.trainer.state.fn == "fit" or missing <= 0:
            return self._outputs(inputs)
        filled = torch.cat([inputs, inputs.new_zeros((missing, *inputs.shape[1:]))])
        return rows(self._outputs(filled), slice(len(inputs)))

    def _evaluate(self, stage: str, batch: Batch) -> dict[str, object]:
        inputs, truth = self.inputs(batch), self.truth(batch)
        outputs, weight, index = self._evaluation_outputs(inputs), self._weight(batch, len(truth)), _index(batch)
        keep = index >= 0 if index is not None else None
        if keep is not None and not keep.all():  # padding rows
            inputs, truth, outputs = inputs[keep], truth[keep], rows(outputs, keep)
            weight = weight if weight is None else weight[keep]
            places = keep.nonzero().flatten().tolist()
            kept = {Tensor: lambda column: column[keep], list: lambda column: [column[place] for place in places]}
            batch = {name: kept.get(type(column), lambda same: same)(column) for name, column in batch.items()}
        if len(truth):
            self._measure(stage, outputs, truth, *self._loss(outputs, truth, weight))
        else:
            self._add_empty_batch(stage, outputs, truth)
        if stage == "val":  # also without samples: `remember` may lead to a sum over processes
            self.infer_spec(inputs, outputs)
            self.remember(inputs, outputs, truth)
        return self._prediction_columns(batch, outputs)

    def _prediction_columns(self, batch: object, outputs: object) -> dict[str, Any]:
        """Return the columns of `answers` for a batch of any form, after its `index`."""
        named, index = by_name(batch, self.batch_names), _index(batch)
        columns = self.answers(batch if named is None else named, outputs)  # type: ignore[arg-type]
        return {"index": index, **columns} if columns and index is not None else columns

    # ---- checkpoints

    @property
    def checkpoint_key(self) -> str:
        """Checkpoint key of the state that `travels` returns."""
        return self.kind

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if own := self.travels():
            checkpoint[self.checkpoint_key] = own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.checkpoint_key in checkpoint:
            self.arrives(checkpoint[self.checkpoint_key])


def _index(batch: object) -> Tensor | None:
    """Return the position of each row in its dataset, int64 (B,), -1 for padding; None if the loader gives none."""
    return batch.get("index") if isinstance(batch, Mapping) else None


def rows(outputs: Any, which: Tensor | slice) -> Any:
    """Return some rows of a network's outputs; `which` is a slice or a mask, bool (B,)."""
    return apply_to_collection(outputs, Tensor, lambda values: values[which])


def _on_meta(outputs: object, rows: int) -> object:
    """Return the outputs for one row in the shape for several rows, on the device `meta`."""

    def on_meta(found: Tensor) -> Tensor:
        shape = (rows, *found.shape[1:]) if found.ndim and len(found) == 1 else found.shape
        return torch.empty(shape, dtype=found.dtype, device="meta")

    return apply_to_collection(outputs, Tensor, on_meta)
