"""Correct Lightning 2.6's behaviour at each step: ends of streams, schedules, validation, logging and non-finite
losses."""

import functools
import hashlib
import logging
import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch import distributed
from torch.utils.data import IterableDataset
from torch.utils.hooks import RemovableHandle

from deeplightning import transfer
from deeplightning.faults import RunError, SetupError
from deeplightning.private.lightning import batches_ahead, logged_steps, read_ahead
from deeplightning.words import stage_of

log = logging.getLogger("deeplightning")


class SameBuffers(Callback):
    """Broadcast rank 0's buffers, such as the running means of batch norm, before validation, so that its metrics are
    those of the checkpoint and of a run that resumes from it.

    Otherwise each process validates with its own: ddp broadcasts buffers only in training steps, other engines never
    (torch 2.15; the val_loss of a resnet18 was 0.2 % off with two ddp processes, and differed again with fsdp).
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and trainer.world_size > 1:
            from deeplightning.engine.process_group import broadcast_buffers
            from deeplightning.private.torch import buffers_of_all

            broadcast_buffers(buffers_of_all(pl_module))


class AccumulateFrom(Callback):
    """Accumulate the gradients of `factor` batches, starting at an epoch.

    Lightning's GradientAccumulationScheduler loses the factor if a run resumes inside an epoch, and a Trainer with a
    factor rejects every task with manual optimization, even one that applies the factor (2.6.6).
    """

    def __init__(self, epoch: int, factor: int):
        self.epoch, self.factor = epoch, factor

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        return self.factor if epoch >= self.epoch else 1

    def _set(self, trainer: Trainer, *_: object, **__: object) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    setup = on_train_start = on_train_epoch_start = _set  # in `setup`, since schedules need the number of steps


class StepCountingTrainer(pl.Trainer):
    """Lightning's Trainer (2.6.6) whose `estimated_stepping_batches` uses each epoch's own accumulation factor."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the training; infinite for data without a length if `max_steps` is not set.

        Lightning applies the current accumulation factor to all epochs, and returns -1 for data without a length.
        """
        total = super().estimated_stepping_batches
        if total < 0:
            return math.inf
        own: Any = self  # Lightning sets `callbacks` without a type
        kinds = AccumulateFrom | GradientAccumulationScheduler
        factors = (callback.get_accumulate_grad_batches for callback in own.callbacks if isinstance(callback, kinds))
        factor = next(factors, lambda epoch: self.accumulate_grad_batches)
        # It adds an epoch without steps for batch norm, and knows the number before from its `on_fit_start` on.
        averages = [each for each in own.callbacks if isinstance(each, StochasticWeightAveraging)]
        epochs = min((each.swa_end + 1 for each in averages if hasattr(each, "swa_end")), default=self.max_epochs)
        if epochs is None or not 0 <= epochs < math.inf or not math.isfinite(batches := self.num_training_batches):
            return total
        steps = sum(math.ceil(batches / factor(epoch)) for epoch in range(max(epochs, 1)))
        return steps if self.max_steps < 0 else min(steps, self.max_steps)


class StreamEnds(Callback):
    """End an epoch where its stream ends, whatever its declared length; with several processes, where the shortest
    stream ends.

    Lightning 2.6 relies on the length: it never validates after a shorter stream, and does not read the rest of a
    longer one. If a process has fewer batches than another, the other waits forever. For other data, a wrong length
    ends the run. `FitLoop.max_batches` is the expected number of batches, and `Trainer.val_check_batch` the batch of
    the next validation.
    """

    def __init__(self) -> None:
        self._declared_batches: float = 0  # of an epoch; 0 if there is nothing to correct
        self._is_resumed = self._has_warned = self._is_first = False
        self._has_unequal_lengths = False  # whether the streams of the processes have different lengths
        self._flag_group: Any = None  # process group for end-of-stream flags; None if not needed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        self._is_resumed = self._is_first = loop.epoch_loop.batch_progress.current.ready > 0
        loader: Any = trainer.train_dataloader  # if it has a state, that would include the prefetched batch
        is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset) and not hasattr(loader, "state_dict")
        if math.isfinite(loop.max_batches) and is_stream and read_ahead(trainer):
            self._declared_batches = loop.max_batches
        self._flag_group = None
        if trainer.world_size > 1 and distributed.is_initialized() and (ahead := batches_ahead(trainer)) is not None:
            # Flags are not sent by NCCL: each step would wait for the device's queue.
            nccl = distributed.get_backend() == "nccl"
            self._flag_group = distributed.new_group(backend="gloo") if nccl else distributed.group.WORLD
            self._warn_if_not_sharded(trainer, ahead)

    def _warn_if_not_sharded(self, trainer: Trainer, ahead: list[Any]) -> None:
        """Warn if several processes have read the same first batch."""
        digests: list[tuple[int, str]] = [(0, "")] * trainer.world_size
        mine = (trainer.global_rank, _digest(ahead[0]) if ahead else "")
        distributed.all_gather_object(digests, mine, group=self._flag_group)
        firsts = {part: digest for part, digest in digests if digest}
        if trainer.is_global_zero and len({*firsts.values()}) < len(firsts):
            log.warning(
                "%s is not divided among the processes: %d of them read the same first batch, and each trains on all "
                "samples. Divide it in `__iter__`: itertools.islice(samples, RANK, None, WORLD) with "
                "torch.distributed.get_rank() and get_world_size(), and again by torch.utils.data.get_worker_info()",
                *(_stream_name(trainer), len(firsts)),
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_resumed = False

    def on_train_batch_start(self, trainer: Trainer, *_: object) -> None:
        loop = trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        if self._flag_group is not None:
            ended = torch.tensor(int(progress.is_last_batch))
            distributed.all_reduce(ended, distributed.ReduceOp.SUM, self._flag_group)
            progress.is_last_batch = bool(ended)
            if 0 < ended < trainer.world_size and not self._has_unequal_lengths:
                self._has_unequal_lengths = True
                log.warning(
                    "%s has unequal lengths: each epoch ends for all after %d batches, where the shortest ends. Divide "
                    "the samples evenly",
                    *(_stream_name(trainer), progress.current.ready),
                )
        batches, is_last = progress.current.ready, progress.is_last_batch
        if not self._declared_batches or is_last == (batches == loop.max_batches):
            return
        if not is_last and (self._is_resumed or trainer.limit_train_batches != 1):
            return  # a resumed stream starts at its beginning
        if is_last and not self._has_warned and not self._has_unequal_lengths:
            self._has_warned = True
            log.warning(
                "epoch %d of the training data has %d batches, its length says %d; each epoch ends with its data",
                *(trainer.current_epoch + 1, batches, self._declared_batches),
            )
        loop.max_batches = batches if is_last else math.inf
        if trainer.val_check_interval == 1:
            trainer.val_check_batch = loop.max_batches

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reject data that is shorter than its length.

        Raises:
            SetupError: the data ended before its declared number of batches.
            RunError: the stream of this process has no samples, while others have some.
        """
        loop = trainer.fit_loop
        batches = loop.epoch_loop.batch_progress
        if self._flag_group is not None and batches.current.ready == 0:
            name, epoch = _stream_name(trainer), trainer.current_epoch + 1
            raise RunError(
                f"{name} has 0 batches for rank {trainer.global_rank} in epoch {epoch}, and the other ranks have some; "
                "give each process at least one batch"
            )
        has_stopped = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        is_whole = batches.is_last_batch or batches.current.ready >= loop.max_batches
        is_first, self._is_first = self._is_first, False
        if not (has_stopped or is_whole or is_first):  # a resumed run may have another batch size
            raise SetupError(
                f"epoch {trainer.current_epoch + 1} of the training data has {batches.current.ready} batches, but "
                f"its length says {loop.max_batches}; correct the length of the loader that data.module makes"
            )


def _stream_name(trainer: Trainer) -> str:
    """Return a name for the training data: the class of the dataset, or else of the loader."""
    loader = trainer.train_dataloader
    return f"the training stream {type(getattr(loader, 'dataset', loader)).__name__}"


def _digest(batch: object) -> str:
    """Return a digest of the tensors in a batch; "" if there are none."""
    tensors: list[torch.Tensor] = []
    apply_to_collection(batch, torch.Tensor, tensors.append)
    flat = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors)
    found = b"".join(values.view(torch.uint8).numpy().tobytes() for values in flat)
    return hashlib.sha256(found).hexdigest() if found else ""


class ScheduleSteps(Callback):
    """Advance schedules of our tasks with each, or each n-th, step of their optimizer, and schedules that follow a
    validation metric only in epochs with a validation.

    Lightning 2.6 counts batches, including accumulated ones, and also advances when the gradient scaler of precision 16
    skips a step. In an epoch without a validation, it ends the run with an error.
    """

    def __init__(self) -> None:
        self._frequencies: list[tuple[LRSchedulerConfig, int]] = []  # schedules with their frequency
        self._hooks: list[RemovableHandle] = []
        self._due_schedules: list[LRSchedulerConfig] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epochs = trainer.check_val_every_n_epoch or 1
        for config in trainer.lr_scheduler_configs:
            if config.interval == "epoch" and config.reduce_on_plateau and stage_of(config.monitor or "")[0] == "val":
                config.frequency = math.lcm(config.frequency, epochs)
        if type(pl_module).configure_optimizers.__module__.startswith("deeplightning."):  # otherwise as in Lightning
            self._frequencies = [(c, c.frequency) for c in trainer.lr_scheduler_configs if _advances_by_steps(c)]
        for config, _ in self._frequencies:
            hook = functools.partial(self._on_optimizer_step, config)
            self._hooks.append(config.scheduler.optimizer.register_step_post_hook(hook))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._due_schedules = [config for config, every in self._frequencies if (trainer.global_step + 1) % every == 0]
        for config, _ in self._frequencies:
            config.frequency = batch_idx + 2  # not after this batch, unless the optimizer steps
        if any(c.reduce_on_plateau and stage_of(c.monitor or "")[0] == "train" for c in self._due_schedules):
            trainer.log_every_n_steps = 1  # type: ignore[attr-defined]  # it judges the value of this step

    def _on_optimizer_step(self, config: LRSchedulerConfig, *_: object) -> None:
        if config in self._due_schedules:
            config.frequency = 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        for config, every in self._frequencies:
            config.frequency = every
        self._hooks, self._frequencies = [], []


def _advances_by_steps(config: LRSchedulerConfig) -> bool:
    """Return whether a schedule advances by steps of an optimizer with step hooks, which torch's constructor adds."""
    optimizer: Any = getattr(config.scheduler, "optimizer", None)
    return config.interval == "step" and hasattr(getattr(type(optimizer), "step", None), "hooked")


@cache
def ends_of_parts(batches: float, share: float) -> frozenset[int]:
    """Return the batches at which the parts of an epoch end: for 9 batches and 0.5, the 4th and the 9th. All batches if
    a part is at most one batch; none if the epoch's length is unknown."""
    if not math.isfinite(batches):
        return frozenset()
    if batches * share <= 1:
        return frozenset(range(1, int(batches) + 1))
    return frozenset([int(batches), *(round(batches * share * n) for n in range(1, math.ceil(1 / share)))])


class ValidateParts(Callback):
    """Validate at the end of each part of an epoch, the last one at the end of the epoch.

    Lightning 2.6 rounds the batches per part down: for 9 batches and 0.5 it validates after the 4th and the 8th, and
    never at the end of an epoch. `Trainer.val_check_batch` is the batch of the next validation.
    """

    def __init__(self, share: float):
        self.share = share

    def _set_next_validation(self, trainer: Trainer, *_: object, **__: object) -> None:
        batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        due = batch in ends_of_parts(trainer.num_training_batches, self.share)
        trainer.val_check_batch = batch if due else math.inf

    on_train_start = on_train_batch_start = _set_next_validation


class LogSteps(Callback):
    """Log only at steps 0, n, 2n …, including the learning rate.

    Lightning, including its LearningRateMonitor, logs at steps n-1, 2n-1 …. This callback sets
    `Trainer.log_every_n_steps` to 1 at the steps to log and to `sys.maxsize` at the others, where a task can skip work.
    It stays a number since many tasks compute `batch_idx % self.trainer.log_every_n_steps == 0`.

    Args:
        every: steps between two points, or {"per_epoch": number of points}.
    """

    def __init__(self, every: int | Mapping[str, int]):
        self.every = every
        self._logged = -1  # the last logged step

    def on_train_start(self, trainer: Any, *_: object) -> None:
        self._logged = -1
        _show_rates(trainer)  # a resumed run may have no step to log in its first epoch

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        every = self.every
        if isinstance(every, Mapping):
            steps = trainer.num_training_batches / trainer.accumulate_grad_batches
            every = max(1, math.floor(steps / every["per_epoch"])) if math.isfinite(steps) else 1
        step = logged_steps(trainer)  # with several optimizers, Lightning's own counter adds up their steps
        is_due = step % every == 0
        trainer.log_every_n_steps = 1 if is_due else sys.maxsize
        if is_due and step != self._logged:
            self._logged = step
            points = _show_rates(trainer)
            for logger in trainer.loggers:  # Lightning's `log` would cost time at each step of the epoch
                logger.log_metrics({"epoch": trainer.current_epoch, **points}, step)


def _show_rates(trainer: Any) -> dict[str, float]:
    """Return the learning rates by name, and add them to the trainer's metrics."""
    # Without an optimizer in the task, Lightning uses one without groups.
    groups = [optimizer.param_groups[0] for optimizer in trainer.optimizers if optimizer.param_groups]
    named = {"lr": groups[0].get("lr")} if groups else {}
    if len(groups) > 1:  # by the name of the first group of each, or else its number
        named |= {f"lr-{group.get('name', number)}": group.get("lr") for number, group in enumerate(groups)}
    points = {name: float(rate) for name, rate in named.items() if rate is not None}  # Adafactor may have none
    trainer.callback_metrics.update({name: torch.tensor(rate) for name, rate in points.items()})
    return points


class FiniteLoss(Callback):
    """End the run at the first non-finite loss, before it corrupts the weights.

    On a GPU, where reading the loss blocks, that of a logged step is checked when the next one is logged, and that of
    the last step before weights are validated or saved, so that no corrupt weights are kept.
    """

    def __init__(self) -> None:
        self._logged: tuple[transfer.Deferred, int, int] | None = None  # with its step and epoch
        self._last: tuple[torch.Tensor, int, int] | None = None

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: torch.Tensor) -> None:
        loss = loss.detach().float().sum() if loss.ndim else loss  # `manual_backward(outputs, gradient=…)`
        if not transfer.is_asynchronous(loss.device):
            _require_finite(loss.item(), trainer.global_step, trainer.current_epoch)
            return
        self._last = loss.detach(), trainer.global_step, trainer.current_epoch
        if trainer.log_every_n_steps < sys.maxsize:
            self._check_logged()
            self._logged = transfer.Deferred(loss), trainer.global_step, trainer.current_epoch

    def on_fit_end(self, *_: object) -> None:
        self._logged = self._last = None

    def _check_logged(self) -> None:
        logged, self._logged = self._logged, None
        if logged is not None:
            _require_finite(logged[0].read()[0], *logged[1:])

    def _check_last(self, *_: object, **__: object) -> None:
        self._check_logged()
        last, self._last = self._last, None
        if last is not None:
            _require_finite(last[0].item(), *last[1:])

    on_validation_start = on_train_epoch_end = on_save_checkpoint = _check_last


def _require_finite(value: float, step: int, epoch: int) -> None:
    if not math.isfinite(value):
        raise RunError(
            f"train_loss is {value} at step {step} (epoch {epoch + 1}). A smaller learning rate or "
            "`train.gradient_clip` may help, or the data contain NaN or infinity"
        )
