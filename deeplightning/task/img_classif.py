"""Image classification: a network learns to tell classes of pictures apart, and says how sure it is.

Shapes: B batch, C channels, H height, W width, K classes.
"""

from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from deeplightning.config.target import build
from deeplightning.image import ImageSpec
from deeplightning.task.errors import LabelError, MisfitError
from deeplightning.task.metrics import Accuracy, InOwnPrecision, SampleMean
from deeplightning.task.optimize import freeze, optimizers

Batch = dict[str, Tensor]


class Normalise(nn.Module):
    """Pixels 0 … 255 become numbers around 0: (pixel / 255 - mean) / std, per channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) → floats of the same shape, of the precision that the network computes in.

        The same operations as torchvision's ToTensor and Normalize, so that results are theirs to the last digit.
        """
        return images.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)


class Classifier(nn.Module):
    """What a bundle holds: uint8 pictures (B, C, H, W) to probabilities float32 (B, K)."""

    def __init__(self, normalise: nn.Module, network: nn.Module):
        super().__init__()
        self.normalise, self.network = normalise, network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(self.normalise(images)).float().softmax(1)


class ImageClassification(pl.LightningModule):
    """Trains `model.network` on batches of {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}.

    The data module says how its pixels are normalised (`image_spec`) and what the classes are called (`class_names`);
    both travel in the checkpoint. Rows with index -1 fill up a batch and are not counted.

    Metrics: `<stage>_loss` and `<stage>_<name>` for each of `model.metrics` (`acc` by default), weighted by sample.

    Raises:
        ValueError: several networks, optimizers or schedulers, or no loss: this task trains one network.
    """

    kind = "image_classification"

    # What a run has in `trainer.callback_metrics`, for whoever waits for a metric. {stage}: train, val, test; {metric}:
    # the names under model.metrics; {loss}: the names under model.loss, where there are several. A step of the training
    # logs train_…, its epoch train_…_epoch; `lr` is logged beside each task.
    logged_metrics = (
        "{stage}_loss",
        "{stage}_{loss}",
        "{stage}_{metric}",
        "train_loss_epoch",
        "train_{loss}_epoch",
        "train_{metric}_epoch",
        "lr",
    )

    def __init__(self, cfg: Any):
        super().__init__()
        model = cfg.model
        for name in ("network", "optimizer", "scheduler"):
            if isinstance(getattr(model, name), dict):
                raise ValueError(f"this task takes one {name}, not several by name (model.{name})")
        if model.network is None or model.loss is None:
            raise ValueError("this task needs model.network and model.loss")
        self.cfg = cfg
        self.network: nn.Module | None = None
        self.normalise: nn.Module | None = None
        self.image_spec: ImageSpec | None = None
        self.class_names: list[str] = []
        named = model.loss if isinstance(model.loss, dict) else {"loss": model.loss}
        self.losses = nn.ModuleDict({name: build(loss) for name, loss in named.items()})
        self.weights = {name: loss.weight for name, loss in named.items()}
        self.metrics = InOwnPrecision({f"{stage}_stage": self._metrics() for stage in ("train", "val", "test")})
        self._logged_step = -1
        self._counted: dict[str, dict[str, Any]] = {}  # of the epoch that a resumed run goes on in, over all processes
        self._confusion: Tensor | None = None
        self._sheet: dict[str, Tensor] | None = None

    def _metrics(self) -> nn.ModuleDict:
        named = self.cfg.model.metrics
        metrics: dict[str, Any] = {n: build(t) for n, t in named.items()} if named is not None else {"acc": Accuracy()}
        means = ["loss", *(self.losses if len(self.losses) > 1 else ())]
        metrics |= {name: SampleMean() for name in means}
        return nn.ModuleDict(metrics)

    def _of(self, stage: str) -> dict[str, Any]:
        return dict(cast(nn.ModuleDict, self.metrics[f"{stage}_stage"]).items())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # Lightning's, set fifty times a step; torch looks for parameters in it
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # ---- assembling

    def setup(self, stage: str) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        if getattr(data, "image_spec", None) is not None:
            self._describe(data.image_spec, data.class_names)

    def _describe(self, image_spec: ImageSpec, class_names: list[str]) -> None:
        self.image_spec, self.class_names = image_spec, list(class_names)
        self.normalise = Normalise(image_spec.mean, image_spec.std)
        # What torch's ddp reads: these are the same everywhere, and need not be sent at each step.
        self._ddp_params_and_buffers_to_ignore = ["normalise.mean", "normalise.std"]

    def configure_model(self) -> None:
        """Builds the network and passes one black picture through it: what does not fit shows before data is read.

        Where an engine shards the network, its parameters may not be there yet, and the first batch is what shows it.

        Raises:
            LabelError: there are not as many outputs as classes in the data.
            ValueError: the network does not take the data's pictures.
        """
        if self.network is not None:
            return
        network = build(self.cfg.model.network)
        if not isinstance(network, nn.Module):
            message = f"{self.cfg.model.network.type} gives a {type(network).__name__}, not a torch.nn.Module"
            raise MisfitError(message, "model.network")
        self.network = network
        freeze(network, self.cfg.model.trainable)
        # A tensor with `ds_id` is in parts, by DeepSpeed.
        incomplete = any(p.is_meta or hasattr(p, "ds_id") for p in network.parameters())
        if self.image_spec is not None and not incomplete:
            self._try_out(network, self.image_spec)
        if mode := self.cfg.engine.compile:
            network.compile(mode="default" if mode is True else mode)

    def _try_out(self, network: nn.Module, spec: ImageSpec) -> None:
        """Passes a black picture through; torch's own error would come in the first batch, and speak of matrices."""
        shape = (1, spec.channels, spec.height, spec.width)
        name = self.cfg.model.network.type
        network.eval()
        try:
            with torch.no_grad():
                outputs = network(torch.zeros(shape, device=self.device))
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            message = f"{name} does not take the data's pictures {shape}: {reason}"
            raise MisfitError(message, "model.network") from error
        network.train()
        self._check_outputs(outputs)

    def _check_outputs(self, outputs: Any) -> None:
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

    def configure_optimizers(self) -> Any:
        assert self.network is not None
        return optimizers(self.network, self.cfg.model, self.trainer)

    # ---- learning and judging

    def on_train_start(self) -> None:
        """
        Raises:
            MisfitError: the schedule that is resumed is shorter than the training.
        """
        counted, self._counted = self._counted, {}
        for name, metric in self._of("train").items():
            if name in counted and self.trainer.is_global_zero:
                _restore(metric, counted[name])
        steps = self.trainer.estimated_stepping_batches
        for config in self.trainer.lr_scheduler_configs:
            length = getattr(config.scheduler, "total_steps", None)
            if length is not None and config.interval == "step" and steps > length * config.frequency:
                raise MisfitError(
                    f"model.scheduler: this schedule ends after {length} steps, the training takes {steps}; a resumed "
                    "run keeps the schedule that it began with, and so its train.num_epochs"
                )

    def forward(self, images: Tensor) -> Tensor:
        """Pictures, uint8 (B, C, H, W) or float as the network takes them, to logits (B, K)."""
        assert self.network is not None
        if images.dtype == torch.uint8:
            if self.normalise is None:
                raise MisfitError(
                    "the data gives uint8 pictures, and its data module no `image_spec` to normalise them by"
                )
            images = self.normalise(images)
        return self.network(images)

    def _logits(self, images: Tensor) -> Tensor:
        logits = self.forward(images)  # `self(images)` would start DeepSpeed's timers of the step a second time
        self._check_outputs(logits)
        return logits

    def _judged(self, images: Tensor) -> Tensor:
        """Logits of a batch that is not learned from.

        Where they go to a file, a short batch is filled up: a kernel rounds as the number of rows wants it, and which
        pictures are in a short batch depends on the number of processes. With as many rows in each batch, files of 1,
        2 and 3 processes were equal to the last digit (CPU, torch 2.15, November 2026).
        """
        missing = self.cfg.data.batch_size - len(images)
        if self.trainer.state.fn == "fit" or missing <= 0:
            return self._logits(images)
        filled = torch.cat([images, images.new_zeros((missing, *images.shape[1:]))])
        return self._logits(filled)[: len(images)]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits, labels = self._logits(batch["image"]), batch["label"]
        if self.trainer.is_last_batch and "index" in batch:
            # Only there are rows that do not count; a look at each batch would stall a GPU.
            keep = batch["index"] >= 0
            if not keep.any():
                self._join("train", logits[:0], labels[:0])
                self._log_step({})
                return self._loss(logits, labels)[1]  # with weight 0; without it the other processes would wait
            logits, labels = logits[keep], labels[keep]
        parts, loss = self._loss(logits, labels)
        self._log_step(self._count("train", logits, labels, parts, loss, wanted=self._due()), labels.numel())
        return loss

    def _due(self) -> bool:
        """Whether this step has points to log and does not have them yet."""
        return getattr(self.trainer, "log_every_n_steps", 1) > 0 and self.global_step != self._logged_step

    def _log_step(self, values: dict[str, Tensor], samples: int = 0) -> None:
        """Logs values of a batch as means over the samples of all processes; one without samples gives no values."""
        if not self._due():
            return
        self._logged_step = self.global_step
        if self.trainer.world_size > 1:
            names = [f"train_{name}" for name in self._of("train")]
            nothing = torch.zeros((), device=self.device)
            weighed = [values.get(name, nothing) * samples for name in names]
            *sums, total = self.trainer.strategy.reduce(torch.stack([*weighed, nothing + samples]), reduce_op="sum")
            values = {name: value / total for name, value in zip(names, sums, strict=True)}
        # Not by `self.log`, for which Lightning has some work at each step until the epoch ends.
        self.trainer.callback_metrics.update(values)
        points = {name: value.item() for name, value in values.items()}
        for logger in self.loggers:
            logger.log_metrics(points, self.global_step)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Lightning's clipping, and by norms other than the second, which it does not know."""
        clip = self.cfg.train.gradient_clip
        if clip is None or clip.algorithm != "norm" or clip.norm_type == 2:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, clip.value, clip.norm_type)

    def on_train_epoch_end(self) -> None:
        self._log_epoch("train", suffix="_epoch")

    def on_validation_epoch_start(self) -> None:
        self._confusion = self._sheet = None

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return self._judge("val", batch)

    def on_validation_epoch_end(self) -> None:
        self._log_epoch("val")

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return self._judge("test", batch)

    def on_test_epoch_end(self) -> None:
        self._log_epoch("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        return self._answers(batch, self._judged(batch["image"]))

    def _loss(self, logits: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Each loss, and their weighted sum."""
        if self.current_epoch == 0 or labels.device.type == "cpu":  # later, on a GPU, the look would stall it
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= logits.shape[1]:
                raise LabelError(
                    f"the data holds label {low if low < 0 else high}, the network has {logits.shape[1]} outputs "
                    f"(labels 0 to {logits.shape[1] - 1}); mend the data or set model.network.params.num_classes",
                    "model.network",
                )
        parts = {name: loss(logits, labels) for name, loss in self.losses.items()}
        for name, part in parts.items():
            if not isinstance(part, Tensor) or part.ndim != 0:
                key = f"model.loss.{name}" if isinstance(self.cfg.model.loss, dict) else "model.loss"
                found = tuple(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
                raise MisfitError(f"{key} gives {found}, not a tensor of one number; torch's take `reduction: mean`")
        weighted = [part if self.weights[name] == 1 else self.weights[name] * part for name, part in parts.items()]
        return parts, weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum()

    def _count(
        self, stage: str, logits: Tensor, labels: Tensor, parts: dict[str, Tensor], loss: Tensor, wanted: bool = False
    ) -> dict[str, Tensor]:
        """Adds a batch to the stage's metrics; returns the batch's own values where wanted."""
        values = {}
        logits = logits.detach().float()
        for name, metric in self._of(stage).items():
            if name == "loss" or name in parts:
                value = (loss if name == "loss" else parts[name]).detach()
                metric.update(value, labels.numel())
            elif wanted:
                value = metric(logits, labels)
            else:
                metric.update(logits, labels)
            if wanted:
                if not isinstance(value, Tensor) or value.numel() != 1:
                    found = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
                    raise MisfitError(f"model.metrics.{name}: gives {found}, not one number; see its `average`")
                values[f"{stage}_{name}"] = value.float().reshape(())
        return values

    def _join(self, stage: str, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch of no rows to metrics that keep lists and have none yet: processes cannot gather a list that
        one of them does not have (torchmetrics 1.9)."""
        for metric in self._of(stage).values():
            if any(isinstance(value, list) and not value for value in metric.metric_state.values()):
                metric.update(logits.detach().float(), labels)

    def _log_epoch(self, stage: str, suffix: str = "") -> None:
        for name, metric in self._of(stage).items():
            self.log(f"{stage}_{name}{suffix}", metric)  # computed over all processes and reset by Lightning

    def _judge(self, stage: str, batch: Batch) -> dict[str, Any]:
        keep = batch["index"] >= 0 if "index" in batch else torch.ones_like(batch["label"], dtype=torch.bool)
        logits, labels = self._judged(batch["image"])[keep], batch["label"][keep]
        if labels.numel():
            self._count(stage, logits, labels, *self._loss(logits, labels))
        else:
            self._join(stage, logits, labels)
        if stage == "val":  # a process without samples too: `pictures` sums over all
            self._remember(batch["image"][keep], logits, labels)
        return self._answers({n: v[keep] for n, v in batch.items()}, logits)

    def _answers(self, batch: Batch, logits: Tensor) -> dict[str, Any]:
        """Columns for the file of predictions, one row per sample."""
        probability, predicted = logits.float().softmax(1).max(1)
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

    def _remember(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Counts label and answer of each validation sample, and keeps the first pictures."""
        classes, predicted = logits.shape[1], logits.argmax(1)
        pairs = torch.bincount(labels * classes + predicted, minlength=classes * classes).view(classes, classes)
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

    # ---- travelling

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.image_spec is not None:
            checkpoint[self.kind] = {"image_spec": self.image_spec.to_dict(), "class_names": self.class_names}
        epoch: Any = self.trainer.fit_loop.epoch_progress.current
        if epoch.processed < epoch.ready:  # inside an epoch
            checkpoint["train_metrics"] = {name: _state_of(metric) for name, metric in self._of("train").items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._counted = checkpoint.get("train_metrics", {})
        if self.image_spec is None and self.kind in checkpoint:
            saved = checkpoint[self.kind]
            self._describe(ImageSpec.from_dict(saved["image_spec"]), saved["class_names"])

    def inference_model(self) -> nn.Module:
        """uint8 (N, C, H, W) to probabilities float32 (N, K), on the CPU, in eval mode."""
        if self.network is None or self.normalise is None:
            raise MisfitError("the data module gave no `image_spec`: there is nothing to prepare pictures by")
        return Classifier(self.normalise, self.network).cpu().float().eval()


def _state_of(metric: Metric) -> dict[str, Any]:
    """What a metric has counted over all processes; asked on each."""
    with metric.sync_context(should_sync=torch.distributed.is_available() and torch.distributed.is_initialized()):
        return {name: [*v] if isinstance(v, list) else v.clone() for name, v in metric.metric_state.items()}


def _restore(metric: Metric, state: dict[str, Any]) -> None:
    for name, now in metric.metric_state.items():
        if name in state:
            saved = state[name] if isinstance(state[name], list) else [state[name]]
            saved = [value.to(metric.device) for value in saved]
            setattr(metric, name, saved if isinstance(now, list) else saved[0])
