"""Correct at each step what Lightning 2.6 does otherwise: ends of streams, schedules, validations, logging, losses that
are no numbers."""

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
from pytorch_lightning.callbacks import GradientAccumulationScheduler
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
    """Give every process rank 0's buffers, such as the running means of batch norm, before what is learned is judged:
    a validation's values are those of the checkpoint, and of a run that resumes from it.

    Else each process would judge by its own: ddp shares buffers at training steps alone, other engines never (torch
    2.15; a resnet18's val_loss was 0.2 % off under ddp's two processes, and another under fsdp's).
    """

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and trainer.world_size > 1:
            for buffer in pl_module.buffers():
                distributed.broadcast(buffer, 0)


class AccumulateFrom(Callback):
    """Accumulate the gradients of `factor` batches from an epoch on.

    Lightning's GradientAccumulationScheduler forgets the factor where a run resumes inside an epoch, and a Trainer that
    is made with a factor refuses each task that steps its optimizers itself, also one that heeds the factor (2.6.6).
    """

    def __init__(self, epoch: int, factor: int):
        self.epoch, self.factor = epoch, factor

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        return self.factor if epoch >= self.epoch else 1

    def _set(self, trainer: Trainer, *_: object, **__: object) -> None:
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    setup = on_train_start = on_train_epoch_start = _set  # in `setup`, since schedules ask how many steps there are


class StepCountingTrainer(pl.Trainer):
    """Lightning's Trainer (2.6.6), whose `estimated_stepping_batches` counts each epoch with its own accumulation."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the training; infinite for data without a length if `max_steps` is not set.

        Lightning applies the current accumulation to all epochs, and returns -1 for data without a length.
        """
        total = super().estimated_stepping_batches
        if total < 0:
            return math.inf
        own: Any = self  # Lightning sets `callbacks` without a type
        kinds = AccumulateFrom | GradientAccumulationScheduler
        later = next((callback for callback in own.callbacks if isinstance(callback, kinds)), None)
        batches, epochs = self.num_training_batches, self.max_epochs
        if later is None or epochs is None or epochs < 0 or not math.isfinite(batches):
            return total
        steps = sum(math.ceil(batches / later.get_accumulate_grad_batches(epoch)) for epoch in range(epochs))
        return steps if self.max_steps < 0 else min(steps, self.max_steps)


class StreamEnds(Callback):
    """End an epoch where its stream ends, whatever number of batches the stream's length promises; of several
    processes, where the shortest stream ends.

    Lightning 2.6 believes the length: a shorter stream is never validated, and of a longer one the rest is not read.
    Where a process has fewer batches than another, that one waits for ever. Other data whose length is wrong end the
    run. `FitLoop.max_batches` is the number of batches that are expected, and
    `Trainer.val_check_batch` the number of the batch that is validated next.
    """

    def __init__(self) -> None:
        self._promised: float = 0  # batches of an epoch; 0: nothing to correct
        self._is_resumed = self._is_warned = self._is_first = False
        self._is_cut = False  # whether streams of the processes have unequal lengths
        self._flags: Any = None  # the group that tells the end of a stream; None: nothing to tell

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        self._is_resumed = self._is_first = loop.epoch_loop.batch_progress.current.ready > 0
        if math.isfinite(loop.max_batches) and _is_stream(trainer.train_dataloader) and read_ahead(trainer):
            self._promised = loop.max_batches
        self._flags = None
        if trainer.world_size > 1 and distributed.is_initialized() and (ahead := batches_ahead(trainer)) is not None:
            # Flags travel beside the device's queue: NCCL would have each step wait for it.
            nccl = distributed.get_backend() == "nccl"
            self._flags = distributed.new_group(backend="gloo") if nccl else distributed.group.WORLD
            self._warn_of_copies(trainer, ahead)

    def _warn_of_copies(self, trainer: Trainer, ahead: list[Any]) -> None:
        """Warn if two processes have read the same first batch."""
        digests: list[tuple[int, str]] = [(0, "")] * trainer.world_size
        mine = (trainer.global_rank, _digest(ahead[0]) if ahead else "")
        distributed.all_gather_object(digests, mine, group=self._flags)
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
        if self._flags is not None:
            ended = torch.tensor(int(progress.is_last_batch))
            distributed.all_reduce(ended, distributed.ReduceOp.SUM, self._flags)
            progress.is_last_batch = bool(ended)
            if 0 < ended < trainer.world_size and not self._is_cut:
                self._is_cut = True
                log.warning(
                    "%s has unequal lengths: each epoch ends for all after %d batches, where the shortest ends. Divide "
                    "the samples evenly",
                    *(_stream_name(trainer), progress.current.ready),
                )
        batches, is_last = progress.current.ready, progress.is_last_batch
        if not self._promised or is_last == (batches == loop.max_batches):
            return
        if not is_last and (self._is_resumed or trainer.limit_train_batches != 1):
            return  # a resumed stream starts from its beginning
        if is_last and not self._is_warned and not self._is_cut:
            self._is_warned = True
            log.warning(
                "epoch %d of the training data has %d batches, their length says %d; each epoch ends where they end",
                *(trainer.current_epoch + 1, batches, self._promised),
            )
        loop.max_batches = batches if is_last else math.inf
        if trainer.val_check_interval == 1:
            trainer.val_check_batch = loop.max_batches

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse data of another length than they promise.

        Raises:
            SetupError: the data ended before the number of batches that their length promises.
            RunError: the stream of this process has no samples, and others wait for it.
        """
        loop = trainer.fit_loop
        batches = loop.epoch_loop.batch_progress
        if self._flags is not None and batches.current.ready == 0:
            name, epoch = _stream_name(trainer), trainer.current_epoch + 1
            raise RunError(
                f"{name} has 0 batches for rank {trainer.global_rank} in epoch {epoch}, and the other ranks have some; "
                "give each process at least one batch"
            )
        has_stopped = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        is_whole = batches.is_last_batch or batches.current.ready >= loop.max_batches
        is_first, self._is_first = self._is_first, False
        if not (has_stopped or is_whole or is_first):  # a resumed run may have batches of another size
            raise SetupError(
                f"epoch {trainer.current_epoch + 1} of the training data has {batches.current.ready} batches, but "
                f"their length says {loop.max_batches}; correct the length of the loader that data.module makes"
            )


def _stream_name(trainer: Trainer) -> str:
    """Return what to call the training data: the class of their dataset, else that of the loader."""
    loader = trainer.train_dataloader
    return f"the training stream {type(getattr(loader, 'dataset', loader)).__name__}"


def _digest(batch: object) -> str:
    """Return a digest of the tensors in a batch; "": it has none."""
    tensors: list[torch.Tensor] = []
    apply_to_collection(batch, torch.Tensor, tensors.append)
    flat = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors)
    found = b"".join(values.view(torch.uint8).numpy().tobytes() for values in flat)
    return hashlib.sha256(found).hexdigest() if found else ""


def _is_stream(loader: Any) -> bool:
    """Return whether a loader reads a stream, and cannot resume in it: that would count the batch that is ahead."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset) and not hasattr(loader, "state_dict")


class ScheduleSteps(Callback):
    """Advance a schedule of ours by steps with each, or each n-th, step that its optimizer has taken, and any one by a
    metric of the validation in the epochs that are validated.

    Lightning 2.6 counts batches, accumulated ones too, and advances where the scaler of precision 16 has left a step
    out because its gradients were no numbers. Where an epoch is not validated, it ends the run.
    """

    def __init__(self) -> None:
        self._every: list[tuple[LRSchedulerConfig, int]] = []  # schedules, with their frequency
        self._hooks: list[RemovableHandle] = []
        self._due: list[LRSchedulerConfig] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epochs = trainer.check_val_every_n_epoch or 1
        for config in trainer.lr_scheduler_configs:
            if config.interval == "epoch" and config.reduce_on_plateau and stage_of(config.monitor or "")[0] == "val":
                config.frequency = math.lcm(config.frequency, epochs)
        if type(pl_module).configure_optimizers.__module__.startswith("deeplightning."):  # else as under Lightning
            self._every = [(c, c.frequency) for c in trainer.lr_scheduler_configs if _by_optimizer_steps(c)]
        for config, _ in self._every:
            hook = functools.partial(self._taken, config)
            self._hooks.append(config.scheduler.optimizer.register_step_post_hook(hook))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._due = [config for config, every in self._every if (trainer.global_step + 1) % every == 0]
        for config, _ in self._every:
            config.frequency = batch_idx + 2  # not after this batch, unless the optimizer steps

    def _taken(self, config: LRSchedulerConfig, *_: object) -> None:
        if config in self._due:
            config.frequency = 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._hooks:
            hook.remove()
        for config, every in self._every:
            config.frequency = every
        self._hooks, self._every = [], []


def _by_optimizer_steps(config: LRSchedulerConfig) -> bool:
    """Return whether a schedule goes by steps, of an optimizer that tells when it has taken one."""
    optimizer = getattr(config.scheduler, "optimizer", None)
    return config.interval == "step" and isinstance(optimizer, torch.optim.Optimizer)


@cache
def ends_of_parts(batches: float, share: float) -> frozenset[int]:
    """Return the batches of an epoch at which its parts end: of 9 and 0.5 the 4th and the 9th. All of them where a part
    is no more than a batch; none where the epoch's length is not known."""
    if not math.isfinite(batches):
        return frozenset()
    if batches * share <= 1:
        return frozenset(range(1, int(batches) + 1))
    return frozenset([int(batches), *(round(batches * share * n) for n in range(1, math.ceil(1 / share)))])


class ValidateParts(Callback):
    """Validate each part of an epoch when it is over, the last one with the epoch.

    Lightning 2.6 validates after each so many batches, rounded down: of 9 and 0.5 after the 4th and the 8th, and never
    what an epoch has learned at its end. `Trainer.val_check_batch` is the number of the batch that is validated next.
    """

    def __init__(self, share: float):
        self.share = share

    def _look(self, trainer: Trainer, *_: object, **__: object) -> None:
        batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        due = batch in ends_of_parts(trainer.num_training_batches, self.share)
        trainer.val_check_batch = batch if due else math.inf

    on_train_start = on_train_batch_start = _look


class LogSteps(Callback):
    """Let through what is logged at steps 0, n, 2n …, the learning rate among it.

    Lightning itself, its LearningRateMonitor included, logs at steps n-1, 2n-1 …; `Trainer.log_every_n_steps` is 1 at
    the steps that are due and `sys.maxsize` at the others, which a task can ask to save itself the work. Many tasks
    divide by it: `batch_idx % self.trainer.log_every_n_steps == 0`.

    Args:
        every: steps between points, or a mapping {"per_epoch": points}.
    """

    def __init__(self, every: int | Mapping[str, int]):
        self.every = every
        self._logged = -1  # the step of the last points

    def on_train_start(self, *_: object) -> None:
        self._logged = -1

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        every = self.every
        if isinstance(every, Mapping):
            steps = trainer.num_training_batches / trainer.accumulate_grad_batches
            every = max(1, math.floor(steps / every["per_epoch"])) if math.isfinite(steps) else 1
        step = logged_steps(trainer)  # also of a task with several optimizers, whose steps Lightning adds up
        is_due = step % every == 0
        trainer.log_every_n_steps = 1 if is_due else sys.maxsize
        if is_due and step != self._logged:
            self._logged = step
            # Where a task has no optimizer, Lightning puts one without groups in its place.
            groups = [optimizer.param_groups[0] for optimizer in trainer.optimizers if optimizer.param_groups]
            named = {"lr": groups[0]["lr"]} if groups else {}
            if len(groups) > 1:  # by the name that a task gave to the first group of each, else by its number
                named |= {f"lr-{group.get('name', number)}": group["lr"] for number, group in enumerate(groups)}
            points = {name: float(rate) for name, rate in named.items()}
            trainer.callback_metrics.update({name: torch.tensor(rate) for name, rate in points.items()})
            for logger in trainer.loggers:  # Lightning's `log` would have some work at each step until the epoch ends
                logger.log_metrics({"epoch": trainer.current_epoch, **points}, step)


class FiniteLoss(Callback):
    """End the run at the first loss that is not a number, before it spoils the weights.

    On a GPU, where looking at once costs a wait, the loss of a logged step is looked at when the next one is logged,
    and that of the last step before weights are validated or saved, so that no spoilt ones are kept.
    """

    def __init__(self) -> None:
        self._logged: tuple[transfer.Deferred, int, int] | None = None  # with its step and epoch
        self._last: tuple[torch.Tensor, int, int] | None = None

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if not transfer.is_asynchronous(loss.device):
            _require_finite(loss.item(), trainer.global_step, trainer.current_epoch)
            return
        self._last = loss.detach(), trainer.global_step, trainer.current_epoch
        if trainer.log_every_n_steps < sys.maxsize:
            self._judge_logged()
            self._logged = transfer.Deferred(loss), trainer.global_step, trainer.current_epoch

    def on_fit_end(self, *_: object) -> None:
        self._logged = self._last = None

    def _judge_logged(self) -> None:
        logged, self._logged = self._logged, None
        if logged is not None:
            _require_finite(logged[0].read()[0], *logged[1:])

    def _judge_last(self, *_: object, **__: object) -> None:
        self._judge_logged()
        last, self._last = self._last, None
        if last is not None:
            _require_finite(last[0].item(), *last[1:])

    on_validation_start = on_train_epoch_end = on_save_checkpoint = _judge_last


def _require_finite(value: float, step: int, epoch: int) -> None:
    if not math.isfinite(value):
        raise RunError(
            f"train_loss is {value} at step {step} (epoch {epoch + 1}). A smaller learning rate or "
            "`train.gradient_clip` may help, or the data contain NaN or infinity"
        )
