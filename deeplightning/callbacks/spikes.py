"""Skip optimizer steps whose loss jumps, and load the last checkpoint after several: Lightning's SpikeDetection ends
the run at the first one.

`train.callbacks` names `LossSpikes`. A loss that is not a number always ends the run, see
`deeplightning.callbacks.steps.FiniteLoss`.
"""

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from deeplightning.callbacks import callback_of
from deeplightning.callbacks.record import Record
from deeplightning.faults import ConfigError, Fault, count

if TYPE_CHECKING:
    from torch.amp import GradScaler

log = logging.getLogger("deeplightning")

_STATE = ("spikes", "_in_a_row", "_seen", "_mean", "_variance")  # attributes that a checkpoint keeps


class LossSpikes(Callback):
    """Skip the optimizer steps whose loss is far above the recent ones.

    A loss is a spike when it is above their exponential mean by more than `threshold` standard deviations. Its
    gradients are dropped, so that weights and the optimizer's state stay; the step is counted as usual. After
    `roll_back` spikes in a row weights and the optimizer's state are taken from `last.ckpt`; batches and schedules
    continue. Spikes are reported, and counted as the metric `loss_spikes`.

    Reading each loss makes a GPU wait in each step.

    Args:
        threshold: standard deviations above the mean, above 0.
        memory: how many losses the mean is of, about; at least 2. As many come before the first judgement.
        roll_back: spikes in a row, at least 1; None: never.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, threshold: float = 6.0, memory: int = 50, roll_back: int | None = None):
        if threshold <= 0:
            raise ValueError(f"threshold: must be above 0, not {threshold}")
        if memory < 2:
            raise ValueError(f"memory: must be at least 2, not {memory}")
        if roll_back is not None and roll_back < 1:
            raise ValueError(f"roll_back: must be at least 1, or null, not {roll_back}")
        self.threshold, self.memory, self.roll_back = threshold, memory, roll_back
        self.spikes = 0
        self._in_a_row = self._seen = 0
        self._mean = self._variance = 0.0
        self._losses: list[torch.Tensor] = []  # of the batches of this step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """
        Raises:
            ConfigError: the task steps its optimizers itself.
        """
        if not pl_module.automatic_optimization:
            message = "LossSpikes leaves out steps that Lightning takes, and this task steps its optimizers itself"
            raise ConfigError(Fault(message, "train.callbacks"))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler is not None else 1.0
        self._losses.append(loss.detach() * (trainer.accumulate_grad_batches / scale))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        loss = torch.stack(self._losses).mean()
        self._losses.clear()
        value = float(trainer.strategy.reduce(loss, reduce_op="mean"))  # all processes decide the same
        limit = self._mean + self.threshold * math.sqrt(self._variance)
        if self._seen < self.memory or value <= limit:
            self._in_a_row = 0
            self._note(value)
            return
        self.spikes += 1
        self._in_a_row += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        where = f"step {trainer.global_step} (epoch {trainer.current_epoch + 1})"
        if trainer.is_global_zero:
            log.warning(
                "train_loss is %.4g at %s, above %.4g: the step is left out (%s so far)",
                *(value, where, limit, count(self.spikes, "spike")),
            )
        self._log(trainer)
        if self.roll_back is not None and self._in_a_row >= self.roll_back:
            self._in_a_row = 0
            self._go_back(trainer)

    def _note(self, value: float) -> None:
        self._seen += 1
        share = 1 / min(self._seen, self.memory)
        difference = value - self._mean
        self._mean += share * difference
        self._variance = (1 - share) * (self._variance + share * difference**2)

    def _log(self, trainer: Trainer) -> None:
        trainer.callback_metrics["loss_spikes"] = torch.tensor(float(self.spikes))
        for logger in trainer.loggers:
            logger.log_metrics({"loss_spikes": float(self.spikes)}, trainer.global_step)

    def _go_back(self, trainer: Any) -> None:
        """Load weights and the optimizer's state from the last checkpoint, if there is one."""
        path = callback_of(trainer, Record).folder.last
        if not trainer.strategy.broadcast(path.is_file()):
            in_a_row = count(self.roll_back or 0, "spike")
            log.warning("%s in a row, and there is no checkpoint yet to go back to", in_a_row)
            return
        checkpoint = trainer.strategy.checkpoint_io
        checkpoint.writer.wait()
        content = checkpoint.load_checkpoint(path)
        if saved := (content.get("averaging") or {}).get("weights"):
            content["state_dict"] = {**content["state_dict"], **saved}
        trainer.strategy.load_model_state_dict(content, strict=True)
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        trainer.strategy.load_optimizer_state_dict(content)
        for optimizer, own in zip(trainer.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate  # schedules continue
        if trainer.is_global_zero:
            step = content.get("global_step")
            log.warning("%s in a row: back to the weights of step %s", count(self.roll_back or 0, "spike"), step)

    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state_dict[name.lstrip("_")])
